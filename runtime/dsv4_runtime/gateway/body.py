"""Reading a request's body without keeping others waiting. Pure."""

from __future__ import annotations

import gc
from typing import Any

from pydantic_core import from_json

_MAX_BYTES = 8 * 2**20
"""Looked at: 40 ms if all of them are digits."""
_MAX_COST = 25e6
"""Nanoseconds: two more of the same, to look through what was parsed and to free it, and nobody waited for 50 ms."""
# Nanoseconds at most that parsing and looking through takes for each of these bytes, on a processor of 2.5 GHz: an
# object, an array, another value in one, one end of a text, an escape.
_COSTS = ((b"{", 600), (b"[", 300), (b",", 50), (b'"', 60), (b"\\", 16))


def parse_object(raw: bytes | bytearray) -> dict[str, Any] | None:
    """Return the JSON object in `raw`; None if there is none, or if parsing it would keep other requests waiting.

    The gateway can do without: vLLM says what is wrong with a body, and a stream that was not understood ends with an
    error if its engine dies. The parser holds the interpreter's lock, so another thread would not help.
    """
    if len(raw) > _MAX_BYTES or sum(cost * raw.count(byte) for byte, cost in _COSTS) > _MAX_COST:
        return None
    collecting = gc.isenabled()
    # Its objects are many and have no cycles: looking for some among them took longer than making them.
    gc.disable()
    try:
        parsed = from_json(raw)
    except ValueError:
        return None
    finally:
        if collecting:
            gc.enable()
    return parsed if isinstance(parsed, dict) else None
