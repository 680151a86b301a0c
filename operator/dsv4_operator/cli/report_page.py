"""HTML pages of `dsv4 report`: one report, and a comparison of several. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape

from dsv4_operator.api.values import format_time
from dsv4_operator.cli.output import format_age, plural
from dsv4_operator.cli.report_fields import (
    BenchPart,
    BenchRun,
    CheckResult,
    FabricPart,
    KernelSet,
    MemoryPart,
    MemoryTerm,
    RecoveryPart,
    RecoveryRow,
    SetupReport,
    VerifyPart,
)
from dsv4_operator.planning.catalog import GIB

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #57606a; --line: #d0d7de; --back: #fff; --soft: #f6f8fa;
  --bad: #b42318; --good: #116329; --bar: #0969da; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --dim: #9198a1; --line: #3d444d; --back: #0d1117;
  --soft: #161b22; --bad: #ff7b72; --good: #3fb950; --bar: #4493f8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; } .dim { color: var(--dim); }
dl { display: grid; grid-template-columns: minmax(7rem, min(16rem, 40%)) 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--dim); } dd { margin: 0; } dt, dd { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { background: var(--soft); } td.n { text-align: right; font-variant-numeric: tabular-nums; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--back); white-space: normal; }
.failed { color: var(--bad); font-weight: 600; } .ok { color: var(--good); }
svg { width: 100%; max-width: 36rem; height: auto; } svg text { fill: var(--dim); font-size: 11px; }
svg rect { fill: var(--bar); } svg text.value { fill: var(--text); }
@media print { main { max-width: none; } }
"""

Cell = str | int | float | bool | None
"""Value of a cell; None: unknown."""


def _show(value: Cell) -> str:
    """Return a value as text."""
    match value:
        case None | "":
            return "\N{EN DASH}"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
    return value


def _gib(size: float | None) -> str | None:
    return None if size is None else f"{size / GIB:.2f} GiB"


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else format_age(seconds)


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g} s"


def _moment(value: float | None) -> str | None:
    return None if value is None else format_time(int(value))


