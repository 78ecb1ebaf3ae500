"""What each path answers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from prometheus_client.exposition import choose_encoder
from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPServerRequest
from tornado.iostream import IOStream, StreamClosedError
from tornado.web import Application, Finish, HTTPError, RequestHandler, stream_request_body

from lockd.errors import LockdError
from lockd.export.basic_auth import BasicAuth, TooManyPasswords
from lockd.export.families import Encode, Exposition
from lockd.export.link import Answer, SamplerError, SamplerLink
from lockd.export.page import PAGE
from lockd.export.profiles import ProfileQuery, between, profile_of, program_of, with_waiting
from lockd.export.sources import LOOPBACK, Allowance, is_ip, source_of
from lockd.export.tables import QueryError, parse_query, render_table
from lockd.export.web_config import WebConfig
from lockd.messages import REQUEST_DETAIL, REQUEST_METRICS, unpack
from lockd.views import flamegraph, pprof
from lockd.views.profile import Profile

log = logging.getLogger(__name__)

T = TypeVar("T")

REPLY_TIMEOUT = 30.0
"""A client that has not taken its answer after this many seconds loses its connection."""

MOST_WATCHING, MOST_OF_ONE_WATCHING = 16, 8
"""Requests at a time that take seconds, as a profile of some seconds does, in all and of one source: each
keeps a connection, and what it began with."""

OPENMETRICS = "application/openmetrics-text"

WORK_SAVED = 10.0
"""Seconds of CPU time that one source can have saved of its share."""
SETTLED_SECONDS = 0.02
"""What /-/settled counts as: the answers that were kept for all are made again."""

_ERROR_HEADERS = {
    401: ("WWW-Authenticate", 'Basic realm="lockd"'),
    405: ("Allow", "GET, HEAD"),
    429: ("Retry-After", "1"),
    503: ("Retry-After", "1"),
}


class Service:
    """What the handlers share."""

    def __init__(self, link: SamplerLink, web: WebConfig, procfs: Path, share: float) -> None:
        self.link = link
        self.web = web
        self.auth = BasicAuth()
        self.work = Allowance(share, WORK_SAVED)
        """For making the answers, of each source."""
        self.busy: set[IOStream] = set()
        """The connections with a request that has not been answered."""
        self._procfs = procfs
        self._watching: Counter[str] = Counter()
        """Requests that take seconds, by source."""
        self._expositions: dict[str, Exposition] = {}
        """By content type; for the thread alone."""
        # One thread: rendering holds Python's lock, and two at once would only take turns.
        self._thread = ThreadPoolExecutor(1, "render")

    def close(self) -> None:
        """Start nothing more in the background."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.auth.close()

    async def render(self, source: str | None, make: Callable[[], T]) -> T:
        """The result of `make`, which may take long, while others are served. `source`, if any, pays."""

        def timed() -> tuple[T, float]:
            began = time.thread_time()
            return make(), time.thread_time() - began

        made, seconds = await asyncio.get_running_loop().run_in_executor(self._thread, timed)
        if source is not None:
            self.work.spend(source, seconds)
        return made

    async def metrics(self, accept: str, zipped: bool) -> tuple[bytes, str]:
        """The exposition and its content type; scrapers that share an answer share it too.

        So it is nobody's to pay for, and a scraper is never refused because of others at its address: there
        are two formats, whatever a client can read of their versions, and five answers a second.
        """
        answer = await self.link.ask(REQUEST_METRICS)
        encode, content_type = choose_encoder(OPENMETRICS if _takes_openmetrics(accept) else "")
        key = (content_type, zipped)
        if key not in answer.made:
            make = self.render(None, lambda: self._expose(answer, encode, content_type, zipped))
            answer.made[key] = asyncio.ensure_future(make)
        return await asyncio.shield(answer.made[key]), content_type

    async def profile(self, source: str, query: ProfileQuery) -> Profile:
        """Since the daemon started, or of as many seconds from now on as the query says."""
        if not query.seconds:
            _, profile = await self._profile_now(source, query)
            return profile
        with self._watch(source):
            began, earlier = await self._profile_now(source, query)
            await asyncio.sleep(query.seconds)
            ended, later = await self._profile_now(source, query)
            return between(earlier, later, ended - began)

    async def settled(self, source: str) -> None:
        """Wait until everything that happened before the call is in the next answers of the sampler."""
        self.work.spend(source, SETTLED_SECONDS)
        with self._watch(source):
            await self.link.settled()

    @contextlib.contextmanager
    def _watch(self, source: str) -> Iterator[None]:
        """One of the requests that take seconds."""
        if self._watching[source] >= MOST_OF_ONE_WATCHING or self._watching.total() >= MOST_WATCHING:
            raise HTTPError(
                503,
                reason=f"Requests that take seconds are being answered: {self._watching.total()}, and"
                f" {self._watching[source]} of them from there",
            )
        self._watching[source] += 1
        try:
            yield
        finally:
            self._watching[source] -= 1
            self._watching = +self._watching  # keeps nothing of who asks no more

    async def _profile_now(self, source: str, query: ProfileQuery) -> tuple[float, Profile]:
        """When that was, by the monotonic clock, and the profile."""
        answer = await self.link.ask(REQUEST_DETAIL)

        def make() -> tuple[float, Profile]:
            head, arrays = unpack(answer.block)
            return head["monotonic"], profile_of(query, head, arrays)

        return await self.render(source, make)

    def _expose(self, answer: Answer, encode: Encode, content_type: str, zipped: bool) -> bytes:
        if content_type not in self._expositions:
            self._expositions[content_type] = Exposition(encode, self._procfs)
        text = self._expositions[content_type].text(*unpack(answer.block))
        # Level 1: 10,000 lines take 3 ms and 77 kB; level 9, the default, 39 ms and 63 kB.
        return gzip.compress(text, 1, mtime=0) if zipped else text


