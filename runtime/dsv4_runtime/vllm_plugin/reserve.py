"""Has vLLM's memory profile see what DeepSeek-V4's attention takes of a GPU only once there is a KV cache.

The profile's dummy step skips attention. vLLM reserves there the indexer's logits and the gather workspace, but not

- the two index buffers of layers of compression ratio 128, which their metadata builder makes after the KV cache:
  int32 [batched tokens, longest context / 128] each, 2 x 256 MiB at 8,192 tokens and a context of 1 Mi tokens;
- the workspace at those layers' own width, in whose place FlashMLA's dummy step takes the indexer's (a workspace that
  has to grow once it is locked ends the engine: vLLM's issue 41700);
- on SM12x the slots and the padded queries that a prefill makes of them.

Read in vLLM 0.32.0. What is not as it was there is left alone, and one warning says so.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dsv4_runtime.vllm_plugin.patch import after_import, expect_parameters, refuse

LOGGER = logging.getLogger("vllm.dsv4")
_RATIO = 128
_ALIGNMENT = 128
# Of a row's width, `_C128A_TOPK_ALIGNMENT` of `models/deepseek_v4/sparse_mla.py`.
_LAYER = ("compress_ratio", "max_model_len", "max_num_batched_tokens", "topk_indices_buffer", "window_size")
# Attributes that a layer of attention is read by.
_FORWARD = ["self", "q", "kv", "positions", "output"]


def width(max_model_len: int) -> int:
    """Return the entries in a row of the index buffers: compressed tokens of the longest context, rounded up."""
    return -(-max_model_len // (_RATIO * _ALIGNMENT)) * _ALIGNMENT


def buffers_bytes(tokens: int, max_model_len: int) -> int:
    """Return the bytes of the index buffers that one metadata builder of ratio 128 makes.

    Args:
        tokens: most tokens of a step.
        max_model_len: the longest context.
    """
    return 4 * tokens * (2 * width(max_model_len) + 1)


def install() -> None:
    """Arrange for the changes when vLLM imports the modules."""
    for module, change in _CHANGES.items():
        after_import(module, functools.partial(_attach, module, change))


def _attach(name: str, change: Callable[[ModuleType], None]) -> None:
    try:
        change(sys.modules[name])
    except Exception as error:
        LOGGER.warning("dsv4 memory: what attention takes beyond vLLM's profile is not reserved (%s)", error)


def _profile(module: Any) -> None:
    runner = module.GPUModelRunner
    expect_parameters("GPUModelRunner.profile_run", runner.profile_run, ["self", "randomize_inputs"])
    expect_parameters("GPUModelRunner.get_kv_cache_spec", runner.get_kv_cache_spec, ["self"])
    runner.profile_run = holding_buffers(runner.profile_run)


def holding_buffers(profile_run: Callable[..., None]) -> Callable[..., None]:
    """Return `profile_run` of vLLM's runner, with memory held meanwhile for the index buffers of this rank."""

    @functools.wraps(profile_run)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        size = _own_bytes(self)
        held = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        if held is not None:
            LOGGER.info("dsv4 memory: %.1f MiB reserved for the indices of ratio 128", size / 2**20)
        profile_run(self, *args, **kwargs)
        # The builder takes it after the KV cache was made beside it.
        del held

    return run


def _own_bytes(runner: Any) -> int:
    """Return the bytes of the builders of ratio 128 that `runner` will make: one a microbatch if it has such layers."""
    specs = runner.get_kv_cache_spec().values()
    if not any(getattr(spec, "tokens_per_state", None) == _RATIO for spec in specs):
        return 0
    from vllm.v1.worker.ubatch_utils import get_num_ubatches

    config = runner.vllm_config
    tokens, length = config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len
    return buffers_bytes(tokens, length) * int(get_num_ubatches(config.parallel_config))


def _flashmla(module: Any) -> None:
    kind = module.DeepseekV4FlashMLAAttention
    expect_parameters("DeepseekV4FlashMLAAttention.forward_mqa", kind.forward_mqa, _FORWARD)
    _expect_names("DeepseekV4FlashMLAAttention.forward_mqa", kind.forward_mqa, ("PREFILL_CHUNK_SIZE", "round_up"))
    _expect_names("DeepseekV4Attention.__init__", module.DeepseekV4Attention.__init__, (*_LAYER, "max_image_tokens"))

    def reserve(layer: Any, q: torch.Tensor, output: torch.Tensor) -> None:
        if layer.compress_ratio == _RATIO:
            tokens, compressed = layer.max_num_batched_tokens, width(layer.max_model_len)
            gathered = -(-layer.max_model_len // _RATIO) + layer.window_size + tokens
            columns = -(-(compressed + layer.window_size + layer.max_image_tokens) // 128) * 128
            module.current_workspace_manager().get_simultaneous(
                ((layer.PREFILL_CHUNK_SIZE, gathered, q.shape[-1]), torch.bfloat16),
                ((tokens, columns), torch.int32),
                ((tokens,), torch.int32),
            )

    kind.forward_mqa = reserving(kind.forward_mqa, reserve, module)


def _flashinfer(module: Any) -> None:
    kind = module.DeepseekV4FlashInferSM120Attention
    expect_parameters("DeepseekV4FlashInferSM120Attention.forward_mqa", kind.forward_mqa, _FORWARD)
    _expect_names("DeepseekV4FlashInferSM120Attention._prepare_query", kind._prepare_query, ("new_zeros",))
    _expect_names("DeepseekV4Attention.__init__", module.DeepseekV4Attention.__init__, _LAYER)

    def reserve(layer: Any, q: torch.Tensor, output: torch.Tensor) -> None:
        if layer.compress_ratio > 1:
            compressed = layer.compress_ratio == _RATIO
            columns = width(layer.max_model_len) if compressed else layer.topk_indices_buffer.shape[-1]
            slots = torch.empty((q.shape[0], columns), dtype=torch.int32, device=q.device)
            # Both are there at once in a prefill; queries are copied where heads are added to them.
            rows = output.shape if q.shape[1] < output.shape[1] else (0,)
            padded = torch.empty(rows, dtype=torch.bfloat16, device=q.device)
            del slots, padded

    kind.forward_mqa = reserving(kind.forward_mqa, reserve, module)


def reserving(
    forward_mqa: Callable[..., None], reserve: Callable[[Any, torch.Tensor, torch.Tensor], None], module: Any
) -> Callable[..., None]:
    """Return `forward_mqa` of an attention class, which in a dummy step without metadata also calls `reserve`.

    Args:
        forward_mqa: of vLLM.
        reserve: gets the layer, its queries [T, heads, 512] and its output.
        module: that of the class, with `get_forward_context`.
    """

    @functools.wraps(forward_mqa)
    def forward(self: Any, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        forward_mqa(self, q, kv, positions, output)
        if module.get_forward_context().attn_metadata is None:
            reserve(self, q, output)

    return forward


def _expect_names(symbol: str, function: Any, names: tuple[str, ...]) -> None:
    missing = sorted(set(names) - set(inspect.unwrap(function).__code__.co_names))
    if missing:
        raise refuse(symbol, f"it does not name {', '.join(missing)}")


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.worker.gpu.model_runner": _profile,
    "vllm.models.deepseek_v4.nvidia.flashmla": _flashmla,
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse": _flashinfer,
}
