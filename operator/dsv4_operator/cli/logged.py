"""Logged starts beside their plans: `dsv4 plan --explain` and `--from-log`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsv4_operator.api import BuildSpec, DSV4Deployment
from dsv4_operator.cli.output import (
    DocumentFormat,
    ExitCode,
    bad_input,
    convert_os_errors,
    note,
    print_line,
    render_document,
    render_table,
)
from dsv4_operator.planning.catalog import GIB
from dsv4_operator.planning.catalog.records import Range
from dsv4_operator.planning.images import ImageProfile, variable_problem
from dsv4_operator.planning.images.surface import read_arguments
from dsv4_operator.planning.memory import MemoryPlan, gib, memory_plan
from dsv4_operator.planning.memory.runs import TERMS, Comparison, comparisons, largest_deviation, terms
from dsv4_runtime.contract import KV_CACHE
from dsv4_runtime.util.log_lines import MemoryLog, memory_differences, read_memory_log


def explain(term: str, form: DocumentFormat | None) -> ExitCode:
    """Print the logged starts behind a term of the memory plan, with the plan's prediction for each.

    Raises:
        CommandError: there is no such term.
    """
    if term not in TERMS:
        raise bad_input(f'--explain: "{term}" is not a term of the memory plan; use one of {", ".join(TERMS)}')
    found = list(comparisons(term))
    print_line(_explanation(term, found) if form is None else render_document(_explanation_document(term, found), form))
    return ExitCode.OK


def _explanation(term: str, found: list[Comparison]) -> str:
    """Return a table of logged and planned figures per start, and the sources."""
    unit = "requests" if term == "concurrency" else "GiB"
    rows = [
        [
            each.run.date,
            each.run.name,
            f"{each.logged:.2f}",
            f"{each.planned:.2f}",
            f"{each.least:.2f} to {each.most:.2f}",
            f"{100 * each.error:+.1f} %",
        ]
        for each in found
    ]
    sources = dict.fromkeys(each.run.source for each in found)
    head = ["DATE", "START", f"LOGGED, {unit}", "PLANNED", "RANGE", "ERROR"]
    return "\n".join([render_table(head, rows), "", "Sources:", *(f"  {source}" for source in sources)])


def _explanation_document(term: str, found: list[Comparison]) -> dict[str, Any]:
    """Return the figures of `_explanation` as a document, in GiB or requests."""
    runs = [
        {
            "date": each.run.date,
            "start": each.run.name,
            "source": each.run.source,
            "logged": each.logged,
            "planned": round(each.planned, 3),
            "least": round(each.least, 3),
            "most": round(each.most, 3),
        }
        for each in found
    ]
    return {"term": term, "runs": runs}


def read_log(file: str) -> MemoryLog:
    """Return the memory figures of the last start in a vLLM log.

    Raises:
        CommandError: the file cannot be read, or has no such figures.
    """
    try:
        with Path(file).open("rb") as start:
            # Redirections of PowerShell write UTF-16.
            encoding = "utf-16" if start.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
        with Path(file).open(encoding=encoding, errors="replace") as lines:
            log = read_memory_log(lines)
    except OSError as error:
        raise bad_input(f"--from-log: {file}: {error.strerror or error}; use a file with a vLLM log") from None
    if log == MemoryLog():
        raise bad_input(
            f"--from-log: {file} contains no memory figures; use the complete log of a start of vLLM, up to "
            "`Application startup complete`"
        )
    return log


def deviates(plan: MemoryPlan, log: MemoryLog) -> bool:
    """Return whether a figure of `log` is outside of the range of the plan, or none of them is in the plan."""
    found = comparison_document(plan, log)
    return not found or not all(each["within"] for each in found)


def _concurrency_within(plan: MemoryPlan, log: MemoryLog) -> bool:
    kv = plan.kv
    return kv is None or log.concurrency is None or kv.concurrency_least <= log.concurrency <= kv.concurrency_most


def comparison(plan: MemoryPlan, log: MemoryLog) -> Iterator[str]:
    """Yield paragraphs that compare `log` with `plan`: differences in settings, then a table of the terms."""
    yield from _setting_differences(plan, log)
    found = list(terms(plan, log))
    rows = [
        [
            term.name,
            gib(term.logged),
            gib(term.planned),
            f"{gib(term.least)} to {gib(term.most)}",
            f"{term.difference / GIB:+.2f} GiB",
            "yes" if term.within else "NO",
        ]
        for term in found
    ]
    if log.concurrency is not None and plan.kv is not None:
        kv = plan.kv
        rows.append(
            [
                _CONCURRENCY,
                f"{log.concurrency:.2f}",
                f"{kv.concurrency:.2f}",
                f"{kv.concurrency_least:.2f} to {kv.concurrency_most:.2f}",
                f"{100 * (log.concurrency / kv.concurrency - 1):+.1f} %" if kv.concurrency else "",
                "yes" if _concurrency_within(plan, log) else "NO",
            ]
        )
    if not rows:
        yield "No figure of the log is in the plan: use the file of the logged start, and its complete log."
        return
    yield render_table(["TERM", "LOGGED", "PLANNED", "RANGE", "LOGGED IS", "WITHIN"], rows)
    if largest := largest_deviation(found):
        yield (
            f"Largest deviation: {largest.name}, {largest.difference / GIB:+.2f} GiB (logged {gib(largest.logged)}, "
            f"planned {gib(largest.planned)})."
        )
    yield "If a term is outside its range, the plan does not match this build: report this table with the log."


def comparison_document(plan: MemoryPlan, log: MemoryLog) -> list[dict[str, Any]]:
    """Return the terms of `comparison` as a document, in bytes, and the concurrent requests."""
    found: list[dict[str, Any]] = [
        {
            "term": term.name,
            "loggedBytes": term.logged,
            "plannedBytes": term.planned,
            "leastBytes": term.least,
            "mostBytes": term.most,
            "within": term.within,
        }
        for term in terms(plan, log)
    ]
    if log.concurrency is not None and plan.kv is not None:
        kv = plan.kv
        found.append(
            {
                "term": _CONCURRENCY,
                "logged": log.concurrency,
                "planned": round(kv.concurrency, 4),
                "least": round(kv.concurrency_least, 4),
                "most": round(kv.concurrency_most, 4),
                "within": _concurrency_within(plan, log),
            }
        )
    return found


def _setting_differences(plan: MemoryPlan, log: MemoryLog) -> Iterator[str]:
    length, share = plan.engine.max_model_len, plan.engine.gpu_memory_utilization or plan.machine.utilization
    if log.max_model_len is not None and log.max_model_len != length:
        yield (
            f"The log is for {log.max_model_len:,.0f} tokens per request, and the plan is for {length:,}; "
            f"add --what-if engine.maxModelLen={log.max_model_len:.0f}"
        )
    if log.utilization is not None and abs(log.utilization - share) > 1e-6:
        yield (
            f"The log is for gpuMemoryUtilization {log.utilization:g}, and the plan is for {share:g}; "
            f"add --what-if engine.gpuMemoryUtilization={log.utilization:g}"
        )
    given = plan.engine.kv_cache_memory
    if log.reserved is not None and given is None:
        yield (
            f"The log is for a KV cache of fixed size, {gib(log.reserved)}; add --what-if engine.kvCacheMemory="
            f"{round(log.reserved / 2**20)}Mi --what-if engine.gpuMemoryUtilization=null"
        )
    if log.kv is not None and given is not None and plan.machine.sm:
        yield (
            f"The plan is for kvCacheMemory {gib(given)}, and the log for a share of the memory; "
            "add --what-if engine.kvCacheMemory=null"
        )


def write_build(file: str, deployment: DSV4Deployment, profile: ImageProfile, plan: MemoryPlan, log: MemoryLog) -> None:
    """Write the build of a log for `spec.engine.build`: the memory in the log, and the flags and variables of the
    deployment that the profile lacks.

    Args:
        file: a new file.
        deployment: the specification of the logged start.
        profile: the profile of the plan, and base of the build.
        plan: without measured differences.
        log: the figures of the log.

    Raises:
        CommandError: the file exists or cannot be written, or the memory in the log is not that of this checkpoint.
    """
    engine = deployment.spec.engine
    old: dict[str, Any] = engine.build.to_dict() if engine.build else {}
    build: dict[str, Any] = {"base": profile.name, **old}
    arguments = read_arguments(engine.extra_args)
    # Other problems, such as a missing = or a wrong value, remain those of the file.
    flags = [
        each.name for each in arguments if profile.surface.flag(each.name) is None and _is_valid(flags=[each.name])
    ]
    problems = [(each.name, variable_problem(each.name, each.value, profile)) for each in engine.env]
    variables = [name for name, problem in problems if problem and problem.value == name]
    formats = [value for each in arguments if each.name == "--load-format" for value in each.values]
    for name, found in (("flags", flags), ("variables", variables)):
        if listed := list(dict.fromkeys([*old.get(name, ()), *found])):
            build[name] = listed
    if formats and formats[-1] not in profile.load_formats and _is_valid(load_formats=formats[-1:]):
        build["loadFormats"] = [formats[-1], *profile.load_formats]
    planned = plan.budget_items()
    differences = memory_differences(planned, log, KV_CACHE)
    if "weights" in differences:
        same = Range(1.0, 1.0, 1.0)
        bare = replace(plan.engine, build=replace(plan.engine.build, tensors=same, experts=same, experts_shared=None))
        tensors = memory_plan(plan.model, plan.machine, plan.parallel, bare).budget_items()["weights"]
        build["weightsFactor"] = round((planned["weights"] + differences["weights"]) / tensors, 4)
    if _NON_TORCH in differences:
        build["nonTorchGib"] = round((planned.get(_NON_TORCH, 0) + differences[_NON_TORCH]) / GIB, 2)
    try:
        BuildSpec.model_validate(build)
    except ValueError:
        raise bad_input(
            "--write-build: the memory in the log is too far from the plan; use the file of the logged start, with its "
            "checkpoint in spec.model"
        ) from None
    text = render_document({"spec": {"engine": {"build": build}}}, DocumentFormat.YAML)
    with convert_os_errors("--write-build: cannot write"), Path(file).open("x", encoding="utf-8") as target:
        target.write(f"# Build of a logged start of {deployment.metadata.name}; add it to its file.\n{text}\n")
    note(f"{file} has the build of the log; add it to the file of the deployment, in place of spec.engine.profile")


def _is_valid(**fields: list[str]) -> bool:
    try:
        BuildSpec.model_validate({"base": "any", **fields}, by_name=True)
    except ValueError:
        return False
    return True


_NON_TORCH = "non-torch memory"
_CONCURRENCY = "concurrent requests"
