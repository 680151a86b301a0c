"""Real processes: all processes below the agent end with it, at any depth."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dsv4_runtime.agent import processes
from dsv4_runtime.agent.decide.death import describe_exit
from dsv4_runtime.agent.processes import (
    Child,
    ProcessWatch,
    descendants,
    find_roles,
    reap_orphans,
    role_of,
    waited_for,
)
from dsv4_testkit.waiting import until

# Starts a grandchild in its own session, orphans it, and ignores SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"], start_new_session=True)
print("up", flush=True)
time.sleep(300)
"""

# Minimal agent: starts a process that orphans a descendant, then ends all of them.
AGENT = """
import asyncio, subprocess, sys, time
from pathlib import Path
from dsv4_runtime.agent.processes import Child, end_everything
from dsv4_runtime.util.procfs import become_reaper
async def main():
    become_reaper()
    command = ["sh", "-c", "setsid sleep 300 & echo $! && exit 0"]
    child = await Child.start("x", command, {"PATH": "/usr/bin:/bin"}, Path(sys.argv[1]))
    await child.wait()
    assert await end_everything(time.monotonic() + 60)
asyncio.run(main())
"""

# The first thread exits and another one keeps a port open. Linux shows the process as a zombie that cannot be reaped.
HEADLESS = """
import ctypes, socket, threading, time
port = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=time.sleep, args=(300,)).start()
print("up", flush=True)
ctypes.pythonapi.PyThread_exit_thread()
"""


async def test_a_stubborn_tree_ends_within_its_grace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await Child.start("x", [sys.executable, "-c", STUBBORN], {"PATH": "/usr/bin:/bin"}, log)
    await until(lambda: log.read_text() == "up\n")
    tree = child.tree()
    assert len(tree) == 2
    begun = time.monotonic()
    await child.end(grace=0.3)
    assert time.monotonic() - begun < 60
    assert not child.running
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert alive == []


async def test_exit_codes_are_left_to_waiting_callers() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
    with waited_for(process.pid):
        # asyncio waits in its own thread, which may be the first to reap the process.
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                reap_orphans(frozenset())
        reap_orphans(frozenset())
        assert await process.wait() == 7


async def test_a_process_that_survives_its_kill_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_KILL_SECONDS", 0.2)
    child = await Child.start("x", ["sleep", "300"], {"PATH": "/usr/bin:/bin"}, tmp_path / "log")
    monkeypatch.setattr(processes, "kill", lambda _: None)  # like a process that waits for a device
    await asyncio.wait_for(child.end(grace=0.0), 60)
    assert child.running
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL


async def test_a_process_without_its_first_thread_still_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await Child.start("x", [sys.executable, "-c", HEADLESS], {"PATH": "/usr/bin:/bin"}, log)
    try:
        await until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert log.read_text() == "up\n"
        assert child.running
        assert child.pid in [process.pid for process in descendants()]
    finally:
        await child.end(grace=0)
    assert child.pid not in [process.pid for process in descendants()]


def test_orphans_end_with_the_agent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", AGENT, str(log)], check=True, timeout=120)
    orphan = int(log.read_text())
    assert not psutil.pid_exists(orphan)


async def test_a_death_is_reported_without_polling() -> None:
    ended: list[tuple[str, int]] = []
    watch = ProcessWatch(lambda role, pid: ended.append((role, pid)))
    # process title of vLLM's engine
    process = subprocess.Popen(["bash", "-c", "exec -a VLLM::EngineCore sleep 600"])
    try:
        await until(lambda: watch.refresh() or watch.roles)
        assert watch.roles == {process.pid: "engine-core"}
        process.kill()
        await until(lambda: ended)
        assert ended == [("engine-core", process.pid)]
        assert watch.roles == {}
    finally:
        watch.close()
        process.kill()
        process.wait()


async def test_a_process_of_ray_that_ended_before_it_was_seen_is_reported_once(tmp_path: Path) -> None:
    """`ray start` does not wait for its raylet while it starts."""
    ended: list[tuple[str, int]] = []
    watch = ProcessWatch(lambda role, pid: ended.append((role, pid)))
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/true")
    process = subprocess.Popen([raylet])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        watch.refresh()
        watch.refresh()
        assert ended == [("raylet", process.pid)]
        process.wait()
        watch.refresh()
        assert ended == [("raylet", process.pid)]
    finally:
        watch.close()
        process.wait()


