"""Commands on other machines through OpenSSH, so that the user's configuration, agents and jump hosts apply.

Nothing waits for input: a machine that requires a password, or whose key is unknown, gives an error. The commands of
one machine share one connection. The bandwidth between two machines is measured by short programs over such
connections: TCP with python3, RDMA with perftest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import shlex
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_operator.backends.hosts.survey import End

CONNECT_SECONDS = 10
_CLOSE_SECONDS = 5.0
_KEPT_SECONDS = 60
"""Time for which an unused connection stays open."""
CONNECTION_FAILED = 255
"""Exit code of ssh for its own failures."""
_LONGEST_PATH = 107
"""Limit of the kernel for paths of sockets; ssh appends a dot and 16 characters while it creates one."""
_NAME_LENGTH = 40 + 1 + 16
_MOST_ERROR_BYTES = 1 << 16


class SshError(Exception):
    """A command could not be run on a machine; the text contains the machine, the reason and the remedy."""


class ConnectionLost(SshError):
    """The connection ended during a command that had reported progress."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended on the other machine."""

    code: int
    output: bytes
    errors: str


@contextlib.asynccontextmanager
async def connections(*, options: Sequence[str] = ()) -> AsyncIterator[Ssh]:
    """Yield connections that end with the context; `options` as of `Ssh`."""
    usual = tempfile.gettempdir()
    # On macOS, and in some sessions of users, the usual directory has a long name.
    folder = usual if _excess(Path(usual, "dsv4-12345678")) <= 0 else "/tmp"  # noqa: S108 - mode 0700, random name
    with tempfile.TemporaryDirectory(prefix="dsv4-", dir=folder) as sockets:
        ssh = Ssh(Path(sockets), options=options)
        try:
            yield ssh
        finally:
            await ssh.close()


def _excess(sockets: Path) -> int:
    return len(str(sockets)) + 1 + _NAME_LENGTH - _LONGEST_PATH


class Ssh:
    """Connections to machines."""

    def __init__(self, sockets: Path, *, options: Sequence[str] = ()) -> None:
        """Args:
        sockets: directory of the connections' sockets, mode 0700, with a short path.
        options: further arguments for ssh, such as `-F FILE`.

        Raises:
            SshError: the path is too long.
        """
        if (excess := _excess(sockets)) > 0:
            raise SshError(f"{sockets} is {excess} characters too long for sockets of ssh; choose a shorter directory")
        self._sockets = sockets
        self._options = tuple(options)
        self._targets: set[str] = set()

    def command(self, target: str, words: Sequence[str], *, terminal: bool = False) -> list[str]:
        """Return the command line that runs `words` on `target`, whose shell gets them quoted; with `terminal` on a
        terminal of its own."""
        self._targets.add(target)
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_SECONDS),
            # A connection that is cut ends its commands after 15 s.
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPath": f"{self._sockets}/%C",
            "ControlPersist": str(_KEPT_SECONDS),
            # Ports that the user's configuration forwards belong to the user's own connection.
            "ClearAllForwardings": "yes",
        }
        options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", *self._options, "-t" if terminal else "-T", *options, "--", target, shlex.join(words)]

    async def start(
        self, target: str, words: Sequence[str], *, terminal: bool = False, **settings: Any
    ) -> asyncio.subprocess.Process:
        """Start a command; `settings` are those of `asyncio.create_subprocess_exec`.

        Raises:
            SshError: ssh is not installed.
        """
        try:
            return await asyncio.create_subprocess_exec(*self.command(target, words, terminal=terminal), **settings)
        except FileNotFoundError as error:
            raise SshError("the program 'ssh' is not installed (Debian: openssh-client)") from error

    async def run(
        self,
        target: str,
        words: Sequence[str],
        *,
        seconds: float,
        given: bytes = b"",
        progress: Callable[[str], bool] | None = None,
    ) -> Completed:
        """Run a command and return its result; `given` is its standard input. `progress` receives the lines of its
        standard error as they arrive, and returns whether a line is one of progress; the others are in the result.

        Raises:
            ConnectionLost: the connection ended after progress.
            SshError: there is no connection, it was lost, or the command did not end within `seconds`.
        """
        pipe = asyncio.subprocess.PIPE
        # Ctrl+C at the terminal must not end the shared connection before `close`.
        process = await self.start(target, words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        latest = ""

        def keep(line: str) -> bool:
            nonlocal latest
            if progress is None or not progress(line):
                return True
            latest = line
            return False

        try:
            async with asyncio.timeout(seconds):
                output, errors = await _communicate(process, given, keep if progress else None)
        except TimeoutError as error:
            remedy = f"try it with `ssh {target}`"
            raise SshError(
                f"{target}: `{shlex.join(words)[:200]}` did not end within {seconds:g} s; {remedy}"
            ) from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                # The connection in the background may keep the pipes open.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await process.wait()
        text = errors.decode(errors="replace").strip()
        if process.returncode == CONNECTION_FAILED:
            reason = text.rpartition("\n")[2] or "the connection was lost"
            if latest:
                raise ConnectionLost(f"{target}: {reason} after `{latest}`; the same command continues the work")
            raise SshError(f"{target}: {reason}; `ssh {target} true` must work without a question")
        code = process.returncode if process.returncode is not None else -signal.SIGKILL
        return Completed(code, output, text)

    async def close(self) -> None:
        """End all connections."""
        null = asyncio.subprocess.DEVNULL
        for target in sorted(self._targets):
            *options, _, _, _ = self.command(target, ())
            command = [*options, "-O", "exit", "--", target]
            # Without ssh there is no connection.
            with contextlib.suppress(FileNotFoundError):
                process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=null)
                try:
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
        self._targets.clear()


