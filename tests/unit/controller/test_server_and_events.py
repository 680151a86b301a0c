"""Probes, metrics, and the form of Events."""

from __future__ import annotations

import httpx

from dsv4_operator.api import DeploymentPhase, DeploymentStatus, Reason
from dsv4_operator.controller.metrics import OperatorMetrics
from dsv4_operator.controller.recorder import event_manifest
from dsv4_operator.controller.server import ProbeServer
from dsv4_operator.lifecycle import Event, EventType
from dsv4_testkit.waiting import free_port

ABOUT = {"metadata": {"name": "flash", "namespace": "models", "uid": "1-2-3"}}
TIME = "2026-11-21T10:00:00.000000Z"


async def test_probes_say_what_is_wrong_and_metrics_are_there() -> None:
    metrics = OperatorMetrics()
    wrong: list[str] = []
    metrics.observe(
        lambda: [DeploymentStatus(phase=DeploymentPhase.SERVING, ready_replicas=2)], lambda: True, lambda: 3
    )
    metrics.asked("PUT", 200)
    port = free_port()
    server = ProbeServer(port, live=lambda: None, ready=lambda: wrong[0] if wrong else None, metrics=metrics.text)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
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
    ):
        assert line in text


def test_the_same_event_has_the_same_name_and_another_one_has_not() -> None:
    dead = Event(EventType.WARNING, Reason.GROUP_DEAD, "NodeLost on member 1 (spark2): it is gone", 0)
    one = event_manifest(ABOUT, dead, "operator-1", TIME)
    again = event_manifest(ABOUT, dead, "operator-2", "2026-11-21T11:00:00.000000Z")
    other = event_manifest(ABOUT, Event(EventType.WARNING, dead.reason, dead.message, 1), "operator-1", TIME)
    assert one["metadata"] == again["metadata"] != other["metadata"]
    assert one["note"] == "group 0: NodeLost on member 1 (spark2): it is gone"
    assert (one["type"], one["reason"]) == ("Warning", "GroupDead")
    assert one["regarding"]["uid"] == "1-2-3"


def test_a_note_is_cut_to_what_the_server_takes_between_characters() -> None:
    long = event_manifest(ABOUT, Event(EventType.NORMAL, Reason.STEADY, "×" * 2000), "o", TIME)
    assert len(long["note"].encode()) <= 1024
    assert set(long["note"]) == {"×"}
