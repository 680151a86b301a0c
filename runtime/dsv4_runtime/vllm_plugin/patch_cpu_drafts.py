"""Gives vLLM's CPU build the models that draft for DeepSeek-V4."""

import importlib
from typing import Any

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, refuse

_MODULES = ("vllm.models.deepseek_v4.cpu.mtp", "vllm.models.deepseek_v4.cpu.dspark")
_SYMBOLS = ("DeepSeekV4MTP", "DSparkDeepseekV4ForCausalLM")
_NEEDED = {
    "vllm.models.deepseek_v4.xpu.mtp": (
        "DeepseekV4DecoderLayer",
        "_FUSED_MTP_INPUT_RMSNORM_KERNEL",
        "_MTP_SHARED_HEAD_RMSNORM_KERNEL",
    ),
    "vllm.models.deepseek_v4.xpu.dspark": ("DeepseekV4DecoderLayer", "MHCPostOp", "_insert_context_kv"),
}


def _apply(which: int) -> PatchOutcome:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return PatchOutcome.NOT_WANTED
    module: Any = importlib.import_module(_MODULES[which])
    stub = getattr(module, _SYMBOLS[which], None)
    if stub is None:
        raise refuse(_SYMBOLS[which], "it is gone")
    if hasattr(stub, "forward"):
        return PatchOutcome.NOT_NEEDED
    for name, symbols in _NEEDED.items():
        missing = [symbol for symbol in symbols if not hasattr(importlib.import_module(name), symbol)]
        if missing:
            raise refuse(_SYMBOLS[which], f"{name} has no {missing}")
    from dsv4_runtime.vllm_plugin import cpu_drafts

    setattr(module, _SYMBOLS[which], (cpu_drafts.mtp_model, cpu_drafts.dspark_model)[which]())
    return PatchOutcome.APPLIED


def _apply_mtp() -> PatchOutcome:
    return _apply(0)


def _apply_dspark() -> PatchOutcome:
    return _apply(1)


_WHY = (
    "vLLM's CPU build refuses {method} (`NotImplementedError`); here its model for XPU runs over the CPU's layers, so"
    " that speculative decoding can be developed and tested without a GPU"
)
_UPSTREAM = "`models/deepseek_v4/cpu/{file}.py` says: deferred, not implemented"
_OBSOLETE = "vLLM's CPU build has the model"

MTP = Patch(
    module=_MODULES[0],
    symbol=_SYMBOLS[0],
    why=_WHY.format(method="MTP"),
    upstream=_UPSTREAM.format(file="mtp"),
    versions="vLLM 0.32.0",
    obsolete_when=_OBSOLETE,
    apply=_apply_mtp,
)
DSPARK = Patch(
    module=_MODULES[1],
    symbol=_SYMBOLS[1],
    why=_WHY.format(method="DSpark"),
    upstream=_UPSTREAM.format(file="dspark"),
    versions="vLLM 0.32.0",
    obsolete_when=_OBSOLETE,
    apply=_apply_dspark,
)