async def _communicate(
    process: asyncio.subprocess.Process, given: bytes, keep: Callable[[str], bool] | None
) -> tuple[bytes, bytes]:
    if keep is None or process.stdin is None or process.stdout is None or process.stderr is None:
        return await process.communicate(given)
    stream, errors = process.stderr, bytearray()

    async def write(stdin: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            stdin.write(given)
            await stdin.drain()
        stdin.close()

    async def read() -> None:
        while line := await stream.readline():
            if keep(line.decode(errors="replace").rstrip()):
                errors.extend(line)
                del errors[:-_MOST_ERROR_BYTES]

    output, _, _, _ = await asyncio.gather(process.stdout.read(), write(process.stdin), read(), process.wait())
    return output, bytes(errors)


_MEASURE_SECONDS = 2.0
"""Duration of each measurement."""
_CALL_SECONDS = 40.0
_WAIT_SECONDS = 12.0
"""Time for which the two ends wait for each other."""
_PORTS = range(20_000, 30_000)
_RDMA = "ib_write_bw"

# Arguments: mode, address of the receiver, port, token, own address, duration, wait.
_PROGRAM = r"""
import json, socket, sys, time
mode, address, port, token, own, seconds, wait = sys.argv[1:]
port, token, seconds, wait = int(port), token.encode(), float(seconds), float(wait)
if mode == "receive":
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen(8)
    end = time.monotonic() + wait + seconds
    total = 0
    while not total:
        server.settimeout(max(0.1, end - time.monotonic()))
        stream, _ = server.accept()
        stream.settimeout(seconds + 5)
        given = b""
        while len(given) < len(token):
            data = stream.recv(len(token) - len(given))
            if not data:
                break
            given += data
        if given != token:
            stream.close()
            continue
        buffer = bytearray(1 << 20)
        while True:
            size = stream.recv_into(buffer)
            if not size:
                break
            total += size
        stream.sendall(b"%020d" % total)
else:
    end = time.monotonic() + wait
    while True:
        try:
            stream = socket.create_connection((address, port), timeout=3, source_address=(own, 0))
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    stream.settimeout(seconds + 5)
    stream.sendall(token)
    data = memoryview(bytes(1 << 20))
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        stream.sendall(data)
    stream.shutdown(socket.SHUT_WR)
    total = b""
    while len(total) < 20:
        part = stream.recv(20)
        if not part:
            raise OSError("the receiver closed the connection")
        total += part
    print(json.dumps({"bytes": int(total), "seconds": time.monotonic() - begun}))
"""


class NotMeasured(Exception):
    """A measurement failed; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Place:
    """One end of a link on a machine."""

    name: str
    target: str
    """For ssh."""
    end: End
    tools: frozenset[str]


async def tcp_bandwidth(ssh: Ssh, sender: Place, receiver: Place) -> float:
    """Return the Gbit/s of one TCP stream.

    Raises:
        NotMeasured: nothing arrives, or a machine has no python3.
    """
    for place in (sender, receiver):
        if "python3" not in place.tools:
            raise NotMeasured(f"python3 is not installed on {place.name}")
    port, token = secrets.choice(_PORTS), secrets.token_hex(16)

    def call(place: Place, mode: str) -> Coroutine[Any, Any, Completed]:
        # -I: without modules of the user's directory.
        words = ["python3", "-I", "-", mode, str(receiver.end.address.ip), str(port), token, str(place.end.address.ip)]
        words += [str(_MEASURE_SECONDS), str(_WAIT_SECONDS)]
        return ssh.run(place.target, words, seconds=_CALL_SECONDS, given=_PROGRAM.encode())

    received, sent = await _both(call(receiver, "receive"), call(sender, "send"))
    if sent.code:
        # The reason of the receiver, such as a missing address, precedes that of the sender.
        raise NotMeasured(_reason(received if received.code and "timed out" not in received.errors else sent))
    try:
        # Login files may print before.
        figures = json.loads(sent.output.strip().rpartition(b"\n")[2])
        return float(figures["bytes"]) * 8 / float(figures["seconds"]) / 1e9
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        raise NotMeasured(f"{sender.name} printed {sent.output[:80]!r} in place of a result") from None


async def rdma_bandwidth(ssh: Ssh, sender: Place, receiver: Place) -> float | None:
    """Return the Gbit/s of RDMA writes; None without perftest or RDMA ports on both machines.

    Raises:
        NotMeasured: the measurement failed.
    """
    if any(place.end.hca is None or _RDMA not in place.tools for place in (sender, receiver)):
        return None
    port = secrets.choice(_PORTS)

    def call(place: Place, words: Sequence[str]) -> Coroutine[Any, Any, Completed]:
        device, _, number = (place.end.hca or "").partition(":")
        limit = str(int(_WAIT_SECONDS + _MEASURE_SECONDS))
        # -R: connections by address, so that the GID is that of the address.
        command = ["timeout", limit, _RDMA, "-R", "-F", "-d", device, "-i", number or "1", "-p", str(port)]
        command += ["-D", str(int(_MEASURE_SECONDS)), "--report_gbits", *words]
        return ssh.run(place.target, command, seconds=_CALL_SECONDS)

    async def send() -> Completed:
        # Its receiver must listen before.
        await asyncio.sleep(1)
        return await call(sender, [str(receiver.end.address.ip)])

    received, sent = await _both(call(receiver, ()), send())
    if sent.code:
        raise NotMeasured(_reason(sent if sent.errors or not received.errors else received))
    return read_perftest(sent.output.decode(errors="replace"))


_ROW = re.compile(r"\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*")


def read_perftest(text: str) -> float:
    """Return the average Gbit/s in the output of `ib_write_bw --report_gbits`.

    Raises:
        NotMeasured: there is no such row.
    """
    for line in text.splitlines():
        if (row := _ROW.fullmatch(line)) is not None:
            return float(row[1])
    raise NotMeasured(f"{_RDMA} printed no result")


async def _both(
    receive: Coroutine[Any, Any, Completed], send: Coroutine[Any, Any, Completed]
) -> tuple[Completed, Completed]:
    receiving = asyncio.create_task(receive)
    try:
        sent = await send
        # The receiver of a sender that failed would wait for its limit.
        await asyncio.wait({receiving}, timeout=1 if sent.code else None)
        return receiving.result() if receiving.done() else Completed(0, b"", ""), sent
    except SshError as error:
        raise NotMeasured(str(error)) from None
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)


def _reason(failed: Completed) -> str:
    """Return the last line of the errors, that of the exception."""
    return failed.errors.rpartition("\n")[2][:200] or f"exit code {failed.code}"
