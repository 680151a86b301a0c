"""Compile records with the Triton on the path and print one JSON line each.

Started as `python -S child.py` with PYTHONPATH holding one Triton and this package: no torch, no site-packages, so that
another Triton's entry points cannot interfere. Standard input is a JSON list of records.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from dsv4_kernels.gate.table import MMA_PATTERNS, StaticKernel, arguments_of


def compile_record(record: StaticKernel) -> dict[str, Any]:
    """Compile one record and return its row."""
    module, function = record.kernel.split(":")
    fn = getattr(importlib.import_module(module), function)
    names = arguments_of(record.kernel)
    run_time = [name for name, constant in names.items() if not constant]
    types = {name: kind for name, kind in zip(run_time, record.arguments, strict=True) if kind is not None}
    constants = {name: record.constants.get(name) for name in names if name not in types}
    signature = {name: types.get(name, "constexpr") for name in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    made_from = GluonASTSource if fn.is_gluon() else triton.compiler.ASTSource
    indices = {name: (i,) for i, name in enumerate(names)}
    source = made_from(
        fn, signature, constexprs={indices[name]: value for name, value in constants.items()}, attrs=attrs
    )
    options = {"num_warps": record.num_warps, "num_stages": record.num_stages}
    started = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget("cuda", record.arch.spec.capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    usage = resources(compiled.asm["cubin"])
    mma = {name: len(re.findall(pattern, ptx)) for name, pattern in MMA_PATTERNS.items()}
    return {
        "shared": int(compiled.metadata.shared),
        "registers": usage["REG"],
        "stack": usage["STACK"],
        "local": usage["LOCAL"],
        "mma": {name: count for name, count in mma.items() if count},
        "cp_async": len(re.findall(r"cp\.async\.(?:(?:ca|cg)\.shared|bulk\.tensor\.\dd\.shared)", ptx)),
        "foreign": len(re.findall(r"tcgen05|wgmma", ptx)) if record.arch.spec.capability >= 120 else 0,
        "seconds": round(time.perf_counter() - started, 1),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory of a cubin, by the cuobjdump that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool.chmod(tool.stat().st_mode | 0o100)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"REG": found["REG"], "STACK": found["STACK"], "LOCAL": found.get("LOCAL", 0)}


def verdict(record: StaticKernel, row: dict[str, Any]) -> list[str]:
    """Every promise that the compiled code breaks, as sentences; empty means that it passes."""
    expect, broken = record.expect, []
    limit = min(expect.shared, record.arch.spec.shared_bytes)
    if row["shared"] > limit:
        broken.append(f"shared memory {row['shared']} B > {limit} B")
    spill = row["stack"] + row["local"]
    if spill > expect.spill:
        broken.append(f"stack and local memory {spill} B > {expect.spill} B")
    if row["cp_async"] < expect.cp_async:
        broken.append(f"{row['cp_async']} asynchronous copies < {expect.cp_async}")
    allowed = set(expect.mma) - {"none"}
    if set(row["mma"]) - allowed:
        broken.append(f"matrix instructions {sorted(set(row['mma']) - allowed)} beside the stated {sorted(allowed)}")
    if allowed and not row["mma"]:
        broken.append(f"no matrix instruction, stated {sorted(allowed)}")
    if row["foreign"]:
        broken.append("instructions that sm_12x does not have")
    return broken


def main() -> None:
    """Compile the records on standard input."""
    for record in map(StaticKernel.from_json, json.load(sys.stdin)):
        row: dict[str, Any] = {"key": record.key}
        try:
            row.update(compile_record(record))
            row["broken"] = verdict(record, row)
        except Exception as error:  # a failed compilation is a row like any other
            row["broken"] = [f"does not compile: {type(error).__name__}: {error}".splitlines()[0][:200]]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
