"""The handlers of the HTTP paths, with authentication, limits and errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import logging
import re
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from prometheus_client.exposition import choose_encoder
from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPServerRequest
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError
from tornado.web import Application, Finish, HTTPError, RequestHandler, stream_request_body

from lockd.errors import LockdError
from lockd.export.basic_auth import BasicAuth, TooManyPasswords
from lockd.export.detail import (
    HOLDER,
    OFFCPU,
    WAKER,
    ProfileQuery,
    Query,
    QueryError,
    between,
    locks_left_out,
    parse_query,
    profile_of,
    program_of,
    render_table,
    with_waiting,
)
from lockd.export.exposition import Encode, Exposition
from lockd.export.link import Answer, SamplerError, SamplerLink
from lockd.export.sources import LOOPBACK, Allowance, is_ip, source_of
from lockd.export.wait_profile import profile_of_waits
from lockd.export.web_config import WebConfig
from lockd.messages import REQUEST_DETAIL, REQUEST_METRICS, REQUEST_WAITS, unpack
from lockd.views import flamegraph, pprof
from lockd.views.profile import Profile

log = logging.getLogger(__name__)

T = TypeVar("T")

REPLY_TIMEOUT = 30.0
"""Seconds after which the connection of a client that does not read its answer is closed."""

MOST_SLOW, MOST_SLOW_OF_SOURCE = 16, 8
"""Slow requests that may be answered at the same time, in all and of one source.

A slow request takes seconds, such as a profile of 10 seconds. It occupies a connection and memory for data.
"""
MOST_WAITING, MOST_WAITING_OF_SOURCE = 16, 8
"""Tables, and profiles without a time, that may be answered at the same time, in all and of one source.

