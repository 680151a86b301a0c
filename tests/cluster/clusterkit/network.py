"""The nodes' network: a switch in its own namespace, a cable to every node, and one to this machine.

Nothing has to be removed: the namespaces, the cables and the routes through them end with the switch's process.
"""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

from clusterkit import processes
from clusterkit.layout import Addresses, Settings, claimed
from clusterkit.processes import run
from clusterkit.waiting import ClusterError, until

_BRIDGE = "switch"


def free_second() -> int:
    """Return the second number of a 10.x/16 that overlaps no route of this machine, and that no other cluster uses.

    Clusters without real nodes have no routes, but tests may make the addresses of their pods local.

    Raises:
        ClusterError: all candidates are in use.
    """
    routes = [ipaddress.ip_network(route["dst"], strict=False) for route in _routes() if route["dst"] != "default"]
    for second in range(210, 250):
        routed = any(ipaddress.ip_network(f"10.{second}.0.0/16").overlaps(route) for route in routes)
        if not routed and claimed(f"addresses-{second}"):
            return second
    raise ClusterError("10.210.0.0/16 to 10.249.0.0/16 are all in use on this machine; end another cluster first")


def _routes() -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(run("ip", "-json", "-4", "route", "show", "table", "main"))
    return found


def first_child(pid: int, seconds: float = 10.0) -> int:
    """Return the process that `unshare --fork` created."""
    children = Path(f"/proc/{pid}/task/{pid}/children")

    def look() -> list[str]:
        try:
            return children.read_text().split()
        except FileNotFoundError:
            raise ClusterError(f"process {pid} ended before it had made its namespaces") from None

    return int(until(f"the child of process {pid}", look, seconds=seconds, every=0.01)[0])


class Switch:
    """A running switch."""

    def __init__(self, settings: Settings, addresses: Addresses) -> None:
        self._addresses = addresses
        log = settings.directory / "logs" / "switch.log"
        self.process = processes.start("switch", ["unshare", "--net", "sleep", "infinity"], log=log)
        self._pid = self.process.popen.pid
        until("the switch's namespace", self._ready, seconds=10, every=0.01)
        self._inside("ip", "link", "add", _BRIDGE, "type", "bridge")
        self._inside("ip", "link", "set", _BRIDGE, "up")
        run("ip", "link", "add", settings.cable, "type", "veth", "peer", "name", "machine", "netns", str(self._pid))
        self._plug("machine")
        run("ip", "addr", "add", f"{addresses.control_plane}/24", "dev", settings.cable)
        run("ip", "link", "set", settings.cable, "up")

    def _ready(self) -> bool:
        self.process.check()
        return Path(f"/proc/{self._pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()

    def _inside(self, *command: str) -> str:
        return run("nsenter", "--target", str(self._pid), "--net", *command)

    def _plug(self, port: str) -> None:
        self._inside("ip", "link", "set", port, "master", _BRIDGE)
        self._inside("ip", "link", "set", port, "up")

    def connect(self, node: str, index: int, pid: int) -> None:
        """Connect a cable to the network namespace of `pid`, as `eth0` there, and route the node's pods through it."""
        self._inside("ip", "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._plug(node)
        gateway = self._addresses.node(index)
        run("ip", "route", "replace", self._addresses.pods_of_node(index), "via", gateway)
        if index == 1:
            # This machine reaches services through the first node's kube-proxy.
            run("ip", "route", "replace", self._addresses.services, "via", gateway)

    def cable(self, node: str, *, up: bool) -> None:
        """Connect or disconnect a node's cable."""
        self._inside("ip", "link", "set", node, "up" if up else "down")
