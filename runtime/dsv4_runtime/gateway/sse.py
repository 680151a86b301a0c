"""Meaning of the events of an engine's streams. Pure."""

from __future__ import annotations

from dsv4_runtime.util.sse import MAX_EVENT_BYTES, EventTooLongError, Splitter, name, payload

__all__ = [
    "MAX_EVENT_BYTES",
    "SUPERVISED",
    "EventTooLongError",
    "Splitter",
    "is_error",
    "is_last",
    "name",
    "payload",
]


def is_error(event: bytes, data: bytes) -> bool:
    """Tell whether the engine says with it that the stream failed, on any of its paths. `data` is its payload."""
    return data[:9] == b'{"error":' or name(event) in _ERRORS


SUPERVISED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths whose streams say that they are complete."""
_ERRORS = frozenset({b"error", b"response.failed"})
_LAST_NAMES = _ERRORS | {b"message_stop", b"response.completed", b"response.incomplete"}


def is_last(event: bytes, data: bytes) -> bool:
    """Tell whether a stream of a supervised path may end after it. `data` is the event's payload."""
    return data == b"[DONE]" or name(event) in _LAST_NAMES
