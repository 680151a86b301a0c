"""The decisions of a member, as one pure function: `step`.

A walk through a life: `step` hands the events of a start to `_start` (Preflight, Staging, Joining), which ends in
`head.begin_generation` on rank 0; from then on events go to `head.step` there and to `worker.step` on every other rank.
An engine's death on rank 0 goes `head.step` -> `death.explain` -> `head._conclude` -> `recovery.next_step` -> `head`'s
level 1, or `common.fail`, which leaves the rest to the operator.
"""

from __future__ import annotations

from dataclasses import replace

from dsv4_runtime.agent.decide import head, ray, worker
from dsv4_runtime.agent.decide.actions import (
    DoubtWeights,
    Enter,
    Exit,
    FindProcesses,
    ReportJoined,
    ReportVerified,
    StartTask,
)
from dsv4_runtime.agent.decide.common import enter, fail
from dsv4_runtime.agent.decide.death import failure, first_failed
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    Crashed,
    Done,
    GroupSeen,
    Now,
    RayLost,
    Staged,
    Started,
    StopAsked,
    Task,
    TaskFailed,
    TimerFired,
    WeightsRead,
)
from dsv4_runtime.agent.decide.state import MemberState, StepResult
from dsv4_runtime.contract import Cause, Phase


def step(state: MemberState, event: AgentEvent, now: Now) -> StepResult:
    """Return what follows from an event: the next state, and what is to be done, in order."""
    match event:
        case GroupSeen():
            state = replace(state, view=event)
        case StopAsked():
            return replace(state, phase=Phase.DRAINING), (Enter(Phase.DRAINING, "ending everything"),)
        case TaskFailed(task=Task.LISTEN):
            # Nobody can ask it anything: its end says what its answers would.
            return state, (Exit(event.message),)
    if state.phase in (Phase.FAILED, Phase.DRAINING):
        return state, ()
    if isinstance(event, GroupSeen):
        state, lost = ray.look(state, now)
        event = lost or event
    match event:
        case TaskFailed():
            rank = state.rank if event.culprit_rank is None else event.culprit_rank
            wrong = state.engine.wrong if state.engine is not None else None
            said = f"{event.message}; {first_failed(wrong)}" if wrong is not None else event.message
            found = failure(event.cause, said, event.detected_by, rank, None, now)
            state, actions = fail(state, found)
            # Nobody knows when the file became wrong, so the engine may have loaded it so.
            doubts = (DoubtWeights(event.message),) if event.task in (Task.SCRUB, Task.VERIFY) else ()
            return state, (*doubts, *actions)
        case Crashed():
            return fail(state, failure(Cause.UNKNOWN, event.message, "exit", state.rank, None, now))
        case RayLost():
            return fail(state, failure(event.cause, event.message, event.detected_by, state.rank, None, now))
    if not state.formed:
        return _start(state, event, now)
    told: tuple[ReportVerified, ...] = ()
    # What a reading began that an earlier engine's life saw says nothing about the files that this one loads.
    if isinstance(event, WeightsRead) and (event.task is Task.VERIFY or state.phase is Phase.SERVING):
        state, told = replace(state, verified=event.right), (ReportVerified(event.right),)
    state, actions = (head.step if state.rank == 0 else worker.step)(state, event, now)
    return state, (*told, *actions)


def due(state: MemberState, now: Now) -> float | None:
    """Return the monotonic time at which `TimerFired` is to be fed, if no event comes before; None: never."""
    if state.phase in (Phase.FAILED, Phase.DRAINING):
        return None
    if state.formed:
        return (head.due if state.rank == 0 else worker.due)(state, now)
    if state.phase is Phase.STAGING and not state.staged:
        return state.since + state.plan.timeouts.staging
    return state.since + state.plan.timeouts.formation if state.phase is Phase.JOINING else None


def _start(state: MemberState, event: AgentEvent, now: Now) -> StepResult:
    """Return what follows from an event, from Preflight until every member's Ray node has joined."""
    match event:
        case Started():
            return state, (Enter(Phase.PREFLIGHT, "checking the member"), StartTask(Task.PREFLIGHT))
        case Done(task=Task.PREFLIGHT):
            # Only now is the address known to be there. A broken network shows while the weights are on their way.
            state, entered = enter(state, Enter(Phase.STAGING, "checking the weights"), now)
            return state, (StartTask(Task.LISTEN), entered, StartTask(Task.STAGE), StartTask(Task.PROVE))
        case Staged(verified=verified):
            state, actions = _join(replace(state, staged=True, verified=verified or None), now)
            return state, ((ReportVerified(right=True), *actions) if verified else actions)
        case Done(task=Task.PROVE):
            return _join(replace(state, proved=True), now)
        case Done(task=Task.JOIN):
            state = replace(state, joined=True)
            waits = (ReportJoined(joined=True), Enter(Phase.JOINING, "waiting for the other members"), FindProcesses())
            state, actions = _form(state, now)
            return state, (*waits, *actions)
        case GroupSeen():
            return _form(state, now)
        case TimerFired():
            return _too_late(state, now)
    return state, ()


def _join(state: MemberState, now: Now) -> StepResult:
    """Start Ray once the weights are there and the network is proved."""
    if not (state.staged and state.proved):
        return state, ()
    state, entered = enter(state, Enter(Phase.JOINING, "starting Ray"), now)
    return state, (StartTask(Task.READ_AHEAD), entered, StartTask(Task.JOIN))


def _form(state: MemberState, now: Now) -> StepResult:
    """Start the engine on rank 0 once every member has joined; the others follow it."""
    if not state.joined or not all(peer.usable for peer in state.view.peers.values()):
        return state, ()
    state = replace(state, formed=True)
    return head.begin_generation(state, now) if state.rank == 0 else worker.step(state, state.view, now)


def _too_late(state: MemberState, now: Now) -> StepResult:
    """Fail if a bound of the start has passed."""
    bounds = state.plan.timeouts
    if state.phase is Phase.STAGING and not state.staged and now.clock >= state.since + bounds.staging:
        message = f"the weights were not there after {bounds.staging:.0f} s"
        return fail(state, failure(Cause.STAGING_FAILED, message, "timeout", state.rank, None, now))
    if state.phase is Phase.JOINING and now.clock >= state.since + bounds.formation:
        missing = [rank for rank, peer in state.view.peers.items() if not peer.usable]
        who = f"rank {', '.join(map(str, missing))} did not join" if missing else "Ray did not start"
        message = f"{who} within {bounds.formation:.0f} s"
        return fail(state, failure(Cause.FORMATION_TIMEOUT, message, "timeout", state.rank, None, now))
    return state, ()
