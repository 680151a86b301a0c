"""Weight loading and the memory reserve of attention.

A loader registered with vLLM in place of its default one logs the progress of a load: vLLM's own bars count files, or
bytes without a total, depending on the format. The agent reads the lines (`dsv4_runtime.engine.logs`). The format
`ipc_cache` is refused together with bundled kernels before anything is loaded: vLLM's weight cache contains weights in
the layout of vLLM's own kernels, and its loader would load a second copy.

The memory profile of vLLM must include memory that DeepSeek-V4's attention allocates only after the KV cache. The
profile's dummy step skips attention. vLLM reserves the indexer's logits and the gather workspace there, but not

- the two index buffers of layers with compression ratio 128, allocated by their metadata builder after the KV cache:
  int32 [batched tokens, longest context / 128] each, 2 x 256 MiB at 8,192 tokens and a context of 1 Mi tokens;
- the workspace with the width of those layers, for which FlashMLA's dummy step uses the indexer's (a locked workspace
  that must grow ends the engine: vLLM's issue 41700);
- on SM12x the slots and the padded queries of a prefill.

Read in vLLM 0.32.0. Symbols that differ are left unchanged, with one warning.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsv4_runtime.contract.kernels import VARIABLE, Op, parse_kernel_choice
from dsv4_runtime.vllm_plugin import patch, retained
from dsv4_runtime.vllm_plugin.kernels.v033 import FLASHINFER_SPARSE, FLASHMLA, MODEL_LOADER, MODEL_RUNNER
from dsv4_runtime.vllm_plugin.patch import after_import, expect_parameters, refuse

LOGGER = logging.getLogger("vllm.dsv4")
FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
"""Formats of safetensors files that vLLM's default loader reads."""
SHARED = "ipc_cache"
"""Format of weights preloaded by a daemon of vLLM (`vllm preload`)."""
_SECONDS = 1.0
_SHARE = 0.01
# Minimum interval between two lines, both in time and in bytes.
_RATIO = 128
_ALIGNMENT = 128
# Of the row width, `_C128A_TOPK_ALIGNMENT` in `models/deepseek_v4/sparse_mla.py`.
_LAYER = ("compress_ratio", "max_model_len", "max_num_batched_tokens", "topk_indices_buffer", "window_size")
# Attributes read from an attention layer.
_FORWARD = ["self", "q", "kv", "positions", "output"]


def attach() -> None:
    """Register the loader for each format of vLLM's default loader; the module has just been imported."""
    module: Any = sys.modules[MODEL_LOADER]
    try:
        expect_parameters("register_model_loader", module.register_model_loader, ["load_format"])
        default = module.DefaultModelLoader
        expect_parameters("get_all_weights", default.get_all_weights, ["self", "model_config", "model"])
        known = module._LOAD_FORMAT_TO_MODEL_LOADER
        loader, shared = telling(default), known.get(SHARED)
        if not patch.is_cpu_build():
            loader = retained.retaining(loader)
        replaced = dict.fromkeys((name for name in FORMATS if known.get(name) is default), loader)
    except Exception as error:
        LOGGER.warning("dsv4 weights: no rate is logged (%s: %s)", type(error).__name__, error)
        return
    if shared is not None:
        replaced[SHARED] = refusing(shared)
    # vLLM warns of each loader that is replaced.
    module.logger.disabled, before = True, module.logger.disabled
    try:
        for name, kind in replaced.items():
            module.register_model_loader(name)(kind)
    finally:
        module.logger.disabled = before


def refusing(shared: type) -> type:
    """Return `shared`, vLLM's loader of preloaded weights, with a check against bundled kernels."""

    def make(self: Any, *args: Any, **options: Any) -> None:
        text = os.environ.get(VARIABLE)
        if any(map(parse_kernel_choice(text).bundled, Op)) and not patch.is_cpu_build():
            raise ValueError(
                f"{VARIABLE}={text} does not work with load format {SHARED}: the cached weights are laid out for "
                f"vLLM's own kernels. Set {VARIABLE}=off, or another load format"
            )
        shared.__init__(self, *args, **options)  # type: ignore[misc]

    return type(shared.__name__, (shared,), {"__init__": make})


def telling(default: type) -> type:
    """Return `default`, vLLM's loader, with progress lines on rank 0."""

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        found = default.get_all_weights(self, model_config, model)  # type: ignore[attr-defined]
        total = _size(Path(model_config.model))
        return counted(found, total, _say) if total and _first() else found

    return type(f"Telling{default.__name__}", (default,), {"get_all_weights": get_all_weights})


