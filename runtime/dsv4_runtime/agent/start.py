"""Tasks of every member before the engine starts, as `agent.decide.member` orders them: checks, weights, network, Ray.

Each preflight check raises `PreflightError` with the remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil

from dsv4_runtime.agent.cleanup import SHM, short_of_memory
from dsv4_runtime.agent.context import AgentContext, run_in_daemon_thread
from dsv4_runtime.agent.decide.events import AgentEvent, Done, Staged, Task, TaskFailed, WeightsRead
from dsv4_runtime.agent.processes import waited_for
from dsv4_runtime.agent.ray import RayNode
from dsv4_runtime.agent.staging import StagingError, prepare_page_cache, read_again, stage
from dsv4_runtime.agent.standby import Standby
from dsv4_runtime.contract import Cause, FabricStatus, GpuSignals, GroupPlan, Progress
from dsv4_runtime.fabric.member import FabricError, MemberFabric
from dsv4_runtime.health.gpu import Gpus
from dsv4_runtime.util.peer_copies import UNSAFE_COPIES, CopyTest, try_copies
from dsv4_runtime.weights import store
from dsv4_runtime.weights.members import StagingReport, WeightsServer

_log = logging.getLogger(__name__)

# A driver needs seconds to wake up its GPUs.
_DRIVER_SECONDS = 10.0
# Until the driver has released the memory of an engine that ended before.
_NO_COPIES = "NCCL_P2P_DISABLE"
_GPU_SECONDS, _GPU_PAUSE_SECONDS = 10.0, 0.5


class StartRunner:
    """Runner of the tasks of a member's start."""

    def __init__(self, context: AgentContext, standby: Standby, ray: RayNode, share: WeightsServer) -> None:
        self._context = context
        self._standby = standby
        self._ray = ray
        self._share = share
        self._plan, self._rank, self._record = context.plan, context.rank, context.record

    def work(self, task: Task) -> Coroutine[Any, Any, AgentEvent]:
        """Return the coroutine of a task."""
        # `Member` and `EngineRunner` have the other tasks.
        works: dict[Task, Callable[[], Coroutine[Any, Any, AgentEvent]]] = {
            Task.PREFLIGHT: self.preflight,
            Task.STAGE: self.stage,
            Task.PROVE: self.prove,
            Task.READ_AHEAD: self.read_ahead,
            Task.JOIN: self.join,
            Task.SCRUB: self.scrub,
            Task.VERIFY: self.verify,
            Task.STANDBY: self.standby,
        }
        return works[task]()

    async def preflight(self) -> AgentEvent:
        """Check the member."""
        try:
            await preflight(self._plan, self._rank, self._context.fabric)
        except PreflightError as error:
            return TaskFailed(Task.PREFLIGHT, error.cause, str(error), "preflight")
        return Done(Task.PREFLIGHT)

    async def stage(self) -> AgentEvent:
        """Stage the weights on this member."""

        def report(news: StagingReport) -> None:
            self._share.heard(news)
            if news.stage is not None:
                self._record.advance(Progress(stage=news.stage, percent=news.percent))

        with _log_only():
            await self._standby.start_server("vllm")
        try:
            done = await stage(self._plan, self._rank, self._context.token, report)
        except StagingError as error:
            return TaskFailed(Task.STAGE, error.cause, str(error), "staging")
        for name in done.wrong:
            text = "%s: %s of rank %s differed from its source and was fetched again"
            _log.warning(text, Cause.WEIGHTS_CORRUPT, name, self._rank)
        self._record.weights_repaired = done.wrong
        self._record.weights_place = await run_in_daemon_thread(store.place, Path(self._plan.weights.path))
        return Staged(done.verified)

    async def prove(self) -> AgentEvent:
        """Verify the network, then add its variables to the environment of Ray and vLLM."""
        context, fabric = self._context, self._context.fabric
        if fabric is None:
            return Done(Task.PROVE)
        try:
            await fabric.prove(self._fabrics)
            for variable in fabric.variables:
                _log.info("%s=%s: %s", variable.name, variable.value, variable.reason)
            found = {variable.name: variable.value for variable in fabric.variables}
            # The plan takes precedence: it contains the user's settings.
            context.env = {**context.env, **found, **self._plan.environment(self._rank)}
            await fabric.measure(self._fabrics, context.start_child, context.directory / "fabric.log")
        except FabricError as error:
            return TaskFailed(Task.PROVE, error.cause, str(error), "preflight")
        context.children = [child for child in context.children if child.running]
        return Done(Task.PROVE)

    async def read_ahead(self) -> AgentEvent:
        """Read the weights of this member's ranks into the page cache."""

        def report(news: StagingReport) -> None:
            self._record.disk_rate = news.disk_bytes_per_second or self._record.disk_rate

        await prepare_page_cache(self._plan, self._rank, report)
        return Done(Task.READ_AHEAD)

    async def join(self) -> AgentEvent:
        """Start this member's Ray node, if the group has any."""
        if self._context.me.ray_args:
            await self._ray.start()
        return Done(Task.JOIN)

    async def standby(self) -> AgentEvent:
        """Start the standby processes for the next engine."""
        with _log_only():
            await self._standby.keep()
        return Done(Task.STANDBY)

    async def scrub(self) -> AgentEvent:
        """Read the weights' files while the engine serves; report each complete pass, and end at a wrong file."""

        def report(news: StagingReport) -> None:
            if news.verified:
                self._context.feed(WeightsRead(Task.SCRUB))

        done = await read_again("scrub", self._plan, self._rank, report)
        return self._wrong(Task.SCRUB, done.wrong) if done.wrong else Done(Task.SCRUB)

    async def verify(self) -> AgentEvent:
        """Read the weights' files once at full speed and report whether they are right."""
        done = await read_again("verify", self._plan, self._rank, lambda _: None)
        return self._wrong(Task.VERIFY, done.wrong) if done.wrong else WeightsRead(Task.VERIFY, done.verified)

    def _wrong(self, task: Task, names: tuple[str, ...]) -> AgentEvent:
        message = f"{names[0]} in {self._plan.weights.path} of rank {self._rank} differs from its source"
        return TaskFailed(task, Cause.WEIGHTS_CORRUPT, message, "staging")

    def _fabrics(self) -> dict[int, FabricStatus | None]:
        return {rank: peer.status.fabric if peer.status else None for rank, peer in self._context.peers.all.items()}


