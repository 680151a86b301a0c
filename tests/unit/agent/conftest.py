"""A plan of two members, and a replay of events through the agent's decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dsv4_runtime.agent.decide.actions import AgentAction, Enter, RecordFailure, ReportDead, SaveEvidence, StartTask
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiAnswered,
    Done,
    EvidenceSaved,
    FirstCompletion,
    Now,
    Peer,
    ProcessEnded,
    Staged,
    Started,
    Task,
    TimerFired,
)
from dsv4_runtime.agent.decide.member import due, step
from dsv4_runtime.agent.decide.state import MemberState, initial
from dsv4_runtime.contract import (
    AgentStatus,
    Cause,
    EngineStatus,
    Failure,
    GroupPlan,
    Health,
    HealthPolicy,
    Phase,
    Timeouts,
    Verdict,
)
from dsv4_testkit.documents import agent_status, group_plan

MakePlan = Callable[..., GroupPlan]


@pytest.fixture
def make_plan() -> MakePlan:
    """Return the factory of a plan with two members; keyword arguments replace its fields."""
    return group_plan


EPOCH = 1_000_000.0
"""Unix time at which a replay's monotonic clock showed 0."""


@dataclass
class Replay:
    """Replay of events through `step` with a simulated clock: timers fire when due, with fresh responses of members."""

    state: MemberState
    clock: float = 100.0
    awake: float = 0.0
    verified: bool = False
    """Whether the weight files are read again before the start."""
    silent: set[int] = field(default_factory=set)
    """Ranks without responses and heartbeats."""
    busy: set[int] = field(default_factory=set)
    """Ranks that send heartbeats but have not responded yet."""
    done: list[tuple[float, AgentAction]] = field(default_factory=list)
    """Actions with the clock's time of each."""

    def feed(self, event: AgentEvent, at: float | None = None) -> None:
        """Advance the clock to `at`, then feed the event. Evidence is saved immediately."""
        self.pass_to(self.clock if at is None else at)
        self._step(event)

    def play(self, events: Iterable[tuple[float, AgentEvent]]) -> None:
        """Feed the events, each after its number of seconds from now."""
        begun = self.clock
        for seconds, event in sorted(events, key=lambda one: one[0]):
            self.feed(event, begun + seconds)

    def pass_to(self, clock: float) -> None:
        while (at := due(self.state, self._now())) is not None and at <= clock:
            self.clock = max(self.clock, at)
            self.answer()
            self._step(TimerFired())
        self.clock = clock

    def answer(self) -> None:
        """Feed a view in which every member that is not silent has repeated its response."""
        answered = {}
        for rank, peer in self.state.view.peers.items():
            if rank in self.silent:
                answered[rank] = replace(peer, asked=self.clock, error="TimeoutError")
            elif rank in self.busy:
                answered[rank] = replace(peer, beat=self.clock)
            else:
                answered[rank] = replace(peer, heard=self.clock, asked=self.clock, beat=self.clock)
        self._step(replace(self.state.view, peers=answered))

    def tell(self, rank: int, **changes: Any) -> None:
        """Feed a response of a member with `changes` to its status."""
        peer = self.state.view.peers[rank]
        assert peer.status is not None
        self.busy.discard(rank)
        status = peer.status.model_copy(update=changes)
        told = replace(peer, status=status, heard=self.clock, asked=self.clock, beat=self.clock, error=None)
        self._step(replace(self.state.view, peers={**self.state.view.peers, rank: told}))

    def change(self, rank: int, **changes: Any) -> None:
        """Change fields of the view of a member."""
        peers = self.state.view.peers
        self._step(replace(self.state.view, peers={**peers, rank: replace(peers[rank], **changes)}))

    def change_at(self, clock: float, rank: int, **changes: Any) -> None:
        self.pass_to(clock)
        self.change(rank, **changes)

    def serve(self) -> None:
        """Replay the events from the start to a serving engine."""
        for task in (Task.PREFLIGHT, Task.LISTEN, Task.STAGE, Task.PROVE, Task.JOIN):
            if task is Task.PREFLIGHT:
                self.feed(Started())
            self.feed(Staged(self.verified) if task is Task.STAGE else Done(task))
        self.join()
        if self.state.rank == 0:
            self.feed(ApiAnswered())
            self.feed(FirstCompletion())
        self.done.clear()

    def join(self) -> None:
        """Feed a view in which every other member has joined, with its Ray node."""
        now = {"heard": self.clock, "asked": self.clock, "beat": self.clock}
        self._step(replace(self.state.view, peers={rank: Peer(joined(rank), **now) for rank in self.state.view.peers}))

    def all(self, kind: type[Any]) -> list[Any]:
        """Return the actions of type `kind`."""
        return [action for _, action in self.done if isinstance(action, kind)]

    @property
    def phases(self) -> list[Phase]:
        """Phases in the order in which they were entered."""
        return [action.phase for action in self.all(Enter)]

    @property
    def failure(self) -> tuple[Cause, int | None, str]:
        """Cause, culprit and message of the only failure."""
        (recorded,) = self.all(RecordFailure)
        return recorded.failure.cause, recorded.failure.culprit_rank, recorded.failure.message

    def restart(self) -> None:
        """Replay the death of the engine and the cleanup before its restart."""
        self.feed(ProcessEnded("engine-core"))
        self.pass_to(self.clock + 4)
        self.feed(Done(Task.CLEAR))

    def head_says(self, generation: int, phase: Phase) -> None:
        self.tell(0, engine=EngineStatus(generation=generation), phase=phase)

    @property
    def verdict(self) -> tuple[float, Failure]:
        """Time and failure of the first report of a dead engine."""
        return next((clock, action.failure) for clock, action in self.done if isinstance(action, ReportDead))

    @property
    def outcome(self) -> tuple[str, int | None, int]:
        """Cause, culprit and level of the first repair."""
        failure = self.all(RecordFailure)[0].failure
        decided = next(
            action
            for action in self.all(Enter) + self.all(StartTask)
            if action == StartTask(Task.CLEAR) or failed(action)
        )
        return str(failure.cause), failure.culprit_rank, 2 if failed(decided) else 1

    def _now(self) -> Now:
        return Now(self.clock, EPOCH + self.clock, self.awake)

    def _step(self, event: AgentEvent) -> None:
        self.state, actions = step(self.state, event, self._now())
        for action in actions:
            self.done.append((self.clock, action))
            if isinstance(action, SaveEvidence):
                self._step(EvidenceSaved(None))


