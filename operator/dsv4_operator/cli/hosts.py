"""Deployments on several machines from a client: `dsv4 up --hosts`, `down`, `uninstall`, and commands run over ssh."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import hashlib
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dsv4_operator.api import DSV4Deployment, Finding, Hardware, Severity
from dsv4_operator.api.values import format_duration
from dsv4_operator.backends.hosts import bootstrap
from dsv4_operator.backends.hosts.documents import (
    HOST_KEY,
    INVENTORY,
    Host,
    InvalidInventory,
    Inventory,
    load_inventory,
)
from dsv4_operator.backends.hosts.ssh import CONNECTION_FAILED, Completed, ConnectionLost, Ssh, SshError, connections
from dsv4_operator.backends.hosts.survey import CONTAINERS
from dsv4_operator.backends.local.software import (
    ARCHITECTURES,
    OwnSoftware,
    Release,
    archive_of,
    installer,
    shared_toolkit,
    shared_toolkit_problem,
)
from dsv4_operator.backends.local.state import REMOTE, DeploymentState, StateError, deployments
from dsv4_operator.cli.init import host_names
from dsv4_operator.cli.machine import (
    READY,
    SOFTWARE,
    Record,
    Settings,
    of_another_client,
    save_record,
    secret_paths,
)
from dsv4_operator.cli.output import (
    CommandError,
    ExitCode,
    bad_input,
    convert_os_errors,
    format_elapsed,
    invalid,
    note,
    print_line,
)
from dsv4_operator.cli.sources.base import read_file
from dsv4_operator.cli.sources.local import deployment_state
from dsv4_operator.cli.up import start_limit

_CHECK_SECONDS = 30.0
_STEP_SECONDS = 240.0
_INSTALL_SECONDS = 5400.0
_ATTEMPTS = 4
"""Attempts of a step whose connection is lost, as on a machine that writes gigabytes to a slow disk."""
_PAUSE_SECONDS = 5.0
_PROGRESS_SECONDS = 10.0
_CLOCK_SECONDS = 60.0
# -P: modules in the user's directory must not replace those of Python.
_FIND_PYTHON = (
    "for p in python3 python3.13 python3.12 python3.11; do "
    "$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && exec $p -P \"$@\"; done; "
    "echo 'there is no Python 3.11 or newer' >&2; exit 3"
)

T = TypeVar("T")


def up(file: str, hosts: str, root: Path, *, timeout: float | None) -> ExitCode:
    """Start the deployment in `file` on the machines of `hosts`, an inventory or ssh targets; return when it is ready.

    The start may take `timeout` seconds after the installation; None: the default for the model, and
    `spec.rollout.progressDeadline` for other software than that which served.

    Raises:
        CommandError: a machine or the file is not suitable, a step failed, or the deployment was not ready in time.
    """
    deployment = read_file(file, detect_hardware=False)
    state = deployment_state(root, deployment.metadata.name)
    if state.holder() is not None and not (state.directory / INVENTORY).exists():
        raise bad_input(f"{state.name} runs on this machine alone; run `dsv4 down {state.name}` first")
    known = _records(root).get(deployment.metadata.name)
    return asyncio.run(_with_client(lambda client: client.up(deployment, hosts, known, root, timeout)))


def down(root: Path, record: Record, *, uninstall: bool) -> ExitCode:
    """End a deployment on all machines, with `uninstall` also remove what `up` installed.

    Raises:
        CommandError: a machine does not answer, or a step failed there.
    """
    return asyncio.run(_with_client(lambda client: client.down(root, record, uninstall=uninstall)))


def find(root: Path, name: str | None, *, uncertain: bool = False) -> Record | None:
    """Return the deployment on other machines that a command is for; None if it is for this machine. `uncertain`:
    `name` may be another argument, without a name.

    Raises:
        CommandError: a record cannot be read.
    """
    records = _records(root)
    if name in records:
        return records[name]
    if (name is None or uncertain) and len(records) == 1 and not deployments(root):
        return next(iter(records.values()))
    return None


def elsewhere(root: Path) -> list[Record]:
    """Return the deployments with loops on other machines.

    Raises:
        CommandError: a record cannot be read.
    """
    return [record for record in _records(root).values() if not is_here(root, record)]


def is_here(root: Path, record: Record) -> bool:
    """Return whether the loop runs on this machine, with its files in `root`."""
    return (root / record.name / INVENTORY).exists()


def forward(record: Record, arguments: Sequence[str]) -> int:
    """Run the command line on the machine of the loop, or `logs` on all machines; return its exit code."""
    return asyncio.run(_with_client(lambda client: client.forward(record, arguments)))


def deployment(record: Record) -> DSV4Deployment:
    """Return a deployment on other machines with its status.

    Raises:
        CommandError: the first machine does not answer, or has no such deployment.
    """
    return asyncio.run(_with_client(lambda client: client.deployment(record)))


def examine(record: Record) -> list[Finding]:
    """Return the findings about all machines of a deployment, for `dsv4 doctor`: of this machine if it is one of them,
    else of the first one."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        key = (record.inventory.members(record.name).directory / HOST_KEY).read_text().strip()
        from dsv4_operator.backends.hosts.backend import examine as examine_from_here

        return asyncio.run(examine_from_here(record.inventory, key, first=False))
    try:
        return asyncio.run(_with_client(lambda client: client.examine(record)))
    except CommandError as error:
        target = record.inventory.hosts[0].target
        message = f"its machines cannot be examined: {'; '.join(error.messages)}"
        return [Finding(record.name, "NotExamined", message, f"check `ssh {target} true`", severity=Severity.WARN)]