@contextlib.contextmanager
def _log_only() -> Iterator[None]:
    """Log errors of standby processes: without them an engine still starts, only later."""
    try:
        yield
    except (OSError, TimeoutError) as error:
        _log.warning("no process waits for the next engine: %s", str(error) or type(error).__name__)


class PreflightError(Exception):
    """Failed check."""

    def __init__(self, message: str, cause: Cause = Cause.PREFLIGHT_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


async def preflight(plan: GroupPlan, rank: int, fabric: MemberFabric | None = None) -> None:
    """Run all checks, the cheap ones first. Afterwards the fabric answers the probes of the other members."""
    await wait_for_address(plan.members[rank].address, plan.timeouts.preflight)
    check_ports(plan, rank)
    check_resources(plan)
    check_software()
    if plan.health.gpus:
        await check_gpus(plan, rank)
        await check_copies(plan, rank)
    if fabric is not None:
        try:
            await fabric.open()
        except FabricError as error:
            raise PreflightError(str(error), error.cause) from error


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
    """Check that all ports of this member are free at its address."""
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
    """Check that free memory and free shared memory are sufficient for the plan."""
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
            "enlarge it or remove files",
            Cause.SHARED_MEMORY_FULL,
        )


def check_software() -> None:
    """Check that Ray and vLLM are installed beside this agent."""
    missing = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise PreflightError(f"not installed on this member: {', '.join(missing)}; use an image or extra that has them")


def sample_gpus(plan: GroupPlan, rank: int) -> tuple[GpuSignals, ...]:
    """Return the signals of the GPUs that the plan assigns to this member.

    Raises:
        PreflightError: the driver does not answer, or shows fewer GPUs than the member needs.
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
            errors = ", ".join(f"{name}: {text}" for name, text in gpus.silent.items())
            raise PreflightError(f"{errors}; search `dmesg` for the XID, and reset the machine", Cause.XID_ERROR)
        if len(found) < wanted:
            raise PreflightError(
                f"{len(found)} of the {wanted} GPUs that the plan gives to this member are there; see `nvidia-smi -L`"
            )
        return found
    finally:
        gpus.close()


async def check_gpus(plan: GroupPlan, rank: int) -> None:
    """Wait until the GPUs have the memory that the engine needs: an engine that has just ended may still hold it.

    Raises:
        PreflightError: another program holds it, or a GPU or its driver is missing.
    """
    deadline = time.monotonic() + _GPU_SECONDS
    while True:
        try:
            async with asyncio.timeout(_DRIVER_SECONDS):
                found = await run_in_daemon_thread(sample_gpus, plan, rank)
        except TimeoutError:
            silent = f"the NVIDIA driver has not answered for {_DRIVER_SECONDS:.0f} s"
            raise PreflightError(f"{silent}; see `dmesg` and `nvidia-smi`", Cause.XID_ERROR) from None
        short = short_of_memory(found, plan.expectations.gpu_bytes)
        if short is None:
            return
        if time.monotonic() > deadline:
            raise PreflightError(f"{short}; end that program, or lower gpuMemoryUtilization", Cause.OUT_OF_MEMORY_GPU)
        await asyncio.sleep(_GPU_PAUSE_SECONDS)


async def check_copies(plan: GroupPlan, rank: int) -> None:
    """Test copies between the GPUs of a pod. Elsewhere the control side tests them before it plans.

    Raises:
        PreflightError: a copy hangs, fails or arrives with wrong bytes, and the plan does not disable these copies.
    """
    member = plan.members[rank]
    if member.gpus is not None or member.devices < 2 or _NO_COPIES in {**os.environ, **plan.environment(rank)}:
        return

    def test() -> CopyTest:
        return try_copies(waited_for=waited_for)

    found = await run_in_daemon_thread(test)
    _log.info("copies between the GPUs: %s: %s", found.outcome, found.found)
    if found.problem:
        command = f"kubectl annotate node {member.node or 'NODE'} {UNSAFE_COPIES}={shlex.quote(found.problem)}"
        raise PreflightError(f"{found.problem}; to disable these copies: {command}", Cause.PEER_TO_PEER_HANG)
