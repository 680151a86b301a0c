"""Server-sent events as bytes: cut into whole events, nothing changed. Pure.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 64 * 2**20
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class EventTooLongError(Exception):
    """No end of an event within `MAX_EVENT_BYTES`."""


class Splitter:
    """Cuts a stream of bytes, which comes in any pieces, into events that include their blank line."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. What has begun and not ended waits: no client could use it either.

        Raises:
            EventTooLongError: one event is longer than any that an engine writes.
        """
        if self._tail:
            data = self._tail + data
        events, start = [], 0
        for match in _END.finditer(data):
            events.append(data[start : match.end()])
            start = match.end()
        self._tail = data[start:]
        if len(self._tail) > MAX_EVENT_BYTES:
            raise EventTooLongError
        return events


def payload(event: bytes) -> bytes:
    """What follows `data:`, lines joined by newlines; empty for comments."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def name(event: bytes) -> bytes:
    """What follows `event:`; empty if there is none."""
    if event.startswith(b"data:"):
        return b""
    return next((line[6:].strip() for line in event.splitlines() if line.startswith(b"event:")), b"")


def is_error(event: bytes, data: bytes) -> bool:
    """Whether the engine says with it that the stream failed, on any of its paths. `data` is the event's payload."""
    return data[:9] == b'{"error":' or name(event) in _ERRORS


SUPERVISED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths whose streams say that they are complete."""
_ERRORS = frozenset({b"error", b"response.failed"})
_LAST_NAMES = _ERRORS | {b"message_stop", b"response.completed", b"response.incomplete"}


def is_last(event: bytes, data: bytes) -> bool:
    """Whether a stream of a supervised path may end after it. `data` is the event's payload."""
    return data == b"[DONE]" or name(event) in _LAST_NAMES
