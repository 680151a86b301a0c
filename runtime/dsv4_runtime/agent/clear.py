"""Proof that an engine is gone: its processes on every rank, its port, its GPUs' memory."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dsv4_runtime.agent.decide.peer import Peer
from dsv4_runtime.contract import Cause, GpuProcess, GpuSignals, MemberPlan, Signals
from dsv4_runtime.health.samples import GPU_FRESH_SECONDS

ENGINE_ROLES = frozenset({"engine-core", "worker"})
# The driver keeps a little for itself once a program has been there.
_GPU_SLACK_BYTES = 1 << 30
_NAMED = 3


class Remains(NamedTuple):
    """Obstacle to the start of the next engine."""

    rank: int
    what: str
    cause: Cause = Cause.UNKNOWN


def gpu_memory(signals: Signals | None) -> int | None:
    """Return the bytes in use on a member's GPUs, without those of other programs as far as the driver tells; None
    where there are no GPUs, or their driver does not tell."""
    told = [gpu.memory_used - _others(gpu) for gpu in signals.gpus if gpu.memory_used is not None] if signals else []
    return sum(told) if told else None


def short_of_memory(gpus: Iterable[GpuSignals], needed: int | None) -> str | None:
    """Return which GPU has less than `needed` bytes free and who has the rest; None if each has enough, or its driver
    does not tell, or nothing is known to be `needed`."""
    for gpu in gpus:
        if needed is None or gpu.memory_used is None or gpu.memory_total is None:
            continue
        free = gpu.memory_total - gpu.memory_used
        if free < needed:
            return (
                f"GPU {gpu.index} has {free / 2**30:.1f} GiB of free memory, and the engine needs "
                f"{needed / 2**30:.1f} GiB; {holders(gpu) or 'whose the rest is cannot be seen from this member'}"
            )
    return None


def holders(gpu: GpuSignals) -> str:
    """Return who has memory of `gpu`, the greatest first, for people; empty if nobody is told."""
    most = sorted(gpu.processes, key=lambda process: -process.memory)[:_NAMED]
    return ", ".join(f"{_who(one)} holds {one.memory / 2**30:.1f} GiB" for one in most)


def _who(process: GpuProcess) -> str:
    if not process.pid:
        return "a process outside this member"
    return f"process {process.pid}" + (f" ({process.name})" if process.name else "")


def remains(
    own: Iterable[str],
    signals: Mapping[int, Signals | None],
    peers: Mapping[int, Peer],
    before: Mapping[int, int],
    head: MemberPlan,
    since: float,
    needed: int | None = None,
) -> Remains | None:
    """Return what is still there of an engine that was ended, or has taken its place; None if another can start.

    Args:
        own: roles of the processes that the head still sees on its own member.
        signals: rank to its latest signals.
        peers: the other members; an answer from before `since` says nothing.
        before: rank to `gpu_memory` before the first engine started.
        head: rank 0, on whose port the API listens.
        since: monotonic time at which the head's own processes had ended.
        needed: bytes that the engine needs on each GPU; None: not known.
    """
    if roles := ENGINE_ROLES & set(own):
        return Remains(0, f"its {min(roles)} process still runs", Cause.PROCESS_STUCK)
    for rank, peer in peers.items():
        if peer.status is None or peer.heard is None or peer.heard <= since:
            return Remains(rank, "it has not answered since")
        if roles := ENGINE_ROLES & {process.name for process in peer.status.processes}:
            return Remains(rank, f"its {min(roles)} process still runs", Cause.PROCESS_STUCK)
    for rank, latest in signals.items():
        if latest is not None and latest.gpus and (left := _on_gpus(rank, latest, before.get(rank), needed)):
            return left
    return None if port_free(head) else Remains(0, f"port {head.ports.api} is still taken")


def _on_gpus(rank: int, latest: Signals, idle: int | None, needed: int | None) -> Remains | None:
    """Return what is left on a GPU. `idle`: memory in use before; None where the driver does not tell, as on GB10,
    which tells of processes.
    """
    if latest.gpus_age > GPU_FRESH_SECONDS:
        return Remains(rank, f"the driver of its accelerators has not answered for {latest.gpus_age:.0f} s")
    for gpu in latest.gpus:
        if mine := [process for process in gpu.processes if process.own]:
            told = holders(gpu.model_copy(update={"processes": tuple(mine)}))
            return Remains(rank, f"on GPU {gpu.index} {told}", Cause.PROCESS_STUCK)
    used, taken = gpu_memory(latest), short_of_memory(latest.gpus, needed)
    cause = Cause.OUT_OF_MEMORY_GPU if taken else Cause.UNKNOWN
    if used is not None and idle is not None and used > idle + _GPU_SLACK_BYTES:
        left = f"its accelerators still hold {(used - idle) / 2**30:.1f} GiB more than before"
        return Remains(rank, f"{left}; {taken}" if taken else left, cause)
    return Remains(rank, taken, cause) if taken else None


def _others(gpu: GpuSignals) -> int:
    return sum(process.memory for process in gpu.processes if not process.own)


def port_free(head: MemberPlan) -> bool:
    """Return whether the API's port can be listened on."""
    assert head.ports.api is not None  # noqa: S101  (the plan's own rule for the head)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((head.address, head.ports.api))
        except OSError:
            return False
    return True
