"""Routing: the groups of the deployment, the state of their engines, and the choice of a group for a request.

The route file lists the groups. Each group follows the head's agent and probes vLLM when the agent is silent
or a request fails; `EngineView` turns both into generations of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType

import aiohttp

from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract import AgentStatus, Cause, Health, Phase
from dsv4_runtime.contract.gateway import GatewayRoute, GroupRoute, Kind
from dsv4_runtime.engine import token_auth
from dsv4_runtime.gateway.errors import EngineLostError, RefusedError, given_up_refusal, unknown_model
from dsv4_runtime.util.files import own_shortage

_log = logging.getLogger("dsv4.gateway")


class TokenKeyError(ValueError):
    """The token key file cannot be used; the message contains file and reason."""


class RouteFile:
    """The route in its file, which is always replaced atomically."""

    def __init__(self, path: Path) -> None:
        """Read the route.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        self._path = path
        self._stamp = self._stat()
        self.route = self._read()

    def changed(self) -> bool:
        """Return whether `route` was replaced by a new one; an unreadable file changes nothing."""
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            before, self.route = self.route, self._read()
        except (OSError, ValueError) as error:
            _log.warning("route %s cannot be read, the last one stays: %s", self._path, error)
            return False
        return self.route != before

    def token_key(self) -> str:
        """Read and return the deployment's token key; raise TokenKeyError if there is none."""
        path = self.route.token_key_file
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "it is no text"
            message = f"the token key file {path} cannot be read ({reason}); mount the deployment's"
            raise TokenKeyError(message) from None
        if not key:
            raise TokenKeyError(f"the token key file {path} is empty; mount the deployment's")
        return key

    def _stat(self) -> tuple[int, int]:
        seen = self._path.stat()
        return seen.st_mtime_ns, seen.st_ino

    def _read(self) -> GatewayRoute:
        return GatewayRoute.model_validate_json(self._path.read_bytes())


_IDS_PER_LINE = 50
SETTLE_SECONDS = 1.0
"""Time after which vLLM has noticed a disconnected client: output for a request sent later proves that the engine
dropped the abandoned one."""
_MAX_ABANDONED = 4096
_VERDICT_SECONDS = 2.0
"""Limit for vLLM's `/health` to decide whether a failure was caused by the engine's death."""


class Availability(StrEnum):
    """State of an engine as used for routing."""

    HEALTHY = "healthy"
    DOUBTED = "doubted"
    """The verdict is Healthy, but a request was refused or cut off; vLLM's `/health` decides."""
    AWAY = "away"


@dataclass(eq=False, slots=True)
class Exposure:
    """A request in one engine generation, possibly still running after its client left."""

    digest: bytes
    id: str
    size: int
    sent: float
    generation: Exposures
    kinds: frozenset[Kind] = frozenset()
    """Its features (`gateway.kinds`)."""
    alone: bool = False
    """Whether no request of another gateway can be in the engine (`engine.token_auth`)."""
    trial: bool = False
    """Whether it was alone when it was sent."""
    progressed: bool = False
    broken: bool = False
    """Whether its own connection broke."""
    failed: bool = False
    """Whether vLLM reported an error in the stream."""
    left: float | None = None
    """Time at which the gateway abandoned the response; None while it waits."""

    def progress(self) -> None:
        """Record output of the engine for the request."""
        if not self.progressed:
            self.progressed = True
            self.generation.settle(self.sent)


