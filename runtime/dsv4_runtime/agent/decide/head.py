"""Decisions of rank 0 after all members have joined: engine generations, and level 1 between them.

A generation: `begin_generation` -> Loading -> `ApiAnswered` -> Warming -> `FirstCompletion` -> Serving. Its death: a
sign -> `_gather` -> `_mark_dead` after the time for a better explanation -> `_settle`, until every member has answered
once more -> `_conclude` names the death that came first -> its evidence is saved -> `_repair`: `next_step` allows a
restart in place, or `fail` leaves the recovery to the operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsv4_runtime.agent.decide.actions import (
    AgentAction,
    AskFirstCompletion,
    BeginDrain,
    DoubtWeights,
    Enter,
    FindProcesses,
    KeepAnswer,
    RecordFailure,
    RecordRepair,
    RecordRestart,
    ReleaseWeights,
    ReportDead,
    ReportServing,
    ReportSuspicion,
    ReportVerified,
    SaveEvidence,
    StartEngine,
    StartTask,
    Stop,
    WatchEngine,
)
from dsv4_runtime.agent.decide.death import (
    WINDOW_SECONDS,
    doubts_weights,
    explain,
    first_error,
    first_failed,
    is_consequence_of_oom,
    is_sign,
    judged,
    root_failure,
    verdict_due,
    with_log_evidence,
    with_lost_link,
    with_sign,
)
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiAnswered,
    Done,
    DrainAsked,
    EvidenceSaved,
    FirstCompletion,
    FirstError,
    GroupSeen,
    Judged,
    Loading,
    Now,
    Peer,
    Task,
    TimerFired,
)
from dsv4_runtime.agent.decide.state import (
    RELEASING,
    TICK_SECONDS,
    Clear,
    EngineState,
    MemberState,
    Restart,
    Save,
    Settle,
    Sign,
    StepResult,
    Wait,
    enter,
    fail,
)
from dsv4_runtime.contract import Cause, Failure, GroupPlan, Health, Phase, Signals, permit
from dsv4_runtime.health.rules import judge_start, start_idle, stopped_since
from dsv4_runtime.health.samples import ENGINE_ROLES

# Two failed attempts in a row end level 1.
MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the decision between a new incarnation and the end to the operator."""

    reason: str


_SETTLE_SECONDS = 3.0
"""Longest wait for the answers of the others after a death; each is polled once a second."""
_LATER_SECONDS = 1.0
"""Signals sampled this long after a death include the errors of the accelerators' drivers, which are read as often, and
an agent that was short of memory has observed the out-of-memory kill."""
_SILENT_SECONDS = 1.5
"""Without a heartbeat for this long the link has failed, and the agent is not merely busy."""
_REPORT_SECONDS = 1.0


def begin_generation(state: MemberState, now: Now) -> StepResult:
    """Start the next engine generation."""
    bound = load_bound(state)
    # Files read before the first generation prove nothing about the files that a later one loads.
    verified = state.verified if state.generation == 0 else None
    longest = state.plan.timeouts.longest_load(bound)
    engine = EngineState(
        state.generation + 1, started=now.clock, load_seconds=bound, longest_seconds=longest, progressed=now.clock
    )
    state = replace(state, generation=engine.generation, engine=engine, verified=verified)
    state, entered = enter(state, Enter(Phase.LOADING, "starting vLLM"), now)
    return state, (ReportVerified(verified), StartEngine(longest), entered)


def load_bound(state: MemberState) -> float:
    """Return the seconds until the engine must answer: more if a disk is slower than planned."""
    heard = [peer.status.disk_bytes_per_second for peer in state.view.peers.values() if peer.status is not None]
    rates = [rate for rate in (state.view.disk_rate, *heard) if rate is not None]
    return state.plan.timeouts.load_at(min(rates, default=None))


def step(state: MemberState, event: AgentEvent, now: Now) -> StepResult:
    """Handle an event on rank 0 after all members have joined."""
    engine = state.engine
    if engine is None:
        return state, ()
    match event:
        case FirstError():
            return _with(state, replace(engine, first_error=(event.line, event.cause), first_error_time=now.clock)), ()
        case Loading():
            return _with(state, replace(engine, stage=event.stage, progressed=now.clock)), ()
        case DrainAsked() if engine.dead is None and state.phase is Phase.SERVING and not engine.draining:
            return _with(state, replace(engine, draining=True)), (BeginDrain(event.seconds),)
    state = _gather(state, engine, event, now)
    if engine.dead is None:
        return _live(state, event, now)
    match engine.repair:
        case Settle(since=since):
            return _settle(state, since, now)
        case Save(failure=failure) if isinstance(event, EvidenceSaved):
            return _repair(state, failure, event, now)
        case Clear(restart=restart) if event == Done(Task.CLEAR):
            return _wait(_with(state, replace(engine, repair=Wait(restart, reported=-math.inf))), now)
        case Wait():
            return _wait(state, now)
    return state, ()


