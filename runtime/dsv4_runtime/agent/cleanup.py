"""Remains of an ended engine: processes, the port and GPU memory that block the next one, shared memory and sockets.

Python's `multiprocessing` (`psm_…`, vLLM's message queues), vLLM's CPU communicator (`…-cpushm_…`) and its offloaded KV
cache (`vllm_offload_….mmap`, 0.33 in parts) create files in /dev/shm and remove them at a regular exit. A killed engine
leaves them behind, and a few restarts fill the file system.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from dsv4_runtime.agent.decide.events import Peer
from dsv4_runtime.contract import Cause, GpuProcess, GpuSignals, MemberPlan, Signals
from dsv4_runtime.health.samples import ENGINE_ROLES, GPU_FRESH_SECONDS
from dsv4_runtime.util.files import own_shortage
from dsv4_runtime.util.keeper import Keeper
from dsv4_runtime.util.procfs import read_file

SHM = Path("/dev/shm")  # noqa: S108  (shared memory of Ray and vLLM, not temporary files)
# The driver keeps a little memory after the first use of a GPU.
_GPU_SLACK_BYTES = 1 << 30
_NAMED = 3
_OURS = re.compile(r"psm_[0-9a-f]+|.+-cpushm(_\d+)?|torch_\d+_.+|dsv4-ledger\.\d+|vllm_offload_.+\.mmap(\.\d+)?")
# A file this young may belong to a process that has not mapped it yet.
_SETTLED_SECONDS = 2.0
_BOUND_SOCKETS = Path("/proc/net/unix")


class Obstacle(NamedTuple):
    """Obstacle to the start of the next engine."""

    rank: int
    description: str
    cause: Cause = Cause.UNKNOWN
    lasting: bool = False
    """Whether it is useless to wait for its end."""


def find_obstacle(
    own: Iterable[str],
    signals: Mapping[int, Signals | None],
    peers: Mapping[int, Peer],
    before: Mapping[int, int],
    head: MemberPlan,
    since: float,
    needed: int | None = None,
    broken: str | None = None,
) -> Obstacle | None:
    """Return a remaining part of the ended engine, or another user of its resources; None if the next one can start.

    Args:
        own: roles of the watched processes that still run on the head's member.
        signals: rank to its latest signals.
        peers: the other members; answers from before `since` do not count.
        before: rank to `gpu_memory` before the first engine started.
        head: rank 0, on whose port the API listens.
        since: monotonic time at which the head's own processes had ended.
        needed: bytes that the engine needs on each GPU; None: not known.
        broken: missing prerequisite on the head's member.
    """
    if broken is not None:
        return Obstacle(0, broken, Cause.PREFLIGHT_FAILED, lasting=True)
    if roles := ENGINE_ROLES & set(own):
        return Obstacle(0, f"its {min(roles)} process still runs", Cause.PROCESS_STUCK)
    for rank, peer in peers.items():
        if peer.status is None or peer.heard is None or peer.heard <= since:
            return Obstacle(rank, "it has not answered since")
        if peer.status.broken is not None:
            return Obstacle(rank, peer.status.broken, Cause.PREFLIGHT_FAILED, lasting=True)
        if roles := ENGINE_ROLES & {process.name for process in peer.status.processes}:
            return Obstacle(rank, f"its {min(roles)} process still runs", Cause.PROCESS_STUCK)
    for rank, latest in signals.items():
        if latest is not None and latest.gpus and (left := _on_gpus(rank, latest, before.get(rank), needed)):
            return left
    return None if port_free(head) else Obstacle(0, f"port {head.ports.api} is still taken")


def _on_gpus(rank: int, latest: Signals, idle: int | None, needed: int | None) -> Obstacle | None:
    """Return an obstacle on a GPU. `idle`: memory in use before; None if only processes are reported (GB10)."""
    if latest.gpus_age > GPU_FRESH_SECONDS:
        return Obstacle(rank, f"the driver of its accelerators has not answered for {latest.gpus_age:.0f} s")
    for gpu in latest.gpus:
        if own := [process for process in gpu.processes if process.own]:
            names = holders(gpu.model_copy(update={"processes": tuple(own)}))
            return Obstacle(rank, f"on GPU {gpu.index} {names}", Cause.PROCESS_STUCK)
    used, taken = gpu_memory(latest), short_of_memory(latest.gpus, needed)
    cause = Cause.OUT_OF_MEMORY_GPU if taken else Cause.UNKNOWN
    if used is not None and idle is not None and used > idle + _GPU_SLACK_BYTES:
        left = f"its accelerators still hold {(used - idle) / 2**30:.1f} GiB more than before"
        return Obstacle(rank, f"{left}; {taken}" if taken else left, cause)
    return Obstacle(rank, taken, cause) if taken else None


def gpu_memory(signals: Signals | None) -> int | None:
    """Return the bytes in use on a member's GPUs; None if they are unknown.

    Without those of known other programs, and of retained weights.
    """
    if signals is None:
        return None
    used = [
        gpu.memory_used
        - (gpu.memory_retained or 0)
        - sum(process.memory for process in gpu.processes if not process.own)
        for gpu in signals.gpus
        if gpu.memory_used is not None
    ]
    return sum(used) if used else None


def with_retained(signals: Signals, keeper: Keeper | None) -> Signals:
    """Return `signals` with the memory of the weights that `keeper` holds, in equal parts on the GPUs."""
    held = keeper.held() if keeper is not None and signals.gpus else 0
    if not held:
        return signals
    share = held // len(signals.gpus)
    gpus = tuple(gpu.model_copy(update={"memory_retained": share}) for gpu in signals.gpus)
    return signals.model_copy(update={"gpus": gpus})


def short_of_memory(gpus: Iterable[GpuSignals], needed: int | None) -> str | None:
    """Return a description of a GPU with less than `needed` bytes free and of the holders of its memory.

    None: each GPU has enough, or the free or the needed memory is unknown.
    """
    for gpu in gpus:
        if needed is None or gpu.memory_used is None or gpu.memory_total is None:
            continue
        # The engine maps retained weights in place of its own.
        free = gpu.memory_total - gpu.memory_used + (gpu.memory_retained or 0)
        if free < needed:
            return (
                f"GPU {gpu.index} has {free / 2**30:.1f} GiB of free memory, and the engine needs "
                f"{needed / 2**30:.1f} GiB; {holders(gpu) or 'whose the rest is cannot be seen from this member'}"
            )
    return None


def holders(gpu: GpuSignals) -> str:
    """Return a list of the largest holders of a GPU's memory; empty if the driver reports none."""
    most = sorted(gpu.processes, key=lambda process: -process.memory)[:_NAMED]
    return ", ".join(f"{_name(one)} holds {one.memory / 2**30:.1f} GiB" for one in most)


