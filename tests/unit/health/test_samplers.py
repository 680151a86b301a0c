"""The samplers, on real processes and a real API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web

from dsv4_runtime.agent.monitor import Prober
from dsv4_runtime.contract import GpuSignals, HealthPolicy
from dsv4_runtime.health import vitals
from dsv4_runtime.health.samples import Viewer
from dsv4_runtime.util import files, procfs
from dsv4_runtime.util.files import LedgerWriter, read_ledger
from dsv4_testkit.faults import groups
from dsv4_testkit.waiting import wait_until

GOOD = {"choices": [{"text": "a", "logprobs": {"token_logprobs": [-1.0]}}], "usage": {"completion_tokens": 1}}


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Start a sleeping process with a child that computes."""
    busy = "while True: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_table_lists_descendants(parent: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(procfs.below(parent.pid)) == 1)
    (child,) = procfs.below(parent.pid).values()
    assert child.parent == parent.pid
    everything = procfs.below(os.getpid())
    assert {parent.pid, child.pid} <= everything.keys()
    assert procfs.trees(everything, [parent.pid]) == {parent.pid: (parent.pid, child.pid)}
    assert procfs.trees(everything, [parent.pid, child.pid]) == {parent.pid: (parent.pid,), child.pid: (child.pid,)}
    assert procfs.entry(2**22 + 1) is None


def test_a_frozen_process_is_reported_as_a_stopped_one() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        sampler = vitals.Vitals()

        def state() -> str | None:
            return sampler.sample({process.pid: "raylet"}, {}).processes[0].state

        try:
            wait_until(lambda: state() == "S")
            try:
                frozen = groups.freeze(process.pid)
            except (OSError, RuntimeError) as error:
                pytest.skip(f"no control group can be made here: {error}")
            try:
                # A frozen process may be between two waits of the kernel when its state is read.
                wait_until(lambda: state() == "T")
                assert procfs.entry(process.pid).state in "SD"
            finally:
                frozen.end()
            wait_until(lambda: state() == "S")
        finally:
            process.kill()


def test_processor_time_of_a_compiler_below_counts_for_the_worker(parent: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(procfs.below(parent.pid)) == 1)
    sampler = vitals.Vitals()
    roles = {parent.pid: "worker", os.getpid(): "agent"}
    wait_until(lambda: sampler.sample(roles, {}).processes[0].state == "S")
    before = sampler.sample(roles, {1: 0.25})
    (process,) = before.processes
    assert (process.name, process.pid) == ("worker", parent.pid)
    assert before.silent == {1: 0.25}
    assert before.memory_available is not None
    assert before.shm_free is not None
    assert before.oom_kills is not None
    wait_until(lambda: sampler.sample(roles, {}).processes[0].cpu_seconds > process.cpu_seconds + 0.1)
    os.kill(parent.pid, signal.SIGSTOP)
    wait_until(lambda: sampler.sample(roles, {}).processes[0].state == "T")
    assert sampler.sample({2**22 + 1: "worker"}, {}).processes == (), "it has just ended"
    sampler.close()


PARTS = """\
import subprocess, sys
part = "import time\\nwhile time.process_time() < 0.3: pass"
while True: subprocess.run([sys.executable, "-S", "-c", part])
"""
"""A compiler whose parts are processes that live for a moment, as those of nvcc."""


def test_compilers_of_short_processes_are_life_at_any_time() -> None:
    """nvcc kept an engine on an H200 for 16 s in one step, and the engine was called hung (2026-11-29)."""
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PARTS!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        wait_until(lambda: len(procfs.below(process.pid)) == 2)
        sampler, viewer, policy = vitals.Vitals(gpus=False), Viewer(0), HealthPolicy()
        lives = []
        for _ in range(16):
            signals = sampler.sample({process.pid: "worker"}, {})
            (worker,) = viewer.view(signals, signals.time, None).processes
            lives.append(min(worker.share or 0.0, worker.below or 0.0) >= policy.life_share)
            time.sleep(vitals.SAMPLE_SECONDS)
        # Two samples without life in a row make an engine suspect.
        assert (False, False) not in pairwise(lives[1:]), lives
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_gpus_that_the_engine_does_not_use_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Used:
        def __init__(self, uuids: tuple[str, ...] | None) -> None:
            assert uuids == ("GPU-1",)

        def latest(self) -> tuple[tuple[GpuSignals, ...], float]:
            return (GpuSignals(index=0, power_watts=70.0),), 0.25

        def close(self) -> None:
            return

    monkeypatch.setattr(vitals, "GpuWatch", Used)
    for gpus, count in ((True, 1), (False, 0)):
        sampler = vitals.Vitals(gpus=gpus, uuids=("GPU-1",))
        assert len(sampler.sample({}, {}).gpus) == count
        sampler.close()