class Exposures:
    """Requests of this gateway in one engine generation."""

    def __init__(self) -> None:
        self.drained = 0.0
        """Seconds that trials in this generation waited for other requests to end."""
        self._open: dict[Exposure, None] = {}
        self._left: dict[bytes, Exposure] = {}
        self.complete = True
        """Whether all requests that may be in the engine are recorded."""

    def __iter__(self) -> Iterator[Exposure]:
        yield from self._open
        yield from self._left.values()

    @property
    def unsettled(self) -> bool:
        """Return whether abandoned requests may still be in the engine."""
        return bool(self._left) or not self.complete

    def enter(self, digest: bytes, name: str, size: int, now: float, kinds: frozenset[Kind] = frozenset()) -> Exposure:
        """Record a request sent at `now`; `name` is its id."""
        exposure = Exposure(digest, name, size, now, self, kinds)
        self._open[exposure] = None
        return exposure

    def end(self, exposure: Exposure) -> None:
        """Remove a request that was answered or never reached the engine."""
        self._open.pop(exposure, None)

    def leave(self, exposure: Exposure, now: float, *, broken: bool) -> None:
        """Mark the response as abandoned; the engine may still be computing it.

        `broken`: whether the connection broke.
        """
        exposure.broken = broken
        if self._open.pop(exposure, self) is self:
            return
        exposure.left = now
        self._left.pop(exposure.digest, None)
        self._left[exposure.digest] = exposure
        if len(self._left) > _MAX_ABANDONED:
            del self._left[next(iter(self._left))]
            self.complete = False

    def settle(self, sent: float) -> None:
        """Remove requests abandoned before `sent`, when a request sent at `sent` produced output."""
        for digest, other in tuple(self._left.items()):
            if other.left is not None and other.left + SETTLE_SECONDS < sent:
                del self._left[digest]


class EngineWait:
    """Wait of one request for one engine generation: an `async with` block that ends with the generation.

    Entering and leaving raise EngineLostError if the generation ended.

    Only cancellation wakes a task that waits for a silent engine. A timeout that is rescheduled at the end of the
    generation is a cancellation that asyncio distinguishes from all others.
    """

    def __init__(self, generation: EngineGeneration, request: str) -> None:
        self.request = request
        self._generation = generation
        self._scope = asyncio.timeout(None)

    def end(self) -> None:
        """End the wait because the generation ended."""
        self._scope.reschedule(0.0)

    async def __aenter__(self) -> None:
        self._generation.enter(self)
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generation.leave(self, lost=isinstance(error, EngineLostError))
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise EngineLostError("the engine died") from None


class EngineGeneration:
    """One engine generation: all its requests end with it."""

    def __init__(self, name: str, identity: tuple[int, int], model: str) -> None:
        self.name = name
        """Name in the log."""
        self.identity = identity
        """Incarnation and generation."""
        self.model = model
        """Digest of model and flags: generations with the same one can continue each other's streams."""
        self.over = False
        self.planned = False
        """Whether its end is planned."""
        self.cause: Cause | None = None
        """Cause of its reported death, as first reported."""
        self.unreachable = False
        """Whether it ended because it was unreachable, which is not attributed to any request."""
        self.exposures = Exposures()
        """Requests that it is or may still be computing."""
        self._attempts: dict[EngineWait, None] = {}
        self._cut_off: dict[str, None] = {}
        """Requests whose connection broke since vLLM's last successful probe, in order."""

    def enter(self, attempt: EngineWait) -> None:
        """Register a wait; raise EngineLostError if the generation ended."""
        if self.over:
            raise EngineLostError("the engine died")
        self._attempts[attempt] = None

    def leave(self, attempt: EngineWait, *, lost: bool) -> None:
        """Unregister a wait; `lost`: because its connection broke."""
        if lost:
            self._cut_off[attempt.request] = None
        self._attempts.pop(attempt, None)

    @property
    def open(self) -> int:
        """Return the number of requests in progress."""
        return len(self._attempts)

    def confirm_alive(self) -> None:
        """Record a successful probe: earlier broken connections were not caused by the engine's death."""
        self._cut_off.clear()

    def end(self) -> tuple[str, ...]:
        """End all waits; return the ids of the open requests, those with broken connections first."""
        self.over = True
        for attempt in self._attempts:
            attempt.end()
        open_now = (attempt.request for attempt in self._attempts)
        found = (*self._cut_off, *(request for request in open_now if request not in self._cut_off))
        self._attempts.clear()
        return found


