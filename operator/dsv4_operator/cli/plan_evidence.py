"""`dsv4 plan --explain TERM` and `--from-log FILE`: what a figure rests on, and how a start compares with its plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4_operator.cli.errors import bad_input
from dsv4_operator.cli.output import render_table
from dsv4_operator.planning.memory import MemoryPlan, gib
from dsv4_operator.planning.memory.runs import TERMS, Comparison, Term, comparisons, terms
from dsv4_runtime.contract import MemoryLog, read_memory_log

_WIDEST_FIGURE = {"concurrency": "requests"}


def explained(term: str) -> list[Comparison]:
    """Return the logged starts behind `term`.

    Raises:
        CommandError: there is no such term.
    """
    if term not in TERMS:
        raise bad_input(f'--explain: "{term}" is no term of a plan; use one of {", ".join(TERMS)}')
    return list(comparisons(term))


def explanation(term: str, found: list[Comparison]) -> str:
    """Return `found` as text: the plan of each start beside what it logged, and the sources."""
    unit = _WIDEST_FIGURE.get(term, "GiB")
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


def explanation_document(term: str, found: list[Comparison]) -> dict[str, Any]:
    """Return the same for programs; GiB or requests."""
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
    """Return what the last start in a log of vLLM's says about its memory.

    Raises:
        CommandError: the file cannot be read, or says nothing about it.
    """
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as lines:
            log = read_memory_log(lines)
    except OSError as error:
        raise bad_input(f"--from-log {file}: {error.strerror or error}; name a file with vLLM's log") from None
    if log == MemoryLog():
        raise bad_input(
            f"--from-log {file}: no line about memory; give the log of a whole start of vLLM, from its first line "
            "to `Application startup complete`"
        )
    return log


def compared(plan: MemoryPlan, log: MemoryLog) -> Iterator[str]:
    """Yield the paragraphs that put `log` beside `plan`, term by term."""
    yield from _other_settings(plan, log)
    rows = [_row(term) for term in terms(plan, log)]
    if log.concurrency is not None and plan.kv is not None:
        kv = plan.kv
        inside = kv.concurrency_least <= log.concurrency <= kv.concurrency_most
        rows.append(
            [
                "requests at once",
                f"{log.concurrency:.2f}",
                f"{kv.concurrency:.2f}",
                f"{kv.concurrency_least:.2f} to {kv.concurrency_most:.2f}",
                f"{100 * (log.concurrency / kv.concurrency - 1):+.1f} %" if kv.concurrency else "",
                "yes" if inside else "NO",
            ]
        )
    yield render_table(["TERM", "LOGGED", "PLANNED", "RANGE", "LOGGED IS", "WITHIN"], rows)
    yield "If a term is not within its range, the plan is wrong about this build: send this table with the log."


def comparison_document(plan: MemoryPlan, log: MemoryLog) -> list[dict[str, Any]]:
    """Return the terms for programs; bytes."""
    return [
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


def _row(term: Term) -> list[str]:
    return [
        term.name,
        gib(term.logged),
        gib(term.planned),
        f"{gib(term.least)} to {gib(term.most)}",
        f"{term.difference / 2**30:+.2f} GiB",
        "yes" if term.within else "NO",
    ]


def _other_settings(plan: MemoryPlan, log: MemoryLog) -> Iterator[str]:
    """Say where the log is of other settings than the plan."""
    length, share = plan.engine.max_model_len, plan.engine.gpu_memory_utilization or plan.machine.utilization
    if log.max_model_len is not None and log.max_model_len != length:
        yield (
            f"The log is of {log.max_model_len:,.0f} tokens a request, and the plan of {length:,}; "
            f"add --what-if engine.maxModelLen={log.max_model_len:.0f}"
        )
    if log.utilization is not None and abs(log.utilization - share) > 1e-6:
        yield (
            f"The log is of a share of {log.utilization:g}, and the plan of {share:g}; "
            f"add --what-if engine.gpuMemoryUtilization={log.utilization:g}"
        )
