"""Deployments of this machine: the files of `dsv4 up` in the state directory."""

from __future__ import annotations

import heapq
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from dsv4_operator.api import ConditionStatus, ConditionType, DSV4Deployment, GroupPhase, GroupStatus, Reason
from dsv4_operator.backends.local.facts import available_memory, local_facts, resident_memory
from dsv4_operator.backends.local.state import REMOTE, RESERVED, DeploymentState, StateError, default_root, deployments
from dsv4_operator.cli.output import (
    CommandError,
    ExitCode,
    LogComponent,
    LogOptions,
    LogOrigin,
    bad_input,
    convert_os_errors,
    decode_line,
    local_datetime,
    log_time,
    note,
    print_log_line,
)
from dsv4_operator.cli.processes import deployment_processes, signal_member
from dsv4_operator.cli.sources.base import (
    EVIDENCE_TAIL_BYTES,
    LOOP_SILENCE_SECONDS,
    DeploymentView,
    EvidenceFile,
    ServiceAccess,
    first_key,
    names_hint,
    not_serving,
    read_all,
    read_file,
)
from dsv4_operator.planning import Facts, catalog_facts
from dsv4_operator.planning.catalog import Machine
from dsv4_operator.planning.memory import Measured
from dsv4_operator.planning.setup import measured_of
from dsv4_runtime.contract import Process

LOG_POLL_SECONDS = 0.25
_GROUP_EVIDENCE = ("evidence/**/*", "i*/plan.json", "i*/m*/*.log")
_EVIDENCE = ("manifest.json", "object.json", "*.log", *_GROUP_EVIDENCE, *(f"g*/{each}" for each in _GROUP_EVIDENCE))


class LocalSource:
    """A `DeploymentSource` for a state directory."""

    poll_seconds = 1.0

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def location(self) -> str:
        return f"under {self.root}"

    def command_line(self, verb: str, name: str = "") -> str:
        return " ".join(part for part in ("dsv4", verb, name) if part) + state_dir_option(self.root)

    def names(self, *, seconds: float = 30.0) -> list[str]:
        return [state.name for state in deployments(self.root)]

    def get(self, name: str | None) -> DeploymentView:
        """Return the deployment called `name`, or without a name the only one that runs or exists."""
        return read_deployment(select_state(self.root, name))

    def get_all(self, *, all_namespaces: bool = False) -> list[DeploymentView]:
        return read_all(deployments(self.root), read_deployment)

    def load(self, file_or_name: str) -> DSV4Deployment:
        return read_file(file_or_name, detect_hardware=True)

    def facts(self, deployment: DSV4Deployment, kind: Machine, *, chosen: bool) -> Facts:
        """Return this machine for members on CPU; for accelerators, machines of the catalog."""
        state = deployment_state(self.root, deployment.metadata.name)
        if not kind.sm:
            # Assume that members get their own networks; `up` checks this on the machine.
            memory = available_memory() + resident_memory(deployment_processes(state))
            return local_facts(deployment, state, isolated=True, memory=memory)
        return catalog_facts(deployment, kind, state_root=str(state.directory), weights_root=str(state.weights))

    def measured(self, name: str) -> tuple[Measured, ...]:
        """Return the memory in the saved status; empty if it cannot be read."""
        with suppress(OSError, ValueError, StateError):
            found = DeploymentState(self.root, name).object()
            return measured_of(found.status) if found else ()
        return ()

    @contextmanager
    def api(self, item: DeploymentView) -> Iterator[ServiceAccess]:
        """Yield the endpoint in the status and the first key of the specification's key file."""
        endpoint = item.status.endpoint
        if endpoint is None:
            raise not_serving(item, "")
        key = ""
        if keys := item.object.spec.gateway.api_keys:
            state = DeploymentState(self.root, item.name)
            with convert_os_errors("the keys cannot be read"):
                key = first_key(state.secret(keys.secret_key_ref, "spec.gateway.apiKeys"))
        yield ServiceAccess(lambda: endpoint.rstrip("/"), key, permanent=True)

    @contextmanager
    def dashboard(self, item: DeploymentView, group: int) -> Iterator[ServiceAccess]:
        """Yield the address in the status and the token in the state directory.

        Raises:
            CommandError: there is no dashboard at present, or `group` is not the first.
        """
        if group:
            raise bad_input(f"--group {group}: only the dashboard of group 0 has a port on this machine; write 0")
        url = item.status.ray_dashboard
        if not item.running or url is None or not item.status.groups:
            raise CommandError(f"{item.name} has no dashboard now: it is {item.phase}")
        try:
            token = DeploymentState(self.root, item.name).token().read_text().strip()
        except OSError as error:
            raise CommandError(f"the token of {item.name} cannot be read: {error.strerror}") from None
        yield ServiceAccess(lambda: url, token, permanent=True)

    def logs(self, name: str | None, options: LogOptions) -> ExitCode:
        # Its documents take 20 ms to import, which `dsv4 plan` does not need.
        from dsv4_operator.backends.hosts.documents import INVENTORY, MEMBERS

        state = select_state(self.root, name)
        if options.component is not LogComponent.LOOP and (state.directory / INVENTORY).exists():
            note(f"{state.name} is on several machines; these are the members of this one")
            state = DeploymentState(self.root / MEMBERS, state.name)
        return print_logs(state, options)

    def evidence(self, name: str | None, *, complete: bool = False) -> tuple[str, Iterator[EvidenceFile]]:
        state = select_state(self.root, name)
        return state.name, _evidence_files(state)

    def strike(
        self, item: DeploymentView, group: GroupStatus, rank: int, process: Process, number: signal.Signals
    ) -> float:
        """Send a signal to a process of the deployment.

        Raises:
            CommandError: no process of the deployment on this machine has this number.
        """
        from dsv4_operator.backends.hosts.documents import MEMBERS

        # Members of several machines have their directories beside those of the loop.
        for root in (self.root, self.root / MEMBERS):
            struck = signal_member(DeploymentState(root, item.name), group, rank, process.pid, number)
            if struck is not None:
                return struck
        raise CommandError(
            f"process {process.pid} ({process.name}) of rank {rank} is not on this machine, or not one of {item.name}; "
            "use a fault of rank 0"
        )

    def restart(self, item: DeploymentView) -> str:
        """Raise `CommandError`: `dsv4 up` reads its file only once."""
        raise _not_supported(item)

    def suspend(self, item: DeploymentView, suspended: bool) -> str:
        """Raise `CommandError`, as `restart` does."""
        raise _not_supported(item)


