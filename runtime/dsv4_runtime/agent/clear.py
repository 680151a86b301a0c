"""Proof that an engine is gone: its processes on every rank, its port, its accelerators' memory."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from dsv4_runtime.agent.peers import Peer
from dsv4_runtime.contract import MemberPlan, Signals
from dsv4_runtime.health.samples import GPU_FRESH_SECONDS

ENGINE_ROLES = frozenset({"engine-core", "worker"})
# The driver keeps a little for itself once a program has been there.
_GPU_SLACK_BYTES = 1 << 30


def gpu_memory(signals: Signals | None) -> int | None:
    """Bytes in use on a member's accelerators; None where there are none, or their driver does not tell."""
    told = [gpu.memory_used for gpu in signals.gpus if gpu.memory_used is not None] if signals is not None else []
    return sum(told) if told else None


def remains(
    own: Iterable[str],
    signals: Mapping[int, Signals | None],
    peers: Mapping[int, Peer],
    before: Mapping[int, int],
    head: MemberPlan,
    since: float,
) -> tuple[int, str] | None:
    """(rank, what is still there) of an engine that was ended; None if nothing is left of it.

    Args:
        own: roles of the processes that the head still sees on its own member.
        signals: rank to its latest signals.
        peers: the other members; an answer from before `since` says nothing.
        before: rank to bytes of accelerators' memory that were in use before the first engine started.
        head: rank 0, on whose port the API listens.
        since: monotonic time at which the head's own processes had ended.
    """
    if roles := ENGINE_ROLES & set(own):
        return 0, f"its {min(roles)} process still runs"
    for rank, peer in peers.items():
        if peer.status is None or peer.heard is None or peer.heard <= since:
            return rank, "it has not answered since"
        if roles := ENGINE_ROLES & {process.name for process in peer.status.processes}:
            return rank, f"its {min(roles)} process still runs"
    for rank, idle in before.items():
        latest = signals.get(rank)
        if latest is not None and latest.gpus_age > GPU_FRESH_SECONDS:
            return rank, f"the driver of its accelerators has not answered for {latest.gpus_age:.0f} s"
        used = gpu_memory(latest)
        if used is not None and used > idle + _GPU_SLACK_BYTES:
            return rank, f"its accelerators still hold {(used - idle) / 2**30:.1f} GiB more than before"
    return None if port_free(head) else (0, f"port {head.ports.api} is still taken")


def port_free(head: MemberPlan) -> bool:
    """Whether the API's port can be listened on."""
    assert head.ports.api is not None  # noqa: S101  (the plan's own rule for the head)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((head.address, head.ports.api))
        except OSError:
            return False
    return True
