"""Part of `dsv4 up --hosts` that runs on each machine, with the installed software: files, units and processes.

The client starts it over ssh as `python -m dsv4_operator.cli.machine ACTION` with `Settings` on stdin.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from dsv4_operator.api import DSV4Deployment, SecretKeyRef
from dsv4_operator.backends.hosts.bootstrap import CLIENT, COMPLETE, alone, started_by
from dsv4_operator.backends.hosts.documents import DOWN, HOST_KEY, INVENTORY, Inventory
from dsv4_operator.backends.hosts.service import STARTUP_ERROR
from dsv4_operator.backends.local.gateway import hold_listener
from dsv4_operator.backends.local.state import REMOTE, DeploymentState, StateError, deployments
from dsv4_operator.backends.local.supervisor import read_kept_status
from dsv4_operator.cli import processes, up
from dsv4_operator.cli.output import (
    CommandError,
    ExitCode,
    bad_input,
    convert_os_errors,
    note,
    print_line,
)
from dsv4_runtime.contract.base import Report
from dsv4_runtime.util.files import replace_file, sync_folder

SOFTWARE = "software"
"""Directory of the environments; file of a deployment with the path of its own."""
READY = "ready"
"""First line that `hold` prints."""
APPLIED = "applied"
"""File with the digest of the settings that a machine's services were started with."""
BEFORE = "before"
"""File with the latest incarnation of each group before the start of the loop."""
_UNITS = Path("/etc/systemd/system")
_COMMAND = Path("/usr/local/bin/dsv4")
_SYSTEMCTL_SECONDS = 60.0
_STOP_SECONDS = 120.0
_START_SECONDS = 120.0
"""The first start after a copy reads the packages from the disk."""
ACTION_SECONDS = 300.0
"""Longest wait for the action of another client."""
_MISSING_SECONDS = 10.0
"""Time between two runs of the loop's supervisor after which it counts as ended."""

_UNIT = """\
# Written by `dsv4 up`; removed by `dsv4 down`.
[Unit]
Description=dsv4 {role} of the deployment {name}
Wants=network-online.target
After=network-online.target
RequiresMountsFor={state_dir}
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Restart=always
RestartSec={pause}
KillMode={kill}
TimeoutStopSec={stop:.0f}
# One process without memory must not end the others.
OOMPolicy=continue
LimitNOFILE=1048576
LimitMEMLOCK=infinity
TasksMax=infinity
UMask=0077

[Install]
WantedBy=multi-user.target
"""


class Record(Report):
    """A deployment on several machines, as its clients know it: `remote/NAME.json` in a state directory."""

    name: str
    inventory: Inventory
    key: str = ""
    software: str
    """Directory of the environment on every machine."""
    sudo: bool = False
    """Whether commands on the machines are run with sudo."""
    secrets: tuple[str, ...] = ()
    """Paths of its secrets below the directory of secrets."""
    client: str = ""
    """User and machine that started it, such as `me@laptop`."""
    fallback: str = ""
    """Directory of the software that served before, until that of `software` has served."""
    unused: tuple[str, ...] = ()
    """Directories of earlier software, to be removed once that of `software` has served."""

    @property
    def prefix(self) -> list[str]:
        """Return the start of command lines with the rights of root on the machines."""
        return ["sudo", "-n"] if self.sudo else []

    def program(self) -> list[str]:
        """Return the start of command lines of dsv4 on the machines."""
        variable = f"DSV4_STATE_DIR={self.inventory.state_dir}"
        # -P: modules in the user's directory must not replace those of Python.
        return [*self.prefix, "env", variable, f"{self.software}/bin/python", "-P", "-m"]


