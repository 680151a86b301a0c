"""The registry: one row per operation, from which tests, benchmarks, the static gate and the docs table are made.

A case of an operation is run against its reference with poisoned buffers, guard bands and error measures.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.numerics import e4m3_decode
from dsv4_kernels.plan import Plan, Support

FOLDERS = ("fp8", "mla_cache", "mla_decode", "moe", "mhc", "compressor", "indexer", "mla_prefill", "front", "router")
"""Folder of every operation; `api.py` in it holds its rows, `OPERATIONS`."""


@dataclass(frozen=True)
class Case:
    """One shape of an operation.

    `params` is the argument of `make_inputs`, `plan`, `nbytes` and `flops`. `tags`: "cpu" runs in the interpreter
    (small), "gpu" on a real device in the tests, "bench" in the benchmark; a case may have several.
    """

    name: str
    params: Mapping[str, Any]
    tags: frozenset[str]


def case(name: str, tags: str, **params: Any) -> Case:
    """Make a `Case`; `tags` is a space-separated list."""
    return Case(name, params, frozenset(tags.split()))


@dataclass(frozen=True)
class Tolerance:
    """Limits on how far one output may be from the float64 reference. A limit that is None is not checked.

    `bitwise`: equal bits. `e4m3`: the bytes are E4M3 codes and are compared by value (so that ±0 are equal). `absolute`
    and `relative`: |out − ref| ≤ absolute + relative·|ref| for every element. `rms`: relative root mean square of the
    whole. `diff`: 1 − 2·Σxy / Σ(x² + y²), the measure of DeepGEMM's tests.
    `mismatch`: the fraction of elements that may break `absolute`/`relative` or `bitwise` (0 unless a reason is written
    beside it).
    """

    bitwise: bool = False
    e4m3: bool = False
    absolute: float | None = None
    relative: float | None = None
    rms: float | None = None
    diff: float | None = None
    mismatch: float = 0.0


@dataclass(frozen=True)
class Provider:
    """An implementation of an operation. `missing()` is None when it can be used here, else the reason.

    `make(params, device)` returns a callable that takes the inputs as keywords and returns the outputs, None in place
    of one that it does not give.
    `rough`: reason for results further from the reference than the operation's tolerance. Benchmark and trial still
    time such a provider and write its error beside; an engine uses none that is outside the tolerance.
    """

    name: str
    missing: Callable[[], str | None]
    make: Callable[[Mapping[str, Any], torch.device], Callable[..., Any]]
    rough: str = ""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A row of the registry.

    `reference(**inputs, exact=False)` is readable torch of the same signature as `Plan.run`; exact=True returns
    real-valued outputs as float64 before their last rounding. `make_inputs(params, device, seed)` draws fresh random
    inputs. `nbytes` counts each input read once and each output written once; `flops` counts multiply and add.
    `mutates` names inputs that `run` writes in place (tests clone them). `outputs` names the compared values in order:
    the results, or their conversion by `compared` (codes and scales as numbers, where one scale may tip over).
    `tolerance` goes with `outputs`.
    """

    name: str
    summary: str
    folder: str
    outputs: tuple[str, ...]
    cases: tuple[Case, ...]
    make_inputs: Callable[[Mapping[str, Any], torch.device, int], dict[str, Any]]
    reference: Callable[..., Any]
    plan: Callable[[Mapping[str, Any], torch.device, Arch | None], Plan]
    is_supported: Callable[[Mapping[str, Any], Arch], Support]
    nbytes: Callable[[Mapping[str, Any]], int]
    flops: Callable[[Mapping[str, Any]], int] = field(default=lambda params: 0)
    tolerance: tuple[Tolerance, ...]
    mutates: tuple[str, ...] = ()
    extra_providers: tuple[Provider, ...] = ()
    compared: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] = field(default=lambda outputs: outputs)

    @property
    def contract(self) -> str:
        """The docstring of the operation's folder."""
        return importlib.import_module(f"dsv4_kernels.{self.folder}").__doc__ or ""

    def providers(self) -> tuple[Provider, ...]:
        """The bundled kernel, the reference, then the providers of the row and of `register_provider`."""
        bundled = Provider("dsv4", lambda: None, lambda params, device: self.plan(params, device, None).run)
        torch_reference = Provider("reference", lambda: None, lambda params, device: self.reference)
        return (bundled, torch_reference, *self.extra_providers, *_ADDED.get(self.name, ()))

    def cases_with(self, tag: str) -> tuple[Case, ...]:
        """The cases that carry `tag`."""
        return tuple(c for c in self.cases if tag in c.tags)


_ADDED: dict[str, list[Provider]] = {}


def register_provider(operation_name: str, provider: Provider) -> None:
    """Add another implementation of an operation, for comparison or for use; re-entrant."""
    added = _ADDED.setdefault(operation_name, [])
    if provider.name not in {p.name for p in added}:
        added.append(provider)


@functools.cache
def operations() -> tuple[Operation, ...]:
    """All rows, in the order of `FOLDERS`."""
    rows = [row for folder in FOLDERS for row in importlib.import_module(f"dsv4_kernels.{folder}.api").OPERATIONS]
    names = [row.name for row in rows]
    if len(set(names)) != len(names):
        raise ValueError(f"two operations share a name: {sorted(names)}")
    return tuple(rows)


def operation(name: str) -> Operation:
    """The row called `name`; KeyError lists the names there are."""
    for row in operations():
        if row.name == name:
            return row
    raise KeyError(f"no operation {name!r}; there are {[row.name for row in operations()]}")


