"""DeepSeek-V4's draft models on the CPU: vLLM's models for XPU over the layers for CPU.

vLLM 0.32 implements these models per platform, but not for the CPU (`models/deepseek_v4/cpu/{mtp,dspark}.py` raise
`NotImplementedError`). The models for XPU use portable operators; their XPU-specific symbols are replaced in place:
nothing else uses the XPU modules on a CPU. T is the number of tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.models.deepseek_v4.cpu.model import DeepseekV4DecoderLayer
from vllm.models.deepseek_v4.xpu import dspark, mtp


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension in float32; same type as `x`. Source: vLLM's `mtp_shared_head_rmsnorm`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def input_norms(
    embeds: Tensor, positions: Tensor, state: Tensor, e_weight: Tensor, h_weight: Tensor, eps: float, hc_mult: int
) -> tuple[Tensor, Tensor]:
    """Normalize the inputs of an MTP layer. Source: vLLM's `fused_mtp_input_rmsnorm`.

    Args:
        embeds: `[T, D]`, embeddings of the next tokens; zero at position 0.
        positions: int64 `[T]`.
        state: `[T, hc_mult, D]`, the target's residual streams.
        e_weight, h_weight: `[D]`.
    """
    shown = embeds.masked_fill((positions == 0)[:, None], 0)
    return rms_norm(shown, e_weight, eps), rms_norm(state.view(-1, hc_mult, embeds.shape[-1]), h_weight, eps)


class DraftAttention(DeepseekV4CPUAttention):  # type: ignore[misc]  # vLLM ships no types that strict mode accepts
    """The CPU's attention, extended to DSpark's block: its tokens attend to each other and to the preceding window."""

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attend over the listed slots of a block's metadata, else like the base class.

        Args:
            q: bfloat16 `[T, heads, 512]`.
            output: same shape and type, changed.
        """
        metadata = get_forward_context().attn_metadata
        window: Any = metadata.get(self.swa_cache_layer.prefix) if isinstance(metadata, dict) else None
        listed = None if window is None else window.decode_swa_indices
        if listed is None or window.decode_swa_width == self.window_size:
            super().forward_mqa(q, kv, positions, output)
            return
        slots = torch.full((len(q), window.decode_swa_width), -1)
        slots[: window.num_decode_tokens] = listed[: window.num_decode_tokens].flatten(1)
        cache = self.swa_cache_layer.kv_cache
        cache = cache.view(cache.shape[0], -1)
        none = slots[:, :0]
        torch.ops._C.flash_mla_with_kvcache_cpu(
            output, q, cache, slots, window.block_size, cache, none, 1, self.attn_sink, self.scale
        )


class DraftLayer(DeepseekV4DecoderLayer):  # type: ignore[misc]
    """The CPU's decoder layer with the attributes that the draft models use."""

    def __init__(
        self,
        vllm_config: Any,
        prefix: str,
        topk_indices_buffer: Tensor | None = None,
        aux_stream_list: None = None,
    ) -> None:
        super().__init__(vllm_config, prefix, topk_indices_buffer)
        self.attn.__class__ = DraftAttention
        self.ffn.use_mega_moe = False
        self.ffn.finalize_mega_moe_weights = lambda: None

    def hc_post(self, x: Tensor, residual: Tensor | None, post: Tensor | None, comb: Tensor | None) -> Tensor:
        """Mix a layer's output into the streams; without `residual`, `x` `[T, H, D]` is already mixed."""
        return x if residual is None else cast(Tensor, super().hc_post(x, residual, post, comb))


def insert_context(attn: Any, kv: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
    """Write keys of the target's tokens to the window cache of a draft layer.

    Args:
        kv: `[T, 512]`, normalized.
        positions, slot_mapping: int64 `[T]`; slot -1 is none.
    """
    window = attn.swa_cache_layer
    unread = kv.new_zeros(len(kv), attn.n_local_heads, attn.head_dim)
    ops.fused_qnorm_rope_kv_insert_cpu(
        unread, kv, positions, window.kv_cache.view(window.kv_cache.shape[0], -1), slot_mapping,
        attn.rotary_emb.cos_sin_cache, attn.padded_heads, attn.eps, window.block_size,
    )  # fmt: skip


class CpuDSpark(dspark.DSparkDeepseekV4ForCausalLM):  # type: ignore[misc]
    """DSpark's stages on the CPU."""

    draft_id_to_target_id = None  # same vocabulary


def _mixed(x: Tensor, residual: Tensor | None, post: Tensor | None, comb: Tensor | None) -> Tensor:
    return x  # the CPU's layers mix their own output


def mtp_model() -> type:
    """Return vLLM's MTP model over the CPU's layers."""
    mtp.DeepseekV4DecoderLayer = DraftLayer
    mtp._FUSED_MTP_INPUT_RMSNORM_KERNEL = input_norms
    mtp._MTP_SHARED_HEAD_RMSNORM_KERNEL = rms_norm
    return cast(type, mtp.DeepSeekV4MTP)


def dspark_model() -> type:
    """Return vLLM's DSpark model over the CPU's layers."""
    dspark.DeepseekV4DecoderLayer = DraftLayer
    dspark.MHCPostOp = lambda: _mixed
    dspark._insert_context_kv = insert_context
    return CpuDSpark
