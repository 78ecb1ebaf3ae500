"""The tables of a daemon for `lockd top`: fetched over HTTP, with rates computed from running totals."""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import re
import ssl
import urllib.parse
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockd.errors import LockdError, UsageError
from lockd.views.holders import growth

MAX_ROWS = {"threads": 1000, "locks": 1000, "bottlenecks": 500}
"""How many rows of each table are asked for: the most that the daemon returns. It returns the worst rows, and
if it returns as many, there may be more."""
MAX_ANSWER = 256 * 1_048_576
"""Most bytes of an answer that are read."""
URL_RULE = (
    "rule: http://[USER:PASSWORD@]HOST:PORT, where USER and PASSWORD have %23 for #, %2F for /, %3F for ? "
    "and %40 for @"
)
TIMEOUT_S = 10
"""Seconds without data after which a request fails."""
MAX_NUMBER = 2**63
"""Largest absolute value of a number in an answer."""
UNKNOWN = "unknown"
"""The daemon's name for a site, a lock or a cause that it does not know."""
WRONG_SHAPE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""The exceptions that reading JSON raises if it does not have the expected shape."""


@dataclass(frozen=True)
class Row:
    """One thread, lock, holder or bottleneck: running totals, and rates once a second table has come.

    Blocked time includes the longest wait that still goes on. A wait of ten minutes thus counts while it
    lasts, and not all at once when it ends. `count` is the number of waits that have ended, or of samples for
    a holder.
    """

    key: Hashable
    """What the row is about. The key of a holder is the key of its lock with the holder's site."""
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
    """Duration so far of the thread's wait, or of the longest wait for the lock; 0 if none is going on."""
    waiting: int
    """Threads that are blocked now."""
    waiting_is_least: bool = False
    """Whether the wait began before the daemon could see it, and so has lasted longer than `waiting_us`."""
    threads: int = 1
    """Threads that have waited for the lock in the last minute. A row made of several has the largest of
    their numbers, which is the least that it can be, as a thread may count in each of them."""
    holder: str = ""
    """The comm of the thread that held the lock when the daemon last looked, while others waited."""
    holder_tid: int = 0
    """The thread id of the holder; 0 if it is not known."""
    holder_site: str = ""
    """The code that held the lock: the code that the row is about in a table of holders or bottlenecks, else
    the code for which threads waited longest. Empty if it is not known."""
    holder_share: float = 0.0
    """The share of `holder_site` in the time for which threads waited for the lock, estimated from samples.

    For a bottleneck it is the share in the time for which threads of its unit waited.
    """
    holder_cause: str = ""
    """What the holder did for most of the time in which it made threads wait: a value of the label `cause`.
    Empty if it is not known."""
    holder_cause_share: float = 0.0
    """The part, from 0 to 1, that `holder_cause` has in the time in which the holder made threads wait."""
    is_sampled: bool = False
    """Whether the row is about a holder or a bottleneck, of which only samples are known."""
    is_holder: bool = False
    """Whether the row is about one holder of one lock."""
    chain: tuple[str, ...] = ()
    """Locks of the chain by which a bottleneck makes threads wait most: first the one that they wait for."""
    site: str = ""
    tid: int = 0
    thread_comm: str = ""
    advice: str = ""
    """A key of ADVICE, about the thread's process; empty if there is none."""
    held_us: int = 0
    """Time for which a kernel lock was held, with the longest hold that still goes on."""
    acquired: int = 0
    """Acquisitions of a kernel lock."""
    max_held_us: int = 0
    holding_us: int = 0
    """Duration of the longest hold that still goes on; 0 if nobody holds the lock."""
    blocked_rate: float = 0.0
    """Seconds blocked per second: the average number of blocked threads."""
    count_rate: float = 0.0
    """Waits per second."""
    held_rate: float = 0.0
    """Seconds held per second. It exceeds 1 if several readers hold the lock at a time."""
    acquired_rate: float = 0.0
    """Acquisitions per second."""
    part: Hashable = ()
    """Identifies the row among the daemon's rows with the same key: the process of the lock or thread, and
    for a kernel lock also the place at which threads waited."""
    family: Hashable = ()
    """A value that all rows of one process and lock share. All bottlenecks of one process share one, too."""
    is_moving: bool = False
    """Whether falling totals of the row have only moved to other rows of its family.

    This is so for bottlenecks, whose shares change. It is also so for the row of a kernel lock that has no
    place: waits are in it until they have ended or their place has a name.
    """

    @property
    def origin(self) -> Hashable:
        """Identifies the row among all rows that the daemon returned."""
        return self.key, self.part


