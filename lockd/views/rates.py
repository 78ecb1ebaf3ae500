"""From the daemon's running totals to what happened between two looks at it."""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import re
import ssl
import urllib.parse
from base64 import b64encode
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from lockd.errors import LockdError, UsageError

MOST_ROWS = 1000
"""The daemon gives at most as many, the ones that matter most; more is an error to it."""
LARGEST_ANSWER = 256 * 1_048_576
TIMEOUT_S = 10
MOST_NUMBER = 2**63
NOT_AS_AGREED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading JSON of another shape than expected raises."""


@dataclass(frozen=True)
class Row:
    """One thread or one lock. Blocked time includes waits that are still going on.

    A wait that lasts ten minutes thus counts while it lasts, not all at once when it ends.
    """

    key: Hashable
    program: str
    kind: str
    unit: str
    comm: str
    tgid: int
    lock: str
    blocked_us: int
    count: int
    max_us: int
    waiting_us: int
    """For a thread how long its wait has lasted so far."""
    waiting: int
    """Threads that are blocked now."""
    waiting_is_least: bool = False
    """Whether a thread's wait is older than the daemon, and `waiting_us` only what is known of it."""
    threads: int = 1
    holder: str = ""
    """The thread that had the lock when it was last asked, while others waited for it."""
    holder_tid: int = 0
    """0: nobody known."""
    site: str = ""
    tid: int = 0
    thread_comm: str = ""
    advice: str = ""
    """Of the thread's process, a key of ADVICE."""
    held_us: int = 0
    """How long a kernel lock was held, and still is."""
    acquired: int = 0
    max_held_us: int = 0
    holding_us: int = 0
    """How long the lock has been held by who has held it longest; 0: nobody holds it."""
    blocked_rate: float = 0.0
    """Seconds blocked a second, which is how many threads were blocked on average."""
    count_rate: float = 0.0
    held_rate: float = 0.0
    """Seconds held a second; of readers there may be many at a time."""
    acquired_rate: float = 0.0


@dataclass(frozen=True)
class Table:
    """The threads or the locks at one moment of the daemon's clock."""

    time: float
    rows: tuple[Row, ...]
    complete: bool = True
    """Whether the daemon had no more rows than these."""
    has_holds: bool = False
    """Whether the daemon says how long locks are held: it runs in mode `all`."""


