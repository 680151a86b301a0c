"""Admission of requests: API keys, paths of vLLM open to clients, and the model named in a request."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from dsv4_runtime.contract.gateway import api_keys
from dsv4_runtime.gateway.http_client import Message

_log = logging.getLogger("dsv4.gateway")
_KEYS_POLL_SECONDS = 1.0


class ApiKeysError(Exception):
    """The key file cannot be used; the message contains reason and remedy."""


class ApiKeys:
    """API keys of a file: UTF-8, one per line; `#` at the start or after white space begins a comment.

    Keys are compared as bytes, because clients send non-ASCII keys in UTF-8 or Latin-1. The file is read again on
    change.
    """

    def __init__(self, path: Path) -> None:
        """Read the keys.

        Raises:
            ApiKeysError: the file is missing, contains no key, or a key that cannot be sent.
        """
        self._path = path
        self._stamp = self._stat()
        self._digests = self._read()
        if not self._digests:
            raise ApiKeysError(
                f"spec.gateway.apiKeys: the file {str(self._path)!r} contains no key; write one key per line"
            )
        self._checked = time.monotonic()

    def admit(self, message: Message) -> bool:
        """Return whether `Authorization: Bearer` or `x-api-key` contains a valid key; constant time for invalid
        ones.
        """
        self._refresh()
        scheme, _, given = message.header(b"authorization").partition(" ")
        if scheme.lower() != "bearer":
            given = message.header(b"x-api-key")
        # Headers are decoded as Latin-1; this restores the received bytes.
        digest = _digest(given.strip(" \t").encode("latin-1"))
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def _refresh(self) -> None:
        if time.monotonic() - self._checked < _KEYS_POLL_SECONDS:
            return
        self._checked = time.monotonic()
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._digests, self._stamp = self._read(), stamp
        except ApiKeysError as error:
            _log.warning("previous keys remain in use: %s", error)
            return
        if not self._digests:
            _log.warning(
                "spec.gateway.apiKeys: the file %s contains no key any more, so all requests are refused; "
                "write one key per line",
                self._path,
            )

    def _stat(self) -> tuple[int, int, int]:
        """Return the file's identity, which changes with its content; raises ApiKeysError."""
        try:
            found = self._path.stat()
        except OSError as error:
            raise ApiKeysError(
                f"spec.gateway.apiKeys: the file {str(self._path)!r}: {error}; name a file of keys"
            ) from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[bytes, ...]:
        """Return the digests of the keys; empty if the file has none; raises ApiKeysError."""
        try:
            keys = api_keys(self._path.read_bytes().decode())
        except (OSError, ValueError) as error:
            raise ApiKeysError(
                f"spec.gateway.apiKeys: the file {str(self._path)!r}: {error}; name a file of keys in UTF-8"
            ) from error
        return tuple({_digest(form) for key in keys for form in _encodings(key)})


def _encodings(key: str) -> list[bytes]:
    """Return a key in UTF-8 and, where possible, in Latin-1."""
    forms = [key.encode()]
    with contextlib.suppress(UnicodeEncodeError):
        forms.append(key.encode("latin-1"))
    return forms


def _digest(key: bytes) -> bytes:
    # Fixed length, so that comparisons reveal nothing about the length of a key.
    return hashlib.sha256(key).digest()


_MAX_PARSED_BYTES = 8 * 2**20
"""Limit for parsed bodies: 40 ms if all bytes are digits."""
_MAX_PARSE_NANOSECONDS = 25e6
"""Limit for parsing; with traversal and deallocation, no other request waits for more than 50 ms."""
# Upper bounds in nanoseconds per byte for parsing and traversal at 2.5 GHz: object, array, further value, end of a
# string, escape.
_PARSE_COSTS = ((b"{", 600), (b"[", 300), (b",", 50), (b'"', 60), (b"\\", 16))


