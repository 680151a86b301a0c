"""`dsv4 up` and `dsv4 down`: run a deployment on this machine, and end it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from dsv4_operator.api import (
    ConditionStatus,
    ConditionType,
    DeploymentStatus,
    DSV4Deployment,
    FailureStatus,
    GroupPhase,
    GroupStatus,
)
from dsv4_operator.api.values import format_duration
from dsv4_operator.backends.hosts.documents import INVENTORY
from dsv4_operator.backends.local.state import REMOTE, AlreadyRunning, DeploymentState, StateError, deployments
from dsv4_operator.cli import processes
from dsv4_operator.cli.output import (
    CommandError,
    ExitCode,
    bad_input,
    convert_os_errors,
    countdown,
    format_elapsed,
    format_seconds,
    live_screen,
    local_time,
    note,
    one_line,
    print_line,
)
from dsv4_operator.cli.render import failure_text, group_label, members_table, ready_text
from dsv4_operator.cli.sources.base import read_file
from dsv4_operator.cli.sources.local import deployment_state, find_state, select_state, state_dir_option
from dsv4_runtime.contract import Phase

POLL_SECONDS = 0.2
_NANO_SECONDS, _MODEL_SECONDS = 600.0, 172_800.0
"""Default timeouts of a start. The second is longer than the limits of all steps that are derived for Pro."""


def start_limit(deployment: DSV4Deployment, given: float | None) -> float:
    """Return the timeout of a start in seconds: the given one, or the default for the model.

    A start downloads real models, which takes hours. Each of its steps has a limit in the plan
    (`spec.engine.timeouts`), and fails with a cause beyond it.
    """
    if given is not None:
        return given
    return _NANO_SECONDS if deployment.spec.model.source.nano is not None else _MODEL_SECONDS


def run(
    file: str,
    root: Path,
    *,
    detach: bool,
    timeout: float | None,
    command: Callable[..., list[str]] = processes.loop_command,
) -> ExitCode:
    """Start the deployment in `file`; with `detach` return when it is ready, else when it ends or is interrupted.

    The start may take `timeout` seconds; None: the default for the model. `command` returns the command of the
    reconcile loop.
    """
    deployment = read_file(file, detect_hardware=True)
    state = deployment_state(root, deployment.metadata.name)
    if (state.directory / INVENTORY).exists() or (root / REMOTE / f"{state.name}.json").exists():
        raise bad_input(
            f"{state.name} is a deployment on several machines; start it with --hosts, or run `dsv4 uninstall "
            f"{state.name}` before, or choose another name"
        )
    _claim(state, deployment)
    # Signals are counted from here on: there is a loop to stop.
    with processes.SignalCounter() as signals:
        previous = state.object_text()
        process = processes.start_loop(state, command(state, attached=not detach))
        started = StartedDeployment(state, process, signals, previous, detach, start_limit(deployment, timeout))
        leave = False
        try:
            code = started.wait_until_ready()
            leave = detach and code is ExitCode.OK
            return code if leave or code is not ExitCode.OK else started.wait_until_end()
        finally:
            if not leave:
                started.stop()


def _claim(state: DeploymentState, deployment: DSV4Deployment) -> None:
    """Create the deployment's directory and save the manifest, unless the deployment runs.

    Raises:
        CommandError: it runs, or the directory cannot be used.
    """
    try:
        with convert_os_errors("the state directory cannot be used"):
            state.prepare(deployment.spec.replicas)
            # Locked only while writing; the loop then takes the lock, or reports that another loop was faster.
            with state.lock():
                processes.stop_processes(state)
                processes.startup_error_file(state).unlink(missing_ok=True)
                state.save_manifest(deployment)
    except AlreadyRunning as error:
        raise bad_input(f"{error}{difference(state, deployment)}") from None
    except StateError as error:
        raise bad_input(str(error)) from None


_MOST_DIFFERENCES = 5


def difference(state: DeploymentState, wanted: DSV4Deployment) -> str:
    """Return the fields in which a file differs from the running deployment; empty if in none."""
    with contextlib.suppress(OSError, ValueError):
        if (running := state.manifest()) is not None:
            fields = sorted(_different("", running.to_dict(), wanted.to_dict()))
            if fields:
                more = f" and {len(fields) - _MOST_DIFFERENCES} more" * (len(fields) > _MOST_DIFFERENCES)
                return (
                    f"; it runs with other values than this file: {', '.join(fields[:_MOST_DIFFERENCES])}{more}; "
                    f"to apply the file, run `dsv4 down {state.name}` and then the same `dsv4 up`"
                )
    return ""


def _different(path: str, running: object, wanted: object) -> Iterator[str]:
    if isinstance(running, dict) and isinstance(wanted, dict):
        for key in running.keys() | wanted.keys():
            yield from _different(f"{path}.{key}" if path else str(key), running.get(key), wanted.get(key))
    elif running != wanted:
        shown, given = (json.dumps(value)[:40] for value in (running, wanted))
        yield f"{path} ({shown}, in the file {given})"


class LoopProcess(Protocol):
    """The process of a loop, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


