"""The decisions of a member, as one pure function: `step`.

`step` passes the events of a start to `_start` (Preflight, Staging, Joining), which ends in `head.begin_generation` on
rank 0. Later events go to `head.step` there and to `_worker_step` on the other ranks, which start vLLM's part of each
generation themselves if there is no Ray (`GroupPlan.starts_vllm`). An engine's death on rank 0 goes
`head.step` -> `death.explain` -> `head._conclude` -> `head.next_step` -> level 1, or `state.fail`, which leaves the
recovery to the operator.
"""

from __future__ import annotations

from dataclasses import replace

from dsv4_runtime.agent.decide import head
from dsv4_runtime.agent.decide.actions import (
    AgentAction,
    DoubtWeights,
    Enter,
    Exit,
    FindProcesses,
    FollowGeneration,
    KillEngine,
    RecordFailure,
    ReleaseWeights,
    ReportJoined,
    ReportServing,
    ReportVerified,
    StartEngine,
    StartTask,
    Stop,
    SweepSharedMemory,
)
from dsv4_runtime.agent.decide.death import (
    describe_exit,
    failure,
    first_error,
    first_failed,
    with_log_evidence,
    with_lost_link,
)
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiEnded,
    Crashed,
    Done,
    EngineGone,
    FabricFellBack,
    FirstError,
    GroupSeen,
    Now,
    ProcessEnded,
    RayLost,
    Staged,
    Started,
    StopAsked,
    Task,
    TaskFailed,
    TimerFired,
    WeightsRead,
)
from dsv4_runtime.agent.decide.state import (
    RELEASING,
    TICK_SECONDS,
    EngineState,
    MemberState,
    StepResult,
    enter,
    fail,
)
from dsv4_runtime.contract import Cause, Failure, Phase
from dsv4_runtime.health.rules import stopped_since

_RAY_CAUSES = {"raylet": Cause.RAYLET_HUNG, "gcs": Cause.RAY_HEAD_HUNG}
_ENGINE_RUNS = frozenset({Phase.LOADING, Phase.WARMING, Phase.SERVING})
_FOLLOWED = _ENGINE_RUNS | {Phase.RESTARTING}
_SOON_SECONDS = 0.01
_FRESH_SECONDS = 2.0
"""An older answer of the head kills nothing, because the process may be the next engine's worker."""


def step(state: MemberState, event: AgentEvent, now: Now) -> StepResult:
    """Handle an event: return the next state and the actions in order."""
    match event:
        case GroupSeen():
            state = replace(state, view=event)
        case StopAsked():
            return replace(state, phase=Phase.DRAINING), (Enter(Phase.DRAINING, "ending everything"),)
        case TaskFailed(task=Task.LISTEN):
            # Without its API the agent can only report through its exit.
            return state, (Exit(event.message),)
    if state.phase in (Phase.FAILED, Phase.DRAINING):
        return state, ()
    if isinstance(event, GroupSeen):
        state, lost = _check_ray(state, now)
        event = lost or event
    match event:
        case TaskFailed():
            rank = state.rank if event.culprit_rank is None else event.culprit_rank
            wrong = state.engine.wrong if state.engine is not None else None
            said = f"{event.message}; {first_failed(wrong)}" if wrong is not None else event.message
            found = _shared(failure(event.cause, said, event.detected_by, rank, None, now), state)
            state, actions = fail(state, found)
            # The time of the damage is unknown, so the engine may have loaded the damaged file.
            doubts = (DoubtWeights(event.message),) if event.task in (Task.SCRUB, Task.VERIFY) else ()
            return state, (*doubts, *actions)
        case Crashed():
            return fail(state, failure(Cause.UNKNOWN, event.message, "exit", state.rank, None, now))
        case RayLost():
            rank = state.rank if event.culprit_rank is None else event.culprit_rank
            return fail(state, failure(event.cause, event.message, event.detected_by, rank, None, now))
    if not state.formed:
        return _start(state, event, now)
    told: tuple[ReportVerified, ...] = ()
    # A pass that began in an earlier generation proves nothing about the files that this one loads.
    if isinstance(event, WeightsRead) and (event.task is Task.VERIFY or state.phase is Phase.SERVING):
        state, told = replace(state, verified=event.right), (ReportVerified(event.right),)
    state, actions = (head.step if state.rank == 0 else _worker_step)(state, event, now)
    return state, (*told, *actions)


def _shared(found: Failure, state: MemberState) -> Failure:
    """Return `found`, without a culprit if it is about a directory of weights that other members read too."""
    place = state.view.weights_place
    statuses = {rank: peer.status for rank, peer in state.view.peers.items() if peer.status is not None}
    same = [rank for rank, status in statuses.items() if place and status.weights_place == place]
    if found.cause is not Cause.WEIGHTS_CORRUPT or not same:
        return found
    ranks = ", ".join(map(str, sorted((*same, state.rank))))
    message = f"{found.message}; ranks {ranks} share the directory {state.plan.weights.path}"[:1024]
    return found.model_copy(update={"culprit_rank": None, "message": message})


