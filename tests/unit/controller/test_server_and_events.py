"""Probes, metrics, and the form of Events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dsv4_operator.api import (
    DeploymentPhase,
    DeploymentStatus,
    DSV4Deployment,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    KvCacheStatus,
    MemberStatus,
    Reason,
)
from dsv4_operator.api.deployment import API_VERSION, parse
from dsv4_operator.api.status import MeasuredItem, MeasuredStatus
from dsv4_operator.controller import observability
from dsv4_operator.controller.observability import OperatorMetrics, ProbeServer, Recorder, event_manifest
from dsv4_operator.controller.reconcile import _log_event
from dsv4_operator.kube import AlreadyExists, Manifest, NotFound, Resource
from dsv4_operator.lifecycle import Event, EventType
from dsv4_runtime.contract import Cause
from dsv4_testkit.waiting import free_port

ABOUT = {"metadata": {"name": "flash", "namespace": "models", "uid": "1-2-3"}}
TIME = "2026-11-21T10:00:00.000000Z"


async def test_probes_report_the_problem_and_metrics_are_served() -> None:
    metrics = OperatorMetrics()
    wrong: list[str] = []
    metrics.observe(
        lambda: [deployment(status=DeploymentStatus(phase=DeploymentPhase.SERVING, ready_replicas=2))],
        lambda: True,
        lambda: 3,
        failing=lambda: ["act", "act", "frontend"],
    )
    metrics.count_request("PUT", 200)
    port = free_port()
    server = ProbeServer(port, live=lambda: None, ready=lambda: wrong[0] if wrong else None, metrics=metrics.text)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            assert (await client.get("/livez")).text == "ok\n"
            assert (await client.get("/readyz")).status_code == 200
            wrong.append("waiting for the pods")
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.text) == (503, "waiting for the pods\n")
            text = (await client.get("/metrics")).text
    finally:
        await server.close()
    for line in (
        'dsv4_deployments{phase="Serving"} 1.0',
        'dsv4_deployments{phase="Failed"} 0.0',
        "dsv4_groups_ready 2.0",
        "dsv4_operator_leading 1.0",
        "dsv4_operator_queue 3.0",
        'dsv4_operator_requests_total{method="PUT",status="200"} 1.0',
        'dsv4_operator_looks_total{result="error"} 0.0',
        'dsv4_operator_failing{part="act"} 2.0',
        'dsv4_operator_failing{part="frontend"} 1.0',
        'dsv4_operator_failing{part="observe"} 0.0',
    ):
        assert line in text
    # Without a webhook there is no certificate.
    assert not re.search("^dsv4_operator_certificate_expiry_timestamp_seconds", text, re.MULTILINE)


def deployment(**changes: Any) -> DSV4Deployment:
    manifest = yaml.safe_load((Path(__file__).parents[3] / "examples" / "nano.yaml").read_text())
    manifest["metadata"] |= {"namespace": "models", "name": "flash"}
    manifest["spec"]["recovery"] = {"maxRestarts": 4, "window": "10m"}
    return parse(manifest).model_copy(update=changes)


def test_metrics_of_a_group_are_those_of_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(observability, "unix_time", lambda: now)
    history = (
        FailureStatus(time=now - 3601, cause=Cause.ENGINE_HUNG),
        FailureStatus(time=now - 3599, cause=Cause.ENGINE_HUNG),
        FailureStatus(time=now - 60, cause=Cause.ENGINE_HUNG),
        FailureStatus(time=now - 10, cause=Cause.NODE_LOST, recover_seconds=12.5),
    )
    group = GroupStatus(
        index=1,
        phase=GroupPhase.SERVING,
        members=(MemberStatus(rank=0, warnings=("hot", "slow")), MemberStatus(rank=1)),
        # One is older than the window.
        restarts=(now - 601, now - 60, now - 10),
        total_restarts=7,
        kv_cache=KvCacheStatus(tokens=900, planned_tokens=1000),
        measured=MeasuredStatus(of="x", incarnation=1, items=(MeasuredItem(item="weights", difference=-5),)),
        last_failure=history[-1],
        history=history,
    )
    metrics = OperatorMetrics()
    metrics.observe(
        lambda: [deployment(status=DeploymentStatus(groups=(group,)))], lambda: True, lambda: 0, lambda: 5.0
    )
    lines = [line for line in metrics.text().decode().splitlines() if re.match("dsv4_(group_|operator_cert)", line)]
    labels = 'deployment="flash",group="1"'
    assert [line for line in lines if not line.startswith("dsv4_group_phase") or not line.endswith(" 0.0")] == [
        f'dsv4_group_phase{{{labels},namespace="models",phase="Serving"}} 1.0',
        f'dsv4_group_restarts_total{{{labels},namespace="models"}} 7.0',
        f'dsv4_group_restarts_allowed{{{labels},namespace="models"}} 4.0',
        f'dsv4_group_restarts_left{{{labels},namespace="models"}} 2.0',
        f'dsv4_group_recent_failures{{cause="EngineHung",{labels},namespace="models"}} 2.0',
        f'dsv4_group_recent_failures{{cause="NodeLost",{labels},namespace="models"}} 1.0',
        f'dsv4_group_recovery_seconds{{{labels},namespace="models"}} 12.5',
        f'dsv4_group_slow_members{{{labels},namespace="models"}} 1.0',
        f'dsv4_group_kv_cache_tokens{{{labels},namespace="models"}} 900.0',
        f'dsv4_group_kv_cache_planned_tokens{{{labels},namespace="models"}} 1000.0',
        f'dsv4_group_memory_over_plan_bytes{{{labels},item="weights",namespace="models"}} -5.0',
        "dsv4_operator_certificate_expiry_timestamp_seconds 5.0",
    ]
    assert len([line for line in lines if line.startswith("dsv4_group_phase")]) == len(GroupPhase)


def test_the_same_event_has_the_same_name_and_another_one_has_not() -> None:
    dead = Event(EventType.WARNING, Reason.GROUP_DEAD, "NodeLost on member 1 (spark2): it is gone", 0)
    one = event_manifest(ABOUT, dead, "operator-1", TIME)
    again = event_manifest(ABOUT, dead, "operator-2", "2026-11-21T11:00:00.000000Z")
    other = event_manifest(ABOUT, Event(EventType.WARNING, dead.reason, dead.message, 1), "operator-1", TIME)
    assert one["metadata"] == again["metadata"] != other["metadata"]
    assert one["note"] == "group 0: NodeLost on member 1 (spark2): it is gone"
    assert (one["type"], one["reason"]) == ("Warning", "GroupDead")
    assert one["regarding"]["uid"] == "1-2-3"
    assert one["regarding"]["apiVersion"] == API_VERSION, "that of `kubectl events --for`"


def test_the_log_of_a_loop_names_the_group_of_an_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dsv4")
    _log_event(Event(EventType.WARNING, Reason.GROUP_DEAD, "EngineCoreDied on member 0", 1))
    _log_event(Event(EventType.WARNING, Reason.ENDPOINT_NOT_READY, "no answer"))
    assert [record.message for record in caplog.records] == [
        "Warning GroupDead: group 1: EngineCoreDied on member 0",
        "Warning EndpointNotReady: no answer",
    ]
    assert caplog.records[0].group == 1  # type: ignore[attr-defined]


def test_a_note_is_cut_to_the_servers_limit_between_characters() -> None:
    long = event_manifest(ABOUT, Event(EventType.NORMAL, Reason.STEADY, "×" * 2000), "o", TIME)
    assert len(long["note"].encode()) <= 1024
    assert set(long["note"]) == {"×"}


class Events:
    """The API server's events, which it removes after an hour."""

    def __init__(self) -> None:
        self.objects: dict[str, Manifest] = {}
        self.errors: list[Exception] = []

    async def create(self, manifest: Manifest, *, strict: bool = False) -> Manifest:
        if self.errors:
            raise self.errors.pop()
        name = manifest["metadata"]["name"]
        if name in self.objects:
            raise AlreadyExists("there")
        self.objects[name] = manifest
        return manifest

    async def get(self, _resource: Resource, _namespace: str, name: str) -> Manifest | None:
        return self.objects.get(name)

    async def patch(self, _resource: Resource, _namespace: str, name: str, changes: Manifest) -> Manifest:
        if name not in self.objects:
            raise NotFound(f"PATCH events/{name}: 404 not found")
        self.objects[name] |= changes
        return self.objects[name]


