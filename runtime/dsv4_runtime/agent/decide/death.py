"""Cause of death of an engine generation, from the observations of rank 0.

The end of one process ends others, and their ends are observed in any order. So signs are collected for a moment, and
the cause follows from the set of signs, not from the first one: EngineCore takes its workers along, and a worker that
ended by itself takes EngineCore along only later, because Python alone takes longer to end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiEnded,
    CoreFailed,
    CoreLost,
    FabricFellBack,
    FirstCompletion,
    Judged,
    Now,
    Peer,
    PluginFailed,
    ProcessEnded,
    ShuttingDown,
    TimerFired,
    WorkerLost,
)
from dsv4_runtime.agent.decide.state import EngineState, Sign
from dsv4_runtime.contract import Cause, Failure, Health, HealthPolicy, Signals
from dsv4_runtime.contract.recovery import HEARD_SECONDS, is_link_lost, link_message
from dsv4_runtime.health.rules import Judgement
from dsv4_runtime.health.samples import FATAL_XIDS, worst_xid, xid_message
from dsv4_runtime.util.log_lines import FATAL_SECONDS


def describe_exit(code: int) -> str:
    """Return a description of an exit code, or of the signal with this negative number."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


WINDOW_SECONDS = 0.1
"""Signs of one death are observed within this time of each other; later ones are its consequences."""
SIGN_SECONDS = 30.0
"""Time for which a log line about the end of vLLM explains deaths: vLLM ends its processes within ten seconds."""
MAX_SIGNS = 64
_WORKER_SECONDS = 0.05

_DEATHS = (ProcessEnded, ApiEnded, CoreFailed, FabricFellBack, PluginFailed, FirstCompletion, Judged, TimerFired)
_PROVEN_BY_LOG = frozenset(
    {
        Cause.CONFIG_ERROR,
        Cause.DISK_FULL,
        Cause.ENGINE_HUNG,
        Cause.FABRIC_ERROR,
        Cause.KERNEL_MISSING,
        Cause.KV_CACHE_TOO_SMALL,
        Cause.MEMBER_MISSING,
        Cause.OUT_OF_MEMORY_GPU,
        Cause.OUT_OF_MEMORY_HOST,
        Cause.PORT_CONFLICT,
        Cause.RAY_MEMORY_KILL,
        Cause.SHARED_MEMORY_FULL,
        Cause.XID_ERROR,
    }
)
_ENDS = frozenset({Cause.ENGINE_CORE_DIED, Cause.RAY_WORKER_DIED, Cause.API_SERVER_DIED})
_CORE = "the EngineCore process ended"
_WORKER = "the worker of rank 0 ended"
_TOLD = f"{_WORKER}, on request, after EngineCore failed"
_NO_PLUGIN = (
    "vLLM could not load dsv4's plugin, and would serve without dsv4's patches and kernels; install dsv4's packages of"
    " one version beside vLLM, or take an image that has them"
)

E = TypeVar("E", bound=AgentEvent)


def is_sign(event: AgentEvent) -> bool:
    """Return whether an event is a sign of an engine's end."""
    match event:
        case FirstCompletion(error=None) | FirstCompletion(wrong=True):
            # A wrong one is a sign only after the verification of the weights' files.
            return False
        case Judged(judgement=judgement):
            return judgement.health is Health.DEAD
    kinds = ProcessEnded | ApiEnded | CoreFailed | CoreLost | WorkerLost | ShuttingDown | FabricFellBack
    return isinstance(event, kinds | FirstCompletion | PluginFailed)


def with_sign(engine: EngineState, sign: Sign) -> EngineState:
    """Return `engine` with `sign`: without signs that are too old to explain a death, and with at most `MAX_SIGNS`.

    The first sign of a death is kept; of vLLM's log lines about its end, the latest of each kind.
    """
    if isinstance(sign.event, _DEATHS):
        if len(engine.signs) >= MAX_SIGNS or any(known.event == sign.event for known in engine.signs):
            return engine
        return replace(engine, signs=(*_fresh(engine.signs, sign.now), sign))
    others = (known for known in _fresh(engine.signs, sign.now) if known.event != sign.event)
    return replace(engine, signs=(*others, sign))