class EngineView:
    """Derives engine generations from agent statuses and failed requests."""

    def __init__(
        self,
        changed: Callable[[], None],
        group: int = 0,
        died: Callable[[EngineGeneration, bool], None] = lambda generation, reported: None,
    ) -> None:
        """Args:
        changed: called after every possible change of `state` or `given_up`.
        group: index of the group.
        died: called before the requests of a generation with an unplanned end are ended, with the generation and
            whether the agent reported the death.
        """
        self._changed, self._died = changed, died
        self._group = group
        self._name = f"group {group}'s engine" if group else "engine"
        self._generation: EngineGeneration | None = None
        self._healthy = False
        """Whether the verdict is Healthy, also while the engine only finishes open requests."""
        self._open = False
        """Whether a healthy engine accepts new requests."""
        self._confirmed = asyncio.Event()
        """Set while the generation is confirmed healthy."""
        self.state = Availability.AWAY
        self.given_up: str | None = None
        """Reason why the engine will not recover by itself, else None."""
        self.unconfirmed = asyncio.Event()
        """Set while a probe of vLLM is required."""

    def report(self, status: AgentStatus) -> None:
        """Process a status of the head's agent.

        An engine in phase `Draining` with a verdict other than Starting finishes its open requests before a planned
        end; new requests wait.
        """
        health = status.verdict.health
        finishing = status.phase is Phase.DRAINING and health in (Health.HEALTHY, Health.SUSPECT)
        serving = status.phase is Phase.SERVING
        identity = (status.incarnation, status.engine.generation if status.engine is not None else 0)
        dead = not (serving or finishing) or health is Health.DEAD
        if self._generation is not None and (dead or identity != self._generation.identity):
            if not self._generation.planned:
                failure = status.verdict.failure
                self._generation.cause = failure.cause if failure is not None else None
                self._died(self._generation, dead)
            self._end_generation()
        if self._generation is not None:
            self._generation.planned = finishing
        self._healthy = not dead and health is Health.HEALTHY
        self._open = self._healthy and serving
        if self._open and self._generation is None:
            # Without a digest, only the generations of one incarnation are assumed to have the same model.
            model = status.model_digest or f"{self._name} {identity[0]}"
            self._generation = EngineGeneration(f"{self._name} {identity[0]}-g{identity[1]}", identity, model)
        self._update()

    def give_up(self, reason: str | None) -> None:
        """Set or clear the reason why the engine will not recover by itself."""
        if reason != self.given_up:
            self.given_up = reason
            self._update()

    def leave(self) -> None:
        """End the generation: the group left the deployment or moved."""
        self._end_generation()
        self._healthy = self._open = False
        self._update()

    def mark_unreachable(self) -> None:
        """End the generation because it is unreachable."""
        if self._generation is not None:
            self._generation.unreachable = True
        self.leave()

    @property
    def alive(self) -> bool:
        """Return whether there is a generation."""
        return self._generation is not None

    def mark_unconfirmed(self) -> None:
        """Mark vLLM as unconfirmed after a failed probe."""
        if self._generation is not None:
            self.report_failure(self._generation)

    def report_failure(self, generation: EngineGeneration) -> None:
        """Mark `generation` as unconfirmed after a refused or interrupted request."""
        if generation is self._generation:
            self.unconfirmed.set()
            self._update()

    def confirm(self) -> None:
        """Record a successful probe of vLLM."""
        if self._generation is not None:
            self._generation.confirm_alive()
        self.unconfirmed.clear()
        self._update()

    @property
    def present(self) -> EngineGeneration | None:
        """Return the generation that accepts new requests, else None."""
        return self._generation if self.state is Availability.HEALTHY else None

    async def survives(self, generation: EngineGeneration) -> bool:
        """Return whether vLLM is confirmed alive, in the same generation, soon after a failure."""
        self.report_failure(generation)
        try:
            async with asyncio.timeout(_VERDICT_SECONDS if self.given_up is None else 0.0):
                await self._confirmed.wait()
        except TimeoutError:
            return False
        return self._generation is generation

    def _update(self) -> None:
        state, well = Availability.AWAY, self._healthy and self._generation is not None
        if well and self._open:
            state = Availability.DOUBTED if self.unconfirmed.is_set() else Availability.HEALTHY
        if well and not self.unconfirmed.is_set():
            self._confirmed.set()
        else:
            self._confirmed.clear()
        if state is not self.state:
            self.state = state
            _log.info("%s %s", self._name, state, extra=self._fields())
        self._changed()

    def _end_generation(self) -> None:
        if self._generation is not None:
            _log_open_requests(self._generation.name, self._generation.end(), self._fields())
        self._generation = None
        self.unconfirmed.clear()

    def _fields(self) -> dict[str, object]:
        """Return the fields of a JSON line about this engine."""
        incarnation, generation = self._generation.identity if self._generation is not None else (None, None)
        return {"group": self._group, "incarnation": incarnation, "generation": generation}


