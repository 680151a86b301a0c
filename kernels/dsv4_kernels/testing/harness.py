"""Run a case of an operation against its reference: poisoned buffers, guard bands, error measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.numerics import e4m3_decode
from dsv4_kernels.registry import Case, Operation, Tolerance, as_outputs


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
    delta = torch.where(torch.isfinite(x), (x - y).abs(), torch.inf)
    limit = (tolerance.absolute or 0.0) + (tolerance.relative or 0.0) * y.abs()
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
