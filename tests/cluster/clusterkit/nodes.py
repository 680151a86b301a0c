"""A real node: process, network, mount, IPC and host name namespaces with containerd, kubelet and kube-proxy.

The node's files outlive its processes, so that a restarted node finds its containers dead and its images present, as
after a power cut.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from clusterkit import archive, cgroups, network, pki, policies, processes
from clusterkit.controlplane import ControlPlane
from clusterkit.layout import DOMAIN
from clusterkit.processes import Process, run
from clusterkit.waiting import until

CNI_PROGRAMS = "/usr/lib/cni"
START_SECONDS = 180.0
# An image of half a gigabyte takes seconds; during other work it took up to three minutes.
LOAD_SECONDS = 600.0
# Namespaces end with their process number 1.
_NEW = ("unshare", "--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--propagation", "slave")


@dataclass
class Node:
    """One node; `init` is None while it is stopped."""

    name: str
    index: int
    plane: ControlPlane
    programs: Path
    switch: network.Switch
    init: Process | None = None

    @property
    def directory(self) -> Path:
        return self.plane.place.files / self.name

    @property
    def address(self) -> str:
        return self.plane.place.addresses.node(self.index)

    @property
    def cgroup(self) -> str:
        return f"{self.plane.place.settings.cgroup}/{self.name}"

    def prepare(self) -> None:
        """Write the files that its programs read."""
        plane, directory = self.plane, self.directory
        for part in ("lib", "log", "cni"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        serving = plane.authority.issue(f"system:node:{self.name}", hosts=[self.name, self.address], file=self.name)
        own = plane.kubeconfig(f"system:node:{self.name}", groups=["system:nodes"], file=f"{self.name}-kubelet")
        _json(directory / "kubelet.json", _kubelet(self, serving))
        _json(directory / "kube-proxy.json", _proxy(self, plane.kubeconfig("system:kube-proxy", file="kube-proxy")))
        _json(directory / "cni" / "10-pods.conflist", _cni(self))
        (directory / "containerd.toml").write_text(_containerd(self))
        kubelet = [
            self.programs / "kubelet",
            f"--config={directory / 'kubelet.json'}",
            f"--kubeconfig={own}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--cert-dir={directory / 'kubelet-certificates'}",
        ]
        images = [
            archive.write(directory / "pause.tar", archive.PAUSE, self.programs / "pause"),
            archive.write(directory / "probe.tar", archive.PROBE, self.programs / "probe"),
        ]
        others = {
            "kubelet": [str(part) for part in kubelet],
            "kube-proxy": [str(self.programs / "kube-proxy"), f"--config={directory / 'kube-proxy.json'}"],
        }
        if plane.place.settings.k3s:
            others["kube-router"] = policies.command(self.name, self.programs, plane)
        plan: dict[str, object] = {
            "name": self.name,
            "directory": str(directory),
            "logs": {name: str(plane.place.log(f"{self.name}-{name}")) for name in ("containerd", *others)},
            "address": f"{self.address}/24",
            "gateway": plane.place.address,
            "containerd": ["containerd", "--config", str(directory / "containerd.toml")],
            "images": [str(image) for image in images],
            "others": others,
            "base_spec": str(directory / "base.json"),
            "shared": environment(),
        }
        # Pods of one node reach those of another through the other node.
        plan["routes"] = {
            plane.place.addresses.pods_of_node(index): plane.place.addresses.node(index)
            for index in range(1, plane.place.settings.nodes + 1)
            if index != self.index
        }
        _json(directory / "plan.json", plan)

    def start(self) -> None:
        """Power on. The node is up before it is Ready in the API server."""
        cgroups.make(self.cgroup)
        (self.directory / "up").unlink(missing_ok=True)
        script = Path(__file__).with_name("node_init.py")
        command: list[str | Path] = [*_NEW, sys.executable, script, self.directory / "plan.json"]
        self.init = processes.start(self.name, command, log=self.plane.place.log(self.name))
        self.switch.connect(self.name, self.index, network.first_child(self.init.popen.pid))

    def wait_until_up(self) -> None:
        """Return when its programs run.

        Raises:
            ClusterError: it ended, or took too long.
        """

        def up() -> bool:
            self.check()
            return (self.directory / "up").exists()

        until(f"node {self.name}", up, seconds=START_SECONDS)

    def check(self) -> None:
        """Raise if it has ended without a stop."""
        if self.init:
            self.init.check()

    def stop(self) -> None:
        """Power off: all its processes end at once and its cable is removed."""
        if self.init:
            self.init.kill()
            self.init = None
            until(f"the end of all processes of {self.name}", lambda: not cgroups.processes(self.cgroup), seconds=10)

    def load(self, images: Path) -> None:
        """Load the images of a docker archive onto the node."""
        assert self.init, f"{self.name} is stopped"
        pid = str(network.first_child(self.init.popen.pid))
        run("nsenter", "-t", pid, "-m", "ctr", "-n", "k8s.io", "images", "import", images, seconds=LOAD_SECONDS)


def environment() -> list[str]:
    """Return folders of this machine that every container on a node gets read-only, as drivers on GPU nodes.

    vLLM for CPU with its Python is 6 GB, too much for an image that is built for a test.
    """
    python = Path(sys.base_prefix)
    # Debian's own Python is in the base image, like the rest of /usr.
    return [sys.prefix, *([] if python == Path("/usr") else [str(python)])]


def _json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1))


def _kubelet(node: Node, serving: pki.Pair) -> dict[str, object]:
    place = node.plane.place
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(node.plane.authority.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "clusterDNS": [place.address],
        "clusterDomain": DOMAIN,
        "resolvConf": "",
        # The disk belongs to the machine, and its usage must not affect a test.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi"},
    }


def _proxy(node: Node, kubeconfig: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": node.name,
        "mode": "iptables",
        "clusterCIDR": node.plane.place.addresses.pods,
        "bindAddress": node.address,
        # Limits of the whole kernel, which the node must not set.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _cni(node: Node) -> dict[str, object]:
    # A cable for each pod instead of a bridge: packets between pods of one node are routed, so that Services work
    # without a kernel module that passes bridged packets to iptables.
    ranges = [[{"subnet": node.plane.place.addresses.pods_of_node(node.index)}]]
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {"type": "ptp", "ipam": {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _containerd(node: Node) -> str:
    # Lowering oom_score_adj needs a right that root in a container lacks; every sandbox would fail.
    return f"""version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{archive.PAUSE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{node.directory / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{node.directory / "base.json"}"
"""