def _log_open_requests(name: str, requests: tuple[str, ...], fields: dict[str, object]) -> None:
    """Log the requests that an engine had open at its end, under the name used in the evidence of its death."""
    _log.info("%s is over; open requests: %d", name, len(requests), extra=fields)
    for start in range(0, len(requests), _IDS_PER_LINE):
        _log.info("%s had open: %s", name, " ".join(requests[start : start + _IDS_PER_LINE]), extra=fields)


_RETRY_SECONDS = 0.2
_HEALTH_SECONDS = 2.0
SILENCE_SECONDS = 6.0
"""Time without agent status and without answer of vLLM after which requests go elsewhere."""
_SILENCE_CHECK_SECONDS = 1.0
_REPEAT_SECONDS = 60.0
"""Interval of log lines about an unchanged state of an agent."""


class RoutedGroup:
    """A group with its engine, whose `EngineView` is updated from agent statuses and probes of vLLM.

    A broken connection to the agent proves nothing about the engine: the last verdict stands as long as vLLM answers.
    When neither answers, the machine or the network is lost, and no further verdict will arrive.
    """

    def __init__(
        self,
        route: GroupRoute,
        routes: RouteFile,
        engine: EngineView,
        reported: Callable[[RoutedGroup, AgentStatus], None],
    ) -> None:
        """Args:
        route: place of the group.
        routes: file of the route.
        engine: the group's engine.
        reported: called with every status of the head's agent.
        """
        self.index, self.api, self.engine = route.group, route.api, engine
        self.failures = route.failures
        """Deaths in the route."""
        self.names = route.served_names
        """Names of the model; never empty in `Groups`."""
        self._reported = reported
        self.place = route.agent, route.api
        self._agent, self._routes = route.agent, routes
        self._last_status: float | None = None
        self.report: AgentStatus | None = None
        """The agent's latest status."""
        self._last_answer = 0.0
        """Time of the last answer of vLLM while the agent was silent."""
        self.connected = False
        """Whether the agent's status stream is connected."""
        self.refusal: str | None = None
        """Reason why the agent rejects this gateway's credentials, else None."""
        self._problem = ""
        self._logged = 0.0
        self._client = AgentClient()
        self._vllm = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS), auto_decompress=False)
        self._task = asyncio.create_task(self._run())

    def has(self, names: Iterable[str]) -> bool:
        """Return whether the model has all of `names`."""
        return set(self.names).issuperset(names)

    @property
    def age(self) -> float | None:
        """Return the seconds since the agent's last status; None if there was none."""
        return None if self._last_status is None else time.monotonic() - self._last_status

    @property
    def auth(self) -> Mapping[str, str]:
        """Return the headers that authorize requests to vLLM in the incarnation of the agent's last status."""
        return token_auth.headers(self._client.token(self._agent))

    async def end(self) -> None:
        """Stop the watch and end the engine generation."""
        self._task.cancel()
        await asyncio.wait({self._task})
        self.engine.leave()

    async def _run(self) -> None:
        try:
            await asyncio.gather(self._follow(), self._probe_engine(), self._check_silence())
        finally:
            await asyncio.gather(self._client.close(), self._vllm.close())

    async def _follow(self) -> None:
        while True:
            try:
                await self._listen()
            except TokenKeyError as error:
                self._refuse(str(error))
            except aiohttp.ClientResponseError as error:
                if error.status == 401:
                    path = self._routes.route.token_key_file
                    self._refuse(f"the agent of group {self.index} answers 401: its token key is not that in {path}")
                else:
                    self._note("unreachable", f"status {error.status}")
            except AGENT_ERRORS as error:
                self._note("unreachable", f"{type(error).__name__}: {str(error)[:200]}")
            finally:
                self.connected = False
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self) -> None:
        """Process agent statuses until the connection ends; raises TokenKeyError, AGENT_ERRORS."""
        async with contextlib.aclosing(self._client.watch(self._agent, self._routes.token_key())) as stream:
            async for status in stream:
                self._last_status = time.monotonic()
                self.connected, self.refusal, self.report = True, None, status
                self._note("", "")
                self._reported(self, status)
                self.engine.report(status)

    def _refuse(self, reason: str) -> None:
        """Handle rejected credentials: the agent belongs to another incarnation or deployment."""
        self.refusal = f"agent credentials rejected: {reason}"
        self.engine.mark_unreachable()
        self._note("credentials rejected", reason)

    def _note(self, problem: str, reason: str) -> None:
        """Log a change of the agent's state at once, and a lasting problem at most once per minute."""
        now = time.monotonic()
        if problem == self._problem and (not problem or now - self._logged < _REPEAT_SECONDS):
            return
        if problem:
            fields = {"group": self.index}
            _log.warning("group %d: agent at %s: %s (%s)", self.index, self._agent, problem, reason, extra=fields)
        elif self._problem:
            _log.info("group %d: agent at %s: reachable again", self.index, self._agent)
        self._problem, self._logged = problem, now

    async def _check_silence(self) -> None:
        """Probe vLLM while the agent is silent; end the generation when both are silent for too long."""
        while True:
            await asyncio.sleep(_SILENCE_CHECK_SECONDS)
            if self.connected or self._last_status is None or not self.engine.alive:
                continue
            alive = await self._alive()
            if alive is not False:
                self._last_answer = time.monotonic()
                continue
            if self.connected:
                continue
            self.engine.mark_unconfirmed()
            if time.monotonic() - max(self._last_status, self._last_answer) > SILENCE_SECONDS:
                _log.warning("group %d: neither its agent nor vLLM answers; its requests go elsewhere", self.index)
                self.engine.mark_unreachable()

    async def _probe_engine(self) -> None:
        while True:
            await self.engine.unconfirmed.wait()
            if await self._alive():
                self.engine.confirm()
            else:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _alive(self) -> bool | None:
        """Return whether vLLM answers; None if this process lacks the resources for a request."""
        try:
            async with self._vllm.get(self.api + "/health", headers=self.auth) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return None if own_shortage(error) is not None else False


