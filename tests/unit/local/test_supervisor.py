"""The supervisor with real processes; the loop is a script that starts one child and keeps a socket and a status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dsv4_operator.backends.local import supervisor
from dsv4_operator.backends.local.supervisor import (
    FROZEN_SECONDS,
    LoopReport,
    read_kept_status,
    read_report,
)
from dsv4_testkit.supervised import Supervised, frozen
from dsv4_testkit.waiting import suspend, wait_until

# Only a bound: a busy machine may take long.
SECONDS = 60.0

SUPERVISOR = """\
import sys
from dsv4_operator.backends.local.supervisor import Supervisor
sys.exit(Supervisor().run([sys.executable, *sys.argv[1:]]))
"""

LOOP = """\
import asyncio, json, os, signal, socket, subprocess, sys
from pathlib import Path
from dsv4_operator.backends.local.supervisor import STATUS, Processes

directory, mode, option = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if mode == "fails":
    sys.exit(7)
processes = Processes(socket.socket(fileno=int(option.partition("=")[2])))
before = processes.kept_text(STATUS)
if mode == "fails later" and before is not None:
    sys.exit(2)
if before is None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        processes.keep("api", listener.fileno())


async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    processes.listen()
    if processes.ending:
        stop.set()
    tree = directory / "tree.py"
    command = [sys.executable, str(tree), str(directory), mode] if tree.exists() else ["sleep", "600"]
    child = processes.children.get("child") or await processes.start(
        "child", command, log=directory / "log", death=signal.SIGKILL, files=["api"], unset=["HIDDEN"]
    )
    lives = json.loads(before)["lives"] + 1 if before else 1
    port = processes.socket("api").getsockname()[1]
    helper = subprocess.Popen(["sleep", "60"])
    seen = {"lives": lives, "loop": os.getpid(), "child": child.pid, "port": port, "code": child.code}
    seen["helper"] = helper.pid
    processes.keep_text(STATUS, json.dumps(seen))
    watching = asyncio.create_task(child.wait())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
    processes.keep_text(STATUS, json.dumps({**seen, "code": child.code}))
    await stop.wait()
    helper.kill()
    await processes.close()


asyncio.run(main())
"""


# A process with random ones below it, as an agent with Ray and vLLM: some ignore SIGTERM, are stopped, have a session
# of their own, have lost their parent, or collect the orphans below them. Each that goes on has a file.
TREE = """\
import os, random, signal, sys
from pathlib import Path
from dsv4_runtime.util.procfs import become_reaper

directory, source = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
become_reaper()
read, write = os.pipe()


def grow(depth):
    seeds = [source.random() for _ in range(source.randrange(1, 4) if depth else 0)]
    for seed in seeds:
        if os.fork() == 0:
            source.seed(seed)
            if source.random() < 0.4:
                os.setsid()
            if source.random() < 0.2:
                become_reaper()
            if source.random() < 0.4:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ends, stops = source.random() < 0.3, source.random() < 0.2
            grow(depth - 1)
            if ends:
                os._exit(0)
            (directory / "tree" / str(os.getpid())).touch()
            os.close(write)
            if stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                signal.pause()


