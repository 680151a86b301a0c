from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from dsv4_runtime.agent import evidence
from dsv4_runtime.contract import Cause, Failure, GroupPlan, HealthPolicy
from dsv4_runtime.health import vitals
from dsv4_testkit.waiting import free_port, free_ports

MakePlan = Callable[..., GroupPlan]

FAILURE = Failure(
    time=1.0, cause=Cause.ENGINE_CORE_DIED, culprit_rank=0, message="gone", detected_by="process", generation=2
)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not let the evidence be incomplete because the machine is busy."""
    monkeypatch.setattr(evidence, "BOUND_SECONDS", 600.0)
    monkeypatch.setattr(evidence, "_WRITE_SECONDS", 300.0)


def _here(plan: GroupPlan, agent: int, dashboard: int, api: int) -> GroupPlan:
    """Return the plan with the loopback address for every member."""
    members = []
    for member in plan.members:
        ports = member.ports.model_copy(update={"agent": agent})
        if member.rank == 0:
            ports = ports.model_copy(update={"dashboard": dashboard, "api": api})
        members.append(member.model_copy(update={"address": "127.0.0.1", "ports": ports}))
    return plan.model_copy(update={"members": tuple(members)})


async def test_every_rank_ray_and_the_metrics_are_kept(make_plan: MakePlan, tmp_path: Path) -> None:
    async def rank(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return web.json_response({"firstFatal": {"ray": "boom"}})

    async def actors(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return web.json_response({"result": True, "data": {"result": {"result": [{"state": "DEAD"}]}}})

    async def placement_groups(_: web.Request) -> web.Response:
        return web.json_response({"result": True, "data": {"result": {"result": [{"state": "CREATED"}]}}})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="# HELP x\nvllm:num_requests_running 1.0\nvllm:e2e_bucket{le=1} 3\nprocess_x 1\n")

    app = web.Application()
    app.router.add_get("/v1/evidence", rank)
    app.router.add_get("/api/v0/actors", actors)
    app.router.add_get("/api/v0/placement_groups", placement_groups)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        place = await evidence.save(
            tmp_path,
            _here(make_plan(), port, port, port),
            FAILURE,
            {"memory": vitals.memory_usage()},
            "secret",
            [{"steps": 3}],
        )
    finally:
        await runner.cleanup()
    assert place is not None
    kept = json.loads((place / "evidence.json").read_text())
    assert kept["failure"]["cause"] == "EngineCoreDied"
    assert kept["ranks"]["1"] == {"firstFatal": {"ray": "boom"}}
    assert kept["ranks"]["0"]["memory"]["available"] > 0
    assert kept["ray"]["actors"] == [{"state": "DEAD"}]
    assert kept["ray"]["placementGroups"] == [{"state": "CREATED"}]
    assert "404" in kept["ray"]["nodes"]["error"]
    assert kept["metrics"] == ["vllm:num_requests_running 1.0"]
    assert kept["window"] == [{"steps": 3}]


async def test_evidence_is_saved_although_no_member_answers(make_plan: MakePlan, tmp_path: Path) -> None:
    place = await evidence.save(tmp_path, _here(make_plan(), *free_ports(3)), FAILURE, {}, "secret")
    assert place is not None
    kept = json.loads((place / "evidence.json").read_text())
    assert "error" in kept["ranks"]["1"]
    assert "error" in kept["metrics"]
    assert "incomplete" not in kept


async def test_nccl_reports_are_collected_on_gpus_only(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"status\n")
        writer.write(b"OK\nJob summary\n  Missing communicator data from 1 rank\n")
        writer.close()
        await writer.wait_closed()

    kept = {}
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        monkeypatch.setattr(evidence, "RAS_PORT", server.sockets[0].getsockname()[1])
        for gpus in (True, False):
            plan = _here(make_plan(health=HealthPolicy(gpus=gpus)), *free_ports(3))
            place = await evidence.save(tmp_path / str(gpus), plan, FAILURE, {}, "secret")
            assert place is not None
            kept[gpus] = json.loads((place / "evidence.json").read_text())
    assert kept[True]["nccl"] == ["Job summary", "  Missing communicator data from 1 rank"]
    assert "nccl" not in kept[False]


async def test_evidence_that_cannot_be_written_is_omitted(make_plan: MakePlan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ports = free_ports(3)
    assert await evidence.save(tmp_path / "file" / "below", _here(make_plan(), *ports), FAILURE, {}, "secret") is None


async def test_a_disk_that_does_not_answer_is_not_waited_for(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Opening a pipe without a reader for writing blocks, as does a file on an unreachable file server.
    monkeypatch.setattr(evidence, "BOUND_SECONDS", 2.5)
    monkeypatch.setattr(evidence, "_WRITE_SECONDS", 0.5)
    monkeypatch.setattr(evidence.time, "strftime", lambda *_: "now")
    plan = _here(make_plan(), *free_ports(3))
    place = tmp_path / f"{plan.incarnation}-g{FAILURE.generation}-now"
    place.mkdir()
    os.mkfifo(place / "evidence.json")
    begun = time.monotonic()
    assert await evidence.save(tmp_path, plan, FAILURE, {}, "secret") is None
    assert time.monotonic() - begun < 60
    os.close(os.open(place / "evidence.json", os.O_RDONLY | os.O_NONBLOCK))


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for number in range(evidence.KEEP + 3):
        (tmp_path / str(number)).mkdir()
        os.utime(tmp_path / str(number), (number, number))
    evidence.retain(tmp_path)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(range(3, evidence.KEEP + 3))


@pytest.mark.parametrize("ahead", [10.0 * 365 * 86400, 3600.0])
async def test_evidence_of_a_clock_that_was_ahead_makes_room(make_plan: MakePlan, tmp_path: Path, ahead: float) -> None:
    for number in range(evidence.KEEP):
        (tmp_path / f"old{number}").mkdir()
        os.utime(tmp_path / f"old{number}", (time.time() + ahead + number,) * 2)
    written = []
    for generation in range(1, 4):
        failure = FAILURE.model_copy(update={"generation": generation})
        place = await evidence.save(tmp_path, _here(make_plan(), *free_ports(3)), failure, {}, "secret")
        assert place is not None
        written.append(place)
        os.utime(place, (time.time() - 10 + generation,) * 2)
    assert all(place.exists() for place in written)
    assert len(list(tmp_path.iterdir())) == evidence.KEEP


@pytest.mark.parametrize("fault", ["mkdir", "dumps", "iterdir", "ranks", "recursion"])
async def test_no_fault_of_the_evidence_ends_the_agent(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise (PermissionError if fault in ("mkdir", "iterdir") else ValueError)(fault)

    own: dict[str, object] = {}
    match fault:
        case "mkdir" | "iterdir":
            monkeypatch.setattr(Path, fault, fail)
        case "dumps":
            monkeypatch.setattr(evidence.json, "dumps", fail)
        case "ranks":

            async def ranks(*_: object) -> None:
                fail()

            monkeypatch.setattr(evidence, "_ranks", ranks)
        case "recursion":
            own["own"] = own
    place = await evidence.save(tmp_path, _here(make_plan(), *free_ports(3)), FAILURE, own, "secret")
    assert (place is not None) is (fault in ("iterdir", "ranks"))
    if fault == "ranks":
        assert place is not None
        assert json.loads((place / "evidence.json").read_text())["incomplete"] == "ranks"
