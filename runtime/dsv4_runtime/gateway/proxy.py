"""Forwards requests to vLLM, and keeps each until it is answered or cannot be answered any more.

A request is retried until one engine lives long enough to answer it. Between attempts, the delivered part of the
response decides: nothing delivered (the request is sent again), a stream with exact continuation (it is continued),
anything else (it ends with an explicit error).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.engine import token_auth
from dsv4_runtime.engine.token_auth import Kind
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.admission import (
    EncodingError,
    Models,
    find_models,
    is_allowed,
    model_of_path,
    parse_object,
)
from dsv4_runtime.gateway.continuation import (
    CHAT,
    COMPLETIONS,
    TERMINATED_PATHS,
    Pieces,
    Resumption,
    Transcript,
    is_error_event,
    is_final_event,
    obstacle,
    with_token_ids,
)
from dsv4_runtime.gateway.errors import ClientGoneError, EngineLostError, Outcome, Refusal, RefusedError, unavailable
from dsv4_runtime.gateway.exchange import Deadline, Exchange, logged_path
from dsv4_runtime.gateway.http_client import (
    GENERATING,
    BrokenMessageError,
    UnreachableError,
    Upstream,
    UpstreamRequest,
    UpstreamResponse,
    encode_headers,
)
from dsv4_runtime.gateway.metrics import TRACE_HEADERS, GatewayMetrics, Traces
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.gateway.routing import EngineGeneration, EngineView, EngineWait, Groups, RoutedGroup
from dsv4_runtime.gateway.suspects import TURN_SECONDS, Suspects, TrialAttempt, Trials, TurnRefusedError
from dsv4_runtime.util import sse


class HoldQueue:
    """Bounded queue of requests that wait for an engine."""

    def __init__(self, settings: GatewaySettings, groups: Groups, metrics: GatewayMetrics) -> None:
        self._settings, self._groups, self._metrics = settings, groups, metrics
        self._count = self._bytes = 0

    async def wait(
        self,
        size: int,
        names: Sequence[str],
        admits: Callable[[RoutedGroup], bool] | None = None,
        changed: Callable[[], Awaitable[None]] | None = None,
        *,
        admitted: bool,
    ) -> tuple[RoutedGroup, EngineGeneration]:
        """Wait for an available group; return it with its engine generation.

        Args:
            size: bytes of the request's body.
            names: see `Groups.available`.
            admits: see `Groups.available`.
            changed: see `Groups.available`.
            admitted: whether an engine already had the request. Such requests are always accepted; the bounds apply to
                requests that arrive while no engine is available.

        Raises:
            RefusedError: the queue is full, no engine became available in time, or see `Groups.available`.
        """
        settings = self._settings
        if not admitted and (self._count >= settings.max_held_requests or self._bytes + size > settings.max_held_bytes):
            raise RefusedError(unavailable("the engine is unavailable, and the queue of waiting requests is full"))
        self._change(1, size)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(settings.hold_timeout_seconds) as bound:
                return await self._groups.available(names, admits, changed)
        except TimeoutError:
            if not bound.expired():
                raise
            message = f"the engine is unavailable and did not recover within {settings.hold_timeout_seconds:g} s"
            raise RefusedError(unavailable(message)) from None
        finally:
            self._change(-1, -size)
            self._metrics.hold.observe(time.monotonic() - begun)

    def _change(self, count: int, size: int) -> None:
        self._count += count
        self._bytes += size
        self._metrics.held.set(self._count)
        self._metrics.held_bytes.set(self._bytes)


_log = logging.getLogger("dsv4.gateway")

# Requests without side effects, which can be repeated safely.
_REPEATABLE = frozenset(
    {COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"}
    | {"/tokenize", "/detokenize", "/pooling", "/classify"}
    | {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    | {"/v1/audio/transcriptions", "/v1/audio/translations"}
)
_MAX_LOSSES = 10
"""Consecutive broken connections per request."""
_MIN_RETRIES, _RETRY_SHARE = 3, 0.2
"""Concurrent retries while no engine died: Envoy's retry budget with its defaults."""
_MAX_BUFFERED_BYTES = 16 * 2**20
"""A longer response is forwarded as it arrives, and cannot be repeated once it has begun."""
COMMENT_SECONDS = 15.0
"""Interval of comments in a held stream: proxies close idle connections."""
FOLLOWED = frozenset({COMPLETIONS, CHAT})
"""Paths whose streams begin with the first output of the engine."""
_TURN = token_auth.TURN_HEADER.lower().encode()
_PORT_REFUSED = "vLLM's port did not take the gateway's token"


