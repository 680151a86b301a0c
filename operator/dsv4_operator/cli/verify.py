"""`dsv4 verify`: run the checks of `dsv4_operator.verify` against an endpoint and report their results."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from dsv4_operator.api import Variant
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
)
from dsv4_operator.cli.sources.base import DeploymentSource, first_key
from dsv4_operator.verify import checks, content, oracle
from dsv4_operator.verify.checks import Check, Facts, Result, Session, Status
from dsv4_operator.verify.endpoint import INCOMPLETE, INVALID, Address, Client, Defect, Reason, Skip

QUICK_SECONDS = 60.0
ACCURACY = "accuracy"
QUESTIONS = 200
_LOST_CHECKS = 3
"""Consecutive checks without an answer after which the endpoint counts as lost."""

_EVALUATION_CLIENTS = 8
"""Requests of lm-eval at the same time."""

_LOGS = "see `dsv4 why` and `dsv4 logs -c vllm`"
_NUMERICS = (
    "compare with --reference or --against; `dsv4 kernels` names the providers, pin another one to find the wrong one"
)
_CACHE = "compare with --no-enable-prefix-caching; check the KV cache type and the kernels of attention"
_GRAMMAR = "check the backend of structured outputs and the reasoning parser"

CHECKS: tuple[Check, ...] = (
    Check("smoke.models", "the endpoint lists the model", checks.models, "check the served names", quick=True),
    Check(
        "smoke.capability",
        "the model answers simple questions",
        checks.capability,
        "check weights, chat template and kernels; for a test model add --weak",
        quick=True,
    ),
    Check("smoke.chat", "a chat request", checks.chat, _LOGS, quick=True),
    Check("smoke.completions", "greedy tokens, max_tokens", checks.completions, _NUMERICS, quick=True),
    Check("smoke.stream", "streams are complete and equal", checks.stream, f"check proxies; {_LOGS}", quick=True),
    Check("smoke.usage", "counts of tokens", checks.usage, "check proxies that change responses", quick=True),
    Check("smoke.stop", "stop strings", checks.stop, "check detokenization and proxies", quick=True),
    Check("smoke.seed", "seeds", checks.seed, "check sampling kernels and proxies that drop `seed`", quick=True),
    Check("smoke.errors", "invalid requests are rejected", checks.errors, _LOGS, quick=True),
    Check(
        "smoke.template",
        "the chat template",
        checks.template,
        "check --tokenizer-mode deepseek_v4 and --chat-template",
        quick=True,
    ),
    Check("smoke.thinking", "reasoning on and off", checks.thinking, "check --reasoning-parser", quick=True),
    Check("smoke.messages", "Anthropic's API", checks.messages, _LOGS, quick=True),
    Check("smoke.long-prompt", "a long prompt", checks.long_prompt, "check --max-model-len and memory", quick=True),
    Check("smoke.parallel", "requests at the same time", checks.parallel, _NUMERICS, quick=True),
    Check("oracle.self", "decoding agrees with prefill", oracle.self_check, _NUMERICS, quick=True),
    Check("oracle.repetition", "repetitions agree", oracle.repetition, _NUMERICS),
    Check("oracle.reference", "agreement with a reference", oracle.against_reference, _NUMERICS, quick=True),
    Check("context.prefix-cache", "prefix cache", checks.prefix_cache, _CACHE, quick=True),
    Check("context.reach", "every depth affects the output", checks.reach, _CACHE),
    Check("context.needles", "facts at ten depths are found", checks.needles, _CACHE, content=True),
    Check("structured.choice", "one of several choices", content.choice, _GRAMMAR, quick=True),
    Check("structured.regex", "a regular expression", content.regex, _GRAMMAR),
    Check("structured.json", "a JSON schema", content.json_schema(streamed=False), _GRAMMAR),
    Check("structured.json-streamed", "a JSON schema in a stream", content.json_schema(streamed=True), _GRAMMAR),
    Check(
        "speculative.acceptance",
        "drafts are accepted",
        checks.acceptance,
        "check the weights of the draft and the method of speculative decoding",
    ),
    Check("speculative.tokens", "tokens with and without drafts", checks.draft_tokens, _NUMERICS),
    *content.content_checks(),
    # The last one: if an engine dies of it, the other checks are done.
    Check(
        "context.pressure",
        "an exhausted KV cache changes no output",
        oracle.pressure,
        f"compare with fewer requests (--max-num-seqs), and with --no-enable-prefix-caching; {_LOGS}",
    ),
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A task of lm-eval with the lowest acceptable value."""

    task: str
    metric: str
    """Empty: the first of the task."""
    minimum: float

    @property
    def check(self) -> str:
        """Return the name of its check."""
        return f"{ACCURACY}.{self.task}"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `dsv4 verify`."""

    quick: bool = False
    weak: bool = False
    only: tuple[str, ...] = ()
    """Names of groups or checks; empty: all."""
    export: Path | None = None
    reference: Path | None = None
    against: Address | None = None
    tolerance: float = 0.05
    accuracy: tuple[Accuracy, ...] = ()
    questions: int = QUESTIONS
    """Of each task, at most."""
    tasks: Path | None = None
    """Directory with further tasks."""
    python: Path | None = None
    """Python that has lm-eval; None: this one."""
    resume: Path | None = None
    junit: Path | None = None
    form: DocumentFormat | None = None
    request_seconds: float = 300.0
    total_seconds: float | None = None
    """None: `QUICK_SECONDS`, or an hour."""

    @property
    def limit(self) -> float:
        return self.total_seconds or (QUICK_SECONDS if self.quick else 3600.0)


@dataclass(slots=True)
class Report:
    """Results of a run; its document is both the output and the file of `--resume`."""

    url: str
    quick: bool
    facts: Facts
    results: dict[str, Result] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def code(self) -> ExitCode:
        """Return the exit code."""
        found = self.results.values()
        if any(result.status is Status.FAILED for result in found):
            return ExitCode.FAILED
        return ExitCode.UNCERTAIN if any(result.reason in INCOMPLETE for result in found) else ExitCode.OK

    def summary(self) -> dict[str, int]:
        """Return the number of results for each status."""
        counts = Counter(result.status for result in self.results.values())
        return {str(status): counts[status] for status in Status}

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "url": self.url,
            "quick": self.quick,
            "facts": asdict(self.facts),
            "seconds": round(self.seconds, 1),
            "exitCode": int(self.code),
            "summary": self.summary(),
            "results": [result.to_dict() for result in self.results.values()],
        }


def run(source: DeploymentSource, name: str | None, options: VerifyOptions) -> ExitCode:
    """Verify the endpoint of a deployment; a nano model counts as a test model."""
    item = source.get(name)
    check_serving(item)
    with source.api(item) as api:
        weak = options.weak or item.object.spec.model.variant is Variant.NANO
        address = Address(api.url().rstrip("/"), item.object.served_names[0], api.token)
        return verify(address, options, weak=weak)


def read_key(path: Path | None) -> str:
    """Return the first key of a key file; empty without a file."""
    if path is None:
        return ""
    with convert_os_errors("cannot read the key file"):
        text = path.read_text(encoding="utf-8", errors="replace")
    key = first_key(text) or text.strip()
    if not key or any(char.isspace() for char in key):
        raise bad_input(f"--key-file {str(path)!r} has no key; write the key of the endpoint into it")
    return key


def base_url(option: str, url: str) -> str:
    """Return the base URL of an endpoint, ending in `/v1`."""
    if not re.match(r"https?://[^\s/?#]+", url) or any(each in url for each in "?# "):
        raise bad_input(f"{option} {url!r} is no URL of an endpoint; write for example http://127.0.0.1:8000/v1")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def selected(only: Sequence[str], *, quick: bool) -> list[Check]:
    """Return the checks of a run; an explicitly named check is also part of a quick run."""
    known = {check.group for check in CHECKS} | {check.name for check in CHECKS} | {ACCURACY}
    for name in only:
        if name not in known:
            groups = ", ".join(dict.fromkeys(check.group for check in CHECKS))
            raise bad_input(f"--only {name!r} is no check; use a group ({groups}) or a check such as smoke.chat")
    if not only:
        return [check for check in CHECKS if check.quick or not quick]
    return [check for check in CHECKS if check.name in only or (check.group in only and (check.quick or not quick))]


def verify(address: Address, options: VerifyOptions, *, weak: bool) -> ExitCode:
    """Run the checks, print the report and return the exit code."""
    chosen = selected(options.only, quick=options.quick)
    python = _find_evaluation(options) if options.accuracy else ""
    reference = None if options.reference is None else _read_reference(options.reference)
    earlier = None if options.resume is None else _read_earlier(options.resume, address.url, quick=options.quick)
    known = earlier.results if earlier is not None else {}
    for path in (options.export, options.junit, options.resume):
        if path is not None and not path.absolute().parent.is_dir():
            raise bad_input(f"{str(path.parent)!r} is no directory; create it, or name another file")
    began = time.monotonic()

    def show(result: Result) -> None:
        if options.form is None:
            print_line(line(result))

    def save(report: Report) -> None:
        report.seconds = time.monotonic() - began
        if options.resume is not None:
            # With the earlier results that this run has not reached, or that are of other checks.
            whole = replace(
                report, results=report.results | {n: r for n, r in known.items() if n not in report.results}
            )
            _write(options.resume, json.dumps(whole.document(), indent=1, ensure_ascii=False))

    report = asyncio.run(_verify(address, options, weak, chosen, reference, earlier, show, save))
    # In this thread, so that Ctrl-C ends the child.
    for task in options.accuracy:
        result = known.get(task.check)
        if result is None or result.figures.get("minimum") != task.minimum:
            left = options.limit - (time.monotonic() - began)
            result = _evaluate(replace(address, model=report.facts.model), options, task, python, report.facts, left)
        report.results[task.check] = result
        show(result)
        save(report)
    save(report)
    if options.junit is not None:
        _write(options.junit, junit(report))
    if options.form is not None:
        print_line(render_document(report.document(), options.form))
    else:
        print_line("\n" + summary_line(report))
    return report.code


async def _verify(
    address: Address,
    options: VerifyOptions,
    weak: bool,
    chosen: Sequence[Check],
    reference: Mapping[str, Any] | None,
    earlier: Report | None,
    show: Callable[[Result], None],
    save: Callable[[Report], None],
) -> Report:
    deadline = time.monotonic() + options.limit
    async with aiohttp.ClientSession(trust_env=False) as http:
        client = Client(http, address, seconds=options.request_seconds)
        facts = await _probe(client, deadline, options.limit)
        if earlier is not None and earlier.facts.model != facts.model:
            raise bad_input(
                f"--resume {str(options.resume)!r} is of the model {earlier.facts.model!r}, and this run is of "
                f"{facts.model!r}; name another file"
            )
        known = earlier.results if earlier is not None else {}
        against = None
        if options.against is not None:
            against = Client(http, options.against, seconds=options.request_seconds)
            # An endpoint for comparison that does not answer is a wrong option, before any check.
            await _probe(against, deadline, options.limit)
        session = Session(
            client=client,
            facts=facts,
            quick=options.quick,
            weak=weak,
            against=against,
            reference=reference,
            tolerance=options.tolerance,
        )
        report = Report(address.url, options.quick, facts)
        lost = 0
        for check in chosen:
            result = known.get(check.name)
            if result is None:
                result = await perform(check, session, deadline - time.monotonic(), lost >= _LOST_CHECKS)
            lost = lost + 1 if result.reason is Reason.UNREACHABLE else 0
            report.results[check.name] = result
            show(result)
            save(report)
        if options.export is not None:
            await _export(session, options.export, deadline)
    return report


async def _probe(client: Client, deadline: float, limit: float) -> Facts:
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.1)):
            return await checks.probe(client)
    except Skip as error:
        raise CommandError(str(error), code=ExitCode.UNCERTAIN) from None
    except Defect as error:
        raise CommandError(f"{client.address.url}: {error}") from None
    except TimeoutError:
        raise CommandError(
            f"{client.address.url} did not answer the first requests within {limit:.0f} s; raise --limit",
            code=ExitCode.UNCERTAIN,
        ) from None


async def perform(check: Check, session: Session, seconds: float, lost: bool) -> Result:
    """Run one check within the rest of the time."""
    began = time.monotonic()

    def result(status: Status, text: str = "", **more: Any) -> Result:
        remedy = check.remedy if status is Status.FAILED else ""
        return Result(check.name, status, text, remedy=remedy, seconds=round(time.monotonic() - began, 2), **more)

    if lost:
        return result(Status.SKIPPED, "the endpoint does not answer", reason=Reason.UNREACHABLE)
    if seconds <= 0:
        return result(Status.SKIPPED, "the time limit is reached; raise --limit", reason=Reason.TIME_LIMIT)
    if check.content and not session.facts.capable:
        return result(Status.SKIPPED, "the model does not answer simple questions", reason=Reason.TOO_WEAK)
    try:
        async with asyncio.timeout(seconds):
            figures = await check.run(session)
    except Defect as error:
        return result(Status.FAILED, str(error), evidence=error.evidence)
    except Skip as error:
        return result(Status.SKIPPED, str(error), reason=error.reason)
    except TimeoutError:
        return result(Status.SKIPPED, "the time limit was reached; raise --limit", reason=Reason.TIME_LIMIT)
    except INVALID as error:
        return result(Status.FAILED, f"a response has an unexpected format: {error!r}")
    return result(Status.OK, figures=figures)


async def _export(session: Session, path: Path, deadline: float) -> None:
    """Write the log-probabilities of the endpoint.

    Raises:
        CommandError: the endpoint does not offer them, or not in time.
    """
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.1)):
            document = await oracle.collect(session, session.client)
    except Skip as error:
        code = ExitCode.UNCERTAIN if error.reason in INCOMPLETE else ExitCode.FAILED
        raise CommandError(f"--export: {error}", code=code) from None
    except Defect as error:
        raise CommandError(f"--export: {error}") from None
    except TimeoutError:
        raise CommandError("--export: the time limit was reached; raise --limit", code=ExitCode.UNCERTAIN) from None
    _write(path, document.model_dump_json(indent=1))
    note(f"{path}: log-probabilities of {len(document.cases)} prompts, noise {document.noise:.4f} nats")


def _read_reference(path: Path) -> dict[str, Any]:
    with convert_os_errors("cannot read the reference"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return oracle.parse(text).model_dump()
    except ValueError as error:
        raise bad_input(f"--reference {str(path)!r} is no reference: {error}; make one with --export") from None


_REPEATED = INCOMPLETE | {Reason.NO_REFERENCE, Reason.TOO_WEAK, Reason.TOO_LARGE}
"""Reasons of skipped checks that may not apply to a later run with other options; these checks are repeated."""


def _read_earlier(path: Path, url: str, *, quick: bool) -> Report | None:
    """Return an earlier run with its results that need no repetition; None if there is no file."""
    if not path.exists():
        return None
    with convert_os_errors("cannot read"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text)
        same = document["url"] == url and document["quick"] == quick
        facts = Facts(**document["facts"])
        results = [
            Result(
                **{
                    **each,
                    "status": Status(each["status"]),
                    "reason": Reason(each["reason"]) if "reason" in each else None,
                }
            )
            for each in document["results"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise bad_input(f"--resume {str(path)!r} is no file of dsv4 verify ({error!r}); remove it") from None
    if not same:
        raise bad_input(f"--resume {str(path)!r} is of another endpoint, or with another --quick; name another file")
    return Report(url, quick, facts, {each.name: each for each in results if each.reason not in _REPEATED})


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    with convert_os_errors("cannot write"):
        partial = path.with_name(f".{path.name}.part")
        try:
            partial.write_text(text + "\n", encoding="utf-8", errors="replace")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


# Accuracy, by the program lm-eval


def parse_accuracy(text: str) -> Accuracy:
    """Return the task of `TASK[:METRIC]=MINIMUM`."""
    name, _, minimum = text.rpartition("=")
    task, _, metric = name.partition(":")
    try:
        value = float(minimum)
    except ValueError:
        value = -1.0
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", task, re.ASCII) or not 0 <= value <= 1:
        raise bad_input(
            f"--accuracy {text!r} is not TASK=MINIMUM with a minimum of 0 to 1; write for example gsm8k=0.9"
        )
    return Accuracy(task, metric, value)


def _find_evaluation(options: VerifyOptions) -> str:
    """Return the Python that has lm-eval."""
    if options.tasks is not None and not options.tasks.is_dir():
        raise bad_input(f"--tasks {str(options.tasks)!r} is no directory; name one with task files of lm-eval")
    if options.python is not None:
        if not os.access(options.python, os.X_OK):
            raise bad_input(f"--python {str(options.python)!r} is no program; name a Python that has lm-eval")
        return str(options.python)
    if importlib.util.find_spec("lm_eval") is None:
        raise bad_input(
            f"--accuracy needs lm-eval, which {sys.executable} does not have; install dsv4[accuracy], or name a Python "
            "that has it with --python"
        )
    return sys.executable


_EVALUATION = """
import json, sys
given = json.load(open(sys.argv[1]))
import lm_eval
from lm_eval.tasks import TaskManager
manager = TaskManager(include_path=given.pop("include"))
[task] = given["tasks"]
if task not in manager.all_tasks:
    sys.exit(f"there is no task {task!r}")
