"""Plans whose launches the static gate compiles, and the properties that the compiled code must have.

`python -m dsv4_kernels.gate.plans` prints JSON records of the launches. Each plan is made with tensors on "meta" and
warmed up under the compile-only driver. A hook of Triton takes the kernel, the types and the constants of each launch
and stops before anything is compiled.

A plan is a line of `dsv4_kernels.precompile`. Together they cover the shapes of both models and of tensor-parallel
shards, and the rows of the tuning tables.
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
from dsv4_kernels.compressor.api import ProjectionPlan, SavePlan, StorePlan
from dsv4_kernels.fp8.api import GemmPlan, QuantPlan, SiluMulPlan
from dsv4_kernels.front.api import InsertPlan, NormPlan
from dsv4_kernels.gate.table import Expect, StaticKernel, arguments_of
from dsv4_kernels.indexer.api import LogitsPlan, PagedLogitsPlan, QueryPlan, TopkPlan
from dsv4_kernels.mhc.api import HeadPlan, PostPlan, PrePlan
from dsv4_kernels.mla_cache.api import CachePlan
from dsv4_kernels.mla_decode.api import DecodePlan, MergePlan
from dsv4_kernels.mla_prefill.api import ListsPlan, PrefillPlan
from dsv4_kernels.moe.api import MoePlan
from dsv4_kernels.numerics import ds_mla
from dsv4_kernels.precompile import DEVICE, CompileOnly, line, make_plan
from dsv4_kernels.router.api import RouterPlan

TOKENS = 8192
# Columns of an expert: whole Flash on sm_90, its half on sm_120 and its eighth on sm_121.
_SHARDS = {Arch.SM_90: 2048, Arch.SM_120: 1024, Arch.SM_121: 256}
# A rank of each deployment in `examples/`: hidden size, columns of an expert, experts, heads, selected entries.
_EXAMPLES = {
    Arch.SM_90: (),
    Arch.SM_120: (
        (4096, 1024, 256, 32, 512),  # flash-2x-rtx-pro-6000
        (4096, 512, 256, 16, 512),  # flash-4x-rtx-pro-6000
        (4096, 256, 256, 8, 512),  # flash-8x-rtx-pro-6000
        (7168, 384, 384, 16, 1024),  # pro-8x-rtx-pro-6000
    ),
    Arch.SM_121: (
        (4096, 1024, 256, 32, 512),  # flash-2x-spark
        (7168, 384, 384, 16, 1024),  # pro-8x-spark
    ),
}


def plans(arch: Arch) -> Iterator[str]:
    """Yield the plans to compile for `arch`."""
    for tokens, hidden, experts in ((TOKENS, 4096, 256), (1, 7168, 384)):
        for name in ("mhc_pre", "mhc_pre_broadcast"):
            yield line(PrePlan, name, 1, hidden, DEVICE, norms=[True], quantised=1)
        yield line(PrePlan, "mhc_post_pre", tokens, hidden, DEVICE, norms=[True], quantised=tokens)
        yield line(HeadPlan, "mhc_head", 1, hidden, DEVICE, norms=[True])
        yield line(PostPlan, "mhc_post", 1, hidden, DEVICE, norms=[True])
        yield line(QuantPlan, TOKENS, hidden, DEVICE)
        yield line(RouterPlan, tokens, hidden, experts, 6, DEVICE)
        yield line(ProjectionPlan, DEVICE, tokens=32, hidden=hidden, ratio=4, width=1024, index_width=256, heads=64)
        yield line(ProjectionPlan, DEVICE, tokens=32, hidden=hidden, ratio=128, width=512)
    for inter in (2048, 3072):
        yield line(SiluMulPlan, TOKENS, inter, DEVICE)
    for rank in (1024, 1536):
        for quantised in (False, True):
            yield line(NormPlan, TOKENS, rank, DEVICE, quantised=quantised)
    for heads, padded in ((64, 64), (8, 16)):
        yield line(InsertPlan, TOKENS, heads, padded, DEVICE, own_output=False)
    yield line(GemmPlan, TOKENS, 1536, 4096, None, DEVICE, quantised=16)
    yield line(GemmPlan, TOKENS, 32_768, 1024, None, DEVICE)
    for page in (64, 53):
        for write in (True, False):
            yield line(CachePlan, write, TOKENS, page, ds_mla(page).page_bytes, DEVICE)
    for heads, topk in ((16, 512), (64, 512), (64, 0)):
        yield line(DecodePlan, TOKENS, heads, 128, topk, DEVICE, o8=True, lookup=topk > 0)
    yield line(DecodePlan, 1, 64, 128, 512, DEVICE)
    yield line(MergePlan, "mla_merge_o8", 1, TOKENS, 64, DEVICE)
    yield line(MergePlan, "mla_merge_two", 2, 1, 64, DEVICE)
    for heads in (64, 16):
        yield line(PrefillPlan, TOKENS, heads, 640, DEVICE, own_output=False)
    for topk, ratio in ((0, 1), (512, 4), (8192, 128)):
        yield line(ListsPlan, TOKENS, topk, ratio, DEVICE, window=128, own_output=False)
    for ratio, page in ((4, 64), (128, 2)):
        yield line(SavePlan, "compressor_save", TOKENS, 512, ratio, DEVICE)
        yield line(StorePlan, "compressor_store", TOKENS, 512, ratio, DEVICE, page=page)
    yield line(SavePlan, "compressor_save", TOKENS, 128, 4, DEVICE)
    yield line(StorePlan, "compressor_store_indexer", TOKENS, 128, 4, DEVICE)
    yield line(QueryPlan, TOKENS, 64, DEVICE)
    yield line(LogitsPlan, 64, DEVICE)
    for next_n in (1, 2, 4):
        yield line(PagedLogitsPlan, next_n, 9216, 64, DEVICE)
    yield line(TopkPlan, 64, 262_144, 512, DEVICE)
    for a8 in (False, True):
        yield line(MoePlan, TOKENS, 4096, _SHARDS[arch], 256, 6, a8, DEVICE)
    for a8 in (False, True):
        yield line(MoePlan, 10, 4096, _SHARDS[arch], 256, 6, a8, DEVICE, adds=True)
    if arch is Arch.SM_120:
        yield line(MoePlan, TOKENS, 7168, 384, 384, 6, True, DEVICE)
    # The sizes of a deployment select the same tiles of the other products, with longer or shorter loops.
    for hidden, inter, experts, heads, topk in _EXAMPLES[arch]:
        yield line(MoePlan, 10, hidden, inter, experts, 6, False, DEVICE, adds=True)
        yield line(DecodePlan, TOKENS, heads, 128, topk, DEVICE, o8=True, lookup=True)
        yield line(PrefillPlan, TOKENS, heads, topk + 128, DEVICE, own_output=False)


# On sm_90 64 heads × 512 columns of float32 are half the register file; the values that do not fit beside them are
# spilled once per tile. Decode: 96 B with Triton 3.6, which was measured, and more with later ones. Prefill: 40 B with
# Triton 3.6, 32 with 3.8, 504 with 3.9. The limits keep it from growing unseen. On SM12x nothing is spilled.
_DECODE_SPILL, _PREFILL_SPILL = 704, 512
# A thread of 32 warps has 64 registers, and up to 56 bytes around the scan do not fit them (16 with 16 warps, where
# Triton 3.8 stops at 64 too); chunks of half the size need a third launch for 262,144 scores.
_TOPK_SPILL = 64
# On sm_90 Triton 3.9 keeps two registers of many tokens in local memory, of 168 at most; 3.6 and 3.8 none.
_MIX_SPILL = 8
# On sm_90 Triton 3.8 keeps four registers of tiles of 64 × 64 in local memory, 3.9 fifty, of W4A8 54; 3.6 keeps none.
_EXPERTS_SPILL, _EXPERTS_A8_SPILL = 200, 216


def expected(launch: StaticKernel) -> Expect:
    """Return the properties that the compiled code of `launch` must have."""
    c, hopper, limit = launch.constants, launch.arch is Arch.SM_90, launch.arch.spec.shared_bytes

    def bf16(rows: str) -> tuple[str, ...]:
        return ("wgmma-bf16",) if hopper and c[rows] >= 64 else ("bf16",)

    match launch.function:
        case "fp8_gemm_kernel":
            # At 8 columns Triton 3.6 widens to fp16 on sm_90 and 3.8 takes wgmma; memory hides either.
            wgmma = ("wgmma-fp8",) if c["BM"] > 8 else ("wgmma-fp8", "f16")
            half = ("f16", "wgmma-f16") if hopper else ("f16",)
            mma = ("mx",) if c["MX"] else half if c["QUANT"] else wgmma if hopper else ("f16", "fp8")
            return Expect(mma, cp_async=8, shared=limit)
        case "fp8_gemm_hopper_kernel":
            # One copy of weights and one of tokens for each warpgroup.
            return Expect(("wgmma-fp8",), cp_async=1 + c["WARPGROUPS"], shared=limit)
        case "indexer_logits_kernel" | "indexer_paged_logits_kernel":
            return Expect(("mx",) if c["MX"] else ("wgmma-fp8",) if hopper else ("f16", "fp8"), cp_async=4)
        case "mhc_mix_kernel" if c["ROWS"]:
            return Expect(bf16("BT"), spill=_MIX_SPILL if c["APART"] and hopper else 0)
        case "mla_decode_kernel":
            # One tile, or one stage, is loaded straight into registers.
            copies = 0 if c["ONE"] or launch.num_stages == 1 else 8
            return Expect(bf16("BH"), copies, limit, _DECODE_SPILL if hopper and not c["ONE"] else 0)
        case "mla_prefill_kernel":
            return Expect(bf16("BH"), 16, limit, _PREFILL_SPILL if hopper and c["BH"] >= 64 else 0)
        case "projections_kernel":
            return Expect(("bf16",), cp_async=8)
        case "router_product_kernel":
            return Expect(bf16("BT"), cp_async=8)
        case "topk_kernel":
            return Expect(spill=_TOPK_SPILL if launch.num_warps >= 16 else 0)
        case "moe_columns_up_kernel" | "moe_columns_down_kernel":
            return Expect(("wgmma-fp8",), cp_async=8)
        case "moe_decode_up_kernel" | "moe_sorted_up_kernel" | "moe_decode_down_kernel" | "moe_sorted_down_kernel":
            return _experts(launch)
    return Expect()


def _experts(launch: StaticKernel) -> Expect:
    c, hopper, up = launch.constants, launch.arch is Arch.SM_90, "_up_" in launch.function
    steps = c["HIDDEN" if up else "INTER"] // c.get("SPLIT", 1) // c["BLOCK_K"]
    if launch.function == "moe_decode_down_kernel":
        steps *= c["TOPK"]
    mma = ("mx",) if c["MMA"] == "mx" else ("bf16", "wgmma-bf16") if hopper else ("bf16",)
    crowded = hopper and up and (c["BLOCK_M"], c["BLOCK_N"]) == (64, 64)
    # A loop of one or two steps is fetched before the loop, or unrolled.
    spill = _EXPERTS_A8_SPILL if up and c["A8"] else _EXPERTS_SPILL
    return Expect(mma, cp_async=8 if steps > 2 else 0, spill=spill if crowded else 0)


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