grow(3)
os.close(write)
os.read(read, 1)
(directory / "grown").touch()
signal.pause()
"""


class World:
    def __init__(self, directory: Path, mode: str = "fine") -> None:
        script = directory / "loop.py"
        script.write_text(LOOP)
        command = [sys.executable, "-c", SUPERVISOR, str(script), str(directory), mode]
        self.process = subprocess.Popen(command, env={**os.environ, "HIDDEN": "1"})

    @property
    def status(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(read_kept_status(self.process.pid) or "{}")
        return found

    @property
    def report(self) -> LoopReport:
        found = read_report(self.process.pid)
        assert found is not None
        return found

    def until(self, true: Callable[[], bool], seconds: float = SECONDS) -> float:
        """Wait until it is true; return the seconds."""
        begun = time.monotonic()
        while not true():
            assert time.monotonic() - begun < seconds, (self.status, read_report(self.process.pid))
            time.sleep(0.02)
        return time.monotonic() - begun

    def life(self, number: int) -> dict[str, int]:
        self.until(lambda: self.status.get("lives") == number)
        return self.status


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.process.kill()
    found.process.wait(60)


def test_the_next_loop_adopts_processes_of_the_killed_one(world: World) -> None:
    first = world.life(1)
    assert "HIDDEN" not in psutil.Process(first["child"]).environ()
    for number in (2, 3):
        os.kill(world.status["loop"], signal.SIGKILL)
        found = world.life(number)
        assert (found["child"], found["port"]) == (first["child"], first["port"])
        assert found["loop"] not in (first["loop"], None)
        assert world.report.restarts[-1][1] == "was killed by signal 9"
        assert (world.report.count, world.report.loop) == (number - 1, found["loop"])
    assert psutil.Process(first["child"]).status() == psutil.STATUS_SLEEPING


def test_the_exit_of_a_child_without_a_loop_reaches_the_next_loop(world: World) -> None:
    first = world.life(1)
    os.kill(first["loop"], signal.SIGKILL)
    os.kill(first["child"], signal.SIGTERM)
    world.life(2)
    world.until(lambda: world.status.get("code") == -signal.SIGTERM)


def test_a_stopped_loop_is_continued_and_a_frozen_one_is_replaced(world: World) -> None:
    first = world.life(1)
    loop = first["loop"]
    os.kill(loop, signal.SIGSTOP)
    stopped = time.time()
    world.until(lambda: (world.report.beat or 0.0) > stopped + 1.0)
    assert (world.report.loop, world.report.count) == (loop, 0)

    with frozen(loop):
        # The supervisor does not wait for SIGKILL either, and the child survives.
        world.until(lambda: world.report.count == 1)
        assert world.life(2)["child"] == first["child"]
    assert world.report.restarts[-1][1].startswith("did not respond for ")
    assert world.life(2)["loop"] != loop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_supervisor_ends_with_its_loop_on_a_signal(world: World, number: signal.Signals) -> None:
    child = world.life(1)["child"]
    world.process.send_signal(number)
    assert world.process.wait(SECONDS) == 0
    world.until(lambda: not psutil.pid_exists(child))


def test_the_supervisor_ends_although_its_loop_is_killed_during_the_end(world: World) -> None:
    loop = world.life(1)["loop"]
    os.kill(loop, signal.SIGSTOP)
    world.process.send_signal(signal.SIGTERM)
    os.kill(loop, signal.SIGKILL)
    assert world.process.wait(SECONDS) == 0


def test_everything_ends_with_a_killed_supervisor(world: World) -> None:
    found = world.life(1)
    world.process.kill()
    world.process.wait(60)
    for pid in (found["loop"], found["child"]):
        world.until(lambda pid=pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert read_report(world.process.pid) is None


def test_a_lack_of_descriptors_ends_nothing(world: World) -> None:
    first = world.life(1)
    supervisor = psutil.Process(world.process.pid)
    limits = supervisor.rlimit(psutil.RLIMIT_NOFILE)
    supervisor.rlimit(psutil.RLIMIT_NOFILE, (supervisor.num_fds(), limits[1]))
    os.kill(first["loop"], signal.SIGKILL)
    world.until(lambda: world.report.count >= 2)
    assert psutil.pid_exists(first["child"])
    supervisor.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert world.life(2)["child"] == first["child"]


def test_a_kept_text_can_be_read_while_it_is_replaced(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, publish = supervised.again(), supervisor.Supervisor._publish
    processes.keep_text(supervisor.STATUS, "one")
    wait_until(lambda: read_kept_status(os.getpid()) == "one")

    def late(self: supervisor.Supervisor) -> None:
        time.sleep(0.3)
        publish(self)
        time.sleep(0.3)

    monkeypatch.setattr(supervisor.Supervisor, "_publish", late)
    processes.keep_text(supervisor.STATUS, "two")
    read: list[str | None] = []
    wait_until(lambda: read.append(read_kept_status(os.getpid())) or read[-1] == "two")  # type: ignore[func-returns-value]
    assert set(read) == {"one", "two"}


def test_a_first_start_that_fails_is_not_repeated_and_a_later_one_is(tmp_path: Path) -> None:
    assert World(tmp_path, "fails").process.wait(SECONDS) == 7
    world = World(tmp_path, "fails later")
    try:
        found = world.life(1)
        os.kill(found["loop"], signal.SIGKILL)
        world.until(lambda: world.report.count >= 3)
        assert world.report.restarts[-1][1] == "ended with exit code 2"
        assert psutil.pid_exists(found["child"])
        # No loop is left that could end the child.
        world.process.send_signal(signal.SIGTERM)
        assert world.process.wait(SECONDS) == 2
        world.until(lambda: not psutil.pid_exists(found["child"]))
    finally:
        world.process.kill()
        world.process.wait(60)


@pytest.mark.parametrize(
    ("seconds_per_second", "replaced"),
    [
        pytest.param(0.0, 60.0, id="without processor time"),
        pytest.param(0.02, None, id="on a busy machine"),
        pytest.param(1.0, 60.0, id="without end"),
    ],
)
def test_a_start_may_use_a_minute_of_processor_time(
    monkeypatch: pytest.MonkeyPatch, seconds_per_second: float, replaced: float | None
) -> None:
    clock = 0.0
    ticks = os.sysconf("SC_CLK_TCK") * seconds_per_second
    monkeypatch.setattr(supervisor, "_activity", lambda pid: ("S", 1000 + int(clock * ticks)))
    liveness = supervisor.Liveness(1, clock)
    while clock < 600.0:
        clock += 0.25
        if liveness.hangs(clock):
            break
    assert clock == (600.0 if replaced is None else replaced)
    # After its first response the loop has less time, and so has a process that was adopted long after its start.
    responded = supervisor.Liveness(1, clock)
    responded.respond(clock)
    for liveness in (responded, supervisor.Liveness(1, clock, starts=False)):
        liveness.excuse(begun := clock)
        while not liveness.hangs(clock):
            clock += 0.25
        assert clock - begun == (supervisor.HUNG_SECONDS if seconds_per_second else FROZEN_SECONDS)


@pytest.mark.parametrize(
    ("command", "log", "reason"),
    [
        (["/nothing/here"], "log", "No such file"),
        (["true"], "no/folder/log", "No such file"),
        # Rejected by `subprocess` itself, and not by the kernel.
        (["true", "a\0b"], "log", "null byte"),
    ],
)
async def test_a_start_that_fails_is_answered(command: list[str], log: str, reason: str, tmp_path: Path) -> None:
    supervised = Supervised()
    processes = supervised.again()
    try:
        processes.listen()
        async with asyncio.timeout(60):
            with pytest.raises(OSError, match=reason):
                await processes.start("child", command, log=tmp_path / log, death=signal.SIGKILL)
    finally:
        await processes.close()
        supervised.close()


@pytest.fixture
def grown(tmp_path: Path) -> Iterator[Callable[[int], tuple[World, list[psutil.Process]]]]:
    """Return a function that starts a supervisor whose child has random processes below it, and returns them."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree.py").write_text(TREE)
    worlds: list[World] = []
    below: list[psutil.Process] = []

    def grow(seed: int) -> tuple[World, list[psutil.Process]]:
        worlds.append(World(tmp_path, str(seed)))
        worlds[0].until((tmp_path / "grown").exists)
        below.extend(psutil.Process(int(file.name)) for file in (tmp_path / "tree").iterdir())
        return worlds[0], below

    yield grow
    for world in worlds:
        world.process.kill()
        world.process.wait(60)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("loop", [False, True], ids=["child", "child and loop"])
