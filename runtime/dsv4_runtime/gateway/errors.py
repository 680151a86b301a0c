"""Error responses of the gateway, in the formats of OpenAI's, Anthropic's and vLLM's APIs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

REQUEST_ID = b"X-Request-Id"
RETRY_AFTER_SECONDS = 10
_SHOWN = 100
"""Maximum characters of client text repeated in an error."""


class EngineLostError(Exception):
    """The engine ended or stopped responding during a request; the caller decides about a retry."""


class ClientGoneError(ConnectionError):
    """The client closed its connection."""


class Outcome(StrEnum):
    """Outcome of a request, as counted."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """4xx of vLLM or of the gateway."""
    ENGINE_ERROR = "engine_error"
    """Error of a live engine."""
    LOST = "lost"
    FATAL = "fatal"
    """Engines died of the request."""
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    """The client disconnected."""
    UNAUTHORIZED = "unauthorized"
    TOO_LARGE = "too_large"


@dataclass(frozen=True)
class Refusal:
    """Error response of the gateway."""

    status: int
    kind: str
    """OpenAI's `error.type`."""
    code: str
    """OpenAI's `error.code`, machine-readable."""
    message: str
    outcome: Outcome
    retry: bool = False
    """Whether a retry after `RETRY_AFTER_SECONDS` may succeed."""
    param: str | None = None
    """OpenAI's `error.param`: the invalid field."""
    as_vllm: bool = False
    """Whether `error.code` is the status, as in vLLM's errors."""

    @functools.cached_property
    def body(self) -> bytes:
        """JSON body; Anthropic's `/v1/messages` shares `error.type` and `error.message`."""
        code = self.status if self.as_vllm else self.code
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": code}
        return json.dumps({"type": "error", "error": error}, separators=(",", ":")).encode()

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        headers = [(b"Content-Type", b"application/json"), (REQUEST_ID, request_id.encode())]
        if self.retry:
            headers.append((b"Retry-After", b"%d" % RETRY_AFTER_SECONDS))
        if self.status == 401:
            headers.append((b"WWW-Authenticate", b"Bearer"))
        return headers

    def event(self, path: str) -> bytes:
        """Return the final event of a stream of `path`."""
        if path == "/v1/responses":
            fields = {"type": "error", "code": self.code, "message": self.message, "param": None}
            return b"event: error\ndata: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"
        name = b"event: error\n" if path == "/v1/messages" else b""
        return name + b"data: " + self.body + b"\n\n"