Each waits for its turn with an answer of the sampler in memory, even if its client has gone.
"""

HOLDERS = "holders"
"""In /debug/pprof, the name of the profile of the code that held locks, by the time that others waited."""
WAKERS = "wakers"
"""In /debug/pprof, the name of the profile of waits off the CPU with the stacks of the threads that ended
them."""
OPENMETRICS = "application/openmetrics-text"

WORK_SAVED = 10.0
"""The most CPU seconds that one source can save up while it does not use its share."""
SETTLED_SECONDS = 0.02
"""CPU seconds that a request of /-/settled costs its source, as it makes lockd compute all answers anew."""

_ERROR_HEADERS = {
    401: ("WWW-Authenticate", 'Basic realm="lockd"'),
    405: ("Allow", "GET, HEAD"),
    429: ("Retry-After", "1"),
    503: ("Retry-After", "1"),
}


class Places:
    """Places for requests, of which each source has only some. `what` says what the requests do."""

    def __init__(self, most: int, most_of_source: int, what: str) -> None:
        self._most, self._most_of_source, self._what = most, most_of_source, what
        self._taken: Counter[str] = Counter()
        """Places that are taken, by source."""

    @contextlib.contextmanager
    def one_for(self, source: str) -> Iterator[None]:
        """Take a place while a request is answered. Raises HTTPError if there is none."""
        if self._taken[source] >= self._most_of_source or self._taken.total() >= self._most:
            raise HTTPError(
                503,
                reason=f"Too many requests {self._what}: {self._taken.total()} in all,"
                f" {self._taken[source]} of them from your address",
            )
        self._taken[source] += 1
        try:
            yield
        finally:
            self._taken[source] -= 1
            self._taken = +self._taken  # removes sources with a count of 0


class Service:
    """What all handlers share: the link to the sampler, web configuration, limits and rendering."""

    def __init__(self, link: SamplerLink, web: WebConfig, share: float) -> None:
        self.link = link
        self.web = web
        self.auth = BasicAuth()
        self.work = Allowance(share, WORK_SAVED)
        """The CPU time for making answers, by source."""
        self.busy: dict[IOStream, object] = {}
        """The handler of each connection with a pending request, or an answer that is being sent."""
        self._slow = Places(MOST_SLOW, MOST_SLOW_OF_SOURCE, "that take seconds are being answered")
        self._waiting = Places(
            MOST_WAITING, MOST_WAITING_OF_SOURCE, "for tables and profiles are being answered"
        )
        self._turn = asyncio.Lock()
        """Held while a table or profile is made: one after another, in the order of the requests."""
        self._expositions: dict[str, Exposition] = {}
        """Makers of the text of /metrics, by content type. Only `_scrapes` uses them."""
        # One thread for all tables and profiles is enough: rendering holds Python's global lock, so two
        # threads would take turns. /metrics has its own, so that no scrape waits for a turn behind them.
        self._renderings = ThreadPoolExecutor(1, "render")
        self._scrapes = ThreadPoolExecutor(1, "scrape")

    def close(self) -> None:
        """Cancel renderings and checks of passwords that have not begun."""
        for thread in (self._renderings, self._scrapes):
            thread.shutdown(wait=False, cancel_futures=True)
        self.auth.close()

    async def render(self, source: str, make: Callable[[], T]) -> T:
        """Call `make` in the thread for rendering, while other requests are served. Returns its result.

        The CPU time is charged to `source`. Raises HTTPError if the source has none left when its turn has
        come: many requests can be let in before the first one is charged.
        """

        def timed() -> tuple[T, float]:
            began = time.thread_time()
            return make(), time.thread_time() - began

        async with self._turn:
            self.refuse_spent(source)
            made, seconds = await asyncio.get_running_loop().run_in_executor(self._renderings, timed)
            self.work.spend(source, seconds)
        return made

    def refuse_spent(self, source: str) -> None:
        """Raise HTTPError if the source has spent its share of CPU time."""
        if self.work.seconds_until_allowed(source):
            raise HTTPError(429, reason="Requests from your address have used up their CPU time")

    async def metrics(self, accept: str, zipped: bool) -> tuple[bytes, str]:
        """The text of /metrics and its content type. Scrapers that share an answer share its text.

        No source is charged with the text, so a scraper is never refused because of others at its address.
        The cost is bounded: there are two formats, whichever versions a client accepts, and at most five
        answers a second. More are made only after requests of /-/settled, which are charged.
        """
        answer = await self.link.ask(REQUEST_METRICS)
        encode, content_type = choose_encoder(OPENMETRICS if _accepts_openmetrics(accept) else "")
        key = (content_type, zipped)
        if key not in answer.texts:
            answer.texts[key] = asyncio.get_running_loop().run_in_executor(
                self._scrapes, self._expose, answer, encode, content_type, zipped
            )
        return await asyncio.shield(answer.texts[key]), content_type

    async def table(self, source: str, name: str, query: Query) -> bytes:
        """A table as JSON."""
        with self._waiting.one_for(source):
            answer = await self.link.ask(REQUEST_DETAIL)
            return await self.render(source, lambda: render_table(name, *unpack(answer.block), query=query))

    async def profile(self, source: str, query: ProfileQuery, encode: Callable[[Profile], bytes]) -> bytes:
        """The profile since the daemon started, or of the next `query.seconds` seconds, encoded."""
        request = REQUEST_WAITS if query.program == OFFCPU else REQUEST_DETAIL
        if not query.seconds:
            with self._waiting.one_for(source):
                answer = await self.link.ask(request)
                return await self.render(source, lambda: encode(_make_profile(query, answer)))
        with self._slow.one_for(source):
            earlier = await self.link.ask(request)
            await asyncio.sleep(query.seconds)
            later = await self.link.ask(request)
            return await self.render(source, lambda: encode(_make_profile(query, later, earlier)))

    async def wait_until_settled(self, source: str) -> None:
        """Wait until the sampler's next answers include everything that happened before the call."""
        self.work.spend(source, SETTLED_SECONDS)
        with self._slow.one_for(source):
            await self.link.wait_until_settled()

    def _expose(self, answer: Answer, encode: Encode, content_type: str, zipped: bool) -> bytes:
        if content_type not in self._expositions:
            self._expositions[content_type] = Exposition(encode)
        text = self._expositions[content_type].text(*unpack(answer.block))
        # Level 1: 10,000 lines take 3 ms and 77 kB; level 9, the default, 39 ms and 63 kB.
        return gzip.compress(text, 1, mtime=0) if zipped else text