def due(state: MemberState, now: Now) -> float | None:
    """Return the monotonic time at which `TimerFired` is to be fed, if no event comes before; None: never."""
    if state.phase in (Phase.FAILED, Phase.DRAINING):
        return None
    if state.formed:
        return (head.due if state.rank == 0 else _worker_due)(state, now)
    if state.phase is Phase.STAGING and not state.staged:
        return state.since + state.plan.timeouts.staging
    return state.since + state.plan.timeouts.formation if state.phase is Phase.JOINING else None


def _check_ray(state: MemberState, now: Now) -> tuple[MemberState, RayLost | None]:
    """Update the record of stopped Ray processes from the latest signals; return the loss of the Ray node, if any."""
    signals = {state.rank: state.view.signals} if state.view.signals is not None else {}
    since = stopped_since(state.ray_stopped, signals, _RAY_CAUSES, now.clock, now.awake)
    state = replace(state, ray_stopped=since)
    for (_, name), began in since.items():
        if (seconds := now.clock - began) >= state.plan.health.stopped:
            message = f"the {name} process of rank {state.rank} is stopped or frozen since {seconds:.1f} s"
            return state, RayLost(_RAY_CAUSES[name], message, "process")
    return state, _gcs_lost(state, now)


def _gcs_lost(state: MemberState, now: Now) -> RayLost | None:
    """Return the loss of a GCS that no longer answers. Only rank 0 decides: between members a link may be lost."""
    answered = state.view.gcs_answered
    if state.rank != 0 or answered is None:
        return None
    silence = now.clock - max(answered, now.awake)
    if silence < state.plan.health.agent_silent:
        return None
    message = f"Ray's GCS on rank 0 has not answered for {silence:.1f} s; its process runs or is frozen"
    return RayLost(Cause.RAY_HEAD_HUNG, message, "api", 0)


def _start(state: MemberState, event: AgentEvent, now: Now) -> StepResult:
    """Handle an event between Preflight and the time at which all Ray nodes have joined."""
    match event:
        case Started():
            return state, (Enter(Phase.PREFLIGHT, "checking the member"), StartTask(Task.PREFLIGHT))
        case Done(task=Task.PREFLIGHT):
            # From here on the member's address exists. Network errors show while the weights are fetched.
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
    """Start Ray, if the group has Ray nodes, once the weights are staged and the network is verified."""
    if not (state.staged and state.proved):
        return state, ()
    stage = "starting Ray" if state.plan.members[state.rank].ray_args else "joining the group"
    state, entered = enter(state, Enter(Phase.JOINING, stage), now)
    return state, (StartTask(Task.READ_AHEAD), entered, StartTask(Task.JOIN))


def _form(state: MemberState, now: Now) -> StepResult:
    """Start the engine on rank 0 once every member has joined; the others follow it."""
    if not state.joined or not all(peer.usable for peer in state.view.peers.values()):
        return state, ()
    state = replace(state, formed=True)
    return head.begin_generation(state, now) if state.rank == 0 else _worker_step(state, state.view, now)


def _too_late(state: MemberState, now: Now) -> StepResult:
    """Fail if a bound of the start has passed."""
    bounds = state.plan.timeouts
    if state.phase is Phase.STAGING and not state.staged and now.clock >= state.since + bounds.staging:
        message = f"the weights were not there after {bounds.staging:.0f} s"
        return fail(state, failure(Cause.STAGING_FAILED, message, "timeout", state.rank, None, now))
    if state.phase is Phase.JOINING and now.clock >= state.since + bounds.formation:
        missing = [rank for rank, peer in state.view.peers.items() if not peer.usable]
        who = f"rank {', '.join(map(str, missing))} did not join" if missing else "Ray did not start"
        if state.rank != 0 and not state.joined and state.view.gcs_answered is None:
            who = f"Ray's GCS on rank 0 did not answer rank {state.rank}"
        message = f"{who} within {bounds.formation:.0f} s"
        return fail(state, failure(Cause.FORMATION_TIMEOUT, message, "timeout", state.rank, None, now))
    return state, ()


def _worker_step(state: MemberState, event: AgentEvent, now: Now) -> StepResult:
    """Handle an event on a joined member other than rank 0."""
    match event:
        case ProcessEnded() | ApiEnded():
            return _process_ended(state, event, now)
        case FabricFellBack(message=message):
            return _died(state, Cause.NCCL_SOCKET_FALLBACK, message, "log", now)
        case FirstError() if state.engine is not None:
            found = replace(state.engine, first_error=(event.line, event.cause), first_error_time=now.clock)
            return replace(state, engine=found), ()
        case EngineGone():
            return replace(state, gone=state.phase is Phase.RESTARTING), ()
        case GroupSeen():
            return _group_seen(state, event, now)
    return state, ()


