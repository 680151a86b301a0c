"""Decisions of a joined member other than rank 0: it follows rank 0, and says what of the engine dies here."""

from __future__ import annotations

from dataclasses import replace

from dsv4_runtime.agent.decide.actions import (
    AgentAction,
    DoubtWeights,
    Enter,
    FindProcesses,
    FollowGeneration,
    KillEngine,
    RecordFailure,
    ReportVerified,
    StartTask,
    Stop,
    SweepSharedMemory,
)
from dsv4_runtime.agent.decide.common import TICK_SECONDS, enter, fail
from dsv4_runtime.agent.decide.death import failure
from dsv4_runtime.agent.decide.events import AgentEvent, EngineGone, GroupSeen, Now, ProcessEnded, Task
from dsv4_runtime.agent.decide.state import MemberState, StepResult
from dsv4_runtime.contract import Cause, Phase

_ENGINE_RUNS = frozenset({Phase.LOADING, Phase.WARMING, Phase.SERVING})
_FOLLOWED = _ENGINE_RUNS | {Phase.RESTARTING}
_SOON_SECONDS = 0.01
_FRESH_SECONDS = 2.0
"""The next engine's worker must not be taken for the last one's: older news kill nothing."""


def step(state: MemberState, event: AgentEvent, now: Now) -> StepResult:
    """Return what follows from an event on a member that has joined and is not rank 0."""
    if isinstance(event, ProcessEnded):
        return _process_ended(state, event, now)
    if isinstance(event, EngineGone):
        return replace(state, gone=state.phase is Phase.RESTARTING), ()
    if not isinstance(event, GroupSeen):
        return state, ()
    head = event.peers[0]
    if (cause := head.lost(now.clock, now.awake, state.plan.health)) is not None:
        # A head that cannot be heard may be cut off from the operator too, so its members say that it is lost.
        message = f"rank 0 was last heard {head.silence(now.clock, now.awake):.1f} s ago, by heartbeat or answer"
        if cause is Cause.AGENT_HUNG:
            message += "; its machine takes connections"
        return fail(state, failure(cause, message, "link", 0, None, now))
    return _follow(state, now)


def due(state: MemberState, now: Now) -> float:
    """Return the monotonic time at which the head is to be looked at again, if nothing happens before."""
    if state.phase is Phase.RESTARTING:
        return now.clock + TICK_SECONDS
    silence = state.view.peers[0].silence(now.clock, now.awake) or 0.0
    return now.clock + max(_SOON_SECONDS, state.plan.health.link_lost - silence)


def _process_ended(state: MemberState, event: ProcessEnded, now: Now) -> StepResult:
    """Report a worker's end, which matters while the engine should be running."""
    if event.role != "worker" or state.phase not in _ENGINE_RUNS:
        return state, ()
    if event.told:
        # No death of this member's: the head sees the one that it follows from, in its own processes.
        return state, ()
    cause, message = Cause.RAY_WORKER_DIED, f"the Ray worker of rank {state.rank} ended"
    if event.explained is not None:
        cause, message = event.explained[0], f"{message}: {event.explained[1]}"
    found = failure(cause, message, "process", state.rank, state.generation, now)
    return replace(state, failures=(*state.failures, found)), (RecordFailure(found),)


def _follow(state: MemberState, now: Now) -> StepResult:
    """Take over rank 0's generation and phase, and end the engine's processes here while it restarts."""
    peer = state.view.peers[0]
    head, actions = peer.status, list[AgentAction]()
    if head is None or head.engine is None:
        return state, ()
    if head.engine.generation != state.generation:
        verified = state.verified if state.generation == 0 else None
        state = replace(state, generation=head.engine.generation, verified=verified, doubted=False)
        actions += [FollowGeneration(head.engine.generation), ReportVerified(verified), SweepSharedMemory()]
    if head.engine.weights_doubted is not None and not state.doubted:
        state = replace(state, doubted=True)
        actions += [DoubtWeights(head.engine.weights_doubted), *([] if state.verified else [StartTask(Task.VERIFY)])]
    if head.phase not in _FOLLOWED:
        return state, tuple(actions)
    # Asked several times a second: what is no news is not told again, nor are its processes looked for.
    news = head.phase is not state.phase
    if news:
        state, entered = enter(replace(state, gone=False), Enter(head.phase), now)
        actions += [entered, *([Stop((Task.STANDBY,))] if head.phase is Phase.RESTARTING else [])]
    # The next engine begins once this member was heard to have none, and its worker may be there within a second.
    if head.phase is Phase.RESTARTING and not state.gone and now.clock - (peer.heard or 0.0) < _FRESH_SECONDS:
        actions += [FindProcesses(), KillEngine()]
    if news and head.phase is Phase.SERVING:
        actions += [FindProcesses(), StartTask(Task.SCRUB), StartTask(Task.STANDBY)]
    return state, tuple(actions)