def _fresh(signs: Sequence[Sign], now: Now) -> tuple[Sign, ...]:
    return tuple(
        sign for sign in signs if isinstance(sign.event, _DEATHS) or now.clock - sign.now.clock <= SIGN_SECONDS
    )


def first_error(engine: EngineState, now: Now) -> tuple[str, Cause | None] | None:
    """Return the first fatal line of vLLM's log and its cause, unless the engine has served for long since."""
    if engine.served and now.clock - engine.first_error_time > FATAL_SECONDS:
        return None
    return engine.first_error


def verdict_due(engine: EngineState) -> float | None:
    """Return the monotonic time at which the engine is to be called dead; None without a sign of death."""
    return min((sign.now.clock + _patience(sign.event, engine) for sign in _deaths(engine.signs)), default=None)


def explain(engine: EngineState) -> Failure | None:
    """Return the failure that the signs show, whatever their order; None if they show no death."""
    deaths = list(_deaths(engine.signs))
    if not deaths:
        return None
    begun = min(sign.now.clock for sign in deaths)
    signs = [sign for sign in engine.signs if begun - SIGN_SECONDS <= sign.now.clock <= begun + WINDOW_SECONDS]
    for rule in (_fell_back, _no_plugin, _shut_down, _api_killed, _processes, _gave_up, _api_ended, _asked):
        if (found := rule(signs, engine)) is not None:
            return found
    return None


def with_log_evidence(failure: Failure, logged: tuple[str, Cause | None] | None) -> Failure:
    """Return `failure` with the cause that vLLM's log proves, if a process of the engine ended.

    The order in which processes end shows no more than the log. Causes that follow from another death (`NCCLTimeout`,
    `RayWorkerDied`, ...) prove nothing, and `WeightsCorrupt` is proved by reading the files.

    Args:
        failure: the first death of the group.
        logged: the first fatal line of vLLM's log, with its cause.
    """
    if logged is not None and logged[1] in _PROVEN_BY_LOG and failure.cause in _ENDS:
        return failure.model_copy(update={"cause": logged[1]})
    return failure


def doubts_weights(engine: EngineState, found: Failure) -> bool:
    """Return whether wrong files of its weights would explain the death of an engine that never served."""
    if engine.served:
        return False
    loader = engine.first_error is not None and engine.first_error[1] is Cause.WEIGHTS_CORRUPT
    wrong = any(event.wrong for _, event in _all(engine.signs, FirstCompletion))
    return loader or (wrong and found.cause is Cause.CANARY_FAILED)


def first_failed(error: str) -> str:
    """Return the failure message of a first completion."""
    return f"the first completion failed: {error}"


def failure(
    cause: Cause, message: str, detected_by: str, rank: int | None, generation: int | None, now: Now
) -> Failure:
    """Return a failure observed now; its message is at most 1 KiB."""
    return Failure(
        time=now.unix,
        cause=cause,
        culprit_rank=rank,
        message=message[:1024],
        detected_by=detected_by,
        generation=generation,
    )


def judged(judgement: Judgement, generation: int, now: Now) -> Failure:
    """Return a judgement of the health rules, `Suspect` or `Dead`, as a failure."""
    assert judgement.cause is not None  # noqa: S101  (neither Suspect nor Dead comes without one)
    return failure(judgement.cause, judgement.message, judgement.rule, judgement.culprit_rank, generation, now)


def _deaths(signs: Sequence[Sign]) -> Iterator[Sign]:
    """Yield the signs of a death; log lines of vLLM's API process about EngineCore and itself only explain them."""
    return (sign for sign in signs if isinstance(sign.event, _DEATHS))


def _patience(event: AgentEvent, engine: EngineState) -> float:
    """Return the seconds from a sign to the verdict, within which a better explanation may be observed."""
    match event:
        case ProcessEnded(role="worker"):
            return _WORKER_SECONDS
        case CoreFailed() | FirstCompletion():
            return WINDOW_SECONDS
        case ApiEnded() if any(_all(engine.signs, CoreFailed)):
            return WINDOW_SECONDS
    return 0.0


def _fell_back(signs: Sequence[Sign], engine: EngineState) -> Failure | None:
    for sign, event in _all(signs, FabricFellBack):
        return _of(engine, sign, Cause.NCCL_SOCKET_FALLBACK, event.message, "log")
    return None


