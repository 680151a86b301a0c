"""Commands over the real ssh; with a real sshd where one is installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Interface
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.backends.hosts import ssh as ssh_module
from dsv4_operator.backends.hosts.ssh import Completed, NotMeasured, Place, Ssh, SshError, tcp_bandwidth
from dsv4_operator.backends.hosts.survey import End

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")

WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=4)


@pytest.fixture
def folder() -> Iterator[Path]:
    # A short path: ssh creates sockets there.
    with tempfile.TemporaryDirectory(prefix="s") as path:
        yield Path(path)


@given(WORDS)
def test_the_shell_of_the_machine_gets_every_word_unchanged(words: list[str]) -> None:
    # sshd runs the last argument as a command of the user's shell.
    text = Ssh(Path("/tmp/s")).command("spark-1", ["printf", "%s\\0", "-", *words])[-1]
    output = subprocess.run(["sh", "-c", text], capture_output=True, check=True, timeout=120).stdout
    assert output.decode().split("\0")[:-1] == ["-", *words]


def test_ssh_accepts_the_options(folder: Path) -> None:
    (folder / "config").write_text(
        "Host spark-1\n  HostName 192.0.2.7\n  User me\n  ProxyJump gate\n  LocalForward 8000 127.0.0.1:8000\n"
    )
    ssh = Ssh(folder, options=("-F", str(folder / "config")))
    program, *arguments = ssh.command("spark-1", ["true"])
    found = subprocess.run([program, "-G", *arguments], capture_output=True, text=True, check=True, timeout=120).stdout
    lines = set(found.splitlines())
    assert {"hostname 192.0.2.7", "user me", "proxyjump gate"} <= lines, "the user's configuration applies"
    assert {"batchmode yes", "connecttimeout 10", "controlmaster auto", "serveraliveinterval 5"} <= lines
    # With ExitOnForwardFailure, a second connection would fail.
    assert not [line for line in lines if line.startswith("localforward")], "ports of the user's own connection"


def test_a_path_that_is_too_long_for_sockets(folder: Path) -> None:
    with pytest.raises(SshError, match="61 characters too long"):
        Ssh(Path("/" + "x" * 109))
    Ssh(Path("/" + "x" * 48))


async def test_a_refused_connection(folder: Path, unused_tcp_port: int) -> None:
    ssh = Ssh(folder, options=("-F", "none", "-p", str(unused_tcp_port)))
    with pytest.raises(SshError, match=r"127\.0\.0\.1: .*Connection refused; `ssh 127\.0\.0\.1 true` must work"):
        await ssh.run("127.0.0.1", ["true"], seconds=60)
    await ssh.close()


async def test_a_machine_that_accepts_and_never_answers(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ssh = Ssh(folder, options=("-F", "none", "-p", str(silent.getsockname()[1])))
        begun = time.monotonic()
        with pytest.raises(SshError, match="`true` did not end within 1 s"):
            await ssh.run("127.0.0.1", ["true"], seconds=1)
        assert time.monotonic() - begun < 60
        await ssh.close()


SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@pytest.fixture
def served(folder: Path, unused_tcp_port_factory: Callable[[], int]) -> Iterator[Ssh]:
    """Run a real sshd as this user."""
    if SSHD is None or os.getuid() != 0:
        pytest.skip("sshd is not installed, or this is not root")
    for name in ("host", "mine"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=60
        )
    port = unused_tcp_port_factory()
    (folder / "sshd").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/mine.pub\n"
        "StrictModes no\nPidFile none\nPasswordAuthentication no\n"
    )
    (folder / "config").write_text(
        f"Host *\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/mine\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd")], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield Ssh(folder, options=("-F", str(folder / "config")))
    finally:
        server.terminate()
        server.wait(60)


async def test_commands_share_a_connection(served: Ssh, folder: Path) -> None:
    found = await served.run("spark-1", ["sh", "-c", "cat; echo no >&2; exit 3"], seconds=30, given=b"a\0b" * 100_000)
    assert (found.code, found.output) == (3, b"a\0b" * 100_000)
    assert found.errors.endswith("no")
    (folder / "mine").unlink()
    # The key is gone, so only the existing connection works.
    both = await asyncio.gather(*(served.run("spark-1", ["echo", word], seconds=30) for word in ("a b", "$HOME")))
    assert [one.output for one in both] == [b"a b\n", b"$HOME\n"]
    await served.close()
    with pytest.raises(SshError, match="Permission denied"):
        await served.run("spark-1", ["true"], seconds=30)
    await served.close()


async def test_a_command_that_does_not_end(served: Ssh) -> None:
    with pytest.raises(SshError, match="did not end within"):
        await served.run("spark-1", ["sleep", "600"], seconds=1.5)
    assert (await served.run("spark-1", ["true"], seconds=30)).code == 0
    await served.close()


class Printing:
    """Machines whose commands print a text."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    async def run(self, target: str, words: list[str], **_: object) -> Completed:
        return Completed(0, self.text, "")


async def test_login_files_that_print_do_not_hide_a_measurement() -> None:
    end = End("eth0", IPv4Interface("10.0.0.1/24"), True, 1500, 1000, False, None)
    places = [Place(name, name, end, frozenset({"python3"})) for name in "ab"]
    printing = Printing(b'Welcome to {a}\n{"bytes": 1000000000, "seconds": 2.0}\n')
    assert await tcp_bandwidth(printing, *places) == 4.0  # type: ignore[arg-type]
    for text in (b"", b"Welcome\n", b"[1]\n"):
        with pytest.raises(NotMeasured, match=r"a printed .* in place of a result"):
            await tcp_bandwidth(Printing(text), *places)  # type: ignore[arg-type]


async def test_the_bandwidth_of_two_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real programs; ssh runs them on this machine."""
    monkeypatch.setattr(ssh_module, "_WAIT_SECONDS", 30.0)
    monkeypatch.setattr(ssh_module, "_MEASURE_SECONDS", 0.5)
    (folder / "ssh").write_text('#!/bin/bash\nexec sh -c "${@: -1}"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def place(name: str, address: str) -> Place:
        end = End("lo", IPv4Interface(address), True, 65536, None, False, None)
        return Place(name, name, end, frozenset({"python3"}))

    ssh = Ssh(folder)
    here = place("a", "127.0.0.1/8")
    assert await tcp_bandwidth(ssh, here, place("b", "127.0.0.2/8")) > 0.0
    monkeypatch.setattr(ssh_module, "_WAIT_SECONDS", 1.0)
    with pytest.raises(NotMeasured, match="Cannot assign requested address"):
        await tcp_bandwidth(ssh, here, place("b", "192.0.2.1/24"))
    (folder / "ssh").write_text("#!/bin/sh\necho gone >&2; exit 255\n")
    with pytest.raises(NotMeasured, match=r"[ab]: gone; `ssh [ab] true` must work"):
        await tcp_bandwidth(ssh, here, place("b", "127.0.0.2/8"))