_ROUTE_POLL_SECONDS = 0.5
"""Interval of checks for a new route file."""


class Groups:
    """All groups of the deployment, following the route file."""

    def __init__(self, routes: RouteFile, names: tuple[str, ...]) -> None:
        """`names`: of the model in groups whose route has none."""
        self.routes = routes
        self.all: dict[int, RoutedGroup] = {}
        """By index; the gateway's own group first."""
        self._default = names
        self._news = asyncio.Event()
        """Set, and replaced, at each change of `_choices`."""
        self.died: Callable[[EngineGeneration, bool], None] = lambda generation, reported: None
        """See `EngineView`."""
        self.reported: Callable[[RoutedGroup, AgentStatus], None] = lambda group, status: None
        """Called with every status of an agent."""
        self.changed: Callable[[], None] = lambda: None
        """Called when requests may have another choice of groups."""
        self._choices: dict[int, tuple[EngineGeneration | None, str | None, tuple[str, ...]]] = {}
        """State on which the choice of a group depends: by its index, the generation that accepts requests, the reason
        why the group was given up, and its names."""

    async def run(self) -> None:
        """Watch all groups until cancelled."""
        try:
            await self._apply()
            while True:
                await asyncio.sleep(_ROUTE_POLL_SECONDS)
                if self.routes.changed():
                    await self._apply()
        finally:
            await asyncio.gather(*(group.end() for group in self.all.values()))

    def pick(
        self, names: Iterable[str] = (), admits: Callable[[RoutedGroup], bool] | None = None
    ) -> tuple[RoutedGroup, EngineGeneration] | None:
        """Return the group for a request and its engine generation; None if no engine is available.

        The group with the fewest requests of this gateway; on a tie the own group, whose caches contain its clients'
        prefixes. `admits` restricts the groups with all of the model's `names`.
        """
        found: tuple[RoutedGroup, EngineGeneration] | None = None
        for group in self._having(names):
            generation = group.engine.present
            if (
                generation is not None
                and (found is None or generation.open < found[1].open)
                and (admits is None or admits(group))
            ):
                found = group, generation
        return found

    async def available(
        self,
        names: Sequence[str] = (),
        admits: Callable[[RoutedGroup], bool] | None = None,
        changed: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[RoutedGroup, EngineGeneration]:
        """Return the result of `pick` as soon as there is one; `changed` waits for a possible change of `admits`.

        Raises:
            RefusedError: no group has `names` any more, or all that have them were given up.
        """
        while (found := self.pick(names, admits)) is None:
            self.check(names)
            if (reason := _given_up(self._having(names))) is not None:
                raise RefusedError(given_up_refusal(reason))
            if changed is not None and self.pick(names) is not None:
                await changed()
            else:
                await self._news.wait()
        return found

    def check(self, names: Sequence[str]) -> None:
        """Raise RefusedError if there is no group with all of the model's `names`."""
        if names and not self._having(names):
            known = self.names
            raise RefusedError(unknown_model(next((name for name in names if name not in known), names[-1]), known))

    def _having(self, names: Iterable[str]) -> list[RoutedGroup]:
        return [group for group in self.all.values() if group.has(names)]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model in any group."""
        return tuple(dict.fromkeys(name for group in self.all.values() for name in group.names)) or self._default

    @property
    def differ(self) -> bool:
        """Return whether the names of the model differ between groups."""
        return len({frozenset(group.names) for group in self.all.values()}) > 1

    @property
    def state(self) -> Availability:
        """Return the best state of all engines."""
        states = {group.engine.state for group in self.all.values()}
        return next((state for state in Availability if state in states), Availability.AWAY)

    @property
    def refusal(self) -> str | None:
        """Return why agents reject this gateway's credentials; None if one accepts them or none was reached."""
        if any(group.connected for group in self.all.values()):
            return None
        return next((group.refusal for group in self.all.values() if group.refusal is not None), None)

    @property
    def given_up(self) -> str | None:
        """Return why no group will recover by itself; None if one may."""
        return _given_up(self.all.values())

    async def _apply(self) -> None:
        # Neither mapping changes afterwards: the status page and metrics may still hold the one before.
        before, found = self.all, dict[int, RoutedGroup]()
        for route in self.routes.route.groups:
            group = before.get(route.group)
            if group is None or group.place != (route.agent, route.api):
                engine = self._engine(route.group)
                group = RoutedGroup(route, self.routes, engine, lambda group, status: self.reported(group, status))
            found[route.group] = group
        self.all = found
        for route in self.routes.route.groups:
            found[route.group].failures = route.failures
            found[route.group].names = route.served_names or self._default
            found[route.group].engine.give_up(route.given_up)
        # Before any other task runs: requests may wait for a group that is gone.
        self._changed()
        await asyncio.gather(*(group.end() for index, group in before.items() if found.get(index) is not group))

    def _engine(self, group: int) -> EngineView:
        return EngineView(self._changed, group, lambda generation, reported: self.died(generation, reported))

    def _changed(self) -> None:
        before = self._choices
        self._choices = {
            index: (group.engine.present, group.engine.given_up, group.names) for index, group in self.all.items()
        }
        if self._choices != before:
            self._news.set()
            self._news = asyncio.Event()
            self.changed()


def _given_up(groups: Iterable[RoutedGroup]) -> str | None:
    """Return why none of `groups` will recover by itself; None if one may, or if there is none."""
    reasons = [group.engine.given_up for group in groups]
    return reasons[0] if reasons and None not in reasons else None