def _not_supported(item: DeploymentView) -> CommandError:
    return bad_input(f"on this machine `dsv4 down {item.name}` ends {item.name}, and `dsv4 up FILE` starts it anew")


def state_dir_option(root: Path) -> str:
    """Return the option for a state directory other than the default; empty for the default."""
    return "" if root == default_root().absolute() else f" --state-dir {root}"


def deployment_state(root: Path, name: str) -> DeploymentState:
    """Return the state of the deployment `name`, which need not exist.

    Raises:
        CommandError: the name is invalid for a deployment of this machine.
    """
    try:
        return DeploymentState(root, name)
    except StateError as error:
        raise bad_input(str(error)) from None


def find_state(root: Path, name: str) -> DeploymentState | None:
    """Return the state of an existing deployment; None if there is none of that name.

    Raises:
        CommandError: the name is reserved.
    """
    if name in RESERVED:
        deployment_state(root, name)
    return next((state for state in deployments(root) if state.name == name), None)


def select_state(root: Path, name: str | None) -> DeploymentState:
    """Return the state of the deployment `name`, or without a name the only one that runs or exists.

    Raises:
        CommandError: there is no such deployment, or several.
    """
    known = deployments(root)
    if name is not None:
        for state in known:
            if state.name == name:
                return state
        hint = _remote_hint(root, name) or names_hint(state.name for state in known)
        raise bad_input(f"there is no deployment {name!r} under {root}{hint}")
    running = [state for state in known if state.holder() is not None]
    for candidates in (running, known):
        if len(candidates) == 1:
            return candidates[0]
    if not known:
        hint = _remote_hint(root, None) or "; start one with `dsv4 up FILE`"
        raise bad_input(f"there is no deployment under {root}{hint}")
    raise bad_input(f"which deployment? Give its name{names_hint(state.name for state in running or known)}")


def _remote_hint(root: Path, name: str | None) -> str:
    """Return the remedy for commands that are not run on the machine of the loop; empty without such a deployment.

    Without a name it is about all deployments on other machines that were started from here.
    """
    found = sorted(path.stem for path in (root / REMOTE).glob("*.json") if name in (None, path.stem))
    if not found:
        return ""
    return f"; {', '.join(found)} runs on other machines: use the address of its API (--url), or its file"


