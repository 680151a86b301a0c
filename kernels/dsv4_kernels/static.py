"""Records of what the static gate compiles: one per kernel and configuration. Imports neither torch nor Triton."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from dsv4_kernels.arch import Arch

# Every operation's folder: `api.py` in it holds `OPERATIONS` (rows), `configs.py` holds `static_kernels()`.
FOLDERS = (
    "fp8_quant",
    "mla_cache",
    "mla_merge",
    "mla_decode",
    "fp8_gemm",
    "moe",
    "mhc",
    "compressor",
    "indexer",
    "topk",
    "mla_prefill",
    "front",
    "router",
    "projections",
)

SM12X_SHARED_BYTES = 101_376

# How each claim about the matrix instruction looks in PTX. "none": the kernel has no matrix product.
MMA_PATTERNS: Mapping[str, str] = {
    "mx": r"mma\.sync\.[^;\n]*kind::mxf8f6f4[^;\n]*",
    "bf16": r"mma\.sync\.[^;\n]*\.bf16\.bf16[^;\n]*",
    "f16": r"mma\.sync\.[^;\n]*\.f16\.f16[^;\n]*",
    "fp8": r"mma\.sync\.(?![^;\n]*kind::)[^;\n]*\.e4m3\.e4m3[^;\n]*",
    "wgmma-f16": r"wgmma\.mma_async\.[^;\n]*\.f16\.f16[^;\n]*",
    "wgmma-bf16": r"wgmma\.mma_async\.[^;\n]*\.bf16\.bf16[^;\n]*",
    "wgmma-fp8": r"wgmma\.mma_async\.[^;\n]*\.e4m3\.e4m3[^;\n]*",
}


@dataclass(frozen=True)
class Expect:
    """Properties that a compiled configuration must show.

    `mma` names instructions of `MMA_PATTERNS`, one of which must be in the PTX and beside which none other may be;
    ("none",) means that no matrix instruction is expected. `cp_async` is the least number of asynchronous copies (0: no
    pipelined loop). `shared` is the most shared memory in bytes. `spill` is the most local memory in bytes, 0 unless a
    comment beside the configuration says why.
    """

    mma: tuple[str, ...] = ("none",)
    cp_async: int = 0
    shared: int = SM12X_SHARED_BYTES
    spill: int = 0


@dataclass(frozen=True)
class StaticKernel:
    """One kernel in one configuration for one architecture.

    `kernel` is "module:function"; `label` says which configuration it is; `signature` maps every run-time argument to a
    Triton type ("*bf16", "*u8", "*fp8e4nv", "i32"); `constexprs` maps every constexpr argument to its value; `aligned`
    lists arguments that the launch promises to be multiples of 16 (pointers always are: the api checks them).
    `since` and `before` bound the Triton versions that would run it ([since, before)).
    """

    operation: str
    kernel: str
    label: str
    arch: Arch
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = ()
    expect: Expect = field(default_factory=Expect)
    since: tuple[int, int] = (3, 6)
    before: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        """Name of the record in the committed table."""
        return f"{self.operation}/{self.kernel.rsplit(':', 1)[1]}/{self.label}/{self.arch}"

    def applies_to(self, triton: tuple[int, int]) -> bool:
        """Tell whether a process with this Triton would launch the record."""
        return self.since <= triton and (self.before is None or triton < self.before)

    def digest(self, sources: tuple[ModuleType, ...]) -> str:
        """Fingerprint of all that decides the compiled code: sources without comments and layout, and the
        configuration.
        """
        facts = {
            "signature": dict(self.signature),
            "constexprs": {k: str(v) for k, v in self.constexprs.items()},
            "launch": [self.num_warps, self.num_stages, self.arch.value, list(self.aligned)],
            "expect": [list(self.expect.mma), self.expect.cp_async, self.expect.shared, self.expect.spill],
        }
        text = json.dumps(facts, sort_keys=True) + "".join(_code(module) for module in sources)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _code(module: ModuleType) -> str:
    return ast.unparse(ast.parse(inspect.getsource(module)))


@functools.cache
def sources_of(module: ModuleType) -> tuple[ModuleType, ...]:
    """The module and every module of this package that it imports, directly or not, in a fixed order."""
    found = {module.__name__: module}
    waiting = [module]
    while waiting:
        for node in ast.walk(ast.parse(inspect.getsource(waiting.pop()))):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("dsv4_kernels.")
                and node.module not in found
            ):
                found[str(node.module)] = importlib.import_module(str(node.module))
                waiting.append(found[str(node.module)])
    return tuple(found[name] for name in sorted(found))
