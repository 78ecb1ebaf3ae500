"""The sources of requests, and the CPU time that the exporter spends on each source."""

from __future__ import annotations

import ipaddress
import time

MOST_SOURCES = 4096
"""Sources that an Allowance stores. If there are more, it forgets those that have not spent for longest."""

LOOPBACK = "loopback"
"""The source of all requests from loopback addresses, such as 127.0.0.1 and ::1."""


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def source_of(address: str) -> str:
    """The source of a request from `address`.

    Addresses among which one client can choose are one source: those of an IPv6 network of 64 bits, and all
    loopback addresses. An address that is no IP address is a source by itself.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # the socket is not an IP socket
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.is_loopback:
        return LOOPBACK
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


class Allowance:
    """Lets each source spend CPU time: `share` of a processor, and up to `saved` seconds that it has saved.

    The cost of a request is not known before it is answered. So a source may spend as long as anything is
    left, even if the request then costs more.
    """

    def __init__(self, share: float, saved: float) -> None:
        self._share, self._saved = share, saved
        self._paid_until: dict[str, float] = {}
        """The time on the monotonic clock when the share of a source has covered what the source has spent.

        The source that spent last comes last.
        """

    def set_share(self, share: float) -> None:
        """Set the share of a processor that each source may spend.

        If the share changes, what the sources owe is forgotten.
        """
        if share != self._share:
            self._share = share
            self._paid_until.clear()  # these times were computed from the old share

    def spend(self, source: str, seconds: float) -> None:
        """Charge the source with CPU seconds."""
        now = time.monotonic()
        until = max(self._paid_until.pop(source, now), now)
        self._paid_until[source] = until + seconds / self._share
        if len(self._paid_until) > MOST_SOURCES:
            del self._paid_until[next(iter(self._paid_until))]

    def seconds_until_allowed(self, source: str) -> float:
        """Seconds until the source may spend CPU time again; 0 if it may now."""
        return max(self._paid_until.get(source, 0.0) - time.monotonic() - self._saved / self._share, 0.0)
