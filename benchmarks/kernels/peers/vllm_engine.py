"""Kernels of an installed vLLM between products and attention, called as by its layers.

vLLM is imported as an ordinary package; nothing of it is fetched. Data prepared once per layer or step is made at the
first call, which is not timed; every launch of a call is timed. Results that vLLM allocates in the call cost no time in
a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.kernels.source import installed

from dsv4_kernels.registry import Provider, register_provider
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import providers

Params = Mapping[str, Any]
Call = Callable[..., Any]

TF32 = "its product takes TF32 inputs"
TIES = "takes any of equal scores"
BOUNDARY = "float32 beside a rounding boundary"
# The largest batch of vLLM's cooperative top-k, and the workspace of both.
COOPERATIVE_ROWS, WORKSPACE = 64, 1 << 20


def missing(*modules: str) -> Callable[[], str | None]:
    """Return a check that vLLM and the other requirements of a kernel can be imported."""

    def check() -> str | None:
        gone = [name for name in ("vllm", *modules) if not installed(name)]
        return f"{', '.join(gone)} is not installed" if gone else None

    return check


def mhc(name: str) -> Callable[[Params, torch.device], Call]:
    """Return a maker for a function of vLLM's TileLang file, which uses DeepGEMM for its products."""

    def make(params: Params, device: torch.device) -> Call:
        from vllm.model_executor.kernels.mhc import tilelang

        return getattr(tilelang, name)  # type: ignore[no-any-return]

    return make


def mhc_broadcast(params: Params, device: torch.device) -> Call:
    run = mhc("mhc_pre_broadcast_tilelang")(params, device)
    # Only the shape of fn is used.
    fn = torch.zeros((24, 4 * params["hidden"]), device=device)
    return lambda **inputs: run(fn=fn, **inputs)


