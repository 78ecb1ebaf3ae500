"""An event loop in which time passes as soon as nothing else is to be done, and nothing runs in threads.

A wait of 30 s therefore takes no time, and the same input always has the same effect.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from types import TracebackType
from typing import Any


class _Selector(selectors.EpollSelector):
    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits for what never comes")
        if not ready and timeout:
            self.skipped += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    """An event loop without real waiting.

    As a context manager it is the current one of this thread. At the end it is closed, and raises the first
    exception that nobody handled.
    """

    def __init__(self) -> None:
        self._chosen = _Selector()
        super().__init__(self._chosen)
        self.unhandled: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.unhandled.append(context))

    def time(self) -> float:
        return super().time() + self._chosen.skipped

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def __enter__(self) -> Loop:
        asyncio.set_event_loop(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        asyncio.set_event_loop(None)
        self.close()
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise the first exception or failure that nobody has handled."""
        contexts, self.unhandled = self.unhandled, []
        for context in contexts:
            raise context.get("exception") or AssertionError(context["message"])
