"""Logged figures for comparison with the memory plan, each with the figure of the plan.

Whole starts are in `planning/memory/runs.toml`, with a tolerance of 8 % for memory and concurrency of the KV cache, or
the stated range where it is no wider than 10 %, and of 3 % for weights. Other figures are here, with 8 % for builds
older than the rule for tokens in flight. Where a log rounds the size of the KV cache, half of its last digit is added
to the tolerance.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsv4_operator.planning.catalog import GIB, machine_named, model
from dsv4_operator.planning.memory import EngineSettings, FitVerdict, MemoryPlan, Parallel, memory_plan
from dsv4_operator.planning.memory.runs import TERMS, comparisons, runs

MILLION = 2**20
PAIR, PAIR_IN_ONE, EIGHT, EIGHT_IN_ONE = Parallel(2), Parallel(2, 1, 2), Parallel(8), Parallel(8, 1, 8)
SPARK, RTX = "gb10", "rtx-pro-6000-workstation"


@dataclass(frozen=True)
class Row:
    """One figure."""

    group: str
    name: str
    unit: str
    logged: float
    planned: float
    tolerance: float
    """A share: 0.03."""
    between: tuple[float, float] | None = None
    """The plan's range."""

    @property
    def error(self) -> float:
        return self.planned / self.logged - 1

    @property
    def good(self) -> bool:
        return abs(self.error) <= self.tolerance


@dataclass(frozen=True)
class Case:
    """Whether a configuration fits: known result, and verdict of the plan."""

    name: str
    known: bool
    planned: FitVerdict

    @property
    def right(self) -> bool:
        """Return whether exactly a configuration that is known to serve fits in the plan."""
        return self.known is (self.planned is FitVerdict.FITS)


@dataclass(frozen=True)
class Accuracy:
    """Errors and intervals of KV memory and concurrency of all logged starts."""

    figures: int
    median: float
    far: int
    """Figures with an error above 10 %."""
    greatest: float
    covered: float
    """Share of figures within their interval."""
    width: float
    """Median width of the intervals, as a share of the expected value."""

    @property
    def good(self) -> bool:
        accurate = self.median <= 0.04 and self.far <= 0.10 * self.figures
        return accurate and 0.90 <= self.covered <= 0.97 and self.width <= 0.30


def accuracy() -> Accuracy:
    found = [*comparisons("kv"), *comparisons("concurrency")]
    errors = [abs(each.error) for each in found]
    return Accuracy(
        len(found),
        statistics.median(errors),
        sum(error > 0.10 for error in errors),
        max(errors),
        sum(each.least <= each.logged <= each.most for each in found) / len(found),
        statistics.median((each.most - each.least) / each.planned for each in found),
    )


def engine(length: int, batched: int, *, batches: int = 1, drafts: int = 0, **values: object) -> EngineSettings:
    return EngineSettings(length, 8, batched, batches == 2, drafts, **values)  # type: ignore[arg-type]


def plan(name: str, machine: str, parallel: Parallel, settings: EngineSettings) -> MemoryPlan:
    return memory_plan(model(name), machine_named(machine), parallel, settings)


def sizes() -> Iterator[Row]:
    for name, gib in (("V4-Flash", 148.66), ("V4-Flash-0731", 155.4), ("V4-Pro", 805.33), ("V4-Pro-0813", 831.7)):
        yield Row("checkpoint", name, "GiB", gib, model(name).weight_bytes / GIB, 0.001)


TOLERANCES = {"weights": 0.03, "kv": 0.08, "concurrency": 0.08}
"""Tolerances of figures that a start logged; other figures are printed only."""
_NARROW = 0.10
"""Width of an interval that replaces the tolerance."""
_WIDE = ("spark-b12x", "spark-dsv41")
"""Builds whose starts of one configuration differ by more than the tolerance: their interval replaces it, too."""


def started(figure: str) -> Iterator[Row]:
    """Yield the rows of one figure of every start."""
    for each in comparisons(figure):
        narrow = each.most - each.least <= _NARROW * each.planned or each.run.failed or each.run.profile in _WIDE
        inside = narrow and each.least <= each.logged <= each.most
        tolerance = abs(each.error) if inside else TOLERANCES.get(figure, 9.9)
        unit = "x" if figure == "concurrency" else "GiB"
        yield Row(figure, each.run.name, unit, each.logged, each.planned, tolerance, (each.least, each.most))


# GiB of one request, without draft layers, by context and thousands of tokens in flight.
REQUESTS = {
    32_768: ((0.920, 1.697, 3.250, 6.357), (1.319, 2.431, 4.657, 9.107)),
    131_072: ((1.279, 2.055, 3.609, 6.715), (1.832, 2.945, 5.170, 9.621)),
    262_144: ((1.757, 2.533, 4.086, 7.193), (2.517, 3.630, 5.855, 10.306)),
    1_048_576: ((4.624, 5.401, 6.954, 10.060), (6.625, 7.738, 9.963, 14.414)),
}


def requests() -> Iterator[Row]:
    for length, tables in REQUESTS.items():
        for name, figures in zip(("V4-Flash", "V4-Pro"), tables, strict=True):
            for thousands, gib in zip((2, 4, 8, 16), figures, strict=True):
                kv = plan(name, SPARK, EIGHT, engine(length, thousands * 1024)).kv
                assert kv is not None
                text = f"{name}, {length} tokens, {thousands}k in flight"
                yield Row("KV cache of a request", text, "GiB", gib, kv.request_bytes / GIB, 0.0006)


