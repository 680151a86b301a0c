"""Machines behind a real sshd: network namespaces of this machine, connected by a switch.

sshd runs in inetd mode as the ProxyCommand of ssh, so the machines need no network to the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_SYS = "mount -t sysfs sysfs /sys && echo ready && exec sleep 300"


class NotHere(Exception):
    """Such machines cannot be created here; the text has the reason."""


@dataclass(frozen=True)
class SshMachines:
    """Running machines."""

    options: tuple[str, ...]
    """Options for ssh."""
    holders: dict[str, int]
    """Process ids of the namespaces by name."""

    def ip(self, name: str, words: str) -> None:
        """Run `ip` on a machine."""
        _inside(self.holders[name], f"ip {words}")


def _inside(pid: int, words: str) -> None:
    subprocess.run(["nsenter", f"--target={pid}", "--net", "--mount", *words.split()], check=True, timeout=20)


@contextlib.contextmanager
def ssh_machines(folder: Path, names: tuple[str, ...], network: str = "10.88.1.") -> Iterator[SshMachines]:
    """Yield machines with the addresses `network`1, 2 and so on of `fabric0`.

    Raises:
        NotHere: there is no sshd, or no right to create namespaces.
    """
    if SSHD is None or os.getuid() != 0:
        raise NotHere("sshd is not installed, or this is not root")
    for name in ("host", "mine"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, timeout=20)
    (folder / "sshd").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/mine.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
        "PasswordAuthentication no\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []

    def namespace() -> int:
        words = ["unshare", "--net", "--mount", "--kill-child", "sh", "-c", _SYS]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise NotHere("network namespaces cannot be created")
        _inside(process.pid, "ip link set lo up")
        return process.pid

    try:
        switch = namespace()
        _inside(switch, "ip link add switch type bridge")
        _inside(switch, "ip link set switch up")
        holders, config = {}, []
        for number, name in enumerate(names, start=1):
            pid = holders[name] = namespace()
            _inside(switch, f"ip link add port{number} type veth peer name fabric0 netns {pid}")
            _inside(switch, f"ip link set port{number} master switch up")
            _inside(pid, f"ip addr add {network}{number}/24 dev fabric0")
            _inside(pid, "ip link set fabric0 up")
            enter = f"nsenter --target={pid} --net --mount {SSHD} -i -f {folder}/sshd"
            config.append(f"Host {name}\n  ProxyCommand {enter}\n")
        (folder / "config").write_text(
            "\n".join(config)
            + f"\nHost *\n  User root\n  IdentityFile {folder}/mine\n  IdentitiesOnly yes\n"
            + f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n"
        )
        yield SshMachines(("-F", str(folder / "config")), holders)
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