def _table(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table without empty columns; the first column has row headers. Empty without rows."""
    if not rows:
        return ""
    kept = [column for column in range(len(headers)) if any(row[column] not in (None, "") for row in rows)]
    head = "".join(f'<th scope="col">{escape(headers[column])}</th>' for column in kept)
    body = "".join(
        f"<tr>{''.join(_cell(row[column], first=column == kept[0]) for column in kept)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Cell, *, first: bool) -> str:
    text = escape(_show(value))
    if first:
        return f'<th scope="row">{text}</th>'
    number = isinstance(value, int | float) and not isinstance(value, bool)
    mark = "n" if number or text.endswith((" GiB", " s")) else text if text in ("ok", "failed") else ""
    return f'<td class="{mark}">{text}</td>' if mark else f"<td>{text}</td>"


def _list(pairs: Sequence[tuple[str, Cell]]) -> str:
    known = [(name, value) for name, value in pairs if value not in (None, "")]
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(_show(value))}</dd>' for name, value in known)}</dl>"


def _document(title: str, intro: str, sections: Sequence[tuple[str, str]]) -> str:
    parts = "".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in sections if body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f'<body><main><h1>{escape(title)}</h1><p class="dim">{escape(intro)}</p>{parts}</main></body></html>'
    )


def setup_title(report: SetupReport) -> str:
    """Return `2 × DGX Spark, 128 GB (GB10), V4-Flash-0731`."""
    nodes = report.setting("topology.nodesPerGroup") or 1
    devices = report.setting("topology.devicesPerNode") or 1
    each = f"{_show(devices)} × " if devices != 1 else ""
    machines = f"{_show(nodes)} × " if nodes != 1 else ""
    return f"{machines}{each}{report.machine.title}, {report.model.checkpoint}"


def render_page(report: SetupReport) -> str:
    """Return the report as an HTML page without external resources and scripts."""
    version = f"dsv4 {report.versions.dsv4}" if report.versions.dsv4 else "dsv4"
    intro = f"Report of {version}, {_show(_moment(report.time))}. It has no prompts, keys, names or addresses."
    return _document(f"dsv4 report: {setup_title(report)}", intro, list(_sections(report)))


def _sections(report: SetupReport) -> Iterator[tuple[str, str]]:
    yield "State", _state(report)
    yield "Machine", _list(_machine_rows(report))
    yield "Fabric", _fabric_section(report.fabric)
    yield "Versions", _list(_version_rows(report))
    settings = [(each.field, each.value) for each in report.specification]
    names = ", ".join(report.flags)
    yield "Specification", _list([*settings, ("further flags and variables", names)])
    if report.memory is not None:
        yield "Memory", _memory_section(report.memory)
    yield "Kernels", "".join(map(_kernel_section, report.kernels))
    if report.verify is not None:
        yield "Verification", _verify_section(report.verify)
    if report.bench is not None:
        yield "Benchmark", _bench_section(report.bench)
    if report.recovery is not None:
        yield "Recovery under load", _recovery_section(report.recovery)
    yield "Failures and recoveries", _failure_section(report)
    warnings = [[each.kind, each.group, each.rank, each.gpu, each.value, each.maximum] for each in report.warnings]
    yield "Warnings", _table(["warning", "group", "rank", "GPU", "value", "maximum"], warnings)


def _state(report: SetupReport) -> str:
    groups = [
        [
            each.index,
            each.phase,
            _age(each.serving_seconds),
            each.total_restarts,
            each.incarnation,
            each.engine_generation,
            each.kv_tokens,
            each.kv_planned_tokens,
            each.kv_concurrency,
        ]
        for each in report.groups
    ]
    headers = ["group", "phase", "serving for", "restarts", "incarnation", "engine", "KV cache tokens", "planned"]
    conditions = [[each.type, each.status, each.reason, _moment(each.since)] for each in report.conditions]
    return (
        _list([("phase", report.phase), ("age", _age(report.age_seconds))])
        + _table([*headers, "concurrent requests"], groups)
        + _table(["condition", "status", "reason", "since"], conditions)
    )


def _machine_rows(report: SetupReport) -> list[tuple[str, Cell]]:
    found = report.machine
    kinds = [gpu.machine for gpu in found.gpus]
    gpus_here = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    memory = [_gib(gpu.memory_bytes) for gpu in found.gpus if gpu.memory_bytes]
    return [
        ("machine", found.title),
        ("catalog", found.id),
        ("memory", _gib(found.memory_bytes)),
        ("driver", found.driver),
        ("GPUs", gpus_here),
        ("memory of the GPUs", ", ".join(each for each in dict.fromkeys(memory) if each)),
    ]


def _fabric_section(found: FabricPart) -> str:
    if not found.checks:
        return ""
    ports = [["RDMA" if port.rdma else "sockets", port.mtu, port.speed_mbit] for port in found.ports]
    checks = [[each.name, each.level, each.reason, each.value] for each in found.checks]
    return (
        _list([("usable transport", found.transport)])
        + _table(["port", "MTU", "Mbit/s"], ports)
        + _table(["check", "result", "reason", "value"], checks)
    )


def _version_rows(report: SetupReport) -> list[tuple[str, Cell]]:
    found = report.versions
    return [
        ("dsv4", found.dsv4),
        ("image profile", found.profile + (", changed" if found.own_build else "")),
        ("vLLM of the profile", found.vllm),
        ("vLLM of the endpoint", report.verify.engine if report.verify else None),
        ("libraries of the profile", ", ".join(found.libraries)),
        ("image digest", found.image_digest),
        ("checkpoint", report.model.checkpoint),
        ("source", report.model.source),
        ("revision", report.model.revision),
    ]


def _measured(term: MemoryTerm) -> str | None:
    sizes = [each.bytes for each in term.measured if each.bytes is not None]
    if not sizes:
        return None
    least, most = _gib(min(sizes)), _gib(max(sizes))
    return least if least == most else f"{min(sizes) / GIB:.2f} to {most}"


def _memory_section(found: MemoryPart) -> str:
    rows = [
        [
            term.name,
            "engine" if term.in_budget else "beside it",
            _gib(term.planned_bytes),
            _gib(term.least_bytes),
            _gib(term.most_bytes),
            _measured(term),
        ]
        for term in found.terms
    ]
    figures: list[tuple[str, Cell]] = [
        ("verdict", found.verdict),
        ("rank", found.rank),
        ("memory", _gib(found.memory_bytes)),
        ("planned", _gib(found.used_bytes)),
        ("KV cache tokens", found.tokens),
        ("concurrent requests", found.concurrency),
    ]
    return _list(figures) + _table(["term", "part", "planned", "at least", "at most", "measured"], rows)


def _kernel_section(found: KernelSet) -> str:
    groups = f"<p>Groups {escape(_ranges([int(each) for each in found.groups if each is not None]))}</p>"
    rows = []
    for each in found.operations:
        tried = [one for one in each.standings if not one.excluded and one.slowness is not None]
        excluded = ", ".join(one.provider for one in each.standings if one.excluded)
        times = ", ".join(f"{one.provider} {one.slowness:.2f}" for one in tried)
        speed = f"{each.speedup:.2f} × {each.next}" if each.speedup and each.next else None
        rows.append([each.op, each.provider, speed, times, excluded, "yes" if each.changed else None])
    headers = ["operation", "provider", "speed", "relative times", "excluded", "differs from the choice"]
    return groups + _table(headers, rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Return `0-3, 5`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _verify_section(found: VerifyPart) -> str:
    rows = [[each.name, each.status, each.reason, _seconds(each.seconds), _figures(each)] for each in found.results]
    figures: list[tuple[str, Cell]] = [
        ("run", "quick" if found.quick else "complete"),
        *((status, found.count(status)) for status in ("ok", "failed", "skipped")),
        ("duration", _seconds(found.seconds)),
        ("context of the endpoint", found.max_model_len),
    ]
    return _list(figures) + _table(["check", "result", "reason", "duration", "figures"], rows)


def _figures(result: CheckResult) -> str:
    def text(value: object) -> str:
        return "/".join(map(str, value)) if isinstance(value, list) else str(value)

    return ", ".join(f"{name} {text(value)}" for name, value in result.figures.items())


_BENCH: tuple[tuple[str, Callable[[BenchRun], Cell]], ...] = (
    ("profile", lambda run: run.profile),
    ("concurrency", lambda run: run.concurrency),
    ("prompts", lambda run: run.prompt_class),
    ("requests", lambda run: run.requests),
    ("failed", lambda run: run.failed),
    ("input tokens", lambda run: run.input_tokens),
    ("output tokens", lambda run: run.output_tokens),
    ("requests/s", lambda run: run.requests_per_second),
    ("output tokens/s", lambda run: run.output_tokens_per_second),
    ("tokens/s per request", lambda run: run.decode_tokens_per_second),
    ("prefill tokens/s", lambda run: run.prefill_tokens_per_second),
    ("TTFT p50", lambda run: _seconds(run.ttft_seconds.p50)),
    ("TTFT p95", lambda run: _seconds(run.ttft_seconds.p95)),
    ("TPOT p50", lambda run: _seconds(run.tpot_seconds.p50)),
    ("TPOT p95", lambda run: _seconds(run.tpot_seconds.p95)),
    ("request p50", lambda run: _seconds(run.request_seconds.p50)),
    ("request p95", lambda run: _seconds(run.request_seconds.p95)),
    ("accepted drafts", lambda run: run.acceptance_rate),
    ("J per output token", lambda run: run.joules_per_output_token),
)
"""Columns of the benchmark; the first two identify a row."""


def _bench_section(found: BenchPart) -> str:
    rows = [[value(run) for _, value in _BENCH] for run in found.runs]
    return _plot(found.runs[:_MOST_BARS]) + _table([name for name, _ in _BENCH], rows)


_MOST_BARS = 24


def _plot(runs: Sequence[BenchRun]) -> str:
    """Return output tokens per second of each run as bars; empty without figures."""
    bars = [(_run_name(run), run.output_tokens_per_second) for run in runs if run.output_tokens_per_second]
    if not bars:
        return ""
    longest = max(value for _, value in bars)
    lines = []
    for number, (name, value) in enumerate(bars):
        width = round(200 * max(value, 0) / max(longest, 1e-9), 1)
        y = 18 * number
        lines.append(
            f'<text x="0" y="{y + 12}">{escape(name)}</text><rect x="165" y="{y + 2}" width="{width}" height="13"/>'
            f'<text class="value" x="{170 + width}" y="{y + 12}">{escape(_show(value))}</text>'
        )
    label = "output tokens per second of each run"
    height = 18 * len(bars)
    return f'<p class="dim">Output tokens/s</p><svg viewBox="0 0 440 {height}" role="img" aria-label="{label}">' + (
        "".join(lines) + "</svg>"
    )


def _run_name(run: BenchRun) -> str:
    return run.profile if run.concurrency is None else f"{run.profile}, {_show(run.concurrency)} concurrent"


def _recovery_section(found: RecoveryPart) -> str:
    rows = [
        [
            each.fault,
            each.repetitions,
            ", ".join(dict.fromkeys(one.cause for one in each.samples)),
            ", ".join(dict.fromkeys(_show(one.level) for one in each.samples)),
            _seconds(each.detect_seconds),
            _seconds(each.recover_seconds),
            _seconds(each.outage_seconds),
            _longest(each),
            each.requests,
            each.lost,
        ]
        for each in found.runs
    ]
    headers = ["fault", "times", "cause", "level", "detected", "recovered", "outage", "longest outage", "requests"]
    return _list([("clients", found.clients)]) + _table([*headers, "lost requests"], rows)


def _longest(row: RecoveryRow) -> str | None:
    return _seconds(max((one.outage_seconds for one in row.samples if one.outage_seconds is not None), default=None))


def _failure_section(report: SetupReport) -> str:
    if not report.failures:
        return "<p>No failure is recorded.</p>"
    rows = [
        [
            _moment(each.time),
            each.cause,
            each.group,
            each.rank,
            each.level,
            each.detected_by,
            _seconds(each.recover_seconds),
            each.incarnation,
            each.engine_generation,
        ]
        for each in report.failures
    ]
    headers = ["time", "cause", "group", "rank", "level", "detected by", "recovered in", "incarnation", "engine"]
    return f"<p>{escape(plural(len(rows), 'failure'))} in the status.</p>" + _table(headers, rows)


# The comparison.


def compared(reports: Sequence[SetupReport]) -> list[tuple[str, list[Cell]]]:
    """Return the rows of a comparison: a figure and its value in each report."""
    columns = [dict(_comparable(report)) for report in reports]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, [column.get(label) for column in columns]) for label in labels]
    return [(label, values) for label, values in rows if any(value not in (None, "") for value in values)]


def _comparable(report: SetupReport) -> Iterator[tuple[str, Cell]]:
    yield from _machine_rows(report)
    yield "usable transport", report.fabric.transport if report.fabric.checks else None
    yield from _version_rows(report)
    yield from ((each.field, each.value) for each in report.specification)
    yield "phase", report.phase
    yield "age", _age(report.age_seconds)
    yield (
        "serving for",
        _age(min((each.serving_seconds for each in report.groups if each.serving_seconds), default=None)),
    )
    yield "restarts", sum(each.total_restarts or 0 for each in report.groups)
    yield "failures", len(report.failures)
    recoveries = [each.recover_seconds for each in report.failures if each.recover_seconds is not None]
    yield "longest recovery", _seconds(max(recoveries, default=None))
    yield "mean recovery", _seconds(sum(recoveries) / len(recoveries) if recoveries else None)
    yield "warnings", len(report.warnings)
    for group in report.groups[:1]:
        yield "KV cache tokens", group.kv_tokens
        yield "KV cache tokens, planned", group.kv_planned_tokens
        yield "concurrent requests", group.kv_concurrency
    for term in report.memory.terms if report.memory else ():
        yield f"{term.name}, planned", _gib(term.planned_bytes)
        yield f"{term.name}, measured", _measured(term)
    for found in report.kernels[:1]:
        yield from ((f"kernel of {each.op}", each.provider) for each in found.operations)
    if report.verify is not None:
        yield from ((f"checks {status}", report.verify.count(status)) for status in ("ok", "failed", "skipped"))
        failed = [each.name for each in report.verify.results if each.status == "failed"]
        yield "failed checks", ", ".join(failed)
    for row in report.recovery.runs if report.recovery else ():
        yield f"{row.fault}: detected", _seconds(row.detect_seconds)
        yield f"{row.fault}: recovered", _seconds(row.recover_seconds)
        yield f"{row.fault}: outage", _seconds(row.outage_seconds)
        yield f"{row.fault}: lost requests", row.lost
    seen = Counter[str]()
    for run in report.bench.runs if report.bench else ():
        seen[name] = number = seen[name := _run_name(run)] + 1
        label = name if number == 1 else f"{name} ({number})"
        yield from ((f"{label}: {column}", value(run)) for column, value in _BENCH[2:])


def render_comparison(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """Return a comparison as an HTML page: figures as rows, machines as columns."""
    headers = ["figure", *(f"{number}. {title}" for number, title in enumerate(titles, 1))]
    body = _table(headers, [[label, *values] for label, values in rows])
    intro = f"{len(titles)} reports. They have no prompts, keys, names or addresses."
    return _document("dsv4 report: comparison", intro, [("Figures", body)])