@dataclass(slots=True)
class StartedDeployment:
    """A deployment started by `dsv4 up`, from the start of the loop to its end."""

    state: DeploymentState
    process: LoopProcess
    signals: processes.SignalCounter
    text: str | None
    """The object as it was read last; before the first report, that of the previous run."""
    detach: bool
    timeout: float
    before: Mapping[int, int] | None = None
    """Latest incarnation of each group with the software that served before: the first death of a later one ends the
    wait. None: recovery goes on until it is given up."""
    started: float = field(default_factory=time.monotonic)
    object: DSV4Deployment | None = None
    shown: DeploymentStatus | None = None
    """Status up to which changes were printed."""

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    def wait_until_ready(self) -> ExitCode:
        """Show the progress until the deployment is ready.

        Raises:
            CommandError: the start failed or timed out.
        """
        with live_screen() as screen:
            for ended in self._poll():
                if screen is not None:
                    screen(start_view(self.state.name, self._status, self._elapsed, time.time()))
                else:
                    self._print_transitions(members=True, stamp=lambda: f"{format_elapsed(self._elapsed):>5}")
                outcome = self._outcome()
                if outcome.stage is Stage.READY:
                    self.shown = self._status
                    break
                if outcome.stage is Stage.FAILED:
                    raise self._error(f": {outcome.message}", code=outcome.code)
                if (death := self._death()) is not None:
                    raise self._error(f": the start failed: {failure_text(death)}")
                if ended:
                    raise self._early_end()
                if self._elapsed > self.timeout:
                    limit = format_duration(self.timeout)
                    raise self._error(f" was not ready within {limit}: {pending_reason(self._status)}")
            else:
                return ExitCode.INTERRUPTED
        self._print_ready()
        return ExitCode.OK

    def wait_until_end(self) -> ExitCode:
        """Print changes of the deployment until it ends.

        Raises:
            CommandError: recovery was given up, or the loop died.
        """
        for ended in self._poll():
            self._print_transitions(members=False, stamp=lambda: local_time(time.time()))
            outcome = self._outcome()
            # The loop retries a plan that is refused now: memory may be short temporarily.
            if outcome.stage is Stage.FAILED and outcome.final and not self._may_answer():
                raise self._error(f": {outcome.message}")
            if ended:
                if self.process.returncode == 0:
                    print_line(f"{self.state.name} was ended")
                    return ExitCode.OK
                raise CommandError(f"the loop of {self.state.name!r} {self._exit_text()}{self._references()}")
        return ExitCode.INTERRUPTED

    def stop(self) -> None:
        """Stop the loop and all its descendants, within a bounded time."""
        if self.process.poll() is None:
            before = self.signals.count
            with processes.open_process(self.process.pid) as handle, countdown(f"stopping {self.state.name}") as tick:
                if handle is not None:
                    processes.stop_loop(handle, progress=tick, interrupted=lambda: self.signals.count > before)
            self.process.wait()
            if self.signals.count:
                note(f"{self.state.name} has ended")
        if (self.process.returncode or 0) < 0:
            # A killed loop could not stop its members.
            processes.stop_processes(self.state)

    def _poll(self) -> Iterator[bool]:
        """Read the object periodically until a signal; yield whether the loop has ended."""
        while not self.signals.count:
            # In this order, so that the last status of the loop is read.
            ended = self.process.poll() is not None
            self._read()
            yield ended
            time.sleep(POLL_SECONDS)

    def _read(self) -> None:
        text = None
        with contextlib.suppress(OSError):
            text = self.state.object_text()
        if text is None or text == self.text:
            return
        with contextlib.suppress(ValidationError):
            self.object = DSV4Deployment.model_validate_json(text)
        self.text = text

    @property
    def _status(self) -> DeploymentStatus | None:
        return self.object.status if self.object else None

    def _outcome(self) -> StartOutcome:
        if self.object is None:
            return StartOutcome(Stage.STARTING)
        return start_outcome(self.object.status, self.object.metadata.generation)

    def _may_answer(self) -> bool:
        """Return whether a group answers or may recover."""
        if self.object is None:
            return False
        wanted = self.object.status.groups[: self.object.spec.replicas]
        return any(group.phase is not GroupPhase.FAILED for group in wanted)

    def _death(self) -> FailureStatus | None:
        """Return the latest death of an incarnation later than `before` that nothing has recovered from."""
        if self.before is None or self._status is None:
            return None
        deaths = [
            group.last_failure
            for group in self._status.groups
            if group.last_failure and group.last_failure.incarnation > self.before.get(group.index, 0)
        ]
        return next((death for death in deaths if death.recover_seconds is None), None)

    def _print_transitions(self, *, members: bool, stamp: Callable[[], str]) -> None:
        if self._status is None or self._status is self.shown:
            return
        for line in transitions(self.shown, self._status, members=members):
            print_line(f"{stamp()}  {line}")
        self.shown = self._status

    def _print_ready(self) -> None:
        if self.object is None:
            return
        options = state_dir_option(self.state.root)
        print_line()
        print_line(ready_text(self.object, self._elapsed, str(self.state.token()), options))
        print_line()
        end = f"dsv4 down {self.state.name}{options}" if self.detach else "Ctrl-C"
        print_line(f"{end} ends it.")

    def _error(self, text: str, code: ExitCode = ExitCode.FAILED) -> CommandError:
        return CommandError(f"{self.state.name}{text}{self._references()}", code=code)

    def _early_end(self) -> CommandError:
        if message := processes.startup_error(self.state):
            return bad_input(message)
        if self.process.returncode == 0:
            return CommandError(f"{self.state.name} was stopped by `dsv4 down` or SIGTERM before it was ready")
        last = ""
        with contextlib.suppress(OSError):
            lines = self.state.log.read_text(errors="replace").split("\n")
            if line := next((line for line in reversed(lines) if line.strip()), ""):
                last = f" ({one_line(line)})"
        return CommandError(
            f"the loop of {self.state.name!r} {self._exit_text()} before it was ready{last}{self._references()}"
        )

    def _exit_text(self) -> str:
        code = self.process.returncode or 0
        return f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"

    def _references(self) -> str:
        """Return the paths of the evidence and the log, as the end of a message."""
        failure = _latest_failure(self._status) if self._status else None
        evidence = f"evidence: {failure.evidence}; " if failure and failure.evidence else ""
        return f"; {evidence}log: {self.state.log}"


