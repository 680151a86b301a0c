"""Stand-ins for FlashInfer 0.7.2 and b12x 1.5.1: parameters and checks as in their sources, computed in torch.

`CALLS` records the arguments of each function as dtype and shape by name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from dsv4_kernels.mla_cache.api import mla_cache_read
from dsv4_kernels.moe.api import moe_w4a16

CALLS: list[dict[str, Any]] = []
FACTOR = [1.0]
"""Factor by which FlashInfer's results are multiplied."""


def note(**arguments: Any) -> None:
    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [str(value.dtype).removeprefix("torch."), *value.shape]
        return value if isinstance(value, (int, float, str, type(None))) else str(value)

    CALLS.append({name: told(value) for name, value in arguments.items()})


def need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def rows(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries [T, K, 512] and whether they count; fails on inputs that the package refuses."""
    pages, page, one, row = cache.shape
    need(cache.dtype == torch.uint8 and (one, row) == (1, 584) and cache.stride()[1:] == (584, 584, 1), "cache")
    need(cache.stride(0) % 16 == 0 and cache.stride(0) >= page * 584 and cache.data_ptr() % 16 == 0, "stride of pages")
    tokens = lengths.shape[0]
    need(indices.shape in ((tokens, indices.shape[-1]), (tokens, 1, indices.shape[-1])), "indices")
    need(indices.dtype == lengths.dtype == torch.int32 and lengths.dim() == 1, "int32")
    need(indices.is_contiguous(), "prefill needs dense indices")
    slots = indices.reshape(tokens, -1)
    need(int(slots.max()) < pages * page, "an index that is behind a length is looked at, too")
    counted = (torch.arange(slots.shape[1]) < lengths[:, None]) & (slots >= 0)
    flat = cache.as_strided((pages, cache.stride(0)), (cache.stride(0), 1))
    found = mla_cache_read(flat, slots.flatten().long(), page, exact=True)
    return found.view(*slots.shape, 512), counted


def trtllm_batch_decode_sparse_mla_dsv4(
    query, swa_kv_cache, workspace_buffer, sparse_indices=None, compressed_kv_cache=None, sparse_topk_lens=None,
    seq_lens=None, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, kv_layout="HND", cum_seq_lens_q=None,
    max_q_len=None, enable_pdl=None, swa_topk_lens=None, extra_sparse_indices=None, extra_sparse_topk_lens=None,
    backend="auto", hca_swa_indices=None, hca_compressed_block_tables=None, hca_seq_lens=None, hca_is_causal=True,
    hca_use_persistent=False, hca_sparse_indices_format=None, remapped_sparse_indices_buffer=None,
    sparse_indices_are_storage_offsets=None, dsv4_inv_rope_cos_sin_cache=None, dsv4_output_scale=None,
    sparse_topk_lens_offset=0, multi_ctas_kv_counter_buffer=None, *, kv_cache_format="fp8",
):  # type: ignore[no-untyped-def]  # fmt: skip
    note(
        query=query, swa=swa_kv_cache, workspace=workspace_buffer, sparse_indices=sparse_indices, out=out,
        compressed=compressed_kv_cache, scale=bmm1_scale, sinks=sinks, kv_layout=kv_layout, lens=swa_topk_lens,
        extra=extra_sparse_indices, extra_lens=extra_sparse_topk_lens,
    )  # fmt: skip
    tokens, heads, width = query.shape
    need(query.dtype == torch.bfloat16 and width == 512 and query.is_contiguous(), "query")
    need(heads in (8, 16, 32, 64, 128), "heads")
    need(kv_layout == "NHD" and isinstance(bmm1_scale, float), "layout and scale")
    need(out.shape == query.shape and out.dtype == torch.bfloat16, "out")
    need(sinks.shape == (heads,) and sinks.dtype == torch.float32 and not bool((sinks == torch.inf).any()), "sinks")
    need((extra_sparse_indices is None) == (extra_sparse_topk_lens is None), "both or neither")
    if tokens > 64:
        need(sparse_indices.shape[-1] % 64 == 0, "prefill's first segment is of a multiple of 64")
    parts = [rows(swa_kv_cache, sparse_indices, swa_topk_lens)]
    if extra_sparse_indices is not None:
        parts.append(rows(compressed_kv_cache, extra_sparse_indices, extra_sparse_topk_lens))
    kv, counted = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1)
    score = bmm1_scale * torch.einsum("thd,tkd->thk", query.double(), kv)
    score = score.masked_fill(~counted[:, None], -torch.inf)
    with_sink = torch.cat((score, sinks.double()[None, :, None].expand(tokens, heads, 1)), 2)
    weight = with_sink.softmax(2)[..., :-1].nan_to_num()
    out.copy_(FACTOR[0] * torch.einsum("thk,tkd->thd", weight, kv))
    return out


def mm_block_fp8(
    lhs_values: torch.Tensor, lhs_scale: torch.Tensor, rhs_values: torch.Tensor, rhs_scale: torch.Tensor, *,
    plan: Any = None, out_dtype: torch.dtype = torch.bfloat16, stream: object = None,
) -> torch.Tensor:  # fmt: skip
    note(lhs=lhs_values, lhs_scale=lhs_scale, rhs=rhs_values, rhs_scale=rhs_scale, out_dtype=out_dtype)
    need(lhs_values.dtype == rhs_values.dtype == torch.float8_e4m3fn, "codes")
    need(lhs_scale.dtype == rhs_scale.dtype == torch.float32, "scales")
    need(lhs_scale.is_contiguous() and rhs_scale.is_contiguous(), "compact scales")
    a = lhs_values.double() * lhs_scale.double().repeat_interleave(128, 1)
    w = rhs_values.double() * rhs_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (a @ w.T).to(out_dtype)


@dataclass
class Caps:
    """Parameters of `b12x.moe.fused_moe.Caps`."""

    max_tokens: int
    num_topk: int
    device: Any
    weight_plan: Any
    quant_mode: str
    decode_config: Any = None
    core_token_counts: Any = None
    route_num_experts: int | None = None
    route_logits_dtype: Any = None
    apply_router_weight_on_input: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    collect_activation_amax: bool = False
    deterministic_output: bool | None = None
    w4a16_block_size_m: int | None = None
    w4a16_fast_math: bool = True
    w4a16_prefill_fused_sum: bool | None = None
    frozen: bool = True


def plan_weights(
    *, quant_modes: Any, source_format: str, activation: str, params_dtype: torch.dtype, num_experts: int,
    hidden_size: int, intermediate_size: int, w13_layout: str = "w13",
) -> Any:  # fmt: skip
    note(modes=quant_modes, source=source_format, activation=activation, layout=w13_layout, dtype=params_dtype)
    # As in the package, the prepared weights replace the layer's.
    return SimpleNamespace(discards_source_parameters=True, sizes=(num_experts, hidden_size, intermediate_size))


def prepare_weights(
    *, plan: Any, params_dtype: torch.dtype, w1_fp4: torch.Tensor, w2_fp4: torch.Tensor, w1_global_scale: torch.Tensor,
    w2_global_scale: torch.Tensor, w1_blockscale: torch.Tensor, w2_blockscale: torch.Tensor, a1_gscale: torch.Tensor,
    a2_gscale: torch.Tensor,
) -> Any:  # fmt: skip
    experts, hidden, inter = plan.sizes
    need(w1_fp4.shape == (experts, 2 * inter, hidden // 2) and w1_fp4.dtype == torch.uint8, "w1")
    need(w2_fp4.shape == (experts, hidden, inter // 2) and w2_fp4.dtype == torch.uint8, "w2")
    need(w1_blockscale.shape == (experts, 2 * inter, hidden // 32), "scales of w1")
    need(w2_blockscale.shape == (experts, hidden, inter // 32), "scales of w2")
    return SimpleNamespace(
        plan=plan, w1_fp4=w1_fp4, w1_blockscale=w1_blockscale, w2_fp4=w2_fp4, w2_blockscale=w2_blockscale,
        num_experts=experts, hidden_size=hidden, intermediate_size=inter,
    )  # fmt: skip


def plan(caps: Caps, *, prewarm_launches: bool = True) -> Any:
    spec = SimpleNamespace(name="scratch", shape=(1000,), dtype=torch.uint8, device=caps.device)
    return SimpleNamespace(caps=caps, scratch_specs=lambda: (spec,))


def bind(
    plan: Any, *, scratch: torch.Tensor, a: torch.Tensor, experts: Any, topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, output: torch.Tensor | None = None, input_scales_static: bool = False,
    fast_math: bool | None = None, unit_scale_contract: bool = False,
) -> Any:  # fmt: skip
    note(scratch=scratch, a=a, ids=topk_ids, weights=topk_weights, output=output, limit=plan.caps.swiglu_limit)
    need(scratch.dtype == torch.uint8 and scratch.numel() >= 1000, "scratch")
    need(topk_ids.dtype == torch.int32 and topk_weights.dtype == torch.float32, "routing")
    return SimpleNamespace(a=a, experts=experts, ids=topk_ids, weights=topk_weights, output=output)


def run(*, binding: Any) -> None:
    e = binding.experts
    made = moe_w4a16(
        binding.a, binding.ids, binding.weights, e.w1_fp4, e.w1_blockscale, e.w2_fp4, e.w2_blockscale
    )  # fmt: skip
    binding.output.copy_(made)


def install() -> None:
    """Make the packages importable, as if installed."""
    decode = trtllm_batch_decode_sparse_mla_dsv4
    shapes = {(heads, window) for heads in (8, 16, 32, 64, 128) for window in (64, 128)}
    there = {"is_supported": lambda device=None: True}
    moe = {f.__name__: f for f in (Caps, plan_weights, prepare_weights, plan, bind, run)}
    found: dict[str, dict[str, Any]] = {
        "flashinfer": {},
        "flashinfer.autotuner": {"autotune": run},
        "flashinfer.decode": {decode.__name__: decode, "trtllm_batch_decode_with_kv_cache_mla": run},
        "flashinfer.mla": {},
        "flashinfer.mla._sparse_mla_sm120": {"_DECODE_DSV4_DISPATCH": shapes},
        "b12x": {},
        "b12x.gemm": {},
        "b12x.gemm.blockscaled": {**there, "mm_block_fp8": mm_block_fp8},
        "b12x.moe": {},
        "b12x.moe.fused_moe": {**there, **moe},
    }
    for name, symbols in found.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update(symbols)
        sys.modules[name] = module
