"""`kubectl dsv4` as users run it."""

import json
import subprocess
from typing import Any

import pytest
from cli_world import NANO, PROGRAMS, SECONDS, STATUS, Dsv4
from clusterkit.client import Cluster


@pytest.fixture
def dsv4(cluster: Cluster, namespace: str) -> Dsv4:
    """Return a function that runs `kubectl dsv4` as a user does, by default in the test's namespace."""
    environment = {**cluster.environment, "PATH": f"{PROGRAMS}:{cluster.environment['PATH']}", "TZ": "UTC"}

    def run(*words: str, place: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "dsv4", *words, *(["-n", namespace] if place else [])]
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={**environment, **more},
        )

    return run


@pytest.fixture
def nano(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """Create the nano deployment with a status; return it as stored in the cluster."""
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    change = json.dumps({"status": STATUS})
    cluster.kubectl("patch", "dsv4", "nano", "-n", namespace, "--subresource=status", "--type=merge", "-p", change)
    found: dict[str, Any] = cluster.get("dsv4", "nano", "-n", namespace)
    assert found["status"]["groups"][0]["members"] == STATUS["groups"][0]["members"]
    return found
