"""`kubectl dsv4` and pods: connections to them, their logs and files.

The members' pods are stand-ins that respond to HTTP, or print one line and end.
"""

import base64
import json
import signal
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_world import FAILURE, SECONDS, Dsv4, answer, member, ready, running, service
from clusterkit.client import Cluster
from clusterkit.waiting import until

from dsv4_operator.builders import names

pytestmark = pytest.mark.usefixtures("definition")


def test_chat_and_dashboard_connect_to_pods(cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any]) -> None:
    first, second = (member(nano, number, "serve", ":8265") for number in (2, 3))
    cluster.apply(first, service(nano, "nano-0-head", 8265, 2), service(nano, "nano", 8000, 2))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "nano-0-i2", "namespace": namespace}}
    cluster.kubectl("create", "-f", "-", input=[{**secret, "stringData": {"token": "t0ken"}}])
    ready(cluster, first)
    # The server in the pod is no engine.
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
        # Another incarnation: its head responds at the same address.
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
        kept = archive.extractfile("nano/pods/nano-0-i2-r0.log")
        assert kept
        assert kept.read().decode() == f"{said}\n"
    with running(cluster, "logs", "-f", "-c", "agent", "-o", "json", "-n", namespace) as process:
        assert process.stdout
        line = json.dumps({"rank": 0, "component": "agent", "line": said}) + "\n"
        assert process.stdout.readline() == line
        assert process.wait(SECONDS) == 0, "its pod has ended"
    cluster.kubectl("delete", "pod", first["metadata"]["name"], "-n", namespace)
    cluster.apply(second)
    ended(second)
    assert dsv4("logs", "nano", "--since", "1h").stdout == f"[0 agent] {said}\n", "of the next incarnation"
    assert dsv4("logs", "nano", "1").returncode == 2


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
mkdir -p {PLACE}
echo '{{"failure": 1}}' > {PLACE}/evidence.json
echo born
echo '[ray rank 0] joined'
echo '[vllm rank 0] one'
until [ -e /var/lib/dsv4/more ]; do sleep 0.2; done
echo '[vllm rank 0] two'
exec sleep 600
"""


def test_a_chat_and_files_in_pods(
    cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any], operator_image: str, tmp_path: Path
) -> None:
    head, gateway = member(nano, 2), member(nano, 2)
    container = {"name": "agent", "image": operator_image, "imagePullPolicy": "Never"}
    mount = {"name": "storage", "mountPath": "/var/lib/dsv4"}
    command = ["sh", "-c", HEAD]
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
    change = '{"spec": {"gateway": {"apiKeys": {"secretKeyRef": {"name": "keys", "key": "keys"}}}}}'
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
    assert found["nano/pods/nano-0-i2-r0.log"] == "born\n[ray rank 0] joined\n[vllm rank 0] one\n[vllm rank 0] two\n"
    assert "nano/pods/nano-0-gateway-x.log" in found
    assert "nano/missing.txt" not in found


CANARY, KEY = "hf_" + "zqCanary" * 5, "canary-of-a-secret"
AGENT = """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer " + open("/etc/dsv4/token/token").read()
        self.send_response(200 if known and self.path == "/v1/status" else 401)
        self.end_headers()
        self.wfile.write(b'{"phase": "Serving", "rank": 0, "note": "of the agent"}' if known else b"{}")

print("born", flush=True)
print("a line with hf_" + "zqCanary" * 5, flush=True)
HTTPServer((os.environ["DSV4_POD_IP"], 8090), Handler).serve_forever()
"""


def test_a_must_gather_archive(
    cluster: Cluster, dsv4: Dsv4, namespace: str, nano: dict[str, Any], operator_image: str, tmp_path: Path
) -> None:
    about = {"namespace": namespace, "labels": names.labels("nano", group=0)}
    plan = {"members": [{"address": "nano-0-i2-r0", "ports": {"agent": 8090}}], "rayTokenFile": names.TOKEN_FILE}
    head = member(nano, 2)
    head["metadata"]["annotations"] = {"example.com/note": f"download with {CANARY}"}
    mounts = {"plan": names.PLAN_DIRECTORY, "token": names.TOKEN_DIRECTORY}
    head["spec"]["containers"] = [
        {
            "name": "agent",
            "image": operator_image,
            "imagePullPolicy": "Never",
            "command": ["python3", "-uc", AGENT],
            "env": [{"name": "DSV4_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "readinessProbe": {"tcpSocket": {"port": 8090}, "periodSeconds": 1},
            "volumeMounts": [{"name": name, "mountPath": path, "readOnly": True} for name, path in mounts.items()],
        }
    ]
    head["spec"]["volumes"] = [
        {"name": "plan", "configMap": {"name": "nano-0-i2"}},
        {"name": "token", "secret": {"secretName": "nano-0-i2"}},
    ]
    front = service(nano, "nano", 8000, 2)
    front["metadata"]["labels"] = about["labels"]
    cluster.kubectl("create", "-f", "-", input=[
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {**about, "name": "nano-0-i2"},
            "data": {names.PLAN_FILE: json.dumps(plan)},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**about, "name": "nano-0-i2"},
            "stringData": {names.TOKEN_ENTRY: KEY},
        },
    ])  # fmt: skip
    cluster.apply(head, front)
    ready(cluster, head)
    target = tmp_path / "gather.tar.gz"
    done = dsv4("report", "nano", "--must-gather", str(target))
    assert done.returncode == 0, done.stderr
    assert "names of hosts and addresses" in done.stderr
    with tarfile.open(target) as archive:
        found = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    node = cluster.get("pod", "nano-0-i2-r0", "-n", namespace)["spec"]["nodeName"]
    assert {
        "report.html",
        "report.json",
        "object.json",
        "events.json",
        "pods.json",
        "configmaps/nano-0-i2/plan.json",
        "objects/services.json",
        "objects/networkpolicies.json",
        f"nodes/{node}.json",
        "pods/nano-0-i2-r0.log",
        "agents/nano-0-i2-r0.json",
    } <= {name.removeprefix("nano/") for name in found}
    assert json.loads(found["nano/agents/nano-0-i2-r0.json"])["note"] == "of the agent"
    assert json.loads(found["nano/objects/services.json"])[0]["metadata"]["name"] == "nano"
    assert found["nano/pods/nano-0-i2-r0.log"].startswith("born\n[hidden: ")
    # The directory of the evidence does not exist in this pod: that is noted and is no error.
    assert "evidence/0-2-g1-x.json" in found["nano/missing.txt"]
    everything = "".join(found.values())
    assert KEY not in everything
    assert base64.b64encode(KEY.encode()).decode() not in everything
    assert CANARY not in everything
    assert "download with" not in everything, "the whole value is hidden"
    report = json.loads(found["nano/report.json"])
    assert node not in found["nano/report.html"] + json.dumps(report), "the report itself is anonymous"