def _group_seen(state: MemberState, event: GroupSeen, now: Now) -> StepResult:
    """Report a lost head, or follow it."""
    head = event.peers[0]
    if (cause := head.lost(now.clock, now.awake, state.plan.health)) is not None:
        # A silent head may be unreachable for the operator too, so its members report the loss.
        message = f"rank 0 last sent a message {head.silence(now.clock, now.awake):.1f} s ago, by heartbeat or answer"
        if cause is Cause.AGENT_HUNG:
            message += "; its machine takes connections"
        found = failure(cause, message, "link", 0, None, now)
        return fail(state, with_lost_link(found, state.rank, event.peers, state.view.signals, now))
    return _follow(state, now)


def _worker_due(state: MemberState, now: Now) -> float:
    """Return the monotonic time of the next check of the head, if no event comes before."""
    if state.phase is Phase.RESTARTING:
        return now.clock + TICK_SECONDS
    silence = state.view.peers[0].silence(now.clock, now.awake) or 0.0
    return now.clock + max(_SOON_SECONDS, state.plan.health.link_lost - silence)


def _process_ended(state: MemberState, event: ProcessEnded | ApiEnded, now: Now) -> StepResult:
    """Report the end of a worker, or of the executor process that is its parent where there is no Ray."""
    if isinstance(event, ApiEnded):
        message = f"vLLM's executor process of rank {state.rank} ended ({describe_exit(event.code)})"
    elif event.role == "worker" and not event.ordered:
        message = f"the worker of rank {state.rank} ended"
    else:
        # Not a death of this member's: the head observes the original one in its own processes.
        return state, ()
    if event.explained is None:
        return _died(state, Cause.RAY_WORKER_DIED, message, "process", now)
    return _died(state, event.explained[0], f"{message}: {event.explained[1]}", "process", now, explained=True)


def _died(state: MemberState, cause: Cause, message: str, by: str, now: Now, *, explained: bool = False) -> StepResult:
    """Report the death of this member's part of the engine, if that should be running, with the cause in its log."""
    if state.phase not in _ENGINE_RUNS:
        return state, ()
    if not explained and any(known.generation == state.generation for known in state.failures):
        # A worker's end ends its executor, and the other way round.
        return state, ()
    logged = first_error(state.engine, now) if state.engine is not None else None
    if logged is not None and logged[0] not in message:
        message += f"; vLLM's first error: {logged[0]}"
    found = with_log_evidence(failure(cause, message, by, state.rank, state.generation, now), logged)
    return replace(state, failures=(*state.failures, found)), (RecordFailure(found),)


def _follow(state: MemberState, now: Now) -> StepResult:
    """Take over rank 0's generation and phase, and end the engine's processes here while it restarts."""
    peer = state.view.peers[0]
    head, actions = peer.status, list[AgentAction]()
    starts = state.plan.starts_vllm(state.rank)
    if head is None or head.engine is None:
        return state, ()
    if head.engine.generation != state.generation:
        verified = state.verified if state.generation == 0 else None
        state = replace(state, generation=head.engine.generation, verified=verified, doubted=False)
        actions += [FollowGeneration(head.engine.generation), ReportVerified(verified), SweepSharedMemory()]
        # Also where no answer with the phase of the restart arrived: the next engine takes the standby processes.
        actions.append(Stop((Task.STANDBY,)))
    for death in head.engine.failures:
        if death.cause in RELEASING and (death.generation or 0) > state.released:
            state = replace(state, released=death.generation or 0)
            actions.append(ReleaseWeights(death.cause))
    if head.engine.weights_doubted is not None and not state.doubted:
        state = replace(state, doubted=True)
        actions += [DoubtWeights(head.engine.weights_doubted), *([] if state.verified else [StartTask(Task.VERIFY)])]
    if head.phase not in _FOLLOWED:
        return state, tuple(actions)
    # This runs several times a second, so an unchanged phase is neither reported nor followed by a scan of processes.
    news = head.phase is not state.phase
    if news:
        state, entered = enter(replace(state, gone=False), Enter(head.phase), now)
        actions += [entered, *([Stop((Task.STANDBY,))] if head.phase is Phase.RESTARTING else [])]
    running = state.engine.generation if state.engine is not None else 0
    if starts and head.phase in (Phase.LOADING, Phase.WARMING) and running != state.generation:
        bound = state.plan.timeouts.load
        state = replace(state, engine=EngineState(state.generation, now.clock, bound))
        actions.append(StartEngine(bound))
    # The next engine starts after this member's answer without one, and its worker may appear within a second.
    if head.phase is Phase.RESTARTING and not state.gone and now.clock - (peer.heard or 0.0) < _FRESH_SECONDS:
        actions += [FindProcesses(), KillEngine()]
    if news and head.phase is Phase.SERVING:
        if state.engine is not None:
            state = replace(state, engine=replace(state.engine, served=True, first_error=None))
            actions.append(ReportServing())
        actions += [FindProcesses(), StartTask(Task.SCRUB), StartTask(Task.STANDBY)]
    return state, tuple(actions)
