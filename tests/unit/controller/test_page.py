"""The operator's status page: entries made from objects, keys, and the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dsv4_operator.api import DeploymentStatus, FailureStatus, GroupPhase, GroupStatus, KvCacheStatus, MemberStatus
from dsv4_operator.api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    MeasuredItem,
    MeasuredStatus,
    Reason,
)
from dsv4_operator.controller import observability
from dsv4_operator.controller.observability import Fleet, PageServer, page_entries
from dsv4_operator.kube import Manifest
from dsv4_runtime.contract import Cause, Health, Phase
from dsv4_runtime.contract.gateway import (
    CanaryReport,
    Figures,
    PageFailure,
    PageLoad,
    PageMember,
    PageRequests,
    StatusPage,
)
from dsv4_testkit.waiting import free_port

NOW = 1_000_000.0


def manifest(status: DeploymentStatus, name: str = "flash", version: int = 1, **spec: Any) -> Manifest:
    found = yaml.safe_load((Path(__file__).parents[3] / "examples" / "nano.yaml").read_text())
    found["metadata"] = {"namespace": "models", "name": name, "uid": name, "resourceVersion": str(version)}
    found["spec"]["recovery"] = {"maxRestarts": 4, "window": "10m"}
    return {**found, "spec": {**found["spec"], **spec}, "status": status.to_dict()}


def dead() -> DeploymentStatus:
    failure = FailureStatus(
        time=NOW - 10, cause=Cause.ENGINE_HUNG, incarnation=2, engine_generation=3, culprit_rank=1, level=1,
        culprit_node="spark-2", message="no step", detected_by="steps", evidence="evidence/2-g3",
    )  # fmt: skip
    group = GroupStatus(
        index=0,
        phase=GroupPhase.RESTARTING,
        phase_time=NOW - 9,
        incarnation=2,
        engine_generation=3,
        members=(MemberStatus(rank=1, node="spark-2", phase=Phase.RESTARTING, message="waits", warnings=("hot",)),),
        ready_time=NOW - 500,
        restarts=(NOW - 601, NOW - 60, NOW - 10),
        total_restarts=7,
        next_restart_time=NOW + 4,
        kv_cache=KvCacheStatus(tokens=900, planned_tokens=1000, concurrency=2.5),
        measured=MeasuredStatus(of="x", incarnation=2, items=(MeasuredItem(item="weights", difference=-5),)),
        last_failure=failure,
        history=(failure,),
    )
    condition = Condition(
        type=ConditionType.READY, status=ConditionStatus.FALSE, last_transition_time=NOW,
        reason=Reason.GROUPS_NOT_READY, message="0 of 1 groups serve",
    )  # fmt: skip
    return DeploymentStatus(
        phase=DeploymentPhase.RECOVERING, groups=(group,), conditions=(condition,), ray_dashboard="http://head:8265"
    )


def test_a_status_becomes_the_entries_of_the_page() -> None:
    deployment, (group,) = page_entries(manifest(dead()), NOW)
    assert (deployment.key, deployment.phase, deployment.ready, deployment.wanted) == (
        "models/flash",
        "Recovering",
        0,
        1,
    )
    assert (deployment.message, deployment.dashboard) == ("0 of 1 groups serve", "http://head:8265")
    assert (group.key, group.phase, group.ready_since) == ("models/flash#0", "Restarting", None)
    assert group.verdict is not None
    assert (group.verdict.health, group.verdict.cause, group.verdict.message) == (
        Health.DEAD,
        Cause.ENGINE_HUNG,
        "no step",
    )
    assert group.members == (
        PageMember(rank=1, node="spark-2", phase="Restarting", message="waits", warnings=("hot",)),
    )
    assert group.budget is not None
    assert (group.budget.allowed, group.budget.left, group.budget.next_restart) == (4, 2, NOW + 4)
    assert (group.memory, group.cache and group.cache.tokens) == ({"weights": -5}, 900)
    assert group.failures == (
        PageFailure(
            time=NOW - 10, cause=Cause.ENGINE_HUNG, incarnation=2, generation=3, level=1, rank=1, node="spark-2",
            message="no step", detected_by="steps", evidence="evidence/2-g3",
        ),
    )  # fmt: skip


def test_a_specification_that_breaks_a_rule_does_not_hide_the_status() -> None:
    deployment, (group,) = page_entries(manifest(dead(), replicas=-7), NOW)
    assert (deployment.phase, group.phase, group.budget and group.budget.allowed) == ("Recovering", "Restarting", 4)
    unreadable, none = page_entries({**manifest(dead()), "spec": None, "status": "x"}, NOW)
    assert (unreadable.phase, none) == ("Pending", ())


async def test_unchanged_objects_are_read_once_in_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    now = [NOW]

    def count(found: Manifest, moment: float) -> Any:
        reads.append(found["metadata"]["name"])
        return page_entries(found, moment)

    monkeypatch.setattr(observability, "page_entries", count)
    objects = [manifest(dead(), "b"), manifest(dead(), "a")]

    async def listed() -> list[Manifest]:
        return objects

    fleet = Fleet(listed, lambda: now[0])
    page = await fleet.make()
    assert [one.key for one in page.deployments] == ["models/a", "models/b"]
    now[0] += 5
    assert (await fleet.make()).since(page) is None
    assert sorted(reads) == ["a", "b"]
    objects[0] = manifest(dead(), "b", 2)
    await fleet.make()
    assert sorted(reads) == ["a", "b", "b"]
    now[0] += 600
    del objects[1]
    later = await fleet.make()
    # The restarts have left the window.
    assert later.groups[0].budget is not None
    assert later.groups[0].budget.left == 4
    changes = later.since(page)
    assert changes is not None
    assert changes.gone == ("models/a", "models/a#0")


def serving() -> DeploymentStatus:
    groups = [
        GroupStatus(index=index, phase=phase, kv_cache=KvCacheStatus(tokens=900))
        for index, phase in enumerate((GroupPhase.SERVING, GroupPhase.RESTARTING))
    ]
    return DeploymentStatus(groups=tuple(groups))


def report(gateway: str, held: int, rate: float) -> CanaryReport:
    load = PageLoad(running=2, waiting=1, tokens_per_second=rate, usage=0.5)
    figures = Figures(requests=PageRequests(held=held, ok=10), loads={0: load, 1: load})
    return CanaryReport(ok=True, gateway=gateway, figures=figures)


async def test_figures_are_those_of_all_gateways_that_reported_lately() -> None:
    now = [NOW]

    async def listed() -> list[Manifest]:
        return [manifest(serving())]

    fleet = Fleet(listed, lambda: now[0])
    fleet.take("models", "flash", report("a", 1, 10.0))
    now[0] += 30
    fleet.take("models", "flash", report("b", 2, 20.0))
    fleet.take("models", "flash", CanaryReport(ok=False, gateway="c"))
    fleet.take("models", "other", report("a", 5, 99.0))
    page = await fleet.make()
    (deployment,), (first, second) = page.deployments, page.groups
    assert deployment.requests == PageRequests(held=3, ok=20)
    assert first.load is not None
    assert (first.load.tokens_per_second, first.cache and first.cache.usage) == (20.0, 0.5)
    # Engines that are not serving have no figures.
    assert (second.load, second.cache and second.cache.usage) == (None, None)
    now[0] += 100
    assert (await fleet.make()).deployments[0].requests == PageRequests(held=2, ok=10)
    now[0] += 100
    page = await fleet.make()
    assert (page.deployments[0].requests, page.groups[0].load) == (None, None)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[PageServer, str, Path]]:
    async def make() -> StatusPage:
        return StatusPage(source="operator", time=1.0)

    keys, port = tmp_path / "keys", free_port()
    keys.write_text("one # of Ann\nschlüssel\n", encoding="utf-8")
    found = PageServer(port, keys, make)
    await found.start()
    yield found, f"http://127.0.0.1:{port}", keys
    await found.close()


async def test_the_data_require_a_key_and_the_page_has_none(server: tuple[PageServer, str, Path]) -> None:
    _, url, keys = server
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        page = await client.get("/", follow_redirects=True)
        assert (page.status_code, page.url.path) == (200, "/dsv4/status")
        assert "script-src 'sha256-" in page.headers["Content-Security-Policy"]
        for path in ("/dsv4/status.json", "/dsv4/status/events", "/other"):
            for headers in ({}, {"Authorization": "Bearer two"}, {"Authorization": "Basic one"}, {"X-Api-Key": ""}):
                assert (await client.get(path, headers=headers)).status_code == 401
            assert (await client.get(f"{path}?key=one")).status_code == 401
        for headers in (
            {"Authorization": "Bearer one"},
            {"X-Api-Key": "one"},
            {"Authorization": b"Bearer " + "schlüssel".encode()},
        ):
            answer = await client.get("/dsv4/status.json", headers=headers)
            assert json.loads(answer.content) == {
                "version": 1,
                "source": "operator",
                "time": 1.0,
                "deployments": [],
                "groups": [],
                "gone": [],
            }
        assert (await client.post("/dsv4/status", headers={"X-Api-Key": "one"})).status_code == 405
        keys.write_text("two\n")
        assert (await client.get("/dsv4/status.json", headers={"X-Api-Key": "one"})).status_code == 401
        assert (await client.get("/dsv4/status.json", headers={"X-Api-Key": "two"})).status_code == 200
        keys.unlink()
        assert (await client.get("/dsv4/status.json", headers={"X-Api-Key": "two"})).status_code == 401


async def test_streams_are_bounded_and_a_closed_one_gives_its_place_back(server: tuple[PageServer, str, Path]) -> None:
    page, url, _ = server
    headers = {"X-Api-Key": "one"}
    async with httpx.AsyncClient(base_url=url, trust_env=False, headers=headers, timeout=60) as client:
        streams = [await client.send(client.build_request("GET", "/dsv4/status/events"), stream=True) for _ in range(8)]
        full = await client.get("/dsv4/status/events")
        assert (full.status_code, full.headers["Retry-After"]) == (503, "10")
        for stream in streams:
            await stream.aclose()
        async with asyncio.timeout(60):
            while page.feed.readers:
                await asyncio.sleep(0.02)
        assert (await client.get("/dsv4/status.json")).status_code == 200


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"# none\n", "no key"), (b"\xff", "not UTF-8")]
)
def test_keys_that_cannot_be_used_are_named_at_the_start(tmp_path: Path, content: bytes | None, reason: str) -> None:
    async def make() -> StatusPage:
        raise AssertionError

    keys = tmp_path / "keys"
    if content is not None:
        keys.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        PageServer(1, keys, make)
