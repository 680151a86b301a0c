"""Passes requests on to vLLM, and keeps each until it is answered or can no longer be.

A request is tried until an engine lives long enough to answer it. What decides between the tries is how much of the
answer the client has: nothing (the request is sent again), a stream that can be continued exactly (it is), or anything
else (it ends with an error that says so).
"""

from __future__ import annotations

import asyncio
import logging
import time

from dsv4_runtime.contract.gateway import FatalRequests, GatewaySettings
from dsv4_runtime.gateway import errors, sse
from dsv4_runtime.gateway.body import parse_object
from dsv4_runtime.gateway.continuation import CHAT, COMPLETIONS, Pieces, Transcript, obstacle, with_token_ids
from dsv4_runtime.gateway.engine import EngineView, Life
from dsv4_runtime.gateway.errors import ClientGoneError, EngineLostError, Outcome, Refusal, RefusedError
from dsv4_runtime.gateway.exchange import Deadline, Exchange
from dsv4_runtime.gateway.groups import Groups, RoutedGroup
from dsv4_runtime.gateway.hold import Hold
from dsv4_runtime.gateway.http1 import BrokenMessageError, raw
from dsv4_runtime.gateway.keys import Keys
from dsv4_runtime.gateway.metrics import GatewayMetrics
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.gateway.resumption import Resumption
from dsv4_runtime.gateway.suspects import SUSPECTED_DEATHS, Suspects, SuspectTurn
from dsv4_runtime.gateway.upstream import UnreachableError, Upstream, UpstreamResponse

_log = logging.getLogger("dsv4.gateway")