def due(state: MemberState, now: Now) -> float | None:
    """Return the monotonic time at which `TimerFired` is to be fed, if no event comes before."""
    engine = state.engine
    if engine is None:
        return None
    match engine.repair:
        case Settle(since=since):
            return max(since + WINDOW_SECONDS, now.clock + TICK_SECONDS)
        case Wait(restart=restart):
            return now.clock + min(_REPORT_SECONDS, max(0.0, restart.at - now.unix))
        case Save() | Clear():
            return None
    bound = engine.started + engine.load_seconds if state.phase is Phase.LOADING else None
    if bound is not None and now.clock >= bound:
        bound = now.clock + TICK_SECONDS
    read = engine.wrong_since + state.plan.timeouts.staging if engine.wrong is not None else None
    return min((time for time in (verdict_due(engine), bound, read) if time is not None), default=None)


def _with(state: MemberState, engine: EngineState) -> MemberState:
    return replace(state, engine=engine)


def _gather(state: MemberState, engine: EngineState, event: AgentEvent, now: Now) -> MemberState:
    """Keep a sign of the engine's end until the cause is named."""
    if not is_sign(event) or not (engine.repair is None or isinstance(engine.repair, Settle)):
        return state
    return _with(state, with_sign(engine, Sign(event, now)))


def _live(state: MemberState, event: AgentEvent, now: Now) -> StepResult:
    """Follow an engine that is not dead: its progress and its signs of life."""
    actions: list[AgentAction] = []
    match event:
        case ApiAnswered() if state.phase is Phase.LOADING:
            state, entered = enter(state, Enter(Phase.WARMING, "waiting for a first token"), now)
            actions += [entered, FindProcesses(), AskFirstCompletion()]
        case FirstCompletion(error=None, unknown=answer) if state.phase is Phase.WARMING:
            assert state.engine is not None  # noqa: S101  (see `step`)
            served = replace(state.engine, served=True, first_error=None, answer=answer)
            state, entered = enter(replace(state, attempts=0, engine=served), Enter(Phase.SERVING), now)
            actions += [
                ReportServing(),
                entered,
                FindProcesses(),
                WatchEngine(),
                StartTask(Task.SCRUB),
                StartTask(Task.STANDBY),
            ]
        case FirstCompletion(error=str(error), wrong=True) if state.phase is Phase.WARMING:
            state, doubted = _doubt(state, error, now)
            actions += doubted
        case Judged(judgement=judgement) if judgement.health is not Health.DEAD:
            suspect = judgement.health is Health.SUSPECT
            actions.append(ReportSuspicion(judged(judgement, state.generation, now) if suspect else None))
        case TimerFired() | GroupSeen():
            state = _check_start(state, now)
    state, kept = _use_verified(state, now)
    actions += kept
    engine = state.engine
    assert engine is not None  # noqa: S101  (see `step`)
    died = verdict_due(engine)
    if died is not None and now.clock >= died and (found := explain(engine)) is not None:
        state, marked = _mark_dead(state, engine, found, now)
        return state, (*actions, *marked)
    for peer in state.view.peers.values():
        # A peer that reports the death of its part of this generation ends the generation.
        death = peer.death_of(engine.generation) if peer.reachable else None
        if death is not None:
            state, marked = _mark_dead(state, engine, death, now)
            return state, (*actions, *marked)
    return state, tuple(actions)


def _doubt(state: MemberState, error: str, now: Now) -> StepResult:
    """Have every member read the weights' files before a wrong first answer counts as the engine's fault."""
    engine = state.engine
    assert engine is not None  # noqa: S101  (see `step`)
    state = _with(state, replace(engine, wrong=error, wrong_since=now.clock))
    state, entered = enter(state, Enter(state.phase, "its first answer is wrong: reading the weights again"), now)
    reading = () if state.verified else (StartTask(Task.VERIFY),)
    return state, (DoubtWeights(first_failed(error)), entered, *reading)