found = lm_eval.simple_evaluate(**given, task_manager=manager, log_samples=False, bootstrap_iters=0)
questions = found["n-samples"][task]["effective"]
json.dump({"figures": found["results"][task], "questions": questions}, open(sys.argv[2], "w"))
"""
"""Runs with the Python of lm-eval: arguments in a file, result in another one."""


def _evaluate(
    address: Address, options: VerifyOptions, task: Accuracy, python: str, facts: Facts, left: float
) -> Result:
    """Run lm-eval on the endpoint within `left` seconds; return the result of the check."""
    from dsv4_operator.cli.bench import environment, last_line, run_child

    began = time.monotonic()

    def result(status: Status, text: str = "", **more: Any) -> Result:
        return Result(task.check, status, text, seconds=round(time.monotonic() - began, 2), **more)

    if left <= 0:
        return result(Status.SKIPPED, "the time limit is reached; raise --limit", reason=Reason.TIME_LIMIT)
    with tempfile.TemporaryDirectory(prefix="dsv4-accuracy-") as folder, convert_os_errors("lm-eval"):
        own, given, output, log = (Path(folder, name) for name in ("tasks", "arguments.json", "result.json", "log"))
        own.mkdir()
        for name, text in content.arithmetic_files(str(own)).items():
            Path(own, name).write_text(text, encoding="utf-8")
        # Answers of an interrupted run; those of another run are not used.
        cache = Path(folder, "answers")
        if options.resume is not None:
            cache = options.resume.absolute().with_name(f".{options.resume.name}.{task.task}")
        arguments = {
            "model": "local-completions",
            "model_args": {
                "model": address.model,
                "base_url": f"{address.url}/completions",
                # Prompts are text: the endpoint has the tokenizer.
                "tokenizer_backend": None,
                "tokenized_requests": False,
                "num_concurrent": _EVALUATION_CLIENTS,
                "timeout": math.ceil(options.request_seconds),
                "max_length": facts.max_model_len or 32768,
            },
            "tasks": [task.task],
            "limit": options.questions,
            "use_cache": str(cache),
            "include": [str(own), *([str(options.tasks.absolute())] if options.tasks else [])],
        }
        given.write_text(json.dumps(arguments), encoding="utf-8")
        # The generator's environment forbids downloads; tasks of lm-eval load their questions from a hub.
        variables = {key: value for key, value in environment(address.key).items() if key != "HF_HUB_OFFLINE"}
        if task.task == content.ARITHMETIC:
            variables["HF_DATASETS_CACHE"] = str(Path(folder, "cache"))
        code = run_child([python, "-c", _EVALUATION, str(given), str(output)], variables, log, left)
        if code is None:
            more = "" if options.resume is None else " or continue with --resume"
            return result(Status.SKIPPED, f"the time limit was reached; raise --limit{more}", reason=Reason.TIME_LIMIT)
        if code or not output.is_file():
            raise CommandError(f"--accuracy {task.task}: lm-eval of {python} failed: {last_line(log)}")
        found = json.loads(output.read_text(encoding="utf-8"))
        for path in cache.parent.glob(f"{cache.name}_rank*"):
            path.unlink(missing_ok=True)
    return judge_accuracy(task, found["figures"], found["questions"], result)


def judge_accuracy(task: Accuracy, found: Mapping[str, Any], questions: int, result: Callable[..., Result]) -> Result:
    """Return the result of a check from lm-eval's figures, which are named `METRIC,FILTER`.

    Raises:
        CommandError: the task does not have the metric.
    """
    values = {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and "_stderr" not in name and "," in name
    }
    name = next((each for each in values if task.metric in ("", each, each.partition(",")[0])), None)
    if name is None:
        known = ", ".join(values) or "no figures"
        raise bad_input(f"--accuracy {task.task}: there is no metric {task.metric!r}; the task has {known}")
    value = values[name]
    error = math.sqrt(max(value * (1 - value), 0.0) / questions) if questions else 0.0
    figures = {"accuracy": value, "minimum": task.minimum, "standard_error": round(error, 4), "questions": questions}
    if value < task.minimum:
        text = f"{name} is {value:.3f} ± {error:.3f} of {questions} questions, below {task.minimum:g}"
        return result(Status.FAILED, text, figures=figures, remedy=_NUMERICS)
    return result(Status.OK, figures=figures)


def line(result: Result) -> str:
    """Return a result as text: one line, for a failed check also remedy and evidence."""
    text = result.text or ", ".join(f"{key} {_figure(value)}" for key, value in result.figures.items())
    rows = [f"{result.name:<26}   {result.status:<7}   {_shown(text)}".rstrip()]
    rows += [f"{'':<39}{_shown(each)}" for each in result.evidence]
    if result.remedy:
        rows.append(f"{'':<39}remedy: {result.remedy}")
    return "\n".join(rows)


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _shown(text: str) -> str:
    """Return output of the endpoint on one line, without characters that control the terminal."""
    return _CONTROLS.sub("\ufffd", one_line(text, 300))


def _figure(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def summary_line(report: Report) -> str:
    """Return `21 ok, 1 failed, 3 skipped in 41 s`, with the model."""
    counts = ", ".join(f"{count} {status}" for status, count in report.summary().items())
    facts = report.facts
    engine = f" (vLLM {facts.engine})" if facts.engine and facts.vllm else ""
    return f"{facts.model}{engine} at {report.url}: {counts} in {format_seconds(report.seconds)}"


_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """Return the report as JUnit XML."""
    counts = report.summary()
    suite = ET.Element(
        "testsuite",
        name="dsv4 verify",
        tests=str(len(report.results)),
        failures=str(counts["failed"]),
        errors="0",
        skipped=str(counts["skipped"]),
        time=f"{report.seconds:.1f}",
    )
    for result in report.results.values():
        group, _, name = result.name.partition(".")
        case = ET.SubElement(suite, "testcase", classname=group, name=name, time=f"{result.seconds:.2f}")
        text = _NO_XML.sub("\ufffd", result.text)
        if result.status is Status.FAILED:
            details = "\n".join([*result.evidence, f"remedy: {result.remedy}"])
            ET.SubElement(case, "failure", message=text).text = _NO_XML.sub("\ufffd", details)
        elif result.status is Status.SKIPPED:
            ET.SubElement(case, "skipped", message=f"{result.reason}: {text}")
        elif result.figures:
            ET.SubElement(case, "system-out").text = _NO_XML.sub("\ufffd", json.dumps(result.figures, default=str))
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)
