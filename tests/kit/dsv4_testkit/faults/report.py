"""Results as text: catalogue, one line per run, tables, and the generated part of the documentation page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsv4_testkit.faults.judge import Result
from dsv4_testkit.faults.matrix import MATRIX
from dsv4_testkit.faults.store import Store
from dsv4_testkit.faults.table import BOUND, Fault, Kind

_PEER = "bare vLLM"

BEGIN, END = "<!-- benchmarks/faults.py --page: begin -->", "<!-- benchmarks/faults.py --page: end -->"
"""Lines around the generated part of the documentation page."""
_WORDS = """\
*Noticed* is the time from the fault to the verdict, or until a process of dsv4 was continued or replaced; *back* the
time from the fault to the answer that ended the clients' longest wait. Of several runs both have minimum, median and
maximum. *Failed* counts requests that got no answer and no token of one, *cut silently*
streams that ended or stood still with neither a completion nor an error event. A client that failed sends again after
half a second, so the number of failures is about twice the clients times the seconds of an outage."""
_BESIDE = """\
The same model, flags and namespaces without dsv4's agents: `ray start --block` and vLLM's server, each in a loop that
starts it again when it ends, and `/health` requested once a second. A fault that neither ends a process nor changes
`/health` within 120 s counts as not noticed."""


def catalog(faults: Iterable[Fault]) -> str:
    """Return the table of faults with the expected behaviour of dsv4."""
    rows = [
        [
            fault.name,
            fault.kind,
            " or ".join(fault.causes) or ("none: it is replaced" if fault.kind is Kind.OWN else "none: it survives"),
            "-" if fault.rank is None else str(fault.rank),
            "-" if fault.level is None else str(fault.level),
            f"{BOUND[fault.kind]:.0f} s" if fault.kind in BOUND else "-",
            "yes" if fault.bare else "no",
        ]
        for fault in faults
    ]
    return markdown(["fault", "kind", "cause", "rank", "level", "noticed within", "peer too"], rows)


def line(result: Result) -> str:
    """Return one run as one line."""
    if result.verdict == "Replaced":
        verdict = f"replaced after {_s(result.replaced)}"
    elif result.verdict == "Healthy":
        verdict = "MISSED" if result.missed else "survived"
    else:
        right = {True: "right", False: "WRONG", None: "-"}
        verdict = (
            f"noticed {_s(result.detected)}, {result.cause} ({right[result.cause_right]}) of rank {result.culprit}"
            f" ({right[result.culprit_right]}), level {result.level} ({right[result.level_right]}), by {result.by},"
            f" recovered {_s(result.recovered)}"
        )
    clients = (
        f"clients back {_s(result.back)}; sent {result.sent}, answered {result.answered}, "
        f"replayed {'-' if result.replayed is None else int(result.replayed)}, failed {result.failed}, "
        f"ended {result.ended}, cut silently {result.silent}; false restarts {result.false_restarts}"
    )
    return f"{verdict}; {clients}{f'; NOT IN ORDER: {result.disorder}' if result.disorder else ''}"


def summary(store: Store) -> str:
    """Return all results as text."""
    parts = [f"machine: {text}" for text in store.machines()]
    for name in dict.fromkeys(run.system for run in store.runs):
        mine = [run for run in store.runs if run.system == name]
        parts += ["", f"{name}:", "", table(mine), "", classes(mine), "", totals(mine)]
    if any(run.system == _PEER for run in store.runs):
        parts += ["", sides(store.runs)]
    parts += extras(store)
    return "\n".join(parts)


def table(runs: Sequence[Result]) -> str:
    """Return one row per fault: minimum, median and maximum over its runs, sums over its requests."""
    rows = []
    for name in [fault.name for fault in MATRIX if any(run.fault == fault.name for run in runs)]:
        mine = [run for run in runs if run.fault == name]
        rows.append(
            [
                name,
                str(len(mine)),
                _range(mine, lambda run: run.detected),
                ", ".join(sorted({_verdict(run) for run in mine})),
                _share(mine, lambda run: run.cause_right),
                _share(mine, lambda run: run.culprit_right),
                ", ".join(sorted({"-" if run.level is None else str(run.level) for run in mine})),
                _range(mine, lambda run: run.back),
                str(sum(run.sent for run in mine)),
                str(sum(run.answered for run in mine)),
                "-" if any(run.replayed is None for run in mine) else str(int(sum(run.replayed or 0 for run in mine))),
                str(sum(run.failed for run in mine)),
                str(sum(run.ended for run in mine)),
                str(sum(run.silent for run in mine)),
                str(sum(run.false_restarts for run in mine)),
            ]
        )
    heads = ["fault", "runs", "noticed s", "verdict", "cause right", "culprit right", "level", "back s", "sent"]
    heads += ["answered", "replayed", "failed", "ended with an error", "cut silently", "false restarts"]
    return markdown(heads, rows)


def classes(runs: Sequence[Result]) -> str:
    """Return detection times by kind of fault, with their bounds."""
    rows = []
    for kind in [kind for kind in Kind if kind in BOUND and any(run.kind == kind for run in runs)]:
        mine = [run for run in runs if run.kind == kind]
        times = [run.detected for run in mine if run.detected is not None]
        figures = [f"{percentile(times, share):.2f}" if times else "-" for share in (50, 95, 100)]
        missed = str(sum(run.missed for run in mine))
        rows.append([kind.value, str(len(mine)), *figures, f"{BOUND[kind]:.0f}", missed])
    return markdown(["kind", "runs", "noticed p50 s", "p95 s", "max s", "goal p95 s", "missed"], rows)


def totals(runs: Sequence[Result]) -> str:
    """Return the figures with goals."""
    return (
        f"right cause {_share(runs, lambda run: run.cause_right)}, "
        f"right culprit {_share(runs, lambda run: run.culprit_right)}, "
        f"reports in order {_share(runs, lambda run: None if run.level is None else not run.disorder)}, "
        f"missed {sum(run.missed for run in runs)}, false restarts {sum(run.false_restarts for run in runs)}; "
        f"of {sum(run.sent for run in runs)} requests {sum(run.failed for run in runs)} failed, "
        f"{sum(run.ended for run in runs)} streams ended with an error, {sum(run.silent for run in runs)} silently"
    )


def sides(runs: Sequence[Result]) -> str:
    """Return dsv4 and the peer side by side, for the faults caused in the peer."""
    rows = []
    for fault in MATRIX:
        pair = [[r for r in runs if r.fault == fault.name and r.system == name] for name in ("dsv4", _PEER)]
        if not pair[1]:
            continue
        row = [fault.name]
        for measure in (lambda run: run.detected, lambda run: run.back):
            row += [_median(mine, measure) for mine in pair]
        for count in (lambda run: run.failed, lambda run: run.silent):
            row += [f"{sum(map(count, mine))} of {sum(r.sent for r in mine)}" if mine else "-" for mine in pair]
        rows.append(row)
    heads = [
        "fault",
        "noticed s: dsv4",
        _PEER,
        "back s: dsv4",
        _PEER,
        "failed: dsv4",
        _PEER,
        "cut silently: dsv4",
        _PEER,
    ]
    return markdown(heads, rows)


def extras(store: Store) -> list[str]:
    """Return the lines on soaks, series of deaths, and cost of the agents."""
    lines = []
    for soak in store.data["soaks"]:
        lines.append(
            f"soak of {soak['minutes']:.0f} min ({soak['prefills']} long prefills, {soak['losses']} losses of 8 s, "
            f"{soak['pauses']} pauses{_more(soak)}): {soak['samples']} samples, dead {soak['dead']}, "
            f"suspect {soak['suspect']} (in losses {soak['suspectInLosses']}), restarts {soak['restarts']}, "
            f"of loop and gateways {soak.get('ownRestarts', 0)}; "
            f"requests {soak['sent']}, failed {soak['failed']}, cut silently {soak['silent']}"
        )
    for series in store.data["deaths"]:
        lines.append(
            f"{series['deaths']} engine deaths under {series['clients']} clients: of {series['sent']} requests "
            f"{series['failed']} failed that had not begun, {series['silent']} streams were cut silently, "
            f"{series['ended']} ended with an error; recovery p50 {series['p50']:.1f} s, p95 {series['p95']:.1f} s, "
            f"cold engine start {series['cold']:.1f} s"
        )
    for cost in store.data["costs"]:
        agents = "; ".join(
            f"{what}: "
            + ", ".join(
                f"rank {agent['rank']} {agent['core']:.2%} of a core and {agent['mebibytes']:.0f} MiB"
                for agent in cost[what]
            )
            for what in ("idle", "serving")
        )
        lines.append(f"the agents over {cost['minutes']:.0f} min; {agents}")
    return ["", *lines] if lines else []


def _more(soak: Mapping[str, Any]) -> str:
    """Return the phases that older soaks lack."""
    if "bursts" not in soak:
        return ""
    return f", {soak['bursts']} times bursts of 24 clients, {soak['contention']} times prefills on busy processors"


def update(text: str, store: Store) -> str:
    """Return the documentation page with its generated part replaced.

    Raises:
        ValueError: the page lacks one of the two lines around that part.
    """
    before, found, rest = text.partition(f"{BEGIN}\n")
    _, ended, after = rest.partition(f"{END}\n")
    if not (found and ended):
        raise ValueError(f"the page needs a line {BEGIN} and a line {END}")
    return f"{before}{found}{page(store)}{ended}{after}"


def page(store: Store) -> str:
    """Return the generated part of the documentation page."""
    mine = [run for run in store.runs if run.system == "dsv4"]
    peer = [run for run in store.runs if run.system == _PEER]
    parts = [catalog(MATRIX)]
    if mine:
        machines = [f"Machine: {text}." for text in store.machines()]
        judged = totals(mine)
        parts += ["", "## Results", "", *machines, "", _WORDS, "", table(mine), "", classes(mine), ""]
        parts += [f"{judged[:1].upper()}{judged[1:]}."]
    if more := extras(store):
        parts += ["", "## Longer runs", "", *(f"- {text[:1].upper()}{text[1:]}." for text in more if text)]
    if peer:
        parts += [
            "",
            "## Beside bare vLLM",
            "",
            _BESIDE,
            "",
            sides(store.runs),
            "",
            table(peer),
        ]
    return "\n".join(parts) + "\n"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` percent of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def _verdict(run: Result) -> str:
    if run.verdict == "Healthy":
        return "missed" if run.missed else "survived"
    if run.verdict == "Replaced":
        return "replaced"
    return run.cause or "noticed"


def _median(runs: Sequence[Result], measure: Callable[[Result], float | None]) -> str:
    values = [value for run in runs if (value := measure(run)) is not None]
    return f"{statistics.median(values):.1f}" if values else "-"


def _range(runs: Sequence[Result], measure: Callable[[Result], float | None]) -> str:
    """Return minimum, median and maximum, or the only value of a single run."""
    values = [value for run in runs if (value := measure(run)) is not None]
    if len(values) < 2:
        return _median(runs, measure)
    return " / ".join(f"{value:.1f}" for value in (min(values), statistics.median(values), max(values)))


def _share(runs: Sequence[Result], right: Callable[[Result], bool | None]) -> str:
    values = [value for run in runs if (value := right(run)) is not None]
    return f"{sum(values)} of {len(values)}" if values else "-"


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"