def _no_plugin(signs: Sequence[Sign], engine: EngineState) -> Failure | None:
    for sign, _ in _all(signs, PluginFailed):
        return _of(engine, sign, Cause.PLUGIN_NOT_LOADED, _NO_PLUGIN, "log")
    return None


def _shut_down(signs: Sequence[Sign], engine: EngineState) -> Failure | None:
    """Return the end of a vLLM that shut itself down: its processes end first. A failed EngineCore has the same
    effect."""
    told = [sign.event for sign in signs if isinstance(sign.event, CoreFailed | ShuttingDown)]
    if told and isinstance(told[0], ShuttingDown) and not any(_all(signs, CoreLost)):
        for sign, _ in _all(signs, ProcessEnded):
            message = "vLLM shut down without a request"
            return _of(engine, sign, Cause.ENGINE_EXITED, message, "log")
    return None


def _api_killed(signs: Sequence[Sign], engine: EngineState) -> Failure | None:
    """Return the end of an API process that a signal ended: it did not end because of its engine."""
    killed = any(event.code < 0 for _, event in _all(signs, ApiEnded))
    failed = any(_all(signs, CoreFailed)) or any(_all(signs, CoreLost))
    return _api_ended(signs, engine) if killed and not failed else None


def _processes(signs: Sequence[Sign], engine: EngineState) -> Failure | None:
    """Return EngineCore's end, or its workers'. A failed EngineCore takes them along, and they may be gone first."""
    ended = list(_all(signs, ProcessEnded))
    by_itself = any(_all(signs, WorkerLost))
    for sign, event in ended:
        if event.role == "engine-core" and not by_itself:
            return _explained(engine, sign, signs, Cause.ENGINE_CORE_DIED, _CORE)
    gave_up = any(_all(signs, CoreFailed)) and not by_itself
    for sign, event in ended:
        if event.ordered is False or (event.ordered is None and not gave_up):
            return _explained(engine, sign, signs, Cause.RAY_WORKER_DIED, _WORKER)
    for sign, _ in ended:
        return _explained(engine, sign, signs, Cause.ENGINE_CORE_DIED, _TOLD, "log")
    return None


def _gave_up(signs: Sequence[Sign], engine: EngineState) -> Failure | None:
    for sign, _ in _all(signs, CoreFailed):
        if any(_all(signs, WorkerLost)):
            return _explained(engine, sign, signs, Cause.RAY_WORKER_DIED, _WORKER, "log")
        return _explained(engine, sign, signs, Cause.ENGINE_CORE_DIED, "EngineCore gave up", "log")
    return None


def _api_ended(signs: Sequence[Sign], engine: EngineState) -> Failure | None:
    for sign, event in _all(signs, ApiEnded):
        if any(_all(signs, CoreLost)):
            # On a busy machine: the ends of the processes are observed in another order.
            return _explained(engine, sign, signs, Cause.ENGINE_CORE_DIED, _CORE)
        said, told = first_error(engine, sign.now) or (None, None)
        message = f"vLLM's API process ended ({describe_exit(event.code)})" + (f": {said}" if said else "")
        if event.code == 0:
            return _of(engine, sign, Cause.ENGINE_EXITED, message, "exit")
        if event.code == 2:
            # The exit code of argument parsers; a log line with a cause takes precedence.
            return _of(engine, sign, told or Cause.CONFIG_ERROR, message, "exit")
        cause = told if event.code > 0 and told is not None else Cause.API_SERVER_DIED
        return _explained(engine, sign, signs, cause, message, "exit")
    return None


def _asked(signs: Sequence[Sign], engine: EngineState) -> Failure | None:
    """Return a failure that a request to vLLM showed. It comes last: a request without an answer because a process
    ended is not the cause."""
    for sign in signs:
        match sign.event:
            case Judged(judgement=judgement):
                return judged(judgement, engine.generation, sign.now)
            case FirstCompletion(error=str(error), verified=verified):
                cause = Cause.ENGINE_WRONG if verified else Cause.CANARY_FAILED
                return _of(engine, sign, cause, first_failed(error), "completion")
            case TimerFired():
                message = f"vLLM did not answer within {engine.load_seconds:.0f} s; its last log line: {engine.stage}"
                return _of(engine, sign, Cause.STARTUP_TIMEOUT, message, "timeout")
    return None