@stream_request_body  # tornado then calls prepare() before it reads the body of a request
class Handler(RequestHandler):
    """The checks of a request, the headers and the errors, which are the same for every path."""

    content_policy = "default-src 'none'"
    is_charged = True
    """Whether requests are refused from a source that has spent its share of CPU time."""
    _stream: IOStream | None = None
    _is_sending = False

    def initialize(self) -> None:
        # Not in prepare(): for unknown methods tornado sends an error without a call of prepare().
        self._has_body = self._remove_body_headers()

    @property
    def service(self) -> Service:
        return cast(Service, self.settings["service"])

    @property
    def source(self) -> str:
        return source_of(self.request.remote_ip or "")

    def set_default_headers(self) -> None:
        self.set_header("Server", "lockd")
        self.set_header("Cache-Control", "no-store")
        self.set_header("Content-Security-Policy", self.content_policy)
        self.set_header("X-Content-Type-Options", "nosniff")
        for name, value in self.service.web.current().headers.items():
            self.set_header(name, value)

    async def prepare(self) -> None:
        self._stream = cast(HTTP1Connection, self.request.connection).stream
        if self._stream.closed():  # the connection was closed after an earlier request
            raise Finish
        settings = self.service.web.current()
        if settings.tls and not self._is_secured_by(settings.tls):
            self._stream.close()  # no answer, so that the client connects anew
            raise Finish
        self.service.busy[self._stream] = self
        if settings.client_names and settings.client_names.isdisjoint(_certificate_names(self.request)):
            raise HTTPError(403, reason="The client certificate has no name of client_allowed_sans")
        try:
            authorization = self.request.headers.get("Authorization")
            allowed = await self.service.auth.allows(settings.users, authorization, self.source)
        except TooManyPasswords:
            raise HTTPError(429, reason="Too many passwords are waiting to be checked") from None
        if not allowed:
            raise HTTPError(401)
        if not settings.users and not settings.tls and self._is_rebound():
            raise HTTPError(
                403, reason="The Host header must be an address or a name of this host: see docs/web.md"
            )
        if self.request.method not in ("GET", "HEAD"):
            raise HTTPError(405)
        if self._has_body:
            raise HTTPError(413, reason="Requests must not have a body")
        if self.is_charged:
            self.service.refuse_spent(self.source)

    def _is_secured_by(self, tls: ssl.SSLContext) -> bool:
        """Whether the connection has TLS, and the client's certificate if `tls` demands one.

        A connection that is older than `tls` may lack them, because the web configuration can change while
        the connection is open.
        """
        if not isinstance(self._stream, SSLIOStream):
            return False
        return tls.verify_mode != ssl.CERT_REQUIRED or bool(self.request.get_ssl_certificate())

    def _is_rebound(self) -> bool:
        """Whether the request may come from a foreign page in a browser, by DNS rebinding.

        The attacker's DNS server returns the address of this host for the host name of such a page. Only
        requests to loopback addresses are checked: their clients run on this host, and hardly use other names
        than the allowed ones. Names without a dot and this host's name are allowed: no foreign page has them.
        """
        assert self._stream
        local = self._stream.socket.getsockname()
        if not isinstance(local, tuple) or source_of(str(local[0])) != LOOPBACK:
            return False
        name = self.request.host_name.strip("[]").rstrip(".").lower()
        is_local = "." not in name or name.endswith(".localhost") or name == socket.gethostname().lower()
        return not is_local and not is_ip(name)

    def _remove_body_headers(self) -> bool:
        """Remove the headers that announce a body. Returns whether they announce one that is not empty.

        Tornado then does not read the body, and the answer is an error, which closes the connection. With the
        headers it would read the body in vain, and log a traceback for each body with invalid chunks.
        """
        headers = self.request.headers
        has_body = "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"
        for name in ("Transfer-Encoding", "Content-Length"):
            headers.pop(name, None)  # tornado's `del` fails for a header that was sent twice
        return has_body

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return None

    async def head(self, *args: str) -> None:
        await cast(Any, self).get(*args)

    async def reply(self, body: bytes, content_type: str) -> None:
        """Send the answer. Closes the connection if the client does not read it in REPLY_TIMEOUT seconds."""
        self.set_header("Content-Type", content_type)
        self.set_header("Content-Length", str(len(body)))
        self._is_sending = True
        try:
            await asyncio.wait_for(self._send(body), REPLY_TIMEOUT)
        except asyncio.TimeoutError:  # is TimeoutError only since Python 3.11
            log.debug("%s does not read its answer", self.request.remote_ip)
            if self._stream is not None:
                abort(self._stream)
        except StreamClosedError:
            pass
        finally:
            self._is_sending = False
            self._not_busy()

    async def _send(self, body: bytes) -> None:
        # The headers are sent separately, so that the body is not copied: all clients share it.
        await self.flush()
        await self.finish(body)

    def on_finish(self) -> None:
        if not self._is_sending:  # else reply() does it when the client has read the answer
            self._not_busy()

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self._not_busy()

    def _not_busy(self) -> None:
        # The entry may already be that of the next request on the connection.
        if self._stream is not None and self.service.busy.get(self._stream) is self:
            del self.service.busy[self._stream]

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        message = str(error) if isinstance(error, LockdError) else self._reason
        if status_code in _ERROR_HEADERS:
            self.set_header(*_ERROR_HEADERS[status_code])
        if self.request.path.startswith("/api/"):
            self.set_header("Content-Type", "application/json")
            self.finish(json.dumps({"error": message}) + "\n")
        else:
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(f"{message}\n")

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, SamplerError):
            status_code = 503
        elif isinstance(error, QueryError):
            status_code = 400
        super().send_error(status_code, **kwargs)

    def log_exception(self, typ: Any, value: BaseException | None, tb: Any) -> None:
        if isinstance(value, (SamplerError, QueryError, HTTPError)):
            log.debug("%s: %s", self.request.path, value)
        else:
            log.error("%s: %s", self.request.path, value, exc_info=value)


