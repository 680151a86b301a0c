"""The operator's chart for tests: the real helm, and the rendered objects."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from clusterkit import build
from clusterkit.client import Cluster

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "dsv4-operator"
HELM_SECONDS = 120.0


class HelmError(Exception):
    """helm failed; the text is its standard error."""


def program() -> Path:
    """Return the helm program, built if necessary (minutes, once)."""
    return build.built("helm") / "helm"


def helm(*arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Return the standard output of helm.

    Raises:
        HelmError: helm failed.
    """
    done = subprocess.run(
        [program(), *arguments], capture_output=True, text=True, timeout=HELM_SECONDS, check=False, env=env
    )
    if done.returncode:
        raise HelmError(done.stderr)
    return done.stdout


def settings(*values: str) -> list[str]:
    """Return `--set` for each of `values`; image tags use `--set-string`, because they may look like numbers."""
    return [word for value in values for word in ("--set-string" if value.startswith("image.") else "--set", value)]


def rendered(*values: str, namespace: str = "dsv4-system", release: str = "dsv4") -> list[dict[str, Any]]:
    """Return the objects that the chart renders with `values`, without a cluster."""
    text = helm("template", release, CHART, "--namespace", namespace, *settings(*values))
    return [document for document in yaml.safe_load_all(text) if document]


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """Return the only object of a kind (and name)."""
    found = [this for this in objects if this["kind"] == kind and name in (None, this["metadata"]["name"])]
    assert len(found) == 1, f"{kind} {name or ''}: {len(found)}"
    return found[0]


@contextlib.contextmanager
def account(cluster: Cluster, namespace: str, file: Path, *values: str) -> Iterator[Path]:
    """Yield a kubeconfig with exactly the rights that the chart with `values` gives an operator of this namespace."""
    release = f"rights-{namespace}"
    made = [
        this
        for this in rendered(
            f"watchNamespaces={{{namespace}}}",
            "rbac.aggregate=false",
            *values,
            release=release,
            namespace=namespace,
        )
        if this["kind"] == "ServiceAccount" or "Role" in this["kind"]
    ]
    cluster.apply(*made)
    name = one(made, "ServiceAccount")["metadata"]["name"]
    token = cluster.kubectl("create", "token", name, "--namespace", namespace, "--duration=1h").strip()
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    config["contexts"][0]["context"]["namespace"] = namespace
    file.write_text(json.dumps(config))
    try:
        yield file
    finally:
        # Objects in the namespace are deleted with it.
        for this in made:
            if this["kind"].startswith("Cluster"):
                cluster.kubectl("delete", this["kind"], this["metadata"]["name"], "--ignore-not-found")
