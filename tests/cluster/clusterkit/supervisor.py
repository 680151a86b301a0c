"""The process that has all parts of a cluster as children, during the whole life of the cluster.

Run as `python -m clusterkit.supervisor SETTINGS` (JSON). It ends the cluster and itself at SIGTERM or SIGINT, and when
a part ends by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from clusterkit import build, controlplane, dns, kwok, layout, leftovers, network, nodes, policies
from clusterkit.client import Cluster
from clusterkit.controlplane import ControlPlane, Place
from clusterkit.layout import Addresses, Settings, State
from clusterkit.processes import Process
from clusterkit.waiting import ClusterError, say, until

NODES_READY_SECONDS = 240.0


class _Told(Exception):
    """A signal to end."""


class Supervisor:
    """A cluster from its start to its end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.parts: list[Process] = []
        self.nodes: dict[str, nodes.Node] = {}
        self.plane: ControlPlane | None = None
        self.switch: network.Switch | None = None

    def start(self) -> None:
        """Start all parts, and return when all nodes are Ready."""
        settings, directory = self.settings, self.settings.directory
        programs = self._programs()
        with layout.alone("addresses", patience=30):
            addresses = Addresses(network.free_second())
            if settings.nodes:
                self.switch = network.Switch(settings, addresses)
        address, port = (addresses.control_plane, 6443) if settings.nodes else ("127.0.0.1", layout.free_port())
        place = Place(programs, directory, settings, addresses, address, port)
        self.plane = plane = ControlPlane(place)
        plane.start()
        say(f"control plane is ready at {place.server}")
        state = State(settings, os.getpid(), place.server, addresses.second)
        cluster = Cluster(state)
        self._open_to_kubelets(cluster)
        if settings.fake:
            self._start_kwok(cluster, programs)
        if settings.nodes:
            self._start_nodes(cluster, programs)
        wanted = settings.nodes + settings.fake

        def ready() -> bool:
            self.check()
            return _ready_nodes(cluster) == wanted

        until(f"{wanted} Ready nodes", ready, seconds=NODES_READY_SECONDS, every=0.5)
        cluster.until_account("default", controlplane.READY_SECONDS)
        if settings.fake:
            _give_first_address(cluster)
        say(f"{settings.nodes} real and {settings.fake} KWOK nodes are Ready")
        state.write()

    def _programs(self) -> Path:
        """Create one folder with links to all programs of this cluster."""
        programs = self.settings.directory / "bin"
        programs.mkdir()
        for module in self.settings.modules:
            for program in build.built(module).iterdir():
                (programs / program.name).symlink_to(program)
        return programs

    def _open_to_kubelets(self, cluster: Cluster) -> None:
        """Give the API server access to the kubelets (exec, logs, port-forward)."""
        cluster.apply(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": "kube-apiserver-to-kubelets"},
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "system:kubelet-api-admin",
                },
                "subjects": [
                    {
                        "apiGroup": "rbac.authorization.k8s.io",
                        "kind": "User",
                        "name": "kube-apiserver-kubelet-client",
                    }
                ],
            }
        )

    def _start_kwok(self, cluster: Cluster, programs: Path) -> None:
        assert self.plane
        for part in kwok.DEFINITIONS:
            cluster.kubectl("apply", "--server-side", "-k", str((programs / "kustomize").resolve().parent / part))
        cluster.until_served("stages.kwok.x-k8s.io")
        cluster.kubectl("apply", "--server-side", "-k", str((programs / "kustomize").resolve().parent / kwok.STAGES))
        cluster.apply(kwok.ACCESS)
        self.parts.append(kwok.start(programs, self.plane))
        beside = bool(self.settings.nodes)
        cluster.kubectl("create", "-f", "-", input=kwok.nodes(self.settings.fake, beside_real_ones=beside), seconds=300)

    def _start_nodes(self, cluster: Cluster, programs: Path) -> None:
        assert self.plane
        assert self.switch
        cluster.apply(*dns.ACCESS)
        if self.settings.k3s:
            cluster.apply(*policies.ACCESS)
        self.parts.append(dns.start(programs, self.plane))
        for index, name in enumerate(self.settings.node_names, 1):
            node = nodes.Node(name, index, self.plane, programs, self.switch)
            node.prepare()
            node.start()
            self.nodes[name] = node
        for node in self.nodes.values():
            node.wait_until_up()
            say(f"node {node.name} has its programs running")

    def check(self) -> None:
        """Raise if a part has ended without a stop."""
        if self.plane:
            self.plane.check()
        for part in self.parts:
            part.check()
        for node in self.nodes.values():
            node.check()

    def serve(self) -> None:
        """Check the parts and execute commands until a signal or the end of a part."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.settings.directory / "control"))
            listener.listen()
            while True:
                heard, _, _ = select.select([listener], [], [], 1.0)
                self.check()
                if heard:
                    self._answer(listener.accept()[0])

    def _answer(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            line.settimeout(5)
            try:
                self._do(*json.loads(line.makefile().readline()))
                line.sendall(b"ok\n")
            except (ClusterError, ValueError, TypeError) as error:
                line.sendall(f"{error}\n".encode())

    def _do(self, command: str, argument: str) -> None:
        say(f"{command} {argument}")
        if command == "load":
            for node in self.nodes.values():
                if node.init:
                    node.load(Path(argument))
            return
        if argument not in self.nodes:
            raise ClusterError(f"there is no real node {argument!r}, only: {', '.join(self.nodes) or 'none'}")
        node = self.nodes[argument]
        assert self.switch
        match command:
            case "stop":
                node.stop()
            case "start" if node.init is None:
                node.start()
                node.wait_until_up()
            case "start":
                raise ClusterError(f"node {argument} runs already")
            case "cut" | "plug":
                self.switch.cable(argument, up=command == "plug")
            case _:
                raise ClusterError(f"{command!r} is nothing that a node does; say stop, start, cut or plug")

    def end(self) -> None:
        """End every part, the nodes first: without a control plane, kubelets would log errors."""
        for node in self.nodes.values():
            node.stop()
        for part in reversed(self.parts):
            part.stop()
        if self.plane:
            self.plane.stop()
        if self.switch:
            self.switch.process.kill()
        leftovers.sweep(self.settings)


def _give_first_address(cluster: Cluster) -> None:
    """See `kwok.first_pod`."""
    pod = kwok.first_pod()
    name = pod["metadata"]["name"]
    cluster.apply(pod)
    until(
        "the first address of a pod of KWOK",
        lambda: cluster.kubectl("get", "pod", name, "-o", "jsonpath={.status.podIP}"),
        seconds=NODES_READY_SECONDS,
    )
    cluster.kubectl("delete", "pod", name, "--grace-period=0", "--force")


def _ready_nodes(cluster: Cluster) -> int:
    items = cluster.http.get("/api/v1/nodes").json().get("items", [])
    return sum(
        any(said["type"] == "Ready" and said["status"] == "True" for said in node["status"].get("conditions", []))
        for node in items
    )


def _told(signum: int, frame: FrameType | None) -> None:
    raise _Told


def main() -> int:
    """Start, serve, end."""
    supervisor = Supervisor(Settings(**json.loads(sys.argv[1])))
    signal.signal(signal.SIGTERM, _told)
    signal.signal(signal.SIGINT, _told)
    code = 0
    try:
        supervisor.start()
        supervisor.serve()
    except _Told:
        say("told to end")
    except ClusterError as error:
        say(f"failed: {error}")
        code = 1
    finally:
        for told in (signal.SIGTERM, signal.SIGINT):
            signal.signal(told, signal.SIG_IGN)
        began = time.monotonic()
        try:
            supervisor.end()
            say(f"ended in {time.monotonic() - began:.1f} s")
        except ClusterError as error:
            say(f"did not end well: {error}")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
