"""Members whose Ray node has exited or is stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_runtime.agent import ray
from dsv4_runtime.agent.decide.actions import RecordFailure
from dsv4_runtime.agent.decide.events import Done, ProcessEnded, RayLost, Staged, Started, Task
from dsv4_runtime.contract import Cause, Phase, ProcessSignals, Signals
from dsv4_runtime.health.vitals import ExitCauses
from dsv4_testkit.waiting import suspend

MakeReplay = Callable[..., Any]
CORE = ProcessEnded("engine-core")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["joining", "serving"])
def test_without_its_ray_node_a_member_fails_at_any_time(fresh: MakeReplay, rank: int, when: str) -> None:
    replay = fresh(rank)
    if when == "serving":
        replay.serve()
    else:
        for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged()):
            replay.feed(event)
    replay.feed(RayLost(Cause.RAYLET_DIED, "the raylet ended", "process"))
    assert replay.failure == (Cause.RAYLET_DIED, rank, "the raylet ended")
    assert replay.phases[-1] is Phase.FAILED


def ray_is(replay: Any, at: float, **states: str) -> None:
    """Feed a sample of this member's Ray processes, by name and state."""
    processes = tuple(ProcessSignals(name=name, pid=1, state=state, cpu_seconds=0.0) for name, state in states.items())
    replay.pass_to(at)
    replay.feed(dataclasses.replace(replay.state.view, signals=Signals(time=at, processes=processes)))


@pytest.mark.parametrize(
    ("rank", "name", "cause"),
    [(0, "raylet", Cause.RAYLET_HUNG), (1, "raylet", Cause.RAYLET_HUNG), (0, "gcs", Cause.RAY_HEAD_HUNG)],
)
def test_a_stopped_process_of_ray_is_a_lost_ray_node(serving: MakeReplay, rank: int, name: str, cause: Cause) -> None:
    replay = serving(rank)
    begun = replay.clock
    for tenths in range(0, 20, 5):
        ray_is(replay, begun + tenths / 10, **{name: "T"})
    assert replay.all(RecordFailure) == []
    ray_is(replay, begun + 2.0, **{name: "T"})
    assert replay.failure == (cause, rank, f"the {name} process of rank {rank} is stopped or frozen since 2.0 s")
    assert replay.phases[-1] is Phase.FAILED


def test_a_ray_node_that_is_busy_or_goes_on_is_not_lost(serving: MakeReplay) -> None:
    replay = serving()
    begun = replay.clock
    for second, state in enumerate("TTRTTSDDDDDDDDDD"):
        ray_is(replay, begun + second * 0.9, raylet=state)
    assert replay.all(RecordFailure) == []


def test_an_agent_that_was_stopped_together_with_ray_waits_for_it_to_go_on(serving: MakeReplay) -> None:
    replay = serving()
    begun = replay.clock
    ray_is(replay, begun, raylet="T")
    replay.awake = begun + 30.0
    ray_is(replay, begun + 30.1, raylet="T")
    ray_is(replay, begun + 31.9, raylet="T")
    assert replay.all(RecordFailure) == []
    ray_is(replay, begun + 32.0, raylet="T")
    assert replay.failure[0] is Cause.RAYLET_HUNG


def gcs_answers(replay: Any, at: float, answered: float) -> None:
    """Feed a view in which every member responds and the GCS last responded at `answered`."""
    replay.pass_to(at)
    replay.answer()
    replay.feed(dataclasses.replace(replay.state.view, gcs_answered=answered))


def test_a_gcs_that_does_not_answer_is_lost_in_any_process_state(serving: MakeReplay) -> None:
    replay = serving()
    begun = replay.clock
    gcs_answers(replay, begun + 3.9, begun)
    assert replay.all(RecordFailure) == []
    gcs_answers(replay, begun + 4.0, begun)
    cause, culprit, message = replay.failure
    assert (cause, culprit) == (Cause.RAY_HEAD_HUNG, 0)
    assert "has not answered for 4.0 s" in message
    assert replay.phases[-1] is Phase.FAILED


