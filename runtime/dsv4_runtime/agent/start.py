"""Tasks of every member before the engine, as `decide.member` orders them: checks, weights, network, Ray."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from dsv4_runtime.agent.decide.events import AgentEvent, Done, Staged, Task, TaskFailed, WeightsRead
from dsv4_runtime.agent.preflight import PreflightError, preflight
from dsv4_runtime.agent.staging import StagingError, prepare_page_cache, read_again, stage
from dsv4_runtime.contract import Cause, FabricStatus, Progress
from dsv4_runtime.fabric.member import FabricError
from dsv4_runtime.weights.messages import StagingReport

if TYPE_CHECKING:
    from dsv4_runtime.agent.member import Member

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _log_only() -> Iterator[None]:
    """Log what keeps processes from waiting: without them an engine starts all the same, only later."""
    try:
        yield
    except (OSError, TimeoutError) as error:
        _log.warning("no process waits for the next engine: %s", str(error) or type(error).__name__)


class StartRunner:
    """The tasks of a member's start."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._plan, self._rank = member.plan, member.rank

    def work(self, task: Task) -> Coroutine[Any, Any, AgentEvent]:
        """Return the work of a task."""
        match task:
            case Task.PREFLIGHT:
                return self.preflight()
            case Task.STAGE:
                return self.stage()
            case Task.PROVE:
                return self.prove()
            case Task.READ_AHEAD:
                return self.read_ahead()
            case Task.SCRUB:
                return self.scrub()
            case Task.VERIFY:
                return self.verify()
            case Task.STANDBY:
                return self.standby()
        assert task is Task.JOIN, task  # noqa: S101  (`Member` and `EngineRunner` have the others)
        return self.join()

    async def preflight(self) -> AgentEvent:
        """Check the member."""
        try:
            await preflight(self._plan, self._rank, self._member.fabric)
        except PreflightError as error:
            return TaskFailed(Task.PREFLIGHT, error.cause, str(error), "preflight")
        return Done(Task.PREFLIGHT)

    async def stage(self) -> AgentEvent:
        """Have the weights on this member."""

        def heard(news: StagingReport) -> None:
            self._member.share.heard(news)
            if news.stage is not None:
                self._member.state.advance(Progress(stage=news.stage, percent=news.percent))

        with _log_only():
            await self._member.standby.start_server("vllm")
        try:
            done = await stage(self._plan, self._rank, self._member.token, heard)
        except StagingError as error:
            return TaskFailed(Task.STAGE, error.cause, str(error), "staging")
        for name in done.wrong:
            said = "%s: %s of rank %s was not what its source says, and was fetched anew"
            _log.warning(said, Cause.WEIGHTS_CORRUPT, name, self._rank)
        self._member.state.weights_repaired = done.wrong
        return Staged(done.verified)

    async def prove(self) -> AgentEvent:
        """Prove the network, then give Ray and vLLM the environment that goes with it."""
        member, fabric = self._member, self._member.fabric
        if fabric is None:
            return Done(Task.PROVE)
        try:
            await fabric.prove(self._fabrics)
            for variable in fabric.variables:
                _log.info("%s=%s: %s", variable.name, variable.value, variable.reason)
            found = {variable.name: variable.value for variable in fabric.variables}
            # What the plan says wins: the user may know better.
            member.env = {**member.env, **found, **self._plan.environment(self._rank)}
            await fabric.measure(self._fabrics, member.start_child, member.directory / "fabric.log")
        except FabricError as error:
            return TaskFailed(Task.PROVE, error.cause, str(error), "preflight")
        member.children = [child for child in member.children if child.running]
        return Done(Task.PROVE)

    async def read_ahead(self) -> AgentEvent:
        """Read into memory what the ranks will load."""

        def heard(news: StagingReport) -> None:
            self._member.state.disk_rate = news.disk_bytes_per_second or self._member.state.disk_rate

        await prepare_page_cache(self._plan, self._rank, heard)
        return Done(Task.READ_AHEAD)

    async def join(self) -> AgentEvent:
        """Start this member's Ray node."""
        await self._member.ray.start(self._member.start_child)
        return Done(Task.JOIN)

    async def standby(self) -> AgentEvent:
        """Have processes wait for the next engine."""
        with _log_only():
            await self._member.standby.prepare()
        return Done(Task.STANDBY)

    async def scrub(self) -> AgentEvent:
        """Read the weights' files while the engine serves; say when all were read, and if one is wrong."""

        def heard(news: StagingReport) -> None:
            if news.verified:
                self._member.loop.feed(WeightsRead(Task.SCRUB))

        done = await read_again("scrub", self._plan, self._rank, heard)
        return self._wrong(Task.SCRUB, done.wrong) if done.wrong else Done(Task.SCRUB)

    async def verify(self) -> AgentEvent:
        """Read the weights' files at once, and say whether they are right."""
        done = await read_again("verify", self._plan, self._rank, lambda _: None)
        return self._wrong(Task.VERIFY, done.wrong) if done.wrong else WeightsRead(Task.VERIFY, done.verified)

    def _wrong(self, task: Task, names: tuple[str, ...]) -> AgentEvent:
        message = f"{names[0]} in {self._plan.weights.path} of rank {self._rank} is not what its source says any more"
        return TaskFailed(task, Cause.WEIGHTS_CORRUPT, message, "staging")

    def _fabrics(self) -> dict[int, FabricStatus | None]:
        return {rank: peer.status.fabric if peer.status else None for rank, peer in self._member.peers.all.items()}