class Client:
    """Asks one daemon; every failure becomes a LockdError that names the URL."""

    def __init__(self, url: str, insecure: bool = False) -> None:
        shown = re.sub("//.*@", "//", url)  # no password in a message, not even to its owner
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"argument --url: {shown!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise UsageError(f"argument --url: {shown!r} does not look like http://HOST:PORT")
        self._host, self._port, self._path = host, port, parts.path.rstrip("/")
        self._tls = _tls(insecure) if parts.scheme == "https" else None
        self._headers = {"Accept": "application/json"}
        if parts.username is not None:
            user = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}").encode()
            self._headers["Authorization"] = f"Basic {b64encode(user).decode()}"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"

    def threads(self) -> Table:
        return self._table("threads", _thread)

    def locks(self) -> Table:
        return self._table("locks", _lock)

    def _table(self, name: str, row: Any) -> Table:
        answer = self._get(f"/api/v1/{name}?limit={MOST_ROWS}")
        try:
            found = json.loads(answer)
            rows = tuple(_merged(map(row, found[name])))
            has_holds = any("held_us" in each for each in found[name])
            time = round(float(found["time"]), 6)
            if not math.isfinite(time):
                raise ValueError(f"the time is {time}")
            return Table(time, rows, len(found[name]) < MOST_ROWS, has_holds)
        except NOT_AS_AGREED as error:
            says = f"{type(error).__name__}: {error}"
            raise LockdError(f"{self.url}/api/v1/{name} is not an answer of lockd: {says}") from None

    def _get(self, path: str) -> bytes:
        # http.client follows no redirect, so the password goes nowhere else, and uses no proxy.
        connection = (
            http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._tls)
            if self._tls
            else http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        )
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            response = connection.getresponse()
            body = response.read(LARGEST_ANSWER)
        except ConnectionRefusedError:
            raise LockdError(
                f"no daemon answers at {self.url}; start it with: lockd run\n"
                "or say where it is with: lockd top --url=URL"
            ) from None
        except ssl.SSLCertVerificationError as error:
            says = f"{error.verify_message}; --insecure takes it all the same"
            raise LockdError(f"{self.url}: its certificate is not trusted: {says}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            says = str(error) or type(error).__name__
            raise LockdError(f"no daemon answers at {self.url}: {says}; start it with: lockd run") from None
        finally:
            connection.close()
        if response.status == 401:
            raise LockdError(
                f"{self.url} wants a user name and password (401): write them into the URL, "
                "https://USER:PASSWORD@HOST:PORT"
            )
        if response.status != 200:
            says = f"{response.status} {response.reason}"
            raise LockdError(
                f"{self.url}{path.partition('?')[0]} answered {says}, which lockd does not when it runs"
            )
        return body


class Rates:
    """Turns each table into one with rates, by the difference to the table before it."""

    def __init__(self) -> None:
        self._before: Table | None = None

    def feed(self, table: Table) -> Table | None:
        """The table with rates, or None where there is nothing to compare it with.

        That is the first table, one that is no newer than the last, and one whose clock was set
        back.
        """
        before = self._before
        if before is not None and table.time == before.time:
            return None
        self._before = table
        if before is None or table.time < before.time:
            return None
        seconds = table.time - before.time
        known = {row.key: row for row in before.rows}

        def rated(row: Row) -> Row:
            # What was not among the rows before is new, or only was too small to be among them.
            return _rated(row, known.get(row.key, None if before.complete else row), seconds)

        return dataclasses.replace(table, rows=tuple(map(rated, table.rows)))


def _rated(row: Row, before: Row | None, seconds: float) -> Row:
    """What is new in a row; all of it where the row is new or the daemon lost its counts."""
    blocked, count = row.blocked_us, row.count
    if before is not None and count >= before.count:
        # A wait that a filter leaves out at its end takes back what it counted while it lasted.
        blocked, count = max(0, blocked - before.blocked_us), count - before.count
    held, acquired = row.held_us, row.acquired
    if before is not None and acquired >= before.acquired:
        # Of several holds that go on only the longest is known.
        held, acquired = max(0, held - before.held_us), acquired - before.acquired
    return dataclasses.replace(
        row,
        blocked_rate=blocked / 1e6 / seconds,
        count_rate=count / seconds,
        held_rate=held / 1e6 / seconds,
        acquired_rate=acquired / seconds,
    )


def _merged(rows: Iterable[Row]) -> Iterable[Row]:
    """Rows of one key made one: the sums, under the names of the row that waits or waited most."""
    merged: dict[Hashable, Row] = {}
    for row in rows:
        same = merged.get(row.key)
        if same is not None:
            most = max(same, row, key=lambda r: (r.waiting_us, r.blocked_us, r.held_us))
            row = dataclasses.replace(
                most,
                blocked_us=same.blocked_us + row.blocked_us,
                count=same.count + row.count,
                max_us=max(same.max_us, row.max_us),
                waiting=same.waiting + row.waiting,
                held_us=same.held_us + row.held_us,
                acquired=same.acquired + row.acquired,
                max_held_us=max(same.max_held_us, row.max_held_us),
                holding_us=max(same.holding_us, row.holding_us),
            )
        merged[row.key] = row
    return merged.values()


def _thread(raw: dict[str, Any]) -> Row:
    waiting = _whole(raw["waiting_us"] or 0)
    tid, tgid = _whole(raw["tid"]), _whole(raw["tgid"])
    key = (raw["program"], tid, tgid, raw["kind"])
    return Row(
        **_common(raw, key, waiting),
        waiting=int(waiting > 0),
        waiting_is_least=bool(raw.get("waiting_is_least")),
        tid=tid,
        thread_comm=str(raw["thread_comm"] or ""),
        advice=str(raw.get("advice") or ""),
    )


def _lock(raw: dict[str, Any]) -> Row:
    key = (raw["program"], _whole(raw["tgid"]), raw["address"], raw["kind"])
    holding_us = _whole(raw.get("holding_us") or 0)
    return Row(
        **_common(raw, key, _whole(raw.get("waiting_us") or 0)),
        waiting=_whole(raw["waiting"]),
        threads=_whole(raw["threads"]),
        holder=str(raw.get("holder") or ""),
        holder_tid=_whole(raw.get("holder_tid") or 0),
        site=str(raw["site"] or ""),
        held_us=_whole(raw.get("held_us") or 0) + holding_us,
        acquired=_whole(raw.get("acquisitions") or 0),
        max_held_us=_whole(raw.get("max_held_us") or 0),
        holding_us=holding_us,
    )


def _common(raw: dict[str, Any], key: Hashable, waiting_us: int) -> dict[str, Any]:
    hash(key)  # a list where a name belongs is a TypeError here and not later
    return {
        "key": key,
        "waiting_us": waiting_us,
        "tgid": _whole(raw["tgid"]),
        "blocked_us": _whole(raw["blocked_us"]) + waiting_us,
        "count": _whole(raw["blocked_count"]),
        "max_us": max(_whole(raw["max_blocked_us"]), waiting_us),
    } | {name: str(raw[name] or "") for name in ("program", "kind", "unit", "comm", "lock")}


def _whole(value: Any) -> int:
    number = int(value)
    if abs(number) > MOST_NUMBER:
        raise ValueError(f"a number above {MOST_NUMBER}")
    return number


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
