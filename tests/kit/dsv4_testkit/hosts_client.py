"""Two machines without Kubernetes, as the client finds them: records, and results of checks."""

from __future__ import annotations

from pathlib import Path

from dsv4_operator.api import DSV4Deployment, load
from dsv4_operator.backends.hosts.documents import Host, Inventory
from dsv4_operator.cli.machine import Record

NANO = Path(__file__).parents[3] / "examples" / "nano.yaml"


def facts(*networks: tuple[str, str, int, bool]) -> dict[str, object]:
    """Return the part of a machine's check about its networks: interface, address, Mbit/s, RDMA."""
    addresses = [
        {"interface": name, "address": at, "prefix": 24, "speed": speed, "rdma": rdma, "up": speed >= 0}
        for name, at, speed, rdma in networks
    ]
    return {"addresses": addresses}


MACHINE: dict[str, object] = {
    "root": True,
    "sudo": False,
    "writable": True,
    "systemd": True,
    "python": "3.12.3",
    "interpreter": "/usr/bin/python3.12",
    "headers": True,
    "compilers": ["gcc", "g++"],
    "architecture": "x86_64",
    "software": [],
    "partial": {},
    "earlier": {},
    "toolkits": [],
    "free_bytes": 10**12,
    "time": 0.0,
    **facts(("eth0", "10.0.0.1", 1000, False)),
}
"""Result of the check of a machine."""


def record(name: str = "nano") -> Record:
    """Return the record of a deployment on two machines."""
    inventory = Inventory(hosts=(Host(name="spark-1", address="10.0.0.1"), Host(name="spark-2", address="10.0.0.2")))
    return Record(name=name, inventory=inventory, key="k" * 64, software="/var/lib/dsv4/software/abc")


def nano(name: str = "nano", **gateway: object) -> DSV4Deployment:
    """Return the deployment of examples/nano.yaml."""
    found = load(NANO.read_text()).to_dict()
    spec = found["spec"] | {"gateway": gateway}  # type: ignore[operator]
    return DSV4Deployment.model_validate({**found, "metadata": {"name": name}, "spec": spec})


class Killed(BaseException):
    """End of the client in the middle of its work."""
