"""Commands against a cluster, where a real one would need kubelets: ways into pods, logs, and how they end.

What needs an API server only is tested with a real one, in tests/cluster/test_cli.py.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.builders import names
from dsv4_operator.cli import dashboard, main, status, where
from dsv4_operator.cli.cluster import forward, logs
from dsv4_operator.cli.cluster.follow import Follower
from dsv4_operator.cli.cluster.forward import Forward
from dsv4_operator.cli.cluster.kubectl import Kubectl, KubectlError, first_line
from dsv4_operator.cli.cluster.pods import belongs
from dsv4_operator.cli.cluster.source import Cluster
from dsv4_operator.cli.errors import CommandError
from dsv4_operator.cli.log_lines import Component, Request
from dsv4_operator.cli.output import TableFormat
from dsv4_operator.cli.where import Where

STAND_IN = Path(__file__).with_name("kubectl_stand_in.py")
RESOURCE = "dsv4deployments.dsv4.dev"
SECONDS = 30.0


class World:
    """What the stand-in for kubectl knows; changes take effect at once."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "world.json"
        self.known: dict[str, Any] = {"objects": {}, "logs": {}, "files": {}, "forwards": {}}
        self.write()

    def write(self) -> None:
        partial = self.file.with_suffix(".part")
        partial.write_text(json.dumps(self.known))
        partial.replace(self.file)

    def set(self, key: str, **values: Any) -> None:
        self.known.setdefault(key, {}).update(values)
        self.write()

    def drop(self, key: str, *gone: str) -> None:
        for each in gone:
            del self.known[key][each]
        self.write()

    def calls(self, verb: str) -> list[tuple[int, list[str]]]:
        """Process and words of every call so far."""
        calls = self.file.parent / "calls"
        lines = (line.split() for line in (calls.read_text().splitlines() if calls.exists() else ()))
        return [(int(number), words) for number, *words in lines if words[0] == verb]


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