class Stage(Enum):
    """Stage of a start."""

    STARTING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """Stage of a start; a failed one has a message and an exit code."""

    stage: Stage
    message: str = ""
    code: ExitCode = ExitCode.OK
    final: bool = True
    """False for a refusal that the loop evaluates again."""


def start_outcome(status: DeploymentStatus, generation: int) -> StartOutcome:
    """Return the outcome of the start of a generation; conditions of earlier generations are ignored."""
    conditions = {item.type: item for item in status.conditions if item.observed_generation >= generation}
    if (accepted := conditions.get(ConditionType.ACCEPTED)) and accepted.status is ConditionStatus.FALSE:
        return StartOutcome(Stage.FAILED, accepted.message, ExitCode.BAD_INPUT, final=False)
    exhausted = conditions.get(ConditionType.RECOVERY_EXHAUSTED)
    if exhausted and exhausted.status is ConditionStatus.TRUE:
        return _recovery_exhausted(status, exhausted.message)
    if (ready := conditions.get(ConditionType.READY)) and ready.status is ConditionStatus.TRUE:
        return StartOutcome(Stage.READY)
    return StartOutcome(Stage.STARTING)


def _latest_failure(status: DeploymentStatus) -> FailureStatus | None:
    """Return the latest death, of a group that was given up if there is one."""
    failed = [group for group in status.groups if group.phase is GroupPhase.FAILED]
    failures = [group.last_failure for group in failed or status.groups if group.last_failure]
    return max(failures, key=lambda failure: failure.time, default=None)


