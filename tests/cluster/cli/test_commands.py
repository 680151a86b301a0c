"""`kubectl dsv4` through the real kubectl, against the real API server."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_world import (
    NANO,
    NOW,
    PROGRAMS,
    ROOT,
    SECONDS,
    Dsv4,
    moment,
    running,
)
from clusterkit.client import Cluster

from dsv4_operator.api import parse
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.builders import names

pytestmark = pytest.mark.usefixtures("definition")


@pytest.fixture
def same_here(nano: dict[str, Any]) -> Iterator[Path]:
    """Yield a state directory of this machine in which the same object runs."""
    # tmp_path is not usable: its names are longer than allowed for a state directory.
    root = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    state = DeploymentState(root, "nano")
    state.prepare()
    deployment = parse(nano)
    state.save_manifest(deployment)
    state.save_object(deployment)
    made = datetime.fromisoformat(nano["metadata"]["creationTimestamp"]).timestamp()
    os.utime(state.directory / "manifest.json", (made, made))
    with (state.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        yield root
    shutil.rmtree(root)


def without_ages(text: str) -> str:
    """Replace ages: the two commands run one after the other, so ages may differ by some seconds."""
    ages = r"\b\d+[smh](?=\s)|(?<=no answer for )\d+ s|\d+ min \d+ s"
    return re.sub(ages, "AGE", re.sub(" +", " ", text))


@pytest.mark.parametrize(
    "words", [["status"], ["status", "nano", "-o", "wide"], ["why"], ["why", "-o", "json"], ["kernels"]]
)
def test_word_for_word_as_on_this_machine(dsv4: Dsv4, same_here: Path, words: list[str]) -> None:
    there = dsv4(*words)
    here = subprocess.run(
        [str(PROGRAMS / "dsv4"), *words, "--state-dir", str(same_here)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "TZ": "UTC"},
    )
    assert (there.returncode, there.stderr) == (here.returncode, here.stderr) == (0, "")
    assert without_ages(there.stdout) == without_ages(here.stdout)
    told = {"status": "no answer for", "why": "EngineCoreDied", "kernels": "spec.engine.kernels: default"}
    assert told[words[0]] in there.stdout


def test_documents_equal_the_output_of_kubectl(dsv4: Dsv4, nano: dict[str, Any]) -> None:
    assert json.loads(dsv4("status", "-o", "json").stdout) == nano
    assert yaml.safe_load(dsv4("status", "nano", "-o", "yaml").stdout) == nano


def test_a_deployment_without_an_operator_is_reported_as_not_processed(
    cluster: Cluster, dsv4: Dsv4, namespace: str
) -> None:
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    told = "No operator has processed it yet; does dsv4-operator run in this cluster?"
    assert told in dsv4("status").stdout
    assert told in dsv4("why", "nano").stdout


def test_several_and_all_namespaces(cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any]) -> None:
    cluster.apply({**NANO, "metadata": {"name": "other", "namespace": namespace}})
    rows = [line.split()[:3] for line in dsv4("status").stdout.splitlines()]
    assert rows == [["NAME", "READY", "PHASE"], ["nano", "1/1", "Serving"], ["other", "0/1", "Pending"]]
    rows = [line.split()[:3] for line in dsv4("status", "-A", place=False).stdout.splitlines()]
    assert rows[0] == ["NAMESPACE", "NAME", "READY"]
    assert [namespace, "nano", "1/1"] in rows
    ended = dsv4("why")
    assert (ended.returncode, ended.stderr) == (2, "error: which deployment? Give its name; there is nano, other\n")


def test_watching(cluster: Cluster, namespace: str, nano: dict[str, Any]) -> None:
    with running(cluster, "status", "nano", "-w", "-n", namespace) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("NAME")
        assert process.stdout.readline().split()[2] == "Serving"
        change = json.dumps({"status": {"phase": "Recovering"}})
        cluster.kubectl("patch", "dsv4", "nano", "-n", namespace, "--subresource=status", "--type=merge", "-p", change)
        while not (line := process.stdout.readline()).startswith("nano"):
            pass
        assert line.split()[2] == "Recovering"


def test_restart_suspend_and_resume(cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any]) -> None:
    def now() -> dict[str, Any]:
        found: dict[str, Any] = cluster.get("dsv4", "nano", "-n", namespace)
        return found

    hint = f"see `kubectl dsv4 status nano -n {namespace} --watch`\n"
    assert dsv4("restart").stdout == f"nano is being formed anew; {hint}"
    asked = datetime.fromisoformat(now()["metadata"]["annotations"]["dsv4.dev/restart-at"])
    assert abs(asked.timestamp() - time.time()) < SECONDS
    assert now()["metadata"]["generation"] == nano["metadata"]["generation"], "the specification stays"
    assert dsv4("suspend", "nano").stdout == f"nano is stopping; its weights stay; {hint}"
    assert now()["spec"]["suspend"] is True
    assert dsv4("suspend").stdout == "nano is suspended already\n"
    refused = dsv4("restart")
    assert refused.returncode == 2
    assert refused.stderr == f"error: nano is suspended; `kubectl dsv4 resume nano -n {namespace}` starts it\n"
    assert dsv4("resume").stdout == f"nano is starting; {hint}"
    assert now()["spec"]["suspend"] is False
    assert dsv4("resume").stdout == "nano is not suspended\n"


def test_refusals(dsv4: Dsv4, namespace: str, nano: dict[str, Any], tmp_path: Path) -> None:
    def said(*words: str, **more: Any) -> tuple[int, str]:
        done = dsv4(*words, **more)
        assert done.stdout == ""
        return done.returncode, done.stderr.removeprefix("error: ").removesuffix("\n")

    assert said("status", "nanu") == (2, f"there is no deployment 'nanu' in namespace {namespace}; there is nano")
    code, line = said("status", "--context", "nope")
    assert code == 1
    assert line.startswith("kubectl get: ")
    assert "nope" in line
    code, line = said("why", "--kubeconfig", str(tmp_path / "none"))
    assert code == 1
    assert line.startswith("kubectl get: ")
    assert "\n" not in line
    code, line = said("why", KUBECONFIG=str(_nobody(tmp_path)))
    assert code == 1
    assert line.startswith("kubectl get: ")
    assert "\n" not in line


def _nobody(directory: Path) -> Path:
    """Return a kubeconfig whose server does not exist."""
    file = directory / "config"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
    return file


def test_the_api_servers_refusal_is_the_error_of_the_command(
    cluster: Cluster, namespace: str, nano: dict[str, Any]
) -> None:
    environment = {**cluster.environment, "PATH": f"{PROGRAMS}:{cluster.environment['PATH']}"}
    # kubectl's option for impersonation is not supported; a context of the user can contain it.
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"]["as"] = "somebody"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        command = [str(PROGRAMS / "dsv4"), "suspend", "nano", "--kubeconfig", file.name, "-n", namespace]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr == (
        'error: kubectl get: Error from server (Forbidden): dsv4deployments.dsv4.dev "nano" is forbidden: User '
        f'"somebody" cannot get resource "dsv4deployments" in API group "dsv4.dev" in the namespace "{namespace}"\n'
    )


def event(nano: dict[str, Any], name: str, ago: float, **more: object) -> dict[str, Any]:
    metadata = nano["metadata"]
    about = {"apiVersion": "dsv4.dev/v1alpha1", "kind": "DSV4Deployment", "uid": metadata["uid"]}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "eventTime": moment(ago).replace("Z", ".000000Z"),
        "reportingController": "dsv4.dev/operator",
        "reportingInstance": "test",
        "action": "Reconcile",
        "regarding": {**about, "name": metadata["name"], "namespace": metadata["namespace"]},
        "type": "Normal",
        **more,
    }


def test_logs_of_the_loop_are_the_events_of_the_deployment(cluster: Cluster, dsv4: Dsv4, nano: dict[str, Any]) -> None:
    nothing = dsv4("logs", "-c", "loop")
    assert nothing.returncode == 0
    assert nothing.stderr.startswith("there are no events of nano; a cluster keeps them for an hour")
    series = {"count": 3, "lastObservedTime": moment(10).replace("Z", ".000000Z")}
    late = event(nano, "late", 300, reason="RestartBackoff", note="it waits", type="Warning", series=series)
    cluster.kubectl(
        "create", "-f", "-", input=[late, event(nano, "early", 200, reason="GroupForming", note="it forms")]
    )
    lines = dsv4("logs", "nano", "-c", "loop").stdout.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "Normal GroupForming: it forms",
        "Warning RestartBackoff: it waits (3 times)",
    ]
    assert lines[0].startswith(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(NOW - 200)))


def test_the_plan_is_the_operators(cluster: Cluster, dsv4: Dsv4, namespace: str) -> None:
    topology = {
        **NANO["spec"]["topology"],
        "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
    }
    manifest = {**NANO, "metadata": {"name": "nano", "namespace": namespace}}
    cluster.apply({**manifest, "spec": {**NANO["spec"], "topology": topology}})
    nodes = {node["metadata"]["name"] for node in cluster.get("nodes", "-l", "type=kwok")["items"]}
    done = dsv4("plan", "nano")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nano: Nano on 2 × CPU, tensor parallel 2" in done.stdout
    assert "\nIt fits; rank 0" in done.stdout
    members = [line.split() for line in done.stdout.splitlines() if re.match(r"0 +[01] ", line)]
    assert [member[2] for member in members] == ["Head", "Worker"]
    assert {member[3] for member in members} <= nodes
    refused = dsv4("plan", "nano", "--what-if", "topology.nodeSelector={type: none}")
    assert refused.returncode == 2
    assert "has not the label type=none" in refused.stderr
    file = dsv4("plan", str(ROOT / "examples" / "flash-2x-spark.yaml"), "--machine", "gb10-64gb")
    assert file.returncode == 2
    assert "It does not fit" in file.stdout


def test_evidence(cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any], tmp_path: Path) -> None:
    def about(name: str, **more: object) -> dict[str, Any]:
        return {"name": name, "namespace": namespace, "labels": names.labels("nano", **more)}

    cluster.kubectl("create", "-f", "-", input=[
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about("nano-0-i2", group=0), "data": {"plan.json": "{}"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": about("nano-0-i2"), "stringData": {"token": "t0ken"}},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": about("nano-0-i2-r0", component=names.MEMBER, group=0, incarnation=2, rank=0),
            "spec": {"containers": [{"name": "agent", "image": "none"}], "nodeSelector": {"is": "nowhere"}},
        },
        event(nano, "one", 100, reason="GroupForming", note="it forms"),
    ])  # fmt: skip
    target = tmp_path / "out.tar.gz"
    done = dsv4("evidence", "nano", "-o", str(target))
    assert done.returncode == 0, done.stderr
    with tarfile.open(target) as archive:
        found = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    assert set(found) == {
        f"nano/{name}" for name in ("object.json", "events.json", "pods.json", "configmaps/nano-0-i2/plan.json")
    }, "the pod never had a log"
    assert json.loads(found["nano/object.json"]) == nano
    assert "it forms" in found["nano/events.json"]
    assert json.loads(found["nano/pods.json"])[0]["metadata"]["name"] == "nano-0-i2-r0"
    assert "t0ken" not in "".join(found.values())
    assert "dDBrZW4" not in "".join(found.values()), "nor in base64"


def test_a_port_forward_without_a_target_is_an_error(
    cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any]
) -> None:
    done = dsv4("chat", "nano", "Hi")
    assert done.returncode == 1
    assert done.stderr == (
        'error: kubectl port-forward service/nano: Error from server (NotFound): services "nano" not found\n'
    )
    spec = {"selector": {"is": "nowhere"}, "ports": [{"name": "http", "port": 8000}]}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "nano", "namespace": namespace}, "spec": spec}
    )
    begun = time.monotonic()
    done = dsv4("chat", "nano", "Hi")
    assert done.returncode == 1
    assert done.stderr.startswith("error: kubectl port-forward service/nano: ")
    assert time.monotonic() - begun < SECONDS


def test_kubectl_completes_names(cluster: Cluster, namespace: str, nano: dict[str, Any]) -> None:
    def offered(*words: str) -> list[str]:
        environment = {**cluster.environment, "PATH": f"{PROGRAMS}:{cluster.environment['PATH']}"}
        done = subprocess.run(
            ["kubectl", "__complete", "dsv4", *words],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
            env=environment,
        )
        return done.stdout.splitlines()

    assert offered("status", "-n", namespace, "na") == ["nano", ":4"]
    assert offered("logs", "-n", namespace, "x") == [":4"]
    assert offered("sus") == ["suspend", ":4"]
    assert offered("plan", "-n", namespace, "") == ["nano", ":0"]
