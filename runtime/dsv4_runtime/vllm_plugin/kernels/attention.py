"""vLLM's DeepSeek-V4 attention with bundled decode, prefill and output projection, over either of vLLM's CUDA classes.

vLLM's layer allocates the attention's output, fills it in `forward_mqa` (outside of piecewise graphs) and passes it to
`_o_proj` (inside of them). With `o_proj` bundled the output has the input format of the wo_a product: FP8 codes and
scales after the inverse rotation. Decode tokens need one launch for it (two if the work of a token is split), prefill
tokens an attention in bf16, vLLM's or the bundled one, and one more launch.

Prefill keeps vLLM's metadata, chunks of requests, workspace and gathers. The index lists and the attention over the
gathered rows are bundled (`dsv4_kernels.mla_prefill`) and replace FlashMLA or, on SM12x, FlashInfer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, detect, multiprocessors
from dsv4_kernels.fp8.api import GemmPlan, quantised_tokens
from dsv4_kernels.mla_decode.api import DecodePlan, MergePlan
from dsv4_kernels.mla_prefill.api import ListsPlan, PrefillPlan, list_width
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.choice import LOGGER, choice
from dsv4_runtime.vllm_plugin.kernels.hooks import Assignment, HookMismatchError, check_overrides, parameters
from dsv4_runtime.vllm_plugin.kernels.linear import SCALE, weight_bytes
from dsv4_runtime.vllm_plugin.kernels.plans import (
    DEVICE,
    announce,
    announced_plan,
    give_codes,
    pages,
    shared_plan,
    wanted_codes,
    whole_rows,
)
from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
    compute_global_topk_indices_and_lens,
    current_workspace_manager,
    dequantize_and_gather_k_cache,
    get_dspark_swa_index_width,
    get_forward_context,
)
from dsv4_runtime.vllm_plugin.loading import c128_width

OVERRIDDEN = (
    "get_padded_num_q_heads",
    "_alloc_attn_out",
    "forward_mqa",
    "_forward_prefill",
    "_forward_decode",
    "_o_proj",
)
"""Replaced methods of vLLM's attention classes."""


