"""The optional admission webhook of an installed operator, called by the real API server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import charts
import pytest
import yaml
from clusterkit.client import Cluster, KubectlError
from clusterkit.waiting import until

pytestmark = pytest.mark.usefixtures("definition")

EXAMPLES = charts.ROOT / "examples"
SECONDS = 60.0


def helm(cluster: Cluster, namespace: str, *words: str) -> str:
    return charts.helm(*words, "--namespace", namespace, "--wait", "--timeout=100s", env=cluster.environment)


@pytest.fixture
def asked(cluster: Cluster, namespace: str, operator_image: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a namespace whose deployments the webhook checks, and helm's command for its installation."""
    repository, tag = operator_image.rsplit(":", 1)
    release = f"w{uuid.uuid4().hex[:8]}"
    values = charts.settings(
        f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never", "crds.enabled=false",
        f"watchNamespaces={{{namespace}}}", "webhook.enabled=true",
        f"policy.hostNetworkNamespaces={{{namespace}}}",
    )  # fmt: skip
    command = ["upgrade", "--install", release, str(charts.CHART), *values]
    helm(cluster, namespace, *command)
    yield namespace, command
    helm(cluster, namespace, "uninstall", release, "--ignore-not-found")


def example(namespace: str, name: str, **engine: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    manifest["metadata"] = {"name": f"t{uuid.uuid4().hex[:8]}", "namespace": namespace}
    manifest["spec"].setdefault("engine", {}).update(engine)
    return manifest


def test_the_webhook_refuses_specifications_that_cannot_be_planned(
    cluster: Cluster, asked: tuple[str, list[str]]
) -> None:
    namespace, command = asked
    unknown = example(namespace, "flash-2x-spark", extraArgs=["--max-model-length", "4096"])

    def refused() -> str | None:
        try:
            cluster.kubectl("create", "--dry-run=server", "-f", "-", input=[unknown])
        except KubectlError as error:
            return str(error)
        return None

    # The webhook is active in the API server, and its Service on the nodes, a moment after their creation.
    said = until("a refusal", refused, seconds=SECONDS, every=0.5)
    assert "The request is invalid: " in said
    assert 'admission webhook "dsv4deployments.dsv4.dev" denied the request' in said
    assert "did you mean --max-model-len?" in said

    large = example(namespace, "pro-8x-rtx-pro-6000")
    with pytest.raises(KubectlError, match="the weights need"):
        cluster.kubectl("create", "--dry-run=server", "--warnings-as-errors", "-f", "-", input=[large])
    taken = example(namespace, "nano")
    taken["spec"]["suspend"] = True
    cluster.kubectl("create", "--warnings-as-errors", "-f", "-", input=[taken])

    # An upgrade keeps the certificate of running operators.
    before = certificates(cluster, namespace)
    helm(cluster, namespace, *command, "--set", "podLabels.again=yes")
    assert certificates(cluster, namespace) == before
    assert until("a refusal after the upgrade", refused, seconds=SECONDS, every=0.5)

    # Without an operator, nothing is rejected.
    helm(cluster, namespace, *command, "--set", "replicas=0")
    until("no answer", lambda: refused() is None, seconds=SECONDS, every=0.5)

    helm(cluster, namespace, "uninstall", command[2])
    left = cluster.get("validatingwebhookconfigurations")["items"]
    assert [one for one in left if namespace in one["metadata"]["name"]] == []


def certificates(cluster: Cluster, namespace: str) -> list[dict[str, str]]:
    secrets = cluster.get("secrets", "--namespace", namespace)["items"]
    found = [secret["data"] for secret in secrets if secret["type"] == "kubernetes.io/tls"]
    assert len(found) == 1
    return found
