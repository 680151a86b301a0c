"""`dsv4 up`: start the loop over a file, show how it goes, and end it again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dsv4_operator.api import DeploymentStatus, DSV4Deployment
from dsv4_operator.api.values import format_duration
from dsv4_operator.backends.local.state import AlreadyRunning, DeploymentState, StateError
from dsv4_operator.cli import leftovers, loop, progress, render, words
from dsv4_operator.cli.choose import state_of
from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input, explained
from dsv4_operator.cli.files import read_file
from dsv4_operator.cli.interrupts import Interrupts
from dsv4_operator.cli.output import countdown, note, on_screen, say
from dsv4_operator.cli.progress import Stage, StartOutcome

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options that `dsv4 up` was asked for."""

    file: str
    root: Path
    detach: bool
    timeout: float


def run(request: UpOptions, *, command: loop.LoopCommand = loop.loop_command) -> ExitCode:
    """Start the deployment; with `detach` return when it is ready, else stay until it ends or is to end."""
    deployment = read_file(request.file, here=True)
    state = state_of(request.root, deployment.metadata.name)
    claim(state, deployment)
    # From here on a Ctrl-C has something to end.
    with Interrupts() as interrupts:
        before = _identity(state)
        process = loop.spawn(state, command(state, attached=not request.detach))
        run = Startup(request, state, process, interrupts, before, time.monotonic())
        leave = False
        try:
            code = run.until_ready()
            leave = request.detach and code is ExitCode.OK
            return code if leave or code is not ExitCode.OK else run.until_end()
        finally:
            if not leave:
                run.end()


def claim(state: DeploymentState, deployment: DSV4Deployment) -> None:
    """Make the deployment's directory and put the file there, unless someone runs it already.

    Raises:
        CommandError: it runs, or the directory cannot be used.
    """
    try:
        with explained("the state directory cannot be used"):
            state.prepare(deployment.spec.replicas)
            # Held only while writing: the loop then takes it for itself, and says so if someone else was faster.
            with state.lock():
                leftovers.end_processes(state)
                loop.startup_error_file(state).unlink(missing_ok=True)
                state.save_manifest(deployment)
    except (StateError, AlreadyRunning) as error:
        raise bad_input(str(error)) from None


