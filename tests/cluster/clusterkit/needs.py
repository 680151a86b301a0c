"""Requirements on the machine: reported in one sentence, or installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from clusterkit.processes import run
from clusterkit.waiting import ClusterError, say

# Debian package by a file that it installs.
_FOR_NODES = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "ip": "iproute2",
    "iptables": "iptables",
    "unshare": "util-linux",
}
_FOR_POLICIES = {"ipset": "ipset"}
_FOR_IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
INSTALL_SECONDS = 600.0


def missing(*, nodes: bool, images: bool, policies: bool = False) -> list[str]:
    """Return the Debian packages that are missing."""
    wanted = {
        **(_FOR_NODES if nodes else {}),
        **(_FOR_IMAGES if images else {}),
        **(_FOR_POLICIES if policies else {}),
    }
    # Programs of administrators are not on every user's path.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [
        package
        for program, package in wanted.items()
        if not (Path(program).exists() if program.startswith("/") else shutil.which(program, path=path))
    ]


def lacks(*, nodes: bool, images: bool, policies: bool = False) -> str | None:
    """Return in one sentence with the remedy why this machine cannot run such a cluster; None if it can."""
    if (nodes or images) and os.geteuid() != 0:
        return "real nodes and images need root, and this process is not (nodes of KWOK do not: --nodes 0 --fake 8)"
    packages = missing(nodes=nodes, images=images, policies=policies)
    if packages and not (shutil.which("apt-get") and _may_install()):
        return _refusal(packages)
    return None


def _may_install() -> bool:
    return os.environ.get("INSTALL") != "0"


def _confirmed(packages: list[str]) -> bool:
    """Return whether packages may be installed; prompts on a terminal."""
    if os.environ.get("INSTALL") == "1" or os.environ.get("CI") or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    sys.stderr.write(f"missing packages: {' '.join(packages)}. Install them with apt-get? [Y/n] ")
    sys.stderr.flush()
    return not sys.stdin.readline().strip().lower().startswith("n")


def provide(*, nodes: bool, images: bool, policies: bool = False) -> None:
    """Install missing packages.

    Raises:
        ClusterError: this is not possible here; the text has the remedy.
    """
    if reason := lacks(nodes=nodes, images=images, policies=policies):
        raise ClusterError(reason)
    packages = missing(nodes=nodes, images=images, policies=policies)
    if packages and not _confirmed(packages):
        raise ClusterError(_refusal(packages))
    if packages:
        say(f"installing packages: {' '.join(packages)}")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "-qq", "update", seconds=INSTALL_SECONDS, env=quiet)
        command = ("apt-get", "-qq", "install", "-y", "--no-install-recommends")
        run(*command, *packages, seconds=INSTALL_SECONDS, env=quiet)
    if packages := missing(nodes=nodes, images=images, policies=policies):
        raise ClusterError(_refusal(packages))


def _refusal(packages: list[str]) -> str:
    return f"missing packages: {', '.join(packages)}; run as root: apt-get install {' '.join(packages)}"
