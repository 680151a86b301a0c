"""This machine as the planner sees it."""

from __future__ import annotations

import os
from pathlib import Path

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.publish import LOOPBACK
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.planning.facts import Facts, NodeFacts


def local_facts(deployment: DSV4Deployment, state: DeploymentState, *, isolated: bool = True) -> Facts:
    """As many stand-in nodes as the deployment asks for, sharing this machine's processors and memory equally."""
    count = deployment.spec.topology.nodes_per_group if isolated else 1
    memory = _available_memory() // count
    cpus = len(os.sched_getaffinity(0))
    nodes = tuple(
        NodeFacts(
            name=f"local-{rank}",
            address=network.address(rank) if isolated else LOOPBACK,
            interface=network.INTERFACE if isolated else "lo",
            cpus=max(1, cpus // count),
            memory_bytes=memory,
        )
        for rank in range(count)
    )
    return Facts(
        nodes=nodes,
        isolated=isolated,
        state_root=str(state.directory),
        weights_root=str(state.weights),
        ray_token_file=str(state.token),
    )


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; dsv4 needs Linux 3.14 or newer")