@stream_request_body  # lets a request be refused before its body is read
class Handler(RequestHandler):
    """Limits, users and errors: the same for every path."""

    content_policy = "default-src 'none'"
    is_work = True
    """Whether it is refused to an address that has had its share of the exporter's time."""
    _stream: IOStream | None = None

    def initialize(self) -> None:
        # Before tornado refuses a method that it does not know, which it does before prepare().
        self._has_body = self._forget_body()

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
        if self._stream.closed():  # it came with another that was the last of its connection
            raise Finish
        self.service.busy.add(self._stream)
        settings = self.service.web.current()
        if settings.client_names and settings.client_names.isdisjoint(_names(self.request)):
            raise HTTPError(403, reason="The certificate is not for a client of this server")
        try:
            authorization = self.request.headers.get("Authorization")
            allowed = await self.service.auth.allows(settings.users, authorization, self.source)
        except TooManyPasswords:
            raise HTTPError(429, reason="Too many passwords are being tried from there") from None
        if not allowed:
            raise HTTPError(401)
        if not settings.users and not settings.tls and self._is_rebound():
            raise HTTPError(403, reason="The Host header names no address of this host: see docs/web.md")
        if self.request.method not in ("GET", "HEAD"):
            raise HTTPError(405)
        if self._has_body:
            raise HTTPError(413, reason="Requests have no body here")
        if self.is_work and self.service.work.seconds_until_some(self.source):
            raise HTTPError(429, reason="Too much is being asked from there")

    def _is_rebound(self) -> bool:
        """Whether it may be a page of somebody else's that asks, in a browser: its name points here for now.

        On the loopback address only, where what is served is for this host and hardly anybody uses other
        names. A name without a dot, or this host's own, is none that such a page can have.
        """
        assert self._stream
        local = self._stream.socket.getsockname()
        if not isinstance(local, tuple) or source_of(str(local[0])) != LOOPBACK:
            return False
        name = self.request.host_name.strip("[]").rstrip(".").lower()
        is_local = "." not in name or name.endswith(".localhost") or name == socket.gethostname().lower()
        return not is_local and not is_ip(name)

    def _forget_body(self) -> bool:
        """Have tornado leave the body where it is, as the answer, which is an error, closes the connection.

        It would read it for nobody, and log a traceback for each that is not in chunks as it says.
        """
        headers = self.request.headers
        has_body = "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"
        for name in ("Transfer-Encoding", "Content-Length"):
            headers.pop(name, None)  # `del` fails if it was sent twice
        return has_body

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return None

    async def head(self, *args: str) -> None:
        await cast(Any, self).get(*args)

    async def reply(self, body: bytes, content_type: str) -> None:
        self.set_header("Content-Type", content_type)
        self.set_header("Content-Length", str(len(body)))
        try:
            # Headers go first, so that the body is sent as it is: all clients share one copy.
            await self.flush()
            await asyncio.wait_for(self.finish(body), REPLY_TIMEOUT)
        except asyncio.TimeoutError:  # the builtin one only since Python 3.11
            log.debug("%s does not take its answer", self.request.remote_ip)
            if self._stream is not None:
                self._stream.close()
        except StreamClosedError:
            pass

    def on_finish(self) -> None:
        self._not_busy()

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self._not_busy()

    def _not_busy(self) -> None:
        if self._stream is not None:
            self.service.busy.discard(self._stream)

    def compute_etag(self) -> str | None:
        return None

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
    is_work = False

    async def get(self) -> None:
        headers = self.request.headers
        zipped = _takes_gzip(headers.get("Accept-Encoding", ""))
        body, content_type = await self.service.metrics(headers.get("Accept", ""), zipped)
        self.set_header("Vary", "Accept, Accept-Encoding")
        if zipped:
            self.set_header("Content-Encoding", "gzip")
        await self.reply(body, content_type)