def _explained(
    engine: EngineState, sign: Sign, signs: Sequence[Sign], cause: Cause, message: str, by: str = "process"
) -> Failure:
    """Return the end of a process, of `cause` unless something on this member explains it."""
    for other in signs:
        if isinstance(other.event, ProcessEnded | ApiEnded | CoreFailed) and other.event.explained is not None:
            cause, why = other.event.explained
            return _of(engine, sign, cause, f"{message}: {why}", by)
    return _of(engine, sign, cause, message, by)


def _of(engine: EngineState, sign: Sign, cause: Cause, message: str, by: str) -> Failure:
    return failure(cause, message, by, 0, engine.generation, sign.now)


def _all(signs: Sequence[Sign], kind: type[E]) -> Iterator[tuple[Sign, E]]:
    return ((sign, sign.event) for sign in signs if isinstance(sign.event, kind))


def root_failure(
    own: Failure,
    peers: Mapping[int, Peer],
    signals: Mapping[int, Signals | None],
    generation: int,
    policy: HealthPolicy,
    now: Now,
) -> Failure:
    """Return the death that came first: the engine's as observed by the head (`own`), or one that a peer reports or
    shows.

    A fatal error of an accelerator precedes all of them: processes there end because of it, possibly before the driver
    is read. NCCL errors follow other deaths more often than they cause one, so they count only without another
    candidate. An out-of-memory kill precedes the failure of an EngineCore that lost the process, whichever was observed
    first: an agent that is short of memory itself observes late.

    `signals` maps each rank to its sample since the death. Deaths of other engine generations do not count.
    """
    candidates = [own]
    for rank, peer in peers.items():
        if (death := peer.death_of(generation)) is not None:
            candidates.append(death)
            continue
        lost = peer.lost(now.clock, now.awake, policy)
        if peer.alive is not None and (peer.refused or lost is not None):
            also = "; its machine takes connections" if lost is Cause.AGENT_HUNG else ""
            candidates.append(
                Failure(
                    time=now.unix - (now.clock - peer.alive),
                    cause=lost or Cause.MEMBER_LOST,
                    culprit_rank=rank,
                    message=f"the agent of rank {rank} does not answer: {peer.error}{also}",
                    detected_by="peer" if lost is None else "link",
                    generation=generation,
                )
            )
    ended = any(one.cause is Cause.OUT_OF_MEMORY_HOST for one in candidates[1:])
    if ended and is_consequence_of_oom(own):
        candidates = candidates[1:]
    first = min(candidates, key=lambda failure: (failure.cause is Cause.NCCL_TIMEOUT, failure.time))
    for rank, seen in signals.items():
        if seen is not None and (xid := worst_xid(seen.gpus)) in FATAL_XIDS:
            told = {"cause": Cause.XID_ERROR, "culprit_rank": rank, "message": xid_message(rank, xid)}
            return first.model_copy(update={**told, "detected_by": "gpu"})
    return first


def with_lost_link(found: Failure, observer: int, peers: Mapping[int, Peer], own: Signals | None, now: Now) -> Failure:
    """Return the loss of a node as the loss of a link if other members still hear that node.

    Args:
        found: a failure that rank `observer` has observed.
        observer: this member.
        peers: the other members.
        own: this member's signals.
        now: the present moment.
    """
    lost = found.culprit_rank
    if found.cause is not Cause.NODE_LOST or lost is None or lost == observer:
        return found
    silences = {observer: own.silent if own is not None else {}}
    for rank, peer in peers.items():
        silence = peer.silence(now.clock, now.awake)
        if (
            silence is not None
            and silence < HEARD_SECONDS
            and peer.status is not None
            and peer.status.signals is not None
        ):
            silences[rank] = peer.status.signals.silent
    if not is_link_lost(lost, observer, silences):
        return found
    message = f"{link_message(observer, lost)}; {found.message}"[:1024]
    return found.model_copy(update={"cause": Cause.LINK_LOST, "culprit_rank": None, "message": message})


def is_consequence_of_oom(failure: Failure) -> bool:
    """Return whether a running EngineCore gave up because the kernel killed a process for lack of memory.

    The process may belong to another member: outside a container the kernel counts for the whole machine.
    """
    return failure.cause is Cause.OUT_OF_MEMORY_HOST and failure.detected_by == "log"