def once(make: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Cache the result of the first call of `make`, for preparations of a provider that are not timed."""
    kept: list[tuple[Any, ...]] = []

    def call(*args: Any) -> tuple[Any, ...]:
        if not kept:
            kept.append(make(*args))
        return kept[0]

    return call


def as_outputs(result: Any) -> tuple[torch.Tensor, ...]:
    """Return the result of `run` or of a reference as a tuple of tensors."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@dataclass(frozen=True)
class Errors:
    """Distances between one output and the float64 reference; see `registry.Tolerance` for the measures."""

    worst: float
    rms: float
    diff: float
    outside: float

    def __str__(self) -> str:
        return f"max {self.worst:.2e} rms {self.rms:.2e} diff {self.diff:.2e} outside {self.outside:.1e}"


def measure(out: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance) -> Errors:
    """Compare `out` with `reference`; infinities must agree in place and sign, NaN counts as infinitely wrong."""
    if out.shape != reference.shape:
        raise AssertionError(f"shape {tuple(out.shape)}, reference has {tuple(reference.shape)}")
    if out.numel() == 0:
        return Errors(0.0, 0.0, 0.0, 0.0)
    if tolerance.e4m3:
        out, reference = e4m3_decode(out), e4m3_decode(reference)
    if tolerance.bitwise:
        unequal = (out != reference).double().mean().item()
        return Errors(float(unequal > 0), unequal, unequal, unequal)
    x, y = out.double(), reference.double()
    same_infinity = torch.isinf(y) & (x == y)
    x, y = x.masked_fill(same_infinity, 0.0), y.masked_fill(same_infinity, 0.0)
    finite = torch.isfinite(x) & torch.isfinite(y)
    delta = torch.where(finite, (x - y).abs(), torch.inf)
    # Of the finite ones: no limit is infinite.
    limit = (tolerance.absolute or 0.0) + (tolerance.relative or 0.0) * y.abs().masked_fill(~finite, 0.0)
    bounded = tolerance.absolute is not None or tolerance.relative is not None
    outside = (delta > limit).double().mean().item() if bounded else 0.0
    norm = (y * y).mean().sqrt().item()
    rms = (delta * delta).mean().sqrt().item() / norm if norm else float(delta.max() > 0)
    energy = (x * x + y * y).sum().item()
    diff = 1.0 - 2.0 * (x * y).sum().item() / energy if energy else 0.0
    return Errors(delta.max().item(), rms, diff if diff == diff else float("inf"), outside)


def judge(name: str, errors: Errors, tolerance: Tolerance) -> None:
    """Raise AssertionError that names the output, the measure and the limit."""
    if errors.outside > tolerance.mismatch:
        raise AssertionError(f"{name}: {errors.outside:.2e} of the elements are outside {tolerance}: {errors}")
    for measure_name in ("rms", "diff"):
        limit = getattr(tolerance, measure_name)
        if limit is not None and not getattr(errors, measure_name) <= limit:
            raise AssertionError(f"{name}: {measure_name} above {limit}: {errors}")


@contextlib.contextmanager
def poisoned() -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Let `torch.empty` return poison with guard bands: NaN (0xFF bytes) inside, 0xA5 before and after.

    An element that a kernel forgets to write stays NaN and fails the comparison; a write outside breaks a band, which
    `check_bands` on the yielded list finds.
    """
    bands: list[tuple[torch.Tensor, int]] = []
    plain = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = options.get("dtype") or torch.get_default_dtype()
        count = 1
        for n in shape:
            count *= int(n)
        nbytes = count * dtype.itemsize
        band = 512
        raw = plain((nbytes + 2 * band,), dtype=torch.uint8, device=options.get("device"))
        raw.fill_(0xA5)
        raw[band : band + nbytes] = 0xFF
        bands.append((raw, nbytes))
        return raw[band : band + nbytes].view(dtype).view(*shape)

    torch.empty = empty
    try:
        yield bands
    finally:
        torch.empty = plain


def check_bands(bands: list[tuple[torch.Tensor, int]]) -> None:
    """Raise AssertionError if a guard band was written."""
    for raw, nbytes in bands:
        if not bool((raw[:512] == 0xA5).all()) or not bool((raw[512 + nbytes :] == 0xA5).all()):
            raise AssertionError(f"a write went past the ends of a buffer of {nbytes} bytes")


def fresh(operation: Operation, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with those that the operation writes in place copied, strides included."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )

    return {k: copy(v) if k in operation.mutates and isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def run_case(
    operation: Operation, case: Case, device: torch.device, seed: int, arch: Arch | None = None
) -> dict[str, Errors]:
    """Plan, run and compare one case; returns the errors by output name, raises AssertionError past a tolerance."""
    inputs = operation.make_inputs(case.params, device, seed)
    expected = as_outputs(operation.reference(**fresh(operation, inputs), exact=True))
    with poisoned() as bands:
        plan = operation.plan(case.params, device, arch)
        results = tuple(out.clone() for out in as_outputs(plan.run(**fresh(operation, inputs))))
    check_bands(bands)
    return compare(operation, results, expected)


def compare(
    operation: Operation, results: tuple[torch.Tensor | None, ...], expected: tuple[torch.Tensor, ...]
) -> dict[str, Errors]:
    """Measure and judge every output; None in place of one is somebody else's kernel that does not give it."""
    errors = {}
    if any(out is None for out in results):
        found = results
    else:
        found, expected = operation.compared(results), operation.compared(expected)
    for name, out, want, tolerance in zip(operation.outputs, found, expected, operation.tolerance, strict=True):
        if out is None:
            continue
        errors[name] = measure(out, want, tolerance)
        judge(f"{operation.name}.{name}", errors[name], tolerance)
    return errors