def _recovery_exhausted(status: DeploymentStatus, message: str) -> StartOutcome:
    failure = _latest_failure(status)
    # A deterministic failure is an error of the file or the machine, so it counts as bad input.
    code = ExitCode.BAD_INPUT if failure and failure.deterministic else ExitCode.FAILED
    cause = failure_text(failure) if failure else ""
    if failure and failure.message and failure.message in message:
        cause = ""
    return StartOutcome(Stage.FAILED, "; ".join(part.rstrip(".") for part in (message, cause) if part), code)


def pending_reason(status: DeploymentStatus | None) -> str:
    """Return why a deployment is not ready: its members that do not serve, or its condition."""
    if status is None:
        return "the loop has reported nothing"
    pending = [
        f"{group_label(status, group)}rank {member.rank} is {member.phase or 'not started'}"
        + (f" ({one_line(member.message)})" if member.message else "")
        for group in status.groups
        for member in group.members
        if member.phase is not Phase.SERVING
    ]
    if pending:
        return ", ".join(pending)
    ready = status.condition(ConditionType.READY)
    return ready.message if ready and ready.message else f"it is {status.phase}"


def start_view(name: str, status: DeploymentStatus | None, elapsed: float, now: float) -> str:
    """Return the text shown on a terminal during a start, beginning with `nano   Starting   0:23 of about 0:45`."""
    phase = status.phase if status else "Pending"
    expected = status.expected_ready_seconds if status else None
    about = f" of about {format_elapsed(expected)}" if expected else ""
    lines = [f"{name}   {phase}   {format_elapsed(elapsed)}{about}"]
    if status is not None:
        lines += members_table(status, now).splitlines()
        lines += [
            f"{group_label(status, group)}{failure_text(group.last_failure)}"
            for group in status.groups
            if group.last_failure
        ]
    return "\n".join(lines)


def transitions(before: DeploymentStatus | None, after: DeploymentStatus, *, members: bool) -> list[str]:
    """Return one line per change between two statuses, with `members` including the phases of members."""
    earlier = {group.index: group for group in before.groups} if before else {}
    return [
        f"{group_label(after, group)}{line}"
        for group in after.groups
        for line in _group_transitions(earlier.get(group.index), group, members=members)
    ]


def _group_transitions(before: GroupStatus | None, after: GroupStatus, *, members: bool) -> list[str]:
    lines, recovered = _failure_transitions(before, after) if before else ([], [])
    moved = before is None or (before.phase, before.incarnation) != (after.phase, after.incarnation)
    # Omitted if `serving again` follows.
    if moved and not (recovered and after.phase is GroupPhase.SERVING):
        lines.append(_group_phase_text(after))
    if after.next_restart_time and (before is None or before.next_restart_time != after.next_restart_time):
        lines.append(f"the next restart waits until {local_time(after.next_restart_time)}")
    if members:
        lines += _member_transitions(before, after)
    return lines + recovered


def _failure_transitions(before: GroupStatus, after: GroupStatus) -> tuple[list[str], list[str]]:
    """Return the lines for new failures and for new recoveries. Failures of earlier runs are in both statuses."""
    known = {failure.time for failure in before.history}
    done = {failure.time for failure in before.history if failure.recover_seconds is not None}
    return [f"died: {failure_text(failure)}" for failure in after.history if failure.time not in known], [
        f"serving again after {format_seconds(failure.recover_seconds)}"
        for failure in after.history
        if failure.recover_seconds is not None and failure.time not in done
    ]