class Table(Handler):
    async def get(self, name: str) -> None:
        query = parse_query(self.request.query_arguments)
        answer = await self.service.link.ask(REQUEST_DETAIL)
        body = await self.service.render(
            self.source, lambda: render_table(name, *unpack(answer.block), query=query)
        )
        await self.reply(body, "application/json")


class Pprof(Handler):
    async def get(self, program: str) -> None:
        query = ProfileQuery(program, self.request.query_arguments)
        profile = await self.service.profile(self.source, query)
        body = await self.service.render(self.source, lambda: pprof.encode(profile, comm_is_frame=True))
        self.set_header("Content-Disposition", f'attachment; filename="{program}.pb.gz"')
        await self.reply(body, "application/octet-stream")


class FlameGraph(Handler):
    content_policy = flamegraph.content_security_policy()

    async def get(self) -> None:
        arguments = self.request.query_arguments
        query = ProfileQuery(program_of(arguments), arguments)
        profile = await self.service.profile(self.source, query)
        page = await self.service.render(self.source, lambda: flamegraph.page(with_waiting(profile)).encode())
        await self.reply(page, "text/html; charset=utf-8")


class Healthy(Handler):
    is_work = False

    async def get(self) -> None:
        await self.reply(b"lockd is healthy.\n", "text/plain; charset=utf-8")


class Ready(Handler):
    is_work = False

    async def get(self) -> None:
        await self.service.link.ask(REQUEST_METRICS)
        await self.reply(b"lockd is ready.\n", "text/plain; charset=utf-8")


class Settled(Handler):
    """Answers once everything that happened before the request is in the next answers of all other paths."""

    async def get(self) -> None:
        await self.service.settled(self.source)
        await self.reply(b"lockd has counted everything up to this request.\n", "text/plain; charset=utf-8")


class Page(Handler):
    is_work = False

    async def get(self) -> None:
        await self.reply(PAGE, "text/html; charset=utf-8")


class Nothing(Handler):
    is_work = False

    async def get(self) -> None:
        raise HTTPError(404)


def application(service: Service) -> Application:
    return Application(
        [
            (r"/", Page),
            (r"/metrics", Metrics),
            (r"/-/healthy", Healthy),
            (r"/-/ready", Ready),
            (r"/-/settled", Settled),
            (r"/debug/pprof/(futex|offcpu|kernel_locks)", Pprof),
            (r"/flamegraph", FlameGraph),
            (r"/api/v1/(locks|threads|deadlocks)", Table),
        ],
        default_handler_class=Nothing,
        log_function=_log,
        service=service,
    )


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


def _takes_openmetrics(accept: str) -> bool:
    return any(each.partition(";")[0].strip() == OPENMETRICS for each in accept.split(","))


def _takes_gzip(accept_encoding: str) -> bool:
    for each in accept_encoding.lower().split(","):
        coding, *parameters = (part.strip() for part in each.split(";"))
        if coding == "gzip":  # a weight of 0: anything but this
            return not any(re.fullmatch(r"q\s*=\s*0(\.0*)?", parameter) for parameter in parameters)
    return False


def _names(request: HTTPServerRequest) -> set[str]:
    """The alternative names in the client's certificate."""
    certificate = request.get_ssl_certificate()
    if not isinstance(certificate, dict):
        return set()
    return {str(value) for _, value in certificate.get("subjectAltName", ())}