# What only computes: to ask twice is to be answered twice, and nothing else.
_REPEATABLE = frozenset(
    {COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"}
    | {"/tokenize", "/detokenize", "/pooling", "/classify"}
    | {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    | {"/v1/audio/transcriptions", "/v1/audio/translations"}
)
_MAX_LOSSES = 10
"""Connections that may break under a request in a row."""
_MIN_RETRIES, _RETRY_SHARE = 3, 0.2
"""Requests that may be sent again at the same time while no engine died: Envoy's retry budget, with its defaults."""
_WHOLE_BYTES = 16 * 2**20
"""A longer answer is passed on as it comes, and cannot be asked for again once it has begun."""
_VERDICT_SECONDS = 2.0
"""Time that vLLM's own `/health` may take to say whether a 5xx came of the engine's death."""


class Proxy:
    """Answers everything that the gateway does not answer itself."""

    def __init__(self, settings: GatewaySettings, groups: Groups, metrics: GatewayMetrics, keys: Keys | None) -> None:
        self._settings, self._groups, self._metrics = settings, groups, metrics
        self._keys = keys
        self._hold = Hold(settings, groups, metrics)
        self._suspects = Suspects()
        self._retries = 0
        """Requests that are sent again after a connection broke, and no engine died."""
        self._deadlines: set[Deadline] = set()
        self.idle = asyncio.Event()
        """Set while no request waits for its answer."""
        self.idle.set()
        self._upstream = Upstream()
        self._resumption = Resumption(self._upstream)

    @property
    def upstream(self) -> Upstream:
        """Return the connections to the engines."""
        return self._upstream

    @property
    def active(self) -> int:
        """Return the number of requests that have no whole answer yet."""
        return len(self._deadlines)

    @property
    def fatal(self) -> FatalRequests:
        """Return the latest requests that were refused because engines died of them."""
        return self._suspects.found

    def close(self) -> None:
        """Let go of connections."""
        self._upstream.close()

    def end_all(self) -> None:
        """End every request that is still being answered, with an error that says why."""
        for deadline in tuple(self._deadlines):
            deadline.now(errors.draining())

    async def answer(self, request: Request) -> None:
        """Answer one request, whatever becomes of it."""
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
            self._suspects.forget(exchange)
            exchange.account(self._metrics)

    def _admit(self, exchange: Exchange) -> Deadline:
        """Return the deadline by which the request has to be answered.

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
        answered = False
        while not answered:
            if exchange.deaths >= SUSPECTED_DEATHS:
                async with self._suspects.alone(exchange) as trial:
                    answered = await self._try(exchange, trial)
            elif exchange.losses and not exchange.deaths:
                answered = await self._retry(exchange)
            else:
                answered = await self._try(exchange)

    async def _retry(self, exchange: Exchange) -> bool:
        """Do as `_try` within the retry budget: a client's requests are not multiplied while an engine lives."""
        if self._retries >= max(_MIN_RETRIES, _RETRY_SHARE * self.active):
            message = f"the connection to vLLM broke, and {self._retries} requests are being sent again already"
            raise RefusedError(errors.lost(message))
        self._retries += 1
        try:
            return await self._try(exchange)
        finally:
            self._retries -= 1

    async def _try(self, exchange: Exchange, trial: SuspectTurn | None = None) -> bool:
        """Have one engine answer; whether the answer is whole."""
        found = self._groups.pick()
        if found is None:
            since = time.monotonic()
            try:
                found = await self._hold.wait(len(exchange.body), admitted=exchange.sent_upstream)
            finally:
                exchange.held += time.monotonic() - since
        group, life = found
        if trial is not None:
            trial.begin()
        try:
            async with life.attempt(exchange.id):
                await self._attempt(exchange, group, life)
        except EngineLostError as error:
            return await self._outlive(exchange, group, life, error)
        return True

    async def _outlive(self, exchange: Exchange, group: RoutedGroup, life: Life, error: EngineLostError) -> bool:
        """Return whether the answer is whole although the engine was lost; if not, it is asked for again.

        Raises:
            RefusedError: it may not be.
        """
        if exchange.request.ended:
            # The engine has nothing more to do with what the client has not read yet.
            return True
        _log.info("%s: %s", exchange.id, error)
        if exchange.complete:
            exchange.outcome = Outcome.OK
            await exchange.end()
            return True
        died = life.over or not await group.engine.outlives(life, _VERDICT_SECONDS)
        transcript = exchange.transcript
        if exchange.begun and transcript is not None and transcript.finished:
            await exchange.write(transcript.ending())
            exchange.outcome = Outcome.OK
            await exchange.end()
            return True
        if not life.unreachable:
            exchange.losses += 1
            if died and not life.planned:
                self._suspects.record(exchange, life.name)
        self._permit_another(exchange)
        return False

    def _permit_another(self, exchange: Exchange) -> None:
        """Check whether the request goes on after the engine was lost under it.

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

    async def _attempt(self, exchange: Exchange, group: RoutedGroup, life: Life) -> None:
        """Ask this life of the group's engine.

        Raises:
            EngineLostError: it died, or the connection to it broke.
        """
        before = exchange.sent_upstream
        if exchange.begun and exchange.model != life.model:
            message = "the engine died, and the answer cannot be continued: the next engine has another model or flags"
            raise RefusedError(errors.lost(message))
        try:
            path, body = await self._next(exchange, group)
            self._count_another(exchange)
            exchange.sent_upstream = True
            exchange.model = life.model
            headers = exchange.headers(raw(group.auth), keep_key=self._keys is None)
            async with self._upstream.ask(group.api, exchange.request.method, path, headers, body) as upstream:
                if upstream.status >= 500 and not await group.engine.outlives(life, _VERDICT_SECONDS):
                    raise EngineLostError(f"vLLM answered {upstream.status} and is not healthy")
                if upstream.status == 200 and _is_stream(upstream):
                    await self._stream(exchange, upstream, group.engine, life)
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

    async def _next(self, exchange: Exchange, group: RoutedGroup) -> tuple[str, Pieces]:
        """Return path and body of the request for this attempt."""
        if exchange.begun and exchange.transcript is not None:
            return await self._resumption.request(group, exchange.transcript)
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

    async def _whole(self, exchange: Exchange, upstream: UpstreamResponse) -> None:
        """Send an answer once it is complete, so that until then it can be asked for again."""
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

    async def _stream(self, exchange: Exchange, upstream: UpstreamResponse, engine: EngineView, life: Life) -> None:
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
                    if not await engine.outlives(life, _VERDICT_SECONDS):
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
        exchange.losses = 0
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


def _is_stream(upstream: UpstreamResponse) -> bool:
    return upstream.header(b"content-type").partition(";")[0].strip().lower() == "text/event-stream"
