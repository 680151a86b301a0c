"""This machine as the planner sees it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.gpus import Card, taken_by
from dsv4_operator.backends.local.publish import LOOPBACK
from dsv4_operator.backends.local.software import Software
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.planning.facts import Facts, GpuFacts, NodeFacts


def local_facts(
    deployment: DSV4Deployment,
    state: DeploymentState,
    *,
    isolated: bool = True,
    memory: int | None = None,
    cards: Sequence[Card] = (),
    software: Software | None = None,
) -> Facts:
    """Return as many stand-in nodes as the groups ask for, sharing this machine's processors and memory equally.

    Args:
        deployment: the specification.
        state: where its files go.
        isolated: whether members get networks of their own.
        memory: bytes that the members may count on together. Default: what is free now. Where members run already,
            their own memory is free for the plan that follows them, so the caller gives what was free without them.
        cards: the GPUs that the deployment holds, shared out among the nodes; none on CPU.
        software: installed for engines on them; none on CPU.
    """
    count = deployment.spec.topology.nodes_per_group * max(deployment.spec.replicas, 1) if isolated else 1
    software = software or Software()
    memory = (available_memory() if memory is None else memory) // count
    cpus = len(os.sched_getaffinity(0))
    nodes = tuple(
        NodeFacts(
            name=f"local-{place}",
            address=network.address(place) if isolated else LOOPBACK,
            interface=network.INTERFACE if isolated else "lo",
            cpus=max(1, cpus // count),
            memory_bytes=memory,
            # Whatever else is in the machine: without cards the members run vLLM's CPU build.
            machine=cards[0].machine if cards else "cpu",
            gpus=tuple(map(_gpu, cards[place * len(cards) // count : (place + 1) * len(cards) // count])),
        )
        for place in range(count)
    )
    return Facts(
        nodes=nodes,
        isolated=isolated,
        state_root=str(state.directory),
        weights_root=str(state.weights),
        ray_token_file=str(state.token()),
        cache_root=str(state.weights.parent / "cache"),
        secrets_root=str(state.secrets),
        profile=software.profile,
        cuda_home=software.cuda_home,
        one_machine=True,
    )


def _gpu(card: Card) -> GpuFacts:
    return GpuFacts(card.uuid, card.title, card.memory_bytes, card.free_bytes, taken_by(card))


def resident_memory(pids: Iterable[int]) -> int:
    """Return the bytes of these processes, shared pages divided among those that share them; one that ended counts
    nothing.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def available_memory() -> int:
    """Return the bytes that programs could have now without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; dsv4 needs Linux 3.14 or newer")