class Server:
    """A server of HTTP that answers every request with the same bytes."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []
        self.answer = b"fine"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append(dict(self.headers))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(outer.answer)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.fixture
def deployed(world: World, make: Any) -> Callable[..., dict[str, Any]]:
    """Puts a deployment into the cluster."""

    def deploy(status: Any = None, **spec: Any) -> dict[str, Any]:
        document: dict[str, Any] = make.deployment(status or make.status()).to_dict()
        document["metadata"] |= {"creationTimestamp": "2026-09-21T14:00:00Z", "uid": "u1", "resourceVersion": "5"}
        document["spec"] |= spec
        world.set("objects", **{RESOURCE: [document]})
        return document

    return deploy


def pod(rank: int, incarnation: int = 1, state: str = "running") -> dict[str, Any]:
    labels = names.labels("nano", component=names.MEMBER, group=0, incarnation=incarnation, rank=rank)
    container = {"name": "agent", "args": [f"--rank={rank}", f"--directory=/run/dsv4/i{incarnation}/m{rank}"]}
    return {
        "metadata": {"name": names.member_name("nano", 0, incarnation, rank), "labels": labels},
        "spec": {"containers": [container]},
        "status": {"containerStatuses": [{"name": "agent", "state": {state: {}}}]},
    }


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def get(url: str) -> bytes:
    import httpx

    return httpx.get(url, timeout=5, trust_env=False).content


# Which place is meant.


@pytest.mark.parametrize(
    ("program", "options", "kubernetes"),
    [
        ("dsv4", {}, False),
        ("kubectl-dsv4", {}, True),
        ("dsv4", {"cluster": True}, True),
        ("dsv4", {"context": "c"}, True),
        ("dsv4", {"kubeconfig": Path("f")}, True),
        ("dsv4", {"namespace": "n"}, True),
    ],
)
def test_which_place_is_meant(
    program: str, options: dict[str, Any], kubernetes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{program}"])
    assert Where(**options).kubernetes is kubernetes


def test_one_place_at_a_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.run(["why", "--state-dir", "/x", "-n", "here"]) == 2
    assert "--state-dir is about this machine, and --namespace about a cluster" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["kubectl-dsv4"])
    assert main.run(["up", "nano.yaml"]) == 2
    assert main.run(["down", "nano"]) == 2
    err = capsys.readouterr().err
    assert "on a cluster: kubectl apply -f FILE" in err
    assert "on a cluster: kubectl delete dsv4 nano" in err


def test_hints_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("my context", None, "prod")
    assert cluster.command("why", "nano") == "dsv4 why nano '--context=my context' -n prod"
    assert Cluster(None, None, None).command("status") == "dsv4 status --cluster"
    monkeypatch.setattr(sys, "argv", [where.PLUGIN])
    assert Cluster(None, None, None).command("status") == "kubectl dsv4 status"


# kubectl itself.


def test_there_is_no_kubectl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main.run(["status", "--cluster"]) == 2
    assert capsys.readouterr().err == "error: kubectl is not on the PATH; install it, or add its directory to PATH\n"


def test_kubectl_never_ends(world: World) -> None:
    world.known["slow"] = ["get"]
    world.write()
    with pytest.raises(KubectlError, match=r"kubectl get: no answer within 1 s; is the cluster reachable\?"):
        Kubectl(None, None, None).run("get", "pods", seconds=1)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("error: x y\nmore", "x y"),
        ('E1121 19:30:45.1 1 memcache.go:265] "Unhandled"\nThe connection was refused', "The connection was refused"),
        ("Warning: old\n\nError from server (Forbidden): no", "Error from server (Forbidden): no"),
        ("Warning: old", "Warning: old"),
        ("", "it said nothing"),
    ],
)
def test_the_line_that_says_what_went_wrong(said: str, line: str) -> None:
    assert first_line(said) == line


def test_dsv4_is_not_installed_there(world: World) -> None:
    world.set("errors", get='error: the server doesn\'t have a resource type "dsv4deployments"')
    with pytest.raises(KubectlError, match=r'type "dsv4deployments"; is dsv4 installed in this cluster\?'):
        Cluster(None, None, "default").every()


def test_names_are_never_options(world: World, deployed: Callable[..., Any]) -> None:
    deployed()
    for name in ("--all-namespaces", "pods/x", "../x"):
        with pytest.raises(CommandError, match=r"there is no deployment .* in namespace default; there is nano"):
            Cluster(None, None, "default").one(name)
    assert not [words for _, words in world.calls("get") if "--all-namespaces" in words]


# Ways into pods.


def test_a_way_is_opened_again_on_the_same_port(world: World, server: Server) -> None:
    world.set("forwards", **{"service/nano": server.port})
    with Forward(Kubectl(None, None, "prod"), "nano", 8000) as way:
        url = way.url()
        assert get(url) == b"fine"
        assert way.url() == url
        [(first, words)] = world.calls("port-forward")
        assert words[1:3] == ["--namespace=prod", "--address=127.0.0.1"]
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: gone(first))
        assert way.url() == url
        assert get(url) == b"fine"
        second = world.calls("port-forward")[-1][0]
        assert os.getpgid(second) != os.getpgid(0), "a Ctrl-C on the terminal is not meant for it"
    assert gone(second)


def test_a_way_that_cannot_be_opened(world: World) -> None:
    way = Forward(Kubectl(None, None, None), "nano", 8000)
    with way, pytest.raises(KubectlError, match="kubectl port-forward service/nano: timed out waiting for the cond"):
        way.url()


def test_opening_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "OPEN_SECONDS", 0.5)
    world.known["slow"] = ["port-forward"]
    world.write()
    way = Forward(Kubectl(None, None, None), "nano", 8000)
    with way, pytest.raises(KubectlError, match="no connection within 0 s"):
        way.url()
    assert gone(world.calls("port-forward")[0][0])


def test_a_way_ends_with_a_killed_command(world: World, server: Server) -> None:
    world.set("forwards", **{"service/nano": server.port})
    code = (
        "import time; from dsv4_operator.cli.cluster.forward import Forward;"
        "from dsv4_operator.cli.cluster.kubectl import Kubectl;"
        "print(Forward(Kubectl(None, None, None), 'nano', 8000).url(), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    [(pid, _)] = world.calls("port-forward")
    process.kill()
    process.communicate()
    wait_for(lambda: gone(pid))


ANSWER = b'data: {"choices": [{"delta": {"content": "Hello."}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def secret(name: str, key: str, text: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": {key: base64.b64encode(text.encode()).decode()}}


def test_chat(world: World, server: Server, deployed: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    deployed(gateway={"apiKeysSecret": "keys"})
    world.set("objects", secrets=[secret("keys", "keys", "# first\n\nk1\nk2\n")])
    world.set("forwards", **{"service/nano": server.port})
    server.answer = ANSWER
    assert main.run(["chat", "nano", "Hi", "-n", "default"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    assert server.seen[0]["Authorization"] == "Bearer k1"
    [(pid, words)] = world.calls("port-forward")
    assert words[-2:] == ["service/nano", ":8000"]
    assert gone(pid)


def test_chat_without_the_right_to_see_the_keys(
    world: World, server: Server, deployed: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(gateway={"apiKeysSecret": "keys"})
    world.set("forwards", **{"service/nano": server.port})
    server.answer = ANSWER
    assert main.run(["chat", "Hi", "-n", "default"]) == 0, "the only deployment is meant"
    out, err = capsys.readouterr()
    assert out == "Hello.\n"
    assert err == (
        "warning: requests need a key that is in Secret keys; it cannot be read: "
        'Error from server (NotFound): secrets "keys" not found\n'
    )
    assert "Authorization" not in server.seen[0]


def test_no_way_to_what_does_not_serve(
    world: World, deployed: Callable[..., Any], make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(make.status(ready=False))
    assert main.run(["chat", "nano", "Hi", "-n", "default"]) == 1
    assert capsys.readouterr().err == "error: nano is not serving: it is Starting\n"
    deployed(make.status(make.group(members=())))
    assert main.run(["dashboard", "nano", "-n", "default"]) == 1
    assert capsys.readouterr().err == "error: group 0 of nano has no dashboard now: nano is Serving\n"
    assert not world.calls("port-forward")


def test_dashboard(
    world: World, server: Server, deployed: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    deployed()
    world.set("objects", secrets=[secret("nano-token", "token", "t0ken\n")])
    world.set("forwards", **{"service/nano-0-head": server.port})
    steps = iter(range(9))

    def wait(_: float) -> None:
        pid = world.calls("port-forward")[-1][0]
        match next(steps):
            case 0:
                # The head's pod goes, and with it the way.
                world.drop("forwards", "service/nano-0-head")
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: gone(pid))
            case 3:
                world.set("forwards", **{"service/nano-0-head": server.port})
            case 4:
                assert get(url()) == b"fine"
                raise KeyboardInterrupt

    def url() -> str:
        shown.append(capsys.readouterr())
        return "".join(each.out for each in shown).split()[1]

    shown: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        dashboard.show(Cluster(None, None, "default"), "nano", 0, wait=wait)
    shown.append(capsys.readouterr())
    out, err = ("".join(getattr(each, stream) for each in shown) for stream in ("out", "err"))
    assert out == f"dashboard   {url()}\ntoken       t0ken\n"
    assert err.splitlines() == [
        "The page asks for the token once. Ctrl-C ends the connection.",
        "trying again until it works: kubectl port-forward service/nano-0-head: timed out waiting for the condition",
        "it works again",
    ]
    assert server.seen[0]["Authorization"] == "Bearer t0ken"
    assert gone(world.calls("port-forward")[-1][0])


def test_dashboard_that_does_not_answer(
    world: World, server: Server, deployed: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    deployed()
    server.http.server_close()
    world.set("forwards", **{"service/nano-0-head": server.port})
    assert main.run(["dashboard", "-n", "default"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_watching_outlasts_a_cluster_that_is_away(
    world: World, deployed: Callable[..., Any], make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(make.status(ready=False))
    steps = iter(range(9))

    def wait(_: float) -> None:
        match next(steps):
            case 0:
                world.set("errors", get="The connection to the server was refused")
            case 2:
                world.drop("errors", "get")
                deployed()
            case 3:
                world.set("objects", **{RESOURCE: []})

    source = Cluster(None, None, "default")
    with pytest.raises(CommandError, match="there is no deployment 'nano' in namespace default"):
        status.show(source, "nano", TableFormat.TABLE, watch=True, wait=wait)
    out, err = capsys.readouterr()
    assert [line.split()[2] for line in out.splitlines() if line.startswith("nano")] == ["Starting", "Serving"]
    assert err.splitlines() == [
        "trying again until it works: kubectl get: The connection to the server was refused",
        "it works again",
    ]


# Logs.


def request(**more: Any) -> Request:
    fields = {"rank": None, "component": Component.ALL, "follow": False, "tail": None, "form": None, "colour": False}
    return Request(**{**fields, **more})


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
        "error: RANK 'one' is no number; give that of a member, such as 0",
    ]


def test_logs_of_a_pod_that_ended(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    logged.set("objects", pods=[pod(0, 2, "terminated"), pod(1, 2, "waiting")])
    assert main.run(["logs", "nano", "-n", "default"]) == 0
    assert capsys.readouterr() == ("[0 agent] one\n[0 agent] two\n", "")


def test_following_into_the_next_incarnation(
    logged: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK_SECONDS", 0.5)
    logged.set("objects", pods=[pod(0, 2)])
    steps = iter(range(99))
    read = Follower.read

    def step(follower: Follower, seconds: float) -> None:
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

    monkeypatch.setattr(Follower, "read", step)
    item = Cluster(None, None, "default").one("nano")
    logs.show(
        Kubectl(None, None, None),
        item,
        request(component=Component.AGENT, follow=True, tail=1),
        Cluster(None, None, "x"),
    )
    assert capsys.readouterr().out.splitlines() == ["[0 agent] two", "[0 agent] last", "[0 agent] a", "[0 agent] b"]
    assert all(gone(pid) for pid, _ in logged.calls("logs"))


def test_following_ends_what_it_started_and_complains_once(logged: World, capsys: pytest.CaptureFixture[str]) -> None:
    running: list[int] = []
    said = {"out": "", "err": ""}
    with Follower(Kubectl(None, None, None), "nano", request(follow=True), grouped=False) as follower:

        def all_run() -> bool:
            follower.look()
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


# Evidence.


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
        secrets=[secret("nano-token", "token", "t0ken")],
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


@pytest.mark.parametrize("part", ["", "-0-i2", "-0-i2-r1", "-0-head", "-0-gateway-5d9-x", "-0-evidence-3"])
def test_parts_of_a_deployment(part: str) -> None:
    assert belongs(f"nano{part}", "nano")
    assert not belongs(f"nano-2{part}", "nano")
    assert not belongs(f"nan{part}", "nano")


def test_every_call_is_bounded_and_names_its_place(world: World) -> None:
    with pytest.raises(KubectlError):
        Kubectl("c", Path("/k"), "n").document("get", "pods", "x")
    assert world.calls("get")[0][1] == [
        *("get", "--kubeconfig=/k", "--context=c", "--namespace=n", "--request-timeout=10s", "pods", "x"),
        "--output=json",
    ]