async def _with_client(action: Callable[[_Client], Awaitable[T]]) -> T:
    try:
        async with connections() as ssh:
            return await action(_Client(ssh))
    except SshError as error:
        raise CommandError(str(error)) from None
    except StateError as error:
        raise bad_input(str(error)) from None


def _records(root: Path) -> dict[str, Record]:
    found = {}
    for path in sorted((root / REMOTE).glob("*.json")):
        try:
            found[path.stem] = Record.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            raise bad_input(f"{path} cannot be read; remove it, and run `dsv4 up FILE --hosts HOSTS` again") from None
    return found


@dataclass(slots=True)
class _Client:
    """Connections to machines with the progress of a command."""

    ssh: Ssh
    begun: float = field(default_factory=time.monotonic)

    def report(self, machine: str, text: str) -> None:
        print_line(f"{format_elapsed(time.monotonic() - self.begun):>7}  {machine}  {text}")

    async def up(
        self, deployment: DSV4Deployment, hosts: str, known: Record | None, root: Path, wanted: float | None
    ) -> ExitCode:
        named = _read_inventory(hosts)
        spec = deployment.spec
        needed = spec.topology.nodes_per_group * max(spec.replicas, 1)
        count = len(named.hosts) if isinstance(named, Inventory) else len(named)
        if needed > count:
            raise bad_input(f"the deployment needs {needed} machines, and {hosts} has {count}; add some")
        # Others need not answer, nor be in the network of these.
        named = (
            named.model_copy(update={"hosts": named.hosts[:needed]}) if isinstance(named, Inventory) else named[:needed]
        )
        same = known is not None and named == [host.target for host in known.inventory.hosts]
        if known and same:
            named = known.inventory
        targets = [host.target for host in named.hosts] if isinstance(named, Inventory) else named
        given = named.state_dir if isinstance(named, Inventory) else Inventory.model_fields["state_dir"].default
        checks = await self._all({target: self._check(target, given) for target in targets})
        if not isinstance(named, Inventory):
            named = _discovered(named, checks)
        elif same:
            named = _present(named, checks)
        inventory = named
        moved = _check_machines(known, inventory)
        cpu = spec.topology.hardware is Hardware.CPU
        source = OwnSoftware.of(cpu=cpu, python=_minor(checks[inventory.hosts[0].target]["python"]))
        self._judge(inventory, checks, source, shared_toolkit(deployment, source, len(inventory.hosts)))
        name, first, found = deployment.metadata.name, checks[inventory.hosts[0].target], _secrets(deployment, root)
        _check_client(name, known, first["loops"].get(name))
        record = Record(
            name=name,
            inventory=inventory,
            key=known.key if known and known.key else secrets.token_hex(32),
            software=f"{inventory.state_dir}/{SOFTWARE}/{source.identity(first['architecture'])}",
            sudo=first["sudo"],
            secrets=tuple(found),
            client=_client_name(),
        )
        if known:
            fallback, unused = _earlier_software(known, record.software)
            # With other addresses, the earlier software has no settings to go back to.
            record = record.model_copy(update={"fallback": "" if moved else fallback, "unused": unused})
        await self._install(record, checks, source)
        limit = start_limit(deployment, wanted)
        settings = [
            Settings(record=record, host=host.name, deployment=deployment, secrets=found, timeout=limit)
            for host in inventory.hosts
        ]
        if moved:
            await self._move(record, moved, settings)
        elif known and (record.fallback or known.software != record.software):
            if wanted is None:
                # Nothing is downloaded: the weights of the earlier software are there.
                limit = min(limit, spec.rollout.progress_deadline)
            return await self._upgrade(root, known, settings, limit)
        # Not before: `down` uses the software of the record, and a refused move is checked again by the next `up`.
        _save(root, record)
        code = await self._start(settings, last=bool(moved))
        if code is ExitCode.OK and record.unused:
            await self._tidy(root, settings)
        return code

    async def _start(self, settings: Sequence[Settings], *, last: bool) -> ExitCode:
        """Start the services, with `last` those of the first machine after the others, and wait until it is ready."""
        first, *others = settings
        # The first one refuses if another version runs. After an end, its loop must not find earlier software on the
        # others.
        for each in (others, [first]) if last else ([first], others):
            await self._all({one.host: self._machine("apply", one, _STEP_SECONDS * 2) for one in each})
        self.report(first.host, f"starting; at most {format_duration(first.timeout)}")
        host, words = first.record.inventory.hosts[0], ["dsv4_operator.cli.machine", "wait"]
        return _exit_code(await self._attached(first.record, host, words, first))

    async def _tidy(self, root: Path, settings: Sequence[Settings]) -> None:
        """Remove the earlier software, after this one has served; the next `up` removes what cannot be removed now."""
        record = settings[0].record.model_copy(update={"fallback": ""})
        # Before: after an interruption, the next `up` must not go back to software that may be gone.
        _save(root, record)
        outcome = await self._try(self._all({one.host: self._machine("tidy", one, _STEP_SECONDS) for one in settings}))
        if isinstance(outcome, Exception):
            note(f"the earlier software could not be removed: {outcome}")
        else:
            _save(root, record.model_copy(update={"unused": ()}))

    async def _upgrade(self, root: Path, known: Record, settings: Sequence[Settings], limit: float) -> ExitCode:
        """Start a deployment with other software, and go back to the earlier one if it does not become ready.

        Clients wait in the queue of the listening socket until a loop has it, then in its gateways.

        Args:
            root: state directory of this machine.
            known: the record until now.
            settings: the machines' parts.
            limit: seconds in which the other software has to be ready, if there is one to go back to.

        Raises:
            CommandError: it is refused, or did not become ready with the new software.
        """
        record = settings[0].record
        async with self._held(settings[0]):
            # Before `prepare` ends the members: after an interruption, the next `up` finds none, and has to know that
            # there is software to go back to.
            unused = {*known.unused, record.software} - {known.software}
            changes = {"fallback": known.fallback or known.software, "unused": tuple(sorted(unused))}
            _save(root, known.model_copy(update=changes))
            try:
                ended = await self._machine("prepare", settings[0], _STEP_SECONDS * 2)
            except CommandError as error:
                if error.code is ExitCode.BAD_INPUT:
                    # It was refused, and ended nothing.
                    _save(root, known)
                raise
            if not known.fallback and not ended:
                # Nothing ran, so there is nothing to go back to.
                record = record.model_copy(update={"fallback": ""})
                settings = [each.model_copy(update={"record": record}) for each in settings]
            elif record.fallback:
                # An attempt that was interrupted may have had a failure of its own.
                own = {"timeout": limit, "replaces": bool(ended)}
                settings = [each.model_copy(update=own) for each in settings]
            _save(root, record)
            try:
                code = await self._start(settings, last=True)
            except CommandError as error:
                if isinstance(error, _Unreachable) or not record.fallback:
                    raise
                code = error.code
                for line in error.messages:
                    note(f"error: {line}")
            if record.fallback and code not in (ExitCode.OK, ExitCode.INTERRUPTED):
                raise await self._back(root, settings)
        if code is ExitCode.OK:
            await self._tidy(root, settings)
        return code

    async def _back(self, root: Path, settings: Sequence[Settings]) -> CommandError:
        """Start a deployment with the software that served before; return the error of the upgrade."""
        record = settings[0].record
        self.report(settings[0].host, f"not ready; going back to the software in {record.fallback}")
        await self._machine("stop-loop", settings[0], _STEP_SECONDS * 2)
        unused = tuple(sorted({*record.unused, record.software} - {record.fallback}))
        record = record.model_copy(update={"software": record.fallback, "fallback": "", "unused": unused})
        _save(root, record)
        text = f"{record.name} did not become ready with the software of this dsv4 (reason above)"
        # A short limit for the new software must not end the return.
        limit = max(settings[0].timeout, Settings.model_fields["timeout"].default)
        changes = {"record": record, "timeout": limit, "replaces": False}
        back = [each.model_copy(update=changes) for each in settings]
        outcome = await self._try(self._start(back, last=True))
        if outcome is ExitCode.OK:
            return CommandError(f"{text}; it serves again with the earlier software")
        reasons = getattr(outcome, "messages", (str(outcome),)) if isinstance(outcome, Exception) else ()
        return CommandError(*reasons, f"{text}, nor with the earlier one; correct the reason, and repeat the command")

    @contextlib.asynccontextmanager
    async def _held(self, settings: Settings) -> AsyncIterator[None]:
        """Hold the listening socket of the API on the first machine in the context."""
        record, host = settings.record, settings.record.inventory.hosts[0]
        pipe, words = asyncio.subprocess.PIPE, [*record.program(), "dsv4_operator.cli.machine", "hold"]
        process = await self.ssh.start(host.target, words, stdin=pipe, stdout=pipe)
        if process.stdin is None or process.stdout is None:
            raise CommandError("no pipe to ssh")
        try:
            process.stdin.write(settings.message())
            line = b""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    line = await process.stdout.readline()
            if line.decode().strip() != READY:
                raise CommandError(f"{host.name}: the listening socket of the API cannot be held; repeat the command")
            yield
        finally:
            process.stdin.close()
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()

    async def deployment(self, record: Record) -> DSV4Deployment:
        host = record.inventory.hosts[0]
        words = [*record.program(), "dsv4_operator.cli.main", "status", record.name, "-o", "json"]
        text = _output(host.name, "`dsv4 status`", await self.ssh.run(host.target, words, seconds=_STEP_SECONDS))
        return DSV4Deployment.model_validate_json(text)

    async def examine(self, record: Record) -> list[Finding]:
        settings = Settings(record=record, host=record.inventory.hosts[0].name)
        (text,) = await self._machine("examine", settings, _STEP_SECONDS, shown=False)
        return [Finding(**{**each, "severity": Severity(each["severity"])}) for each in json.loads(text)]

    async def _move(self, record: Record, moved: Sequence[str], settings: Sequence[Settings]) -> None:
        """End the loop and prove that these are the same machines, before they get other addresses."""
        for line in moved:
            self.report("all", line)
        # The first one, with the loop, last: without the others nothing is to change.
        await self._all({each.host: self._machine("move", each, _STEP_SECONDS) for each in settings[1:]})
        await self._machine("move", settings[0], _STEP_SECONDS * 2)

    async def down(self, root: Path, record: Record, *, uninstall: bool) -> ExitCode:
        first, *_ = hosts = record.inventory.hosts
        checks = {host.name: await self._try(self._check(host.target, record.inventory.state_dir)) for host in hosts}
        failed = [str(found) for found in checks.values() if isinstance(found, Exception)]
        there = [
            host
            for host in hosts
            if not isinstance(facts := checks[host.name], Exception) and Path(record.software).name in facts["software"]
        ]
        steps = {"stop-loop": there[:1] if first in there else [], "stop-host": there}
        for action, machines in {**steps, **({"remove": there} if uninstall else {})}.items():
            if action == "remove" and failed:
                # Their files are in use, and this machine's record is needed for the next attempt.
                break
            for host in machines:
                settings = Settings(record=record, host=host.name)
                outcome = await self._try(self._machine(action, settings, _STEP_SECONDS * 2))
                failed += [str(outcome)] if isinstance(outcome, Exception) else []
        if uninstall and not failed:
            # Without their software: an earlier removal ended there, or was interrupted at its end.
            words = ["remove", record.inventory.state_dir, record.name, Path(record.software).name]
            for host in hosts:
                if host not in there:
                    removed = await self._try(self._bootstrap(record, host, words, seconds=_STEP_SECONDS * 2))
                    failed += [str(removed)] if isinstance(removed, Exception) else []
        if failed:
            raise CommandError(*failed, f"{record.name} may run on these machines; repeat the command when they answer")
        if uninstall:
            (root / REMOTE / f"{record.name}.json").unlink(missing_ok=True)
        print_line(f"{record.name} has ended on {len(hosts)} machines{', and is removed there' if uninstall else ''}")
        return ExitCode.OK

    async def forward(self, record: Record, arguments: Sequence[str]) -> int:
        first = record.inventory.hosts[0]
        words = ["dsv4_operator.cli.main", *arguments]
        if arguments[:1] == ["logs"] and not _about_loop(arguments):
            folder = str(record.inventory.members(record.name).root)
            return await self._logs(record, [*words, "--state-dir", folder])
        return await self._attached(record, first, words)

    async def _logs(self, record: Record, words: Sequence[str]) -> int:
        """Print the logs of all machines; success if one of them has some."""
        results = await self._all(
            {
                host.name: self.ssh.start(
                    host.target,
                    [*record.program(), *words],
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                )
                for host in record.inventory.hosts
            }
        )
        outputs = await asyncio.gather(*(process.communicate() for process in results.values()))
        codes = [process.returncode or 0 for process in results.values()]
        for name, code, (_, errors) in zip(results, codes, outputs, strict=True):
            # Machines without a member of this rank have no logs.
            if all(codes) or code == CONNECTION_FAILED:
                note(f"{name}: {errors.decode(errors='replace').strip()}")
        return min(codes)

    async def _attached(
        self, record: Record, host: Host, words: Sequence[str], settings: Settings | None = None
    ) -> int:
        """Run a program of dsv4 with this terminal, and return its exit code."""
        terminal = settings is None and sys.stdin.isatty() and sys.stdout.isatty()
        stdin = None if settings is None else asyncio.subprocess.PIPE
        process = await self.ssh.start(host.target, [*record.program(), *words], terminal=terminal, stdin=stdin)
        if process.stdin is not None and settings is not None:
            process.stdin.write(settings.message())
            # Without a connection, ssh ends with its exit code.
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
            process.stdin.close()
        code = await process.wait()
        if code == CONNECTION_FAILED:
            raise _Unreachable(
                f"{host.name}: the connection was lost; {record.name} is not affected: see `dsv4 status {record.name}`"
            )
        return code

    async def _all(self, work: dict[str, Awaitable[T]]) -> dict[str, T]:
        """Return the results of all machines; one error with all failures."""
        results = await asyncio.gather(*work.values(), return_exceptions=True)
        failed: list[str] = []
        for result in results:
            if isinstance(result, (SshError, CommandError)):
                failed += result.messages if isinstance(result, CommandError) else [str(result)]
            elif isinstance(result, BaseException):
                raise result
        if any(isinstance(result, SshError) for result in results):
            raise _Unreachable(*failed, code=ExitCode.BAD_INPUT)
        if failed:
            raise bad_input(*failed)
        return {
            name: result for name, result in zip(work, results, strict=True) if not isinstance(result, BaseException)
        }

    @staticmethod
    async def _try(work: Awaitable[T]) -> T | SshError | CommandError:
        try:
            return await work
        except (SshError, CommandError) as error:
            return error

    async def _check(self, target: str, state_dir: str) -> dict[str, Any]:
        """Return the facts about a machine, as root if that is possible without a password."""
        words = ["sh", "-c", _FIND_PYTHON, "sh", "-c", _script(), "check", state_dir]
        done = await self.ssh.run(target, words, seconds=_CHECK_SECONDS)
        output = _output(target, "the check", done)
        try:
            facts: dict[str, Any] = json.loads(output)
        except ValueError:
            printed = output[:80].decode(errors="replace")
            raise CommandError(
                f"{target}: its login files print {printed!r}, which programs over ssh would read; let them print in "
                "interactive shells only"
            ) from None
        if not facts["root"]:
            done = await self.ssh.run(target, ["sudo", "-n", *words], seconds=_CHECK_SECONDS)
            if done.code == 0:
                return {**json.loads(done.output), "sudo": True}
        return {**facts, "sudo": False}

    def _judge(
        self, inventory: Inventory, checks: dict[str, Any], source: OwnSoftware, cuda: Release | None = None
    ) -> None:
        """Report the machines. `cuda`: they need a CUDA toolkit of this release.

        Raises:
            CommandError: some are not suitable; one message for each reason.
        """
        first = checks[inventory.hosts[0].target]
        problems: list[str] = []
        for host in inventory.hosts:
            facts = checks[host.target]
            found = list(_problems(host, facts, first, source, inventory.state_dir))
            if cuda is not None and (problem := shared_toolkit_problem(facts, first, cuda)):
                found.append(problem)
            problems += [f"{host.name}: {problem}" for problem in found]
            if not found:
                start = "with systemd" if facts["systemd"] else "without systemd, so not started after a reboot"
                if facts["systemd"] and not facts["root"]:
                    start = "without root, so not started after a reboot"
                if facts["sudo"]:
                    start += f"; sudo is used for namespaces, units and {inventory.state_dir}"
                compiler = f"CUDA toolkit {cuda[0]}, " if cuda else ""
                free = f"{facts['free_bytes'] / 1e9:.0f} GB free"
                self.report(host.name, f"{host.address}, Python {facts['python']}, {compiler}{free}, {start}")
        if problems:
            raise bad_input(*problems)

    async def _install(self, record: Record, checks: dict[str, Any], source: OwnSoftware) -> None:
        """Install the software on the first machine, and copy it from there to the others."""
        identity = Path(record.software).name
        lacking = [host for host in record.inventory.hosts if identity not in checks[host.target]["software"]]
        first, *_ = record.inventory.hosts
        if not lacking:
            self.report("all", "software is there")
            return
        if first in lacking:
            facts = checks[first.target]
            self.report(first.name, f"installing the software into {record.software}")
            uv, files = facts["uv"], dict(source.files)
            folder = f"{record.software}.input"
            if uv is None:
                files["uv"], uv = await asyncio.to_thread(installer, facts["architecture"]), f"{folder}/uv"
            archive = archive_of(files)
            await self._bootstrap(record, first, ["receive", folder], given=archive)
            words = ["install", record.software, uv, f"{folder}/requirements.txt", folder]
            await self._bootstrap(record, first, words, seconds=_INSTALL_SECONDS)
            self.report(first.name, "software installed")
        if others := [host for host in lacking if host != first]:
            await self._copy(record, first, others)

    async def _copy(self, record: Record, first: Host, others: Iterable[Host]) -> None:
        """Copy the software over the link between the machines, with a token for this copy."""
        token = secrets.token_hex(32).encode() + b"\n"
        words = [*record.prefix, "sh", "-c", _FIND_PYTHON, "sh", "-c", _script()]
        pipe = asyncio.subprocess.PIPE
        server = await self.ssh.start(
            first.target, [*words, "serve", record.software, first.address], stdin=pipe, stdout=pipe, stderr=pipe
        )
        if server.stdin is None or server.stdout is None or server.stderr is None:
            raise CommandError("no pipe to ssh")
        try:
            server.stdin.write(token)
            async with asyncio.timeout(_CHECK_SECONDS):
                port = (await server.stdout.readline()).decode().strip()
                if not port.isdecimal():
                    reason = (await server.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
                    raise CommandError(
                        f"{first.name}: the software cannot be served at {first.address} ({reason}); its address in "
                        "hosts.yaml must be that of the link to the other machines"
                    )

            async def copy(host: Host) -> None:
                self.report(host.name, f"copying the software from {first.name}")
                fetch = ["fetch", record.software, first.address, port]
                await self._bootstrap(record, host, fetch, given=token, seconds=_INSTALL_SECONDS)
                self.report(host.name, "software copied")

            await self._all({host.name: copy(host) for host in others})
        except TimeoutError:
            raise CommandError(f"{first.name}: the copy of the software did not start") from None
        finally:
            server.stdin.close()
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    await server.wait()
            except TimeoutError:
                server.kill()

    async def _bootstrap(
        self, record: Record, host: Host, words: Sequence[str], *, given: bytes = b"", seconds: float = _STEP_SECONDS
    ) -> None:
        command = [*record.prefix, "sh", "-c", _FIND_PYTHON, "sh", "-c", _script(), *words]
        latest = time.monotonic()

        def progress(line: str) -> bool:
            nonlocal latest
            if not re.match(r"\d", line):
                return False
            if time.monotonic() - latest >= _PROGRESS_SECONDS:
                latest = time.monotonic()
                self.report(host.name, line)
            return True

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                done = await self.ssh.run(host.target, command, seconds=seconds, given=given, progress=progress)
                break
            except ConnectionLost:
                if attempt == _ATTEMPTS:
                    raise
                # Every step continues: files that are there are not transferred again.
                self.report(host.name, "the connection was lost; continuing")
                await asyncio.sleep(_PAUSE_SECONDS)
        _output(host.name, f"`{words[0]}` of the software", done)

    async def _machine(self, action: str, settings: Settings, seconds: float, *, shown: bool = True) -> list[str]:
        """Run an action of `cli.machine`, report its output, and return its lines."""
        host = next(host for host in settings.record.inventory.hosts if host.name == settings.host)
        words = [*settings.record.program(), "dsv4_operator.cli.machine", action]
        done = await self.ssh.run(host.target, words, seconds=seconds, given=settings.message())
        output = done.output.decode(errors="replace").splitlines()
        for line in output if shown else ():
            self.report(host.name, line)
        if done.code:
            lines = [line.removeprefix("error: ") for line in done.errors.splitlines()] or [f"exit code {done.code}"]
            latest = [line for line in lines if line][-5:]
            raise CommandError(*(f"{host.name}: {line}" for line in latest), code=_exit_code(done.code))
        return output


class _Unreachable(CommandError):
    """A machine does not answer, and work may go on there."""


def _client_name() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # Without an entry in the list of users.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _save(root: Path, record: Record) -> None:
    with convert_os_errors("the record of the deployment cannot be written"):
        save_record(root, record)


def _earlier_software(known: Record, software: str) -> tuple[str, tuple[str, ...]]:
    """Return the directory of the software that served last, empty if it is `software`, and the directories that are
    not needed once `software` has served."""
    served = known.fallback or known.software
    unused = {*known.unused, known.software, served} - {software}
    return "" if served == software else served, tuple(sorted(unused))


def _exit_code(code: int) -> ExitCode:
    return ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED


def _about_loop(arguments: Sequence[str]) -> bool:
    return re.search(r"(-c|--component)[ =]?loop\b", " ".join(arguments)) is not None


def _script() -> str:
    return Path(bootstrap.__file__).read_text()


def _output(machine: str, what: str, done: Completed) -> bytes:
    if done.code:
        reason = done.errors.rpartition("\n")[2] or f"exit code {done.code}"
        raise CommandError(f"{machine}: {what} failed: {reason}")
    return done.output


def _read_inventory(hosts: str) -> Inventory | list[str]:
    """Return the inventory in a file, or the ssh targets in a list.

    Raises:
        CommandError: the file or a name is invalid.
    """
    if Path(hosts).suffix in (".yaml", ".yml", ".json") or os.path.isfile(hosts):
        try:
            return load_inventory(Path(hosts).read_text(encoding="utf-8"))
        except InvalidInventory as error:
            raise invalid(hosts, error.findings) from None
        except (OSError, UnicodeDecodeError) as error:
            raise bad_input(
                f"--hosts {hosts!r}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
            ) from None
    names = host_names([part.strip() for part in hosts.split(",") if part.strip()])
    if not names:
        raise bad_input(f"--hosts {hosts!r}: names no machine; write a file, or names as in `ssh NAME`")
    return list(names.values())


def _check_machines(known: Record | None, inventory: Inventory) -> list[str]:
    """Check that a deployment stays on its machines: on others, the earlier members would run on.

    Returns a line for each machine with another address than before.

    Raises:
        CommandError: it has other machines.
    """
    if known is None or known.inventory == inventory:
        return []
    before = known.inventory.hosts
    identities = [[(host.name, host.target) for host in hosts] for hosts in (before, inventory.hosts)]
    if identities[0] != identities[1] or known.inventory != inventory.model_copy(update={"hosts": before}):
        names = ", ".join(host.name for host in before)
        raise bad_input(
            f"{known.name} is on {names}, with another inventory than this one; run `dsv4 uninstall {known.name}` first"
        )
    return [
        f"hosts[{place}].address: {old.name} has {new.address}, and had {old.address}; the group forms again there"
        for place, (old, new) in enumerate(zip(before, inventory.hosts, strict=True))
        if (old.address, old.interface) != (new.address, new.interface)
    ]


def _check_client(name: str, known: Record | None, loop: dict[str, str] | None) -> None:
    """Check that a running loop was started with the host key of this client.

    Raises:
        CommandError: another client started it.
    """
    if loop is not None:
        key = known.key if known else ""
        if hashlib.sha256(key.encode()).hexdigest() != loop["key"]:
            raise bad_input(of_another_client(name, loop["who"]))


def _present(inventory: Inventory, checks: dict[str, Any]) -> Inventory:
    """Return the inventory with the present addresses, if a machine has lost that of the inventory.

    Raises:
        CommandError: the machines share no network, or only on other interfaces, such as those of a slower network.
    """
    if all(
        not (facts := checks[host.target])["addresses"]
        or host.address in [one["address"] for one in facts["addresses"]]
        for host in inventory.hosts
    ):
        return inventory
    found = _discovered([host.target for host in inventory.hosts], checks)
    places = list(zip(inventory.hosts, found.hosts, strict=True))
    if other := [old.name for old, new in places if old.interface not in (None, new.interface)]:
        raise bad_input(
            f"hosts: the interface of {', '.join(other)} has no address; connect its link, or name the machines' "
            "new addresses in a file: --hosts hosts.yaml"
        )
    moved = [old.model_copy(update={"address": new.address, "interface": new.interface}) for old, new in places]
    return inventory.model_copy(update={"hosts": tuple(moved)})


def _discovered(targets: Sequence[str], checks: dict[str, Any]) -> Inventory:
    """Return an inventory with the addresses of the fastest network that all machines share.

    Raises:
        CommandError: they share none.
    """
    networks: dict[Any, dict[str, dict[str, Any]]] = {}
    for target in targets:
        for one in checks[target]["addresses"]:
            network = IPv4Interface(f"{one['address']}/{one['prefix']}").network
            if one["up"] and not one["interface"].startswith(CONTAINERS):
                networks.setdefault(network, {}).setdefault(target, one)
    # An RDMA port with an address may have no cable. Bridges of one program have the same address on all machines.
    shared = [found for found in networks.values() if len({one["address"] for one in found.values()}) == len(targets)]
    if not shared:
        raise bad_input(
            f"the machines {', '.join(targets)} share no IPv4 network; configure their link, or name the addresses "
            "in a file: --hosts hosts.yaml"
        )
    best = max(shared, key=lambda found: [min(found[target][key] for target in targets) for key in ("rdma", "speed")])
    found = ((name, target, best[target]) for name, target in host_names(targets).items())
    return Inventory(
        hosts=tuple(
            Host(name=name, ssh=target, address=one["address"], interface=one["interface"])
            for name, target, one in found
        )
    )


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])


