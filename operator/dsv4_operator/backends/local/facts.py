"""Facts about this machine and about local checkpoints for the planner."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from dsv4_operator.api import DSV4Deployment, ModelSpec, Variant
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.gateway import LOOPBACK
from dsv4_operator.backends.local.gpus import Card, describe_holders
from dsv4_operator.backends.local.software import Software
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.planning.catalog import Model, checkpoint_named
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint, model_from_files, model_of_config
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
    """Return the stand-in nodes of all groups, which share this machine's processors and memory equally.

    Args:
        deployment: the specification.
        state: its files.
        isolated: whether members have their own networks.
        memory: bytes for all members together. Default: the free memory now. Memory of running members is free for
            their successors, so the caller passes the amount that was free without them.
        cards: the GPUs of the deployment, divided among the nodes; none on CPU.
        software: installed software for engines on them; none on CPU.
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
            # Without cards, members run vLLM's CPU build, regardless of GPUs in the machine.
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
    return GpuFacts(card.uuid, card.title, card.memory_bytes, card.free_bytes, describe_holders(card))


def resident_memory(pids: Iterable[int]) -> int:
    """Return the proportional set size of the processes in bytes; processes that ended count as 0."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def available_memory() -> int:
    """Return the bytes that programs can allocate without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; dsv4 needs Linux 3.14 or newer")


_HEADER_LIMIT = 100 * 2**20  # Limit of safetensors.


def model_here(spec: ModelSpec) -> Model | None:
    """Return the model at the path of a deployment, read from its files or its `config.json` alone.

    None if neither is on this machine, or if the name already identifies the checkpoint.

    Raises:
        BadCheckpoint: a file cannot be parsed; the text contains its name.
    """
    place = spec.source.path or spec.source.shared_path
    if place is None:
        return None
    found = None if spec.source.path is None else read_checkpoint(Path(place), spec.variant)
    config = Path(place) / "config.json"
    unnamed = spec.variant is not Variant.NANO and spec.checkpoint is None and checkpoint_named(place) is None
    if found is None and unnamed and config.is_file():
        found = model_of_config(str(place), _json(config))
    if found is not None and found.variant != spec.variant:
        raise BadCheckpoint(
            f"spec.model.variant: {spec.variant} contradicts {config}, which is of {found.variant}; write that"
        )
    return found


def read_checkpoint(folder: Path, variant: str) -> Model | None:
    """Return the checkpoint in `folder`; None if files are missing.

    Raises:
        BadCheckpoint: a file cannot be parsed.
    """
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    if not config.is_file() or not index.is_file():
        return None
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadCheckpoint(f"{index} has no weight_map; download the file again")
    files = sorted({str(name) for name in weight_map.values()})
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise BadCheckpoint(f"{index} names {outside[0]!r}, which is not in that directory; download the file again")
    if not all((folder / name).is_file() for name in files):
        return None
    return model_from_files(str(folder), variant, _json(config), {name: _header(folder / name) for name in files})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON ({error}); download the file again") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{path} holds no JSON object; download the file again")
    return found


def _header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: 8 bytes of length, little-endian, then JSON."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(min(size, _HEADER_LIMIT)))
        ends = [tensor["data_offsets"][1] for name, tensor in found.items() if name != "__metadata__"]
        whole = 8 + size + max(ends, default=0)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} is not a safetensors file ({error}); download it again") from None
    if (length := path.stat().st_size) != whole:
        raise BadCheckpoint(f"{path} has {length} bytes, and its header says {whole}; download it again")
    return dict(found)