SUMS = (
    "blocked_us", "count", "waiting", "held_us", "acquired",
    "blocked_rate", "count_rate", "held_rate", "acquired_rate",
)  # fmt: skip
"""The fields that are always added up when rows are merged."""


@dataclass(frozen=True)
class Table:
    """All rows of one kind that the daemon returned at one time: threads, locks, holders or bottlenecks.

    The daemon may have several rows for one key. They are one row in a table with rates.
    """

    time: float
    """When the daemon measured the rows, in seconds of its host's monotonic clock.

    Older daemons tell only the time of day, whose steps make rates wrong.
    """
    rows: tuple[Row, ...]
    is_complete: bool = True
    """Whether the daemon had no further rows."""
    has_holds: bool = False
    """Whether rows say how long locks are held. The daemon does this in mode `all` of kernel_locks."""


class Client:
    """Fetches tables from one daemon. Every failure is a LockdError whose message names the URL."""

    def __init__(self, url: str, insecure: bool = False) -> None:
        """`insecure` accepts any TLS certificate. Raises UsageError if `url` is not an HTTP or HTTPS URL."""
        shown = re.sub("^([A-Za-z]+://)?.*@", r"\1", url)  # for messages, without the password
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:  # the text of the error may have a part of the password
            raise UsageError(f"argument --url: {shown!r} is not a URL; {URL_RULE}") from None
        if "@" in parts.path + parts.query + parts.fragment:  # USER or PASSWORD has a bare /, ? or #
            raise UsageError(f"argument --url: {shown!r} has an @ behind its host; {URL_RULE}")
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
        """The threads of /api/v1/threads."""
        return self._table("threads", _thread)

    def locks(self) -> Table:
        """The locks of /api/v1/locks."""
        return self._table("locks", _lock)

    def holders(self) -> Table:
        """The code that held the locks of /api/v1/locks: a row for each pair of a lock and a holder."""
        return self._table("locks", _holders)

    def bottlenecks(self) -> Table:
        """The code that makes threads wait in the end, of /api/v1/bottlenecks."""
        return self._table("bottlenecks", _bottleneck)

    def _table(self, name: str, make_rows: Callable[[dict[str, Any]], Iterable[Row]]) -> Table:
        answer = self._get(f"/api/v1/{name}?limit={MAX_ROWS[name]}")
        try:
            table = json.loads(answer)
            rows = tuple(
                _merged((row for raw in table[name] for row in make_rows(raw)), lambda row: row.origin)
            )
            has_holds = any("held_us" in row for row in table[name])
            time = round(float(table.get("monotonic", table["time"])), 6)
            if not math.isfinite(time):
                raise ValueError(f"the time is {time}")
            return Table(time, rows, len(table[name]) < MAX_ROWS[name], has_holds)
        except WRONG_SHAPE as error:
            reason = f"{type(error).__name__}: {error}"
            raise LockdError(f"{self.url}/api/v1/{name} is not an answer of lockd: {reason}") from None

    def _get(self, path: str) -> bytes:
        # http.client follows no redirect and uses no proxy, so the password goes nowhere else.
        connection = (
            http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._tls)
            if self._tls
            else http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        )
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            response = connection.getresponse()
            body = response.read(MAX_ANSWER)
        except ConnectionRefusedError:
            raise LockdError(
                f"no daemon answers at {self.url}; start it with: lockd run\n"
                "or give its address with: lockd top --url=URL"
            ) from None
        except ssl.SSLCertVerificationError as error:
            reason = f"{error.verify_message}; --insecure accepts it anyway"
            raise LockdError(f"{self.url}: its certificate is not trusted: {reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise LockdError(f"no daemon answers at {self.url}: {reason}; start it with: lockd run") from None
        finally:
            connection.close()
        if response.status == 401:
            raise LockdError(
                f"{self.url} requires a user name and a password (401): put them into the URL, "
                "https://USER:PASSWORD@HOST:PORT"
            )
        if response.status != 200:
            raise LockdError(
                f"{self.url}{path.partition('?')[0]} answered {response.status} {response.reason};"
                " rule: 200; with 429 the client's address has used up budget.requests, or sends too many"
                " passwords; with 503 lockd is starting or busy: try again later"
            )
        return body


class Rates:
    """Adds rates to each table, by its difference from the table before."""

    def __init__(self) -> None:
        self._before: Table | None = None

    def feed(self, table: Table) -> Table | None:
        """The table with rates, or None if no earlier table can be compared with it.

        This is so for the first table, for a table with the same time as the last one, and for a table with
        an earlier time, after the daemon's host was started again.
        """
        before = self._before
        if before is not None and table.time == before.time:
            return None
        self._before = table
        if before is None or table.time < before.time:
            return None
        seconds = table.time - before.time
        known = {row.origin: row for row in before.rows}
        known |= _holders_before(before.rows, table.rows)
        # Among the rows of a lock and process, one has all holds, but it is not always the same row.
        holds = {row.family: row for row in before.rows if row.acquired or row.held_us}

        def rated(row: Row) -> Row:
            # A row that the table before lacks is new. If that table was incomplete, the row may have been
            # too small for it. The growth of its totals is then unknown, and counts as 0.
            new = None if before.is_complete else row
            return _rated(row, known.get(row.origin, new), holds.get(row.family, new), seconds)

        here = {row.origin for row in table.rows}
        gone = [_lost(row, seconds) for row in before.rows if row.is_moving and row.origin not in here]
        # Rows come and go with all that they ever counted. So rates are computed before rows are merged.
        rows = _merged(_without_moves(list(map(rated, table.rows)), gone), lambda row: row.key)
        return dataclasses.replace(table, rows=tuple(rows))


def _holders_before(before: Iterable[Row], rows: Iterable[Row]) -> dict[Hashable, Row]:
    """The rows of holders in the table before, for the locks that it had, by origin.

    They are made of the present `rows`, less what came to each holder since (growth()).
    """
    known = _holders_by_lock(before)
    found: dict[Hashable, Row] = {}
    for lock, now in _holders_by_lock(rows).items():
        then = known.get(lock)
        if then is None:
            continue
        for site, (blocked_us, count) in growth(_totals(then), _totals(now)).items():
            row = now[site]
            found[row.origin] = dataclasses.replace(
                row, blocked_us=row.blocked_us - blocked_us, count=row.count - count
            )
    return found


def _holders_by_lock(rows: Iterable[Row]) -> dict[Hashable, dict[str, Row]]:
    """The rows of holders, by the origin of the row of their lock and then by their site."""
    locks: dict[Hashable, dict[str, Row]] = {}
    for row in rows:
        if row.is_holder:
            assert isinstance(row.key, tuple)
            locks.setdefault((row.key[:-1], row.part), {})[row.holder_site] = row
    return locks


def _totals(holders: dict[str, Row]) -> dict[str, tuple[int, int]]:
    return {site: (row.blocked_us, row.count) for site, row in holders.items()}


def _rated(row: Row, before: Row | None, holds: Row | None, seconds: float) -> Row:
    """A row with its rates over this many seconds, from the growth of its totals since the row `before`.

    If the row is new or its totals fell, its totals count as growth, with at most `seconds` of each wait and
    hold that has not ended. Totals fall when the daemon has evicted the row or has restarted. `holds` is
    the row that had the holds of its lock and process in the table before. Rates of blocked time and waits
    may be negative.
    """
    blocked, count = row.blocked_us, row.count
    if before is not None and (row.is_moving or count >= before.count):
        blocked, count = blocked - before.blocked_us, count - before.count
    else:
        blocked -= max(0, row.waiting_us - round(seconds * 1e6) * max(row.waiting, 1))
    held, acquired = row.held_us, row.acquired
    if holds is not None and acquired >= holds.acquired:
        # Only the longest of several holds that go on is counted. Held time can fall when it ends.
        held, acquired = max(0, held - holds.held_us), acquired - holds.acquired
    else:
        held -= max(0, row.holding_us - round(seconds * 1e6))
    return dataclasses.replace(
        row,
        blocked_rate=blocked / 1e6 / seconds,
        count_rate=count / seconds,
        held_rate=held / 1e6 / seconds,
        acquired_rate=acquired / seconds,
    )


def _lost(row: Row, seconds: float) -> Row:
    """A row that is gone, with its totals as negative rates."""
    return dataclasses.replace(
        row, blocked_rate=-row.blocked_us / 1e6 / seconds, count_rate=-row.count / seconds
    )


def _without_moves(rows: Sequence[Row], gone: Sequence[Row]) -> Iterator[Row]:
    """The rows, with rates that leave out what a row gained because another row of its family lost it.

    The rows in `gone` have lost all that they had. Only the net growth of a family is new. The gains of its
    rows are scaled down to that sum, because it is not known which row's loss went where. A family can shrink
    when a wait ends that a filter leaves out: such a wait counts only while it lasts.
    """
    blocked = _new_shares((row.family, row.blocked_rate) for row in (*rows, *gone))
    counts = _new_shares((row.family, row.count_rate) for row in (*rows, *gone))
    for row in rows:
        yield dataclasses.replace(
            row,
            blocked_rate=max(row.blocked_rate, 0.0) * blocked[row.family],
            count_rate=max(row.count_rate, 0.0) * counts[row.family],
        )


def _new_shares(rates: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """By family, the share (0 to 1) of its rows' gains that is new, as no other row of it lost that."""
    gained: dict[Hashable, float] = defaultdict(float)
    grown: dict[Hashable, float] = defaultdict(float)
    for family, rate in rates:
        gained[family] += max(rate, 0.0)
        grown[family] += rate
    return {family: max(grown[family], 0.0) / gain if gain else 0.0 for family, gain in gained.items()}


def _merged(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> Iterator[Row]:
    """One row for each value of `key`: the sum of the rows that have this value."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return (_sum(group) if len(group) > 1 else group[0] for group in groups.values())


def _sum(rows: list[Row]) -> Row:
    """The sums of rows, with the names of the row with the longest wait that goes on, or else with the most
    blocked time.

    While threads wait for a kernel lock, that row has no place and no holders, and perhaps no name. What it
    lacks of these comes from the row with the most blocked time that has it.
    """
    main = max(rows, key=lambda row: (row.waiting_us, row.blocked_us, row.held_us))
    # The rows of one thread may be about several locks, so names of other rows would not fit.
    others = [] if main.tid else sorted(rows, key=lambda row: row.blocked_us, reverse=True)
    named = next((row for row in (main, *others) if row.lock not in ("", UNKNOWN)), main)
    placed = next((row for row in (main, *others) if row.site not in ("", UNKNOWN)), main)
    held = next((row for row in (main, *others) if row.holder_site), main)
    return dataclasses.replace(
        main,
        lock=named.lock,
        site=placed.site,
        holder_site=held.holder_site,
        # Bottlenecks have shares in the time of their unit, holders in the time of one lock.
        holder_share=sum(row.holder_share for row in rows) if main.chain else held.holder_share,
        holder_cause=held.holder_cause,
        holder_cause_share=held.holder_cause_share,
        threads=max(row.threads for row in rows),
        max_us=max(row.max_us for row in rows),
        max_held_us=max(row.max_held_us for row in rows),
        holding_us=max(row.holding_us for row in rows),
        **{name: sum(getattr(row, name) for row in rows) for name in SUMS},
    )


def _thread(raw: dict[str, Any]) -> Iterable[Row]:
    waiting = _whole(raw["waiting_us"] or 0)
    tid, tgid = _whole(raw["tid"]), _whole(raw["tgid"])
    key = (raw["program"], tid, tgid, raw["kind"])
    yield Row(
        **_common(raw, key, waiting),
        waiting=int(waiting > 0),
        waiting_is_least=bool(raw.get("waiting_is_least")),
        tid=tid,
        thread_comm=str(raw["thread_comm"] or ""),
        advice=str(raw.get("advice") or ""),
    )


def _lock(raw: dict[str, Any]) -> Iterable[Row]:
    key = (raw["program"], _whole(raw["tgid"]), raw["address"], raw["kind"])
    holding_us = _whole(raw.get("holding_us") or 0)
    holder: dict[str, Any] = next(iter(raw.get("holders") or ()), {"site": "", "share": 0.0})
    causes: dict[str, float] = holder.get("causes") or {}
    cause = max(causes, key=causes.__getitem__, default="")
    in_kernel = raw["program"] == "kernel_locks"
    stack = tuple(map(str, raw["stack"])) if in_kernel else ()
    place = (str(raw["site"] or ""), *stack) if in_kernel else ()
    yield Row(
        **_common(raw, key, _whole(raw.get("waiting_us") or 0), place),
        is_moving=in_kernel and not stack,
        waiting=_whole(raw["waiting"]),
        threads=_whole(raw["threads"]),
        holder=str(raw.get("holder") or ""),
        holder_tid=_whole(raw.get("holder_tid") or 0),
        holder_site=str(holder["site"]),
        holder_share=float(holder["share"]),
        holder_cause="" if cause == UNKNOWN else cause,
        holder_cause_share=causes[cause] / sum(causes.values()) if cause else 0.0,
        site=str(raw["site"] or ""),
        held_us=_whole(raw.get("held_us") or 0) + holding_us,
        acquired=_whole(raw.get("acquisitions") or 0),
        max_held_us=_whole(raw.get("max_held_us") or 0),
        holding_us=holding_us,
    )


def _holders(raw: dict[str, Any]) -> Iterable[Row]:
    """A row for each holder of a lock. Its blocked time is the time for which others waited, and its count is
    the number of samples."""
    key = (raw["program"], _whole(raw["tgid"]), raw["address"], raw["kind"])
    for holder in raw.get("holders") or ():
        site = str(holder["site"])
        (lock,) = _lock({**raw, "holders": [holder]})
        yield dataclasses.replace(
            lock,
            key=(*key, site),
            blocked_us=_whole(holder["seconds"] * 1e6),
            count=_whole(holder["samples"]),
            is_sampled=True,
            is_holder=True,
            is_moving=False,
            waiting=0,
            waiting_us=0,
        )


def _bottleneck(raw: dict[str, Any]) -> Iterable[Row]:
    """A row for code at which chains of locks end. Its blocked time is the time for which others waited."""
    key = tuple(str(raw[name]) for name in ("unit", "comm", "kind", "lock", "holder", "cause"))
    longest = max(raw["chains"], key=lambda chain: float(chain["seconds"]))
    yield Row(
        key=key,
        program="futex" if raw["kind"] in ("lock", "pi") else "kernel_locks",
        kind=str(raw["kind"]),
        unit=str(raw["unit"]),
        comm=str(raw["comm"]),
        tgid=0,
        lock=str(raw["lock"]),
        blocked_us=_whole(raw["seconds"] * 1e6),
        count=0,
        max_us=0,
        waiting_us=0,
        waiting=0,
        holder_site=str(raw["holder"]),
        holder_share=float(raw["share"]),
        holder_cause=str(raw["cause"]),
        is_sampled=True,
        family=key[:2],
        is_moving=True,
        chain=tuple(str(link["lock"]) for link in longest["locks"]),
    )


def _common(
    raw: dict[str, Any], key: Hashable, waiting_us: int, place: tuple[str, ...] = ()
) -> dict[str, Any]:
    hash(key)  # raises TypeError if the answer has a list in place of a name
    process = str(raw["unit"] or ""), str(raw["comm"] or "")
    return {
        "key": key,
        "part": (*process, *place),
        "family": (key, process),
        "waiting_us": waiting_us,
        "tgid": _whole(raw["tgid"]),
        "blocked_us": _whole(raw["blocked_us"]) + waiting_us,
        "count": _whole(raw["blocked_count"]),
        "max_us": max(_whole(raw["max_blocked_us"]), waiting_us),
    } | {name: str(raw[name] or "") for name in ("program", "kind", "unit", "comm", "lock")}


def _whole(value: Any) -> int:
    number = int(value)
    if abs(number) > MAX_NUMBER:
        raise ValueError(f"a number above {MAX_NUMBER}")
    return number


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