def _identity(state: DeploymentState) -> tuple[int, int] | None:
    """Tell one version of the object's file from the next: it is always replaced as a whole."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(state.directory / "object.json")
        return found.st_ino, found.st_mtime_ns
    return None


class Startup:
    """One `dsv4 up` from the start of the loop to its end."""

    def __init__(
        self,
        request: UpOptions,
        state: DeploymentState,
        process: subprocess.Popen[bytes],
        interrupts: Interrupts,
        before: tuple[int, int] | None,
        started: float,
    ) -> None:
        self._request = request
        self._state = state
        self._process = process
        self._interrupts = interrupts
        self._seen = before
        self._started = started
        self._object: DSV4Deployment | None = None
        self._shown: DeploymentStatus | None = None

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def until_ready(self) -> ExitCode:
        """Show the start until the deployment is ready.

        Raises:
            CommandError: it failed, and why.
        """
        with on_screen() as screen:
            for ended in self._looks():
                if screen is not None:
                    screen(progress.view(self._state.name, self._status, self._elapsed, time.time()))
                else:
                    self._say_transitions(members=True, stamp=lambda: f"{words.stopwatch(self._elapsed):>5}")
                stands = self._stands()
                if stands.stage is Stage.READY:
                    self._shown = self._status
                    break
                if stands.stage is Stage.FAILED:
                    raise CommandError(f"{self._state.name}: {stands.sentence}{self._where()}", code=stands.code)
                if ended:
                    raise self._ended_early()
                if self._elapsed > self._request.timeout:
                    raise self._too_slow()
            else:
                return ExitCode.INTERRUPTED
        self._say_ready()
        return ExitCode.OK

    def until_end(self) -> ExitCode:
        """Print what happens to the deployment until someone ends it.

        Raises:
            CommandError: it was given up, or the loop died.
        """
        for ended in self._looks():
            self._say_transitions(members=False, stamp=lambda: words.clock(time.time()))
            stands = self._stands()
            # A plan that is refused by now is tried again by the loop: memory may be short for a moment.
            if stands.stage is Stage.FAILED and stands.final:
                raise CommandError(f"{self._state.name}: {stands.sentence}{self._where()}")
            if ended:
                if self._process.returncode == 0:
                    say(f"{self._state.name} was ended")
                    return ExitCode.OK
                raise CommandError(f"the loop of {self._state.name!r} {self._how_it_ended()}{self._where()}")
        return ExitCode.INTERRUPTED

    def end(self) -> None:
        """End the loop and everything that it started; bounded."""
        if self._process.poll() is None:
            asked = self._interrupts.count
            with loop.handle(self._process.pid) as held, countdown(f"stopping {self._state.name}") as tick:
                if held is not None:
                    loop.end(held, progress=tick, impatient=lambda: self._interrupts.count > asked)
            self._process.wait()
            if self._interrupts.count:
                note(f"{self._state.name} has ended")
        if self._process.returncode < 0:
            # It was killed, by us or by someone else, and could not look after its members.
            leftovers.end_processes(self._state)

    def _looks(self) -> Iterator[bool]:
        """Look again and again; says whether the loop has ended. Stops when the user asks to."""
        while not self._interrupts.count:
            # In this order: what the loop wrote before its end is then seen.
            ended = self._process.poll() is not None
            self._read()
            yield ended
            time.sleep(POLL_SECONDS)

    def _read(self) -> None:
        seen = _identity(self._state)
        # The file of an earlier life stays until this life's loop has something to say.
        if seen is None or seen == self._seen:
            return
        with contextlib.suppress(ValidationError):
            self._object = self._state.object()
        self._seen = seen

    @property
    def _status(self) -> DeploymentStatus | None:
        return self._object.status if self._object else None

    def _stands(self) -> StartOutcome:
        if self._object is None:
            return StartOutcome(Stage.STARTING)
        return progress.outcome(self._object.status, self._object.metadata.generation)

    def _say_transitions(self, *, members: bool, stamp: Callable[[], str]) -> None:
        if self._status is None or self._status is self._shown:
            return
        for line in progress.transitions(self._shown, self._status, members=members):
            say(f"{stamp()}  {line}")
        self._shown = self._status

    def _say_ready(self) -> None:
        if self._object is None:
            return
        hints = render.Hints(str(self._state.token()), words.root_option(self._state.root))
        say()
        say(render.ready_text(self._object, self._elapsed, hints))
        say()
        end = f"dsv4 down {self._state.name}{hints.options}" if self._request.detach else "Ctrl-C"
        say(f"{end} ends it.")

    def _too_slow(self) -> CommandError:
        waiting = progress.waiting_for(self._status)
        limit = format_duration(self._request.timeout)
        return CommandError(f"{self._state.name} was not ready within {limit}: {waiting}{self._where()}")

    def _ended_early(self) -> CommandError:
        if sentence := loop.startup_error(self._state):
            return bad_input(sentence)
        said = f"{self._how_it_ended()} before it was ready{self._last_words()}"
        return CommandError(f"the loop of {self._state.name!r} {said}{self._where()}")

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        return f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._state.log.read_text(errors="replace").split("\n")
            if last := next((line for line in reversed(lines) if line.strip()), ""):
                return f" ({words.one_line(last)})"
        return ""

    def _where(self) -> str:
        """Return where to look further."""
        failure = progress.latest_failure(self._status) if self._status else None
        evidence = f"evidence: {failure.evidence}; " if failure and failure.evidence else ""
        return f"; {evidence}log: {self._state.log}"
