"""Logs and evidence of a cluster, read from pods."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_world import RESOURCE, World, gone, pod, secret, wait_for

from dsv4_operator.builders import names
from dsv4_operator.cli import main
from dsv4_operator.cli.sources.cluster import main_container, parse_pod


@pytest.fixture
def logged(world: World, deployed: Callable[..., Any]) -> World:
    deployed()
    gateway = {"metadata": {"name": "nano-0-gateway-x", "labels": names.labels("nano", component=names.GATEWAY)}}
    gateway |= {"spec": {"containers": [{"name": "gateway"}]}, "status": {}}
    world.set("objects", pods=[pod(0, 2), pod(1, 2), gateway])
    head = "one\n[ray rank 0] up\n\x1b[32mtwo\x1b[0m\n[vllm rank 0] loaded\n[vllm rank 0] ready\nthree\n"
    world.set(
        "logs", **{"nano-0-i2-r0": head, "nano-0-i2-r1": "four\n[ray rank 1] joined\n", "nano-0-gateway-x": "g\n"}
    )
    return world


def test_logs_of_all_members(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["logs", "nano", "-n", "default"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "[0 agent] one",
        "[0 ray] up",
        "[0 agent] two",
        "[0 vllm] loaded",
        "[0 vllm] ready",
        "[0 agent] three",
        "[1 agent] four",
        "[1 ray] joined",
    ]
    assert err == ""
    assert main.run(["logs", "nano", "--tail", "1", "-n", "default"]) == 0
    assert capsys.readouterr().out == "[0 agent] three\n[1 ray] joined\n"


def test_logs_of_one_component(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    """`--tail` counts the lines of the component."""
    assert main.run(["logs", "nano", "0", "-c", "vllm", "--tail", "1", "-n", "default"]) == 0
    assert main.run(["logs", "1", "-c", "agent", "-o", "json", "-n", "default"]) == 0
    assert main.run(["logs", "-c", "ray", "--since", "10m", "-n", "default"]) == 0
    assert capsys.readouterr() == (
        'ready\n{"rank": 1, "component": "agent", "line": "four"}\n[0 ray] up\n[1 ray] joined\n',
        "",
    )
    _, words = logged.calls("logs")[-1]
    assert "--since=10m" in words


def test_without_logs(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["logs", "nano", "7", "-n", "default"]) == 2
    assert main.run(["logs", "nano", "1", "-c", "vllm", "-n", "default"]) == 2
    assert main.run(["logs", "nano", "one", "-n", "default"]) == 2
    assert main.run(["logs", "nano", "-c", "loop", "--since", "1m", "-n", "default"]) == 2
    assert main.run(["logs", "nano", "--since", "1m"]) == 2
    logged.set("errors", logs="error: the server does not answer")
    assert main.run(["logs", "nano", "-n", "default"]) == 1
    logged.set("objects", pods=[])
    logged.drop("errors", "logs")
    assert main.run(["logs", "nano", "-n", "default"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: 'nano' has no logs of rank 7; its ranks are 0, 1",
        "error: 'nano' has no logs of rank 1 and component vllm; its ranks are 0, 1",
        "error: RANK 'one' is not a number; use the rank of a member, such as 0",
        "error: --since is for the members' logs in a cluster; use --tail",
        "error: --since is for the members' logs in a cluster; use --tail",
        "error: kubectl logs: the server does not answer",
        "error: 'nano' has no logs of component all; see `dsv4 status nano -n default`",
    ]


def test_a_pod_without_a_log_is_reported(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    logged.drop("logs", "nano-0-i2-r0")
    assert main.run(["logs", "nano", "-n", "default"]) == 0
    out, err = capsys.readouterr()
    assert out == "[1 agent] four\n[1 ray] joined\n"
    assert err == "container agent in pod nano-0-i2-r0 is waiting to start\n"


def test_following_ends_with_the_pods(logged: World) -> None:
    command = [sys.executable, "-c", "import sys; from dsv4_operator.cli.main import run; sys.exit(run(sys.argv[1:]))"]
    command += ["logs", "nano", "-f", "-n", "default"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        seen = {process.stdout.readline() for _ in range(8)}
        assert "[1 ray] joined\n" in seen
        logged.set("logs", **{"nano-0-i2-r1": "four\n[ray rank 1] joined\nlast\n"})
        assert process.stdout.readline() == "[1 agent] last\n"
        logged.set("objects", pods=[], **{RESOURCE: []})
        logged.drop("logs", "nano-0-i2-r0", "nano-0-i2-r1")
        assert process.wait(60) == 0
        assert "the pods whose logs were followed have ended" in process.stderr.read()


def test_following_ends_its_kubectl_on_a_signal(logged: World) -> None:
    command = [sys.executable, "-c", "import sys; from dsv4_operator.cli.main import run; sys.exit(run(sys.argv[1:]))"]
    command += ["logs", "nano", "-f", "-n", "default"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        (pid, _), *_ = logged.calls("logs")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    wait_for(lambda: gone(pid))


def test_evidence(logged: World, make: Any, deployed: Callable[..., Any], tmp_path: Path) -> None:
    place = "/var/lib/dsv4/evidence/default/nano/g0/2-g1-x"
    deployed(make.status(make.failed_group(make.failure(evidence=place))))
    labels = names.labels("nano", component=names.EVIDENCE, group=0)
    kept = {"metadata": {"name": "nano-0-evidence-1", "labels": labels}, "data": {"evidence.json": "{}"}}
    event = {"metadata": {"uid": "e", "creationTimestamp": "2026-09-21T14:00:00Z"}, "message": "m"}
    involved = ["nano", "nano-0-i2-r1", "nano-2-0-head"]
    logged.set(
        "objects",
        configmaps=[kept],
        events=[{**event, "involvedObject": {"name": name}} for name in involved],
        secrets=[secret("nano-0-i2", "token", "t0ken")],
    )
    logged.set("objects", pods=[*logged.known["objects"]["pods"], pod(0, 1)])
    logged.set("logs", **{"nano-0-i1-r0": "old\n"})
    logged.drop("logs", "nano-0-i2-r1")
    logged.set("files", **{f"nano-0-i2-r0:{place}/evidence.json": '{"failure": 1}'})
    target = tmp_path / "out.tar.gz"
    assert main.run(["evidence", "nano", "-n", "default", "-o", str(target)]) == 0
    with tarfile.open(target) as archive:
        found = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    assert sorted(found) == [
        "nano/configmaps/nano-0-evidence-1/evidence.json",
        "nano/events.json",
        "nano/evidence/0-2-g1-x.json",
        "nano/missing.txt",
        "nano/object.json",
        "nano/pods.json",
        "nano/pods/nano-0-gateway-x.log",
        "nano/pods/nano-0-i1-r0.log",
        "nano/pods/nano-0-i2-r0.log",
    ]
    assert [each["involvedObject"]["name"] for each in json.loads(found["nano/events.json"])] == involved[:2]
    assert "[vllm rank 0] ready" in found["nano/pods/nano-0-i2-r0.log"]
    assert "pods/nano-0-i2-r1.log: Error from server (NotFound)" in found["nano/missing.txt"]
    assert "t0ken" not in "".join(found.values())


def test_an_injected_container_is_not_the_members() -> None:
    """Service meshes may put their proxy first, so that it starts first."""
    document = pod(0)
    document["spec"]["containers"].insert(0, {"name": "istio-proxy"})
    document["status"]["containerStatuses"].insert(0, {"name": "istio-proxy", "state": {"terminated": {}}})
    found = parse_pod(document)
    assert found is not None
    assert (found.container, found.running) == ("agent", True)
    gateway = {"spec": {"containers": [{"name": "istio-proxy"}, {"name": "gateway"}]}}
    assert main_container(gateway) == "gateway"
    assert main_container({"spec": {"containers": [{"name": "other"}]}}) == "other"