@dataclass
class Fp8Output:
    """The attention's output as input of the wo_a product: code uint8 [T, H, 512], scale uint8 [T, H, 4]."""

    code: torch.Tensor
    scale: torch.Tensor

    def rows(self, start: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of the tokens from `start` to `stop`."""
        return self.code[start:stop], self.scale[start:stop]


def attention_class(stock: type, model: Any, hf_config: Any) -> type:
    """Return the class with the chosen bundled operations for a layer for which vLLM selected `stock`.

    On SM12x vLLM selects a class that requires FlashInfer, whose kernels compile on the user's machine. With decode and
    prefill bundled none of its kernels would run: the layer then uses the class for FlashMLA, of which no kernel runs
    either.

    Args:
        stock: one of vLLM's CUDA attention classes of DeepSeek-V4.
        model: vLLM's module of the model, with all classes.
        hf_config: the model's configuration.
    """
    found = choice()
    # Images attend in both directions, which the bundled lists do not support.
    images = getattr(hf_config, "vision_n_layers", 0) > 0 and getattr(hf_config, "vision_max_n_token", 0) > 0
    here = found.bundled(Op.MLA_PREFILL) and not images
    if here and found.bundled(Op.MLA_DECODE) and stock is model.DeepseekV4FlashInferSM120Attention:
        stock = model.DeepseekV4FlashMLAAttention
    return bundled_class(stock, here) if here or any(map(found.bundled, (Op.MLA_DECODE, Op.O_PROJ))) else stock


def selection(module: ModuleType) -> list[Assignment]:
    """Return the assignment for the selection of attention classes in vLLM's model."""
    original = module._select_dsv4_attn_cls
    known = (module.DeepseekV4FlashMLAAttention, module.DeepseekV4FlashInferSM120Attention)
    taken = set(parameters(forward_prefill)) - {"layer"}
    for kind in known:
        check_overrides(BundledAttention, kind, OVERRIDDEN)
        # The class for FlashMLA also passes positions, which are dropped.
        if (given := set(parameters(kind._forward_prefill)) - {"self", "positions"}) != taken:
            raise HookMismatchError(f"{kind.__name__}._forward_prefill gets {sorted(given)}, expected {sorted(taken)}")

    @functools.wraps(original)
    def select(vllm_config: Any) -> Any:
        stock = original(vllm_config)
        if stock in known:
            return attention_class(stock, module, vllm_config.model_config.hf_config)
        _attention_stays(stock.__name__)
        return stock

    return [(module, "_select_dsv4_attn_cls", select)]


@functools.cache
def _attention_stays(kind: str) -> None:
    wanted = [op for op in (Op.MLA_DECODE, Op.MLA_PREFILL, Op.O_PROJ) if choice().bundled(op)]
    if wanted:
        LOGGER.warning(
            "dsv4 kernels: %s stays with vLLM's own kernels (attention is of %s, which is not known here)",
            ", ".join(wanted), kind,
        )  # fmt: skip


def window_columns(vllm_config: Any, window: int) -> int:
    """Return the number of columns of decode's window indices in the layers of `vllm_config`.

    Tokens of a block drafted by DSpark attend to the whole block besides the window: only the layers of that model have
    a non-causal attention configuration.
    """
    drafts = vllm_config.speculative_config
    if drafts is None or not drafts.use_dspark() or not vllm_config.attention_config.use_non_causal:
        return window
    return int(get_dspark_swa_index_width(window, drafts.num_speculative_tokens))


@functools.cache
def bundled_class(stock: type, prefill_here: bool) -> type:
    """Return `stock`, one of vLLM's CUDA attention classes of DeepSeek-V4, with the bundled operations."""
    return type(f"Bundled{stock.__name__}", (BundledAttention, stock), {"_prefill_here": prefill_here})


class BundledAttention:
    """Mixin for vLLM's attention classes; see the module docstring for the order of calls."""

    _prefill_here = False

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """Return the padded heads of q: FlashMLA's 64 or 128 only if one of its kernels runs."""
        if cls._prefill_here and choice().bundled(Op.MLA_DECODE) and num_heads <= 128:
            return next(padded for padded in (8, 16, 32, 64, 128) if num_heads <= padded)
        return int(super().get_padded_num_q_heads(num_heads))  # type: ignore[misc]

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        scheduler = vllm_config.scheduler_config
        capture = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._most_tokens = max(scheduler.max_num_batched_tokens, capture)
        drafts = vllm_config.speculative_config.num_speculative_tokens if vllm_config.speculative_config else 0
        self._most_decodes = min(self._most_tokens, max(scheduler.max_num_seqs * (1 + drafts), capture))
        self._decode_here = choice().bundled(Op.MLA_DECODE)
        self._window_columns = window_columns(vllm_config, self.window_size)
        self._o_proj_here = choice().bundled(Op.O_PROJ)
        self._target: tuple[Fp8Output, torch.Tensor] | None = None
        if self._prefill_here:
            self.prefill_plans = make_prefill_plans(self)
        if self._o_proj_here:
            announce(MergePlan, "mla_merge_o8", 1, self._most_tokens, self.n_local_heads, DEVICE)
            device, sizes = self.attn_sink.device, (self.o_lora_rank, self._group_width, self.n_local_groups)
            arch = detect(device) or DEFAULT_ARCH
            # If the wo_b product uses codes, the wo_a product writes them.
            wanted = wanted_codes(self.n_local_groups * self.o_lora_rank)
            self._z_quantised = min(wanted, quantised_tokens(arch, *sizes, multiprocessors(device, arch)))
            announce(GemmPlan, self._most_tokens, *sizes, DEVICE, quantised=self._z_quantised)
            self._output = shared_plan(
                ("mla_output", self.n_local_heads, self._most_tokens), functools.partial(_Output, self)
            )

    @property
    def _group_width(self: Any) -> int:
        return int(self.n_local_heads) // int(self.n_local_groups) * 512

    def _alloc_attn_out(self: Any, num_tokens: int, hidden_states: torch.Tensor) -> Any:
        if not self._o_proj_here:
            return super()._alloc_attn_out(num_tokens, hidden_states)  # type: ignore[misc]
        return self._output.first(num_tokens)

    def forward_mqa(self: Any, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: Any) -> None:
        """Fill `output` for the tokens of `q` [T, padded heads, 512], decodes first."""
        if self._prefill_here and get_forward_context().attn_metadata is None:
            reserve_prefill(self)
        if not isinstance(output, Fp8Output):
            super().forward_mqa(q, kv, positions, output)  # type: ignore[misc]
            return
        metadata = get_forward_context().attn_metadata
        rows = torch.empty_like(q)
        self._target = (output, positions)
        try:
            super().forward_mqa(q, kv, positions, rows)  # type: ignore[misc]
        finally:
            self._target = None
        if metadata is None:
            # Dummy run of vLLM, which only reserves memory.
            output.code.zero_()
            output.scale.zero_()
            return
        done = metadata[self.swa_cache_layer.prefix].num_decode_tokens if self._decode_here else 0
        if done < q.shape[0]:
            self._quantize(rows[done:], positions[done:], output.rows(done))

    def _quantize(
        self: Any, rows: torch.Tensor, positions: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Apply the inverse rotation to `rows` [T, padded heads, 512] and quantize: a merge of one part without a
        sink."""
        heads, tokens = self.n_local_heads, rows.shape[0]
        lse = self._output.lse[:, :tokens]
        # Written in each run: memory allocated with the layer does not survive an engine's sleep.
        self._output.merge.run(
            o=rows[:, :heads].contiguous().unsqueeze(0),
            lse=lse.zero_(),
            sink=self._output.sink.fill_(float("-inf")),
            positions=positions.clone() if positions.data_ptr() % 16 else positions,
            cos_sin=self.rotary_emb.cos_sin_cache,
            out=out,
        )

    def _forward_prefill(self: Any, **given: Any) -> None:
        if not self._prefill_here:
            super()._forward_prefill(**given)  # type: ignore[misc]
            return
        # The class for FlashMLA also passes positions, without use.
        given.pop("positions", None)
        forward_prefill(self, **given)

    def _forward_decode(
        self: Any,
        q: torch.Tensor,
        kv_cache: torch.Tensor | None,
        swa_metadata: Any,
        attn_metadata: Any,
        swa_only: bool,
        output: torch.Tensor,
    ) -> None:
        if not self._decode_here:
            super()._forward_decode(  # type: ignore[misc]
                q=q, kv_cache=kv_cache, swa_metadata=swa_metadata, attn_metadata=attn_metadata, swa_only=swa_only,
                output=output,
            )  # fmt: skip
            return
        tokens = swa_metadata.num_decode_tokens
        window = whole_rows(swa_metadata.decode_swa_indices, tokens)
        topk = window[:, :0]
        cache = swa_cache = pages(self.swa_cache_layer.kv_cache)
        if not swa_only:
            cache = pages(kv_cache)
            if self.compress_ratio == 4:
                topk = self.topk_indices_buffer[:tokens]
            else:
                topk = whole_rows(attn_metadata.c128a_global_decode_topk_indices, tokens)
        page = 64 if swa_only else attn_metadata.block_size // self.compress_ratio
        plan = self._decode_plan(
            window.shape[1], topk.shape[1], (swa_metadata.block_size, page), (swa_cache, cache),
            o8=self._target is not None,
        )  # fmt: skip
        inputs = {
            "swa_cache": swa_cache, "swa_idx": window, "swa_len": swa_metadata.decode_swa_lens[:tokens],
            "cmp_cache": cache, "cmp_idx": topk, "cmp_len": swa_metadata.decode_swa_lens[:tokens],
        }  # fmt: skip
        if not swa_only:
            inputs |= self._entries(plan, topk, swa_metadata, attn_metadata)
        heads = self.n_local_heads
        if self._target is None:
            lse = shared_plan(("mla_lse", self.padded_heads), functools.partial(_Scratch, self)).lse[:tokens]
            plan.run(q=q, sink=self.attn_sink, out=(output, lse), **inputs)
            return
        out, positions = self._target
        plan.run(
            q=q[:, :heads], sink=self.attn_sink[:heads], positions=positions[:tokens],
            cos_sin=self.rotary_emb.cos_sin_cache, out=out.rows(0, tokens), **inputs,
        )  # fmt: skip

    def _entries(
        self: Any, plan: DecodePlan, chosen: torch.Tensor, swa_metadata: Any, attn_metadata: Any
    ) -> dict[str, torch.Tensor | None]:
        """Return the entries of the compressed cache as inputs of `plan`: slots, or the inputs of their lookup.

        For ratio 4 the indexer selects entries per request; for ratio 128 vLLM's metadata contains the slots.
        """
        tokens = chosen.shape[0]
        if self.compress_ratio != 4:
            return {"cmp_idx": chosen, "cmp_len": attn_metadata.c128a_decode_topk_lens[:tokens]}
        table, valid = attn_metadata.block_table[: swa_metadata.num_decodes], swa_metadata.is_valid_token[:tokens]
        request = swa_metadata.token_to_req_indices
        if plan.looks_up(tokens):
            by = {"table": table, "request": request[:tokens], "counts": valid}
            return {"cmp_idx": chosen, "cmp_len": None, **by}
        page = attn_metadata.block_size // self.compress_ratio
        slots, lengths = compute_global_topk_indices_and_lens(chosen, request, table, page, valid)
        return {"cmp_idx": slots.view(tokens, -1), "cmp_len": lengths}

    def plan_decode_ahead(self: Any) -> None:
        """Make the plan of decode tokens, once the layer has its KV cache."""
        if not self._decode_here:
            return
        window = cache = pages(self.swa_cache_layer.kv_cache)
        page, topk = self.swa_cache_layer.kv_cache.shape[1], 0
        sizes = (page, 64)
        if self.compress_ratio > 1:
            cache = pages(self.kv_cache)
            sizes = (page, self.kv_cache.shape[1])
            topk = self.topk_indices_buffer.shape[-1] if self.compress_ratio == 4 else c128_width(self.max_model_len)
        self._decode_plan(self._window_columns, topk, sizes, (window, cache), self._o_proj_here)

    def _decode_plan(
        self: Any,
        window: int,
        topk: int,
        sizes: tuple[int, int],
        caches: tuple[torch.Tensor, torch.Tensor],
        o8: bool,
    ) -> DecodePlan:
        heads, device = self.n_local_heads if o8 else self.padded_heads, caches[0].device
        args = (self._most_decodes, heads, window, topk, device, sizes, (caches[0].stride(0), caches[1].stride(0)), o8)
        options = {"q_heads": self.padded_heads, "lookup": self.compress_ratio == 4}
        return announced_plan((Op.MLA_DECODE, *args, *options.values()), DecodePlan, *args, **options)

    def _o_proj(self: Any, o: Any, positions: torch.Tensor) -> torch.Tensor:
        if not isinstance(o, Fp8Output):
            return super()._o_proj(o, positions)  # type: ignore[misc]
        groups, tokens, weight = self.n_local_groups, o.code.shape[0], self.wo_a.weight
        width = self._group_width
        scale = getattr(self.wo_a, SCALE)
        plan = shared_plan(
            (Op.O_PROJ, groups, self.o_lora_rank, width, self._most_tokens, weight.device),
            lambda: GemmPlan(
                self._most_tokens, self.o_lora_rank, width, groups, weight.device, quantised=self._z_quantised
            ),
        )
        z = torch.empty((tokens, groups, self.o_lora_rank), dtype=torch.bfloat16, device=weight.device)
        plan.run(
            a=o.code.view(tokens, groups, width),
            a_scale=o.scale.view(tokens, groups, width // 128),
            w=weight_bytes(weight).view(groups, self.o_lora_rank, width),
            w_scale=scale.view(groups, -1, width // 128),
            out=z,
        )
        return self.wo_b(give_codes(z.flatten(1), plan.codes(tokens)))


class _Output:
    """Codes and scales of all tokens of a step, shared by all layers, and the merge for prefill tokens."""

    def __init__(self, layer: Any) -> None:
        heads, tokens, device = layer.n_local_heads, layer._most_tokens, layer.attn_sink.device
        self.code = torch.empty((tokens, heads, 512), dtype=torch.uint8, device=device)
        self.scale = torch.empty((tokens, heads, 4), dtype=torch.uint8, device=device)
        self.lse = torch.empty((1, tokens, heads), dtype=torch.float32, device=device)
        self.sink = torch.empty((heads,), dtype=torch.float32, device=device)
        self.merge = MergePlan("mla_merge_o8", 1, tokens, heads, device)

    def first(self, tokens: int) -> Fp8Output:
        """Return the rows of the first `tokens` tokens."""
        return Fp8Output(self.code[:tokens], self.scale[:tokens])

    def warmup(self) -> None:
        """Compile the merge of one part."""
        self.merge.warmup()


class _Scratch:
    """Buffer for unused log-sums with vLLM's output projection."""

    def __init__(self, layer: Any) -> None:
        size = (layer._most_decodes, layer.padded_heads)
        self.lse = torch.empty(size, dtype=torch.float32, device=layer.attn_sink.device)

    def warmup(self) -> None:
        """Compile nothing."""


def make_prefill_plans(layer: Any) -> tuple[PrefillPlan, ListsPlan]:
    """Return the plans of `layer`, made by the first layer of its kind, and announce their compilation.

    They do not depend on the cache and are made with the layer.
    """
    tokens, device = layer.max_num_batched_tokens, layer.attn_sink.device
    attention = (tokens, layer.padded_heads, list_width(_chosen_width(layer), layer.window_size))
    lists = (tokens, _chosen_width(layer), layer.compress_ratio)
    announce(PrefillPlan, *attention, DEVICE, own_output=False)
    announce(ListsPlan, *lists, DEVICE, window=layer.window_size, own_output=False)
    return (
        shared_plan((Op.MLA_PREFILL, *attention, device), lambda: PrefillPlan(*attention, device, own_output=False)),
        shared_plan(
            (Op.MLA_PREFILL, "lists", *lists, layer.window_size, device),
            lambda: ListsPlan(*lists, device, layer.window_size, own_output=False),
        ),
    )


def reserve_prefill(layer: Any) -> None:
    """Allocate the largest workspace in vLLM's dummy step: a locked workspace must not grow."""
    compressed = -(-layer.max_model_len // layer.compress_ratio) if layer.compress_ratio > 1 else 0
    _workspace(layer, layer.PREFILL_CHUNK_SIZE, compressed + layer.window_size + layer.max_num_batched_tokens)


def forward_prefill(
    layer: Any,
    *,
    q: torch.Tensor,
    compressed_k_cache: torch.Tensor | None,
    swa_k_cache: torch.Tensor,
    output: torch.Tensor,
    attn_metadata: Any,
    swa_metadata: Any,
) -> None:
    """Fill `output` for the prefill tokens of `q` [T, padded heads, 512], chunk by chunk of requests.

    `layer.prefill_plans` are from `make_prefill_plans`.
    """
    attention, lists = layer.prefill_plans
    decodes, starts = swa_metadata.num_decodes, swa_metadata.query_start_loc_cpu
    topk, ratio, window = lists.topk, layer.compress_ratio, layer.window_size
    chosen = _prefill_entries(layer, attn_metadata, swa_metadata)
    for first, last, entries, rows in swa_metadata.get_prefill_chunk_plan(
        compress_ratio=ratio, prefill_chunk_size=layer.PREFILL_CHUNK_SIZE
    ):
        kv, indices, lengths = _workspace(layer, last - first, rows)
        requests, seq_lens = slice(first, last), swa_metadata.prefill_seq_lens[first:last]
        gathered = swa_metadata.prefill_gather_lens[requests]
        if topk:
            dequantize_and_gather_k_cache(
                kv, compressed_k_cache, seq_lens=seq_lens // ratio, gather_lens=None,
                block_table=attn_metadata.block_table[decodes:][requests],
                block_size=attn_metadata.block_size // ratio, offset=0,
            )  # fmt: skip
        dequantize_and_gather_k_cache(
            kv, swa_k_cache, seq_lens=seq_lens, gather_lens=gathered,
            block_table=swa_metadata.block_table[decodes:][requests], block_size=swa_metadata.block_size,
            offset=entries,
        )  # fmt: skip
        begin, end = (int(starts[decodes + edge] - starts[decodes]) for edge in (first, last))
        tokens = slice(begin, end)
        found = lists.run(
            chosen=chosen[tokens], seq_lens=seq_lens, gather_lens=gathered, topk=topk, ratio=ratio, window=window,
            query_start_loc=swa_metadata.query_start_loc[decodes + first : decodes + last + 1], rows=rows,
            first=entries, out=(indices[: end - begin], lengths[: end - begin]),
        )  # fmt: skip
        attention.run(
            q=q[tokens], kv=kv.view(-1, kv.shape[-1]), indices=found[0], lengths=found[1], sink=layer.attn_sink,
            out=output[tokens],
        )  # fmt: skip


def _chosen_width(layer: Any) -> int:
    """Return the maximum number of compressed entries of a token in `layer`."""
    if layer.compress_ratio <= 1:
        return 0
    return int(layer.topk_indices_buffer.shape[-1] if layer.compress_ratio == 4 else c128_width(layer.max_model_len))


def _prefill_entries(layer: Any, attn_metadata: Any, swa_metadata: Any) -> torch.Tensor:
    """Return the compressed entries of each prefill token, int32 [T, at least the plan's topk]."""
    tokens = swa_metadata.num_prefill_tokens
    if layer.compress_ratio > 4:
        return whole_rows(attn_metadata.c128a_prefill_topk_indices, tokens)
    # Not read in a layer without compressed entries.
    begin = swa_metadata.num_decode_tokens
    found: torch.Tensor = layer.topk_indices_buffer[begin : begin + tokens]
    return found


def _workspace(layer: Any, requests: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return vLLM's workspace as rows bf16 [requests, rows, 512] and the lists of all tokens of a step."""
    tokens = layer.max_num_batched_tokens
    kv, indices, lengths = current_workspace_manager().get_simultaneous(
        ((requests, rows, layer.head_dim), torch.bfloat16),
        ((tokens, list_width(_chosen_width(layer), layer.window_size)), torch.int32),
        ((tokens,), torch.int32),
    )
    return kv, indices, lengths
