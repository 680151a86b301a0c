"""Record the launches of every plan in `gate.plans`: `python -m dsv4_kernels.gate.record` prints JSON records.

Each plan is made with tensors on "meta" and warmed up under the compile-only driver. A hook of Triton takes the kernel,
the types and the constants of each launch and stops before anything is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.runtime import driver

from dsv4_kernels.arch import Arch, TargetGPU, compile_for
from dsv4_kernels.gate.plans import expected, plans
from dsv4_kernels.gate.table import StaticKernel, arguments_of
from dsv4_kernels.precompile import CompileOnly, make_plan

FIRST_TRITON = (3, 6)


def bodies(arch: Arch) -> Iterator[tuple[bool, tuple[int, int], tuple[int, int] | None]]:
    """Yield whether block-scaled products are native on `arch`, and the Triton versions ([since, before)) of each."""
    native = arch.spec.mx_since
    if native is None or native > FIRST_TRITON:
        yield False, FIRST_TRITON, native
    if native is not None:
        yield True, native, None


def record() -> list[StaticKernel]:
    """Return every launch of every plan once per architecture, labelled and sorted by key."""
    found: dict[str, StaticKernel] = {}
    targets = [(arch, *body) for arch in Arch for body in bodies(arch)]
    for device, (arch, mx, since, before) in enumerate(targets):
        compile_for(TargetGPU(arch, arch.spec.multiprocessors, mx))
        driver.set_active(CompileOnly(arch, device))
        for launched in _launches(arch):
            earlier = found.get(name := json.dumps(launched.as_json()))
            # The versions of the bodies of an architecture follow each other.
            if earlier is None or earlier.before == since:
                start = since if earlier is None else earlier.since
                found[name] = replace(launched, since=start, before=before)
    return sorted(_labelled(list(found.values())), key=lambda one: one.key)


def _launches(arch: Arch) -> list[StaticKernel]:
    made: list[StaticKernel] = []

    def on_compile(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        signature, values = compile["signature"], {path[0]: value for path, value in compile["constants"].items()}
        arguments: list[str | None] = []
        constants: dict[str, Any] = {}
        for i, parameter in enumerate(fn.jit_function.params):
            kind = signature[parameter.name]
            if parameter.is_constexpr:
                constants[parameter.name] = getattr(values[i], "value", values[i])
            elif kind != "constexpr":
                arguments.append(kind)
            else:
                # Triton makes constants of absent arguments and of the integer 1.
                arguments.append(None if values[i] is None else "i32")
        kernel = f"{fn.module}:{fn.name}"
        launch = StaticKernel(kernel, arch, tuple(arguments), constants, compile["num_warps"], compile["num_stages"])
        made.append(replace(launch, expect=expected(launch)))
        return True

    triton.knobs.runtime.jit_cache_hook = on_compile
    for described in plans(arch):
        make_plan(described, torch.device("meta")).warmup()
    return made


def _labelled(records: list[StaticKernel]) -> Iterator[StaticKernel]:
    """Label each record with the values that differ between the records of its kernel."""
    kernels: dict[str, list[dict[str, Any]]] = {}
    for one in records:
        kernels.setdefault(one.kernel, []).append(_values(one))
    for one in records:
        others, own = kernels[one.kernel], _values(one)
        differing = {name: value for name, value in own.items() if any(other[name] != value for other in others)}
        words = (_word(name, value) for name, value in differing.items())
        yield replace(one, label=" ".join(word for word in words if word) or "-")


def _values(one: StaticKernel) -> dict[str, Any]:
    run_time = (name for name, constant in arguments_of(one.kernel).items() if not constant)
    types = dict(zip(run_time, one.arguments, strict=True))
    return {**one.constants, **types, "warps": one.num_warps, "stages": one.num_stages}


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return name if value else ""
    return f"{name}{value}" if isinstance(value, int) else f"{name}={value}"


if __name__ == "__main__":
    print(json.dumps([one.as_json() for one in record()]))
