"""State of a member: all inputs of its agent's decisions besides the event and the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dsv4_runtime.agent.decide.actions import (
    AgentAction,
    Enter,
    RecordFailure,
    ReportJoined,
    StartTask,
    Stop,
    StopChildren,
)
from dsv4_runtime.agent.decide.events import AgentEvent, GroupSeen, Now, Peer, Task
from dsv4_runtime.contract import Cause, Failure, GroupPlan, Phase
from dsv4_runtime.engine.completion import KnownAnswer


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the engine in place."""

    at: float
    """Unix time from which on."""
    spent: int
    """Restarts of the budget that are used already."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Event that is a sign of the end of an engine generation, and the time at which it was handled."""

    event: AgentEvent
    now: Now


@dataclass(frozen=True, slots=True)
class Settle:
    """The engine is dead; the head waits for one more answer of every member before it names the cause."""

    since: float
    """Monotonic time after which a member has to answer."""


@dataclass(frozen=True, slots=True)
class Save:
    """The cause is named; its evidence is being saved."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Clear:
    """Level 1: the remains of the old engine are being removed."""

    restart: Restart


@dataclass(frozen=True, slots=True)
class Wait:
    """Level 1: the old engine is gone, and the next waits for the budget's back-off."""

    restart: Restart
    reported: float
    """Monotonic time of the latest report of the remaining time."""


Repair = Settle | Save | Clear | Wait


@dataclass(frozen=True, slots=True)
class EngineState:
    """Rank 0: one engine generation, and the repair that follows its death. On other ranks that start vLLM: the first
    error of its log."""

    generation: int
    started: float
    """Monotonic time."""
    load_seconds: float
    """The time within which it has to answer."""
    served: bool = False
    """Whether a checked completion came back."""
    longest_seconds: float = 0.0
    """The time within which a start that progresses has to answer."""
    stage: str = "nothing in its log"
    """Stage of the start by its log."""
    progressed: float = 0.0
    """Monotonic time of that stage."""
    stopped: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Rank and role of its processes that are stopped during the start, and the monotonic time since which they are."""
    first_error: tuple[str, Cause | None] | None = None
    """The first line of its log that announces a death, and the cause that it names."""
    first_error_time: float = 0.0
    """Monotonic time at which that line was read."""
    signs: tuple[Sign, ...] = ()
    """Of its end, in the order in which they were handled; bounded in number and in age (`death.with_sign`)."""
    dead: Failure | None = None
    """First cause of its death; further signs and the members' answers may refine it."""
    repair: Repair | None = None
    """None while it lives."""
    wrong: str | None = None
    """Fault of its first answer, while every member reads the weights' files to find the reason."""
    wrong_since: float = 0.0
    """Monotonic time of that answer."""
    answer: KnownAnswer | None = None
    """Answer to the known question, until that is kept; None: it was kept before."""
    draining: bool = False
    """Whether its open requests are being finished, because the group is to end."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member, from Preflight to Stopped."""

    plan: GroupPlan
    rank: int
    view: GroupSeen
    """The latest observation of the group."""
    phase: Phase = Phase.PREFLIGHT
    since: float = 0.0
    """Monotonic time at which the phase began."""
    staged: bool = False
    verified: bool | None = None
    """Whether the content of the weights' files that the present engine loaded is right (`weights_verified`)."""
    proved: bool = False
    joined: bool = False
    """Whether this member's Ray node is part of the cluster."""
    ray_stopped: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Processes of Ray on this member that are stopped, and the monotonic time since which they are."""
    formed: bool = False
    """Whether every member's was, once: the engine has its turn."""
    generation: int = 0
    """Rank 0: generation of the engine. Others: the latest generation in the head's status."""
    doubted: bool = False
    """Not rank 0: whether rank 0 reported that this engine casts doubt on the weights."""
    released: int = 0
    """Not rank 0: generation after whose death the retained weights were released last."""
    gone: bool = False
    """Not rank 0: whether nothing is left here of the engine that is being restarted."""
    engine: EngineState | None = None
    failures: tuple[Failure, ...] = ()
    """Oldest first."""
    restarts: tuple[float, ...] = ()
    """Unix times of the restarts in place."""
    attempts: int = 0
    """Restarts in place since the engine last served."""
    failed_starts: tuple[Cause, ...] = ()
    """Causes of the starts that failed since the engine last served."""


def initial(plan: GroupPlan, rank: int) -> MemberState:
    """Return the initial state of a member."""
    others = {member.rank: Peer() for member in plan.members if member.rank != rank}
    return MemberState(plan, rank, view=GroupSeen(peers=others))


StepResult = tuple[MemberState, tuple[AgentAction, ...]]

RELEASING = frozenset(
    {
        Cause.CANARY_FAILED,
        Cause.ENGINE_WRONG,
        Cause.KV_CACHE_TOO_SMALL,
        Cause.OUT_OF_MEMORY_GPU,
        Cause.WEIGHTS_CORRUPT,
        Cause.XID_ERROR,
    }
)
"""Causes after which retained weights may be wrong, or their memory is needed."""


TICK_SECONDS = 0.25
"""Interval of polling where no event announces a change."""


def enter(state: MemberState, action: Enter, now: Now) -> tuple[MemberState, Enter]:
    """Return the state in the phase that the action reports, and the action."""
    if action.phase is state.phase:
        return state, action
    return replace(state, phase=action.phase, since=now.clock), action


def fail(state: MemberState, found: Failure) -> StepResult:
    """Return the end of this member: only a new incarnation helps.

    The failure is reported before any process is ended, which may take long, so recovery need not wait.
    """
    actions: list[AgentAction] = [Stop(tuple(task for task in Task if task is not Task.LISTEN))]
    if found not in state.failures:
        actions.append(RecordFailure(found))
        state = replace(state, failures=(*state.failures, found))
    actions += [ReportJoined(joined=False), Enter(Phase.FAILED, found.message), StopChildren()]
    if state.phase is Phase.PREFLIGHT:
        # The agent did not yet know its address to be there.
        actions.append(StartTask(Task.LISTEN))
    return replace(state, phase=Phase.FAILED, joined=False, engine=None), tuple(actions)
