"""The first process of a node: creates the node's mounts, starts its programs, and reaps its processes.

Started by nodes.py in its own namespaces with the path of a JSON plan; it imports no module of the project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Deployments with real engines, as namespace and name: each has its own folder on the node, with its own cache.
_COMPILING = ("serving/nano", "demo/nano")
_MEMBERS_USER = 65532
_SECONDS = 60.0
# Settings of the whole machine that a kubelet requires. It reads its values here and leaves the machine's unchanged.
_INSISTS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def sh(*command: str, seconds: float = _SECONDS) -> None:
    """Run a command that has to succeed."""
    subprocess.run(command, check=True, timeout=seconds)


def wait_for(path: str) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + _SECONDS
    while not os.path.lexists(path):
        if time.monotonic() > end:
            raise SystemExit(f"{path} was not there after {_SECONDS:.0f} s")
        time.sleep(0.05)


def make_places(directory: Path) -> None:
    """Mount the node's own /proc, /run, /var/lib and /var/log; the rest of the file system is the machine's."""
    sh("mount", "-t", "proc", "proc", "/proc")
    for setting, value in _INSISTS.items():
        file = directory / setting.replace("/", ".")
        file.write_text(value)
        sh("mount", "--bind", str(file), f"/proc/sys/{setting}")
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    sh("mount", "--bind", str(directory / "lib"), "/var/lib")
    sh("mount", "--bind", str(directory / "log"), "/var/log")
    # Registries are not reachable. With an unresponsive resolver of the machine, the kubelet's pull of a missing image,
    # and thus the end of that pod, would take as long as the machine's resolv.conf specifies.
    resolver = directory / "resolv.conf"
    resolver.write_text("")
    sh("mount", "--bind", str(resolver), os.path.realpath("/etc/resolv.conf"))
    # vLLM's compiled code is the same on every node of one machine, whose processors take half a minute for each build.
    compiled = directory.parent / "compiled"
    compiled.mkdir(exist_ok=True)
    os.chown(compiled, _MEMBERS_USER, _MEMBERS_USER)
    for deployment in _COMPILING:
        cache = Path("/var/lib/dsv4/deployments") / deployment / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        sh("mount", "--bind", str(compiled), str(cache))
    # Volumes that a pod shares with the node need a shared mount.
    sh("mount", "--make-rshared", "/")


def make_network(plan: dict[str, Any]) -> None:
    """Configure addresses and routes after the cable is connected."""
    sh("ip", "link", "set", "lo", "up")
    wait_for("/proc/sys/net/ipv4/conf/eth0")
    sh("ip", "addr", "add", plan["address"], "dev", "eth0")
    sh("ip", "link", "set", "eth0", "up")
    sh("ip", "route", "add", "default", "via", plan["gateway"])
    for network, node in plan["routes"].items():
        sh("ip", "route", "add", network, "via", node)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def make_base(file: Path, shared: list[str]) -> None:
    """Write the base of every container: containerd's own specification, and folders of the machine read-only."""
    said = subprocess.run(["ctr", "oci", "spec"], check=True, timeout=_SECONDS, capture_output=True).stdout
    spec = json.loads(said)
    options = ["rbind", "ro", "nosuid", "nodev"]
    spec["mounts"] += [{"type": "bind", "source": path, "destination": path, "options": options} for path in shared]
    file.write_text(json.dumps(spec))


def main() -> None:
    """Start the node and stay."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    directory = Path(plan["directory"])
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[variable]
    make_places(directory)
    sh("hostname", plan["name"])
    make_network(plan)
    make_base(Path(plan["base_spec"]), plan["shared"])
    started: dict[int, str] = {}

    def start(name: str, command: list[str]) -> None:
        with Path(plan["logs"][name]).open("ab") as log:
            running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        started[running.pid] = name

    start("containerd", plan["containerd"])
    wait_for("/run/containerd/containerd.sock")
    for image in plan["images"]:
        sh("ctr", "-n", "k8s.io", "images", "import", image)
    for name, command in plan["others"].items():
        start(name, command)
    (directory / "up").touch()
    while True:
        pid, status = os.wait()
        if pid in started:
            raise SystemExit(f"{started[pid]} ended with status {os.waitstatus_to_exitcode(status)}; so does the node")


if __name__ == "__main__":
    main()