FORKS = """
import os, time
open("/proc/self/comm", "w").write("raylet")
child = os.fork()
if not child:
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print("forked", flush=True)
time.sleep(600)
"""


async def test_a_process_that_a_raylet_forked_is_no_raylet(tmp_path: Path) -> None:
    ended: list[tuple[str, int]] = []
    watch = ProcessWatch(lambda role, pid: ended.append((role, pid)))
    raylet = tmp_path / "raylet"
    raylet.symlink_to(sys.executable)
    process = subprocess.Popen([raylet, "-c", FORKS], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline() == b"forked\n"
        watch.refresh()
        watch.refresh()
        assert watch.roles == {process.pid: "raylet"}
        assert ended == []
    finally:
        watch.close()
        process.kill()
        process.wait()


async def test_a_process_that_was_given_the_id_of_an_ended_one_is_not_killed() -> None:
    watch = ProcessWatch(lambda role, pid: None)
    title = ["bash", "-c", "exec -a VLLM::EngineCore sleep 600"]
    processes = [subprocess.Popen(title) for _ in range(2)]
    old, other = processes
    try:
        await until(lambda: watch.refresh() or len(watch.roles) == 2)
        role, descriptor = watch._watched.pop(other.pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        # The event loop has not run since the old process ended, and the other one has its process ID by now.
        watch._watched[other.pid] = watch._watched.pop(old.pid)
        old.kill()
        old.wait()
        watch.kill({role})
        with pytest.raises(subprocess.TimeoutExpired):  # a killed process needs a moment to exit
            other.wait(0.5)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        watch._watched[old.pid] = watch._watched.pop(other.pid)
        watch.close()


async def test_a_child_runs_without_a_log_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    child = await Child.start("x", ["true"], {}, tmp_path / "file" / "x.log")
    assert await child.wait() == 0


async def test_a_child_that_still_bears_its_parents_title_is_not_watched() -> None:
    script = "import subprocess; subprocess.run(['bash', '-c', 'exec -a VLLM::EngineCore sleep 600'])"
    process = subprocess.Popen(["bash", "-c", f'exec -a VLLM::EngineCore {sys.executable} -c "{script}"'])
    try:
        title = ["VLLM::EngineCore", "600"]
        await until(lambda: [one.cmdline() for one in psutil.Process(process.pid).children()] == [title])
        assert find_roles() == {process.pid: "engine-core"}
    finally:
        tree = psutil.Process(process.pid).children()
        for one in [*tree, process]:
            one.kill()
        process.wait()


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["VLLM::EngineCore"], "engine-core"),
        (["ray::RayWorkerProc.run"], "worker"),
        (["/x/ray/core/src/ray/raylet/raylet", "--raylet_socket_name=a"], "raylet"),
        (["/x/gcs_server"], "gcs"),
        (["ray::IDLE"], None),
        (["python", "raylet"], None),
        ([], None),
    ],
)
def test_roles(command: list[str], role: str | None) -> None:
    assert role_of(command) == role


def test_exit_codes_for_people() -> None:
    assert [describe_exit(code) for code in (0, 3, -9)] == ["exit code 0", "exit code 3", "killed by SIGKILL"]


async def test_the_process_that_got_the_id_of_an_ended_child_is_left_alone(tmp_path: Path) -> None:
    child = await Child.start("x", ["true"], {"PATH": os.environ["PATH"]}, tmp_path / "log")
    assert await child.wait() == 0
    with subprocess.Popen(["sleep", "600"]) as other:
        # The kernel gives ids again.
        child._process.pid = other.pid
        assert child.tree() == []
        await child.end(0.0)
        assert other.poll() is None
        other.kill()


async def test_processes_are_watched_once_there_are_descriptors_again(caplog: pytest.LogCaptureFixture) -> None:
    watch = ProcessWatch(lambda role, pid: None)
    process = subprocess.Popen(["bash", "-c", "exec -a VLLM::EngineCore sleep 600"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        await until(lambda: role_of(psutil.Process(process.pid).cmdline()) == "engine-core")
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            watch.refresh()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert process.pid not in watch.roles
        assert "tried again" in caplog.text
        watch.refresh()
        assert watch.roles[process.pid] == "engine-core"
    finally:
        watch.close()
        process.kill()
        process.wait()