def counted(
    weights: Iterator[tuple[str, Any]],
    total: int,
    say: Callable[[int, int, float], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, Any]]:
    """Yield `weights`, names and tensors, and call `say` about once per second and at the end.

    Args:
        weights: from a loader.
        total: bytes of the checkpoint's files.
        say: gets the bytes so far, `total`, and bytes per second since the last call; at the end since the begin.
        clock: seconds.
    """
    begun = told_time = clock()
    done = told = 0
    for name, tensor in weights:
        done += tensor.numel() * tensor.element_size()
        yield name, tensor
        now = clock()
        if now - told_time >= _SECONDS and done - told >= _SHARE * total:
            say(done, total, (done - told) / (now - told_time))
            told, told_time = done, now
    say(done, total, done / max(clock() - begun, 1e-9))


def _size(folder: Path) -> int:
    """Return the bytes of the checkpoint in `folder`; 0 if there is no such directory (a repository name)."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _first() -> bool:
    """Return whether this process logs the progress, as for vLLM's bars."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _say(done: int, total: int, rate: float) -> None:
    LOGGER.info("dsv4 weights: %.3f of %.3f GB at %.3f GB/s", done / 1e9, total / 1e9, rate / 1e9)


def c128_width(max_model_len: int) -> int:
    """Return the row width of the index buffers: compressed tokens of the longest context, rounded up."""
    return -(-max_model_len // (_RATIO * _ALIGNMENT)) * _ALIGNMENT


def buffers_bytes(tokens: int, max_model_len: int) -> int:
    """Return the bytes of the index buffers of one metadata builder of ratio 128.

    Args:
        tokens: most tokens of a step.
        max_model_len: the longest context.
    """
    return 4 * tokens * (2 * c128_width(max_model_len) + 1)


def install_reserve() -> None:
    """Register the changes of the memory profile; each is applied after the import of its module."""
    for module, change in _CHANGES.items():
        after_import(module, functools.partial(_attach_reserve, module, change))


def _attach_reserve(name: str, change: Callable[[ModuleType], None]) -> None:
    try:
        change(sys.modules[name])
    except Exception as error:
        LOGGER.warning("dsv4 memory: attention buffers beyond vLLM's profile are not reserved (%s)", error)


def _profile(module: Any) -> None:
    runner = module.GPUModelRunner
    expect_parameters("GPUModelRunner.profile_run", runner.profile_run, ["self", "randomize_inputs"])
    expect_parameters("GPUModelRunner.get_kv_cache_spec", runner.get_kv_cache_spec, ["self"])
    runner.profile_run = holding_buffers(runner.profile_run)


def holding_buffers(profile_run: Callable[..., None]) -> Callable[..., None]:
    """Return `profile_run` of vLLM's runner, which holds memory for the index buffers of this rank."""

    @functools.wraps(profile_run)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        size = _own_bytes(self)
        held = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        if held is not None:
            LOGGER.info("dsv4 memory: %.1f MiB reserved for the indices of ratio 128", size / 2**20)
        profile_run(self, *args, **kwargs)
        # The builder allocates it after the KV cache.
        del held

    return run


def _own_bytes(runner: Any) -> int:
    """Return the bytes of the builders of ratio 128 in `runner`: one per microbatch if it has such layers."""
    specs = runner.get_kv_cache_spec().values()
    if not any(getattr(spec, "tokens_per_state", None) == _RATIO for spec in specs):
        return 0
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import get_num_ubatches

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
            tokens, compressed = layer.max_num_batched_tokens, c128_width(layer.max_model_len)
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
            columns = c128_width(layer.max_model_len) if compressed else layer.topk_indices_buffer.shape[-1]
            slots = torch.empty((q.shape[0], columns), dtype=torch.int32, device=q.device)
            # Both exist at once in a prefill; queries are copied to pad heads.
            rows = output.shape if q.shape[1] < output.shape[1] else (0,)
            padded = torch.empty(rows, dtype=torch.bfloat16, device=q.device)
            del slots, padded

    kind.forward_mqa = reserving(kind.forward_mqa, reserve, module)


def reserving(
    forward_mqa: Callable[..., None], reserve: Callable[[Any, torch.Tensor, torch.Tensor], None], module: Any
) -> Callable[..., None]:
    """Return `forward_mqa` of an attention class, which also calls `reserve` in a dummy step without metadata.

    Args:
        forward_mqa: vLLM's.
        reserve: gets the layer, its queries [T, heads, 512] and its output.
        module: module of the class, with `get_forward_context`.
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
    MODEL_RUNNER: _profile,
    FLASHMLA: _flashmla,
    FLASHINFER_SPARSE: _flashinfer,
}
