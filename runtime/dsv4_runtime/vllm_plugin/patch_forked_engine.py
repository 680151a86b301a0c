"""Has vLLM spawn its engine's processes, although the plan has them forked, where a fork could not use a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

from dsv4_runtime.vllm_plugin.forking import has_cuda
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters, refuse

_MODULE = "vllm.utils.system_utils"
_SYMBOL = "cuda_is_initialized"


def _apply() -> PatchOutcome:
    from vllm.utils import system_utils

    original: Callable[[], bool] | None = getattr(system_utils, _SYMBOL, None)
    expect_parameters(f"{_MODULE}.{_SYMBOL}", original, [])
    reader = getattr(system_utils, "_maybe_force_spawn", None)
    if original is None or reader is None or _SYMBOL not in reader.__code__.co_names:
        raise refuse(f"{_MODULE}.{_SYMBOL}", "_maybe_force_spawn does not ask it")
    system_utils.cuda_is_initialized = or_by_others(original)
    return PatchOutcome.APPLIED


def or_by_others(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return `original`, which asks torch, with a look at the driver, which others may have initialised too."""

    @functools.wraps(original)
    def cuda_is_initialized() -> bool:
        return original() or has_cuda()

    return cuda_is_initialized


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "dsv4 has EngineCore and the workers of the MP executor forked, since a spawned process imports vLLM once more;"
        " vLLM spawns where torch uses CUDA, but not where another library has initialised the driver"
    ),
    upstream="none",
    versions="vLLM 0.32.0 and 0.33.0",
    obsolete_when="vLLM asks the driver",
    apply=_apply,
)