def read_deployment(state: DeploymentState) -> DeploymentView:
    """Read a deployment; without a running loop, remove everything from the status that only a loop can assert.

    Raises:
        CommandError: the deployment was never started, or its files are unreadable.
    """
    try:
        # Before the files: a loop that ends in between has then written its last status.
        supervisor = state.holder()
        found = state.object() or state.manifest()
    except OSError as error:
        raise bad_input(
            f"the files of {state.name!r} in {state.directory} cannot be read: {error.strerror or error}"
        ) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise bad_input(
            f"the files of {state.name!r} in {state.directory} cannot be read (written by another version of dsv4?); "
            f"`dsv4 down {state.name} --purge` removes them"
        ) from error
    if found is None:
        raise bad_input(f"there is no deployment {state.name!r} under {state.root}")
    created = None
    with suppress(OSError):
        created = (state.directory / "manifest.json").stat().st_mtime
    if supervisor is None:
        return DeploymentView(_stopped(found), False, created, lost=_lost(state, found))
    from dsv4_operator.backends.local.supervisor import read_report

    report, queried = read_report(supervisor), False
    if report is not None and report.beat is not None and time.time() - report.beat >= LOOP_SILENCE_SECONDS:
        # With modules of the network and of the loop, which no other command needs.
        from dsv4_operator.backends.local.backend import query_members

        found, queried = query_members(state, found, report)
    return DeploymentView(found, True, created, loop=report, queried=queried)


def _lost(state: DeploymentState, found: DSV4Deployment) -> str:
    """Return when the processes of a deployment ended that was not stopped; empty if it was stopped."""
    ended = frozenset({GroupPhase.STOPPED, GroupPhase.SUSPENDED, GroupPhase.FAILED, GroupPhase.PENDING})
    if all(group.phase in ended for group in found.status.groups):
        return ""
    from dsv4_operator.backends.hosts.documents import INVENTORY

    with suppress(OSError):
        latest = local_datetime((state.directory / "object.json").stat().st_mtime)
        since = f"after the last change of the status ({latest})"
        if (state.directory / INVENTORY).exists():
            remedy = "`dsv4 up FILE --hosts HOSTS` starts it again"
            return f"The loop of {state.name} ended {since}, and its members may run on; {remedy}"
        return f"All processes of {state.name} were killed, its supervisor too, {since}; `dsv4 up FILE` starts it again"
    return ""


def _stopped(found: DSV4Deployment) -> DSV4Deployment:
    """Return the deployment without readiness, addresses and processes."""
    status = found.status
    groups = tuple(group.model_copy(update={"members": ()}) for group in status.groups)
    if status.condition(ConditionType.READY) is None and not groups:
        return found
    false = {"status": ConditionStatus.FALSE, "reason": Reason.GROUP_STOPPED, "message": "the loop is not running"}
    conditions = tuple(
        condition.model_copy(update=false)
        if condition.type in (ConditionType.READY, ConditionType.PROGRESSING)
        and condition.status is not ConditionStatus.FALSE
        else condition
        for condition in status.conditions
    )
    update = {"endpoint": None, "ray_dashboard": None, "ready_replicas": 0, "groups": groups, "conditions": conditions}
    return found.model_copy(update={"status": status.model_copy(update=update)})


def _log_files(state: DeploymentState, options: LogOptions) -> dict[Path, LogOrigin]:
    """Return the existing log files of the selected components, for members those of the latest incarnation."""
    found = {}
    if options.component is LogComponent.LOOP:
        found[state.log] = LogOrigin(None, options.component)
    else:
        groups = [group for group in state.groups() if state.incarnations(group)]
        several = groups not in ([], [0])
        if not several:
            # The others may have files on other machines, or none any more.
            with suppress(OSError, ValidationError):
                manifest = state.manifest()
                several = manifest is not None and manifest.spec.replicas > 1
        for group in groups:
            for rank, member in _members(state, group):
                if options.rank in (None, rank):
                    for component in options.components:
                        origin = LogOrigin(rank, component, group if several else None)
                        found[member / f"{component}.log"] = origin
    return {path: origin for path, origin in found.items() if path.exists()}


def _members(state: DeploymentState, group: int) -> list[tuple[int, Path]]:
    """Return the ranks of a group's latest incarnation with their directories."""
    numbers = state.incarnations(group)
    if not numbers:
        return []
    names = (path.name[1:] for path in state.incarnation(numbers[-1], group).glob("m*"))
    return [
        (rank, state.member(numbers[-1], rank, group)) for rank in sorted(int(one) for one in names if one.isdigit())
    ]