@pytest.fixture
async def recorder(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Recorder, Events]]:
    monkeypatch.setattr("dsv4_operator.controller.observability._PAUSE_SECONDS", 0.0)
    events: Any = Events()
    recorder = Recorder(events, "operator-1")
    task = asyncio.create_task(recorder.run())
    yield recorder, events
    assert not task.done(), "events must not end the process"
    task.cancel()


async def posted(recorder: Recorder, *texts: str) -> None:
    for text in texts:
        recorder.record(ABOUT, Event(EventType.WARNING, Reason.ACTION_FAILED, text))
    for _ in range(10 * len(texts)):
        await asyncio.sleep(0)


async def test_an_event_that_the_server_removed_is_created_again(recorder: tuple[Recorder, Events]) -> None:
    record, events = recorder
    for count in (None, {"count": 2}, {"count": 3}):
        await posted(record, "did not end")
        (event,) = events.objects.values()
        assert (event.get("series") or {}).get("count") == (count or {}).get("count")
    events.objects.clear()
    await posted(record, "did not end")
    assert len(events.objects) == 1
    await posted(record, "did not end")
    assert next(iter(events.objects.values()))["series"]["count"] == 2


async def test_the_counts_that_are_used_stay(
    recorder: tuple[Recorder, Events], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4_operator.controller.observability._REMEMBERED", 2)
    record, _ = recorder
    await posted(record, "often", "once", "often", "again", "often")
    assert len(record._counts) == 2
    assert [record._counts[key] for key in record._counts] == [1, 3]


async def test_an_error_of_any_kind_leaves_later_events(recorder: tuple[Recorder, Events]) -> None:
    record, events = recorder
    events.errors = [ValueError("no JSON")]
    await posted(record, "lost", "posted")
    assert [event["note"] for event in events.objects.values()] == ["posted"]