def test_an_end_is_reported_once_no_process_of_the_child_is_left(
    seed: int, loop: bool, grown: Callable[[int], tuple[World, list[psutil.Process]]]
) -> None:
    """An agent that is killed without namespaces left Ray's processes and an engine with its memory."""
    world, below = grown(seed)
    assert below
    first = world.life(1)
    os.kill(first["child"], signal.SIGKILL)
    if loop:
        os.kill(first["loop"], signal.SIGKILL)
        world.life(2)
    world.until(lambda: world.status.get("code") == -signal.SIGKILL)
    assert [process for process in below if process.is_running()] == []


def test_a_process_that_cannot_end_delays_the_end_of_its_child(
    grown: Callable[[int], tuple[World, list[psutil.Process]]],
) -> None:
    world, below = grown(1)
    first = world.life(1)
    with frozen(first["loop"]):
        with frozen(below[0].pid):
            os.kill(first["child"], signal.SIGKILL)
            psutil.wait_procs(below[1:], timeout=SECONDS)
            assert psutil.pid_exists(below[0].pid)
            # The next loop gets no earlier report either.
            assert world.life(2)["code"] is None
        # The replaced loop, which cannot end either, is not the child's.
        world.until(lambda: world.status.get("code") == -signal.SIGKILL)


def test_an_orphan_of_the_loop_delays_no_end_of_a_child(world: World) -> None:
    first = world.life(1)
    with frozen(first["helper"]):
        os.kill(first["loop"], signal.SIGKILL)
        world.life(2)
        os.kill(first["child"], signal.SIGKILL)
        world.until(lambda: world.status.get("code") == -signal.SIGKILL)
    world.until(lambda: not psutil.pid_exists(first["helper"]))


# A process below another one has shared memory, as the parts of an engine have, and Python's tracker of it.
MEMORY = """\
import os, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from dsv4_runtime.util.procfs import become_reaper

if len(sys.argv) == 3:
    become_reaper()
    subprocess.run([sys.executable, *sys.argv, "holder"])
memory = shared_memory.SharedMemory(create=True, size=8192)
file = Path(sys.argv[1], "memory")
file.with_suffix(".new").write_text(f"{memory.name} {os.getpid()} {resource_tracker._resource_tracker._pid}")
file.with_suffix(".new").rename(file)
time.sleep(600)
"""


def test_the_shared_memory_of_killed_processes_is_removed(tmp_path: Path) -> None:
    """Python's tracker removes it after their end, unless it is killed with them."""
    (tmp_path / "tree.py").write_text(MEMORY)
    world = World(tmp_path)
    try:
        first = world.life(1)
        world.until((tmp_path / "memory").exists)
        name, holder, tracker = (tmp_path / "memory").read_text().split()
        memory = Path("/dev/shm", name)
        assert memory.exists()
        suspend(int(tracker))
        os.kill(first["child"], signal.SIGKILL)
        world.until(lambda: not psutil.pid_exists(int(holder)))
        time.sleep(0.1)
        os.kill(int(tracker), signal.SIGCONT)
        world.until(lambda: world.status.get("code") == -signal.SIGKILL)
        assert not memory.exists()
    finally:
        world.process.kill()
        world.process.wait(60)