def parse_object(raw: bytes | bytearray) -> dict[str, Any] | None:
    """Return the JSON object in `raw`; None if there is none, or if parsing would delay other requests.

    None is safe: vLLM reports invalid bodies, and a stream with an unparsed request ends with an error if its engine
    dies. The parser holds the GIL, so a thread would not help.
    """
    if (
        len(raw) > _MAX_PARSED_BYTES
        or sum(cost * raw.count(byte) for byte, cost in _PARSE_COSTS) > _MAX_PARSE_NANOSECONDS
    ):
        return None
    collecting = gc.isenabled()
    # The parser creates many objects without cycles; garbage collection during parsing costs more than parsing.
    gc.disable()
    try:
        parsed = from_json(raw)
    except ValueError:
        return None
    finally:
        if collecting:
            gc.enable()
    return parsed if isinstance(parsed, dict) else None


# vLLM's OpenAI, Anthropic and Cohere APIs, with future additions.
_API_ROOTS = ("/v1/", "/v2/")
# Other paths that only compute.
_ALLOWED = frozenset(
    {"/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/generative_scoring", "/version"}
)
# They change the engine, or need models that dsv4 does not serve.
_REFUSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/audio", "/v1/realtime")
_MODELS = "/v1/models/"

_SLICE = 2**16
"""Bytes scanned, and"""
_SLICE_STEPS = 1000
"""JSON tokens visited, before other requests get a turn."""
_TOKEN = re.compile(rb'["{}\[\]]')
_BLANK = re.compile(rb"[ \t\r\n]*")
_KEY = re.compile(rb'"(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"')
"""The key `model` in every JSON spelling."""
_LITERAL = re.compile(rb"[^,}\] \t\r\n]{0,32}")
_MAX_KEY = 32
"""Maximum bytes of a key equal to `model`: five escapes of six bytes, and quotes."""
_MAX_STEPS = 100_000
"""JSON tokens visited per body; beyond them, keys of nested objects count as top-level keys."""
_MAX_KEYS = 1000
_MAX_NAME = 2**10
"""Maximum bytes of a model name that are compared."""

_NO_KEY = object()

Steps = Generator[None, None, int]


def is_allowed(path: str) -> bool:
    """Return whether requests to a decoded path are forwarded; vLLM's management paths are not."""
    if path in _ALLOWED:
        return True
    if not path.startswith(_API_ROOTS) or "//" in path or {".", ".."} & set(path.split("/")):
        return False
    return not any(path == name or path.startswith(name + "/") for name in _REFUSED)


def model_of_path(path: str) -> str | None:
    """Return NAME of the decoded path `/v1/models/NAME`, else None."""
    return path[len(_MODELS) :] if path.startswith(_MODELS) else None


@dataclass(frozen=True, slots=True)
class Models:
    """Values of `model` in one request."""

    names: tuple[str, ...] = ()
    """Strings; empty ones are omitted, because vLLM replaces them by its default."""
    wrong: str | None = None
    """Type of a value that is neither a string nor null."""


class EncodingError(Exception):
    """The body is JSON in an encoding other than UTF-8: forbidden by RFC 8259, 8.1, but accepted by Python."""


def find_models(raw: bytes | bytearray) -> Generator[None, None, Models]:
    """Return all values of the key `model` of the JSON object in `raw`; parsers differ in the choice between
    duplicates.

        Yields after a bounded amount of work. The result is empty for other bodies, which vLLM rejects.

    Raises:
        EncodingError: the body is JSON in UTF-16 or UTF-32.
    """
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or _is_wide(raw[:4]):
        raise EncodingError
    keys = yield from _keys(raw)
    if not keys:
        return Models()
    if len(keys) > _MAX_KEYS:
        return Models(wrong="repeated key")
    if len(keys) == 1 and len(raw) <= 4 * _SLICE and (parsed := parse_object(raw)) is not None:
        return _values([parsed["model"]] if "model" in parsed else [])
    found = yield from _top_level(raw)
    if found is None:
        found = []
        for at in keys:
            value = yield from _value_of(raw, at)
            found += [] if value is _NO_KEY else [value]
    return _values(found)


def _keys(raw: bytes | bytearray) -> Generator[None, None, list[int]]:
    """Return the end offsets of strings equal to `model` at any depth."""
    found: list[int] = []
    for start in range(0, len(raw), _SLICE):
        if start:
            yield
        found += [key.end() for key in _KEY.finditer(raw, start, start + _SLICE + _MAX_KEY - 1)]
        if len(found) > _MAX_KEYS:
            break
    return sorted(set(found))


