"""`kubectl dsv4` through the real kubectl, against the real API server and kubelets.

The members' pods are stand-ins that answer HTTP, or say one line and end.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from clusterkit.archive import PROBE
from clusterkit.client import Cluster
from clusterkit.waiting import until

from dsv4_operator.api import parse
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.builders import names

ROOT = Path(__file__).parents[2]
NANO = yaml.safe_load((ROOT / "examples" / "nano.yaml").read_text())
PROGRAMS = Path(sys.executable).parent
SECONDS = 120

pytestmark = pytest.mark.usefixtures("definition")

NOW = time.time()


def moment(ago: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - ago))


FAILURE = {
    "time": moment(100),
    "cause": "EngineCoreDied",
    "incarnation": 2,
    "culpritRank": 1,
    "culpritNode": "spark2",
    "message": "killed by SIGKILL",
    "detectedBy": "exit",
    "level": 1,
    "recoverSeconds": 12.34,
    "evidence": "/var/lib/dsv4/evidence/x/nano/g0/2-g1-x",
}
STATUS = {
    "phase": "Serving",
    "observedGeneration": 1,
    "replicas": 1,
    "readyReplicas": 1,
    "endpoint": "http://nano.x.svc:8000/v1",
    "rayDashboard": "http://nano-0-head.x.svc:8265",
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "observedGeneration": 1,
            "lastTransitionTime": moment(60),
            "reason": "AllGroupsReady",
            "message": "all groups answer",
        }
    ],
    "groups": [
        {
            "index": 0,
            "phase": "Serving",
            "incarnation": 2,
            "fencedBelow": 2,
            "engineGeneration": 2,
            "readyTime": moment(60),
            "restarts": [moment(100)],
            "totalRestarts": 3,
            "kvCache": {"tokens": 13_809, "concurrency": 13.486, "plannedTokens": 14_000},
            "lastFailure": FAILURE,
            "history": [{**FAILURE, "time": moment(500), "cause": "RayletDied", "level": 2}, FAILURE],
            "members": [
                {"rank": 0, "role": "Head", "node": "spark1", "address": "nano-0-i2-r0", "phase": "Serving"},
                {
                    "rank": 1,
                    "role": "Worker",
                    "node": "spark2",
                    "address": "nano-0-i2-r1",
                    "phase": "Serving",
                    "message": "a long way from here",
                    "silentSince": moment(70),
                },
            ],
        }
    ],
}

Dsv4 = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dsv4(cluster: Cluster, namespace: str) -> Dsv4:
    """Runs `kubectl dsv4` as a user does; in the test's namespace unless it says another."""
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


@contextmanager
def running(cluster: Cluster, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A `kubectl dsv4` that goes on; it is killed if it has not ended afterwards."""
    environment = {**cluster.environment, "PATH": f"{PROGRAMS}:{cluster.environment['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["kubectl", "dsv4", *words], text=True, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def nano(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """The nano deployment with a status, as the cluster has it."""
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    change = json.dumps({"status": STATUS})
    cluster.kubectl("patch", "dsv4", "nano", "-n", namespace, "--subresource=status", "--type=merge", "-p", change)
    found: dict[str, Any] = cluster.get("dsv4", "nano", "-n", namespace)
    assert found["status"]["groups"][0]["members"] == STATUS["groups"][0]["members"]
    return found


@pytest.fixture
def same_here(nano: dict[str, Any]) -> Iterator[Path]:
    """A state directory of this machine in which the same object runs."""
    # Not tmp_path: its names are longer than a state directory's may be.
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
    """The two commands run one after the other, so ages may differ by some seconds."""
    return re.sub(r"\b\d+[smh](?=\s)|(?<=no answer for )\d+ s", "AGE", re.sub(" +", " ", text))


@pytest.mark.parametrize("words", [["status"], ["status", "nano", "-o", "wide"], ["why"], ["why", "-o", "json"]])
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
    told = "no answer for" if words[0] == "status" else "EngineCoreDied"
    assert told in there.stdout


def test_a_document_is_what_kubectl_prints(dsv4: Dsv4, nano: dict[str, Any]) -> None:
    assert json.loads(dsv4("status", "-o", "json").stdout) == nano
    assert yaml.safe_load(dsv4("status", "nano", "-o", "yaml").stdout) == nano


def test_nobody_looked_yet(cluster: Cluster, dsv4: Dsv4, namespace: str) -> None:
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    told = "No operator has looked at it yet; does dsv4-operator run in this cluster?"
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
    """A kubeconfig that leads nowhere."""
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


def test_who_may_not(cluster: Cluster, namespace: str, nano: dict[str, Any]) -> None:
    environment = {**cluster.environment, "PATH": f"{PROGRAMS}:{cluster.environment['PATH']}"}
    # kubectl's own way to be somebody else is not among the options; a context of the user's has it.
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


def test_what_the_operator_said(cluster: Cluster, dsv4: Dsv4, nano: dict[str, Any]) -> None:
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
        {"apiVersion": "v1", "kind": "Secret", "metadata": about("nano-token"), "stringData": {"token": "t0ken"}},
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


def test_a_way_to_nowhere(cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any]) -> None:
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


def member(nano: dict[str, Any], incarnation: int, *probe: str) -> dict[str, Any]:
    """A pod in rank 0's place, which runs the probe (go/kubernetes/probe)."""
    labels = names.labels("nano", component=names.MEMBER, group=0, incarnation=incarnation, rank=0)
    container = {"name": "agent", "image": PROBE, "imagePullPolicy": "Never", "args": [*probe]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.member_name("nano", 0, incarnation, 0),
            "namespace": nano["metadata"]["namespace"],
            "labels": labels,
        },
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]},
    }


