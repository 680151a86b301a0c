"""Files and addresses of the cluster."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from clusterkit.waiting import ClusterError, until

ROOT = Path.home() / ".dsv4" / "clusters"
DEFAULT_NAME = "dsv4"
DOMAIN = "cluster.local"
_NAME = re.compile(r"[a-z][a-z0-9]{0,7}")


@dataclass(frozen=True)
class Addresses:
    """The networks of one cluster: a /16 in which the machine has the first address."""

    second: int
    """The second number of all addresses."""

    @property
    def control_plane(self) -> str:
        return f"10.{self.second}.0.1"

    def node(self, index: int) -> str:
        return f"10.{self.second}.0.{10 + index}"

    def pods_of_node(self, index: int) -> str:
        return f"10.{self.second}.{64 + index}.0/24"

    @property
    def pods(self) -> str:
        """Network of the pods on real nodes."""
        return f"10.{self.second}.64.0/18"

    @property
    def fake_pods(self) -> str:
        """Network of the pods that only KWOK simulates."""
        return f"10.{self.second}.192.0/18"

    @property
    def services(self) -> str:
        return f"10.{self.second}.128.0/18"

    @property
    def first_service(self) -> str:
        """Address of the Service `kubernetes`."""
        return str(ipaddress.ip_network(self.services)[1])


@dataclass(frozen=True)
class Settings:
    """Name and size of a cluster."""

    name: str = DEFAULT_NAME
    nodes: int = 2
    """Number of real nodes, each with containerd and kubelet."""
    fake: int = 0
    """Number of nodes that only KWOK simulates."""
    k3s: bool = False
    """Parts of k3s: its datastore instead of etcd, and the controller that enforces network policies on real nodes."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ClusterError(f"--name: {self.name!r} is no name; take up to 8 of a-z and 0-9, a letter first")
        if not 0 <= self.nodes <= 4:
            raise ClusterError(f"--nodes: {self.nodes}; a cluster here has 0 to 4 real nodes")
        if not 0 <= self.fake <= 5000:
            raise ClusterError(f"--fake: {self.fake}; a cluster here has 0 to 5000 nodes of KWOK")

    @property
    def directory(self) -> Path:
        return ROOT / self.name

    @property
    def node_names(self) -> list[str]:
        return [f"spark{index}" for index in range(1, self.nodes + 1)]

    @property
    def modules(self) -> list[str]:
        """The Go modules of its programs."""
        modules = ["kubernetes", *(["kwok"] if self.fake else []), *(["coredns"] if self.nodes else [])]
        return [*modules, *(["kine"] if self.k3s else []), *(["kuberouter"] if self.k3s and self.nodes else [])]

    @property
    def cgroup(self) -> str:
        """Parent group of the nodes' groups, in every hierarchy."""
        return f"dsv4-cluster-{self.name}"

    @property
    def cable(self) -> str:
        """The network interface on the machine that leads to the nodes."""
        return f"dsv4-{self.name}"


@dataclass(frozen=True)
class State:
    """State of a running cluster in `state.json`, for its clients."""

    settings: Settings
    supervisor: int
    """Process id."""
    server: str
    """URL of the API server."""
    second: int

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.second)

    def write(self) -> None:
        file = self.settings.directory / "state.json"
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self), indent=1))
        draft.rename(file)

    @classmethod
    def read(cls, name: str) -> State | None:
        """Return the state of the cluster of that name; None if there is none."""
        try:
            said = json.loads((ROOT / name / "state.json").read_text())
        except FileNotFoundError:
            return None
        return cls(**{**said, "settings": Settings(**said["settings"])})


_CLAIMS: list[TextIO] = []


def claimed(what: str) -> bool:
    """Claim `what` on this machine for the lifetime of this process; return False if another process has claimed it."""
    ROOT.mkdir(parents=True, exist_ok=True)
    lock = (ROOT / f".{what}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False
    _CLAIMS.append(lock)
    return True


def free_port() -> int:
    """Return a currently free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def alone(what: str, *, patience: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock: to start or end a cluster, to choose addresses, to build.

    Args:
        what: its name on this machine, for all sessions of this user.
        patience: seconds to wait for the present holder.
    """
    ROOT.mkdir(parents=True, exist_ok=True)
    with (ROOT / f".{what}.lock").open("w") as lock:

        def held() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        try:
            until(what, held, seconds=patience)
        except ClusterError:
            raise ClusterError(f"somebody else is at work on {what!r} for more than {patience:.0f} s; wait") from None
        yield
