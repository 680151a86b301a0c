"""`dsv4 plan`: memory of a deployment on its machines, changes that would make it fit, and comparison with logs; `dsv4
kernels compile`: the program that compiles the kernels of its engine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from dsv4_operator.api import DSV4Deployment, Finding, Hardware, InvalidDeployment, Reason, Severity
from dsv4_operator.api.values import split_remedy
from dsv4_operator.backends.local.facts import hub_model, model_here
from dsv4_operator.cli.output import (
    CommandError,
    DocumentFormat,
    ExitCode,
    bad_input,
    invalid,
    note,
    print_line,
    render_document,
    render_table,
    wrap,
)
from dsv4_operator.cli.sources.base import DeploymentSource
from dsv4_operator.planning import Facts, PlanRefused, plan_group
from dsv4_operator.planning.catalog import (
    GIB,
    Machine,
    Model,
    UnknownCheckpoint,
    checkpoint_named,
    machine,
    machine_named,
    model_for,
)
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint, model_config
from dsv4_operator.planning.facts import NodeFacts
from dsv4_operator.planning.memory import (
    BadDivision,
    FitVerdict,
    MemoryPlan,
    MemoryPool,
    RankPlan,
    deployment_plan,
    gib,
)
from dsv4_operator.planning.memory.plan import Change, largest_uncertainty, load_formats, longest_context
from dsv4_operator.planning.planner import accepted_advice, checked_divisions, with_accepted_division
from dsv4_operator.planning.rules import findings
from dsv4_operator.planning.setup import changed_document, image_profile, measured_here, setup, with_settings
from dsv4_runtime.contract import GroupPlan

_COLUMNS = 80
_AROUND_BAR = len("  ││ 123.45 GiB of 123.45 GiB")
_USERS = (1, 2, 4)
_FILLS = (
    ("weights", "█", "cyan"),
    ("buffers", "▓", "blue"),
    ("KV cache", "▒", "green"),
    ("beside the engine", "░", "yellow"),
    ("free", "·", "dim"),
)
"""Name, character and colour of the parts of a bar, in order; the characters are legible without colours."""


def show(
    source: DeploymentSource,
    file_or_name: str,
    *,
    changes: Sequence[str],
    machine_id: str | None,
    form: DocumentFormat | None,
    log_file: str | None,
    build_file: str | None = None,
    hub: bool = False,
) -> ExitCode:
    """Print the plan of the first incarnation of every group, its memory, and changes that would make it fit.

    Args:
        source: of the deployment and its machines.
        file_or_name: a file, or for a cluster the name of a deployment.
        changes: changes below `spec`, each `path=value`.
        machine_id: a machine of the catalog instead of the default of the hardware.
        form: print a document instead of text; errors of the input are then a document too.
        log_file: a vLLM log to compare with the plan.
        build_file: the file for the build of that log.
        hub: whether the sizes are those of the files on the hub.

    Raises:
        CommandError: the file or an option is invalid.
    """
    if log_file:
        # The patterns of logs take 20 ms to compile.
        from dsv4_operator.cli import logged
    with _errors_as_document(form):
        log = logged.read_log(log_file) if log_file else None
        deployment = apply_changes(source.load(file_or_name), changes)
        kind = _machine(deployment, machine_id)
        facts = source.facts(deployment, kind, chosen=machine_id is not None)
        kind = _smallest_variant(kind, facts.of_group(0, deployment.spec.topology.nodes_per_group))
        name = deployment.metadata.name
        try:
            model = _model_of_hub(deployment) if hub else model_here(deployment.spec.model)
            profile = image_profile(deployment)
            chosen = model or model_for(deployment.spec.model)
            facts = replace(facts, measured=source.measured(name), model=model)
            measured = measured_here(deployment, facts, chosen, kind)
            memory = deployment_plan(deployment, chosen, kind, profile, measured)
        except UnknownCheckpoint as error:
            raise bad_input(str(error), findings=[error.finding]) from None
        except BadDivision as error:
            division = with_accepted_division(deployment, facts, error)
            raise bad_input(str(division.findings[0]), findings=division.findings) from None
        except ValueError as error:
            found = Finding("spec.topology", Reason.PLAN_REFUSED, *split_remedy(str(error)))
            raise bad_input(str(found), findings=[found]) from None
        except BadCheckpoint as error:
            raise bad_input(f"{name}: {error}") from None
        except PlanRefused as refused:
            raise bad_input(refused.message, findings=refused.findings) from None
        if build_file is not None and log is not None:
            plain = deployment_plan(deployment, chosen, kind, profile)
            logged.write_build(build_file, deployment, profile, plain, log)
        plans, refusal = _plans(deployment, facts)
        suggestions, warnings = _advice(deployment, facts), _warnings(deployment, facts)
        # The text below already covers a lack of memory.
        if refusal and (memory.verdict is FitVerdict.FITS or refusal.reason not in _MEMORY_REASONS):
            note(f"error: {name}: {refusal.message}")
        formats = profile.load_formats
        if form is not None:
            refusals = refusal.findings if refusal else ()
            document: dict[str, Any] = {"name": name, "memory": memory_document(memory, suggestions, formats)}
            if log is not None:
                document["log"] = logged.comparison_document(memory, log)
            document["findings"] = [each.to_dict() for each in (*refusals, *warnings)]
            document |= {"refused": refusal.message} if refusal else {"groups": [plan.to_dict() for plan in plans]}
            print_line(render_document(document, form))
        else:
            by_rule = refusal is not None and refusal.reason not in _MEMORY_REASONS
            tight = deployment.spec.engine.allow_tight
            _print(memory_text(memory, suggestions, name, formats, refused=by_rule, allow_tight=tight))
            if log is not None:
                _print("\n" + "\n\n".join(logged.comparison(memory, log)))
            elif memory.verdict is not FitVerdict.NO and not refusal:
                _print("\n" + "\n\n".join(_members_text(plans, local=not kind.sm, placed=facts.placed is not None)))
        for warning in warnings:
            note(f"warning: {warning}")
        if log is not None and logged.deviates(memory, log):
            return ExitCode.FAILED
        if memory.verdict is FitVerdict.NO or (refusal and refusal.reason is not Reason.MEMORY_UNCERTAIN):
            return ExitCode.BAD_INPUT
        return ExitCode.UNCERTAIN if memory.verdict is FitVerdict.UNCERTAIN else ExitCode.OK


def _model_of_hub(deployment: DSV4Deployment) -> Model:
    found = hub_model(deployment.spec.model)
    source = deployment.spec.model.source.hugging_face
    if source is not None and checkpoint_named(source.repo) is None:
        note(
            f"a start does not read the hub: write size: {found.checkpoint_bytes} in spec.model, and the checkpoint "
            "from which this one was made in spec.model.checkpoint"
        )
    return found


_MEMORY_REASONS = (Reason.MEMORY_SHORT, Reason.MEMORY_UNCERTAIN)


def _advice(deployment: DSV4Deployment, facts: Facts) -> tuple[Change, ...]:
    try:
        return tuple(accepted_advice(setup(deployment, facts)))
    except PlanRefused:
        return ()


@contextmanager
def _errors_as_document(form: DocumentFormat | None) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        if form is not None:
            findings = [finding.to_dict() for finding in error.findings]
            print_line(render_document({"errors": list(error.messages), "findings": findings}, form))
        raise


def _machine(deployment: DSV4Deployment, name: str | None) -> Machine:
    hardware = deployment.spec.topology.hardware
    if name is None:
        return machine(hardware)
    try:
        found = machine_named(name)
    except KeyError as error:
        raise bad_input(f"--machine: {error.args[0]}") from None
    if found.hardware not in (hardware, "") or (not found.hardware and hardware is Hardware.CPU):
        raise bad_input(
            f"--machine: {name} has hardware {found.hardware}, and spec.topology.hardware is {hardware}; change one"
        )
    return found


def _smallest_variant(kind: Machine, nodes: Sequence[NodeFacts]) -> Machine:
    """Return the variant of `kind` with the least memory among `nodes`."""
    if not kind.sm:
        return replace(kind, memory_bytes=min((node.memory_bytes for node in nodes), default=0))
    found = [machine_named(node.machine) for node in nodes if node.machine]
    return min((one for one in found if one.hardware == kind.hardware), key=lambda one: one.memory_bytes, default=kind)


def _plans(deployment: DSV4Deployment, facts: Facts) -> tuple[list[GroupPlan], PlanRefused | None]:
    """Return the plan of each group, or the refusal."""
    try:
        groups = range(max(deployment.spec.replicas, 1))
        return [plan_group(deployment, facts, group=group, incarnation=1) for group in groups], None
    except PlanRefused as refused:
        return [], refused


def _warnings(deployment: DSV4Deployment, facts: Facts) -> list[Finding]:
    try:
        found = findings(deployment, facts)
    except PlanRefused:
        return []
    return [finding for finding in found if finding.severity is Severity.WARN]


def _members_text(plans: Sequence[GroupPlan], *, local: bool, placed: bool) -> Iterator[str]:
    """Yield paragraphs about the members; those of `local` plans have addresses, those of `placed` plans nodes."""
    known = local or placed
    if known:
        yield _members_table(plans, placed=placed)
    elif len(plans) > 1:
        machines = sum(len(plan.members) for plan in plans)
        yield f"The plan is for one of {len(plans)} equal groups on {machines} machines."
    placeholders = "" if known else ", with 192.0.2.x as addresses, because the machines are not known"
    yield f"Use -o yaml for the command lines and the environment of every member{placeholders}."


def _members_table(plans: Sequence[GroupPlan], *, placed: bool) -> str:
    rows = [
        [
            str(plan.group),
            str(member.rank),
            str(member.role),
            (member.node or "") if placed else member.address,
            str(member.devices),
        ]
        for plan in plans
        for member in plan.members
    ]
    return render_table(["GROUP", "RANK", "ROLE", "NODE" if placed else "ADDRESS", "DEVICES"], rows)


def _print(text: str) -> None:
    if not sys.stdout.isatty():
        print_line(text)
        return
    if os.environ.get("NO_COLOR"):
        print_line(wrap(text, shutil.get_terminal_size().columns))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    shown = Text(wrap(text, console.width), no_wrap=True)
    for _, fill, style in _FILLS:
        shown.highlight_regex(f"{fill}+", style)
    shown.highlight_regex(r"(?m)^It fits;", "bold green")
    shown.highlight_regex(r"(?m)^It is uncertain:", "bold yellow")
    shown.highlight_regex(r"(?m)^It does not fit:", "bold red")
    console.print(shown)


def apply_changes(deployment: DSV4Deployment, changes: Sequence[str]) -> DSV4Deployment:
    """Return `deployment` with `changes` applied, each a path below `spec` and a YAML value: `engine.maxNumSeqs=4`.

    `null` restores the default of a field. A change of the number of devices also restores that of
    `tensorParallelSize`, unless that is changed as well.

    Raises:
        CommandError: a change has no valid syntax, or the result is not a valid deployment.
    """
    if not changes:
        return deployment
    settings = dict(_parse_change(change) for change in changes)
    try:
        return with_settings(deployment, settings)
    except InvalidDeployment as error:
        found = checked_divisions(lambda: changed_document(deployment, settings), error.findings)
        raise invalid("--what-if", found) from None


def _parse_change(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    path = key.strip().removeprefix("spec.").split(".")
    if not equals or not all(path):
        raise bad_input(f"--what-if: {change!r} is not a change; write for example engine.maxNumBatchedTokens=4096")
    try:
        return ".".join(path), yaml.safe_load(text)
    except yaml.YAMLError:
        raise bad_input(f"--what-if: {change!r} has a value that is not valid YAML; correct it") from None


_RankRange = tuple[str, RankPlan]
"""Label of consecutive ranks with equal memory, and the first of them."""


def _rank_ranges(ranks: Sequence[RankPlan]) -> list[_RankRange]:
    def figures(rank: RankPlan) -> tuple[object, ...]:
        return rank.items, rank.weights, rank.memory_bytes, rank.kv_bytes, rank.kv_available

    ranges = []
    for _, run in groupby(ranks, figures):
        first, *others = run
        ranges.append((f"ranks {first.rank}-{others[-1].rank}" if others else f"rank {first.rank}", first))
    return ranges


def memory_text(
    plan: MemoryPlan,
    changes: Sequence[Change],
    title: str,
    formats: Sequence[str] = (),
    *,
    refused: bool = False,
    allow_tight: bool = False,
) -> str:
    """Return the memory plan of one group as text: table, bars, KV cache, verdict, and changes that would make it fit.

    `formats` are the load formats of the image; `refused` is whether the plan is refused for another reason than its
    memory; `allow_tight` is `spec.engine.allowTight`.
    """
    ranges = _rank_ranges(plan.ranks)
    parts = [
        f"{title}: {_subject(plan)}",
        _table(plan, ranges),
        _bars(ranges),
        *_kv_cache(plan, formats),
        *_unverified(plan),
    ]
    parts.append(_verdict(plan, refused=refused, allow_tight=allow_tight))
    if plan.verdict is FitVerdict.UNCERTAIN and (found := largest_uncertainty(plan)):
        item, how = found
        parts.append(
            f"The largest uncertainty is {item.name}, {_between(item.least, item.most)}: {how}. After one start on "
            "these machines the interval is 2 %."
        )
    if changes:
        head = "Each of these changes makes it fit:" if len(changes) > 1 else "This change makes it fit:"
        parts.append("\n".join([head, *(f"  - {change.text}" for change in changes)]))
    elif plan.verdict is not FitVerdict.FITS and plan.kv is not None and plan.machine.memory_bytes:
        parts.append("No known setting and no number of machines of this kind makes it fit.")
    return "\n\n".join(parts)


def _subject(plan: MemoryPlan) -> str:
    """Return `V4-Flash on 2 × DGX Spark, 128 GB (GB10), tensor parallel 2`."""
    parallel = plan.parallel
    devices = f"{parallel.world_size} × {plan.machine.title}"
    if parallel.devices_per_node > 1 and parallel.world_size > parallel.devices_per_node:
        devices += f" in {-(-parallel.world_size // parallel.devices_per_node)} machines"
    sizes = [f"tensor parallel {parallel.tensor}"] if parallel.world_size > 1 else []
    if parallel.pipeline > 1:
        sizes.append(f"{parallel.pipeline} stages")
    return ", ".join([f"{plan.model.name} on {devices}", *sizes])


def _table(plan: MemoryPlan, ranges: Sequence[_RankRange]) -> str:
    """Return the expected size of each component by rank, and its maximum on the tightest rank, in GiB."""
    rows = list(_rows(plan, ranges))
    figures = [[*(f"{value / GIB:.2f}" for value in values), most] for _, values, most, _ in rows]
    widths = [max(len(line[column]) for line in figures) for column in range(len(ranges) + 1)]
    cells = [
        [name, *(figure.rjust(widths[column]) for column, figure in enumerate(line)), remark]
        for (name, _, _, remark), line in zip(rows, figures, strict=True)
    ]
    headers = ["GiB", *(label for label, _ in ranges), "at most", " "]
    lines = render_table(headers, [[cell or " " for cell in row] for row in cells])
    return "\n".join(line.rstrip() for line in lines.splitlines())


_MemoryRow = tuple[str, list[int], str, str]
"""Name, bytes per range of ranks, maximum on the tightest rank, remark."""


def _rows(plan: MemoryPlan, ranges: Sequence[_RankRange]) -> Iterator[_MemoryRow]:
    tightest = plan.ranks[plan.tightest]
    ranks = [rank for _, rank in ranges]

    def pool_rows(pool: MemoryPool) -> Iterator[_MemoryRow]:
        remarks: dict[str, str] = {}
        for item in (item for rank in ranks for item in rank.items if item.where is pool):
            remarks.setdefault(item.name, item.note)
        for name, remark in remarks.items():
            sizes = [sum(item.bytes for item in rank.items if item.name == name) for rank in ranks]
            yield name, sizes, _maximum(tightest, name), remark

    for row in pool_rows(MemoryPool.BUDGET):
        yield row
        if row[0] == "weights" and max(row[1]) >= GIB:
            for part in dict.fromkeys(part for rank in ranks for part, _ in rank.weights):
                yield f"  {part}", [dict(rank.weights).get(part, 0) for rank in ranks], "", ""
    if plan.kv is not None:
        yield "KV cache", [rank.kv_bytes for rank in ranks], "", _cache_remark(plan)
    yield from pool_rows(MemoryPool.BESIDE)
    yield "total", [rank.used_bytes for rank in ranks], "", ""
    yield "memory", [rank.memory_bytes for rank in ranks], "", ""


def _maximum(rank: RankPlan, name: str) -> str:
    """Return the maximum of a component on `rank`; empty if it equals the expected size."""
    items = [item for item in rank.items if item.name == name]
    most = sum(item.most for item in items)
    return f"{most / GIB:.2f}" if most > sum(item.bytes for item in items) else ""


def _cache_remark(plan: MemoryPlan) -> str:
    if plan.engine.kv_cache_memory is not None or not plan.machine.sm:
        return "kvCacheMemory, in whole blocks"
    share = plan.engine.gpu_memory_utilization or plan.machine.utilization
    return f"rest of {share:g} of the memory on the tightest rank"


def _between(least: float, most: float) -> str:
    return f"{least / GIB:.2f} to {most / GIB:.2f} GiB"


def _bars(ranges: Sequence[_RankRange]) -> str:
    """Return one bar per range of ranks, and a legend, in 80 columns."""
    width = max(len(label) for label, _ in ranges)
    lines = [f"{label.ljust(width)}  {_bar(rank, _COLUMNS - width - _AROUND_BAR)}" for label, rank in ranges]
    legend = "  ".join(f"{fill} {name}" for name, fill, _ in _FILLS)
    return "\n".join([*lines, f"{'':{width}}  {legend}"])


def _bar(rank: RankPlan, width: int) -> str:
    """Return the memory of a rank as a bar of `width` characters; an excess is drawn beyond the closing line."""
    if not rank.memory_bytes:
        return "unknown memory size"
    scale = width / max(rank.memory_bytes, rank.used_bytes)
    sizes = [
        rank.items[0].bytes if rank.items[0].where is MemoryPool.BUDGET else 0,
        rank.total(MemoryPool.BUDGET) - rank.items[0].bytes,
        rank.kv_bytes,
        rank.total(MemoryPool.BESIDE),
    ]
    drawn, filled = "", 0
    for size, (_, fill, _) in zip(sizes, _FILLS, strict=False):
        filled += size
        drawn += fill * (round(filled * scale) - len(drawn))
    end = round(rank.memory_bytes * scale)
    drawn = drawn.ljust(end, _FILLS[-1][1])
    return f"│{drawn[:end]}│{drawn[end:width]} {gib(rank.used_bytes)} of {gib(rank.memory_bytes)}"


def _kv_cache(plan: MemoryPlan, formats: Sequence[str]) -> Iterator[str]:
    kv = plan.kv
    if kv is None or not kv.blocks:
        return
    length = plan.engine.max_model_len
    yield "\n".join(
        [
            f"KV cache      {kv.blocks:,} blocks of {kv.bytes_per_block:,} bytes on every rank{_cache_range(plan)}",
            f"one request   {kv.blocks_per_request:,} blocks ({gib(kv.request_bytes)}) for {length:,} tokens, of which "
            f"{gib(kv.in_flight_bytes)} are for {kv.in_flight_tokens:,} tokens in flight",
            f"vLLM's log    KV cache size: {kv.tokens:,} tokens, Maximum concurrency for {length:,} tokens per "
            f"request: {kv.concurrency:.2f}x",
            f"at once       {kv.concurrency:.2f} requests of that length, {kv.concurrency_least:.2f} to "
            f"{kv.concurrency_most:.2f} (90 %)",
            *(f"context       at most {text}" for text in (_contexts_text(plan),) if text),
            *_load_formats(plan, formats),
        ]
    )


def _contexts(plan: MemoryPlan) -> dict[int, int]:
    """Return the greatest context by the number of requests that must fit at once; only on accelerators."""
    return {users: longest_context(plan, users) for users in _USERS} if plan.machine.sm and plan.kv else {}


def _contexts_text(plan: MemoryPlan) -> str:
    found = [f"{tokens:,} tokens for {users}" for users, tokens in _contexts(plan).items() if tokens]
    return f"{', '.join(found)} at once" if found else ""


def _load_formats(plan: MemoryPlan, formats: Sequence[str]) -> Iterator[str]:
    """Yield a line with the memory of each load format, on unified memory with several of them."""
    if not plan.machine.unified_memory or not formats:
        return
    costs = [
        f"{name} {'none' if item is None else f'{gib(item.bytes)} ({_between(item.least, item.most)})'}"
        for name, item in load_formats(plan, formats)
    ]
    yield f"load format   {plan.engine.load_format}; memory in use when the KV cache is sized: {', '.join(costs)}"


def _cache_range(plan: MemoryPlan) -> str:
    least, most = (min(bounds) for bounds in zip(*((one.kv_least, one.kv_most) for one in plan.ranks), strict=True))
    return f", {max(0, least) / GIB:.2f} to {most / GIB:.2f} GiB" if most > least else ""


def _unverified(plan: MemoryPlan) -> Iterator[str]:
    """Yield a paragraph about unverified figures on which the verdict depends."""
    found = [
        f"{figure} is not confirmed: {source.text}."
        for figure, source in (
            (f"The memory of {plan.machine.title}", plan.machine.source("memory_bytes")),
            (f"The size of {plan.model.name}", plan.model.source("checkpoint_bytes")),
        )
        if source is not None and not source.verified
    ]
    if found:
        yield "\n".join(found)


def _verdict(plan: MemoryPlan, *, refused: bool, allow_tight: bool) -> str:
    """Return whether the plan fits, with its margin or the reason."""
    rank = plan.ranks[plan.tightest]
    if plan.verdict is not FitVerdict.NO:
        return _fitting_verdict(plan, rank, refused=refused, allow_tight=allow_tight)
    too_heavy = rank.items[0].bytes > rank.memory_bytes
    if plan.kv is None:
        return f"{'It does not fit' if too_heavy else 'It is unknown whether it fits'}: {plan.problem}."
    short = f"; {gib(plan.short_bytes)} more are needed" if plan.short_bytes else ""
    # The missing memory is more than that of the weights alone.
    counted = " for all components and the KV cache of one request" if short and too_heavy else ""
    return f"It does not fit: {plan.problem}{short}{counted}."


def _fitting_verdict(plan: MemoryPlan, rank: RankPlan, *, refused: bool, allow_tight: bool) -> str:
    kv = plan.kv
    if plan.verdict is FitVerdict.UNCERTAIN:
        line = f"It is uncertain: {gib(plan.short_bytes)} are missing as expected ({plan.problem})"
        if kv is not None and kv.concurrency_most >= 1:
            line += f", and the best case has room for {kv.concurrency_most:.2f} requests"
        if allow_tight:
            return f"{line}. A cluster starts it, because spec.engine.allowTight is true."
        return f"{line}. A cluster refuses it unless spec.engine.allowTight is true."
    found = "The memory is sufficient" if refused else "It fits"
    line = f"{found}; rank {rank.rank} is the tightest and keeps {gib(rank.spare_bytes)} free beyond its reserve."
    if plan.lacks_at_most > 0:
        line += f" In the worst case {gib(plan.lacks_at_most)} are missing for one request of the greatest length."
    seqs = plan.engine.max_num_seqs
    if kv is not None and 0 < kv.concurrency < seqs:
        line += (
            f" The KV cache has room for {kv.concurrency:.2f} concurrent requests of {plan.engine.max_model_len:,} "
            f"tokens, and maxNumSeqs is {seqs}: further requests of that length wait."
        )
    return line


def memory_document(plan: MemoryPlan, changes: Sequence[Change], formats: Sequence[str] = ()) -> dict[str, Any]:
    """Return the memory plan as a document, with sizes in bytes."""
    found: dict[str, Any] = {
        "model": plan.model.name,
        "machine": plan.machine.id,
        "fits": plan.verdict is FitVerdict.FITS,
        "verdict": str(plan.verdict),
        "uncertaintyBytes": plan.uncertainty_bytes,
        "tightestRank": plan.tightest,
        "shortBytes": plan.short_bytes,
        "maxModelLen": plan.engine.max_model_len,
        "ranks": [_rank_document(rank) for rank in plan.ranks],
    }
    if plan.problem:
        found["problem"] = plan.problem
    if plan.kv is not None:
        found["kv"] = {
            "blocks": plan.kv.blocks,
            "bytesPerBlock": plan.kv.bytes_per_block,
            "blocksPerRequest": plan.kv.blocks_per_request,
            "inFlightTokens": plan.kv.in_flight_tokens,
            "tokens": plan.kv.tokens,
            "concurrency": round(plan.kv.concurrency, 4),
            "concurrencyLeast": round(plan.kv.concurrency_least, 4),
            "concurrencyMost": round(plan.kv.concurrency_most, 4),
            "longestContexts": {str(users): tokens for users, tokens in _contexts(plan).items()},
        }
    if plan.machine.unified_memory and formats:
        found["loadFormats"] = [
            {
                "name": name,
                "bytes": item.bytes if item else 0,
                "leastBytes": item.least if item else 0,
                "mostBytes": item.most if item else 0,
                "selected": name == plan.engine.load_format,
            }
            for name, item in load_formats(plan, formats)
        ]
    if widest := largest_uncertainty(plan):
        item, how = widest
        found["measurement"] = {"item": item.name, "leastBytes": item.least, "mostBytes": item.most, "how": how}
    if changes:
        found["advice"] = [{"settings": dict(change.settings), "message": change.text} for change in changes]
    return found


def _rank_document(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": rank.node,
        "stage": rank.stage,
        "memoryBytes": rank.memory_bytes,
        "usedBytes": rank.used_bytes,
        "budgetBytes": rank.budget_bytes,
        "kvBytes": rank.kv_bytes,
        "kvAvailableBytes": rank.kv_available,
        "kvLeastBytes": rank.kv_least,
        "kvMostBytes": rank.kv_most,
        "weights": {str(part): size for part, size in rank.weights},
        "items": [
            {
                "name": item.name,
                "bytes": item.bytes,
                "leastBytes": item.least,
                "mostBytes": item.most,
                "where": str(item.where),
            }
            for item in rank.items
        ],
    }


_COMPILER = "dsv4_runtime.vllm_plugin.kernels.shipping"
_ENGINE_FLAGS = {
    "--tensor-parallel-size": "--tensor-parallel",
    "--max-num-batched-tokens": "--tokens",
    "--max-num-seqs": "--requests",
    "--max-model-len": "--context",
}
"""Options of the program by the flags of vLLM that have the same value."""


def compile_kernels(
    source: DeploymentSource,
    file_or_directory: str,
    *,
    arch: str | None,
    out: Path | None,
    include: Sequence[Path],
    processes: int | None,
) -> ExitCode:
    """Compile the kernels of an engine without a GPU, in a process that has torch and Triton.

    Args:
        source: of the deployment.
        file_or_directory: a deployment, or the directory of a checkpoint.
        arch: architectures, separated by commas; None: that of the deployment's hardware.
        out: directory of the result; None: the one from which engines of this Python take kernels.
        include: Triton caches of engines that have served, whose kernels are added.
        processes: concurrent compilers; None: half of the processors.

    Raises:
        CommandError: the input is invalid, or torch is not installed.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("dsv4_kernels") is None:
        raise bad_input("dsv4 kernels compile: torch and dsv4-kernels are not installed; use the Python of the engine")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(file_or_directory)
        flags: list[str] = []
        if not model.is_dir():
            model = Path(folder)
            kind, config, flags = _engine_of(source.load(file_or_directory), source)
            (model / "config.json").write_text(json.dumps(config))
            arch = arch or f"sm_{kind.sm}"
        elif arch is None:
            raise bad_input("--arch: a directory has no hardware; name the architectures, such as sm_121,sm_120")
        options = [*flags, "--arch", *arch.split(",")]
        if out is not None:
            options += ["--out", str(out)]
        if include:
            options += ["--include", *map(str, include)]
        if processes is not None:
            options += ["--processes", str(processes)]
        done = subprocess.run([sys.executable, "-m", _COMPILER, str(model), *options], check=False)
    return ExitCode.OK if done.returncode == 0 else ExitCode.FAILED


