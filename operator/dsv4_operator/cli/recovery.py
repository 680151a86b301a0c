"""`dsv4 bench recovery`: stop and kill processes of a serving engine under load; measure detection, recovery and lost
requests.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import aiohttp
import typer
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from dsv4_operator.api import FailureStatus, GroupPhase, GroupStatus
from dsv4_operator.cli.bench import own_version
from dsv4_operator.cli.chat import check_serving
from dsv4_operator.cli.output import (
    CommandError,
    DocumentFormat,
    ExitCode,
    bad_input,
    format_seconds,
    note,
    one_line,
    plural,
    print_line,
    render_document,
    render_table,
)
from dsv4_operator.cli.sources.base import DeploymentSource, DeploymentView, RetryingPoll, ServiceAccess
from dsv4_operator.verify import speed
from dsv4_operator.verify.endpoint import Address, Client, Defect, Skip
from dsv4_runtime.contract import Process
from dsv4_runtime.contract.recovery import permit

SCHEMA = 1
RESERVE = 1
"""Restarts of the budget that the command leaves for failures of its own."""
REPETITIONS = 2
INPUT_TOKENS, OUTPUT_TOKENS = 64, 32
_CHARACTERS_PER_TOKEN = 3.0
_SETTLE_SECONDS = (1.0, 4.0)
"""Load before a fault, after every client had an answer; random, so that faults meet requests at any point."""
_PAUSE_SECONDS = 0.5
"""Between a failed request of a client and its next one."""
_POLL_SECONDS = 0.2
_PROCESS_SECONDS = 15.0
"""Time until the status has the processes of a new engine."""
_FLOW_SECONDS = 300.0
"""Time for one answer of every client before a fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to a process of the engine."""

    name: str
    text: str
    process: str
    """As in `Process.name`."""
    number: signal.Signals
    last: bool = False
    """Of the last rank instead of rank 0."""


FAULTS: tuple[Fault, ...] = (
    Fault("kill-engine", "SIGKILL to EngineCore", "engine-core", signal.SIGKILL),
    Fault("stop-engine", "SIGSTOP to EngineCore: a hang", "engine-core", signal.SIGSTOP),
    Fault("kill-worker", "SIGKILL to a worker of the last rank", "worker", signal.SIGKILL, last=True),
    Fault("stop-worker", "SIGSTOP to a worker of the last rank: a hang", "worker", signal.SIGSTOP, last=True),
    Fault("kill-api", "SIGKILL to vLLM's API process", "api", signal.SIGKILL),
)
DEFAULT_FAULTS = ("kill-engine", "stop-engine")


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """Options of `dsv4 bench recovery`."""

    faults: tuple[str, ...] = ()
    repeat: int = REPETITIONS
    clients: int = 4
    group: int = 0
    seed: int = 0
    yes: bool = False
    form: DocumentFormat | None = None
    request_seconds: float = 900.0
    recovery_seconds: float = 1800.0
    total_seconds: float = 14400.0


_CAMEL = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Strike(BaseModel):
    """Result of one fault. Seconds count from the signal."""

    model_config = _CAMEL

    cause: str
    level: int | None
    rank: int | None
    """Culprit."""
    detect_seconds: float
    """Until the failure in the status."""
    recover_seconds: float
    """Until the first checked completion of the new engine."""
    outage_seconds: float
    """Until the answer that ended the longest time without one, of all clients."""
    restarts: int
    """Restarts of the budget."""
    requests: int
    """That ended after the signal, until every client had about two answers to requests sent after the recovery."""
    lost: int
    """Of them without a complete answer."""


class Row(BaseModel):
    """Results of the repetitions of one fault: means and relative standard deviations."""

    model_config = _CAMEL

    fault: str
    repetitions: int
    requests: int
    lost: int
    restarts: int
    causes: dict[str, int]
    levels: dict[str, int]
    detect_seconds: float
    recover_seconds: float
    outage_seconds: float
    spread: dict[str, float]
    samples: list[Strike]


class Document(BaseModel):
    """Output of `dsv4 bench recovery`; has no prompts, keys, host names or addresses."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: int = SCHEMA
    dsv4: str
    started: str
    model: str
    clients: int
    runs: list[Row]


FIGURES = ("detect_seconds", "recover_seconds", "outage_seconds")


def row(fault: str, found: Sequence[Strike]) -> Row:
    """Return the row of a fault; `found` has one result or more."""
    samples = {name: [float(getattr(each, name)) for each in found] for name in FIGURES}
    means = {name: statistics.fmean(values) for name, values in samples.items()}
    return Row(
        fault=fault,
        repetitions=len(found),
        requests=sum(each.requests for each in found),
        lost=sum(each.lost for each in found),
        restarts=sum(each.restarts for each in found),
        causes=_counts([each.cause for each in found]),
        levels=_counts([str(each.level) for each in found]),
        spread={
            to_camel(name): statistics.stdev(values) / means[name]
            for name, values in samples.items()
            if len(values) > 1 and means[name] > 0
        },
        samples=list(found),
        **means,
    )


