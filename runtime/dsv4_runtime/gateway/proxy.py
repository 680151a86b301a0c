"""Passes requests on to vLLM, and keeps each until it is answered or can no longer be.

A request is tried until an engine lives long enough to answer it. What decides between the tries is how much of the
answer the client has: nothing (the request is sent again), a stream that can be continued exactly (it is), or anything
else (it ends with an error that says so).
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.gateway import errors, sse
from dsv4_runtime.gateway.body import parse_object
from dsv4_runtime.gateway.continuation import CHAT, COMPLETIONS, Pieces, Transcript, obstacle, with_token_ids
from dsv4_runtime.gateway.engine import Engine, Life
from dsv4_runtime.gateway.errors import ClientGoneError, EngineLostError, Outcome, Refusal, RefusedError
from dsv4_runtime.gateway.exchange import Deadline, Exchange
from dsv4_runtime.gateway.hold import Hold
from dsv4_runtime.gateway.http1 import BrokenMessageError, raw
from dsv4_runtime.gateway.keys import Keys
from dsv4_runtime.gateway.metrics import Metrics
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.gateway.upstream import Answer, UnreachableError, Upstream
from dsv4_runtime.gateway.watch import RouteFile

_log = logging.getLogger("dsv4.gateway")

# What only computes: to ask twice is to be answered twice, and nothing else.
_REPEATABLE = frozenset(
    {COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"}
    | {"/tokenize", "/detokenize", "/pooling", "/classify"}
    | {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    | {"/v1/audio/transcriptions", "/v1/audio/translations"}
)
_MAX_REPLAYS = 3
"""A request under which this many engines and one more died without progress may be what kills them."""
_MAX_LOSSES = 10
"""The same for connections that broke while vLLM said that it lives."""
_WHOLE_BYTES = 16 * 2**20
"""A longer answer is passed on as it comes, and cannot be asked for again once it has begun."""
_VERDICT_SECONDS = 2.0
"""How long vLLM's own `/health` may take to say whether a 5xx came of the engine's death."""


class Proxy:
    """Answers everything that the gateway does not answer itself."""

    def __init__(
        self, settings: GatewaySettings, routes: RouteFile, engine: Engine, metrics: Metrics, keys: Keys | None
    ) -> None:
        self._settings, self._routes, self._engine, self._metrics = settings, routes, engine, metrics
        self._keys = keys
        self._hold = Hold(settings, engine, metrics)
        self._deadlines: set[Deadline] = set()
        self.idle = asyncio.Event()
        """Set while no request waits for its answer."""
        self.idle.set()
        self._upstream = Upstream()

    @property
    def active(self) -> int:
        """Requests that have no whole answer yet."""
        return len(self._deadlines)

    def close(self) -> None:
        """Let go of connections."""
        self._upstream.close()

    def end_all(self) -> None:
        """End every request that is still being answered, with an error that says why."""
        for deadline in tuple(self._deadlines):
            deadline.now(errors.draining())

    async def answer(self, request: Request) -> None:
        """One request, whatever becomes of it."""
        exchange = Exchange(request, self._settings)
        try:
            deadline = self._admit(exchange)
            self._deadlines.add(deadline)
            self.idle.clear()
            try:
                async with deadline.scope:
                    await exchange.read()
                    await self._until_answered(exchange)
            except TimeoutError:
                if not deadline.scope.expired():
                    raise
                await self._give_up(exchange, deadline.refusal)
            finally:
                self._deadlines.discard(deadline)
                if not self._deadlines:
                    self.idle.set()
        except RefusedError as error:
            await self._give_up(exchange, error.refusal)
        except ClientGoneError:
            # Nobody is left to answer.
            request.abort()
        finally:
            exchange.account(self._metrics)

    def _admit(self, exchange: Exchange) -> Deadline:
        """When the request has to be answered.

        Raises:
            RefusedError: it is none that is answered.
        """
        request = exchange.request
        if self._keys is not None and not self._keys.admit(request):
            raise RefusedError(errors.unauthorized())
        if request.upgrade or "upgrade" in request.header(b"connection").lower():
            raise RefusedError(errors.no_upgrade())
        seconds = exchange.timeout()
        return Deadline(seconds, f"the request took longer than {seconds:g} s")

    async def _give_up(self, exchange: Exchange, refusal: Refusal) -> None:
        try:
            if not exchange.begun:
                await exchange.refuse(refusal)
            elif exchange.request.ended:
                # A client that has not read it by now will not.
                exchange.request.abort()
            else:
                self._metrics.cut.inc()
                await exchange.cut(refusal)
        except ClientGoneError:
            exchange.outcome = Outcome.CANCELLED

    async def _until_answered(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        while True:
            life = self._engine.present
            if life is None:
                since = loop.time()
                try:
                    life = await self._hold.wait(len(exchange.body), admitted=exchange.sent_upstream)
                finally:
                    exchange.held += loop.time() - since
            try:
                async with life.attempt(exchange.id):
                    return await self._attempt(exchange, life)
            except EngineLostError as error:
                if exchange.request.ended:
                    # The engine has nothing more to do with what the client has not read yet.
                    return None
                _log.info("%s: %s", exchange.id, error)
                if exchange.complete:
                    exchange.outcome = Outcome.OK
                    return await exchange.end()
                exchange.losses += 1
                if life.over or not await self._engine.outlives(life, _VERDICT_SECONDS):
                    exchange.deaths += 1
                transcript = exchange.transcript
                if exchange.begun and transcript is not None and transcript.finished:
                    await exchange.write(transcript.ending())
                    exchange.outcome = Outcome.OK
                    return await exchange.end()
                self._permit_another(exchange)

    def _permit_another(self, exchange: Exchange) -> None:
        """Whether the request goes on after the engine was lost under it.

        Raises:
            RefusedError: it does not.
        """
        if exchange.begun:
            if exchange.transcript is not None:
                reason = exchange.transcript.obstacle
            else:
                reason = exchange.obstacle if exchange.is_stream else "it was too long to keep"
            if reason is not None:
                raise RefusedError(errors.lost(f"the engine died, and the answer cannot be continued: {reason}"))
        elif exchange.sent_upstream and not _repeatable(exchange):
            raise RefusedError(errors.lost("the engine died under the request, which may have taken effect"))
        if exchange.losses > _MAX_LOSSES:
            raise RefusedError(errors.lost(f"the connection to vLLM broke {exchange.losses} times in a row"))
        if exchange.deaths > _MAX_REPLAYS:
            message = f"{exchange.deaths} engines in a row died under this request; it is not sent again"
            raise RefusedError(errors.lost(message))

    async def _attempt(self, exchange: Exchange, life: Life) -> None:
        """Ask this life of the engine.

        Raises:
            EngineLostError: it died, or the connection to it broke.
        """
        before = exchange.sent_upstream
        try:
            path, body = await self._next(exchange)
            self._count_another(exchange)
            exchange.sent_upstream = True
            headers = exchange.headers(raw(self._routes.door()), keep_key=self._keys is None)
            async with self._upstream.ask(
                self._routes.route.api, exchange.request.method, path, headers, body
            ) as upstream:
                if upstream.status >= 500 and not await self._engine.outlives(life, _VERDICT_SECONDS):
                    raise EngineLostError(f"vLLM answered {upstream.status} and is not healthy")
                if upstream.status == 200 and _is_stream(upstream):
                    await self._stream(exchange, upstream, life)
                elif exchange.begun:
                    message = f"the engine refused to continue the stream (status {upstream.status})"
                    raise RefusedError(errors.lost(message))
                else:
                    await self._whole(exchange, upstream)
        except UnreachableError as error:
            # vLLM has not seen it.
            exchange.sent_upstream = before
            raise EngineLostError(str(error)) from error
        except BrokenMessageError as error:
            raise EngineLostError(str(error)) from error

    def _count_another(self, exchange: Exchange) -> None:
        if exchange.begun:
            exchange.continuations += 1
            self._metrics.continued.inc()
        elif exchange.sent_upstream:
            exchange.replays += 1
            self._metrics.replayed.inc()

    async def _next(self, exchange: Exchange) -> tuple[str, Pieces]:
        """Return path and body of the request for this attempt."""
        if exchange.begun and exchange.transcript is not None:
            return await self._continuation(exchange.transcript)
        whole = exchange.request.target, (exchange.body,)
        body = parse_object(exchange.body) if exchange.path in (COMPLETIONS, CHAT) else None
        if body is None or body.get("stream") is not True:
            exchange.obstacle = "the request is of a form that the gateway does not know, or too long to look at"
            return whole
        exchange.obstacle = obstacle(exchange.path, body)
        if exchange.obstacle is not None:
            return whole
        exchange.transcript = Transcript(exchange.path, exchange.body, body)
        return exchange.request.target, with_token_ids(exchange.body, body)

    async def _continuation(self, transcript: Transcript) -> tuple[str, Pieces]:
        sent = transcript.request()
        model = sent.get("model")
        context = await self._context(model) if transcript.limit(sent) is None else None
        for tokens, loose in transcript.alignments():
            if not transcript.loose_text or (loose and await self._text(model, loose) == transcript.loose_text):
                try:
                    return transcript.cut(sent, tokens, context)
                except ValueError as error:
                    raise RefusedError(errors.lost(f"the stream cannot be continued: {error}")) from error
        message = "the stream cannot be continued: the tokens behind its last characters are not certain"
        raise RefusedError(errors.lost(message))

    async def _text(self, model: object, tokens: list[int]) -> str | None:
        asked = json.dumps({"model": model, "tokens": tokens}).encode()
        found = await self._ask("POST", "/detokenize", asked)
        return None if found is None else str(found.get("prompt"))

    async def _context(self, model: object) -> int | None:
        """Tokens that prompt and answer may have together."""
        found = await self._ask("GET", "/v1/models")
        cards = (found or {}).get("data", [])
        return next((card.get("max_model_len") for card in cards if model in (None, card["id"])), None)

    async def _ask(self, method: str, path: str, body: bytes = b"") -> dict[str, Any] | None:
        """A question of the gateway's own; None if vLLM does not answer it."""
        headers = [(b"Content-Type", b"application/json"), *raw(self._routes.door())]
        async with self._upstream.ask(self._routes.route.api, method, path, headers, (body,)) as answer:
            text = await answer.read()
        try:
            found = json.loads(text) if answer.status == 200 else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    async def _whole(self, exchange: Exchange, upstream: Answer) -> None:
        """An answer that is sent once it is complete, so that until then it can be asked for again."""
        headers, whole = exchange.answer_headers(upstream), bytearray()
        while part := await upstream.part():
            if exchange.begun:
                await exchange.write(part)
                continue
            whole += part
            if len(whole) > _WHOLE_BYTES or not exchange.request.charge.take(len(part)):
                exchange.begin(upstream.status, headers)
                await exchange.write(bytes(whole))
                whole.clear()
        exchange.outcome = _outcome(upstream.status)
        if exchange.begun:
            await exchange.end()
        else:
            await exchange.whole(upstream.status, headers, whole)

    async def _stream(self, exchange: Exchange, upstream: Answer, life: Life) -> None:
        """Pass on events as they come. The head of the answer waits for the first: until then it can be replayed."""
        splitter, transcript, outcome = sse.Splitter(), exchange.transcript, Outcome.OK
        exchange.is_stream = True
        if not exchange.begun:
            # vLLM sends its head long before the first event, which shall not wait for ours.
            exchange.begin(upstream.status, exchange.answer_headers(upstream))
        while data := await upstream.part():
            out: list[bytes] = []
            for event in _events(splitter, data):
                payload, passed = sse.payload(event), event
                if sse.is_error(event, payload):
                    await _deliver(exchange, out)
                    out = []
                    if not await self._engine.outlives(life, _VERDICT_SECONDS):
                        raise EngineLostError("vLLM reported an error in the stream and is not healthy")
                    outcome = Outcome.ENGINE_ERROR
                elif transcript is not None and payload[:1] == b"{":
                    passed = transcript.take(event, payload)
                exchange.complete = exchange.complete or sse.is_last(event, payload)
                out.append(passed)
            await _deliver(exchange, out)
        if exchange.path in sse.SUPERVISED and not exchange.complete:
            raise EngineLostError("vLLM ended the stream in the middle")
        exchange.outcome = outcome
        await exchange.end()


async def _deliver(exchange: Exchange, events: list[bytes]) -> None:
    """Send events. Nothing waits between a transcript's note and the server's taking the bytes over."""
    if events:
        exchange.deaths = exchange.losses = 0
        exchange.settle()
        if data := b"".join(events):
            await exchange.write(data)


def _events(splitter: sse.Splitter, data: bytes) -> list[bytes]:
    try:
        return splitter.feed(data)
    except sse.EventTooLongError:
        message = f"vLLM sent an event of more than {sse.MAX_EVENT_BYTES >> 20} MiB"
        raise RefusedError(errors.lost(message)) from None


def _repeatable(exchange: Exchange) -> bool:
    return exchange.path in _REPEATABLE or exchange.request.method in ("GET", "HEAD")


def _outcome(status: int) -> Outcome:
    if status < 400:
        return Outcome.OK
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.ENGINE_ERROR


def _is_stream(upstream: Answer) -> bool:
    return upstream.header(b"content-type").partition(";")[0].strip().lower() == "text/event-stream"