class RefusedError(Exception):
    """The request ends with an error response of the gateway."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _service_unavailable(code: str, message: str, *, retry: bool = True) -> Refusal:
    return Refusal(503, "service_unavailable_error", code, message, Outcome.UNAVAILABLE, retry=retry)


def _invalid(status: int, code: str, message: str, outcome: Outcome = Outcome.CLIENT_ERROR) -> Refusal:
    return Refusal(status, "invalid_request_error", code, message, outcome)


def _invalid_as_vllm(status: int, kind: str, code: str, message: str, param: str | None = None) -> Refusal:
    return Refusal(status, kind, code, message, Outcome.CLIENT_ERROR, param=param, as_vllm=True)


def unavailable(message: str) -> Refusal:
    """Refuse a request that cannot wait longer for an engine."""
    return _service_unavailable("engine_unavailable", message)


def given_up_refusal(reason: str) -> Refusal:
    """Refuse a request whose engine will not recover by itself."""
    return _service_unavailable("engine_given_up", f"the engine was given up: {reason}", retry=False)


def engine_lost(message: str) -> Refusal:
    """Refuse a request whose engine died and that cannot be continued or repeated."""
    return Refusal(502, "server_error", "engine_lost", message, Outcome.LOST, retry=True)


def gateway_lost(reason: str) -> Refusal:
    """Refuse a request whose gateway process ended, and that cannot be continued or repeated."""
    message = f"the gateway process with this request ended, and {reason}"
    return Refusal(502, "server_error", "gateway_lost", message, Outcome.LOST, retry=True)


def engine_fatal(deaths: int) -> Refusal:
    """Refuse a request that kills engines; clients do not retry a 422."""
    message = f"{deaths} engines died while they had this request, the last one with no other request; do not repeat it"
    return _invalid(422, "engine_fatal", message, Outcome.FATAL)


def fatal_kind(kind: str, deaths: int, seconds: int) -> Refusal:
    """Refuse a request of a kind that kills engines."""
    message = (
        f"requests with {kind} are refused for another {seconds} s: {deaths} engines died while they had one, and "
        f"none was answered; send the request without {kind}, or later"
    )
    return _invalid(422, "engine_fatal_kind", message, Outcome.FATAL)


def timed_out(message: str) -> Refusal:
    """Refuse a request that exceeded its time limit."""
    return Refusal(504, "timeout_error", "request_timeout", message, Outcome.TIMEOUT)


def too_large(limit: int) -> Refusal:
    """Refuse a body that exceeds the limit."""
    message = f"the body is longer than {limit} bytes (spec.gateway.maxBodyBytes)"
    return _invalid(413, "body_too_large", message, Outcome.TOO_LARGE)


def unknown_model(name: str, known: Iterable[str]) -> Refusal:
    """Refuse a model that is not served, as vLLM does."""
    shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "…"
    message = f"The model `{shown}` does not exist. Valid aliases: {', '.join(known)}."
    return _invalid_as_vllm(404, "NotFoundError", "model_not_found", message, "model")


def bad_model(kind: str, known: Iterable[str]) -> Refusal:
    """Refuse a model name that is not a string."""
    message = f"model: a value of type {kind} is not a name; use one of: {', '.join(known)}"
    return _invalid_as_vllm(400, "BadRequestError", "bad_model", message, "model")


def unknown_path(path: str) -> Refusal:
    """Refuse a path that is not forwarded."""
    message = f"the path {path[:_SHOWN]!r} does not belong to this API; docs/gateway.md lists the forwarded paths"
    return _invalid_as_vllm(404, "NotFoundError", "path_not_found", message)


def bad_timeout(value: str) -> Refusal:
    """Refuse an `X-Request-Timeout` that is not a number of seconds."""
    message = f"X-Request-Timeout: {value[:40]!r} is not a number of seconds above 0; write for example 30"
    return _invalid(400, "bad_timeout", message)


def too_slow(rate: int) -> Refusal:
    """Refuse a body that arrives too slowly."""
    message = f"the body arrived with less than {rate} bytes a second; send it faster, or in smaller requests"
    return Refusal(408, "timeout_error", "body_too_slow", message, Outcome.CLIENT_ERROR)


def malformed(what: str) -> Refusal:
    """Refuse a request that is not HTTP/1.1."""
    message = f"the request is not HTTP/1.1 (RFC 9112): {what[:100]}"
    return _invalid(400, "malformed_request", message)


def head_too_large(size: int, headers: int) -> Refusal:
    """Refuse a request line with headers beyond the limits."""
    message = f"the request's first line and headers are longer than {size} bytes, or more than {headers} headers"
    return _invalid(431, "head_too_large", message)


def too_many_connections(limit: int) -> Refusal:
    """Refuse a request beyond the connection limit, or a body that makes room for another connection."""
    message = f"the gateway has {limit} connections, its limit; send the request again later"
    return _service_unavailable("overloaded", message)


DRAINING = _service_unavailable("shutting_down", "the gateway is shutting down")
UNAUTHORIZED = Refusal(
    401,
    "authentication_error",
    "invalid_api_key",
    "this API requires a valid key; send it as Authorization: Bearer <key>",
    Outcome.UNAUTHORIZED,
)
BAD_ENCODING = _invalid_as_vllm(
    400, "BadRequestError", "bad_encoding", "the body is JSON in UTF-16 or UTF-32; send UTF-8 (RFC 8259, 8.1)"
)
NO_UPGRADE = _invalid(501, "upgrade_unsupported", "the gateway passes on HTTP requests only; Upgrade is not supported")
"""WebSockets and other protocols cannot survive the engine's death."""
NO_MEMORY = _service_unavailable(
    "overloaded",
    "the gateway's memory for requests and answers is full (spec.gateway.maxHeldBytes, maxBodyBytes)",
)
INTERNAL = Refusal(
    500,
    "server_error",
    "internal_error",
    "the gateway failed to handle the request; its log has the traceback",
    Outcome.ENGINE_ERROR,
)
