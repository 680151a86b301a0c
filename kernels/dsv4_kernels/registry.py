"""The registry: one row per operation, from which tests, benchmarks, the static gate and the docs table are made."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4_kernels.arch import Arch
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


@dataclass(frozen=True)
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
    flops: Callable[[Mapping[str, Any]], int]
    tolerance: tuple[Tolerance, ...]
    mutates: tuple[str, ...] = ()
    extra_providers: tuple[Provider, ...] = field(default=())
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


def as_outputs(result: Any) -> tuple[torch.Tensor, ...]:
    """Return the result of `run` or of a reference as a tuple of tensors."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
