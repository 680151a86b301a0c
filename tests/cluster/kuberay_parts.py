"""KubeRay on the test cluster: its definitions, and its operator as a process of this machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusterkit import build, processes
from clusterkit.client import Cluster
from clusterkit.layout import free_port

DEFINITION = "rayclusters.ray.io"
RIGHTS = "policy.backends={KubeRay}"
"""Setting of the chart."""
_YOUNG_SECONDS = 2.1
"""API servers delay the creation of objects by 2 s while their kind is younger than that."""

NEEDED = pytest.mark.skipif(
    not {"all", "cluster"} & set(os.environ.get("DSV4_TEST_REQUIRE", "").split(","))
    and not build.folder(build.MODULES["kuberay"]).is_dir(),
    reason="KubeRay is not built yet (`make cluster-build`)",
)


def definitions() -> dict[str, dict[str, Any]]:
    """Return KubeRay's definitions by name."""
    folder = build.built("kuberay") / "config" / "crd" / "bases"
    found = [yaml.safe_load(file.read_text()) for file in sorted(folder.glob("*.yaml"))]
    return {one["metadata"]["name"]: one for one in found}


def define(cluster: Cluster, *wanted: dict[str, Any]) -> None:
    """Apply definitions and wait until they are served."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=list(wanted))
    cluster.until_served(*(one["metadata"]["name"] for one in wanted))
    time.sleep(_YOUNG_SECONDS)


@contextlib.contextmanager
def defined(cluster: Cluster) -> Iterator[None]:
    """Serve KubeRay's definitions, without its operator."""
    found = definitions()
    define(cluster, *found.values())
    try:
        yield
    finally:
        cluster.kubectl("delete", "crd", *found, "--ignore-not-found", "--timeout=60s", seconds=70)


@contextlib.contextmanager
def operating(cluster: Cluster, kubeconfig: Path | None = None) -> Iterator[processes.Process]:
    """Run KubeRay's operator with its default settings, as the administrator or with `kubeconfig`; its definitions must
    exist."""
    command = [
        build.built("kuberay") / "kuberay",
        f"--kubeconfig={kubeconfig or cluster.kubeconfig}",
        f"--metrics-addr=127.0.0.1:{free_port()}",
        f"--health-probe-bind-address=127.0.0.1:{free_port()}",
        "--enable-leader-election=false",
    ]
    process = processes.start("kuberay", command, log=cluster.state.settings.directory / "logs" / "kuberay.log")
    try:
        yield process
        process.check()
    finally:
        process.stop()