class LineReader:
    """Reads complete lines from a growing log file, across truncation and rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._rest = b""
        self._latest = ""
        """Time of the latest line, for lines without one."""

    def timed_lines(
        self, origin: LogOrigin, *, last: int | None = None, final: bool = False
    ) -> list[tuple[str, LogOrigin, bytes]]:
        """Return the new lines with times that never decrease, and their origin; arguments as of `lines`."""
        found, month = [], time.localtime().tm_mon
        for line in self.lines(last=last, final=final):
            self._latest = max(self._latest, log_time(line, month) or "")
            found.append((self._latest, origin, line))
        first = next((when for when, _, _ in found if when), "")
        return [(when or first, origin, line) for when, _, line in found]

    def _rotated(self) -> bool:
        """Return whether the path refers to another file now."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def lines(self, *, last: int | None = None, final: bool = False) -> list[bytes]:
        """Return the new lines, at most `last`; with `final` including a line without line end."""
        return list(deque(self._read(final), last))

    def close(self) -> None:
        self._file.close()

    def _read(self, final: bool) -> Iterator[bytes]:
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            # Agents truncate logs that grow too long; the remaining content is new.
            self._file.seek(0)
            self._rest = b""
        # Checked before the read to the end, so that no line written before the rotation is lost.
        rotated = self._rotated()
        yield from self._read_to_end(final)
        if rotated:
            self._file.close()
            self._file = self._path.open("rb")
            yield from self._read_to_end(final)

    def _read_to_end(self, final: bool) -> Iterator[bytes]:
        while chunk := self._file.read(1 << 20):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            yield from lines
        if final and self._rest:
            yield self._rest
            self._rest = b""


def print_logs(state: DeploymentState, options: LogOptions, *, wait: Callable[[float], None] = time.sleep) -> ExitCode:
    """Print log lines by time; with `follow` continue across incarnations until the deployment ends."""
    found = _log_files(state, options)
    if not found and not (options.follow and state.holder() is not None):
        raise _no_logs(state, options)
    readers: dict[Path, LineReader] = {}
    try:
        tail = options.tail
        while True:
            # Checked before the files, so that lines written before the end are still read.
            running = state.holder() is not None
            found = _log_files(state, options)
            _close_replaced(readers, found)
            final = not (options.follow and running)
            lines = []
            for path, origin in found.items():
                new = path not in readers
                if new:
                    readers[path] = LineReader(path)
                lines.append(readers[path].timed_lines(origin, last=tail if new else None, final=final))
            for _, origin, line in heapq.merge(*lines, key=lambda timed: timed[0]):
                print_log_line(origin, decode_line(line), options)
            # `tail` applies to files that exist at the start; later files are printed from their first line.
            tail = None
            if final:
                return ExitCode.OK
            wait(LOG_POLL_SECONDS)
    finally:
        _close_replaced(readers, {})


def _close_replaced(readers: dict[Path, LineReader], found: dict[Path, LogOrigin]) -> None:
    for path in readers.keys() - found.keys():
        readers.pop(path).close()


def _no_logs(state: DeploymentState, options: LogOptions) -> CommandError:
    if any(state.incarnations(group) for group in state.groups()):
        ranks = sorted({str(rank) for group in state.groups() for rank, _ in _members(state, group)})
        if options.rank is not None and str(options.rank) in ranks:
            return bad_input(f"rank {options.rank} of {state.name!r} has no log of component {options.component} yet")
        selected = f"component {options.component}" if options.rank is None else f"rank {options.rank}"
        return bad_input(
            f"{state.name!r} has no logs of {selected}; its ranks are {', '.join(ranks) or 'not started yet'}"
        )
    if state.holder() is not None:
        return bad_input(f"{state.name!r} has started no member yet; see `dsv4 logs --component loop`")
    left = f"; remaining files of failed members are in {state.evidence()}" if state.evidence().exists() else ""
    return bad_input(f"{state.name!r} is not running, and its members' logs went with them{left}")


def _evidence_files(state: DeploymentState) -> Iterator[EvidenceFile]:
    for pattern in _EVIDENCE:
        for path in sorted(state.directory.glob(pattern)):
            if not path.is_file() or path.is_symlink():
                continue
            try:
                with path.open("rb") as file:
                    stat = path.stat()
                    file.seek(max(0, stat.st_size - EVIDENCE_TAIL_BYTES))
                    data = file.read(EVIDENCE_TAIL_BYTES)
            except FileNotFoundError:
                # Removed meanwhile.
                continue
            yield EvidenceFile(str(path.relative_to(state.directory)), data, stat.st_mtime)
