"""Registry of the patches for the CPU build, and the reference page of all patches.

`python -m dsv4_runtime.vllm_cpu.patches > docs/reference/patches.md` writes the page.
"""

import functools
import importlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dsv4_runtime.vllm_cpu import entry_points, model_runner, operators
from dsv4_runtime.vllm_plugin import register
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters, refuse

_VLLM = "vLLM 0.32.0"
_LINEAR = "dispatch_cpu_unquantized_gemm"
_TILES = "DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler"
_KNOWN_LAYERS = {"swaonly", "c4a", "c128a"}
_ADDED_LAYERS = {"c1a", "c2a"}
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_PAUSE_SECONDS = 0.0005
_CODECACHE = "torch._inductor.codecache"
_DRAFT_MODULES = ("vllm.models.deepseek_v4.cpu.mtp", "vllm.models.deepseek_v4.cpu.dspark")
_DRAFT_MODELS = ("DeepSeekV4MTP", "DSparkDeepseekV4ForCausalLM")
_DRAFTS_NEED = {
    "vllm.models.deepseek_v4.xpu.mtp": (
        "DeepseekV4DecoderLayer",
        "_FUSED_MTP_INPUT_RMSNORM_KERNEL",
        "_MTP_SHARED_HEAD_RMSNORM_KERNEL",
    ),
    "vllm.models.deepseek_v4.xpu.dspark": ("DeepseekV4DecoderLayer", "MHCPostOp", "_insert_context_kv"),
}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, computed in float32 and rounded once to the type of `x`.

    Args:
        x: bfloat16 `[..., K]`.
        weight: float32 `[N, K]`.
        bias: `[N]`.
    """
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight, wide).to(x.dtype)


def _patch_linear() -> PatchOutcome:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or torch.cpu._is_avx512_bf16_supported():
        return PatchOutcome.NOT_WANTED
    original = utils.dispatch_cpu_unquantized_gemm
    expect_parameters(_LINEAR, original, ["layer", "remove_weight"])

    def dispatch(layer: Any, remove_weight: bool) -> None:
        original(layer, remove_weight)
        # oneDNN removes the weight or changes its type.
        if layer.weight.numel() and layer.weight.dtype == torch.bfloat16:
            wide = layer.weight.float()
            layer.cpu_linear = lambda x, weight, bias: linear(x, wide, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    return PatchOutcome.APPLIED


def _patch_tile_scheduler() -> PatchOutcome:
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder

    original = Builder.__dict__.get("build_tile_scheduler")
    if original is None:
        return PatchOutcome.NOT_NEEDED  # inherited again: the base class has all keys
    expect_parameters(_TILES, original, ["self", "num_decode_tokens"])
    # The method does not read `self`.
    result = original(None, 0)
    keys = set(result)
    if keys >= _KNOWN_LAYERS | _ADDED_LAYERS:
        return PatchOutcome.NOT_NEEDED
    if keys != _KNOWN_LAYERS or any(value is not None for value in result.values()):
        raise refuse(_TILES, f"it returns {result}, expected None for each of {sorted(_KNOWN_LAYERS)}")

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(sorted(_KNOWN_LAYERS | _ADDED_LAYERS))

    Builder.build_tile_scheduler = build_tile_scheduler
    return PatchOutcome.APPLIED


def _patch_drafts(index: int) -> PatchOutcome:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return PatchOutcome.NOT_WANTED
    symbol = _DRAFT_MODELS[index]
    module: Any = importlib.import_module(_DRAFT_MODULES[index])
    stub = getattr(module, symbol, None)
    if stub is None:
        raise refuse(symbol, "it is gone")
    if hasattr(stub, "forward"):
        return PatchOutcome.NOT_NEEDED
    for name, symbols in _DRAFTS_NEED.items():
        missing = [one for one in symbols if not hasattr(importlib.import_module(name), one)]
        if missing:
            raise refuse(symbol, f"{name} has no {missing}")
    from dsv4_runtime.vllm_cpu import drafts

    setattr(module, symbol, (drafts.mtp_model, drafts.dspark_model)[index]())
    return PatchOutcome.APPLIED


def _patch_header_cache() -> PatchOutcome:
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if entry_points.platform() is None or not kept:
        return PatchOutcome.NOT_WANTED
    from torch._inductor import codecache

    symbol = f"{_CODECACHE}._HEADER_DIR"
    reader = getattr(codecache, "_precompile_header", None)
    if not isinstance(getattr(codecache, "_HEADER_DIR", None), str) or reader is None:
        raise refuse(symbol, "the module has no such directory, or nothing that precompiles a header")
    if not {"_HEADER_DIR", "_HEADER_LOCK_DIR"} <= set(getattr(reader, "__wrapped__", reader).__code__.co_names):
        raise refuse(symbol, "_precompile_header does not read it, so headers are kept in another way")
    headers = Path(kept, "precompiled_headers")
    codecache._HEADER_DIR = str(headers)
    codecache._HEADER_LOCK_DIR = str(headers / "locks")
    return PatchOutcome.APPLIED


def _patch_queues() -> PatchOutcome:
    if entry_points.platform() is None:
        return PatchOutcome.NOT_WANTED
    from vllm.distributed.device_communicators import shm_broadcast

    symbol = f"{_QUEUES}.sched_yield"
    if not callable(getattr(shm_broadcast, "sched_yield", None)):
        raise refuse(symbol, "the module has no function of that name")
    readers = getattr(getattr(shm_broadcast, "SpinCondition", None), "wait", None)
    if readers is None or "sched_yield" not in readers.__code__.co_names:
        raise refuse(symbol, "SpinCondition.wait does not call it, so readers wait in some other way")
    shm_broadcast.sched_yield = functools.partial(time.sleep, _PAUSE_SECONDS)
    return PatchOutcome.APPLIED


HEADER_CACHE = Patch(
    module=_CODECACHE,
    symbol="_HEADER_DIR",
    why=(
        "torch compiles a header before it loads its first compiled kernel, and writes it below /tmp regardless of"
        " TORCHINDUCTOR_CACHE_DIR: a new pod spent 8 s of its first token on it although all kernels were cached"
    ),
    upstream="intended there: the header must outlive `fresh_cache`",
    versions="torch 2.13.0",
    obsolete_when="torch writes the header to the cache directory, or needs it only for compilation",
    apply=_patch_header_cache,
)
QUEUES = Patch(
    module=_QUEUES,
    symbol="sched_yield",
    why=(
        "for a second after each message the engine core and the workers spin; with fewer cores than processes they"
        " take the time of the computing rank: 0.32 s per token instead of 0.15 s with two ranks on two cores"
    ),
    upstream="intended there: a CUDA worker has a spare core",
    versions=_VLLM,
    obsolete_when="vLLM has a setting for the spin time of readers",
    apply=_patch_queues,
)
_DRAFTS = tuple(
    Patch(
        module=_DRAFT_MODULES[index],
        symbol=_DRAFT_MODELS[index],
        why=(
            f"vLLM's CPU build refuses {method} (`NotImplementedError`); here its model for XPU runs over the CPU's"
            " layers, so that speculative decoding can be developed and tested without a GPU"
        ),
        upstream=f"`models/deepseek_v4/cpu/{file}.py` says: deferred, not implemented",
        versions=_VLLM,
        obsolete_when="vLLM's CPU build has the model",
        apply=functools.partial(_patch_drafts, index),
    )
    for index, (method, file) in enumerate((("MTP", "mtp"), ("DSpark", "dspark")))
)
PATCHES: tuple[Patch, ...] = (
    operators.PATCH,
    Patch(
        module="vllm.model_executor.layers.utils",
        symbol=_LINEAR,
        why=(
            "without AVX-512 oneDNN refuses bfloat16, and vLLM's fallback takes ten times as long for 512 tokens as"
            " float32"
        ),
        upstream="none known",
        versions=_VLLM,
        obsolete_when="oneDNN, or vLLM without it, multiplies bfloat16 on AVX2 with sums of float32",
        apply=_patch_linear,
    ),
    Patch(
        module="vllm.models.deepseek_v4.cpu.cpu_mla",
        symbol=_TILES,
        why=(
            "the CPU override lists three layer types, its caller `build` in sparse_swa.py reads five:"
            " KeyError 'c1a' on the first step"
        ),
        upstream="no fix known; the base class's own method lists all five",
        versions=_VLLM,
        obsolete_when="the CPU method is removed or returns `c1a` and `c2a`",
        apply=_patch_tile_scheduler,
    ),
    *_DRAFTS,
    *model_runner.PATCHES,
    QUEUES,
    HEADER_CACHE,
)

_HEAD = """# Patches to vLLM and torch