def failed(action: AgentAction) -> bool:
    return isinstance(action, Enter) and action.phase is Phase.FAILED


def joined(rank: int, **fields: Any) -> AgentStatus:
    told: dict[str, Any] = {"phase": Phase.JOINING, "verdict": Verdict(health=Health.STARTING), "joined": True}
    return agent_status(rank, **told | fields)


MakeReplay = Callable[..., Replay]


@pytest.fixture
def make_replay(make_plan: MakePlan) -> MakeReplay:
    """Return the factory of a replay of one member before its start."""

    def make(rank: int = 0, **changes: Any) -> Replay:
        return Replay(initial(make_plan(**changes), rank))

    return make


@pytest.fixture
def fresh(make_replay: MakeReplay) -> MakeReplay:
    """Return the factory of a replay of one member before its start, with a different bound for each phase."""
    bounds = Timeouts(preflight=10, staging=20, formation=30, load=40, first_token=50, drain=3)

    def make(rank: int = 0, **changes: Any) -> Replay:
        return make_replay(rank, **{"timeouts": bounds, "health": HealthPolicy(gpus=False)} | changes)

    return make


@pytest.fixture
def serving(fresh: MakeReplay) -> MakeReplay:
    """Return the factory of a replay of one member with a serving engine."""

    def make(rank: int = 0, **changes: Any) -> Replay:
        replay = fresh(rank, **changes)
        replay.serve()
        return replay

    return make
