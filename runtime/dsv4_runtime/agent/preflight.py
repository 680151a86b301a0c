"""Checks of what must hold before a member starts anything; each raises `PreflightError` with the remedy."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import shutil
import socket
import time
from pathlib import Path

import psutil

from dsv4_runtime.agent.clear import short_of_memory
from dsv4_runtime.contract import Cause, GpuSignals, GroupPlan
from dsv4_runtime.fabric.member import FabricError, MemberFabric
from dsv4_runtime.health.gpu import DriverSilentError, Gpus, within_seconds

# A driver that has to wake its GPUs up takes seconds.
_DRIVER_SECONDS = 10.0
# Until the driver has given back what an engine had that ended before.
_GPU_SECONDS, _GPU_PAUSE_SECONDS = 10.0, 0.5
SHM = Path("/dev/shm")  # noqa: S108  (the place where Ray and vLLM put shared memory, not a temporary file)


class PreflightError(Exception):
    """A check that failed."""

    def __init__(self, message: str, cause: Cause = Cause.PREFLIGHT_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


def _addresses() -> set[str]:
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


async def wait_for_address(address: str, seconds: float) -> None:
    """Wait until one of this member's interfaces has `address`; the backend may still be plugging it in."""
    deadline = time.monotonic() + seconds
    while address not in _addresses():
        if time.monotonic() > deadline:
            found = ", ".join(sorted(_addresses() - {"127.0.0.1", "::1"})) or "none but loopback"
            raise PreflightError(f"no interface has the member's address {address} (found: {found})")
        await asyncio.sleep(0.05)


def check_ports(plan: GroupPlan, rank: int) -> None:
    """Check that every port that this member will listen on is free at its address."""
    member = plan.members[rank]
    for name, port in member.ports.model_dump(exclude_none=True).items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((member.address, port))
            except OSError as error:
                raise PreflightError(
                    f"the {name} port {port} of {member.address} cannot be used: {error.strerror}; "
                    "end the process that has it, or give the deployment another port",
                    Cause.PORT_CONFLICT,
                ) from error


def check_resources(plan: GroupPlan) -> None:
    """Check that free memory and shared memory reach what the plan expects."""
    want = plan.expectations
    free = psutil.virtual_memory().available
    if free < want.memory_bytes:
        raise PreflightError(
            f"{free / 2**30:.1f} GiB of memory are free, the member needs {want.memory_bytes / 2**30:.1f} GiB; "
            "end other programs on this machine or use one with more memory"
        )
    shm = shutil.disk_usage(SHM).free
    if shm < want.shm_bytes:
        raise PreflightError(
            f"{SHM} has {shm / 2**20:.0f} MiB free, the member needs {want.shm_bytes / 2**20:.0f} MiB; "
            "enlarge it or remove what fills it",
            Cause.SHARED_MEMORY_FULL,
        )


def check_software() -> None:
    """Check that Ray and vLLM are installed beside this agent."""
    missing = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise PreflightError(f"not installed on this member: {', '.join(missing)}; use an image or extra that has them")


def look_at_gpus(plan: GroupPlan, rank: int) -> tuple[GpuSignals, ...]:
    """Return the GPUs that the plan gives to this member.

    Raises:
        PreflightError: the driver does not answer, or does not show as many as the member needs.
    """
    gpus = Gpus(plan.members[rank].gpus)
    try:
        if gpus.problem:
            raise PreflightError(
                f"{gpus.problem}; install NVIDIA's driver on this machine so that `nvidia-smi` lists the GPUs, and see "
                "that the container has them"
            )
        found, wanted = gpus.sample(), plan.members[rank].devices
        if len(found) < wanted and gpus.silent:
            said = ", ".join(f"{name}: {text}" for name, text in gpus.silent.items())
            raise PreflightError(f"{said}; look for the XID in `dmesg`, and reset the machine", Cause.XID_ERROR)
        if len(found) < wanted:
            raise PreflightError(
                f"{len(found)} of the {wanted} GPUs that the plan gives to this member are there; see `nvidia-smi -L`"
            )
        return found
    finally:
        gpus.close()


async def check_gpus(plan: GroupPlan, rank: int) -> None:
    """Wait until the GPUs have the memory that the engine needs: an engine that ended a moment ago may still have it.

    Raises:
        PreflightError: another program has it, or a GPU or its driver is missing.
    """
    deadline = time.monotonic() + _GPU_SECONDS
    while True:
        try:
            ask = functools.partial(within_seconds, _DRIVER_SECONDS, functools.partial(_answer, plan, rank))
            found = await asyncio.to_thread(ask)
        except DriverSilentError as error:
            raise PreflightError(f"{error}; see `dmesg` and `nvidia-smi`", Cause.XID_ERROR) from None
        if isinstance(found, PreflightError):
            raise found
        short = short_of_memory(found, plan.expectations.gpu_bytes)
        if short is None:
            return
        if time.monotonic() > deadline:
            raise PreflightError(f"{short}; end that program, or lower gpuMemoryUtilization", Cause.OUT_OF_MEMORY_GPU)
        await asyncio.sleep(_GPU_PAUSE_SECONDS)


def _answer(plan: GroupPlan, rank: int) -> tuple[GpuSignals, ...] | PreflightError:
    """Call `look_at_gpus` for a thread, which cannot raise to whoever waits for it."""
    try:
        return look_at_gpus(plan, rank)
    except PreflightError as error:
        return error


async def preflight(plan: GroupPlan, rank: int, fabric: MemberFabric | None = None) -> None:
    """Run all checks, the cheap ones first. The fabric answers the other members' probes from then on."""
    await wait_for_address(plan.members[rank].address, plan.timeouts.preflight)
    check_ports(plan, rank)
    check_resources(plan)
    check_software()
    if plan.health.gpus:
        await check_gpus(plan, rank)
    if fabric is not None:
        try:
            await fabric.open()
        except FabricError as error:
            raise PreflightError(str(error), error.cause) from error
