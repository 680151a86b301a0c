"""Compare the memory plan with logged runs, measure its speed, and plan random specifications.

python benchmarks/plan.py            everything, 20 000 random specifications
python benchmarks/plan.py --random 0 without random specifications
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dsv4_operator.api import DSV4Deployment, Hardware, InvalidDeployment, Severity, load, parse
from dsv4_operator.cli.output import render_table
from dsv4_operator.cli.plan import memory_document, memory_text
from dsv4_operator.planning import Facts, PlanRefused, catalog_facts, plan_group
from dsv4_operator.planning.catalog import GIB, machine, machines, models
from dsv4_operator.planning.catalog.records import RELEASED
from dsv4_operator.planning.memory import EngineSettings, FitVerdict, MemoryPlan, Parallel, advice, memory_plan
from dsv4_operator.planning.memory.runs import Comparison, LoggedStart, comparisons, planned, runs
from dsv4_operator.planning.planner import accepted_advice
from dsv4_operator.planning.rules import broken_rules
from dsv4_operator.planning.setup import setup, with_settings
from dsv4_testkit.faults.store import machine as machine_here
from dsv4_testkit.planfixtures import REQUESTS, Row, accuracy, rows, verdicts
from dsv4_testkit.planspecs import manifest

EXAMPLES = Path(__file__).parents[1] / "examples"


def random_case(source: random.Random) -> tuple[object, ...]:
    """Return valid and invalid arguments of `memory_plan` over the whole catalog."""
    kind = source.choice(machines())
    if not kind.sm:
        kind = replace(kind, memory_bytes=source.choice((0, 1, 4, 16, 64)) * GIB)
    cached = source.random() < 0.3
    return (
        source.choice(models()),
        kind,
        Parallel(
            tensor=source.choice((1, 1, 2, 2, 3, 4, 8, 16)),
            pipeline=source.choice((1, 1, 1, 2, 3, 4, 8, 16)),
            devices_per_node=source.randint(1, 8),
            expert=source.random() < 0.3,
        ),
        EngineSettings(
            max_model_len=source.choice((128, 1024, source.randint(128, 2**20), 2**20)),
            max_num_seqs=source.randint(1, 512),
            max_num_batched_tokens=source.choice((64, 2048, source.randint(64, 65_536))),
            async_scheduling=source.random() < 0.5,
            speculative_tokens=source.choice((0, 0, 1, 5)),
            kv_dtype=source.choice((None, None, "fp8_ds_mla", "nvfp4_ds_mla", "bf16")),
            gpu_memory_utilization=None if cached else source.choice((None, round(source.uniform(0.1, 0.99), 3))),
            kv_cache_memory=source.randint(2**20, 2**38) if cached else None,
            cuda_graphs=source.random() < 0.7,
        ),
    )


def broken(plan: MemoryPlan) -> str:
    """Return the first inconsistency of a plan; empty if there is none."""
    for rank in plan.ranks:
        if rank.kv_bytes < 0 or any(not item.least <= item.bytes <= item.most for item in rank.items):
            return f"rank {rank.rank} has a negative component, or one outside its range"
        if not rank.kv_least <= rank.kv_available <= rank.kv_most:
            return f"the KV cache of rank {rank.rank} is outside of its interval"
        if plan.verdict is FitVerdict.UNCERTAIN and rank.total() - rank.below() > rank.memory_bytes:
            return f"it may fit, and at least rank {rank.rank} has more components than memory"
        if plan.fits and sum(item.bytes for item in rank.items) + rank.kv_bytes > rank.memory_bytes:
            return f"it fits, and rank {rank.rank} has more components than memory"
        if plan.fits and sum(size for _, size in rank.weights) > rank.memory_bytes:
            return f"it fits, and the weights of rank {rank.rank} exceed the memory"
    if plan.fits and (plan.kv is None or plan.kv.blocks <= plan.kv.blocks_per_request):
        return "it fits, and no request of the greatest length does"
    if plan.fits == bool(plan.problem) or (plan.verdict is FitVerdict.FITS) != plan.fits:
        return "verdict and problem contradict each other"
    if plan.fits and plan.verdict is FitVerdict.NO:
        return "it fits as expected, and is refused"
    return ""


def run_specifications(count: int) -> bool:
    """Plan whole deployments from the text of their files."""
    source = random.Random(20_261_121)
    outcomes: Counter[str] = Counter()
    seconds = []
    for _ in range(count):
        document = manifest(source.choice)
        try:
            made = parse(document)
        except InvalidDeployment:
            outcomes["refused by the specification"] += 1
            continue
        known = facts(made)
        outcome = "planned"
        begun = time.process_time()
        try:
            plan_group(made, known, group=0, incarnation=1)
        except PlanRefused as refused:
            outcome = f"refused by the planner ({refused.reason})"
        seconds.append(time.process_time() - begun)
        outcomes[outcome] += 1
        # On CPU the machine's free memory is decisive, not the plan.
        if outcome == "planned" and made.spec.topology.hardware is not Hardware.CPU:
            memory = setup(made, known).memory
            refused = memory.verdict is FitVerdict.NO  # Uncertain plans are refused on clusters only.
            if problem := broken(memory) or ("it is planned and does not fit" if refused else ""):
                print(f"{problem}: {document}")
                return False
    print(f"{count} random specifications: {', '.join(f'{number} {what}' for what, number in outcomes.most_common())}")
    print("no exception, no plan that fits beyond its memory")
    print(_times("from specification to command lines, or to a refusal with its remedy", seconds))
    return True


def tight_case(source: random.Random) -> dict[str, object]:
    """Return a manifest that often has too little memory."""
    hardware = source.choice(("GB10", "GB10", "RTXPRO6000"))
    name, variant = source.choice(
        (("V4-Flash", "Flash"), ("V4-Flash-0731", "Flash"), ("V4-Pro", "Pro"), ("V4.1-Flash", "Flash"))
    )
    devices = 1 if hardware == "GB10" else source.choice((2, 4, 8))
    topology = {"hardware": hardware, "nodesPerGroup": source.choice((1, 2, 3, 4, 8)), "devicesPerNode": devices}
    engine: dict[str, object] = {
        "maxNumSeqs": source.choice((1, 4, 8, 32)),
        "maxNumBatchedTokens": source.choice((1024, 4096, 8192, 16_384)),
        "maxModelLen": source.choice((131_072, 300_000, 1_048_576)),
        "asyncScheduling": source.random() < 0.7,
    }
    memory = source.choice(("share", "share", "cache", "default"))
    if memory == "share":
        engine["gpuMemoryUtilization"] = source.choice((0.3, 0.5, 0.7, 0.8, 0.85, 0.88))
    elif memory == "cache":
        engine["kvCacheMemory"] = source.choice(("100Mi", "2Gi", "60Gi"))
    method = {"V4-Flash-0731": "DSpark", "V4.1-Flash": "DSpark"}.get(name, "MTP")
    if source.random() < 0.5:
        engine["speculative"] = {"method": method, "tokens": source.choice((1, 2, 5))}
    if hardware == "GB10" and source.random() < 0.3:
        engine["profile"] = source.choice(("spark-b12x", "spark-anemll", "vllm-0.27"))
    if source.random() < 0.2:
        engine["cudagraphMode"] = "None"
    model: dict[str, object] = {"variant": variant, "source": {"path": f"/m/DeepSeek-{name}"}, "servedNames": ["m"]}
    return {
        "apiVersion": "dsv4.dev/v1alpha1",
        "kind": "DSV4Deployment",
        "metadata": {"name": "advised"},
        "spec": {"model": model, "topology": topology, "engine": engine},
    }


def followed_advice(count: int, seed: int = 20_261_126) -> tuple[int, str]:
    """Apply all advice of `count` random refusals; return the number of changes, and the first refused one."""
    source = random.Random(seed)
    changes = refusals = 0
    while refusals < count:
        document = tight_case(source)
        try:
            made = parse(document)
            chosen = setup(made, facts(made))
        except (InvalidDeployment, PlanRefused):
            continue
        if chosen.memory.verdict is FitVerdict.FITS or any(
            one.severity is Severity.REFUSE for one in broken_rules(chosen)
        ):
            continue
        refusals += 1
        for change in accepted_advice(chosen):
            changes += 1
            after = with_settings(made, change.settings)
            try:
                plan_group(after, facts(after), group=0, incarnation=1)
            except PlanRefused as refused:
                return changes, f"{change.text}: {refused.message}: {document}"
            if setup(after, facts(after)).memory.verdict is not FitVerdict.FITS:
                return changes, f"{change.text}: {setup(after, facts(after)).memory.problem}: {document}"
    return changes, ""


def facts(made: DSV4Deployment) -> Facts:
    """Return machines of the catalog, with 64 GiB where the catalog has no memory."""
    known = catalog_facts(made, machine(made.spec.topology.hardware), state_root="/state", weights_root="/weights")
    nodes = tuple(replace(node, memory_bytes=node.memory_bytes or 64 * GIB) for node in known.nodes)
    return replace(known, nodes=nodes)


def _times(what: str, seconds: list[float]) -> str:
    ordered = sorted(1e3 * each for each in seconds)
    late = sum(each > 10 for each in ordered)
    return (
        f"{what}: {statistics.median(ordered):.2f} ms (median), {ordered[len(ordered) * 99 // 100]:.2f} ms (p99), "
        f"{ordered[-1]:.1f} ms (slowest) of processor time; {late} of {len(ordered)} took more than 10 ms"
    )


def run_random(count: int) -> bool:
    """Run the memory plan alone, with arguments beyond those of specifications."""
    source = random.Random(20_261_121)
    refused = fitting = advised = 0
    seconds = []
    for number in range(count):
        case = random_case(source)
        begun = time.process_time()
        try:
            plan = memory_plan(*case)  # type: ignore[arg-type]
        except ValueError:
            refused += 1
            continue
        seconds.append(time.process_time() - begun)
        fitting += plan.verdict is not FitVerdict.NO
        if problem := broken(plan):
            print(f"{problem}: {case}")
            return False
        if number % 40 == 0:
            changes = tuple(advice(plan))
            advised += len(changes)
            if not all(change.plan.fits and not broken(change.plan) for change in changes):
                print(f"advised change does not fit: {case}")
                return False
            memory_text(plan, changes, "random")
            memory_document(plan, changes)
    print(
        f"{count} random memory plans of up to 256 ranks: {fitting} fit, {count - fitting - refused} do not, {refused} "
        f"cannot be divided; no exception, none that fits beyond its memory; {advised} advised changes checked"
    )
    print(_times("memory plan", seconds))
    return True


def run_speed() -> bool:
    good = True
    lines = []
    for file in sorted(EXAMPLES.glob("*.yaml")):
        deployment = load(file.read_text(), lambda: Hardware.H100)
        known = facts(deployment)
        took = []
        for _ in range(50):
            begun = time.process_time()
            with suppress(PlanRefused):
                plan_group(deployment, known, group=0, incarnation=1)
            took.append(1e3 * (time.process_time() - begun))
        good = good and statistics.median(took) <= 10
        lines.append([file.name, f"{statistics.median(took):.2f}", f"{max(took):.2f}"])
    print(render_table(["PLAN", "MEDIAN MS", "WORST MS OF PROCESSOR TIME"], lines))
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--random", type=int, default=20_000, metavar="N", help="number of random specifications (default: %(default)s)"
    )
    wanted = parser.parse_args()
    # As in the gateway: objects left by the imports are excluded from garbage collection during a plan.
    gc.collect()
    gc.freeze()
    print(f"{machine_here()}, {time.strftime('%Y-%m-%d')}\n")
    found = rows()
    grid = [row for row in found if row.group == "KV cache of a request"]
    shown = [row for row in found if row not in grid]
    cells = [
        [
            row.group,
            row.name,
            f"{row.logged:,.6g} {row.unit}",
            f"{row.planned:,.6g} {row.unit}",
            f"{100 * row.error:+.1f} %",
            f"{row.between[0]:.2f} to {row.between[1]:.2f}" if row.between else "",
            f"{100 * row.tolerance:.2g} %" if row.tolerance < 1 else "",
            "yes" if row.good else "NO",
        ]
        for row in shown
    ]
    print(render_table(["FIGURE", "RUN", "LOGGED", "PLANNED", "ERROR", "RANGE", "TOLERANCE", "WITHIN"], cells))
    worst = max(grid, key=lambda row: abs(row.error))
    print(
        f"\nKV cache of a request, {len(grid)} figures for {len(REQUESTS)} lengths: "
        f"worst error {100 * worst.error:+.3f} %\n"
    )
    good = summary(shown)
    print(leave_one_out())
    print()
    known = verdicts()
    print(
        render_table(
            ["VERDICT", "KNOWN", "PLANNED"], [[each.name, _fits(each.known), str(each.planned)] for each in known]
        )
    )
    print()
    good = good and all(row.good for row in found) and all(each.right for each in known)
    good = run_speed() and good
    if wanted.random:
        print()
        good = run_specifications(wanted.random) and good
        changes, problem = followed_advice(max(1, wanted.random // 20))
        print(
            problem or f"{changes} changes, the advice of {max(1, wanted.random // 20)} random refusals, are accepted"
        )
        good = good and not problem
        print()
        good = run_random(wanted.random) and good
    return 0 if good else 1


def summary(found: list[Row]) -> bool:
    """Print the errors and intervals of KV memory and concurrency; return whether they are within the limits."""
    shown = accuracy()
    failed = [run.name for run in runs() if run.failed and run.plan.fits]
    refused = [run.name for run in runs() if not run.failed and not run.plan.fits]
    print(
        f"KV memory and concurrency of {len(runs())} starts, {shown.figures} figures: median error "
        f"{100 * shown.median:.1f} %, {shown.far} beyond 10 %, greatest {100 * shown.greatest:.1f} %; "
        f"{100 * shown.covered:.0f} % within intervals of median width {100 * shown.width:.0f} %; "
        f"{sum(row.good for row in found)} of {len(found)} figures are within their tolerance; failed starts that fit: "
        f"{', '.join(failed) or 'none'}; served ones that do not: {', '.join(refused) or 'none'}\n"
    )
    return shown.good and not failed and not refused


def leave_one_out() -> str:
    """Return a table of the errors by build: each start planned with the mean residual of the build's other starts.

    A single start is planned as the released build.
    """
    figures = [*comparisons("kv"), *comparisons("concurrency")]
    by_build: dict[str, list[LoggedStart]] = {}
    for run in runs():
        by_build.setdefault(run.profile, []).append(run)
    rows = []
    for name, starts in by_build.items():
        residuals = {
            run.name: statistics.mean(found)
            for run in starts
            if (found := [(each.logged - each.planned) * _in_gib(each) for each in figures if each.run is run])
        }
        own = [each for each in figures if each.run in starts]
        errors = []
        for each in own:
            others = [value for start, value in residuals.items() if start != each.run.name]
            if others:
                value = each.planned + statistics.mean(others) / _in_gib(each)
            else:
                old = each.run.plan
                engine = replace(old.engine, build=RELEASED)
                other = memory_plan(old.model, old.machine, old.parallel, engine)
                value = planned(other, each.run.rank, each.figure)[0]
            errors.append(abs(value / each.logged - 1))
        if errors:
            inside = sum(each.least <= each.logged <= each.most for each in own)
            middle, greatest = (f"{100 * error:.1f} %" for error in (statistics.median(errors), max(errors)))
            rows.append([name, str(len(residuals)), str(len(own)), middle, greatest, f"{inside} of {len(own)}"])
    return render_table(["BUILD", "STARTS", "FIGURES", "MEDIAN ERROR", "GREATEST", "WITHIN THEIR INTERVAL"], rows)


def _in_gib(each: Comparison) -> float:
    """Return the GiB of one unit of a figure: those of a request for the concurrency."""
    kv = each.run.plan.kv
    return kv.request_bytes / GIB if each.figure == "concurrency" and kv else 1.0


def _fits(value: bool) -> str:
    return "fits" if value else "does not fit"


if __name__ == "__main__":
    sys.exit(main())
