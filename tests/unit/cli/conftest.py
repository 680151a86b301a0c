"""A state directory short enough for Ray's sockets, deployments in every state, and a stand-in for the loop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    DeploymentStatus,
    DSV4Deployment,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    MemberStatus,
    Reason,
    load,
)
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_runtime.contract import Cause, Phase, Process, Role

sys.path.insert(0, str(Path(__file__).parent))

from cluster_world import RESOURCE, STAND_IN, Server, World

NOW = 1_790_000_000.0

MANIFEST = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano}
spec:
  model: {variant: Nano, source: {nano: {seed: 0}}}
  topology: {hardware: CPU, nodesPerGroup: 2}
"""


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def root() -> Iterator[Path]:
    # Not tmp_path, whose names are too long for Ray's sockets.
    path = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def manifest(root: Path) -> Path:
    path = root / "nano.yaml"
    path.write_text(MANIFEST)
    return path


class Make:
    """Factory of objects for tests."""

    now = NOW

    def condition(self, kind: ConditionType, *, true: bool, message: str = "", generation: int = 1) -> Condition:
        return Condition(
            type=kind,
            status=ConditionStatus.TRUE if true else ConditionStatus.FALSE,
            observed_generation=generation,
            last_transition_time=NOW,
            reason=Reason.ALL_GROUPS_READY if true else Reason.GROUPS_NOT_READY,
            message=message,
        )

    def member(self, rank: int, phase: Phase | None = Phase.SERVING, message: str = "", **more: object) -> MemberStatus:
        role = Role.HEAD if rank == 0 else Role.WORKER
        fields = {"node": f"local-{rank}", "address": f"10.88.0.{rank + 10}", **more}
        return MemberStatus(rank=rank, role=role, phase=phase, message=message, **fields)

    def failure(self, time: float = NOW - 100, **more: object) -> FailureStatus:
        fields: dict[str, object] = {
            "cause": Cause.ENGINE_CORE_DIED,
            "incarnation": 1,
            "culprit_rank": 0,
            "culprit_node": "local-0",
            "message": "killed by SIGKILL",
            "detected_by": "exit",
            "level": 1,
            "evidence": "/state/nano/evidence/1",
            **more,
        }
        return FailureStatus(time=time, **fields)

    def group(self, phase: GroupPhase = GroupPhase.SERVING, **more: object) -> GroupStatus:
        fields: dict[str, object] = {
            "incarnation": 1,
            "members": (
                self.member(0, processes=(Process(name="agent", pid=11), Process(name="api", pid=12))),
                self.member(1),
            ),
            "ready_time": NOW - 60,
            **more,
        }
        return GroupStatus(phase=phase, **fields)

    def failed_group(self, *failures: FailureStatus, **more: object) -> GroupStatus:
        return self.group(history=failures, last_failure=failures[-1], **more)

    def status(self, *groups: GroupStatus, ready: bool = True, **more: object) -> DeploymentStatus:
        fields: dict[str, object] = {
            "phase": DeploymentPhase.SERVING if ready else DeploymentPhase.STARTING,
            "conditions": (self.condition(ConditionType.READY, true=ready),),
            "observed_generation": 1,
            "replicas": 1,
            "ready_replicas": int(ready),
            "endpoint": "http://127.0.0.1:8000/v1",
            "ray_dashboard": "http://127.0.0.1:8265",
            "groups": groups or (self.group(),),
            **more,
        }
        return DeploymentStatus(**fields)

    def deployment(self, status: DeploymentStatus | None = None) -> DSV4Deployment:
        return load(MANIFEST).model_copy(update={"status": status or DeploymentStatus()})


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture
def saved(root: Path, make: Make) -> Callable[..., DeploymentState]:
    """Return a function that saves a deployment in the state directory."""

    def save(status: DeploymentStatus | None = None, name: str = "nano") -> DeploymentState:
        state = DeploymentState(root, name)
        state.prepare()
        found = make.deployment(status)
        found = found.model_copy(update={"metadata": found.metadata.model_copy(update={"name": name})})
        state.save_manifest(found)
        if status is not None:
            state.save_object(found)
        return state

    return save


@pytest.fixture
def held() -> Iterator[Callable[[DeploymentState], int]]:
    """Return a function that locks a deployment from another process, as a running loop does."""
    code = """
import os, sys, time
from pathlib import Path
import fcntl
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.pwrite(file, str(os.getpid()).encode(), 0)
print("held", flush=True)
time.sleep(600)
"""
    processes: list[subprocess.Popen[str]] = []

    def hold(state: DeploymentState) -> int:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, str(state.directory / "lock")], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        return process.pid

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {STAND_IN} "$@"\n')
    program.chmod(0o755)
    found = World(tmp_path)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("KUBECTL_WORLD", str(found.file))
    return found


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.fixture
def deployed(world: World, make: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that adds a deployment to the cluster."""

    def deploy(status: Any = None, **spec: Any) -> dict[str, Any]:
        document: dict[str, Any] = make.deployment(status or make.status()).to_dict()
        document["metadata"] |= {"creationTimestamp": "2026-09-21T14:00:00Z", "uid": "u1", "resourceVersion": "5"}
        document["spec"] |= spec
        world.set("objects", **{RESOURCE: [document]})
        return document

    return deploy
