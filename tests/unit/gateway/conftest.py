"""Scripted engine behind a real gateway: real sockets, real HTTP, and a model with predictable tokens.

The vocabulary is the 256 bytes, so many characters consist of several tokens. The next token depends on all tokens
before it, so a continuation from a wrong position is visible at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dsv4_runtime.contract.gateway import GatewayRoute, GatewaySettings, GroupRoute
from dsv4_runtime.contract.token import CHALLENGE, challenge, token_of
from dsv4_runtime.engine import token_auth
from dsv4_runtime.gateway.admission import ApiKeys
from dsv4_runtime.gateway.metrics import Traces
from dsv4_runtime.gateway.routing import RouteFile
from dsv4_runtime.gateway.server import Gateway

LETTERS = ["a", "b", " ", "é", "€", "😀", "\n", '"', "\\"]
CONTEXT = 100
"""Tokens of prompt and answer together."""
DEFAULTS: dict[str, Any] = {
    **{"served_names": ("nano",), "hold_timeout_seconds": 60.0, "max_held_requests": 8, "max_held_bytes": 10_000},
    **{"request_timeout_seconds": 120.0, "max_body_bytes": 100_000, "drain_seconds": 5.0},
}


def generate(prompt: list[int], count: int) -> list[int]:
    """Return the `count` tokens that follow a prompt."""
    tokens = list(prompt)
    pending = b""
    for cut in range(1, 4):
        # The prompt of a continuation may end in the middle of a character.
        for letter in LETTERS:
            code = letter.encode()
            if cut < len(code) and bytes(tokens[-cut:]) == code[:cut]:
                pending = code[cut:]
    while len(tokens) < len(prompt) + count:
        if not pending:
            pending = LETTERS[zlib.crc32(bytes(tokens)) % len(LETTERS)].encode()
        tokens.append(pending[0])
        pending = pending[1:]
    return tokens[len(prompt) :]


@dataclass
class Fault:
    """Failure of the engine during a stream or response. Each request consumes one entry of the list."""

    after: int = 0
    """Tokens of a stream before the failure; bytes of the response if `bytes` is set."""
    kind: str = "reset"
    """`reset`: the connection breaks. `error`: vLLM's error event and [DONE], or a 500. `close`: a clean early end.
    `hang`: no further output, and a verdict. `glitch`: the connection breaks and the engine lives. `none`."""
    bytes: bool = False
    back: float = 0.02
    """Seconds until the next generation."""


@dataclass
class Engine:
    """Agent and vLLM in one server."""

    group: int = 1
    """Tokens in one chunk."""
    faults: list[Fault] = field(default_factory=list)
    phase: str = "Serving"
    health: str = "Healthy"
    incarnation: int = 1
    generation: int = 1
    deaths: tuple[float, ...] = ()
    """Unix times of deaths that the agent reports, each by a hang and with a restart in place."""
    alive: bool = True
    token: str = token_of("the key", "0" * 32)
    """Token that the agent requires. A change of the token ends the streams that were opened with the previous one."""
    shown: list[str | None] = field(default_factory=list)
    """Authorization headers that the agent received."""
    model: str | None = None
    """Digest of the model in the status of the agent."""
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    cancelled: int = 0
    pause: float = 0.0
    more_metrics: int = 0
    """Additional lines in the response to /metrics, without meaning."""
    scrapes: int = 0
    group_watches: int = 0
    """Streams of reports on the group that were opened."""
    text: str = "no step"
    """Message of each death in the status of the agent."""
    script: Any = None
    """Replacement for the model: an async function of request and parsed body; None: the model responds."""

    def __post_init__(self) -> None:
        self.turns = token_auth.Turns()
        self.news = asyncio.Condition()
        self.tasks: set[asyncio.Task[None]] = set()

    # The agent.

    def status(self) -> str:
        now = time.time()
        return json.dumps(
            {
                **{
                    "deployment": "d",
                    "group": 0,
                    "incarnation": self.incarnation,
                    "rank": 0,
                    "phase": self.phase,
                    "phaseTime": now,
                },
                "modelDigest": self.model,
                **{"time": now, "verdict": {"health": self.health}},
                "engine": {
                    "generation": self.generation,
                    "restarts": self.deaths,
                    "failures": [
                        {"time": time, "cause": "EngineHung", "message": self.text, "detectedBy": "steps"}
                        for time in self.deaths
                    ],
                },
            }
        )

    async def change(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        async with self.news:
            self.news.notify_all()

    async def die(self, back: float) -> None:
        self.alive = False
        await self.change(phase="Restarting", health="Dead")

        async def revive() -> None:
            await asyncio.sleep(back)
            self.alive, self.turns = True, token_auth.Turns()
            await self.change(phase="Serving", health="Healthy", generation=self.generation + 1)

        self.spawn(revive())

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def watch(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        token, group = self.token, request.query.get("group") == "1"
        self.group_watches += group
        while token == self.token:
            status = self.status()
            if group:
                status = f'{{"ages": {{"0": 0.0}}, "memory": {{"0": {{"available": 12345}}}}, "members": [{status}]}}'
            await response.write(status.encode() + b"\n")
            async with self.news:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.news.wait(), 1.0)
        return response

    # vLLM.

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/watch":
            self.shown.append(request.headers.get("Authorization"))
            if self.shown[-1] != f"Bearer {self.token}":
                return web.Response(status=401, headers={CHALLENGE: challenge(self.token)})
        match request.path:
            case "/v1/watch":
                return await self.watch(request)
            case "/v1/models":
                return web.json_response({"data": [{"id": "nano", "max_model_len": CONTEXT}]})
            case "/health":
                return web.Response(status=200 if self.alive else 503)
            case "/metrics":
                self.scrapes += 1
                text = 'vllm:num_requests_waiting{model_name="nano"} 3.0\n' + "# more\n" * self.more_metrics
                text += f'vllm:generation_tokens_total{{model_name="nano"}} {1000.0 * self.scrapes}\n'
                text += 'vllm:kv_cache_usage_perc{engine="0",model_name="nano"} 0.25\n'
                return web.Response(text=text, status=200 if self.alive else 503)
        wanted = token_auth.requested_turn(
            request.headers.get(token_auth.TURN_HEADER), gateway=token_auth.REQUEST_ID_HEADER in request.headers
        )
        if wanted is None:
            return await self.take(request)
        held, status = self.turns, 0
        ticket = held.enter(*wanted)
        if isinstance(ticket, token_auth.Refused):
            return web.Response(status=503, headers={token_auth.TURN_HEADER: ticket})
        try:
            if ticket.kind is token_auth.Kind.RELEASE:
                return web.json_response({})
            if "Expect" in request.headers and request.transport is not None:
                # As uvicorn does when vLLM begins to read the body.
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            answer = await self.take(request)
            status = answer.status
            return answer
        finally:
            complete = bool(status) and request.transport is not None and not request.transport.is_closing()
            held.leave(ticket, complete=complete, proof=complete and status == 200)

    async def take(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle a request that `engine.token_auth` has admitted."""
        request._client_max_size = 2**26  # aiohttp's default is 1 MiB
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.requests.append((request.path, body, {name.lower(): value for name, value in request.headers.items()}))
        try:
            if self.script is not None and (answer := await self.script(request, body)) is not None:
                return answer
            if request.path == "/detokenize":
                return web.json_response({"prompt": bytes(body["tokens"]).decode(errors="replace")})
            return await self.complete(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def complete(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults else Fault(kind="none")
        chat = request.path == "/v1/chat/completions"
        prompt = list(body["messages"][-1]["content"].encode()) if chat else body["prompt"]
        if isinstance(prompt, str):
            prompt = list(prompt.encode())
        limit = body.get("max_completion_tokens") if chat else None
        limit = body.get("max_tokens") if limit is None else limit
        limit = (CONTEXT if chat else 16) if limit is None else int(limit)
        if limit > CONTEXT:
            return web.json_response({"error": {"message": "max_tokens cannot be greater"}}, status=400)
        tokens = generate(prompt, min(limit, CONTEXT - len(prompt)))
        if not body.get("stream"):
            if fault.kind != "none":
                return await self.fail(request, None, fault)
            await asyncio.sleep(self.pause)
            text = bytes(tokens).decode(errors="replace")
            return web.json_response({"id": "cmpl-1", "choices": [{"index": 0, "text": text}]})
        events = list(self.events(chat, prompt, tokens, body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if fault.bytes:
            whole = b"".join(events)
            await response.write(whole[: fault.after % len(whole)] or whole[:1])
            return await self.fail(request, response, fault)
        for index, event in enumerate(events):
            if fault.kind != "none" and index * self.group >= fault.after:
                return await self.fail(request, response, fault)
            await response.write(event)
            if self.pause:
                await asyncio.sleep(self.pause)
        return response

    async def fail(
        self, request: web.BaseRequest, response: web.StreamResponse | None, fault: Fault
    ) -> web.StreamResponse:
        await asyncio.sleep(0.005)
        if fault.kind == "glitch":
            request.transport.abort()
            return response or web.Response()
        if fault.kind == "hang":
            self.alive = False
            self.spawn(self.die(fault.back))
            await asyncio.sleep(600)
        await self.die(fault.back)
        error = json.dumps({"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}})
        if fault.kind == "reset":
            request.transport.abort()
        elif fault.kind == "error" and response is not None:
            await response.write(f"data: {error}\n\ndata: [DONE]\n\n".encode())
        elif fault.kind == "error":
            return web.Response(status=500, text=error, content_type="application/json")
        return response or web.Response(status=500, text=error)

    def events(self, chat: bool, prompt: list[int], tokens: list[int], body: dict[str, Any]) -> Any:
        """Yield the stream in the format of vLLM 0.32."""
        ids, options = bool(body.get("return_token_ids")), body.get("stream_options") or {}
        frame = {"id": f"cmpl-{self.generation}", "created": 1000 + self.generation, "model": "nano"}
        frame = {"id": frame["id"], "object": "chat.completion.chunk" if chat else "text_completion", **frame}
        pending, done = b"", 0

        def line(choices: list[dict[str, Any]], **rest: Any) -> bytes:
            value = {**frame, "choices": choices, **rest}
            return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"

        def usage() -> dict[str, int]:
            return {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + done, "completion_tokens": done}

        def continuous() -> dict[str, Any]:
            return {"usage": usage()} if options.get("continuous_usage_stats") else {}

        if chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield line([first], prompt_token_ids=prompt if ids else None, **continuous())
        for start in range(0, len(tokens), self.group):
            part = tokens[start : start + self.group]
            text = ""
            for token in part:
                pending += bytes([token])
                with contextlib.suppress(UnicodeDecodeError):
                    text += pending.decode()
                    pending = b""
            last = start + self.group >= len(tokens)
            if last:
                text += pending.decode(errors="replace")
            done += len(part)
            reason = "length" if last else None
            given = part if ids else None
            if chat:
                choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
                choice |= ({"stop_reason": None} if last else {}) | {"token_ids": given}
            else:
                choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
                choice |= {"prompt_token_ids": prompt if ids and start == 0 else None, "token_ids": given}
            yield line([choice], **continuous())
        if options.get("include_usage"):
            yield line([], usage=usage())
        yield b"data: [DONE]\n\n"


class Lab:
    """One engine and one gateway in front of it."""

    def __init__(
        self,
        *,
        keys: str | None = None,
        engine: Engine | None = None,
        listener: socket.socket | None = None,
        peers: tuple[str, ...] = (),
        traces: Traces | None = None,
        **settings: Any,
    ) -> None:
        self.engine = engine or Engine()
        self._listener, self._peers, self._traces = listener, peers, traces
        self._keys, self._settings = keys, settings

    async def __aenter__(self) -> Lab:
        self._directory = tempfile.TemporaryDirectory()
        root = Path(self._directory.name)
        self._runner = web.ServerRunner(
            web.Server(self.engine.handle, handler_cancellation=True, access_log=None), shutdown_timeout=0.1
        )
        await self._runner.setup()
        await self.listen()
        (root / "token-key").write_text("the key")
        self.route = root / "route.json"
        self.point(self.upstream)
        keys = None
        if self._keys is not None:
            (root / "keys").write_text(self._keys)
            keys = ApiKeys(root / "keys")
        limits = GatewaySettings(**{**DEFAULTS, **self._settings})
        self.gateway = Gateway(limits, RouteFile(self.route), keys, peers=self._peers, traces=self._traces)
        listener = self._listener or socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.stop = asyncio.Event()
        self.serving = asyncio.ensure_future(self.gateway.serve(listener, self.stop))
        self.client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        if self.engine.phase == "Serving" and self.engine.health == "Healthy":
            await self.ready(200)
        return self

    async def listen(self, port: int = 0) -> None:
        """Open the port of the engine."""
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        self.upstream = f"http://127.0.0.1:{self._site._server.sockets[0].getsockname()[1]}"

    def point(
        self,
        agent: str,
        api: str | None = None,
        given_up: str | None = None,
        others: dict[str, str | None] | None = None,
        names: Sequence[tuple[str, ...]] = (),
    ) -> None:
        """Route the gateway to an engine. Its agent and vLLM have the same URL unless `api` is given.

        `others` maps the URLs of further groups to the reason why they were given up, or None. `names` has the names
        of the model in each group.
        """
        key = str(self.route.with_name("token-key"))
        served = dict(enumerate(names))
        more = tuple(
            GroupRoute(group=index, agent=url, api=url, given_up=why, served_names=served.get(index, ()))
            for index, (url, why) in enumerate((others or {}).items(), 1)
        )
        own = {"agent": agent, "api": api or agent, "given_up": given_up, "served_names": served.get(0, ())}
        route = GatewayRoute(**own, token_key_file=key, others=more)
        partial = self.route.with_suffix(".new")
        partial.write_text(route.to_json())
        partial.replace(self.route)

    async def ready(self, status: int) -> None:
        """Wait until /health returns this status."""
        async with asyncio.timeout(60):
            while True:
                async with self.client.get(self.url + "/health") as answer:
                    if answer.status == status:
                        return
                await asyncio.sleep(0.005)

    async def holds(self, count: int) -> None:
        """Wait until the gateway holds this many requests."""
        async with asyncio.timeout(60):
            while await self.metric("dsv4_gateway_held ") != count:
                await asyncio.sleep(0.005)

    async def __aexit__(self, *_: object) -> None:
        self.stop.set()
        await self.client.close()
        await asyncio.wait_for(self.serving, 60)
        for task in tuple(self.engine.tasks):
            task.cancel()
        await self._runner.cleanup()
        self._directory.cleanup()

    async def post(self, path: str, body: Any, base: str | None = None, **options: Any) -> tuple[int, bytes]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.client.post((base or self.url) + path, data=data, headers=headers) as answer:
            return answer.status, await answer.read()

    async def metric(self, name: str) -> float:
        async with self.client.get(self.url + "/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith(name):
                    return float(line.rsplit(" ", 1)[1])
        return 0.0


def chunks(stream: bytes) -> list[Any]:
    """Return the parsed JSON of every event; `[DONE]` as text."""
    assert stream.endswith(b"\n\n"), stream[-200:]
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        data = "\n".join(line[5:].strip() for line in event.splitlines() if line.startswith("data:"))
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


@pytest.fixture
def kit() -> Any:
    """The classes and functions of this module, for tests."""
    from types import SimpleNamespace

    return SimpleNamespace(Lab=Lab, Engine=Engine, Fault=Fault, chunks=chunks, generate=generate)
