"""Errors of the bundled operations: each run is compared with the operation's reference on the same inputs."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from benchmarks.gpu.samples import Sample, sample

from dsv4_kernels.plan import Plan
from dsv4_kernels.registry import Errors, Operation, Tolerance, as_outputs, judge, measure, operation, operations


def limits(tolerance: Tolerance) -> dict[str, float]:
    """Return the limits of a tolerance, by the measure's name in `Errors`."""
    found = {name: getattr(tolerance, name) for name in ("rms", "diff") if getattr(tolerance, name) is not None}
    if tolerance.bitwise or tolerance.absolute is not None or tolerance.relative is not None:
        found["outside"] = tolerance.mismatch
    return found


@dataclass
class Row:
    """Worst errors of one operation in one layer, in steps of one kind."""

    operation: str
    layer: str
    kind: str
    calls: int = 0
    beyond: int = 0
    """Calls with an output beyond its tolerance."""
    example: str | None = None
    """Measured values of the first of them."""
    outputs: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, errors: dict[str, Errors], broken: list[str]) -> None:
        """Count one call."""
        self.calls += 1
        self.beyond += bool(broken)
        self.example = self.example or next(iter(broken), None)
        for name, found in errors.items():
            worst = self.outputs.setdefault(name, {})
            for key, value in asdict(found).items():
                number = math.inf if math.isnan(value) else value
                worst[key] = max(worst.get(key, -math.inf), number)


class Recorder:
    """Runs of the operations in recorded steps.

    A failed comparison is stored and does not affect the caller. `seconds` bounds the total time of comparisons; later
    runs are only counted, in `left_out`.
    """

    def __init__(self, seconds: float = 85.0) -> None:
        self.rows: dict[tuple[str, str, str], Row] = {}
        self.failures: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.unwritten: Counter[str] = Counter()
        self.kind: str | None = None
        self.layer = "model"
        self.entered = 0
        """Number of decoder layers entered in this step."""
        self.compared = 0
        self._left = seconds
        self._busy = False

    @contextlib.contextmanager
    def step(self, kind: str | None) -> Iterator[None]:
        """Record the runs in the block as those of a step of this `kind`; None: do not record them."""
        self.kind, self.layer, self.entered = kind, "model", 0
        try:
            yield
        finally:
            self.kind, self.layer = None, "model"

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Record every run of every plan during the block, except for warm-ups of plans."""
        operations()
        around = {"run": self._around, "warmup": self._unseen}
        originals = [
            (kind, name, vars(kind)[name]) for kind in _subclasses(Plan) for name in around.keys() & vars(kind)
        ]
        for kind, name, original in originals:
            setattr(kind, name, around[name](original))
        try:
            yield
        finally:
            for kind, name, original in originals:
                setattr(kind, name, original)

    def _unseen(self, original: Any) -> Any:
        """Return `original`, the warm-up of a plan made while serving, without comparisons of its runs."""

        @functools.wraps(original)
        def warmup(plan: Any) -> Any:
            busy, self._busy = self._busy, True
            try:
                return original(plan)
            finally:
                self._busy = busy

        return warmup

    def _around(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(plan: Any, *args: Any, **inputs: Any) -> Any:
            if self.kind is None or self._busy:
                return original(plan, *args, **inputs)
            self._busy = True
            try:
                return self._beside(original, plan, args, inputs)
            finally:
                self._busy = False

        return run

    def _beside(self, original: Any, plan: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """Run `plan` and compare; return its result."""
        name = str(plan.operation)
        if self._left <= 0:
            self.left_out[name] += 1
            return original(plan, *args, **inputs)
        begun, part, row = time.perf_counter(), None, None
        try:
            _synchronize()
            row = operation(name)
            part = sample(plan, row, inputs)
            self.unwritten[name] += part is None
        except Exception as error:
            self._failed(name, "inputs", error)
        self._left -= time.perf_counter() - begun
        result = original(plan, *args, **inputs)
        begun = time.perf_counter()
        if part is not None and row is not None:
            try:
                _synchronize()
                self._compare(row, part, result, plan.shape)
            except Exception as error:
                self._failed(name, "comparison", error)
        self._left -= time.perf_counter() - begun
        return result

    def _compare(self, row: Operation, part: Sample, result: Any, shape: Any) -> None:
        results = row.compared(part.pick(as_outputs(result)))
        expected = row.compared(as_outputs(row.reference(**part.inputs, exact=True)))
        results, expected = part.level(results, expected)
        errors, broken = {}, []
        for output, out, want, tolerance in zip(row.outputs, results, expected, row.tolerance, strict=True):
            errors[output] = measure(out, want, tolerance)
            try:
                judge(f"{row.name}.{output}", errors[output], tolerance)
            except AssertionError as error:
                broken.append(f"{error} (a plan of {dict(shape)})")
        key = (row.name, self.layer, str(self.kind))
        self.rows.setdefault(key, Row(*key)).add(errors, broken)
        self.compared += 1

    def _failed(self, name: str, what: str, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.failures[f"{name}, layer {self.layer}, {self.kind}, {what}: {text}"] += 1
        if isinstance(error, torch.cuda.OutOfMemoryError):
            torch.cuda.empty_cache()

    def result(self) -> dict[str, Any]:
        """Return all results in the form of JSON."""
        names = {row.operation for row in self.rows.values()}
        tolerances = {
            name: {output: limits(t) for output, t in zip(row.outputs, row.tolerance, strict=True)}
            for name, row in ((name, operation(name)) for name in sorted(names))
        }
        return {
            "compared": self.compared,
            "beyond": sum(row.beyond for row in self.rows.values()),
            "rows": [asdict(row) for row in self.rows.values()],
            "tolerances": tolerances,
            "failures": dict(self.failures),
            "left_out": dict(self.left_out),
            "wrote_nothing": {name: count for name, count in self.unwritten.items() if count},
        }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    found: set[type[Any]] = set()
    for child in kind.__subclasses__():
        found |= {child} | _subclasses(child)
    return found