def _problems(
    host: Host, facts: dict[str, Any], first: dict[str, Any], source: OwnSoftware, state_dir: str
) -> Iterable[str]:
    if not (facts["root"] or facts["writable"]):
        yield (
            f"the host service needs root for namespaces, units and {state_dir}; connect as root, or allow `sudo` "
            "without a password"
        )
    if facts["sudo"] != first["sudo"]:
        yield "it allows sudo without a password, and the first machine does not, or vice versa; make them alike"
    if _minor(facts["python"]) != _minor(first["python"]):
        yield f"it has Python {facts['python']}, and the first machine {first['python']}; install the same release"
    elif facts["interpreter"] != first["interpreter"]:
        yield (
            f"its Python is {facts['interpreter']}, and that of the first machine {first['interpreter']}; the copied "
            "software needs it at the same path"
        )
    if not facts["headers"]:
        yield f"Python.h is missing; install it: apt-get install python{_minor(facts['python'])}-dev"
    if missing := [name for name in ("gcc", "g++") if name not in facts["compilers"]]:
        yield f"{' and '.join(missing)} cannot be found; install: apt-get install {' '.join(missing)}"
    if facts["architecture"] != first["architecture"]:
        yield f"it is {facts['architecture']}, and the first machine {first['architecture']}; use machines of one kind"
    if facts["architecture"] not in ARCHITECTURES:
        yield f"its architecture {facts['architecture']} is not supported; use {' or '.join(ARCHITECTURES)}"
    addresses = [one["address"] for one in facts["addresses"]]
    if facts["addresses"] and host.address not in addresses:
        yield f"it has not the address {host.address} of the inventory; it has {', '.join(addresses)}"
    if facts["free_bytes"] < (needed := source.missing_bytes(facts)):
        yield f"{facts['free_bytes'] / 1e9:.1f} GB are free at {state_dir}, and the software needs {needed / 1e9:.1f}"
    if abs(facts["time"] - first["time"]) > _CLOCK_SECONDS:
        yield f"its clock differs by {facts['time'] - first['time']:.0f} s from the first machine's; set it"


def _secrets(deployment: DSV4Deployment, root: Path) -> dict[str, str]:
    """Return the secrets of the deployment by path.

    Raises:
        CommandError: one cannot be read.
    """
    try:
        state = DeploymentState(root, deployment.metadata.name)
        return {path: state.secret(ref, field) for path, (field, ref) in secret_paths(deployment).items()}
    except StateError as error:
        raise bad_input(str(error)) from None