def service(nano: dict[str, Any], name: str, port: int, incarnation: int) -> dict[str, Any]:
    spec = {
        "selector": names.labels("nano", component=names.MEMBER, group=0, incarnation=incarnation, rank=0),
        "ports": [{"name": "http", "port": port, "targetPort": 8265}],
    }
    about = {"name": name, "namespace": nano["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec}


def ready(cluster: Cluster, pod: dict[str, Any]) -> None:
    place = ("-n", pod["metadata"]["namespace"])
    name = f"pod/{pod['metadata']['name']}"
    cluster.kubectl("wait", "--for=condition=Ready", name, *place, "--timeout=120s", seconds=130)


def answer(url: str) -> str:
    return httpx.get(url, timeout=10, trust_env=False).text.split()[0]


def test_ways_into_pods(cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any]) -> None:
    first, second = (member(nano, number, "serve", ":8265") for number in (2, 3))
    cluster.apply(first, service(nano, "nano-0-head", 8265, 2), service(nano, "nano", 8000, 2))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "nano-token", "namespace": namespace}}
    cluster.kubectl("create", "-f", "-", input=[{**secret, "stringData": {"token": "t0ken"}}])
    ready(cluster, first)
    # What answers is no engine.
    assert dsv4("chat", "nano", "Hi").stderr == (
        f"error: the answer broke off before its end; see `kubectl dsv4 why nano -n {namespace}`\n"
    )
    with running(cluster, "dashboard", "-n", namespace) as process:
        assert process.stdout
        lines = [process.stdout.readline().split() for _ in range(2)]
        assert [line[0] for line in lines] == ["dashboard", "token"]
        url = lines[0][1]
        assert lines[1][1] == "t0ken"
        assert answer(url) == first["metadata"]["name"]
        # Another incarnation: its head answers at the same address.
        cluster.kubectl("delete", "pod", first["metadata"]["name"], "-n", namespace)
        cluster.apply(second, service(nano, "nano-0-head", 8265, 3))
        ready(cluster, second)

        def moved() -> bool:
            try:
                return answer(url) == second["metadata"]["name"]
            except httpx.HTTPError:
                return False

        until("the dashboard of the new head", moved, seconds=SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        with pytest.raises(httpx.ConnectError):
            answer(url)


def test_logs_of_pods(cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any], tmp_path: Path) -> None:
    said = "probe serve ADDRESS | get URL | lookup NAME"

    def ended(pod: dict[str, Any]) -> None:
        cluster.kubectl(
            *("wait", "--for=jsonpath={.status.phase}=Failed", f"pod/{pod['metadata']['name']}", "-n", namespace),
            *("--timeout=120s",),
            seconds=130,
        )

    first, second = (member(nano, number, "nothing") for number in (2, 3))
    cluster.apply(first)
    ended(first)
    done = dsv4("logs", "nano")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"[0 agent] {said}\n", "")
    target = tmp_path / "out.tar.gz"
    assert dsv4("evidence", "-o", str(target)).returncode == 0
    with tarfile.open(target) as archive:
        kept = archive.extractfile("nano/pods/nano-0-i2-r0/agent.log")
        assert kept
        assert kept.read().decode() == f"{said}\n"
    with running(cluster, "logs", "-f", "-c", "agent", "-o", "json", "-n", namespace) as process:
        assert process.stdout
        line = json.dumps({"rank": 0, "component": "agent", "line": said}) + "\n"
        assert process.stdout.readline() == line
        cluster.kubectl("delete", "pod", first["metadata"]["name"], "-n", namespace)
        cluster.apply(second)
        assert process.stdout.readline() == line, "of the next incarnation"
        ended(second)
        cluster.kubectl("delete", "pod,dsv4", "--all", "-n", namespace)
        assert process.wait(SECONDS) == 0


