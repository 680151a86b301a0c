"""Machines for tests: systemd-nspawn with systemd as process 1, sshd, and an address on a bridge."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from dsv4_operator.backends.hosts import bootstrap
from dsv4_operator.backends.local.software import OwnSoftware

PACKAGES = (
    "systemd,systemd-sysv,dbus,openssh-server,iproute2,procps,python3,python3-dev,python3-venv,gcc,g++,libnuma1,"
    "ca-certificates"
)
RELEASE = "bookworm"
BRIDGE, NETWORK = "dsv4hosts", "10.98.0"
BUILD_SECONDS = 900.0
BOOT_SECONDS = 180.0
_SSH = """\
Host *
 User root
 IdentityFile {key}
 StrictHostKeyChecking no
 UserKnownHostsFile /dev/null
 LogLevel ERROR
"""


def lacks() -> str | None:
    """Return why machines cannot be started here; None if they can."""
    if os.geteuid() != 0:
        return "it needs root for systemd-nspawn"
    missing = [name for name in ("systemd-nspawn", "debootstrap", "ssh", "ip") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def until(true: Callable[[], bool], what: str, seconds: float) -> float:
    """Wait for a condition; return the elapsed seconds."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)
    return time.monotonic() - begun


class Nspawn:
    """One machine."""

    def __init__(self, world: World, number: int) -> None:
        self.name, self.address = f"spark-{number}", f"{NETWORK}.{number}"
        self.world, self.root = world, world.folder / f"m{number}"
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Copy the base system and configure name, network and ssh."""
        if not self.root.exists():
            subprocess.run(["cp", "-a", self.world.folder / "base", self.root], check=True, timeout=BUILD_SECONDS)
        (self.root / "etc/hostname").write_text(f"{self.name}\n")
        (self.root / "etc/machine-id").write_text("")
        keys = self.root / "root/.ssh"
        keys.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(self.world.folder / "key.pub", keys / "authorized_keys")
        self._write_address()
        wanted = self.root / "etc/systemd/system/multi-user.target.wants/systemd-networkd.service"
        if not wanted.is_symlink():
            wanted.symlink_to("/lib/systemd/system/systemd-networkd.service")

    def _write_address(self) -> None:
        network = self.root / "etc/systemd/network/10-host0.network"
        network.write_text(f"[Match]\nName=host0\n[Network]\nAddress={self.address}/24\nLinkLocalAddressing=no\n")

    def readdress(self, number: int) -> None:
        """Change the address of the running machine, also for later starts."""
        before, self.address = self.address, f"{NETWORK}.{number}"
        self._write_address()
        for change in (f"del {before}", f"add {self.address}"):
            words = f"ip address {change}/24 dev host0".split()
            subprocess.run(self.inside(*words), check=True, timeout=10)
        self.world.configure()

    def boot(self) -> None:
        """Start the machine and wait for ssh."""
        command = ["systemd-nspawn", "-q", "-b", "-D", str(self.root), f"--network-bridge={BRIDGE}"]
        command += ["--register=no", "--keep-unit", "-M", self.name]
        with open(self.world.folder / f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(lambda: self.run("true").returncode == 0, f"ssh of {self.name}", BOOT_SECONDS)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command over ssh."""
        command = [str(self.world.ssh), "-o", "ConnectTimeout=5", "-o", "BatchMode=yes", self.address, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def cut(self) -> None:
        """Cut the power: process 1 is killed from outside, and the kernel kills the other processes."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            child.send_signal(signal.SIGKILL)
        self.process.wait(60)

    @property
    def leader(self) -> int:
        """Return the id, here, of the machine's process 1."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children()[0].pid

    def inside(self, *words: str) -> list[str]:
        """Return the command line that runs a command in the machine without ssh."""
        return ["nsenter", f"--target={self.leader}", "--mount", "--uts", "--ipc", "--net", "--pid", *words]

    def close(self) -> None:
        """Stop the machine."""
        if self.process is not None and self.process.poll() is None:
            self.cut()


class World:
    """Machines with a client: a state directory, and an `ssh` that connects to them by address."""

    def __init__(self, folder: Path, count: int = 2, *, linked: bool = False) -> None:
        """Args:
        folder: directory with the base system and the files of the machines.
        count: number of machines.
        linked: whether every machine begins with the software, as links to the files of this environment;
            otherwise the first one has a copy, and `up` copies it to the others.
        """
        self.folder, self.linked = folder, linked
        self.ssh = folder / "bin" / "ssh"
        self.machines = [Nspawn(self, number) for number in range(1, count + 1)]

    def start(self) -> None:
        """Build the base system once, then boot new machines with a new client."""
        self.ssh.parent.mkdir(parents=True, exist_ok=True)
        base, part = self.folder / "base", self.folder / "base.part"
        if not base.exists():
            # An interrupted one is not configured.
            shutil.rmtree(part, ignore_errors=True)
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(part)]
            subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)
            part.rename(base)
        key = self.folder / "key"
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
        self.configure()
        self.ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.folder}/config "$@"\n')
        self.ssh.chmod(0o755)
        subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True, timeout=10)
        subprocess.run(["ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE], check=True, timeout=10)
        subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True, timeout=10)
        # An earlier run had perhaps other machines or another version, and ended before it removed its deployment.
        for folder in (self.folder / "client", *(machine.root for machine in self.machines)):
            shutil.rmtree(folder, ignore_errors=True)
        for machine in self.machines:
            machine.prepare()
        self.seed()
        for machine in self.machines:
            machine.boot()

    def configure(self) -> None:
        """Write the configuration of ssh, with the names of the machines."""
        names = [f"Host {machine.name}\n HostName {machine.address}\n" for machine in self.machines]
        (self.folder / "config").write_text("".join(names) + _SSH.format(key=self.folder / "key"))

    def seed(self) -> None:
        """Install the software of this environment without a package index: on the first machine, from where `up`
        copies it, or linked on all of them."""
        root = self.machines[0].root
        version = subprocess.run(
            ["chroot", root, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        source = OwnSoftware.of(cpu=True, python=version)
        for machine in self.machines if self.linked else self.machines[:1]:
            self._install(machine.root, source, version)

    def _install(self, root: Path, source: OwnSoftware, version: str) -> None:
        path = f"/var/lib/dsv4/software/{source.identity(os.uname().machine)}"
        folder = root / path.lstrip("/")
        if (folder / ".complete").exists():
            return
        shutil.rmtree(folder.parent, ignore_errors=True)
        subprocess.run(["chroot", root, "python3", "-m", "venv", "--without-pip", path], check=True, timeout=120)
        packages = folder / "lib" / f"python{version}" / "site-packages"
        copy = ["cp", "-al" if self.linked else "-a"]
        for entry in Path(psutil.__file__).parents[1].iterdir():
            if not entry.name.startswith(("_editable", "__editable", "dsv4", "__pycache__")):
                subprocess.run([*copy, entry, packages / entry.name], check=True, timeout=BUILD_SECONDS)
        # Programs and data outside of the packages are not copied, so the lists of files must not have them either.
        for record in packages.glob("*.dist-info/RECORD"):
            kept = [
                row for row in record.read_text().splitlines(keepends=True) if not row.lstrip('"').startswith("../")
            ]
            # It may be a link to the file of this environment.
            record.unlink()
            record.write_text("".join(kept))
        (folder / bootstrap.INSTALLED).write_bytes(source.files["requirements.txt"])
        for name, content in source.files.items():
            if name.endswith(".whl"):
                zipfile.ZipFile(io.BytesIO(content)).extractall(packages)
        program = folder / "bin" / "dsv4"
        program.write_text(
            f"#!{path}/bin/python\nimport sys\nfrom dsv4_operator.cli.main import main\nsys.exit(main())\n"
        )
        program.chmod(0o755)
        (folder / ".complete").touch()

    def dsv4(self, *words: str, program: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Run `dsv4` as the client."""
        variables = {"PATH": f"{self.ssh.parent}:{os.environ['PATH']}", "DSV4_STATE_DIR": str(self.folder / "client")}
        return subprocess.run(
            [*program, *words],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def close(self) -> None:
        """Remove everything except the base system."""
        for machine in self.machines:
            machine.close()
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, timeout=10, capture_output=True)