def _name(process: GpuProcess) -> str:
    if not process.pid:
        return "a process outside this member"
    return f"process {process.pid}" + (f" ({process.name})" if process.name else "")


def port_free(head: MemberPlan) -> bool:
    """Return whether the API's port is free, as far as that can be found out."""
    assert head.ports.api is not None  # noqa: S101  (validated in the plan)
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((head.address, head.ports.api))
    except OSError as error:
        return own_shortage(error) is not None
    return True


def sweep(since: float) -> list[str]:
    """Remove unused files of shared memory and return their names.

    A file is removed if it belongs to this user, has a name of vLLM's or Python's, was created after Unix time `since`
    and not within the last two seconds, and is neither mapped nor open in any process.
    """
    before = time.time() - _SETTLED_SECONDS
    candidates = {}
    for path in SHM.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if _OURS.fullmatch(path.name) and found.st_uid == os.geteuid() and since <= found.st_ctime <= before:
                candidates[path.name] = path
    if not candidates:
        return []
    used = _used()
    removed = sorted(name for name in candidates if name not in used)
    for name in removed:
        candidates[name].unlink(missing_ok=True)
    return removed


def _used() -> set[str]:
    """Return the names of the files in /dev/shm that a process has mapped or open.

    Raises:
        OSError: a process cannot be read for lack of a file descriptor.
    """
    found = set()
    prefix = f"{SHM}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        maps = read_file(int(process.name), "maps") or b""
        for line in maps.decode(errors="replace").splitlines():
            if prefix in line:
                found.add(line.split(prefix, 1)[1])
        try:
            descriptors = list((process / "fd").iterdir())
        except OSError as error:
            if own_shortage(error) is not None:
                raise
            continue
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith(prefix):
                    found.add(target.removeprefix(prefix))
    return found


def sweep_sockets(folder: Path) -> list[Path]:
    """Remove the sockets in `folder` that no process of this network namespace has bound, and return them."""
    if not folder.is_dir():
        return []
    bound = {line.rsplit(" ", 1)[-1] for line in _BOUND_SOCKETS.read_text(errors="replace").splitlines()}
    removed = []
    for path in folder.iterdir():
        if path.is_socket() and str(path) not in bound:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed.append(path)
    return removed