GATEWAY = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        known = self.headers.get("Authorization") == "Bearer k1"
        self.send_response(200 if known else 401)
        self.end_headers()
        event = b'data: {"choices": [{"delta": {"content": "Hello."}, "finish_reason": "stop"}]}'
        self.wfile.write(event + b"\\n\\n" + b"data: [DONE]" + b"\\n\\n" if known else b"no key")

HTTPServer(("", 8000), Handler).serve_forever()
"""
PLACE = FAILURE["evidence"]
HEAD = f"""
mkdir -p /var/lib/dsv4/m0 {PLACE}
echo '{{"failure": 1}}' > {PLACE}/evidence.json
echo joined > /var/lib/dsv4/m0/ray.log
echo one > /var/lib/dsv4/m0/vllm.log
echo born
until [ -e /var/lib/dsv4/more ]; do sleep 0.2; done
echo two >> /var/lib/dsv4/m0/vllm.log
exec sleep 600
"""


def test_a_chat_and_files_in_pods(
    cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any], operator_image: str, tmp_path: Path
) -> None:
    head, gateway = member(nano, 2), member(nano, 2)
    container = {"name": "agent", "image": operator_image, "imagePullPolicy": "Never"}
    mount = {"name": "storage", "mountPath": "/var/lib/dsv4"}
    command = ["sh", "-c", HEAD, "agent", "--directory=/var/lib/dsv4/m0"]
    head["spec"]["containers"] = [{**container, "command": command, "volumeMounts": [mount]}]
    head["spec"]["volumes"] = [{"name": "storage", "emptyDir": {}}]
    gateway["metadata"] |= {
        "name": "nano-0-gateway-x",
        "labels": names.labels("nano", component=names.GATEWAY, group=0),
    }
    probe = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}
    gateway["spec"]["containers"] = [{**container, "command": ["python3", "-uc", GATEWAY], "readinessProbe": probe}]
    front = service(nano, "nano", 8000, 2)
    front["spec"] = {"selector": gateway["metadata"]["labels"], "ports": [{"port": 8000}]}
    keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": namespace}}
    cluster.apply(head, gateway, front, {**keys, "stringData": {"keys": "# a remark\nk1\n"}})
    ready(cluster, gateway)
    ready(cluster, head)
    assert dsv4("chat", "nano", "Hi").stderr.endswith("/v1 answered 401: no key\n")
    change = '{"spec": {"gateway": {"apiKeysSecret": "keys"}}}'
    cluster.kubectl("patch", "dsv4", "nano", "-n", namespace, "--type=merge", "-p", change)
    done = dsv4("chat", "nano", "Hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello.\n", "")

    done = dsv4("logs", "nano")
    assert (done.stdout, done.stderr) == ("[0 agent] born\n[0 ray] joined\n[0 vllm] one\n", "")
    with running(cluster, "logs", "nano", "0", "-c", "vllm", "-f", "-n", namespace) as process:
        assert process.stdout
        assert process.stdout.readline() == "one\n"
        cluster.kubectl("exec", "nano-0-i2-r0", "-n", namespace, "--", "touch", "/var/lib/dsv4/more")
        assert process.stdout.readline() == "two\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130

    target = tmp_path / "out.tar.gz"
    assert dsv4("evidence", "-o", str(target)).returncode == 0
    with tarfile.open(target) as archive:
        found = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    assert found["nano/evidence/0-2-g1-x.json"] == '{"failure": 1}\n'
    assert found["nano/pods/nano-0-i2-r0/vllm.log"] == "one\ntwo\n"
    assert "nano/pods/nano-0-gateway-x.log" in found
    assert "nano/missing.txt" not in found
