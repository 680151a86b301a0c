"""Shared state of one agent: `AgentContext`, which every runner of the agent takes as an argument, and its tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dsv4_runtime.agent.cleanup import sweep, sweep_sockets
from dsv4_runtime.agent.decide.events import AgentEvent, Crashed, GroupSeen, Task
from dsv4_runtime.agent.peers import Peers
from dsv4_runtime.agent.processes import Child, ProcessWatch, kill_stopped_workers
from dsv4_runtime.agent.record import Changes, MemberRecord
from dsv4_runtime.contract import AgentStatus, GroupPlan, Signals
from dsv4_runtime.engine.logs import LogTail
from dsv4_runtime.fabric.member import MemberFabric
from dsv4_runtime.health.samples import ENGINE_ROLES
from dsv4_runtime.health.vitals import ExitCauses, Vitals, memory_usage
from dsv4_runtime.util import TRACES, keeper, trace_receiver
from dsv4_runtime.util.secrets import is_secret_name

BRAKE = "DSV4_IMPORT_BRAKE"
"""Environment variable with the path of the file that slows imports down (`vllm_plugin.warm_pool.BRAKE`)."""

_SWEEP_SECONDS = 5.0
"""Limit of the search for remains of an engine, which reads the memory maps of all processes."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class AgentContext:
    """State and services that the runners of one member share. Created inside a running event loop."""

    def __init__(
        self,
        plan: GroupPlan,
        rank: int,
        directory: Path,
        token: str,
        feed: Callable[[AgentEvent], None],
        process_ended: Callable[[str, int], None],
    ) -> None:
        """Take functions of the member: `feed` passes an event to the decisions, `process_ended` is called with role
        and process id of a watched process that has ended."""
        self.plan = plan
        self.rank = rank
        self.me = plan.members[rank]
        self.directory = directory
        self.evidence_root = directory / "evidence"
        self.temporary = directory / "tmp"
        """Temporary directory of the children; removed with the member's directory."""
        self.brake = directory / "import-brake"
        """Imports of standby processes are slow while this file exists."""
        self.token = token
        self.feed = feed
        self.record = MemberRecord(plan, rank)
        self.peers = Peers(plan, rank, token)
        self.tasks = Tasks(feed)
        self.vitals = Vitals(gpus=plan.health.gpus, uuids=self.me.gpus)
        self.sampled = Changes()
        """Notified after every sample of this member's signals."""
        self.exit_causes = ExitCauses(self.ray_logs)
        self.tails = {"ray": LogTail(directory / "ray.log")}
        self.children: list[Child] = []
        self.gcs_answered: float | None = None
        """Monotonic time of the latest answer of Ray's GCS to this member; None before the first."""
        self.watch = ProcessWatch(process_ended)
        self.fabric = MemberFabric(plan, plan.fabric, rank, token) if plan.fabric is not None else None
        # The directory of the agent's Python comes first: Ray starts `python` and `ninja` by name.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        # On a full disk, Python and so vLLM would take another directory than TMPDIR for sockets.
        sockets = {"TMPDIR": str(self.temporary), "VLLM_RPC_BASE_PATH": str(self.temporary)}
        own = {"PATH": path, **sockets, BRAKE: str(self.brake)}
        # The credentials for the weights are not passed on: the engine needs only the files.
        inherited = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
        self.env = {**inherited, **own, **plan.environment(rank)}
        self.trace_arguments: tuple[str, ...] = ()
        """Further arguments of vLLM on rank 0, for traces."""
        if rank == 0:
            try:
                self.trace_arguments, variables = trace_settings(plan.engine_args(rank), os.environ)
            except ValueError as error:
                _log.warning("%s: %s; vLLM sends no traces", TRACES, error)
            else:
                self.env = {**variables, **self.env}
        self.keeper = _keeper(directory) if plan.engine.retain_weights else None
        if self.keeper is not None:
            self.env[keeper.VARIABLE] = str(self.keeper.path)
        self._created = time.time()
        self._needed: tuple[Path, ...] = ()
        """Files that were there when the Ray node had joined, and that the next engine needs."""

    @property
    def ray_logs(self) -> Path:
        """Return the log directory of Ray's session; it exists once Ray runs."""
        return self.directory / "ray" / "session_latest" / "logs"

    @property
    def api(self) -> str:
        """Return the URL of vLLM's API."""
        return f"http://{self.plan.head.address}:{self.plan.head.ports.api}"

    def view(self) -> GroupSeen:
        """Return the latest observation of the group."""
        record = self.record
        peers = dict(self.peers.all)
        return GroupSeen(peers, record.signals, record.disk_rate, self.gcs_answered, record.weights_place)

    def signals(self) -> dict[int, Signals | None]:
        """Return the latest signals of every rank, this member's first."""
        others = {rank: peer.status.signals if peer.status else None for rank, peer in self.peers.all.items()}
        return {self.rank: self.record.signals, **others}

    def status(self) -> AgentStatus:
        """Return the member's current status."""
        self.record.processes = {os.getpid(): "agent", **self.roles()}
        status = self.record.status().model_copy(update={"broken": self.broken()})
        return status if self.fabric is None else status.model_copy(update={"fabric": self.fabric.status})

    def broken(self) -> str | None:
        """Return a description of a missing prerequisite of the next engine; None if there is none, or no Ray node yet.

        The directory for temporary files is made again if it alone is missing.
        """
        if not self.record.joined:
            return None
        if not self._needed:
            sockets = self.directory / "ray" / "session_latest" / "sockets"
            paths = self.directory, sockets / "raylet", sockets / "plasma_store", Path(self.plan.ray_token_file)
            self._needed = tuple(path for path in paths if path.exists())
        for path in self._needed:
            if not path.exists():
                return f"{path} of rank {self.rank} was removed, and no engine can start on this Ray node"
        with contextlib.suppress(OSError):
            self.temporary.mkdir(exist_ok=True)
        return None

    def evidence(self) -> dict[str, object]:
        """Return the first fatal line and the last lines of every log, the memory and the status, as JSON values."""
        return {
            "firstFatal": {name: tail.first_fatal[0] for name, tail in self.tails.items() if tail.first_fatal},
            "lastLines": {name: list(tail.last) for name, tail in self.tails.items()},
            "memory": memory_usage(),
            "status": self.status().to_dict(),
        }

    def roles(self) -> dict[int, str]:
        """Return process id to role of all watched processes and running children."""
        return {**self.watch.roles, **{child.pid: child.name for child in self.children if child.running}}

    async def start_child(self, name: str, command: list[str], *, fed: bool = False, log: str | None = None) -> Child:
        """Start a child that writes to `<log>.log` in the member's directory, by default to `<name>.log`."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        child = await Child.start(name, command, self.env, self.directory / f"{log or name}.log", fed=fed)
        self.children.append(child)
        return child

    def kill_engine(self) -> None:
        """Kill the engine's watched processes on this member, because stopped actors ignore Ray's request to exit, and
        the stopped ones of those that wait for the next engine."""
        self.watch.kill(ENGINE_ROLES)
        try:
            if stopped := kill_stopped_workers():
                _log.warning("killed waiting workers of Ray that were stopped: %s", stopped)
        except OSError as error:
            _log.warning("stopped workers of Ray cannot be found: %s", error)

    async def sweep(self) -> None:
        """Remove shared memory and sockets that a killed engine left behind on this member, as far as that is possible
        within a bound: the kernel may not answer for a process that waits for a device.
        """
        try:
            async with asyncio.timeout(_SWEEP_SECONDS):
                if removed := await run_in_daemon_thread(sweep, self._created):
                    _log.info("removed %s unused files of shared memory", len(removed))
                if sockets := await run_in_daemon_thread(sweep_sockets, self.temporary):
                    _log.info("removed %s unused sockets", len(sockets))
        except (OSError, TimeoutError) as error:
            _log.warning("unused files of the engine may remain: %s", str(error) or type(error).__name__)


_VLLM_IMPORTS = (
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.sdk",
)


def trace_settings(
    arguments: tuple[str, ...], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the further arguments and variables of a vLLM that sends its spans to the receiver in `environment`.

    Args:
        arguments: of vLLM; with a receiver of their own nothing is added.
        environment: of the agent.

    Raises:
        ValueError: the variable has a wrong value, or a package is missing, without which vLLM would not start.
    """
    receiver = environment.get(TRACES)
    if not receiver or any(one.startswith("--otlp-traces-endpoint") for one in arguments):
        return (), {}
    receiver = trace_receiver(receiver)
    for module in _VLLM_IMPORTS:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ValueError(f"{receiver} is not used, because Python has no {module}; install dsv4[tracing]")
    variables = {"OTEL_SERVICE_NAME": "vllm", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    return (f"--otlp-traces-endpoint={receiver}",), variables


def _keeper(directory: Path) -> keeper.Keeper | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return keeper.Keeper(directory.absolute() / "weights.sock")
    except OSError as error:
        _log.warning("no weights are retained between engines: %s: %s", directory, error)
        return None


class Tasks:
    """The agent's tasks: at most one of each kind, whose result is an event."""

    def __init__(self, feed: Callable[[AgentEvent], None]) -> None:
        self._feed = feed
        self._running: dict[Task, asyncio.Task[None]] = {}
        self._stopped: set[asyncio.Task[None]] = set()

    def start(self, task: Task, work: Coroutine[Any, Any, AgentEvent]) -> None:
        """Run `work` and feed the event that it returns; an exception is a bug and becomes `Crashed`."""
        self.stop((task,))
        self._running[task] = asyncio.create_task(self._work(task, work))

    def stop(self, tasks: Iterable[Task]) -> None:
        """Cancel tasks without waiting: recovery continues even if one of them does not end."""
        for task in tasks:
            if (running := self._running.pop(task, None)) is not None:
                running.cancel()
                self._stopped.add(running)
                running.add_done_callback(self._stopped.discard)

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        self.stop(tuple(self._running))
        await asyncio.gather(*self._stopped, return_exceptions=True)

    async def _work(self, task: Task, work: Coroutine[Any, Any, AgentEvent]) -> None:
        try:
            event = await work
        except Exception as error:
            _log.exception("the agent made a mistake")
            event = Crashed(f"{type(error).__name__}: {error}")
        # The result of a task that was stopped meanwhile is dropped.
        if self._running.get(task) is asyncio.current_task():
            del self._running[task]
            self._feed(event)


def start_background(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Run `work` beside the decisions. Its result is not awaited, so an exception is logged."""

    def log_error(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the agent made a mistake", exc_info=error)

    task = asyncio.create_task(work)
    task.add_done_callback(log_error)
    return task


async def run_in_daemon_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run blocking work in a thread; return its result or raise its error. For a bound, use `asyncio.timeout`.

    Unlike with `asyncio.to_thread`, the thread does not prevent the exit of the process, for example when a disk or a
    driver never answers. After a timeout the work continues in the background.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    # A running future cannot be cancelled, so the thread can always store its result.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"aside-{work.__name__}", daemon=True).start()
    return await asyncio.wrap_future(future)