class Proxy:
    """Handler of all requests that the gateway does not answer itself."""

    def __init__(
        self,
        settings: GatewaySettings,
        groups: Groups,
        metrics: GatewayMetrics,
        *,
        keep_key: bool,
        traces: Traces | None = None,
    ) -> None:
        """Args:
        keep_key: whether vLLM receives the client's API key.
        traces: of requests; None: there are none.
        """
        self._settings, self._groups, self._metrics, self._traces = settings, groups, metrics, traces
        self._keep_key = keep_key
        self._hold = HoldQueue(settings, groups, metrics)
        self.suspects = Suspects(settings.hold_timeout_seconds)
        # A request that waits for the end of a trial may go to another group.
        groups.changed = self.suspects.notify
        groups.died = lambda generation, reported: self.suspects.died(
            generation.name, generation.exposures, reported=reported, cause=generation.cause
        )
        self._retries = 0
        """Requests being repeated after a broken connection without an engine death."""
        self._deadlines: set[Deadline] = set()
        self.idle = asyncio.Event()
        """Set while no request is in progress."""
        self.idle.set()
        self.upstream = Upstream()
        self._resumption = Resumption(self.upstream)
        self._trials = Trials(self.suspects, self.upstream)

    @property
    def active(self) -> int:
        """Return the number of requests in progress."""
        return len(self._deadlines)

    def end_all(self) -> None:
        """End every request in progress with an error."""
        for deadline in tuple(self._deadlines):
            deadline.now(errors.DRAINING)

    async def answer(self, request: Request) -> None:
        """Handle one request to its end."""
        exchange = Exchange(request, self._settings)
        try:
            deadline = self._admit(exchange)
            if self._traces is not None:
                self._begin_trace(exchange, self._traces)
            self._deadlines.add(deadline)
            self.idle.clear()
            try:
                async with deadline.scope:
                    await exchange.read()
                    request.record(exchange.body, repeatable=_repeatable(exchange))
                    if await self._answers_model(exchange):
                        return
                    await self._check_model(exchange)
                    with self._client(exchange):
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
            request.abort()
        finally:
            exchange.record(self._metrics)

    def _admit(self, exchange: Exchange) -> Deadline:
        """Check the path; return the deadline; raises RefusedError."""
        if exchange.request.upgrade:
            raise RefusedError(errors.NO_UPGRADE)
        if not is_allowed(exchange.path):
            raise RefusedError(errors.unknown_path(exchange.path))
        seconds = exchange.timeout()
        return Deadline(seconds, f"the request took longer than {seconds:g} s")

    def _begin_trace(self, exchange: Exchange, traces: Traces) -> None:
        request = exchange.request
        known = exchange.path if exchange.path in _REPEATABLE else ""
        received = {name: text for name in TRACE_HEADERS if (text := request.header(name.encode()))}
        exchange.trace = traces.begin(
            f"{request.method} {known}".rstrip(),
            received,
            {
                "http.request.method": request.method,
                "url.path": logged_path(request),
                # As in vLLM's span.
                "gen_ai.request.id": exchange.id,
            },
        )

    async def _check_model(self, exchange: Exchange) -> None:
        """Check the model name, because vLLM logs unknown names; raises RefusedError."""
        steps = find_models(exchange.body)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: Models = end.value
                break
            except EncodingError:
                raise RefusedError(errors.BAD_ENCODING) from None
            await asyncio.sleep(0)
        if found.wrong is not None:
            raise RefusedError(errors.bad_model(found.wrong, self._groups.names))
        exchange.names = tuple(dict.fromkeys(found.names))
        self._groups.check(exchange.names)

    async def _answers_model(self, exchange: Exchange) -> bool:
        """Answer `/v1/models/NAME`, which vLLM does not implement; return whether the path matched.

        Raises:
            RefusedError: the model is not served.
        """
        name = model_of_path(exchange.path)
        if name is None:
            return False
        self._groups.check((name,))
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "vllm"}
        exchange.outcome = Outcome.OK
        await exchange.send_whole(200, exchange.own_headers(), json.dumps(card).encode())
        return True

    async def _give_up(self, exchange: Exchange, refusal: Refusal) -> None:
        try:
            if not exchange.request.begun:
                await exchange.refuse(refusal)
            elif exchange.request.ended:
                # The client has had enough time to read it.
                exchange.request.abort()
            else:
                self._metrics.cut.inc()
                await exchange.cut(refusal)
        except ClientGoneError:
            exchange.outcome = Outcome.CANCELLED

    @contextlib.contextmanager
    def _client(self, exchange: Exchange) -> Iterator[None]:
        """Count a client of the request within the block."""
        digest = exchange.digest
        self.suspects.arrive(digest)
        try:
            yield
        finally:
            self.suspects.depart(digest)

    async def _until_answered(self, exchange: Exchange) -> None:
        answered = False
        while not answered:
            if self.suspects.suspected(exchange.digest, exchange.kinds):
                answered = await self._try_alone(exchange)
            elif exchange.losses and not exchange.deaths:
                answered = await self._retry(exchange)
            else:
                answered = await self._try(exchange)

    async def _retry(self, exchange: Exchange) -> bool:
        """Call `_try` within the retry budget: requests are not multiplied while an engine lives."""
        if self._retries >= max(_MIN_RETRIES, _RETRY_SHARE * self.active):
            message = f"the connection to vLLM broke, and {self._retries} requests are being sent again already"
            raise RefusedError(errors.engine_lost(message))
        self._retries += 1
        try:
            return await self._try(exchange)
        finally:
            self._retries -= 1

    async def _try(self, exchange: Exchange) -> bool:
        """Send the request to one engine; return whether the response is complete."""
        digest = exchange.digest
        group, generation = await self._engine(exchange, lambda group: self.suspects.admits(group, digest))
        if self.suspects.suspected(digest, exchange.kinds):
            return False
        try:
            async with EngineWait(generation, exchange.id):
                await self._attempt(exchange, group, generation)
        except TurnRefusedError:
            await asyncio.sleep(TURN_SECONDS)
            return False
        except EngineLostError as error:
            return await self._handle_loss(exchange, group, generation, error)
        return True

    async def _try_alone(self, exchange: Exchange) -> bool:
        """Call `_try` for a suspected request within its trial."""
        digest = exchange.digest
        self.suspects.wait(exchange, digest, lambda group: group.has(exchange.names))
        try:
            group, generation = await self._engine(exchange)
            while not self.suspects.is_next(exchange, group):
                async with _keep_alive_comments(exchange):
                    await self.suspects.changed()
                if not self.suspects.suspected(digest, exchange.kinds):
                    return False
                group, generation = await self._engine(exchange)
            trial = self.suspects.begin(exchange, group)
        finally:
            self.suspects.stop_waiting(exchange)
        attempt = TrialAttempt(self._trials, trial, group, generation)
        try:
            async with EngineWait(generation, exchange.id):
                with attempt:
                    async with _keep_alive_comments(exchange):
                        await attempt.wait_until_free()
                    while True:
                        try:
                            await self._attempt(exchange, group, generation, attempt)
                        except TurnRefusedError as error:
                            await attempt.wait_after_refusal(error.reason)
                        else:
                            return True
        except EngineLostError as error:
            # Keep the trial until the agent's report: another request would invalidate the proof.
            await self._trials.wait_for_report(group, generation)
            return await self._handle_loss(exchange, group, generation, error)
        finally:
            attempt.end()

    async def _engine(
        self, exchange: Exchange, admits: Callable[[RoutedGroup], bool] | None = None
    ) -> tuple[RoutedGroup, EngineGeneration]:
        """Return a group and its engine generation, waiting if necessary."""
        names = exchange.names
        found = self._groups.pick(names, lambda group: _continues(exchange, group) and (not admits or admits(group)))
        found = found or self._groups.pick(names, admits)
        if found is None:
            since = time.monotonic()
            exchange.event("held")
            try:
                async with _keep_alive_comments(exchange):
                    size, changed = len(exchange.body), self.suspects.changed
                    found = await self._hold.wait(size, names, admits, changed, admitted=exchange.sent_upstream)
            finally:
                exchange.held += time.monotonic() - since
        return found

    async def _handle_loss(
        self, exchange: Exchange, group: RoutedGroup, generation: EngineGeneration, error: EngineLostError
    ) -> bool:
        """Return whether the response is complete although the engine was lost; otherwise it is tried again.

        Raises:
            RefusedError: the request cannot be tried again.
        """
        if exchange.request.ended:
            # The remaining data is buffered; the engine is not needed any more.
            return True
        _log.info("%s: %s", exchange.id, error)
        exchange.event("engine lost", group, generation)
        if exchange.complete:
            exchange.outcome = Outcome.OK
            await exchange.request.end()
            return True
        died = generation.over or not await group.engine.survives(generation)
        transcript = exchange.transcript
        if exchange.request.begun and transcript is not None and transcript.finished:
            await exchange.write(transcript.ending())
            exchange.outcome = Outcome.OK
            await exchange.request.end()
            return True
        if not generation.unreachable:
            exchange.losses += 1
            # Planned ends too: the retry budget is for connections that break while the engine lives.
            exchange.deaths += died
        self._check_retry(exchange)
        return False

    def _check_retry(self, exchange: Exchange) -> None:
        """Check whether the request can be tried again after the loss of its engine; raises RefusedError."""
        if exchange.request.begun:
            if exchange.transcript is not None:
                reason = exchange.transcript.obstacle
            else:
                reason = exchange.obstacle if exchange.is_stream else "it was too long to keep"
            if reason is not None:
                raise RefusedError(errors.engine_lost(f"the engine died, and the answer cannot be continued: {reason}"))
        elif exchange.sent_upstream and not _repeatable(exchange):
            raise RefusedError(errors.engine_lost("the engine died under the request, which may have taken effect"))
        if exchange.losses > _MAX_LOSSES:
            raise RefusedError(errors.engine_lost(f"the connection to vLLM broke {exchange.losses} times in a row"))

    async def _attempt(
        self, exchange: Exchange, group: RoutedGroup, generation: EngineGeneration, trial: TrialAttempt | None = None
    ) -> None:
        """Send the request to one engine generation; raises EngineLostError, TurnRefusedError."""
        before = exchange.sent_upstream
        if exchange.request.begun and exchange.model != generation.model:
            message = "the engine died, and the answer cannot be continued: the next engine has another model or flags"
            raise RefusedError(errors.engine_lost(message))
        try:
            path, body = await self._prepare(exchange, group)
            self._count_another(exchange, group, generation)
            exchange.sent_upstream = True
            exchange.model = generation.model
            own = encode_headers(group.auth)
            if trial is not None:
                own += trial.headers()
            elif self.suspects.has_trial(group):
                own += self._trials.headers(Kind.SHARED)
            headers = exchange.headers(own, keep_key=self._keep_key)
            with self._record_exposure(exchange, generation, trial) as admitted:
                method = exchange.request.method
                request = self.upstream.request(group.api, method, path, headers, body, admitted)
                if trial is not None:
                    trial.request = request
                await self._send(exchange, group, generation, request)
        except TurnRefusedError:
            exchange.sent_upstream, exchange.turn_refused = before, True
            raise
        except UnreachableError as error:
            # vLLM has not received it.
            exchange.sent_upstream = before
            raise EngineLostError(str(error)) from error
        except BrokenMessageError as error:
            raise EngineLostError(str(error)) from error

    @contextlib.contextmanager
    def _record_exposure(
        self, exchange: Exchange, generation: EngineGeneration, trial: TrialAttempt | None
    ) -> Iterator[Callable[[], None] | None]:
        """Record within the block that this engine generation has the request.

        A trial is recorded when the yielded function is called: vLLM's API process may reject it because of another
        gateway's request, and if the engine dies of that one, the trial was not in it. It stays recorded when its
        client leaves.
        """
        exchange.exposure = None

        def record() -> None:
            now, size = time.monotonic(), len(exchange.body)
            exchange.exposure = generation.exposures.enter(exchange.digest, exchange.id, size, now, exchange.kinds)
            if trial is not None:
                trial.sent(exchange.exposure)

        if trial is None:
            record()
        try:
            yield None if trial is None else record
        except (UnreachableError, TurnRefusedError):
            if exchange.exposure is not None:
                generation.exposures.end(exchange.exposure)
            raise
        except BaseException as error:
            broken = isinstance(error, (BrokenMessageError, EngineLostError))
            continues = trial is not None and trial.exclusive and isinstance(error, asyncio.CancelledError)
            if exchange.exposure is not None and not continues:
                generation.exposures.leave(exchange.exposure, time.monotonic(), broken=broken)
            raise
        if exchange.exposure is not None:
            generation.exposures.end(exchange.exposure)

    def _record_computed(self, exchange: Exchange, generation: EngineGeneration, status: int) -> None:
        """Record that the engine has computed the whole response, even if the client is still reading."""
        if status == 200 and exchange.path in GENERATING:
            self.suspects.kinds.answered(exchange.kinds)
        if exchange.exposure is not None:
            if status == 200 and exchange.path in GENERATING:
                exchange.exposure.progress()
            generation.exposures.end(exchange.exposure)
        if status < 400:
            self.suspects.answered(exchange.digest)

    async def _send(
        self,
        exchange: Exchange,
        group: RoutedGroup,
        generation: EngineGeneration,
        request: UpstreamRequest,
    ) -> None:
        async with request as upstream:
            if upstream.status == 503 and (reason := upstream.header(_TURN)):
                raise TurnRefusedError(token_auth.refusal_reason(reason))
            if upstream.status >= 500 and not await group.engine.survives(generation):
                raise EngineLostError(f"vLLM answered {upstream.status} and is not healthy")
            if upstream.status == 200 and _is_stream(upstream):
                await self._stream(exchange, upstream, group.engine, generation)
            elif exchange.request.begun:
                if upstream.status == 401 and await upstream.read() == token_auth.REFUSED:
                    raise EngineLostError(_PORT_REFUSED)
                message = f"the engine refused to continue the stream (status {upstream.status})"
                raise RefusedError(errors.engine_lost(message))
            else:
                await self._whole(exchange, upstream, generation)

    def _count_another(self, exchange: Exchange, group: RoutedGroup, generation: EngineGeneration) -> None:
        event = "sent"
        if exchange.turn_refused:
            exchange.turn_refused = False
        elif exchange.request.begun:
            event = "continued"
            exchange.continuations += 1
            self._metrics.continued.inc()
        elif exchange.sent_upstream:
            event = "replayed"
            exchange.replays += 1
            self._metrics.replayed.inc()
        exchange.event(event, group, generation)

    async def _prepare(self, exchange: Exchange, group: RoutedGroup) -> tuple[str, Pieces]:
        """Return path and body for this attempt."""
        if exchange.request.begun and exchange.transcript is not None:
            return await self._resumption.request(group, exchange.transcript)
        whole = exchange.request.target, (exchange.body,)
        body = parse_object(exchange.body) if exchange.path in (COMPLETIONS, CHAT) else None
        if body is None or body.get("stream") is not True:
            exchange.obstacle = "the request has an unsupported form, or is too long to parse"
            return whole
        exchange.obstacle = obstacle(exchange.path, body)
        if exchange.obstacle is not None:
            return whole
        exchange.transcript = Transcript(exchange.path, exchange.body, body)
        return exchange.request.target, with_token_ids(exchange.body, body)

    async def _whole(self, exchange: Exchange, upstream: UpstreamResponse, generation: EngineGeneration) -> None:
        """Send a response after its end, so that the request can be repeated until then."""
        headers, whole = exchange.answer_headers(upstream), bytearray()
        while part := await upstream.part():
            if exchange.request.begun:
                await exchange.write(part)
                continue
            whole += part
            if len(whole) > _MAX_BUFFERED_BYTES or not exchange.request.charge.take(len(part)):
                exchange.begin(upstream.status, headers)
                await exchange.write(bytes(whole))
                whole.clear()
        if upstream.status == 401 and whole == token_auth.REFUSED:
            raise EngineLostError(_PORT_REFUSED)
        self._record_computed(exchange, generation, upstream.status)
        exchange.outcome = _outcome(upstream.status)
        if exchange.request.begun:
            await exchange.request.end()
        else:
            await exchange.send_whole(upstream.status, headers, whole)

    async def _stream(
        self, exchange: Exchange, upstream: UpstreamResponse, engine: EngineView, generation: EngineGeneration
    ) -> None:
        """Forward events as they arrive. The head waits for the first event: until then the request can be replayed."""
        splitter, transcript, outcome = sse.Splitter(), exchange.transcript, Outcome.OK
        exchange.is_stream = True
        if not exchange.request.begun:
            # vLLM sends its head long before the first event, which must not be delayed.
            exchange.begin(upstream.status, exchange.answer_headers(upstream))
        while data := await upstream.part():
            out: list[bytes] = []
            for event in _split_events(exchange, splitter, data if transcript is None else transcript.strip(data)):
                payload, passed = sse.payload(event), event
                if is_error_event(event, payload):
                    await _deliver(exchange, out)
                    out = []
                    if exchange.exposure is not None:
                        # The client may leave meanwhile, and the event is no more in the response.
                        exchange.exposure.failed = True
                    if not await engine.survives(generation):
                        raise EngineLostError("vLLM reported an error in the stream and is not healthy")
                    outcome = Outcome.ENGINE_ERROR
                elif payload[:1] == b"{" and exchange.path in FOLLOWED and exchange.exposure is not None:
                    exchange.exposure.progress()
                if transcript is not None and payload[:1] == b"{" and not is_error_event(event, payload):
                    passed = transcript.take(event, payload)
                exchange.complete = exchange.complete or is_final_event(event, payload)
                out.append(passed)
            await _deliver(exchange, out)
        if exchange.path in TERMINATED_PATHS and not exchange.complete:
            raise EngineLostError("vLLM ended the stream in the middle")
        if outcome is Outcome.OK:
            self._record_computed(exchange, generation, upstream.status)
        exchange.outcome = outcome
        await exchange.request.end()