def _counts(words: Sequence[str]) -> dict[str, int]:
    return {word: words.count(word) for word in dict.fromkeys(words)}


def outage(answers: Sequence[float], struck: float) -> float | None:
    """Return the seconds from `struck` to the answer that ended the longest time without one; None if none followed.

    `answers` are Unix times, in any order.
    """
    later = sorted(end for end in answers if end > struck)
    pauses = pairwise([struck, *later])
    end = max(pauses, key=lambda pause: pause[1] - pause[0], default=(struck, None))[1]
    return None if end is None else end - struck


def selected(names: Sequence[str]) -> list[Fault]:
    """Return the faults of a run."""
    known = {fault.name: fault for fault in FAULTS}
    for name in names:
        if name not in known:
            raise bad_input(f"--fault {name!r} is unknown; use one of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or DEFAULT_FAULTS)]


def left(item: DeploymentView, group: GroupStatus, now: float) -> int:
    """Return the restarts that the budget still permits."""
    policy = item.object.spec.recovery.policy()
    return max(policy.max_restarts - permit(policy, group.restarts, now).spent, 0)


def run(source: DeploymentSource, name: str | None, options: RecoveryOptions) -> ExitCode:
    """Inflict every fault `options.repeat` times on the group, print the result and return the exit code."""
    faults = selected(options.faults)
    item = source.get(name)
    check_serving(item)
    group = _group(item, options.group)
    planned = len(faults) * options.repeat
    _check_budget(item, group, planned)
    _confirm(item, faults, options)
    found: dict[str, list[Strike]] = {fault.name: [] for fault in faults}
    code = ExitCode.OK
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with source.api(item) as access:
        session = _Session(source, item, access, options, time.monotonic() + options.total_seconds)
        try:
            with session.load.running():
                # Each fault once before any fault twice: a run that ends early has figures of all.
                for number in range(planned):
                    fault = faults[number % len(faults)]
                    strike = session.strike(fault, number)
                    found[fault.name].append(strike)
                    note(
                        f"{fault.name}, {number + 1} of {planned}: {strike.cause}, level {strike.level}, "
                        f"detected {format_seconds(strike.detect_seconds)}, "
                        f"recovered {format_seconds(strike.recover_seconds)}, "
                        f"{strike.lost} of {strike.requests} requests lost"
                    )
        except (CommandError, KeyboardInterrupt) as error:
            # The results before it are complete.
            if not any(found.values()):
                raise
            code = error.code if isinstance(error, CommandError) else ExitCode.INTERRUPTED
            for message in error.messages if isinstance(error, CommandError) else ():
                note(f"error: {message}")
    rows = [row(fault, strikes) for fault, strikes in found.items() if strikes]
    if code is ExitCode.OK and any(each.lost for each in rows):
        code = ExitCode.FAILED
        note(f"first lost request: {session.load.first_error()}")
    document = Document(
        dsv4=own_version(),
        started=started,
        model=item.object.served_names[0],
        clients=options.clients,
        runs=rows,
    )
    print_line(table(rows) if options.form is None else render_document(to_dict(document), options.form))
    return code


def to_dict(document: Document) -> dict[str, Any]:
    """Return the document as JSON values."""
    found: dict[str, Any] = document.model_dump(mode="json", by_alias=True)
    return {"schema": found.pop("schema_"), **found}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text: mean and spread of each figure."""
    headers = ["FAULT", "TIMES", "CAUSE", "LEVEL", "DETECTED S", "RECOVERED S", "OUTAGE S", "REQUESTS", "LOST"]
    lines = []
    for each in rows:
        cells = [each.fault, str(each.repetitions), _words(each.causes), _words(each.levels)]
        for name in FIGURES:
            spread = each.spread.get(to_camel(name))
            cells.append(f"{getattr(each, name):.3g}{'' if spread is None else f' ±{100 * spread:.0f}%'}")
        lines.append([*cells, str(each.requests), str(each.lost)])
    return render_table(headers, lines)


def _words(counts: dict[str, int]) -> str:
    return ", ".join(word if len(counts) == 1 else f"{word} ({number})" for word, number in counts.items())


def _group(item: DeploymentView, index: int) -> GroupStatus:
    """Return a group.

    Raises:
        CommandError: there is no such group.
    """
    for group in item.status.groups:
        if group.index == index:
            return group
    raise bad_input(f"--group {index}: {item.name} has {plural(len(item.status.groups), 'group')}; the first is 0")


def _check_budget(item: DeploymentView, group: GroupStatus, planned: int) -> None:
    """Check that the budget permits the planned restarts.

    Raises:
        CommandError: fewer than `RESERVE` would be left.
    """
    permitted, policy = left(item, group, time.time()), item.object.spec.recovery
    if permitted < planned + RESERVE:
        most = max(permitted - RESERVE, 0)
        raise bad_input(
            f"{plural(planned, 'fault')} and a reserve need {planned + RESERVE} restarts, and the budget of group "
            f"{group.index} has {permitted} left (spec.recovery.maxRestarts: {policy.max_restarts} within "
            f"{format_seconds(policy.window)}); "
            + (f"choose at most {plural(most, 'fault')} with --fault and --repeat, " if most else "wait, ")
            + "or raise spec.recovery.maxRestarts"
        )


def _confirm(item: DeploymentView, faults: Sequence[Fault], options: RecoveryOptions) -> None:
    """Ask on a terminal.

    Raises:
        CommandError: it was declined, or there is no terminal and no `--yes`.
    """
    if options.yes:
        return
    names = ", ".join(fault.name for fault in faults)
    times = f"{options.repeat} times each" if options.repeat > 1 else "once each"
    if not sys.stdin.isatty():
        raise bad_input(f"this breaks the engine of {item.name} ({names}, {times}) while it serves; add --yes")
    question = f"Break the engine of {item.name} while it serves ({names}, {times})?"
    if not typer.confirm(question, default=False, err=True):
        raise bad_input("nothing was done")


@dataclass(frozen=True, slots=True)
class Request:
    """A request that ended; Unix times."""

    sent: float
    ended: float
    answered: bool
    detail: str = ""


@dataclass(slots=True)
class Load:
    """Clients that send requests continuously, in a thread with an event loop of its own."""

    address: Address
    clients: int
    seconds: float
    """Limit of one request."""
    seed: int
    _done: list[Request] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clients in the context; their last requests are cancelled at its end."""
        thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(10.0)

    def ended(self, since: float) -> list[Request]:
        """Return the requests that ended after a Unix time."""
        with self._lock:
            return [each for each in self._done if each.ended > since]

    def answered(self, since: float) -> int:
        """Return the number of requests sent and answered after a Unix time."""
        return sum(each.answered and each.sent > since for each in self.ended(since))

    def first_error(self) -> str:
        """Return the reason of the first lost request."""
        return next((each.detail for each in self.ended(0.0) if not each.answered), "")

    async def _run(self) -> None:
        async with aiohttp.ClientSession(trust_env=False) as http:
            tasks = [asyncio.create_task(self._client(http, number)) for number in range(self.clients)]
            await asyncio.to_thread(self._stop.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, http: aiohttp.ClientSession, number: int) -> None:
        """Send requests, every second one as a stream."""
        client = Client(http, self.address, seconds=self.seconds)
        source = random.Random(f"{self.seed}/{number}")  # noqa: S311  (prompts)
        turn = number
        while True:
            turn += 1
            prompt = speed.filler(speed.PromptClass.PROSE, round(INPUT_TOKENS * _CHARACTERS_PER_TOKEN), source)
            body: dict[str, Any] = {"stream": True} if turn % 2 else {}
            sent, detail = time.time(), ""
            try:
                reply = await client.complete(prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, **body)
                if reply.completion_tokens != OUTPUT_TOKENS:
                    detail = f"{reply.completion_tokens} of {OUTPUT_TOKENS} tokens"
            except (Defect, Skip) as error:
                detail = one_line(str(error), 300)
            with self._lock:
                self._done.append(Request(sent, time.time(), not detail, detail))
            if detail:
                await asyncio.sleep(_PAUSE_SECONDS)


@dataclass(slots=True)
class _Session:
    """State of a run."""

    source: DeploymentSource
    item: DeploymentView
    access: ServiceAccess
    options: RecoveryOptions
    deadline: float
    load: Load = field(init=False)
    _poll: RetryingPoll = field(default_factory=RetryingPoll)

    def __post_init__(self) -> None:
        address = Address(self.access.url().rstrip("/"), self.item.object.served_names[0], self.access.token)
        self.load = Load(address, self.options.clients, self.options.request_seconds, self.options.seed)

    def strike(self, fault: Fault, number: int) -> Strike:
        """Inflict a fault and wait for the recovery.

        Raises:
            CommandError: the group does not serve, the budget does not permit another restart, or a limit is reached.
        """
        flowing = time.time()
        self._wait(
            lambda: self.load.answered(flowing) >= self.options.clients,
            _FLOW_SECONDS,
            f"the clients have no answers: {self.load.first_error() or 'no response'}",
        )
        group = self._ready()
        time.sleep(random.Random(f"{self.options.seed}/{number}").uniform(*_SETTLE_SECONDS))  # noqa: S311  (moments)
        group, rank, process, local, struck = self._send(group, fault)
        before = {failure.time for failure in group.history}
        try:
            done = self._recovered(before, fault)
        except BaseException:
            if fault.number is signal.SIGSTOP:
                with suppress(CommandError):
                    self.source.strike(self.item, group, rank, process, signal.SIGCONT)
            raise
        new = sorted((each for each in done.history if each.time not in before), key=lambda each: each.time)
        over = time.time()
        # Answers that were computed after the recovery.
        self._wait(
            lambda: self.load.answered(over) >= 2 * self.options.clients, _FLOW_SECONDS, "the clients have no answers"
        )
        requests = self.load.ended(local)
        silence = outage([each.ended for each in self.load.ended(flowing) if each.answered], local)
        first, last = new[0], new[-1]
        return Strike(
            cause=str(first.cause),
            level=last.level,
            rank=first.culprit_rank,
            detect_seconds=max(first.time - struck, 0.0),
            recover_seconds=max(last.time + (last.recover_seconds or 0.0) - struck, 0.0),
            outage_seconds=silence or 0.0,
            restarts=done.total_restarts - group.total_restarts,
            requests=len(requests),
            lost=sum(not each.answered for each in requests),
        )

    def _send(self, group: GroupStatus, fault: Fault) -> tuple[GroupStatus, int, Process, float, float]:
        """Send the signal; return group, rank, process, and the Unix times here and on the machine of the process.

        Raises:
            CommandError: the process was not found. The status has the processes of a new engine a moment later.
        """
        deadline = time.monotonic() + _PROCESS_SECONDS
        while True:
            rank = max((member.rank for member in group.members), default=0) if fault.last else 0
            local = time.time()
            try:
                process = _process(group, rank, fault.process)
                return group, rank, process, local, self.source.strike(self.item, group, rank, process, fault.number)
            except CommandError as error:
                if error.code is not ExitCode.FAILED or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)
            group = self._read() or group

    def _ready(self) -> GroupStatus:
        """Return the group once it serves, and its next restart has to wait for no backoff."""
        found: GroupStatus | None = None

        def ready() -> bool:
            nonlocal found
            found = self._read()
            if found is None or found.phase is not GroupPhase.SERVING:
                return False
            now = time.time()
            policy = self.item.object.spec.recovery.policy()
            if left(self.item, found, now) <= RESERVE:
                raise CommandError(
                    f"the budget of group {found.index} has {plural(left(self.item, found, now), 'restart')} left; the "
                    "run ends here. Raise spec.recovery.maxRestarts for more repetitions",
                    code=ExitCode.UNCERTAIN,
                )
            due = permit(policy, found.restarts, now).at
            return due is not None and due <= now

        self._wait(ready, self.options.recovery_seconds, f"group {self.options.group} does not serve")
        assert found is not None  # noqa: S101  (`ready` was true)
        return found

    def _recovered(self, before: set[float], fault: Fault) -> GroupStatus:
        """Return the group once all failures that are not in `before` are repaired."""
        found: GroupStatus | None = None

        def recovered() -> bool:
            nonlocal found
            found = self._read()
            new: list[FailureStatus] = [each for each in found.history if each.time not in before] if found else []
            if found is not None and found.phase is GroupPhase.FAILED:
                raise CommandError(
                    f"group {found.index} failed after {fault.name}; see "
                    f"`{self.source.command_line('why', self.item.name)}`"
                )
            return bool(
                found
                and found.phase is GroupPhase.SERVING
                and new
                and max(new, key=lambda each: each.time).recover_seconds is not None
            )

        self._wait(recovered, self.options.recovery_seconds, f"no recovery from {fault.name}; raise --recovery")
        assert found is not None  # noqa: S101  (`recovered` was true)
        return found

    def _read(self) -> GroupStatus | None:
        # Opens a lost port forwarding again, at the same address.
        self._poll(self.access.url)
        item = self._poll(lambda: self.source.get(self.item.name))
        if item is None:
            return None
        self.item = item
        return _group(item, self.options.group)

    def _wait(self, condition: Any, seconds: float, otherwise: str) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            now = time.monotonic()
            if now > self.deadline:
                raise CommandError(
                    f"the time limit of {format_seconds(self.options.total_seconds)} is reached; raise --limit",
                    code=ExitCode.UNCERTAIN,
                )
            if now > limit:
                raise CommandError(f"{otherwise} (within {format_seconds(seconds)})", code=ExitCode.UNCERTAIN)
            time.sleep(_POLL_SECONDS)


def _process(group: GroupStatus, rank: int, name: str) -> Process:
    """Return a process of a member.

    Raises:
        CommandError: the status has none.
    """
    for member in group.members:
        if member.rank == rank:
            for process in member.processes:
                if process.name == name:
                    return process
    raise CommandError(f"the status has no process {name} of rank {rank}")
