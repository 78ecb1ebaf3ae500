"""Where requests come from, and how much CPU time each such source may have lockd spend."""

from __future__ import annotations

import ipaddress
import time

MOST_SOURCES = 4096
"""Of more, those are forgotten that have cost nothing for longest."""

LOOPBACK = "loopback"
"""The source that all are on this host."""


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def source_of(address: str) -> str:
    """Whoever can choose between some addresses is one source: a /64 of IPv6, and this host itself."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # of a socket that is not of IP
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.is_loopback:
        return LOOPBACK
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


class Allowance:
    """Lets each source spend `share` of a processor, and up to `saved` seconds that it has not spent before.

    What something costs is known when it is done. So a source may begin as long as anything is left.
    """

    def __init__(self, share: float, saved: float) -> None:
        self._saved = saved
        self.change(share)
        self._paid_until: dict[str, float] = {}
        """When each has made up for what it has spent; who spent last comes last."""

    def change(self, share: float) -> None:
        """Let each spend this share from now on."""
        self._share, self._most_ahead = share, self._saved / share

    def spend(self, source: str, seconds: float) -> None:
        now = time.monotonic()
        until = max(self._paid_until.pop(source, now), now)
        self._paid_until[source] = until + seconds / self._share
        if len(self._paid_until) > MOST_SOURCES:
            del self._paid_until[next(iter(self._paid_until))]

    def seconds_until_some(self, source: str) -> float:
        """Until something is left for it; 0: there is."""
        return max(self._paid_until.get(source, 0.0) - time.monotonic() - self._most_ahead, 0.0)
