"""Host services of several machines, each a real supervisor with its own mounts.

They listen on addresses of loopback, or in separate networks behind a switch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.hosts.backend import HostsBackend
from dsv4_operator.backends.hosts.documents import DOWN, HOST_KEY, INVENTORY, Inventory
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_runtime.util.files import replace_file
from dsv4_testkit.waiting import PATIENCE_SECONDS

BOOT = "/proc/sys/kernel/random/boot_id"
_SCRIPT = f"""
set -e
mount --bind "$1" "$2"
mount --bind "$1/boot" {BOOT}
shift 2
exec "$@"
"""
KEY = "0123456789abcdef" * 4


class Machine:
    """One machine: its files are in `<root>/<name>`, which its processes access as `<root>/state`."""

    def __init__(self, root: Path, name: str, listen: str, deployment: str, inside: Sequence[str] = ()) -> None:
        """`inside` is a command prefix that runs commands in the machine's network."""
        self.inside = inside
        self.files, self.shared = root / name, root / "state"
        self.name, self.listen, self.deployment = name, listen, deployment
        self.files.mkdir()
        self.shared.mkdir(exist_ok=True)
        self.key = root / "key"
        self.key.touch(0o600)
        self.key.write_text(KEY)
        self.boots = 0
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.boot()

    def boot(self) -> None:
        """Start the host service as at a boot of the machine."""
        self.boots += 1
        (self.files / "boot").write_text(f"{self.name}-boot-{self.boots}\n")
        self.start()

    def start(self) -> None:
        """Start the host service as systemd does after its exit."""
        service = [sys.executable, "-m", "dsv4_operator.backends.local.supervisor"]
        service += ["--loop=dsv4_operator.backends.hosts.service", f"--state-dir={self.shared}/_m"]
        service += [f"--name={self.deployment}", f"--host={self.name}", f"--listen={self.listen}"]
        service += [f"--key-file={self.key}"]
        command = [
            *self.inside,
            "unshare",
            "--mount",
            "sh",
            "-c",
            _SCRIPT,
            "machine",
            str(self.files),
            str(self.shared),
            *service,
        ]
        self.supervisor = subprocess.Popen(command)

    def cut(self) -> None:
        """Cut the power: all processes are killed without notice."""
        assert self.supervisor is not None
        end_tree(self.supervisor.pid)
        self.supervisor.wait(PATIENCE_SECONDS)

    def kill_supervisor(self) -> None:
        """Kill the supervisor only; the kernel ends its processes."""
        assert self.supervisor is not None
        self.supervisor.kill()
        self.supervisor.wait(PATIENCE_SECONDS)

    def service(self) -> int:
        """Return the process id of the host service."""
        assert self.supervisor is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for child in psutil.Process(self.supervisor.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "dsv4_operator.backends.hosts.service" in child.cmdline():
                        return child.pid
            time.sleep(0.05)
        raise TimeoutError("no host service")

    def agent(self, incarnation: int, rank: int) -> int | None:
        """Return the process id of a member's agent; None if it is not known."""
        record = self.files / "_m" / self.deployment / f"i{incarnation}" / f"m{rank}" / "member.json"
        with contextlib.suppress(FileNotFoundError):
            init = json.loads(record.read_text()).get("init")
            return None if init is None else int(init[0])
        return None

    def close(self) -> None:
        """Stop all processes."""
        assert self.supervisor is not None
        if self.supervisor.poll() is None:
            self.cut()


class Switch:
    """A bridge in its own network namespace, with one namespace per machine; all are invisible on this machine."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._bridge = self._hold()
        self._ip(self._bridge, "link add br0 type bridge")
        self._ip(self._bridge, "link set br0 up")

    def plug(self, address: str) -> tuple[str, ...]:
        """Return the command prefix that runs a command in a new network with `address`."""
        holder, port = self._hold(), f"port{len(self._holders)}"
        pid = self._holders[-1].pid
        self._ip(self._bridge, f"link add {port} type veth peer name eth0 netns {pid}")
        self._ip(self._bridge, f"link set {port} master br0 up")
        self._ip(holder, "link set lo up")
        self._ip(holder, f"addr add {address}/24 dev eth0")
        self._ip(holder, "link set eth0 up")
        return holder

    def close(self) -> None:
        """Remove everything."""
        for holder in self._holders:
            holder.kill()
            holder.wait(PATIENCE_SECONDS)

    def _hold(self) -> tuple[str, ...]:
        process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._holders.append(process)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not network.in_own_network(process.pid):
            assert time.monotonic() < deadline, "no network namespace"
            time.sleep(0.02)
        return "nsenter", f"--net=/proc/{process.pid}/ns/net"

    @staticmethod
    def _ip(inside: Sequence[str], words: str) -> None:
        subprocess.run([*inside, "ip", *words.split()], check=True, timeout=PATIENCE_SECONDS)


class Machines:
    """Several machines, with an inventory of them."""

    def __init__(self, root: Path, port: int, deployment: str, count: int = 2, *, switch: Switch | None = None) -> None:
        self.root = root
        names = [f"spark-{number}" for number in range(1, count + 1)]
        # Their own network, or loopback of this process: agents wait for an interface with their address.
        prefix, interface = (f"127.77.{os.getpid() % 250}", "lo") if switch is None else ("10.99.0", "eth0")
        addresses = [f"{prefix}.{number}" for number in range(1, count + 1)]
        self._added = addresses if switch is None else []
        self._address("add")
        inside = [() if switch is None else switch.plug(at) for at in addresses]
        self.inventory = Inventory.model_validate(
            {
                "hosts": [
                    {"name": name, "address": at, "interface": interface}
                    for name, at in zip(names, addresses, strict=True)
                ],
                "stateDir": str(root / "state"),
                "servicePort": port,
            }
        )
        self.all = [
            Machine(root, name, f"{at}:{port}", deployment, within)
            for name, at, within in zip(names, addresses, inside, strict=True)
        ]

    def backend(
        self, deployment: DSV4Deployment, holder: str = "loop", changed: Callable[[], None] = lambda: None
    ) -> HostsBackend:
        """Return a backend with the files of one loop."""
        state = DeploymentState(self.root / "loops" / holder, deployment.metadata.name)
        state.directory.mkdir(parents=True, exist_ok=True)
        return HostsBackend(state, self.inventory, deployment, key=KEY, holder=holder, changed=changed)

    def move(self, place: int, number: int) -> None:
        """Start the host service of a machine at another address, the one with this number."""
        host, machine = self.inventory.hosts[place], self.all[place]
        address = f"{host.address.rpartition('.')[0]}.{number}"
        self._added = [*self._added, address]
        self._address("add")
        moved = [*self.inventory.hosts]
        moved[place] = host.model_copy(update={"address": address})
        self.inventory = self.inventory.model_copy(update={"hosts": tuple(moved)})
        machine.listen = f"{address}:{self.inventory.service_port}"
        machine.start()

    def loop(self, deployment: DSV4Deployment) -> Loop:
        """Return the loop of `deployment` on these machines."""
        state = DeploymentState(self.root / "loop", deployment.metadata.name)
        return Loop(state, self.inventory, deployment, self.all[0].inside)

    def close(self) -> None:
        """Stop all machines and remove their addresses."""
        for machine in self.all:
            machine.close()
        self._address("del")

    def _address(self, action: str) -> None:
        for address in self._added:
            command = ["ip", "addr", action, f"{address}/32", "dev", "lo"]
            subprocess.run(command, check=False, capture_output=True, timeout=10)


class Loop:
    """The loop on the first machine, with its supervisor and gateways."""

    def __init__(
        self, state: DeploymentState, inventory: Inventory, deployment: DSV4Deployment, inside: Sequence[str]
    ) -> None:
        self.state, self.inside = state, inside
        state.prepare()
        replace_file(state.directory / INVENTORY, inventory.to_json())
        replace_file(state.directory / HOST_KEY, KEY)
        state.save_manifest(deployment)
        self.supervisor: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the loop as a systemd unit does at boot."""
        command = [*self.inside, sys.executable, "-m", "dsv4_operator.backends.local.supervisor"]
        self.supervisor = subprocess.Popen(
            [*command, f"--state-dir={self.state.root}", f"--name={self.state.name}"], start_new_session=True
        )

    def object(self) -> DSV4Deployment | None:
        """Return the deployment with its status; None before the first one."""
        return self.state.object()

    def cut(self) -> None:
        """Kill all processes without notice."""
        if self.supervisor is not None and self.supervisor.poll() is None:
            end_tree(self.supervisor.pid)
            self.supervisor.wait(PATIENCE_SECONDS)

    def stop(self, *, members: bool, seconds: float = 60.0) -> int:
        """Stop the loop, with or without the members; return its exit code."""
        assert self.supervisor is not None
        if members:
            (self.state.directory / DOWN).touch()
        self.supervisor.terminate()
        return self.supervisor.wait(seconds)


def end_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    found = psutil.Process(pid)
    everything = [found, *found.children(recursive=True)]
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(_runs(process) for process in everything) and time.monotonic() < deadline:
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs; some init processes wait seconds before they reap an ended orphan."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
