"""Probes of other processes without a free file descriptor: no verdict about the other process.

The limit of this process is really lowered, so every case has the error that the real code gets.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsv4_operator.backends.hosts.members import _start_time
from dsv4_operator.backends.local import supervisor
from dsv4_operator.backends.local.supervisor import FROZEN_SECONDS, HUNG_SECONDS, Liveness
from dsv4_operator.backends.pods.observe import AgentWatch, Endpoint
from dsv4_runtime.agent import peers, ray
from dsv4_runtime.agent.cleanup import _used, port_free
from dsv4_runtime.agent.engine import _post
from dsv4_runtime.agent.monitor import Prober
from dsv4_runtime.agent.peers import Peers
from dsv4_runtime.agent.processes import Child
from dsv4_runtime.agent.standby import Standby, _runs
from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract import HealthPolicy
from dsv4_runtime.contract.status import Rail
from dsv4_runtime.engine.logs import WorkerLogs
from dsv4_runtime.fabric import probes
from dsv4_runtime.gateway import routing
from dsv4_runtime.gateway.http_client import UnreachableError, Upstream
from dsv4_runtime.util import procfs
from dsv4_runtime.util.files import own_shortage
from dsv4_testkit.descriptors import no_descriptors
from dsv4_testkit.waiting import until

# Port 9 is closed.
CLOSED = "http://127.0.0.1:9"


async def _connect() -> None:
    await asyncio.open_connection("127.0.0.1", 9)


async def _get() -> None:
    async with aiohttp.ClientSession() as session, session.get(CLOSED):
        pass


async def _named() -> None:
    async with aiohttp.ClientSession() as session, session.get("http://localhost:9"):
        pass


async def _status() -> None:
    client = AgentClient("t")
    try:
        await client.status(CLOSED)
    finally:
        await client.close()


async def _read() -> None:
    Path("/proc/self/stat").read_bytes()


@pytest.mark.parametrize("work", [_connect, _get, _named, _status])
async def test_a_lack_of_descriptors_differs_from_a_closed_port(work: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(AGENT_ERRORS) as refused:
        await work()
    assert own_shortage(refused.value) is None
    with no_descriptors():
        with pytest.raises(AGENT_ERRORS) as short:
            await work()
        found = own_shortage(short.value)
    assert found is not None
    assert found.errno == errno.EMFILE


@pytest.mark.parametrize(
    ("error", "short"),
    [
        # Of the resolution of a name; the numbers are those of libnss-mdns without a free descriptor.
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), True),
        (OSError(errno.EBUSY, "Device or resource busy"), True),
        (OSError(errno.EINVAL, "Invalid argument"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), False),
        (OSError(errno.EHOSTUNREACH, "No route to host"), False),
        (TimeoutError(), False),
        (ValueError(), False),
    ],
)
def test_an_error_without_a_cause_is_one_of_the_present_shortage(error: Exception, short: bool) -> None:
    assert own_shortage(error) is None
    with no_descriptors():
        found = own_shortage(error)
    assert (found is not None and found.errno == errno.EMFILE) is short


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNRESET, 0])
def test_the_cause_of_an_error_counts(number: int) -> None:
    wrapped = UnreachableError("y")
    wrapped.__cause__ = OSError(number, "x")
    found = own_shortage(wrapped)
    assert (found is wrapped.__cause__) is (number not in (errno.ECONNRESET, 0))
    assert own_shortage(None) is None
    assert own_shortage(TimeoutError()) is None


@pytest.mark.parametrize(
    "read", [procfs.entry, procfs.command_of, procfs.is_frozen, procfs.storage_bytes, procfs.below]
)
def test_a_process_that_cannot_be_read_has_not_ended(read: Callable[[int], object]) -> None:
    expected = type(read(os.getpid()))
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        read(os.getpid())
    assert type(read(os.getpid())) is expected
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        _start_time(os.getpid())
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert procfs.entry(ended.pid) is None
    assert _start_time(ended.pid) is None


async def test_a_standby_process_that_cannot_be_checked_is_kept(tmp_path: Path) -> None:
    program = 'exec -a "x dsv4_runtime.vllm_plugin.warm_pool" sleep 600'
    child = await Child.start(
        "standby", ["bash", "-c", program], {"PATH": os.environ["PATH"]}, tmp_path / "log", fed=True
    )
    try:
        standby: Any = object.__new__(Standby)
        with no_descriptors():
            assert await standby._is_usable(child)
            assert _runs(child.pid)
            assert await child.alive(), "as for the process that fetches weights"
        os.kill(child.pid, signal.SIGSTOP)
        await until(lambda: not _runs(child.pid))
        assert not await standby._is_usable(child)
    finally:
        await child.end(0.0)
    assert not await standby._is_usable(child)


def test_shared_memory_of_a_process_that_cannot_be_read_is_kept() -> None:
    _used()
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        _used()


def test_a_port_that_cannot_be_tested_is_no_obstacle(make_plan: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        head = make_plan().head
        ports = head.ports.model_copy(update={"api": taken.getsockname()[1]})
        head = head.model_copy(update={"address": "127.0.0.1", "ports": ports})
        assert not port_free(head)
        with no_descriptors():
            assert port_free(head)


async def test_a_call_that_cannot_be_made_is_no_missing_answer() -> None:
    assert await ray.grpc_call("127.0.0.1", 9, "/x/Y", "t", 5.0) is None
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        await ray.grpc_call("127.0.0.1", 9, "/x/Y", "t", 5.0)


async def test_vllm_that_cannot_be_asked_is_not_silent() -> None:
    prober = Prober(CLOSED, "nano", HealthPolicy())
    prober.answered = prober.stepped = begun = time.monotonic() - 100.0
    asking = asyncio.create_task(prober.run())
    try:
        await asyncio.sleep(1.5)
        assert prober.answered == prober.stepped == begun, "the port is closed"
        with no_descriptors():
            await until(lambda: prober.answered > begun + 50.0)
        assert prober.stepped == prober.answered
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_the_first_completion_waits_for_a_descriptor() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await _post(session, CLOSED, {})
        with no_descriptors():
            asking = asyncio.create_task(_post(session, CLOSED, {}))
            await asyncio.sleep(0.6)
            assert not asking.done()
        with pytest.raises(aiohttp.ClientConnectorError, match="Connect call failed"):
            await asking


@pytest.mark.parametrize("heartbeats", [False, True])
async def test_a_peer_that_cannot_be_asked_is_silent_only_without_its_heartbeats(
    make_plan: Any, heartbeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.2)
    mine = Peers(make_plan(), 0, "t")
    asked = time.monotonic()
    mine._peers[1] = peers.replace(mine._peers[1], heard=asked, accepting=asked)
    if heartbeats:
        await mine._heartbeats.open("127.0.0.1", 0)
    following = asyncio.create_task(mine._follow(1))
    try:
        with no_descriptors():
            await until(lambda: (mine._peers[1].error or "").count("Too many open files"))
            if heartbeats:
                # A pause of this process begins the silence again.
                await until(lambda: (mine.silence(1, time.monotonic()) or 0.0) >= 3.0)
            else:
                await asyncio.sleep(3.0)
            silence = mine.silence(1, time.monotonic())
            await mine._connect(1, ("127.0.0.1", 9))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        mine._heartbeats.close()
        await mine._client.close()
    assert silence is not None
    assert (silence >= 3.0) is heartbeats
    assert mine._peers[1].accepting == asked, "nothing was found out about its machine"


async def test_a_drain_that_cannot_be_asked_for_is_not_over() -> None:
    client = AgentClient("t")
    assert await client.drain(CLOSED, None, 5.0)
    with no_descriptors():
        assert not await client.drain(CLOSED, None, 5.0)
    await client.close()


async def test_the_operator_knows_that_it_could_not_ask() -> None:
    async def key() -> str:
        return "k"

    client = AgentClient()
    watch = AgentWatch(client, 3, key, lambda: None)
    endpoint = Endpoint("127.0.0.1", 9)
    watch.follow({0: endpoint, 1: endpoint})
    try:
        await asyncio.sleep(0.5)
        assert watch.shortage is None, "refused connections"
        with no_descriptors():
            await until(lambda: watch.shortage is not None)
        await until(lambda: watch.shortage is None)
    finally:
        await watch.close()
        await client.close()


async def test_logs_of_a_worker_that_cannot_be_searched_for_are_kept(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    (tmp_path / f"worker-x-{ended.pid}.out").write_text("line\n")
    logs = WorkerLogs(tmp_path)
    logs.read()
    with no_descriptors():
        logs.forget()
    assert len(logs._tails) == 1
    logs.forget()
    assert not logs._tails
    logs.close()


async def test_a_path_that_cannot_be_probed_has_no_defect() -> None:
    rail = Rail(address="127.0.0.1/8", interface="lo", mtu=65536, port=9)
    assert not await probes._stream(b"k", 0, rail, rail)
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        await probes._stream(b"k", 0, rail, rail)


async def test_a_request_to_the_engine_waits_for_a_descriptor() -> None:
    upstream = Upstream()
    with pytest.raises(UnreachableError):
        await upstream.connection(("127.0.0.1", 9))
    with socket.create_server(("127.0.0.1", 0)) as engine:
        with no_descriptors():
            asking = asyncio.create_task(upstream.connection(engine.getsockname()))
            await asyncio.sleep(0.5)
            assert not asking.done()
        (await asking).abort()
    upstream.close()


class _Engine:
    """The view of an engine, which is alive until it is marked."""

    def __init__(self) -> None:
        self.alive, self.doubted = True, 0

    def mark_unconfirmed(self) -> None:
        self.doubted += 1

    def mark_unreachable(self) -> None:
        self.alive = False


async def test_an_engine_that_cannot_be_asked_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_SILENCE_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(routing, "SILENCE_SECONDS", 0.5)
    group: Any = object.__new__(routing.RoutedGroup)
    group.index, group.api, group.engine, group.connected = 0, CLOSED, _Engine(), False
    group._agent, group._client = CLOSED, AgentClient()
    group._last_status = group._last_answer = time.monotonic()
    group._vllm = aiohttp.ClientSession()
    checking = asyncio.create_task(group._check_silence())
    try:
        with no_descriptors():
            await asyncio.sleep(1.5)
            assert group.engine.doubted == 0
            assert group.engine.alive
        await until(lambda: not group.engine.alive)
        assert group.engine.doubted
    finally:
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)
        await group._vllm.close()


def test_the_activity_of_a_process_is_unknown_without_a_descriptor() -> None:
    assert supervisor._activity(os.getpid()) is not None
    with no_descriptors():
        assert supervisor._activity(os.getpid()) is None
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert supervisor._activity(ended.pid) == ("", 0)


@pytest.mark.parametrize("seed", range(50))
def test_a_process_is_replaced_only_for_silence_that_was_observed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random schedule of probes. Times between two probes of which one was impossible are no silence."""
    rng = random.Random(seed)
    clock, activity = 100.0, ("S", 5)
    monkeypatch.setattr(supervisor, "_activity", lambda pid: activity)
    # There is no process of that number.
    liveness = Liveness(2**22 + 1, clock)
    liveness.respond(clock)
    silent = idle = clock
    """Begin of the observed silence, and of that without processor time."""
    for _ in range(400):
        clock += 0.5
        activity = rng.choice([activity, ("S", 5), ("S", rng.randrange(1000)), None]) if seed % 2 else ("S", 5)
        what = rng.choices(["silent", "answers", "impossible"], [0.94, 0.02, 0.04 if seed % 3 else 0.0])[0]
        if what == "answers":
            liveness.respond(clock)
            silent = idle = clock
        elif what == "impossible":
            liveness.excuse(clock)
            silent = idle = clock
        if liveness.hangs(clock):
            assert clock - silent >= FROZEN_SECONDS
            break
        if seed % 2 == 0:
            assert clock - idle < FROZEN_SECONDS, "without processor time it is replaced at once"
        assert clock - silent < HUNG_SECONDS


def test_a_process_of_unknown_activity_has_the_time_of_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = begun = 100.0
    monkeypatch.setattr(supervisor, "_activity", lambda pid: None)
    liveness = Liveness(2**22 + 1, clock)
    liveness.respond(clock)
    while not liveness.hangs(clock):
        clock += 0.5
    assert clock - begun == HUNG_SECONDS
