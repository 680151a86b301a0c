"""Standby processes for the next engine: real processes without vLLM and Ray, which tests/engine covers."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dsv4_runtime.agent import processes, standby, start
from dsv4_runtime.agent.decide.actions import KillEngine, StartTask, Stop
from dsv4_runtime.agent.decide.events import EngineGone, Staged, Task
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import GroupPlan, Phase
from dsv4_runtime.util import procfs
from dsv4_runtime.vllm_plugin import forking, patch, preload, warm_pool
from dsv4_runtime.vllm_plugin.kernels import v033
from dsv4_runtime.weights.staging import StagingResult
from dsv4_testkit.waiting import free_port, suspend, until, wait_until

# Imports a server that reports its order in place of vLLM's, and inspects no model, which would need vLLM.
WAITING = (
    "import sys; from dsv4_runtime.vllm_plugin import warm_pool as pool; pool.SERVER = 'served'; "
    "pool.inspect_model = lambda model: None; "
    "pool.serve(pool.Path(sys.argv[1]))"
)
SERVER = """
import os, sys
print("imported", flush=True)
if __name__ == "__main__":
    print("serves", sys.argv[1:], os.environ["TOLD"], os.environ.get("BEFORE"), sys.stdin.read(), flush=True)
"""


@pytest.fixture
def member(make_plan: Callable[..., GroupPlan], tmp_path: Path) -> Member:
    (tmp_path / "served.py").write_text(SERVER)
    found = Member(make_plan(), 0, tmp_path, "token")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    found.context.env = {**os.environ, "PYTHONPATH": path, "BEFORE": "1"}
    return found


async def wait_for(file: Path, text: str) -> None:
    async with asyncio.timeout(60):
        while not file.exists() or text not in file.read_text():
            await asyncio.sleep(0.02)


def told(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the standby process import `SERVER`."""
    start = member.context.start_child

    async def other(name: str, command: list[str], *, fed: bool = False, log: str | None = None) -> Any:
        program = ["-m", "dsv4_runtime.vllm_plugin.warm_pool", "server", member.context.plan.weights.path]
        workers = member.context.plan.engine.args
        assert command[1:] == program + (["worker"] if "--distributed-executor-backend=ray" not in workers else [])
        return await start(name, [sys.executable, "-c", WAITING, *command[4:], *command[2:3]], fed=fed, log=log)

    monkeypatch.setattr(member.context, "start_child", other)


