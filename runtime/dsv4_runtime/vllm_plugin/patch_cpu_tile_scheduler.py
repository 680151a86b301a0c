"""Gives the CPU tile scheduler the two layer types that its caller asks for."""

from typing import Any

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters, refuse

_MODULE = "vllm.models.deepseek_v4.cpu.cpu_mla"
_SYMBOL = "DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler"
_KNOWN = {"swaonly", "c4a", "c128a"}
_ADDED = {"c1a", "c2a"}


def _apply() -> PatchOutcome:
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder

    original = Builder.__dict__.get("build_tile_scheduler")
    if original is None:
        return PatchOutcome.NOT_NEEDED  # inherited again, so the base's keys are its own
    expect_parameters(_SYMBOL, original, ["self", "num_decode_tokens"])
    # The method reads nothing of its object, so it can be asked without one.
    result = original(None, 0)
    keys = set(result)
    if keys >= _KNOWN | _ADDED:
        return PatchOutcome.NOT_NEEDED
    if keys != _KNOWN or any(value is not None for value in result.values()):
        raise refuse(_SYMBOL, f"it returns {result}, expected None for each of {sorted(_KNOWN)}")

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(sorted(_KNOWN | _ADDED))

    Builder.build_tile_scheduler = build_tile_scheduler
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "the CPU override lists three layer types, its caller `build` in sparse_swa.py reads five:"
        " KeyError 'c1a' on the first step"
    ),
    upstream="no fix known; the base class's own method lists all five",
    versions="vLLM 0.32.0",
    obsolete_when="the CPU method is gone or returns `c1a` and `c2a`",
    apply=_apply,
)