def indexer_query(params: Params, device: torch.device) -> Call:
    from vllm.models.deepseek_v4.common.ops.fused_indexer_q import fused_indexer_q_rope_quant

    def call(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, weights = fused_indexer_q_rope_quant(**inputs)
        return q.view(torch.uint8), weights

    return call


def compressor_save(params: Params, device: torch.device) -> Call:
    from vllm.models.deepseek_v4.common.ops.save_partial_states import _SAVE_PARTIAL_STATES_KERNEL

    def call(state_cache: torch.Tensor, ape: torch.Tensor, **x: torch.Tensor) -> torch.Tensor:
        _SAVE_PARTIAL_STATES_KERNEL(
            state_cache=state_cache, ape=ape, block_size=state_cache.shape[1], state_width=ape.shape[1],
            compress_ratio=ape.shape[0], pdl_kwargs={"launch_pdl": False}, **x,
        )  # fmt: skip
        return state_cache

    return call


def projections(params: Params, device: torch.device) -> Call:
    """Return cuBLAS's products followed by the saving Triton kernel; an attention layer runs them in parallel."""
    save = compressor_save(params, device)

    def call(
        x: torch.Tensor, positions: torch.Tensor, head_weight: torch.Tensor | None = None, **given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = []
        for prefix in ("", "index_") if head_weight is not None else ("",):
            weight, ape, state_cache, slot_mapping = (
                given[f"{prefix}{name}"] for name in ("weight", "ape", "state_cache", "slot_mapping")
            )
            kv, score = torch.mm(x, weight.T, out_dtype=torch.float32).chunk(2, 1)
            save(kv=kv, score=score, ape=ape, positions=positions, state_cache=state_cache, slot_mapping=slot_mapping)
            results.append(state_cache)
        return (*results, *(() if head_weight is None else (torch.nn.functional.linear(x, head_weight),)))

    return call


def compressor_store(params: Params, device: torch.device) -> Call:
    """vLLM's Triton kernel for the indexer's keys, and for those of head 512 if CuTe is missing."""
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton

    head, ratio = params["head"], params["ratio"]
    layout = {"quant_block": 64, "token_stride": 576, "scale_dim": 8}
    if head == 128:
        layout = {"quant_block": 128, "token_stride": 128, "scale_dim": 4}

    def call(
        state_cache: torch.Tensor, kv_cache: torch.Tensor, kv_slot_mapping: torch.Tensor, **x: Any
    ) -> torch.Tensor:
        compress_norm_rope_store_triton(
            state_cache=state_cache, num_actual=kv_slot_mapping.shape[0], block_size=state_cache.shape[1],
            state_width=state_cache.shape[2] // 2, kv_cache=kv_cache,
            k_cache_metadata=SimpleNamespace(slot_mapping=kv_slot_mapping), pdl_kwargs={"launch_pdl": False},
            head_dim=head, rope_head_dim=64, overlap=ratio == 4, use_fp4_cache=False, **layout, **x,
        )  # fmt: skip
        return kv_cache

    return call


def topk(name: str) -> Callable[[Params, torch.device], Call]:
    """Return a maker for one of vLLM's three CUDA kernels. Rows start at multiples of 16 bytes, as DeepGEMM's do."""

    def make(params: Params, device: torch.device) -> Call:
        import vllm._custom_ops as ops

        rows, width = params["rows"], params["width"]
        if name == "cooperative_topk" and rows > COOPERATIVE_ROWS:
            raise ValueError(f"{rows} rows, takes up to {COOPERATIVE_ROWS}")
        scores = torch.empty((rows, -(-width // 4) * 4), device=device)[:, :width]
        out = torch.empty((rows, params["k"]), dtype=torch.int32, device=device)
        workspace = torch.zeros((WORKSPACE,), dtype=torch.uint8, device=device)
        starts = torch.zeros((rows,), dtype=torch.int32, device=device)
        filled: list[bool] = []

        def call(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
            if not filled:
                scores.copy_(logits)
                filled.append(True)
            if name == "top_k_per_row_prefill":
                ops.top_k_per_row_prefill(
                    scores, starts, lengths, out, rows, scores.stride(0), scores.stride(1), k
                )  # fmt: skip
            else:
                getattr(torch.ops._C, name)(scores, lengths, out, workspace, k, width)
            return out

        return call

    return make


def prefill_lists(params: Params, device: torch.device) -> Call:
    """One launch fills the lists with −1, one writes them; vLLM passes buffers of its workspace."""
    from vllm.models.deepseek_v4.common.ops.cache_utils import combine_topk_swa_indices

    tokens = sum(count for count, _ in params["requests"])
    width = -(-(params["topk"] + params["window"]) // 128) * 128
    indices = torch.empty((tokens, width), dtype=torch.int32, device=device)
    lengths = torch.empty((tokens,), dtype=torch.int32, device=device)

    def call(
        chosen: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, gather_lens: torch.Tensor,
        topk: int, ratio: int, window: int, rows: int, first: int,
    ) -> Any:  # fmt: skip
        entries = chosen[:, :topk] if topk else chosen
        return combine_topk_swa_indices(
            entries, query_start_loc, seq_lens, gather_lens, window, ratio, topk, rows, first, out=(indices, lengths)
        )

    return call


def register() -> None:
    """Register providers that the engine's own lack, and the engine's own for the second half of the registry."""
    tilelang = missing("tilelang")
    for operation, function, rough in (
        ("mhc_pre", "mhc_pre_tilelang", TF32),
        ("mhc_post", "mhc_post_tilelang", ""),
        ("mhc_head", "hc_head_fused_kernel_tilelang", TF32),
    ):
        register_provider(operation, Provider("vLLM TileLang", tilelang, mhc(function), rough))
    register_provider("mhc_pre_broadcast", Provider("vLLM TileLang", tilelang, mhc_broadcast, TF32))
    (seam,), (cute,) = providers.of(Op.MHC), providers.of(Op.COMPRESSOR)
    register_provider("mhc_post_pre", replace(seam, name="vLLM TileLang", missing=tilelang, rough=TF32))
    register_provider("compressor_store", replace(cute, name="vLLM CuTe", missing=missing("cutlass"), rough=BOUNDARY))
    for name, label in (
        ("cooperative_topk", "cooperative"), ("persistent_topk", "persistent"), ("top_k_per_row_prefill", "per row")
    ):  # fmt: skip
        register_provider("topk", Provider(f"vLLM {label}", missing(), topk(name), TIES))
    shifted = "moves entries of −1 by the request's first row, too"
    for operation, label, make, rough in (
        ("compressor_save", "vLLM Triton", compressor_save, ""),
        ("projections", "vLLM", projections, ""),
        ("compressor_store", "vLLM Triton", compressor_store, BOUNDARY),
        ("compressor_store_indexer", "vLLM Triton", compressor_store, BOUNDARY),
        ("indexer_query", "vLLM Triton", indexer_query, BOUNDARY),
        ("mla_prefill_lists", "vLLM Triton", prefill_lists, shifted),
        ("front_norm", "vLLM Triton", providers.front_norm, BOUNDARY),
        ("front_insert", "vLLM CUDA", providers.front_insert, BOUNDARY),
        ("router", "vLLM", providers.gate, TIES),
    ):
        register_provider(operation, Provider(label, missing(), make, rough))