def _use_verified(state: MemberState, now: Now) -> tuple[MemberState, tuple[AgentAction, ...]]:
    """Act on the verification of the weights' files once every member has reported it."""
    engine = state.engine
    assert engine is not None  # noqa: S101  (see `step`)
    others = (peer.status.weights_verified if peer.status is not None else None for peer in state.view.peers.values())
    said = (state.verified, *others)
    if engine.wrong is not None and (None not in said or now.clock >= engine.wrong_since + state.plan.timeouts.staging):
        shown = Sign(FirstCompletion(engine.wrong, wrong=True, verified=all(said)), now)
        return _with(state, replace(engine, wrong=None, signs=(*engine.signs, shown))), ()
    if engine.answer is not None and engine.served and all(said):
        return _with(state, replace(engine, answer=None)), (KeepAnswer(engine.answer),)
    return state, ()


def _check_start(state: MemberState, now: Now) -> MemberState:
    """Add a sign of death to an engine whose start is hung, or makes no more progress and exceeds its bound."""
    engine = state.engine
    assert engine is not None  # noqa: S101  (see `step`)
    # Files that are read because a first answer is wrong keep no process of the engine busy.
    if state.phase not in (Phase.LOADING, Phase.WARMING) or engine.wrong is not None:
        return state
    members = {0: (state.view.signals, now.clock)} | {
        rank: (peer.status.signals if peer.status is not None else None, peer.heard or engine.started)
        for rank, peer in state.view.peers.items()
    }
    known = {rank: (signals, arrived) for rank, (signals, arrived) in members.items() if signals is not None}
    signals = {rank: found for rank, (found, _) in known.items()}
    stopped = stopped_since(engine.stopped, signals, ENGINE_ROLES | {"api"}, now.clock, now.awake)
    engine = replace(engine, stopped=stopped)
    progressed = max(engine.progressed, now.awake)
    policy, passed = state.plan.health, now.clock - engine.started
    if (hung := judge_start(known, stopped, progressed, engine.stage, policy, now.clock)) is not None:
        engine = with_sign(engine, Sign(Judged(hung), now))
    elif state.phase is Phase.LOADING and passed >= engine.load_seconds:
        # An active loader or compiler is alive, but processes can also spin in vain.
        idle = start_idle(known, progressed, now.clock, spinning=False)
        if passed >= engine.longest_seconds or idle >= policy.start_idle:
            engine = replace(engine, signs=(*engine.signs, Sign(TimerFired(), now)))
    return _with(state, engine)


def _mark_dead(state: MemberState, engine: EngineState, found: Failure, now: Now) -> StepResult:
    """Call the engine dead immediately; the final cause depends on all members."""
    later = state.plan.health.gpus or is_consequence_of_oom(found)
    since = now.clock + (_LATER_SECONDS if later else 0.0)
    state = _with(state, replace(engine, dead=found, repair=Settle(since)))
    return state, (Stop((Task.PROBE, Task.STANDBY)), ReportDead(found))


def _settle(state: MemberState, since: float, now: Now) -> StepResult:
    """Wait for one more answer of every member.

    A member that has just become silent may be the cause of the death or may return, so the wait lasts until it counts
    as lost.
    """
    passed = now.clock - since
    if passed < WINDOW_SECONDS:
        return state, ()
    waiting = [
        peer
        for peer in state.view.peers.values()
        if not peer.refused
        and not (peer.reachable and peer.heard is not None and peer.heard > since)
        and peer.lost(now.clock, now.awake, state.plan.health) is None
    ]
    silent = any((peer.silence(now.clock, now.awake) or 0.0) > _SILENT_SECONDS for peer in waiting)
    if waiting and passed < state.plan.health.link_lost and (passed <= _SETTLE_SECONDS or silent):
        return state, ()
    return _conclude(state, now)


def _conclude(state: MemberState, now: Now) -> StepResult:
    """Name the death that came first, and have its evidence saved."""
    engine = state.engine
    assert engine is not None and engine.dead is not None  # noqa: S101, PT018  (see `step`)
    signals: dict[int, Signals | None] = {
        rank: peer.status.signals if peer.status else None for rank, peer in state.view.peers.items()
    }
    first = root_failure(
        explain(engine) or engine.dead,
        state.view.peers,
        {0: state.view.signals, **signals},
        engine.generation,
        state.plan.health,
        now,
    )
    said = first_error(engine, now)
    if said and said[0] not in first.message:
        first = first.model_copy(update={"message": f"{first.message}; vLLM's first error: {said[0]}"[:1024]})
    first = with_log_evidence(first, said)
    first = with_lost_link(first, state.rank, state.view.peers, state.view.signals, now)
    doubts: tuple[DoubtWeights, ...] = ()
    if doubts_weights(engine, first):
        first = first.model_copy(update={"weights_doubted": True})
        # Reported before the evidence is saved, so that every member reads it before the group ends.
        doubts = (DoubtWeights(first.message),)
    state = _with(state, replace(engine, repair=Save(first)))
    return state, (Stop((Task.ENGINE,)), *doubts, SaveEvidence(first))


