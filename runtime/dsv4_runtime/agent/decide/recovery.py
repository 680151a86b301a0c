"""Next step after an engine's death, as far as the head may decide it: level 1, or leave it to the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsv4_runtime.agent.decide.events import Now
from dsv4_runtime.agent.decide.peer import Peer
from dsv4_runtime.contract import Cause, Failure, GroupPlan, HealthPolicy, Signals, permit
from dsv4_runtime.health.samples import FATAL_XIDS, worst_xid, xid_message

# Level 1 that failed twice in a row is not the answer.
MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the engine in place."""

    at: float
    """Unix time from which on."""
    spent: int
    """Restarts of the budget that are used already."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Do nothing more: the operator decides between a new incarnation and the end."""

    reason: str


def is_consequence_of_oom(failure: Failure) -> bool:
    """Return whether an EngineCore that still speaks gave up when the kernel ended a process for want of memory.

    The process may be another member's: outside a container the kernel counts for the whole machine.
    """
    return failure.cause is Cause.OUT_OF_MEMORY_HOST and failure.detected_by == "log"


def root_failure(
    own: Failure,
    peers: Mapping[int, Peer],
    signals: Mapping[int, Signals | None],
    generation: int,
    policy: HealthPolicy,
    now: Now,
) -> Failure:
    """Return the death that came first: the engine's as the head saw it, or what a peer says or shows.

    An accelerator's fatal error comes before all of them: what ran there ends because of it, and may be seen to end
    before the driver is asked. NCCL complains of other deaths more often than it causes one, so what it says counts
    only if nothing else does. A process that the kernel ended for want of memory comes before an EngineCore that gave
    up because of it, whichever was seen first: an agent that is short of memory itself sees late.

    Args:
        own: what the head saw.
        peers: rank to latest answer and heartbeat.
        signals: rank to what it sampled since the death.
        generation: the engine's; deaths of earlier ones are no roots.
        policy: says when a silent member is lost.
        now: the moment of the decision.
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


def next_step(
    plan: GroupPlan,
    peers: Mapping[int, Peer],
    failures: Sequence[Failure],
    restarts: Sequence[float],
    attempts: int,
    now: float,
) -> Restart | Leave:
    """Return level 1 or not, after the newest of `failures`.

    Args:
        plan: with the budget, and the restarts that earlier incarnations spent of it.
        peers: rank to latest answer, each asked after the death.
        failures: the engine's deaths in this incarnation, oldest first.
        restarts: Unix times of level 1 in this incarnation.
        attempts: level 1 since the engine last served.
        now: Unix time.
    """
    gone = [rank for rank, peer in peers.items() if not peer.usable]
    if gone:
        return Leave(f"rank {', '.join(map(str, gone))} is not there to start with")
    if attempts >= MAX_ATTEMPTS:
        return Leave(f"the engine did not come up {attempts} times in a row")
    latest = failures[-1].cause
    if latest.deterministic and len(failures) > 1 and failures[-2].cause is latest:
        return Leave(f"{latest} twice in a row: trying again cannot help")
    allowed = permit(plan.recovery, [*plan.restarts, *restarts], now)
    if allowed.at is None:
        return Leave(f"the budget of {plan.recovery.max_restarts} restarts is spent")
    return Restart(allowed.at, allowed.spent)