def _engine_of(deployment: DSV4Deployment, source: DeploymentSource) -> tuple[Machine, dict[str, Any], list[str]]:
    """Return the machine of a deployment's members, `config.json` of its model, and the options of the compiler."""
    kind = machine(deployment.spec.topology.hardware)
    if not kind.sm:
        raise bad_input(
            f"spec.topology.hardware: {deployment.spec.topology.hardware} has no GPU to compile kernels for"
        )
    facts = source.facts(deployment, kind, chosen=True)
    plans, refusal = _plans(deployment, facts)
    if refusal:
        raise bad_input(refusal.message, findings=refusal.findings)
    given = dict(each.split("=", 1) for each in plans[0].engine.args if "=" in each)
    if "--enable-expert-parallel" in plans[0].engine.args:
        raise bad_input("spec.topology.expertParallel: only the engine compiles kernels of experts on several ranks")
    # One rank has no flag of parallelism, and the default of both programs is 1.
    flags = [f"{option}={given[flag]}" for flag, option in _ENGINE_FLAGS.items() if flag in given]
    if drafts := given.get("--speculative-config"):
        flags.append(f"--drafts={json.loads(drafts)['num_speculative_tokens']}")
    return kind, model_config(model_here(deployment.spec.model) or model_for(deployment.spec.model)), flags