def test_a_start_that_waits_for_ray_names_the_gcs(fresh: MakeReplay) -> None:
    replay = fresh(1)
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged()):
        replay.feed(event)
    replay.pass_to(replay.clock + 31)
    cause, _, message = replay.failure
    assert (cause, message) == (Cause.FORMATION_TIMEOUT, "Ray's GCS on rank 0 did not answer rank 1 within 30 s")
    replay = fresh()
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged(), Done(Task.JOIN)):
        replay.feed(event)
    begun = replay.clock
    gcs_answers(replay, begun + 4.0, begun)
    assert replay.failure[0] is Cause.RAY_HEAD_HUNG


@pytest.mark.parametrize("silent", [0.0, 8.0])
def test_another_member_does_not_report_the_gcs(serving: MakeReplay, silent: float) -> None:
    """After a lost link, heartbeats of rank 0 arrive before the next response of the GCS."""
    replay = serving(1)
    begun = replay.clock
    if silent:
        replay.silent = {0}
        replay.pass_to(begun + silent)
        replay.silent = set()
    gcs_answers(replay, begun + 9.5, begun)
    assert replay.all(RecordFailure) == []


def test_an_agent_that_was_stopped_does_not_report_the_gcs(serving: MakeReplay) -> None:
    replay = serving()
    begun = replay.clock
    replay.awake = begun + 30.0
    gcs_answers(replay, begun + 31.0, begun)
    assert replay.all(RecordFailure) == []


class Served(asyncio.Protocol):
    """First response of Ray's GCS: settings, then headers on stream 1."""

    def __init__(self, frames: bytes) -> None:
        self._frames = frames

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._frames)


SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
PING = b"\0\0\x08\x06\0\0\0\0\0" + b"x" * 8
OTHER = b"\0\0\x01\x01\x04\0\0\0\x03x"
ANSWER = b"\0\0\x01\x01\x04\0\0\0\x01x"


@pytest.mark.parametrize(
    ("frames", "answers"),
    [
        (b"", False),
        (SETTINGS + PING, False),
        (SETTINGS + OTHER, False),
        (SETTINGS + PING + ANSWER, True),
        (b"HTTP/1.1 400", False),
    ],
)
async def test_only_an_answer_to_the_call_counts(frames: bytes, answers: bool) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Served(frames), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(60):
        assert await ray.grpc_answers("127.0.0.1", port, "/x/Y", "token", 60.0 if answers else 0.3) is answers
    server.close()
    assert await ray.grpc_answers("127.0.0.1", port, "/x/Y", "token", 0.3) is False


async def test_a_real_grpc_server_answers_until_it_is_stopped() -> None:
    code = (
        "import grpc, concurrent.futures as f, time\n"
        "class H(grpc.GenericRpcHandler):\n"
        "    def service(self, details):\n"
        "        if dict(details.invocation_metadata).get('authorization') == 'Bearer ' + 'x' * 200:\n"
        "            return grpc.unary_unary_rpc_method_handler(lambda request, context: b'')\n"
        "server = grpc.server(f.ThreadPoolExecutor(1), handlers=[H()])\n"
        "print(server.add_insecure_port('127.0.0.1:0'), flush=True)\n"
        "server.start()\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert await ray.grpc_answers("127.0.0.1", port, "/x/Y", "x" * 200, 60.0)
        suspend(process.pid)
        assert not await ray.grpc_answers("127.0.0.1", port, "/x/Y", "x" * 200, 0.5)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("log", "origin"),
    [
        (
            "The raylet exited immediately because one Ray agent failed, agent_name = runtime_env_agent.\n",
            "runtime env agent",
        ),
        ("because one Ray agent failed, agent_name = dashboard_agent/424238335.\n", "dashboard agent"),
        ("(raylet) main.cc: Raylet exits\n", None),
        (None, None),
    ],
)
def test_the_end_of_a_raylet_has_its_origin(tmp_path: Path, log: str | None, origin: str | None) -> None:
    if log is not None:
        (tmp_path / "raylet.out").write_text(log)
    causes = ExitCauses(tmp_path)
    assert causes.raylet_origin() == origin
    causes.close()