class Settings(Report):
    """One machine's part of a deployment. A client of a newer version ends deployments of an older one, and goes back
    to its software."""

    record: Record
    host: str
    """Name of the machine in the inventory."""
    deployment: DSV4Deployment | None = None
    """For `apply`; fields of a newer version are an error."""
    secrets: Mapping[str, str] = {}
    """Contents of secrets by path below the directory of secrets."""
    timeout: float = 600.0
    """Limit of `wait`, in seconds."""
    replaces: bool = False
    """For `wait`: other software served until now, and serves again if this one's first start fails."""

    @property
    def first(self) -> bool:
        return self.record.inventory.hosts[0].name == self.host

    @property
    def loop(self) -> DeploymentState:
        """Return the files of the loop."""
        return DeploymentState(Path(self.record.inventory.state_dir), self.record.name)

    @property
    def members(self) -> DeploymentState:
        return self.record.inventory.members(self.record.name)

    def digest(self) -> str:
        """Return a digest of everything that a restart of the services is needed for."""
        record = self.record.model_copy(update={"client": "", "fallback": "", "unused": ()})
        changes = {"timeout": 0.0, "replaces": False, "record": record}
        return hashlib.sha256(self.model_copy(update=changes).to_json().encode()).hexdigest()

    def message(self) -> bytes:
        """Return the text for the machine, in one line. Older software refuses fields of the manifest that it does not
        know, so those that the user left out are left out."""
        return self.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Service:
    """A supervisor with its loop: a unit of systemd, or a process in the background."""

    kind: str
    """`host` or `loop`."""
    state: DeploymentState
    arguments: tuple[str, ...] = ()
    kill: str = "control-group"

    @property
    def unit(self) -> str:
        return f"dsv4-{self.kind}@{self.state.name}.service"

    @property
    def role(self) -> str:
        return "host service" if self.kind == "host" else "control loop"

    @property
    def command(self) -> list[str]:
        words = [sys.executable, "-m", "dsv4_operator.backends.local.supervisor", *self.arguments]
        return [*words, f"--state-dir={self.state.root}", f"--name={self.state.name}"]

    def running(self) -> bool:
        return self.state.directory.exists() and self.state.holder() is not None

    def start(self) -> None:
        """Start it anew, also after every start of the machine where systemd runs.

        Raises:
            CommandError: systemd refused it.
        """
        if not has_systemd():
            processes.start_loop(self.state, self.command)
            return
        text = _UNIT.format(
            role=self.role,
            name=self.state.name,
            state_dir=self.state.root,
            command=shlex.join(self.command),
            kill=self.kill,
            pause=1 if self.kind == "host" else 3,
            stop=_STOP_SECONDS,
        )
        with convert_os_errors("the unit cannot be written"):
            replace_file(_UNITS / self.unit, text, mode=0o644)
        _systemctl("daemon-reload")
        _systemctl("enable", self.unit)
        _systemctl("restart", self.unit, seconds=_STOP_SECONDS + _SYSTEMCTL_SECONDS)

    def stop(self) -> None:
        """End it, and do not start it with the machine any more.

        Raises:
            CommandError: systemd refused that.
        """
        if has_systemd() and (_UNITS / self.unit).exists():
            _systemctl("disable", "--now", self.unit, seconds=_STOP_SECONDS + _SYSTEMCTL_SECONDS)
            (_UNITS / self.unit).unlink(missing_ok=True)
            _systemctl("daemon-reload")
        if self.running():
            up.end_loop(self.state, grace=_STOP_SECONDS)


def has_systemd() -> bool:
    """Return whether this process may manage units."""
    return Path("/run/systemd/system").is_dir() and os.geteuid() == 0


