"""Upstream with negligible cost: it responds like vLLM without delay, so that measurements show the gateway.

    python tests/kit/dsv4_testkit/standin.py PORT [PAUSE]

`POST` with a body that contains `"stream": true` returns SSE chunks in vLLM's format. The extra fields `"tokens": n`,
`"pause": seconds` and `"think": seconds` of the body set the number of chunks, the interval between them and the delay
of the first chunk after the head; a stream with such fields cannot be continued by the gateway. The defaults are
`max_tokens` and PAUSE. Any other `POST` returns one JSON completion. `GET /v1/watch` is that of a healthy head's agent,
so one process stands for the whole engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httptools

_HEAD = b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: "
_SSE = _HEAD + b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_NDJSON = _HEAD + b"application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


PAUSE = float(sys.argv[2]) if __name__ == "__main__" and len(sys.argv) > 2 else 0.0


_METRICS_HEAD = _HEAD + b"text/plain; version=0.0.4\r\ncontent-length: %d\r\n\r\n"
_METRICS = b"".join(b'vllm:bucket{engine="0",le="%d",model_name="nano"} 1.0\n' % number for number in range(1200)) + (
    b'vllm:num_requests_running{engine="0"} 1.0\nvllm:generation_tokens_total{engine="0"} 100.0\n'
)
"""As many lines as in vLLM's metrics."""


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _json(value: object, status: bytes = b"200 OK") -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    head = _HEAD.replace(b"200 OK", status)
    return head + b"application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _asked(body: bytes) -> dict[str, Any]:
    """Return the request in `body` with numeric fields converted; raises ValueError, TypeError or AttributeError."""
    asked: dict[str, Any] = json.loads(body)
    for name, kind in (("tokens", int), ("max_tokens", int), ("pause", float), ("think", float)):
        if asked.get(name) is not None:
            asked[name] = kind(asked[name])
    return asked


def status() -> dict[str, Any]:
    """Return the status of the agent of a serving head."""
    now = time.time()
    return {
        **{"deployment": "standin", "group": 0, "incarnation": 1, "rank": 0, "phase": "Serving", "phaseTime": now},
        **{
            "time": now,
            "verdict": {"health": "Healthy"},
            "modelDigest": "standin",
            "engine": {"generation": 1, "readyTime": now},
        },
    }


class Upstream(asyncio.Protocol):
    """One connection with sequential requests."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        # uvicorn's parser: a text like a content length elsewhere in the head has no effect.
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""
        self._task: asyncio.Task[None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.write(_json({"error": {"message": "no HTTP"}}, b"400 Bad Request"))
            self._transport.close()

    def on_message_begin(self) -> None:
        self._path, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, body = self._path, self._body
        if path.startswith(b"/v1/watch"):
            self._task = asyncio.ensure_future(self._watch(group=path.endswith(b"group=1")))
        elif path == b"/metrics":
            self._transport.write(_METRICS_HEAD % len(_METRICS) + _METRICS)
        elif not body:
            self._transport.write(_json(status() if path == b"/v1/status" else {}))
        else:
            try:
                asked = _asked(body)
            except (ValueError, TypeError, AttributeError):
                # As in vLLM, an invalid body does not close the connection.
                self._transport.write(_json({"error": {"message": "no request"}}, b"400 Bad Request"))
                return
            if asked.get("stream"):
                self._task = asyncio.ensure_future(self._stream(asked))
            else:
                self._transport.write(_json({"id": "cmpl-0", "choices": [{"index": 0, "text": "x" * 200}]}))

    async def _watch(self, *, group: bool) -> None:
        self._transport.write(_NDJSON)
        while True:
            said = {"ages": {"0": 0.0}, "members": [status()]} if group else status()
            self._transport.write(_framed(json.dumps(said).encode() + b"\n"))
            await asyncio.sleep(1.0)

    async def _stream(self, asked: dict[str, Any]) -> None:
        ids = bool(asked.get("return_token_ids"))
        self._transport.write(_SSE)
        if think := float(asked.get("think", 0.0)):
            await asyncio.sleep(think)
        count = int(asked.get("tokens", asked.get("max_tokens", 16)))
        for index in range(count):
            if index:
                await asyncio.sleep(float(asked.get("pause", PAUSE)))
            # As in vLLM, the last token has the reason, and the end follows at once.
            finish = "length" if index == count - 1 else None
            choice = {
                **{"index": 0, "text": " token", "logprobs": None, "finish_reason": finish, "stop_reason": None},
                "prompt_token_ids": [1, 2, 3] if ids and index == 0 else None,
                "token_ids": [index] if ids else None,
            }
            chunk = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
            self._transport.write(_framed(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"))
        self._transport.write(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