def concurrency() -> Iterator[Row]:
    """Yield `Maximum concurrency` for the logged bytes of KV cache."""
    nvfp4 = "nvfp4_ds_mla"
    for text, name, gib, settings, logged, tolerance in (
        ("2 RTX, share 0.985 (PR 40899)", "V4-Flash", 9.15, engine(MILLION, 8192), 1.32, 0.03),
        (
            "Reederey87, not asynchronous",
            "V4-Flash-0731",
            19.85,
            engine(MILLION, 8192, drafts=2, kv_dtype=nvfp4),
            2.81,
            0.08,
        ),
        (
            "Reederey87, asynchronous",
            "V4-Flash-0731",
            19.85,
            engine(MILLION, 8192, batches=2, drafts=2, kv_dtype=nvfp4),
            1.98,
            0.08,
        ),
        ("nepenth v0.27.1", "V4-Flash-0731", 26.297, engine(MILLION, 8192, batches=2, drafts=5), 2.61, 0.03),
        ("8 Sparks, Pro (PR 40899)", "V4-Pro", 0.98, engine(1024, 1024), 1.78, 0.03),
        ("jasl harness, Spark", "V4-Flash", 23.04, engine(32_768, 8192), 7.31, 0.08),
        ("jasl harness, RTX", "V4-Flash", 12.20, engine(16_384, 8192), 4.11, 0.08),
        ("MiaAI-Lab, 0.25.2", "V4-Flash-0731", 18.08, engine(MILLION, 8192, drafts=5, kv_dtype=nvfp4), 2.38, 0.08),
        ("ecohash-co, stock 0.27.1", "V4-Flash-0731", 23.78, engine(MILLION, 8192, batches=2, drafts=5), 2.31, 0.03),
    ):
        kv = plan(name, SPARK, EIGHT, replace(settings, kv_cache_memory=int(gib * GIB))).kv
        assert kv is not None
        yield Row("maximum concurrency", text, "x", logged, kv.concurrency, tolerance + 0.005 / gib)


def blocks() -> Iterator[Row]:
    for text, name, gib, settings, logged, tolerance in (
        ("nepenth, 26.297 GiB", "V4-Flash-0731", 26.297, engine(MILLION, 8192, drafts=5), 28_173, 0.0001),
        ("ecohash-co, 23.78 GiB", "V4-Flash-0731", 23.78, engine(MILLION, 8192, drafts=5), 25_417, 0.03),
    ):
        kv = plan(name, SPARK, EIGHT, replace(settings, kv_cache_memory=int(gib * GIB))).kv
        assert kv is not None
        yield Row("blocks", text, "", logged, kv.blocks, tolerance)


def rows() -> list[Row]:
    return [*sizes(), *(row for name in TERMS for row in started(name)), *requests(), *concurrency(), *blocks()]


def verdicts() -> list[Case]:
    def fits(name: str, machine: str, parallel: Parallel, settings: EngineSettings) -> FitVerdict:
        return plan(name, machine, parallel, settings).verdict

    def share(value: float, length: int, batched: int, **values: object) -> EngineSettings:
        return engine(length, batched, gpu_memory_utilization=value, **values)

    eager = {"cuda_graphs": False}
    served = [Case(run.name, not run.failed, run.plan.verdict) for run in runs() if not run.rank]
    return [
        *served,
        Case(
            "Pro, 8 Sparks, 1024 tokens, eager, 0.88",
            True,
            fits("V4-Pro", SPARK, EIGHT, share(0.88, 1024, 1024, **eager)),
        ),
        Case(
            "Pro, 8 Sparks, 16k tokens, 8k batched, 0.88",
            False,
            fits("V4-Pro", SPARK, EIGHT, share(0.88, 16_384, 8192)),
        ),
        Case(
            "Pro-0813 with DSpark, 8 Sparks, 0.88",
            False,
            fits("V4-Pro-0813", SPARK, EIGHT, share(0.88, 1024, 1024, drafts=5, **eager)),
        ),
        Case("Pro, 8 RTX", False, fits("V4-Pro", RTX, EIGHT_IN_ONE, share(0.985, 1024, 512, **eager))),
        Case("Flash, 1 Spark", False, fits("V4-Flash", SPARK, Parallel(), share(0.88, 1024, 512, **eager))),
        Case(
            "Flash, 2 Sparks, 131k tokens, 0.80",
            True,
            fits("V4-Flash", SPARK, PAIR, share(0.80, 131_072, 4096, batches=2)),
        ),
        Case(
            "Flash-0731 with DSpark, 2 Sparks, 1M, 0.88",
            True,
            fits("V4-Flash-0731", SPARK, PAIR, share(0.88, MILLION, 8192, batches=2, drafts=5)),
        ),
        Case("Flash, 2 RTX, 1M tokens, 0.985", True, fits("V4-Flash", RTX, PAIR_IN_ONE, share(0.985, MILLION, 8192))),
        Case("Flash, 2 RTX, 1M tokens, 0.99", False, fits("V4-Flash", RTX, PAIR_IN_ONE, share(0.99, MILLION, 8192))),
        Case(
            "Flash, 2 RTX, 131k tokens, 0.95",
            True,
            fits("V4-Flash", RTX, PAIR_IN_ONE, share(0.95, 131_072, 8192, batches=2)),
        ),
        # rhys101/DeepSeek-V4.1-Flash-vLLM-DGX-Spark-8; with its tables in memory, no start on fewer machines is known.
        Case(
            "V4.1-Flash, 8 Sparks, 300k tokens, 0.80",
            True,
            fits("V4.1-Flash", SPARK, EIGHT, share(0.80, 300_000, 8192, batches=2)),
        ),
        Case(
            "V4.1-Flash, 4 Sparks, tables in memory",
            False,
            fits("V4.1-Flash", SPARK, Parallel(4), share(0.88, 1024, 512, **eager)),
        ),
    ]
