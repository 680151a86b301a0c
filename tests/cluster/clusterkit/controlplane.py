"""etcd, API server, controllers and scheduler, configured as in production: TLS, RBAC, Node authorizer."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from clusterkit import pki, processes
from clusterkit.layout import DOMAIN, Addresses, Settings, free_port
from clusterkit.processes import Process
from clusterkit.waiting import until

# During other work on two cores, the API server alone took up to half a minute.
READY_SECONDS = 180.0
# With Go's defaults, garbage collection takes a fifth of the API server's processor time, and memory is available. At a
# limit below its live memory it takes most of it: 1,000 deployments need more than 1 GiB.
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_COLLECTS_LATER = {"GOGC": "400", "GOMEMLIMIT": str(max(2**30, _MEMORY // 4))}


@dataclass(frozen=True)
class Place:
    """Programs, files, addresses and names of the control plane."""

    programs: Path
    files: Path
    settings: Settings
    addresses: Addresses
    address: str
    """Address of the API server."""
    port: int

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.port}"

    def log(self, name: str) -> Path:
        return self.files / "logs" / f"{name}.log"


class ControlPlane:
    """A running control plane."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.authority = pki.Authority(place.files, "kubernetes")
        self._accounts = pki.service_account_keys(place.files)
        self.admin = self.kubeconfig("kubernetes-admin", groups=["system:masters"], file="admin")
        self.processes: list[Process] = []

    def kubeconfig(self, name: str, *, groups: list[str] | None = None, file: str = "") -> Path:
        """Return a kubeconfig for a user of that name; RBAC determines the user's rights."""
        stem = file or name.replace(":", "-")
        pair = self.authority.issue(name, groups=groups or [], file=stem)
        return pki.kubeconfig(
            self.place.files / f"{stem}.kubeconfig",
            cluster=f"dsv4-{self.place.settings.name}",
            server=self.place.server,
            authority=self.authority.certificate,
            pair=pair,
        )

    def start(self) -> None:
        """Start all parts, and return when the API server is ready.

        Raises:
            ClusterError: a part ended, or the API server was not ready in time.
        """
        etcd = self._kine() if self.place.settings.k3s else self._etcd()
        self._run("kube-apiserver", self._apiserver(etcd))
        until("the API server", self._ready, seconds=READY_SECONDS)
        manager = self.kubeconfig("system:kube-controller-manager")
        self._run("kube-controller-manager", [
            *_own(manager),
            f"--service-account-private-key-file={self._accounts.key}",
            f"--root-ca-file={self.authority.certificate}",
            "--use-service-account-credentials=true",
            # The default is 50 s, by which every test of a lost node would be longer; kubelets report every 10 s.
            "--node-monitor-grace-period=25s",
        ])  # fmt: skip
        self._run("kube-scheduler", _own(self.kubeconfig("system:kube-scheduler")))

    def check(self) -> None:
        """Raise if a part has ended."""
        for process in self.processes:
            process.check()

    def stop(self) -> None:
        """Stop all parts, dependent ones first."""
        for process in reversed(self.processes):
            process.stop()

    def _run(self, name: str, arguments: list[str]) -> None:
        command: list[str | Path] = [self.place.programs / name, *arguments]
        self.processes.append(processes.start(name, command, log=self.place.log(name), env=_COLLECTS_LATER))

    def _etcd(self) -> list[str]:
        files = self.place.files
        # A separate authority: access to etcd is access to everything.
        authority = pki.Authority(files, "etcd")
        server = authority.issue("etcd", hosts=["127.0.0.1"], file="etcd")
        client = authority.issue("kube-apiserver", file="etcd-client")
        port, peers = free_port(), free_port()
        self._run("etcd", [
            f"--data-dir={files / 'etcd'}",
            # A cluster for tests need not survive a crash of the machine.
            "--unsafe-no-fsync=true",
            f"--listen-client-urls=https://127.0.0.1:{port}",
            f"--advertise-client-urls=https://127.0.0.1:{port}",
            f"--listen-peer-urls=https://127.0.0.1:{peers}",
            f"--initial-advertise-peer-urls=https://127.0.0.1:{peers}",
            f"--initial-cluster=default=https://127.0.0.1:{peers}",
            *(f"--{kind}cert-file={server.certificate}" for kind in ("", "peer-")),
            *(f"--{kind}key-file={server.key}" for kind in ("", "peer-")),
            *(f"--{kind}trusted-ca-file={authority.certificate}" for kind in ("", "peer-")),
            *(f"--{kind}client-cert-auth=true" for kind in ("", "peer-")),
        ])  # fmt: skip
        return [
            f"--etcd-servers=https://127.0.0.1:{port}",
            f"--etcd-cafile={authority.certificate}",
            f"--etcd-certfile={client.certificate}",
            f"--etcd-keyfile={client.key}",
        ]

    def _kine(self) -> list[str]:
        """Start the datastore of a k3s server: SQLite behind the API of etcd, at a socket that only root may open."""
        folder = self.place.files / "kine"
        folder.mkdir(mode=0o700)
        # Those of k3s.
        options = "_journal=WAL&cache=shared&_busy_timeout=30000&_txlock=immediate"
        self._run("kine", [
            f"--endpoint=sqlite://{folder / 'state.db'}?{options}",
            f"--listen-address=unix://{folder / 'kine.sock'}",
            "--metrics-bind-address=0",
        ])  # fmt: skip
        return [f"--etcd-servers=unix://{folder / 'kine.sock'}"]

    def _apiserver(self, etcd: list[str]) -> list[str]:
        place = self.place
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}"]
        hosts = [*names, "localhost", "127.0.0.1", place.address, place.addresses.first_service]
        server = self.authority.issue("kube-apiserver", hosts=hosts)
        kubelets = self.authority.issue("kube-apiserver-kubelet-client")
        return [
            *etcd,
            f"--bind-address={place.address}",
            f"--secure-port={place.port}",
            # Without nodes, no pod needs the Service of the API server, which must not contain loopback addresses.
            *([] if place.settings.nodes else ["--endpoint-reconciler-type=none"]),
            f"--tls-cert-file={server.certificate}",
            f"--tls-private-key-file={server.key}",
            f"--client-ca-file={self.authority.certificate}",
            f"--kubelet-certificate-authority={self.authority.certificate}",
            f"--kubelet-client-certificate={kubelets.certificate}",
            f"--kubelet-client-key={kubelets.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
            f"--service-account-key-file={self._accounts.certificate}",
            f"--service-account-signing-key-file={self._accounts.key}",
            f"--service-cluster-ip-range={place.addresses.services}",
        ]

    def _ready(self) -> bool:
        self.check()
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        try:
            with urllib.request.urlopen(f"{self.place.server}/readyz", context=context, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _own(kubeconfig: Path) -> list[str]:
    """Return the common arguments of the controllers and the scheduler."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={free_port()}",
        f"--cert-dir={kubeconfig.parent / kubeconfig.stem}",
        "--leader-elect=false",
    ]