def _systemctl(*words: str, seconds: float = _SYSTEMCTL_SECONDS) -> None:
    try:
        done = subprocess.run(["systemctl", *words], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise CommandError(f"`systemctl {' '.join(words)}` did not end within {seconds:.0f} s") from None
    if done.returncode:
        raise CommandError(f"`systemctl {' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")


def loop_service(state: DeploymentState) -> Service:
    """Return the service of the loop; only its main process gets SIGTERM, and ends the rest in its order."""
    return Service("loop", state, kill="mixed")


def host_service(settings: Settings) -> Service:
    """Return the host service of this machine."""
    inventory, members = settings.record.inventory, settings.members
    address = next(host.address for host in inventory.hosts if host.name == settings.host)
    arguments = (
        "--loop=dsv4_operator.backends.hosts.service",
        f"--host={settings.host}",
        f"--listen={address}:{inventory.service_port}",
        f"--key-file={members.directory / HOST_KEY}",
    )
    return Service("host", members, arguments)


def apply(settings: Settings) -> ExitCode:
    """Write the files of this machine and start its services, unless they run with the same settings.

    Raises:
        CommandError: another version of the deployment runs, or a service does not start.
    """
    if (deployment := settings.deployment) is None:
        raise bad_input("deployment: is required by `apply`")
    host, loop = host_service(settings), loop_service(settings.loop)
    applied, same = settings.members.directory / APPLIED, _is_applied(settings)
    if settings.first and loop.running() and not same:
        raise bad_input(_refusal(settings) or _other(settings))
    if not (same and host.running()):
        # Written again at the end: an interrupted attempt may leave other files.
        applied.unlink(missing_ok=True)
        _write_files(settings, deployment)
        if not has_systemd():
            # The lock of one with other settings would refuse the next one.
            host.stop()
        host.start()
        _await_lock(host)
        replace_file(applied, settings.digest())
        print_line("host service started")
    if settings.first:
        # Of an earlier attempt, and of an end that was interrupted.
        for file in (processes.startup_error_file(settings.loop), settings.loop.directory / DOWN):
            file.unlink(missing_ok=True)
    if settings.first and not loop.running():
        earlier = settings.loop.object()
        incarnations = {group.index: group.incarnation for group in earlier.status.groups} if earlier else {}
        replace_file(settings.loop.directory / BEFORE, json.dumps(incarnations))
        loop.start()
        # Before another client may find that no loop runs.
        _await_lock(loop)
        print_line("control loop started")
    return ExitCode.OK


def _is_applied(settings: Settings) -> bool:
    applied = settings.members.directory / APPLIED
    return applied.exists() and applied.read_text() == settings.digest()


def _other(settings: Settings) -> str:
    name = settings.record.name
    return (
        f"{name} is already running; it runs with other machines, software or secrets; to use these, run `dsv4 down "
        f"{name}` first"
    )


def of_another_client(name: str, who: str) -> str:
    """Return the reason why a client with another host key is refused."""
    return (
        f"{name} is already running, and {who}; use it there, or copy ~/.dsv4/{REMOTE}/{name}.json from there to the "
        f"same place here, or end it with `dsv4 down {name}` there"
    )


def _refusal(settings: Settings) -> str:
    """Return why the running loop is not replaced: another client started it, or with another file; empty if it may
    be."""
    name, key = settings.record.name, settings.loop.directory / HOST_KEY
    if not key.exists() or key.read_text().strip() != settings.record.key:
        return of_another_client(name, started_by(str(settings.loop.directory)))
    if settings.deployment is not None and (other := up.difference(settings.loop, settings.deployment)):
        return f"{name} is already running{other}"
    return ""


def prepare(settings: Settings) -> ExitCode:
    """End the members and the loop if they run with other software, before that of `settings` is applied.

    Raises:
        CommandError: another client started them, or with another file.
    """
    if loop_service(settings.loop).running() and not _is_applied(settings):
        if reason := _refusal(settings):
            raise bad_input(reason)
        software = settings.members.directory / SOFTWARE
        if software.exists() and software.read_text() == settings.record.software:
            raise bad_input(_other(settings))
        print_line("ending the members and the loop, to start them with this software")
        end_members(settings.loop)
    return ExitCode.OK


def hold(settings: Settings) -> ExitCode:
    """Hold the listening socket of the API from one loop to the next one, until standard input ends."""
    settings.loop.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    hold_listener(settings.loop, sys.stdin.buffer, lambda: print_line(READY))
    return ExitCode.OK


def move(settings: Settings) -> ExitCode:
    """End the loop and leave the members, before the machines get other addresses.

    The next loop fences the members by the names of their machines, so each must be the machine that it was.

    Raises:
        CommandError: it is another machine, or the loop runs with another file.
    """
    key = settings.members.directory / HOST_KEY
    if not key.exists() or key.read_text().strip() != settings.record.key:
        name = settings.record.name
        raise bad_input(
            f"hosts: {settings.host} has no files of {name}, so it is not the machine that had the earlier address, "
            f"whose members may run on; run `dsv4 uninstall {name}` first"
        )
    if (settings.loop.directory / INVENTORY).exists() != settings.first:
        raise bad_input(
            f"hosts: {settings.host} {'has no' if settings.first else 'has the'} loop of {settings.record.name}, so it "
            "is another machine of the deployment; check the names and addresses of the machines in ~/.ssh/config"
        )
    if settings.first:
        running = loop_service(settings.loop).running()
        if running and settings.deployment and (other := up.difference(settings.loop, settings.deployment)):
            raise bad_input(f"{settings.record.name} cannot move{other}")
        loop_service(settings.loop).stop()
    return ExitCode.OK


def _write_files(settings: Settings, deployment: DSV4Deployment) -> None:
    record, members = settings.record, settings.members
    try:
        with convert_os_errors("the files of the deployment cannot be written"):
            members.root.mkdir(parents=True, exist_ok=True)
            members.prepare(deployment.spec.replicas)
            (members.directory / STARTUP_ERROR).unlink(missing_ok=True)
            replace_file(members.directory / HOST_KEY, record.key + "\n")
            replace_file(members.directory / SOFTWARE, record.software)
            members.save_manifest(deployment)
            for path, text in settings.secrets.items():
                file = settings.loop.secrets / path
                file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                replace_file(file, text)
            if settings.first:
                settings.loop.prepare(deployment.spec.replicas)
                replace_file(settings.loop.directory / HOST_KEY, record.key + "\n")
                replace_file(settings.loop.directory / CLIENT, record.client or "another client")
                replace_file(settings.loop.directory / INVENTORY, record.inventory.to_json())
                settings.loop.save_manifest(deployment)
            else:
                own = {"key": _client_key(settings), "fallback": "", "unused": ()}
                save_record(settings.loop.root, record.model_copy(update=own))
            if os.geteuid() == 0 and (not _COMMAND.exists() or _is_ours(_COMMAND)):
                default = f"${{DSV4_STATE_DIR:-{record.inventory.state_dir}}}"
                script = f'#!/bin/sh\nexec env DSV4_STATE_DIR="{default}" {record.software}/bin/dsv4 "$@"\n'
                _COMMAND.parent.mkdir(parents=True, exist_ok=True)
                replace_file(_COMMAND, script, mode=0o755)
    except StateError as error:
        raise bad_input(str(error)) from None


def _client_key(settings: Settings) -> str:
    """Return the key for the record on this machine: only the client needs it, which may be this machine."""
    file = settings.loop.root / REMOTE / f"{settings.record.name}.json"
    with contextlib.suppress(OSError, ValueError):
        return settings.record.key if Record.model_validate_json(file.read_bytes()).key else ""
    return ""


def _is_ours(command: Path) -> bool:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return "DSV4_STATE_DIR" in command.read_text()
    return False


def save_record(root: Path, record: Record) -> None:
    """Save a record in the state directory `root`.

    Raises:
        OSError: it cannot be written.
    """
    (root / REMOTE).mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(root / REMOTE / f"{record.name}.json", record.to_json(indent=2) + "\n")


def _await_lock(service: Service) -> None:
    """Wait until a service has its lock, which a host service takes before it listens."""
    deadline = time.monotonic() + _START_SECONDS
    while not service.running():
        if error := processes.startup_error(service.state):
            raise bad_input(error)
        if time.monotonic() > deadline:
            raise CommandError(
                f"the {service.role} did not start within {_START_SECONDS:.0f} s; log: {service.state.log}"
            )
        time.sleep(0.1)


@dataclass(slots=True)
class _LoopProcess:
    """The loop of a service, as `up` sees the one that it started."""

    state: DeploymentState
    pid: int = 0
    returncode: int | None = None
    seen: float = field(default_factory=time.monotonic)

    def poll(self) -> int | None:
        """Return the exit code after the end; a restart by systemd is no end."""
        now = time.monotonic()
        if processes.startup_error(self.state):
            self.returncode = 2
        elif self.state.holder() is not None:
            self.seen = now
        elif now - self.seen > _MISSING_SECONDS:
            self.returncode = 1
        return self.returncode

    def wait(self) -> int:
        """Return the exit code; the service runs on."""
        return self.returncode or 0


def wait(settings: Settings) -> ExitCode:
    """Show the progress until the deployment is ready.

    Raises:
        CommandError: the start failed or timed out; the deployment runs on.
    """
    with processes.SignalCounter() as signals:
        process, pid = _LoopProcess(settings.loop), settings.loop.holder()
        # Before the first report of this loop, the status is that of an earlier one, which may have been ready.
        reported = pid is not None and read_kept_status(pid) is not None
        previous = None if reported else settings.loop.object_text()
        before = None
        if settings.replaces:
            numbers = json.loads((settings.loop.directory / BEFORE).read_text())
            before = {int(index): incarnation for index, incarnation in numbers.items()}
        started = up.StartedDeployment(
            settings.loop, process, signals, previous, detach=True, timeout=settings.timeout, before=before
        )
        return started.wait_until_ready()


def stop_loop(settings: Settings) -> ExitCode:
    """End the members on all machines, then the loop."""
    end_members(settings.loop)
    return ExitCode.OK


def end_members(state: DeploymentState) -> bool:
    """End the members of `state` on all machines, then the loop; return whether it ran."""
    service = loop_service(state)
    ran = service.running()
    if state.directory.exists():
        (state.directory / DOWN).touch()
    service.stop()
    (state.directory / DOWN).unlink(missing_ok=True)
    return ran


def stop_host(settings: Settings) -> ExitCode:
    """End the host service with all members of this machine."""
    host_service(settings).stop()
    if settings.members.directory.exists():
        processes.remove_runtime_files(settings.members)
    (settings.members.directory / APPLIED).unlink(missing_ok=True)
    return ExitCode.OK


def tidy(settings: Settings) -> ExitCode:
    """Remove the earlier software of the deployment that no other one on this machine uses."""
    root, record = settings.loop.root, settings.record
    used = {record.software}
    for other in (*deployments(settings.members.root), *deployments(root)):
        if other.name != record.name and not (other.directory / INVENTORY).exists():
            try:
                used.add((other.directory / SOFTWARE).read_text())
            except FileNotFoundError:
                # It is of this machine alone or of an earlier version of dsv4, and may use any of them.
                return ExitCode.OK
    with alone(str(root / SOFTWARE), ACTION_SECONDS):
        for path in map(Path, {*record.unused} - used):
            if path.parent == root / SOFTWARE:
                _remove_software(path)
    return ExitCode.OK


def _remove_software(path: Path) -> None:
    # After a loss of power, software that is removed in part must not count as complete.
    if (mark := path / COMPLETE).exists():
        mark.unlink()
        sync_folder(path)
    for each in (path, path.with_name(f"{path.name}.input")):
        shutil.rmtree(each, ignore_errors=True)


def examine(settings: Settings) -> ExitCode:
    """Print the findings about the machines of the deployment as JSON, for `dsv4 doctor` of a client."""
    from dsv4_operator.cli.diagnostics import about_machines

    print_line(json.dumps([each.to_dict() for each in about_machines(settings.loop.root, settings.record.name)]))
    return ExitCode.OK


def remove(settings: Settings) -> ExitCode:
    """Remove the files of a deployment that was stopped; without others also software, caches and command."""
    root = settings.loop.root
    shutil.rmtree(settings.members.directory, ignore_errors=True)
    if settings.first:
        shutil.rmtree(settings.loop.directory, ignore_errors=True)
    (root / REMOTE / f"{settings.record.name}.json").unlink(missing_ok=True)
    others = [*deployments(settings.members.root), *deployments(root)]
    try:
        used = {path for other in others if (manifest := other.manifest()) for path in secret_paths(manifest)}
    except (OSError, ValueError):
        # It may use all of them.
        used = set(settings.record.secrets)
    for secret in set(settings.record.secrets) - used:
        (settings.loop.secrets / secret).unlink(missing_ok=True)
    if others:
        print_line(f"kept the software, for {', '.join(dict.fromkeys(other.name for other in others))}")
    else:
        if _is_ours(_COMMAND):
            _COMMAND.unlink()
        for name in (settings.members.root.name, "cache"):
            shutil.rmtree(root / name, ignore_errors=True)
        # That of the record last: a repeated call after an interruption runs with it.
        own = Path(settings.record.software).name
        for path in sorted((root / SOFTWARE).glob("*"), key=lambda path: path.name == own):
            _remove_software(path)
        shutil.rmtree(root / SOFTWARE, ignore_errors=True)
        # It may have records of deployments on other machines, with their keys.
        with contextlib.suppress(OSError):
            (root / REMOTE).rmdir()
    if any((weights := settings.loop.weights).glob("*")):
        size = sum(file.lstat().st_size for file in weights.rglob("*") if file.is_file())
        print_line(f"kept {weights} ({size / 1e9:.1f} GB)")
    return ExitCode.OK


def secret_paths(deployment: DSV4Deployment) -> dict[str, tuple[str, SecretKeyRef]]:
    """Return field and reference of the secrets of a deployment, by path below the directory of secrets."""
    source, keys = deployment.spec.model.source.secret_key_ref, deployment.spec.gateway.api_keys
    named = {"spec.model.source": source, "spec.gateway.apiKeys": keys.secret_key_ref if keys else None}
    return {f"{ref.name}/{ref.key}": (field, ref) for field, ref in named.items() if ref is not None}


_ACTIONS: dict[str, Callable[[Settings], ExitCode]] = {
    "apply": apply,
    "prepare": prepare,
    "move": move,
    "hold": hold,
    "wait": wait,
    "stop-loop": stop_loop,
    "stop-host": stop_host,
    "tidy": tidy,
    "remove": remove,
    "examine": examine,
}
_CONCURRENT = ("hold", "wait", "examine")
"""Actions that change nothing, and run beside others."""


def main() -> int:
    """Run one action; errors are printed as by `dsv4`."""
    action = sys.argv[1]
    try:
        settings = Settings.model_validate_json(sys.stdin.buffer.readline())
        with (
            convert_os_errors(f"`{action}` failed"),
            contextlib.nullcontext() if action in _CONCURRENT else alone(str(settings.loop.root), ACTION_SECONDS),
        ):
            return _ACTIONS[action](settings)
    except (CommandError, StateError, ValidationError) as error:
        for message in getattr(error, "messages", (str(error),)):
            note(f"error: {message}")
        return getattr(error, "code", ExitCode.FAILED)


if __name__ == "__main__":
    sys.exit(main())