class Metrics(Handler):
    is_charged = False

    async def get(self) -> None:
        headers = self.request.headers
        zipped = _accepts_gzip(headers.get("Accept-Encoding", ""))
        body, content_type = await self.service.metrics(headers.get("Accept", ""), zipped)
        self.set_header("Vary", "Accept, Accept-Encoding")
        if zipped:
            self.set_header("Content-Encoding", "gzip")
        await self.reply(body, content_type)


class Table(Handler):
    async def get(self, name: str) -> None:
        query = parse_query(self.request.query_arguments)
        body = await self.service.table(self.source, name, query)
        await self.reply(body, "application/json")


class Pprof(Handler):
    async def get(self, program: str) -> None:
        arguments = self.request.query_arguments
        if program == HOLDERS:
            query = ProfileQuery(program_of(arguments), {**arguments, "by": [HOLDER.encode()]})
        elif program == WAKERS:
            query = ProfileQuery(OFFCPU, {**arguments, "by": [WAKER.encode()]})
        else:
            query = ProfileQuery(program, {name: arguments[name] for name in arguments if name != "by"})
        encode = functools.partial(pprof.encode, comm_is_frame=True)
        body = await self.service.profile(self.source, query, encode)
        self.set_header("Content-Disposition", f'attachment; filename="{program}.pb.gz"')
        await self.reply(body, "application/octet-stream")


class FlameGraph(Handler):
    content_policy = flamegraph.content_security_policy()

    async def get(self) -> None:
        arguments = self.request.query_arguments
        query = ProfileQuery(program_of(arguments), arguments)
        page = await self.service.profile(
            self.source, query, lambda profile: flamegraph.page(with_waiting(profile)).encode()
        )
        await self.reply(page, "text/html; charset=utf-8")


class Healthy(Handler):
    is_charged = False

    async def get(self) -> None:
        await self.reply(b"lockd is healthy.\n", "text/plain; charset=utf-8")


class Ready(Handler):
    is_charged = False

    async def get(self) -> None:
        await self.service.link.ask(REQUEST_METRICS)
        await self.reply(b"lockd is ready.\n", "text/plain; charset=utf-8")


class Settled(Handler):
    """Answers when the next answers of other paths include everything that happened before the request."""

    async def get(self) -> None:
        await self.service.wait_until_settled(self.source)
        await self.reply(b"lockd has counted everything up to this request.\n", "text/plain; charset=utf-8")


