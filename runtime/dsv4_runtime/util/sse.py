"""Server-sent events as bytes: split a stream into events and read their data. Pure.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import re

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