async def prepared(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    told(member, monkeypatch)
    await member.standby.prepare()


async def test_the_standby_process_imports_before_it_gets_its_command_line(
    member: Member, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await prepared(member, monkeypatch)
    await wait_for(tmp_path / "standby.log", "imported")
    log = tmp_path / "vllm.log"
    log.write_text("of the engine before\n")
    member.context.env = {name: value for name, value in member.context.env.items() if name != "BEFORE"} | {
        "TOLD": "now"
    }
    taken = await member.standby.take(("--model=x",), str(log))
    assert taken is not None
    assert await member.standby.take((), str(log)) is None, "there is one only"
    assert taken.name == "api"
    assert await taken.wait() == 0
    assert log.read_text() == "of the engine before\nimported\nserves ['--model=x'] now None \n"


@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize("number", [0, 2, 3])
def test_modules_are_imported_up_to_one_that_takes_a_device(
    worker: bool, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ("of_an_engine_0", "of_an_engine_1", "of_an_engine_2")
    for name in names:
        (tmp_path / f"{name}.py").write_text("1 / 0" if name == names[1] else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(v033, "SERVER_MODULES", names[:1])
    monkeypatch.setattr(v033, "QUANTIZATION_MODULES", names[1:2])
    # Ray's workers are no forks of this process and import their modules themselves.
    monkeypatch.setattr(v033, "WORKER_MODULES", names[2:] if worker else ("of_a_worker",))
    monkeypatch.setattr(v033, "RAY_EXECUTOR", names[2])
    (tmp_path / "of_a_worker.py").touch()
    monkeypatch.setattr(patch, "is_cpu_build", lambda: False)
    monkeypatch.setattr(forking, "has_cuda", lambda: number < 3 and names[number] in sys.modules)
    try:
        warm_pool.import_ahead(worker=worker)
        assert [name in sys.modules for name in names] == [number > 0, False, number > 2]
        assert "of_a_worker" not in sys.modules
    finally:
        for name in names:
            sys.modules.pop(name, None)
    message = f"it initializes CUDA: {names[number]}" if number < 3 else ""
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("seed", range(50))
def test_a_standby_server_has_the_environment_of_a_cold_start(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports set and replace variables: before the order in a standby server, after it in a cold start."""
    draw = random.Random(seed)
    names = [f"DSV4_TEST_{letter}" for letter in "ABCDEF"]

    def some() -> dict[str, str]:
        return {name: str(draw.randrange(3)) for name in draw.sample(names, draw.randrange(len(names)))}

    replaced, defaults = some(), some()

    def imports(environment: Any) -> None:
        environment.update(replaced)
        for name, value in defaults.items():
            environment.setdefault(name, value)

    before = {name: value for name, value in some().items() if name not in defaults}
    # Orders add and change variables, except those that an import replaces; replacements are known for `before` only.
    order = {name: value for name, value in {**before, **some()}.items() if name not in replaced}
    order |= {name: value for name, value in before.items() if name in replaced}
    cold = dict(order)
    imports(cold)
    environment = dict(before)
    monkeypatch.setattr(os, "environ", environment)
    imports(environment)
    warm_pool._set_environment(order, before)
    assert environment == cold


async def counts(port: int, found: list[int | None]) -> web.AppRunner:
    """Serve vLLM's metrics with the numbers of open requests in `found`, one per request; the last one repeats."""

    async def metrics(_: web.Request) -> web.Response:
        running = found.pop(0) if len(found) > 1 else found[0]
        if running is None:
            raise web.HTTPServiceUnavailable
        names = ("iteration_tokens_total_count", "num_requests_running", "num_requests_waiting")
        return web.Response(text="#\n" + "".join(f"vllm:{name} {running}.0\n" for name in names))

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


@pytest.mark.parametrize(
    ("found", "latest", "least"),
    [
        ([0], 600.0, 0.3),
        ([3, 3, 0], 600.0, 0.5),
        ([0, 0, 1, 0], 600.0, 0.6),
        ([1], 2.0, 2.0),
        ([None], 2.0, 2.0),
        ([None, None, 0], 600.0, 0.5),
    ],
)
async def test_processes_are_made_once_the_engine_is_idle_or_after_a_bounded_time(
    member: Member, monkeypatch: pytest.MonkeyPatch, found: list[int | None], latest: float, least: float
) -> None:
    for name, seconds in (("_POLL_SECONDS", 0.1), ("_LATEST_SECONDS", latest)):
        monkeypatch.setattr(standby, name, seconds)
    port = free_port()
    runner = await counts(port, found)
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(60):
        await member.standby._until_idle(f"http://127.0.0.1:{port}", 0.3)
    assert asyncio.get_running_loop().time() - begun >= least
    await runner.cleanup()


SLOW = """
import sys, time
from dsv4_runtime.vllm_plugin import warm_pool
begun = time.monotonic()
with warm_pool.slow_imports():
    for number in range(10):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        __import__(f"module{number}")
used, passed = time.process_time(), time.monotonic() - begun
print(passed, any(type(one).__name__ == "_Brake" for one in sys.meta_path))
"""


@pytest.mark.parametrize(("exists", "least"), [(True, 0.9), (False, 0.0), (None, 0.0)])
def test_imports_pause_while_the_brake_is_on(tmp_path: Path, exists: bool | None, least: float) -> None:
    for number in range(10):
        (tmp_path / f"module{number}.py").write_text("")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    if exists is not None:
        env[warm_pool.BRAKE] = str(tmp_path / "brake")
    if exists:
        (tmp_path / "brake").touch()
    command = [sys.executable, "-c", SLOW]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    passed, left = done.stdout.split()
    assert float(passed) >= least
    assert left == "False"


def test_a_released_brake_lets_imports_continue(tmp_path: Path) -> None:
    """The engine died while the standby processes were importing."""
    file = tmp_path / "brake"
    file.touch()
    slow = warm_pool._Brake(file)
    slow._used -= 100.0
    released: list[bool] = []

    def release() -> None:
        released.append(True)
        file.unlink()

    begun = time.monotonic()
    threading.Timer(0.2, release).start()
    assert slow.find_spec("x", None) is None
    assert released
    assert 0.1 < time.monotonic() - begun < 60


async def test_the_brake_is_on_while_an_engine_serves_and_off_when_the_next_one_needs_its_processes(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {pid, 1})
    assert member.context.env.get(warm_pool.BRAKE) is None, "the fixture's"
    plain = Member(member.context.plan, 0, member.context.directory, "token")
    assert plain.context.env[warm_pool.BRAKE] == str(plain.context.brake)
    assert not member.context.brake.exists(), "a first start is not slowed down"
    await prepared(member, monkeypatch)
    assert member.context.brake.exists()
    member.act(Stop((Task.PROBE,)))
    assert member.context.brake.exists()
    member.act(Stop((Task.PROBE, Task.STANDBY)))
    assert not member.context.brake.exists()
    (waiting,) = member.context.children
    await waiting.end(0.0)


@pytest.mark.parametrize(
    ("executor", "devices", "processors", "pauses"),
    [
        *[("mp", 1, 7, True), ("mp", 1, 8, False), ("mp", 4, 8, False), ("ray", 1, 15, True), ("ray", 1, 16, False)],
        *[("ray", 2, 23, True), ("ray", 2, 24, False), ("ray", 8, 71, True), ("ray", 8, 128, False)],
    ],
)
async def test_imports_pause_where_standby_processes_would_take_more_than_an_eighth_of_the_processors(
    member: Member, monkeypatch: pytest.MonkeyPatch, executor: str, devices: int, processors: int, pauses: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(pid, processors)))
    context = member.context
    engine = context.plan.engine.model_copy(update={"args": (f"--distributed-executor-backend={executor}",)})
    context.plan = context.plan.model_copy(update={"engine": engine})
    context.me = context.me.model_copy(update={"devices": devices})
    member.standby._slow_down()
    assert context.brake.exists() == pauses


@pytest.mark.parametrize(("told", "code"), [(True, 0), (False, 1)])
async def test_nothing_waits_with_a_device(tmp_path: Path, told: bool, code: int) -> None:
    """A process with an initialized GPU exits if it has no order yet, and starts the engine if it has one."""
    (tmp_path / "served.py").write_text(SERVER)
    device = "import sys, types; cuda = types.SimpleNamespace(is_initialized=lambda: True); "
    device += "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda); "
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TOLD": "now"}
    order = json.dumps({"args": [], "env": env, "log": str(tmp_path / "log")}) + "\n"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", device + WAITING, str(tmp_path), env=env, stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    if told:
        process.stdin.write(order.encode())
        process.stdin.close()
    async with asyncio.timeout(60):
        assert await process.wait() == code
    assert (tmp_path / "log").exists() is told


async def test_an_ended_standby_process_is_not_used(
    member: Member, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await prepared(member, monkeypatch)
    (waiting,) = member.context.children
    await waiting.end(0.0)
    assert await member.standby.take((), str(tmp_path / "vllm.log")) is None


@pytest.mark.parametrize("how", ["stopped", "another program", "busy", "well"])
async def test_a_standby_process_is_used_only_if_it_answers_or_works(
    member: Member, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    begin = member.context.start_child
    programs = {"busy": "while True: pass", "another program": "import time; time.sleep(600)"}

    async def other(name: str, command: list[str], *, fed: bool = False, log: str | None = None) -> Any:
        program = [] if how == "another program" else command[2:3]
        text = programs.get(how, WAITING)
        return await begin(name, [sys.executable, "-c", text, *command[4:], *program], fed=fed, log=log)

    monkeypatch.setattr(member.context, "start_child", other)
    await member.standby.prepare()
    (waiting,) = member.context.children
    if how in ("stopped", "well"):
        await wait_for(tmp_path / "standby.log", "imported")
    if how == "stopped":
        suspend(waiting.pid)
    begun = time.monotonic()
    taken = await member.standby.take((), str(tmp_path / "vllm.log"))
    assert time.monotonic() - begun < 60
    assert (taken is waiting) is (how in ("busy", "well"))
    if taken is None:
        assert not waiting.running, "it is no child any more"
        assert member.context.children == []
    await waiting.end(0.0)


async def test_a_server_that_two_tasks_find_unusable_is_discarded_once(
    member: Member, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next engine and the search for losses query one server at once; it runs and does not answer."""
    begin = member.context.start_child

    async def silent(name: str, command: list[str], *, fed: bool = False, log: str | None = None) -> Any:
        text = "import time; print('sleeps', flush=True); time.sleep(60)"
        return await begin(name, [sys.executable, "-c", text, *command[2:3]], fed=fed, log=log)

    monkeypatch.setattr(member.context, "start_child", silent)
    monkeypatch.setattr(procfs, "PROBE_SECONDS", 0.2)
    await member.standby.prepare()
    (waiting,) = member.context.children
    await wait_for(tmp_path / "standby.log", "sleeps")
    searching = asyncio.create_task(member.standby._until_lost(0))
    taken = await member.standby.take((), str(tmp_path / "vllm.log"))
    await asyncio.sleep(procfs.ANSWER_SECONDS + 1.0)
    assert taken is None
    assert not waiting.running
    assert not searching.done(), "the engine has discarded it, so nothing is to be replaced"
    searching.cancel()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_one_is_replaced_within_seconds_and_a_bounded_number_of_times(
    member: Member, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    async def idle(*_: object) -> None:
        return

    monkeypatch.setattr(member.standby, "_until_idle", idle)
    monkeypatch.setattr(standby, "_REPLACEMENTS", 2)
    monkeypatch.setattr(standby, "_LONGEST_BACKOFF_SECONDS", 0.5)
    told(member, monkeypatch)
    keeping = asyncio.create_task(member.standby.keep())
    known: set[int] = set()
    for _ in range(3):
        async with asyncio.timeout(60):
            while not (new := {child.pid for child in member.context.children if child.running} - known):
                await asyncio.sleep(0.05)
        log = tmp_path / "standby.log"
        async with asyncio.timeout(60):
            while log.read_text().count("imported") <= len(known):
                await asyncio.sleep(0.05)
        known |= new
        (pid,) = new
        os.kill(pid, number)
    async with asyncio.timeout(60):
        await keeping
    assert len(known) == 3
    assert [child for child in member.context.children if child.running] == []


@pytest.mark.parametrize(("number", "seen"), [(signal.SIGKILL, True), (signal.SIGSTOP, True), (signal.SIGKILL, False)])
@pytest.mark.parametrize("raylet", ["accepts", "refuses"])
async def test_a_lost_worker_of_ray_is_requested_again_within_seconds_beside_requests(
    member: Member, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, seen: bool, raylet: str
) -> None:
    """The raylet is a real gRPC server. The request needs no subprocess unless the raylet refuses it."""
    code = (
        "import grpc, concurrent.futures as f, sys, time\n"
        "def answer(request, context):\n"
        "    print(request.hex(), dict(context.invocation_metadata())['authorization'], flush=True)\n"
        "    if sys.argv[1] == 'refuses':\n"
        "        context.abort(grpc.StatusCode.INVALID_ARGUMENT, 'no')\n"
        "    return b''\n"
        "class H(grpc.GenericRpcHandler):\n"
        "    def service(self, details):\n"
        "        if details.method == '/ray.rpc.NodeManagerService/PrestartWorkers':\n"
        "            return grpc.unary_unary_rpc_method_handler(answer)\n"
        "server = grpc.server(f.ThreadPoolExecutor(1), handlers=[H()])\n"
        "print(server.add_insecure_port('127.0.0.1:0'), flush=True)\n"
        "server.start()\n"
        "time.sleep(600)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code, raylet], stdout=subprocess.PIPE, text=True)
    library = tmp_path / "libtorch.so"
    library.write_bytes(b"mapped by a worker that imports vLLM")
    maps = f"import mmap, time; f = open({str(library)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); time.sleep(600)"
    worker = subprocess.Popen(["bash", "-c", f'exec -a ray::IDLE {sys.executable} -c "{maps}"'])
    other = subprocess.Popen(["bash", "-c", "exec -a ray::IDLE sleep 600"])  # an idle process of Ray's own
    prepared = []

    async def prepare() -> int:
        prepared.append(time.monotonic())
        return 1

    async def busy(*_: object) -> None:
        return

    monkeypatch.setattr(member.standby, "_until_idle", busy)
    monkeypatch.setattr(member.standby, "prepare", prepare)
    monkeypatch.setattr(standby, "_WORKERS_SECONDS", 0.1)
    monkeypatch.setattr(standby, "_MISSING_SECONDS", 600.0 if seen else 0.5)
    monkeypatch.setattr(type(member.standby), "_has_workers", True)
    member.context.me = member.context.me.model_copy(update={"address": "127.0.0.1"})
    assert server.stdout is not None
    requests = [base64.b64encode(text).decode() for text in (b"one", b"two")]
    file = tmp_path / "prestart.json"
    file.write_text(json.dumps({"port": int(server.stdout.readline()), "messages": requests}))
    await until(lambda: processes.standby_workers() == {worker.pid})
    if not seen:
        worker.kill()
        worker.wait(60)
    keeping = asyncio.create_task(member.standby.keep())
    try:
        if seen:
            await asyncio.sleep(1.5)
            os.kill(worker.pid, number)
        line = await asyncio.to_thread(server.stdout.readline)
        assert line.split(maxsplit=1) == [b"one".hex(), "Bearer token\n"]
        assert worker.wait(60) == -signal.SIGKILL
        monkeypatch.setattr(standby, "standby_workers", lambda: {os.getpid()})
        if raylet != "accepts":
            await until(lambda: len(prepared) == 2)
        await asyncio.sleep(0.3)
        assert len(prepared) == (1 if raylet == "accepts" else 2)
    finally:
        keeping.cancel()
        for process in (server, worker, other):
            process.kill()
            process.communicate()


async def test_a_stopped_worker_of_ray_waits_for_no_engine() -> None:
    found = [subprocess.Popen(["bash", "-c", "exec -a ray::IDLE sleep 600"]) for _ in range(2)]
    try:
        for process in found:
            wait_until(lambda pid=process.pid: b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()[:5])
        os.kill(found[0].pid, signal.SIGSTOP)
        while processes.kill_stopped_workers() != [found[0].pid]:
            await asyncio.sleep(0.01)
        assert found[0].wait(60) == -signal.SIGKILL
        assert found[1].poll() is None
    finally:
        for process in found:
            process.kill()
            process.wait()


async def test_only_one_standby_process_is_prepared(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    await prepared(member, monkeypatch)
    await member.standby.prepare()
    (waiting,) = member.context.children
    await waiting.end(0.0)


async def test_it_ends_with_its_agent(member: Member, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    await prepared(member, monkeypatch)
    (waiting,) = member.context.children
    assert waiting.send(b"")
    async with asyncio.timeout(120):
        assert await waiting.wait() == 0
    assert "serves" not in (tmp_path / "standby.log").read_text()


async def test_nothing_waits_where_memory_is_short(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_LEAST_MEMORY", 1 << 60)
    member.context.record.signals = member.context.vitals.sample({}, {})
    await prepared(member, monkeypatch)
    assert member.context.children == []


async def test_a_first_engine_uses_a_standby_process_too(
    member: Member, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM is imported while the weights are fetched, and fetching does not wait for the import."""

    async def fetched(*_: object) -> Any:
        await wait_for(tmp_path / "vllm.log", "imported")
        return StagingResult(verified=True)

    monkeypatch.setattr(start, "stage", fetched)
    told(member, monkeypatch)
    assert await member.start.stage() == Staged(verified=True)
    taken = await member.standby.take(("--model=x",), str(tmp_path / "vllm.log"))
    assert taken is not None
    await taken.end(0.0)


async def test_weights_are_fetched_without_a_standby_process_too(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetched(*_: object) -> Any:
        return StagingResult(verified=True)

    async def refused(*_: object, **__: object) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(start, "stage", fetched)
    monkeypatch.setattr(member.context, "start_child", refused)
    assert await member.start.stage() == Staged(verified=True)


class Class:
    """Model class in vLLM's registry."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked, self._error = 0, error

    def inspect_model_cls(self) -> None:
        self.asked += 1
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ('{"architectures": ["Other"]}', (0, 1)),
        ('{"architectures": ["Broken", "Other"]}', (0, 0)),
        ('{"architectures": ["Unknown"]}', (0, 0)),
        ('{"architectures": null}', (0, 0)),
        ("{", (1, 0)),
        (None, (1, 0)),
    ],
)
def test_the_models_class_is_inspected_ahead_of_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str | None, asked: tuple[int, int]
) -> None:
    models = {"DeepseekV4ForCausalLM": Class(), "Other": Class(), "Broken": Class(RuntimeError("no such module"))}
    registry = types.ModuleType("registry")
    registry.ModelRegistry = types.SimpleNamespace(models=models)  # type: ignore[attr-defined]
    registry._run_in_subprocess = lambda fn: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", registry)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    warm_pool.inspect_model(tmp_path)
    assert (models["DeepseekV4ForCausalLM"].asked, models["Other"].asked) == asked


@pytest.mark.parametrize(
    ("arguments", "imports"),
    [
        (["default_worker.py", "--runtime-env-hash=1234"], True),
        (["default_worker.py", "--runtime-env-hash=-7"], True),
        (["default_worker.py", "--runtime-env-hash=0"], False),
        (["default_worker.py"], False),
    ],
)
def test_rays_own_idle_processes_import_nothing(arguments: list[str], imports: bool) -> None:
    assert preload.has_environment(arguments) is imports


@pytest.mark.parametrize(
    ("words", "cpu", "expected"),
    [
        ([], False, []),
        (["--runtime-env-hash=1234"], False, ["of_the_executor", "of_quantization", "of_a_worker"]),
        (["--runtime-env-hash=1234"], True, ["of_the_executor"]),
    ],
)
def test_a_waiting_worker_of_ray_imports_the_modules_of_a_worker(
    words: list[str], cpu: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("of_the_executor", "of_quantization", "of_a_worker")
    for name in names:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(v033, "RAY_EXECUTOR", names[0])
    monkeypatch.setattr(v033, "QUANTIZATION_MODULES", names[1:2])
    monkeypatch.setattr(v033, "WORKER_MODULES", names[2:])
    monkeypatch.setattr(patch, "is_cpu_build", lambda: cpu)
    monkeypatch.setattr(sys, "argv", ["default_worker.py", *words])
    try:
        importlib.reload(preload)
        assert [name for name in names if name in sys.modules] == expected
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_only_idle_processes_with_the_engines_environment_are_counted() -> None:
    found = []
    for title, value in (("ray::IDLE", "1"), ("ray::IDLE", "2"), ("ray::RayWorkerProc.run", "1")):
        command = ["bash", "-c", f"exec -a {title} sleep 600"]
        found.append(subprocess.Popen(command, env={**os.environ, "DSV4_TEST_OF": f"{os.getpid()}-{value}"}))
    try:
        for process in found:
            wait_until(lambda pid=process.pid: b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()[:5])
        assert warm_pool.idle_workers({"DSV4_TEST_OF": f"{os.getpid()}-1"}) == 1
    finally:
        for process in found:
            process.kill()
            process.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_standby_process_is_prepared_while_an_engine_serves_not_while_one_starts(
    fresh: Callable[..., Any], rank: int
) -> None:
    replay = fresh(rank)
    replay.serve()
    if rank == 0:
        replay.restart()
        assert any(Task.STANDBY in action.tasks for action in replay.all(Stop))
    else:
        replay.head_says(1, Phase.WARMING)
        assert StartTask(Task.STANDBY) not in replay.all(StartTask)
        replay.head_says(1, Phase.SERVING)
        assert StartTask(Task.STANDBY) in replay.all(StartTask)
        replay.head_says(1, Phase.RESTARTING)
        assert Stop((Task.STANDBY,)) in replay.all(Stop)


def test_the_next_engines_worker_is_not_taken_for_the_last_ones(serving: Callable[..., Any]) -> None:
    """The worker has imported vLLM already, so it may exist before this member receives the head's next phase."""
    replay = serving(1)
    replay.head_says(1, Phase.SERVING)
    replay.head_says(1, Phase.RESTARTING)
    replay.head_says(1, Phase.RESTARTING)
    assert len(replay.all(KillEngine)) == 2, "until nothing is left"
    replay.feed(EngineGone())
    replay.head_says(1, Phase.RESTARTING)
    assert len(replay.all(KillEngine)) == 2
    for phase in (Phase.LOADING, Phase.RESTARTING):
        replay.head_says(2, phase)
    assert len(replay.all(KillEngine)) == 3


async def test_remaining_processes_of_an_engine_are_searched_again(member: Member) -> None:
    member.act(KillEngine())
    assert member.loop.state.phase is Phase.PREFLIGHT
    fed: list[object] = []
    member.loop.feed = fed.append  # type: ignore[method-assign,assignment]
    member.act(KillEngine())
    assert fed == [EngineGone()]
    process = subprocess.Popen(["bash", "-c", "exec -a ray::RayWorkerProc.run sleep 600"])
    try:
        wait_until(lambda: b"ray::" in Path(f"/proc/{process.pid}/cmdline").read_bytes()[:5])
        member.context.watch.refresh()
        # The member collects the exit codes of other children at once.
        with processes.waited_for(process.pid):
            member.act(KillEngine())
            assert fed == [EngineGone()], "it has not ended yet"
            assert process.wait(60) == -9
    finally:
        process.kill()
        process.wait()
        member.context.watch.close()