def test_a_ledger_outlives_its_name() -> None:
    pid = 2**22 + os.getpid()
    assert read_ledger(pid) is None
    writer = LedgerWriter(pid)
    for _ in range(3):
        writer.begin()
    reader = read_ledger(pid)
    assert reader is not None
    assert not Path(f"/dev/shm/dsv4-ledger.{pid}").exists()
    assert reader.count == 3
    writer.begin()
    assert reader.count == 4
    reader.close()


def test_a_link_in_place_of_a_ledger_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(files, "_SHARED_MEMORY", tmp_path)
    (tmp_path / "dsv4-ledger.7").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        LedgerWriter(7)
    assert victim.read_text() == "mine"


class Api:
    """The paths of vLLM that a `Prober` requests, with configurable responses."""

    def __init__(self) -> None:
        self.steps = 0
        self.pace = 0
        """Steps between two reads of the metrics."""
        self.looks = 0
        self.running = 0
        self.silent = False
        self.health = 200
        self.answer: dict[str, object] = GOOD
        self.status = 200
        self.canaries = 0
        self.base = ""

    async def metrics(self, _: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(600.0)
        self.looks += 1
        self.steps += self.pace
        text = (
            f"\nvllm:iteration_tokens_total_count{{}} {self.steps}.0\nvllm:num_requests_running{{}} {self.running}.0\n"
        )
        return web.Response(text=text + "vllm:num_requests_waiting 0.0\n")

    async def healthy(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def complete(self, _: web.Request) -> web.Response:
        self.canaries += 1
        if self.silent:
            await asyncio.sleep(600.0)
        self.steps += 1
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api()
    app = web.Application()
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get("/health", api.healthy)
    app.router.add_post("/v1/completions", api.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api
    await runner.cleanup()


@contextlib.asynccontextmanager
async def probing(api: Api, **changes: float) -> AsyncIterator[Prober]:
    prober = Prober(api.base, "nano", HealthPolicy(**changes))
    task = asyncio.create_task(prober.run())
    try:
        yield prober
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def seen(condition: object, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


async def test_an_idle_engine_gets_canaries_periodically(api: Api) -> None:
    async with probing(api, canary_min=0.5) as prober:
        begun = prober.stepped
        await seen(lambda: api.canaries >= 3)
        assert (prober.canary_wrong, prober.canary_said) == (0, "")
        await seen(lambda: prober.stepped > begun)  # canaries are steps too


async def test_an_engine_that_is_to_become_idle_gets_no_canary(api: Api) -> None:
    async with probing(api, canary_min=0.2) as prober:
        await seen(lambda: api.canaries >= 1)
        prober.quiet = True
        await seen(lambda: prober.canary_sent is None)
        count, looks = api.canaries, api.looks
        await seen(lambda: api.looks >= looks + 2)
        assert api.canaries == count


async def test_no_canary_is_sent_during_steps_and_one_follows_at_once_when_they_stop(api: Api) -> None:
    # Each read of the metrics adds steps, so every read sees some, however late it is on a busy machine.
    api.running, api.pace = 2, 7
    async with probing(api, canary_min=0.2) as prober:
        await seen(lambda: api.looks >= 4)
        assert api.canaries == 0
        assert prober.outstanding == 2
        assert prober.pace.slow is not None
        api.pace, looks = 0, api.looks
        await seen(lambda: api.canaries == 1)
        assert time.monotonic() - prober.stepped >= 1.0
        assert api.looks - looks <= 4


async def test_a_wrong_canary_is_repeated_and_a_right_one_resets_the_count(api: Api) -> None:
    api.answer = {**GOOD, "usage": {"completion_tokens": 7}}
    async with probing(api, canary_min=0.3) as prober:
        await seen(lambda: prober.canary_wrong >= 2)
        assert "completion_tokens" in prober.canary_said
        api.answer = GOOD
        await seen(lambda: prober.canary_wrong == 0)


async def test_refused_canaries_are_not_counted_as_wrong(api: Api) -> None:
    api.status = 503
    async with probing(api, canary_min=0.3) as prober:
        await seen(lambda: api.canaries >= 2)
        assert prober.canary_wrong == 0
        api.status, api.health = 500, 503
        count = api.canaries
        await seen(lambda: api.canaries > count and prober.errored)
        assert prober.canary_wrong == 0


async def test_silence_leaves_the_canary_in_flight_and_the_last_answer_old(api: Api) -> None:
    async with probing(api, canary_min=0.3) as prober:
        await seen(lambda: api.canaries >= 1)
        api.silent = True
        await seen(lambda: prober.canary_sent is not None and time.monotonic() - prober.canary_sent > 1.0)
        assert time.monotonic() - prober.answered > 0.9


WORKS = {
    "computes": "while True: pass",
    "sleeps": "import time; time.sleep(600)",
    "takes memory": "import time\nkept = []\nwhile True: kept.append(bytearray(1 << 21)); time.sleep(0.1)",
    "starts processes": "import subprocess, time\nwhile True: subprocess.run(['sleep', '0.3']); time.sleep(0.3)",
    "writes": "import os, sys, time\nfile = open(sys.argv[1], 'wb')\n"
    "while True: file.write(bytes(1 << 18)); file.flush(); os.fdatasync(file.fileno()); time.sleep(0.1)",
}


@pytest.mark.parametrize(
    ("work", "idle", "stagnant"),
    [
        ("computes", False, True),
        ("sleeps", True, True),
        ("takes memory", False, False),
        ("starts processes", False, False),
        ("writes", False, False),
    ],
)
def test_work_is_a_processor_a_disk_memory_or_a_process(tmp_path: Path, work: str, idle: bool, stagnant: bool) -> None:
    started = tmp_path / "started"
    script = f"open({str(started)!r}, 'w').close()\n{WORKS[work]}"
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "file")])
    try:
        wait_until(started.exists)
        time.sleep(0.5)
        sampler = vitals.Vitals(gpus=False)
        first = sampler.sample({process.pid: "api"}, {}).time

        def shown() -> bool:
            time.sleep(0.5)
            found = sampler.sample({process.pid: "api"}, {})
            assert found.idle is not None
            assert found.stagnant is not None
            return found.time - first >= 2.0 and (found.idle > 1.4, found.stagnant > 1.4) == (idle, stagnant)

        # A process that is kept from running for a while does nothing.
        wait_until(shown)
    finally:
        process.kill()
        process.wait()


def test_a_worker_of_ray_that_imports_is_work_of_the_start() -> None:
    code = "import os, sys; os.execv(sys.executable, [sys.argv[1], '-c', 'while True: pass'])"
    script = f"{sys.executable} -c {code!r} $0 & wait"
    for title, works in (("ray::IDLE", True), ("ray::DashboardAgent", False)):
        raylet = subprocess.Popen(["bash", "-c", script.replace("$0", title)], start_new_session=True)
        try:
            wait_until(lambda: any(procfs.command_of(pid)[:1] == [title] for pid in procfs.below(raylet.pid)))  # noqa: B023
            sampler = vitals.Vitals(gpus=False)
            samples = [sampler.sample({raylet.pid: "raylet"}, {})]
            for _ in range(3):
                time.sleep(0.5)
                samples.append(sampler.sample({raylet.pid: "raylet"}, {}))
            assert samples[-1].idle is not None
            assert (samples[-1].idle < 1.0) is works
        finally:
            os.killpg(raylet.pid, signal.SIGKILL)
            raylet.wait()