Generated from `runtime/dsv4_runtime/vllm_plugin/register.py` and `runtime/dsv4_runtime/vllm_cpu/patches.py`; after a
change of a registry run `python -m dsv4_runtime.vllm_cpu.patches > docs/reference/patches.md`.

dsv4 patches them through entry points `vllm.general_plugins`, in each process that imports the listed module, directly
after the import. A patch verifies the symbol first. If the module already contains the change, nothing is patched and a
log line reports that the patch can be deleted; if the symbol differs, the process ends with `PatchRefusedError`.
"""
_SECTIONS = (
    ("Every build", register.PATCHES),
    ("CPU development build", PATCHES),
)


def page(sections: Iterable[tuple[str, Iterable[Patch]]] = _SECTIONS) -> str:
    """Return the reference page in Markdown: a section per registry, a table per patch."""
    parts = [_HEAD]
    for title, registry in sections:
        parts.append(f"## {title}\n")
        parts += [
            f"### `{patch.symbol}`\n\n"
            "| | |\n|---|---|\n"
            f"| module | `{patch.module}` |\n"
            f"| why | {patch.why} |\n"
            f"| upstream | {patch.upstream} |\n"
            f"| read in | {patch.versions} |\n"
            f"| delete when | {patch.obsolete_when} |\n"
            for patch in registry
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
