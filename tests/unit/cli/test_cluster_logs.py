"""Logs and evidence of a cluster, which come from pods."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_world import RESOURCE, World, gone, pod, secret, wait_for

from dsv4_operator.builders import names
from dsv4_operator.cli import main
from dsv4_operator.cli.logs import LogComponent, LogOptions
from dsv4_operator.cli.sources import pods
from dsv4_operator.cli.sources.cluster import ClusterSource
from dsv4_operator.cli.sources.kubectl import Kubectl


def request(**more: Any) -> LogOptions:
    fields = {"rank": None, "component": LogComponent.ALL, "follow": False, "tail": None, "form": None, "colour": False}
    return LogOptions(**{**fields, **more})


@pytest.fixture
def logged(world: World, deployed: Callable[..., Any]) -> World:
    deployed()
    world.set("objects", pods=[pod(0, 1), pod(0, 2), pod(1, 2)])
    world.set("logs", **{"nano-0-i1-r0": "old\n", "nano-0-i2-r0": "one\ntwo\n", "nano-0-i2-r1": "three\n"})
    world.set("files", **{"nano-0-i2-r0:/run/dsv4/i2/m0/vllm.log": "load 10%\rload 100%\nready"})
    world.set("files", **{"nano-0-i2-r0:/run/dsv4/i2/m0/ray.log": "\x1b[32mup\x1b[0m\n"})
    return world


def test_logs_of_the_latest_incarnation(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["logs", "nano", "-n", "default"]) == 0
    out, err = capsys.readouterr()
    assert out == "[0 agent] one\n[0 agent] two\n[0 ray] up\n[0 vllm] load 100%\n[0 vllm] ready\n[1 agent] three\n"
    assert err == "1 ray: Error from server (NotFound): it has gone\n"
    assert main.run(["logs", "nano", "0", "-c", "vllm", "--tail", "1", "-n", "default"]) == 0
    assert main.run(["logs", "1", "-c", "agent", "-o", "json", "-n", "default"]) == 0
    assert capsys.readouterr().out == 'ready\n{"rank": 1, "component": "agent", "line": "three"}\n'


def test_no_logs(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["logs", "nano", "7", "-n", "default"]) == 2
    assert main.run(["logs", "nano", "1", "-c", "ray", "-n", "default"]) == 1
    assert main.run(["logs", "nano", "one", "-n", "default"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: 'nano' has no logs of rank 7; its ranks are 0, 1",
        "1 ray: Error from server (NotFound): it has gone",
        "error: RANK 'one' is not a number; use the rank of a member, such as 0",
    ]


def test_logs_of_a_pod_that_ended(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    logged.set("objects", pods=[pod(0, 2, "terminated"), pod(1, 2, "waiting")])
    assert main.run(["logs", "nano", "-n", "default"]) == 0
    assert capsys.readouterr() == ("[0 agent] one\n[0 agent] two\n", "")


def test_following_into_the_next_incarnation(
    logged: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "POLL_SECONDS", 0.5)
    logged.set("objects", pods=[pod(0, 2)])
    steps = iter(range(99))
    read = pods.LogFollower.read

    def step(follower: pods.LogFollower, seconds: float) -> None:
        match next(steps):
            case 1:
                logged.set("logs", **{"nano-0-i2-r0": "one\ntwo\nlast"})
            case 2:
                logged.drop("logs", "nano-0-i2-r0")
                logged.set("objects", pods=[pod(0, 3)])
                logged.set("logs", **{"nano-0-i3-r0": "a\nb\n"})
            case 4:
                logged.set("objects", pods=[], **{RESOURCE: []})
                logged.drop("logs", "nano-0-i3-r0")
        read(follower, seconds)

    monkeypatch.setattr(pods.LogFollower, "read", step)
    item = ClusterSource(None, None, "default").get("nano")
    pods.print_logs(
        Kubectl(None, None, None),
        item,
        request(component=LogComponent.AGENT, follow=True, tail=1),
        ClusterSource(None, None, "x"),
    )
    assert capsys.readouterr().out.splitlines() == ["[0 agent] two", "[0 agent] last", "[0 agent] a", "[0 agent] b"]
    assert all(gone(pid) for pid, _ in logged.calls("logs"))


def test_following_ends_what_it_started_and_complains_once(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    running: list[int] = []
    said = {"out": "", "err": ""}
    with pods.LogFollower(Kubectl(None, None, None), "nano", request(follow=True), grouped=False) as follower:

        def all_run() -> bool:
            follower.refresh()
            follower.read(0.1)
            out, err = capsys.readouterr()
            said.update(out=said["out"] + out, err=said["err"] + err)
            running[:] = [pid for verb in ("logs", "exec") for pid, _ in logged.calls(verb) if not gone(pid)]
            return len(running) == 4 and "[1 agent] three" in said["out"] and said["err"]

        wait_for(all_run)
        for _ in range(3):
            all_run()
    assert all(gone(pid) for pid in running)
    assert said["err"] == "1 ray: Error from server (NotFound): it has gone\n"


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
        "nano/pods/nano-0-i1-r0/agent.log",
        "nano/pods/nano-0-i2-r0/agent.log",
        "nano/pods/nano-0-i2-r0/ray.log",
        "nano/pods/nano-0-i2-r0/vllm.log",
        "nano/pods/nano-0-i2-r1/agent.log",
    ]
    assert [each["involvedObject"]["name"] for each in json.loads(found["nano/events.json"])] == involved[:2]
    assert "pods/nano-0-i2-r1/ray.log: Error from server (NotFound)" in found["nano/missing.txt"]
    assert "t0ken" not in "".join(found.values())