def _group_phase_text(group: GroupStatus) -> str:
    texts = {
        GroupPhase.FORMING: f"forming incarnation {group.incarnation}",
        GroupPhase.STARTING: f"starting the engine in incarnation {group.incarnation}",
        GroupPhase.RESTARTING: "restarting the engine in place",
        GroupPhase.RECOVERING: f"ending incarnation {group.incarnation}, to form the group again",
        GroupPhase.UPDATING: "stopping, to start again with the changed specification",
        GroupPhase.FAILED: "given up; nothing runs any more",
    }
    return texts.get(group.phase, group.phase.lower())


def _member_transitions(before: GroupStatus | None, after: GroupStatus) -> list[str]:
    same = before is not None and before.incarnation == after.incarnation
    earlier = {member.rank: member for member in before.members} if before and same else {}
    lines = []
    for member in after.members:
        known = earlier.get(member.rank)
        if known is None:
            lines.append(f"rank {member.rank} is the {member.role.lower()} at {member.address or member.node}")
        if member.phase and (known is None or known.phase is not member.phase):
            message = f": {one_line(member.message)}" if member.message else ""
            lines.append(f"rank {member.rank} {member.phase}{message}")
        # An agent that has never answered is starting.
        if member.phase and member.silent_since and not (known and known.silent_since):
            lines.append(f"rank {member.rank} no longer answers")
    return lines


def down(root: Path, name: str | None, *, all_deployments: bool, purge: bool) -> ExitCode:
    """End one deployment, or all of them; success if they do not run."""
    if all_deployments:
        states = deployments(root)
    elif name is not None:
        found = find_state(root, name)
        states = [found] if found else []
    else:
        states = [select_state(root, None)] if deployments(root) else []
    if not states:
        print_line(f"{name or 'nothing'} is not running" if name else "nothing is running")
    failed = [error for state in states if (error := _end(state, purge=purge))]
    if failed:
        raise CommandError(*failed)
    return ExitCode.OK


def _end(state: DeploymentState, *, purge: bool) -> str | None:
    """End one deployment; return the error message if that failed."""
    if (state.directory / INVENTORY).exists():
        remedy = f"run `dsv4 uninstall {state.name}` on the machine with hosts.yaml"
        return f"--purge: {state.name} is on several machines; {remedy}" if purge else _end_members(state)
    try:
        ran = end_loop(state)
        with convert_os_errors(f"{state.name}: cannot tidy up"), state.lock():
            ran = bool(processes.stop_processes(state)) or ran
            processes.remove_runtime_files(state)
            if purge:
                state.purge()
    except PermissionError:
        return f"{state.name} belongs to another user, who can end it"
    except (StateError, CommandError) as error:
        # StateError: started again meanwhile, a loop that survived SIGKILL, or a foreign directory.
        return str(error)
    print_line(f"{state.name} {'has ended' if ran else 'is not running'}{'; its files are removed' if purge else ''}")
    return None


def _end_members(state: DeploymentState) -> str | None:
    """End the members of a deployment on several machines; return the error message if that failed."""
    from dsv4_operator.backends.hosts.bootstrap import alone
    from dsv4_operator.cli import machine

    try:
        # An `up` or `down` of a client may be under way.
        with (
            convert_os_errors(f"{state.name} cannot be ended"),
            alone(str(state.root), machine.ACTION_SECONDS),
        ):
            ran = machine.end_members(state)
    except (StateError, CommandError) as error:
        return str(error)
    print_line(f"{state.name} {'has ended' if ran else 'is not running'}")
    note("The host services run on without members; `dsv4 down` on the machine with hosts.yaml ends them too.")
    return None


def end_loop(state: DeploymentState, *, grace: float = processes.GRACE_SECONDS) -> bool:
    """Stop the running loop and wait for its end; return whether there was one.

    Raises:
        PermissionError: it belongs to another user.
    """
    pid = state.holder()
    if pid is None:
        return False
    with processes.open_process(pid) as handle, processes.SignalCounter() as signals:
        # The loop may have ended before the handle was opened.
        if handle is None or state.holder() != pid:
            return False
        with countdown(f"stopping {state.name}") as tick:
            processes.stop_loop(handle, progress=tick, interrupted=lambda: signals.count > 0, grace=grace)
    return True