def _repair(state: MemberState, failure: Failure, saved: EvidenceSaved, now: Now) -> StepResult:
    """Restart the engine in place, or leave the repair to the operator."""
    engine = state.engine
    assert engine is not None  # noqa: S101  (see `step`)
    if saved.path is not None:
        failure = failure.model_copy(update={"evidence": str(saved.path)})
    starts = () if engine.served else (*state.failed_starts, failure.cause)
    state = replace(state, failures=(*state.failures, failure), failed_starts=starts)
    following = next_step(
        state.plan, state.view.peers, state.failures, state.restarts, state.attempts, now.unix, failed_starts=starts
    )
    again = failure.weights_doubted or failure.cause is Cause.ENGINE_WRONG
    if engine.draining or again or isinstance(following, Leave):
        # A draining engine is not restarted. Doubted files are read again by a new incarnation.
        ended, actions = fail(state, failure)
        return ended, (RecordFailure(failure), *actions)
    repaired = failure.model_copy(update={"level": 1})
    state = replace(state, failures=(*state.failures[:-1], repaired), attempts=state.attempts + 1)
    state = _with(state, replace(engine, repair=Clear(following)))
    state, entered = enter(state, Enter(Phase.RESTARTING, f"{failure.cause}: clearing the old engine"), now)
    release = (ReleaseWeights(failure.cause),) if failure.cause in RELEASING else ()
    return state, (RecordFailure(failure), RecordRepair(repaired), *release, entered, StartTask(Task.CLEAR))


def _wait(state: MemberState, now: Now) -> StepResult:
    """Start the next generation after the budget's back-off, and report the remaining time until then."""
    engine = state.engine
    assert engine is not None and isinstance(engine.repair, Wait)  # noqa: S101, PT018  (see `step`)
    restart: Restart = engine.repair.restart
    wait = restart.at - now.unix
    if wait <= 0:
        state, actions = begin_generation(replace(state, restarts=(*state.restarts, now.unix)), now)
        return state, (RecordRestart(now.unix), *actions)
    if now.clock - engine.repair.reported < _REPORT_SECONDS:
        return state, ()
    budget = f"restart {restart.spent + 1} of {state.plan.recovery.max_restarts}"
    state = _with(state, replace(engine, repair=Wait(restart, now.clock)))
    return state, (Enter(Phase.RESTARTING, f"{budget}, in {wait:.0f} s"),)


def next_step(
    plan: GroupPlan,
    peers: Mapping[int, Peer],
    failures: Sequence[Failure],
    restarts: Sequence[float],
    attempts: int,
    now: float,
    *,
    failed_starts: Sequence[Cause] = (),
) -> Restart | Leave:
    """Return level 1 or not, after the newest of `failures` (oldest first), the engine's deaths in this incarnation.

    The answers of `peers` are from after the death; `restarts` are the Unix times of level 1 in this incarnation, and
    `attempts` counts level 1 since the engine last served, and `failed_starts` has the causes of the starts that failed
    since. The plan has the budget and the restarts of earlier incarnations.
    """
    gone = [rank for rank, peer in peers.items() if not peer.usable]
    if gone:
        return Leave(f"rank {', '.join(map(str, gone))} is not there to start with")
    if attempts >= MAX_ATTEMPTS:
        return Leave(f"the engine did not come up {attempts} times in a row")
    latest = failures[-1].cause
    if len(failed_starts) > 1 and failed_starts[-1] is failed_starts[-2]:
        return Leave(f"two starts in a row failed alike: {latest}")
    if attempts and failed_starts and latest is Cause.STARTUP_TIMEOUT:
        return Leave("the engine did not come up on these Ray nodes within the bound of a start")
    if latest.deterministic and len(failures) > 1 and failures[-2].cause is latest:
        return Leave(f"{latest} twice in a row: trying again cannot help")
    allowed = permit(plan.recovery, [*plan.restarts, *restarts], now)
    if allowed.at is None:
        return Leave(f"the budget of {plan.recovery.max_restarts} restarts is spent")
    return Restart(allowed.at, allowed.spent)
