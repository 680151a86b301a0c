"""Server-sent events as bytes: split a stream into events and read their data; a feed for several readers.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger("dsv4")

MAX_EVENT_BYTES = 64 * 2**20
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_BORDER = 3
"""Number of bytes of a separator that may precede the piece that completes it."""


class EventTooLongError(Exception):
    """No end of an event within `MAX_EVENT_BYTES`."""


class Splitter:
    """Splits a stream of bytes, which comes in any pieces, into events that include their blank line.

    The work is linear in the bytes for any pieces: a byte is searched once, and copied a bounded number of times.
    """

    def __init__(self) -> None:
        self._tail = bytearray()

    @property
    def rest(self) -> bytes:
        """Return the incomplete event."""
        return bytes(self._tail)

    @property
    def size(self) -> int:
        """Return the bytes of `rest`."""
        return len(self._tail)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that `data` completes. An incomplete event waits in `rest`.

        Raises:
            EventTooLongError: one event is longer than any that an engine writes.
        """
        tail, start, begin = self._tail, 0, 0
        whole: bytes | bytearray = data
        if tail:
            begin = max(0, len(tail) - _BORDER)
            tail += data
            whole = tail
        events = []
        for match in _END.finditer(whole, begin):
            events.append(bytes(whole[start : match.end()]))
            start = match.end()
        if whole is not tail:
            tail += data[start:]
        elif start:
            # Not in place: the matches may still refer to it.
            self._tail = tail = tail[start:]
        if len(tail) > MAX_EVENT_BYTES:
            raise EventTooLongError
        return events


def payload(event: bytes) -> bytes:
    """Return the data of an event, lines joined by newlines; empty for comments."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def name(event: bytes) -> bytes:
    """Return the name of an event; empty if there is none."""
    if event.startswith(b"data:"):
        return b""
    return next((line[6:].strip() for line in event.splitlines() if line.startswith(b"event:")), b"")


HEARTBEAT = b":\n\n"
"""Comment that readers pass over."""
_REPEAT_SECONDS = 60.0
"""Interval of log lines about a value that cannot be made."""


class FeedFullError(Exception):
    """A feed has as many readers as it may have, or is closed."""


class Feed(Generic[T]):
    """Events about a value that is made once per interval for all readers; without readers, nothing is made."""

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        encode: Callable[[T | None, T], bytes | None],
        *,
        limit: int,
        seconds: float = 1.0,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        make: returns the value.
        encode: returns the event for a reader that has the first value, about the second one; without a first one, a
            complete event; None: there is nothing new.
        limit: highest number of readers.
        seconds: interval between two values.
        idle: called when the last reader has left.
        """
        self._make, self._encode, self._limit, self._seconds, self._idle = make, encode, limit, seconds, idle
        self._readers = 0
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        """Number of the value."""
        self._value: T | None = None
        self._change = HEARTBEAT
        """Event for readers that have the value before."""
        self._whole: bytes | None = None
        """Event for other readers, made at the first request."""
        self._news = asyncio.Event()
        """Set at the next value, and replaced."""

    @property
    def readers(self) -> int:
        """Return the number of readers."""
        return self._readers

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Take the place of one reader within the block.

        Raises:
            FeedFullError: there is none.
        """
        if self._closed or self._readers >= self._limit:
            raise FeedFullError(f"{self._readers} of {self._limit} viewers")
        self._readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers and self._task is not None:
                self._task.cancel()
                self._task, self._value, self._whole = None, None, None
                self._idle()

    async def events(self, seconds: float) -> AsyncGenerator[bytes]:
        """Yield events for at most `seconds`, to a reader that has a place: a complete one first, then changes. A
        reader that missed a value gets a complete event again.
        """
        ends, seen = time.monotonic() + seconds, -1
        while not self._closed and time.monotonic() < ends:
            news, number = self._news, self._number
            if self._value is not None and number != seen:
                yield self._change if seen == number - 1 else self._complete(self._value)
                seen = number
                if number != self._number:
                    # The reader was slower than the interval.
                    continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                    await news.wait()

    async def close(self) -> None:
        """End all readers."""
        self._closed = True
        self._news.set()
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait({task})

    def _complete(self, value: T) -> bytes:
        if self._whole is None:
            self._whole = self._encode(None, value) or HEARTBEAT
        return self._whole

    async def _run(self) -> None:
        logged = -_REPEAT_SECONDS
        while True:
            begun = time.monotonic()
            try:
                value = await self._make()
                change = self._encode(self._value, value) if self._value is not None else None
            except Exception:
                if begun - logged >= _REPEAT_SECONDS:
                    logged = begun
                    _log.exception("the status page cannot be made")
            else:
                self._value, self._change, self._whole = value, change or HEARTBEAT, None
                self._number += 1
                news, self._news = self._news, asyncio.Event()
                news.set()
            await asyncio.sleep(max(self._seconds / 2, begun + self._seconds - time.monotonic()))