@contextlib.asynccontextmanager
async def _keep_alive_comments(exchange: Exchange) -> AsyncIterator[None]:
    """Send comments in a started stream within the block, which must not send anything else."""
    if not (exchange.request.begun and exchange.is_stream) or exchange.request.ended:
        yield
        return
    task = asyncio.create_task(_send_comments(exchange))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _send_comments(exchange: Exchange) -> None:
    # A disconnect cancels the request's own task.
    with contextlib.suppress(ClientGoneError):
        while True:
            await asyncio.sleep(COMMENT_SECONDS)
            await exchange.write(b": the engine restarts\n\n")


async def _deliver(exchange: Exchange, events: list[bytes]) -> None:
    """Send events. No await separates the transcript's record from handing the bytes to the server."""
    if events:
        exchange.losses = 0
        exchange.charge_transcript()
        if data := b"".join(events):
            await exchange.write(data)


def _split_events(exchange: Exchange, splitter: sse.Splitter, data: bytes) -> list[bytes]:
    try:
        events = splitter.feed(data)
    except sse.EventTooLongError:
        message = f"vLLM sent an event of more than {sse.MAX_EVENT_BYTES >> 20} MiB"
        raise RefusedError(errors.engine_lost(message)) from None
    exchange.charge_transcript()
    if not exchange.keep_tail(splitter.size):
        raise RefusedError(errors.engine_lost("the gateway has no room for an event of the stream"))
    return events


def _continues(exchange: Exchange, group: RoutedGroup) -> bool:
    """Return whether the group's engine can continue the response, which may have begun."""
    present = group.engine.present
    return not exchange.request.begun or (present is not None and present.model == exchange.model)


def _repeatable(exchange: Exchange) -> bool:
    return exchange.path in _REPEATABLE or exchange.request.method in ("GET", "HEAD")


def _outcome(status: int) -> Outcome:
    if status < 400:
        return Outcome.OK
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.ENGINE_ERROR


def _is_stream(upstream: UpstreamResponse) -> bool:
    return upstream.header(b"content-type").partition(";")[0].strip().lower() == "text/event-stream"
