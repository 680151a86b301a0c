"""Commands that need kubelets, with a stand-in for kubectl: port forwards, logs, and how they end.

tests/cluster/cli tests the commands that need only an API server, with a real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_world import RESOURCE, Server, World, get, gone, secret, wait_for

from dsv4_operator.builders import names
from dsv4_operator.cli import diagnostics, main
from dsv4_operator.cli.commands import CommandTarget
from dsv4_operator.cli.output import KUBECTL_PLUGIN, CommandError, TableFormat
from dsv4_operator.cli.sources import kubectl
from dsv4_operator.cli.sources.cluster import ClusterSource, is_part_of
from dsv4_operator.cli.sources.kubectl import Kubectl, KubectlError, PortForward, first_error_line
from dsv4_testkit.errors import raises_naming

# Selection of machine or cluster


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
    assert CommandTarget(**options).is_cluster is kubernetes


def test_one_place_at_a_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.run(["why", "--state-dir", "/x", "-n", "here"]) == 2
    assert "--state-dir selects this machine and --namespace selects a cluster" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["kubectl-dsv4"])
    assert main.run(["up", "nano.yaml"]) == 2
    assert main.run(["down", "nano"]) == 2
    err = capsys.readouterr().err
    assert "on a cluster: kubectl apply -f FILE" in err
    assert "on a cluster: kubectl delete dsv4 nano" in err


def test_hints_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterSource("my context", None, "prod")
    assert cluster.command_line("why", "nano") == "dsv4 why nano '--context=my context' -n prod"
    assert ClusterSource(None, None, None).command_line("status") == "dsv4 status --cluster"
    monkeypatch.setattr(sys, "argv", [KUBECTL_PLUGIN])
    assert ClusterSource(None, None, None).command_line("status") == "kubectl dsv4 status"


# kubectl itself


def test_there_is_no_kubectl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main.run(["status", "--cluster"]) == 2
    assert capsys.readouterr().err == "error: kubectl is not on the PATH; install it, or add its directory to PATH\n"


def test_kubectl_never_ends(world: World) -> None:
    world.known["slow"] = ["get"]
    world.write()
    with raises_naming(KubectlError, "kubectl get", "is the cluster reachable?") as caught:
        Kubectl(None, None, None).run("get", "pods", seconds=1)
    assert caught.value.reason == "no answer within 1 s"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("error: x y\nmore", "x y"),
        ('E1121 19:30:45.1 1 memcache.go:265] "Unhandled"\nThe connection was refused', "The connection was refused"),
        ("Warning: old\n\nError from server (Forbidden): no", "Error from server (Forbidden): no"),
        ("Warning: old", "Warning: old"),
        ('time="2026-11-27T20:00:00Z" level=warning msg="Unable to read"\nerror: open f: denied', "open f: denied"),
        ("", "it printed no message"),
    ],
)
def test_the_line_of_the_error_is_found(said: str, line: str) -> None:
    assert first_error_line(said) == line


def test_dsv4_is_not_installed_there(world: World) -> None:
    world.set("errors", get='error: the server doesn\'t have a resource type "dsv4deployments"')
    with pytest.raises(KubectlError, match=r'type "dsv4deployments"; is dsv4 installed in this cluster\?'):
        ClusterSource(None, None, "default").get_all()


def test_there_is_no_context(world: World) -> None:
    world.set("errors", config="error: current-context must exist in order to minify")
    with raises_naming(KubectlError, "current-context must exist", "give --context"):
        _ = ClusterSource(None, None, None).namespace


def test_the_kubeconfig_of_k3s_is_readable_by_root_only(world: World) -> None:
    file = "/etc/rancher/k3s/k3s.yaml"
    world.set("errors", get=f'error: error loading config file "{file}": open {file}: permission denied')
    with raises_naming(KubectlError, "permission denied", "set KUBECONFIG to a copy of yours"):
        ClusterSource(None, None, "default").get_all()


def test_names_are_never_options(world: World, deployed: Callable[..., Any]) -> None:
    deployed()
    for name in ("--all-namespaces", "pods/x", "../x"):
        with raises_naming(CommandError, repr(name), "namespace default", "there is nano"):
            ClusterSource(None, None, "default").get(name)
    assert not [words for _, words in world.calls("get") if "--all-namespaces" in words]


# Port forwards


def test_a_way_is_opened_again_on_the_same_port(world: World, server: Server) -> None:
    world.set("forwards", **{"service/nano": server.port})
    with PortForward(Kubectl(None, None, "prod"), "nano", 8000) as way:
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
    way = PortForward(Kubectl(None, None, None), "nano", 8000)
    with way, raises_naming(KubectlError, "port-forward service/nano", "timed out"):
        way.url()


def test_opening_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubectl, "OPEN_SECONDS", 2.0)
    world.known["slow"] = ["port-forward"]
    world.write()
    way = PortForward(Kubectl(None, None, None), "nano", 8000)
    with way, pytest.raises(KubectlError, match="no connection within 2 s"):
        way.url()
    # On a busy machine it may have been ended before it wrote its number.
    assert all(gone(pid) for pid, _ in world.calls("port-forward"))


def test_a_way_ends_with_a_killed_command(world: World, server: Server) -> None:
    world.set("forwards", **{"service/nano": server.port})
    code = (
        "import time; from dsv4_operator.cli.sources.kubectl import PortForward;"
        "from dsv4_operator.cli.sources.kubectl import Kubectl;"
        "print(PortForward(Kubectl(None, None, None), 'nano', 8000).url(), flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    [(pid, _)] = world.calls("port-forward")
    process.kill()
    process.communicate()
    wait_for(lambda: gone(pid))


ANSWER = b'data: {"choices": [{"delta": {"content": "Hello."}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def test_chat(world: World, server: Server, deployed: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    deployed(gateway={"apiKeys": {"secretKeyRef": {"name": "keys", "key": "keys"}}})
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
    deployed(gateway={"apiKeys": {"secretKeyRef": {"name": "keys", "key": "keys"}}})
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


def test_no_port_forward_to_a_deployment_that_does_not_serve(
    world: World, deployed: Callable[..., Any], make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(make.status(ready=False))
    assert main.run(["chat", "nano", "Hi", "-n", "default"]) == 1
    assert capsys.readouterr().err == "error: nano is not serving: it is Starting\n"
    deployed(make.status(make.group(members=())))
    assert main.run(["dashboard", "nano", "-n", "default"]) == 1
    assert capsys.readouterr().err == "error: group 0 of nano has no dashboard now: nano is Serving\n"
    assert not world.calls("port-forward")


@pytest.mark.parametrize("name", [names.mounted_name("nano", "u1", 0, 1), "nano-0-i1"])
def test_dashboard(
    world: World, server: Server, deployed: Callable[..., Any], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The second name is that of an incarnation that was formed before names contained the UID."""
    deployed()
    world.set("objects", secrets=[secret(name, "token", "t0ken\n")])
    world.set("forwards", **{"service/nano-0-head": server.port})
    steps = iter(range(9))

    def wait(_: float) -> None:
        pid = world.calls("port-forward")[-1][0]
        match next(steps):
            case 0:
                # The head's pod is deleted, and the connection with it.
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
        diagnostics.show_dashboard(ClusterSource(None, None, "default"), "nano", 0, wait=wait)
    shown.append(capsys.readouterr())
    out, err = ("".join(getattr(each, stream) for each in shown) for stream in ("out", "err"))
    assert out == f"dashboard   {url()}\ntoken       t0ken\n"
    assert err.splitlines() == [
        "The page requires the token once; a new incarnation has another one. Ctrl-C ends the connection.",
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

    source = ClusterSource(None, None, "default")
    with raises_naming(CommandError, "'nano'", "namespace default"):
        diagnostics.show(source, "nano", TableFormat.TABLE, watch=True, wait=wait)
    out, err = capsys.readouterr()
    assert [line.split()[2] for line in out.splitlines() if line.startswith("nano")] == ["Starting", "Serving"]
    assert err.splitlines() == [
        "trying again until it works: kubectl get: The connection to the server was refused",
        "it works again",
    ]


@pytest.mark.parametrize("part", ["", "-0-i2", "-0-i2-r1", "-0-head", "-0-gateway-5d9-x", "-0-evidence-3"])
def test_parts_of_a_deployment(part: str) -> None:
    assert is_part_of(f"nano{part}", "nano")
    assert not is_part_of(f"nano-2{part}", "nano")
    assert not is_part_of(f"nan{part}", "nano")


def test_every_call_is_bounded_and_names_its_place(world: World) -> None:
    with pytest.raises(KubectlError):
        Kubectl("c", Path("/k"), "n").document("get", "pods", "x")
    assert world.calls("get")[0][1] == [
        *("get", "--kubeconfig=/k", "--context=c", "--namespace=n", "--request-timeout=10s", "pods", "x"),
        "--output=json",
    ]