def _is_wide(start: bytes | bytearray) -> bool:
    letters = start.replace(b"\0", b"")
    return len(letters) < len(start) and letters.strip(b" \t\r\n")[:1] in (b"", b"{") and bool(letters)


def _values(found: list[object]) -> Models:
    wrong = [value for value in found if value is not None and not isinstance(value, str)]
    if wrong:
        return Models(wrong=type(wrong[0]).__name__)
    return Models(tuple(value for value in found if isinstance(value, str) and value))


def _top_level(raw: bytes | bytearray) -> Generator[None, None, list[object] | None]:
    """Return the top-level values of `model`; None if the body has too many tokens. Depth is not limited."""
    found: list[object] = []
    at = yield from _skip_blank(raw, 3 if raw[:3] == b"\xef\xbb\xbf" else 0)
    if raw[at : at + 1] != b"{":
        return found
    depth, at, steps = 1, at + 1, 0
    while depth and at < len(raw):
        steps += 1
        if steps > _MAX_STEPS:
            return None
        if steps % _SLICE_STEPS == 0:
            yield
        token = _TOKEN.search(raw, at, at + _SLICE)
        if token is None:
            at += _SLICE
            yield
            continue
        at = token.end()
        if token[0] == b'"':
            end = yield from _end_of_text(raw, at)
            if end < 0:
                return None
            if depth == 1 and _KEY.fullmatch(raw, at - 1, end) is not None:
                value = yield from _value_of(raw, end)
                found += [] if value is _NO_KEY else [value]
            at = end
        else:
            depth += 1 if token[0] in b"{[" else -1
    return found


def _value_of(raw: bytes | bytearray, at: int) -> Generator[None, None, object]:
    """Return the value of the key that ends at `at`; `_NO_KEY` if no colon follows."""
    at = yield from _skip_blank(raw, at)
    if raw[at : at + 1] != b":":
        return _NO_KEY
    at = yield from _skip_blank(raw, at + 1)
    return (yield from _value(raw, at))


def _value(raw: bytes | bytearray, at: int) -> Generator[None, None, object]:
    """Return the value that begins at `at`; long strings are truncated, and objects are not parsed."""
    first = raw[at : at + 1]
    if first == b'"':
        end = yield from _end_of_text(raw, at + 1)
        if end < 0 or end - at > _MAX_NAME:
            return raw[at + 1 : at + _MAX_NAME].decode(errors="replace") + "…"
        return _text(raw[at:end])
    if first in (b"{", b"["):
        return {} if first == b"{" else []
    literal = _LITERAL.match(raw, at)
    return None if literal is not None and literal[0] == b"null" else 0


def _text(raw: bytes | bytearray) -> object:
    """Decode a JSON string; invalid ones are returned as they are, and match no name."""
    try:
        return json.loads(raw.decode("utf-8", "surrogatepass"))
    except ValueError:
        return raw.decode(errors="replace")


def _end_of_text(raw: bytes | bytearray, begun: int) -> Steps:
    """Return the end of the string whose content begins at `begun`; -1 if it exceeds `_MAX_STEPS`."""
    at = begun
    for step in range(1, _MAX_STEPS):
        if step % _SLICE_STEPS == 0:
            yield
        end = raw.find(b'"', at, at + _SLICE)
        if end < 0:
            at += _SLICE
            yield
            if at >= len(raw):
                break
            continue
        at = end + 1
        first = end
        while first > begun:
            piece = raw[max(begun, first - _SLICE) : first]
            rest = len(piece.rstrip(b"\\"))
            first -= len(piece) - rest
            if rest:
                break
            yield
        if (end - first) % 2 == 0:
            return at
    return -1


def _skip_blank(raw: bytes | bytearray, at: int) -> Steps:
    while True:
        blank = _BLANK.match(raw, at, at + _SLICE)
        end = blank.end() if blank is not None else at
        if end < at + _SLICE or end >= len(raw):
            return end
        at = end
        yield