START_PAGE = b"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>lockd</title></head>
<body>
<h1>lockd</h1>
<p>lockd shows where the threads of this host wait, for how long, for what, and who makes them wait.</p>
<ul>
<li><a href="metrics">/metrics</a>: all metrics, for Prometheus</li>
<li><a href="api/v1/locks">/api/v1/locks</a>: the most contended locks (JSON)</li>
<li><a href="api/v1/threads">/api/v1/threads</a>: the threads that wait most (JSON)</li>
<li><a href="api/v1/bottlenecks">/api/v1/bottlenecks</a>: the code that makes threads wait in the end,
and what it does meanwhile (JSON)</li>
<li><a href="api/v1/deadlocks">/api/v1/deadlocks</a>: deadlocks, threads that wait for each other (JSON)</li>
<li>/flamegraph: flame graphs of the waits since lockd started (with &amp;seconds=10: of the next 10 seconds):
<a href="flamegraph?program=futex">locks of programs</a>
(<a href="flamegraph?program=futex&amp;by=holder">who held them</a>),
<a href="flamegraph?program=kernel_locks">locks of the kernel</a>
(<a href="flamegraph?program=kernel_locks&amp;by=holder">who held them</a>),
<a href="flamegraph?program=offcpu">all waits off the CPU</a>
(<a href="flamegraph?program=offcpu&amp;by=waker">with who ended them</a>)</li>
<li>/debug/pprof: the same waits as profiles for <code>go tool pprof</code>:
<a href="debug/pprof/futex">futex</a>,
<a href="debug/pprof/kernel_locks">kernel_locks</a>,
<a href="debug/pprof/holders">holders</a> (of locks of both sorts, weighted by the time that others waited),
<a href="debug/pprof/offcpu">offcpu</a>,
<a href="debug/pprof/wakers">wakers</a> (offcpu with the stacks of those who ended the waits)</li>
<li><a href="-/healthy">/-/healthy</a>: succeeds if the exporter answers requests</li>
<li><a href="-/ready">/-/ready</a>: succeeds if the sampler answers as well</li>
<li><a href="-/settled">/-/settled</a>: succeeds as soon as all events before the request are counted</li>
</ul>
</body>
</html>
"""


class StartPage(Handler):
    is_charged = False

    async def get(self) -> None:
        await self.reply(START_PAGE, "text/html; charset=utf-8")


class NotFound(Handler):
    is_charged = False

    async def get(self) -> None:
        raise HTTPError(404)


def application(service: Service) -> Application:
    return Application(
        [
            (r"/", StartPage),
            (r"/metrics", Metrics),
            (r"/-/healthy", Healthy),
            (r"/-/ready", Ready),
            (r"/-/settled", Settled),
            (r"/debug/pprof/(futex|offcpu|kernel_locks|holders|wakers)", Pprof),
            (r"/flamegraph", FlameGraph),
            (r"/api/v1/(locks|threads|bottlenecks|deadlocks)", Table),
        ],
        default_handler_class=NotFound,
        log_function=_log,
        service=service,
    )


def abort(stream: IOStream) -> None:
    """Close a connection and drop what its client has not read, which the kernel would keep for minutes."""
    if not stream.closed():
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()


def _make_profile(query: ProfileQuery, later: Answer, earlier: Answer | None = None) -> Profile:
    """The profile that `query` asks for, up to the snapshot `later`, or between the two snapshots."""
    now, before = unpack(later.block), unpack(earlier.block) if earlier else None
    if query.program == OFFCPU:
        return profile_of_waits(query, now, before)
    profile = profile_of(query, *now)
    if before is None:
        return profile
    seconds = now[0]["monotonic"] - before[0]["monotonic"]
    return between(profile_of(query, *before), profile, seconds, locks_left_out(before, now))


def _log(handler: RequestHandler) -> None:
    request = handler.request
    log.debug(
        "%s %s %s: %s in %.0f ms",
        request.remote_ip,
        request.method,
        request.uri,
        handler.get_status(),
        1000 * request.request_time(),
    )


def _accepts_openmetrics(accept: str) -> bool:
    return any(media_range.partition(";")[0].strip() == OPENMETRICS for media_range in accept.split(","))


def _accepts_gzip(accept_encoding: str) -> bool:
    for element in accept_encoding.lower().split(","):
        coding, *parameters = (part.strip() for part in element.split(";"))
        if coding == "gzip":  # a weight of 0 excludes the coding
            return not any(re.fullmatch(r"q\s*=\s*0(\.0*)?", parameter) for parameter in parameters)
    return False


def _certificate_names(request: HTTPServerRequest) -> set[str]:
    """The subject alternative names in the client's certificate."""
    certificate = request.get_ssl_certificate()
    if not isinstance(certificate, dict):
        return set()
    return {str(value) for _, value in certificate.get("subjectAltName", ())}
