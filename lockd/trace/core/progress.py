"""What a trace says while it goes on, on a terminal: one line that changes."""

from __future__ import annotations

import time
from typing import TextIO

SHOWN_EVERY = 0.2


class Progress:
    """Says little if `stream` is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._lines = stream
        self._stream = stream if stream.isatty() else None
        self._next = 0.0
        self._is_shown = False

    def say(self, text: str) -> None:
        if self._stream:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._is_shown = True

    @property
    def is_due(self) -> bool:
        """Whether it is time to show() how it goes."""
        return self._stream is not None and time.monotonic() >= self._next

    def begin(self, text: str) -> None:
        """Once; also if `stream` is no terminal, as scripts wait for it."""
        if self._stream:
            self.say(text)
        else:
            print(text, file=self._lines, flush=True)

    def show(self, elapsed: float, events: int, dropped: int) -> None:
        self._next = time.monotonic() + SHOWN_EVERY
        self.say(f"{elapsed:.0f} s, {events:,} events, {dropped:,} lost; Ctrl-C ends")

    def end(self) -> None:
        """Leave the line empty."""
        if self._stream and self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_shown = False
