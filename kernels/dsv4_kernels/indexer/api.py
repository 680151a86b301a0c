"""The indexer's queries and scores as operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect, multiprocessors, native_mx
from dsv4_kernels.indexer.configs import (
    MANY_REQUESTS,
    PREFILL,
    QUERY_HEADS,
    LogitsConfig,
    padded_heads,
    rows_at_once,
    select_paged,
    select_prefill,
)
from dsv4_kernels.indexer.inputs import logits_inputs, paged_inputs, query_inputs
from dsv4_kernels.indexer.kernel import indexer_logits_kernel, indexer_paged_logits_kernel, indexer_query_kernel
from dsv4_kernels.indexer.reference import indexer_logits, indexer_paged_logits, indexer_query
from dsv4_kernels.launch import Launcher
from dsv4_kernels.plan import SUPPORTED, Plan, Support, check_tensor, require_thawed
from dsv4_kernels.registry import Operation, Tolerance, case

_indexer_logits = Launcher(indexer_logits_kernel)
_indexer_paged_logits = Launcher(indexer_paged_logits_kernel)
_indexer_query = Launcher(indexer_query_kernel)

_F32, _I32 = torch.float32, torch.int32


class IndexerPlan(Plan):
    """Common part of the plans of the indexer's operations: `heads` and the device."""

    def __init__(self, operation: str, heads: int, device: torch.device, arch: Arch | None, **shape: int) -> None:
        require_thawed(operation)
        self.operation, self.device, self.heads = operation, device, heads
        self.arch = arch or detect(device) or DEFAULT_ARCH
        self.shape = {"heads": heads, **shape}
        support = is_supported(self.shape, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.padded = padded_heads(heads)
        self.mx = operation != "indexer_query" and native_mx(self.arch)


class QueryPlan(IndexerPlan):
    """`indexer_query` of up to `tokens` tokens; results are views of the plan's buffers."""

    def __init__(self, tokens: int, heads: int, device: torch.device, arch: Arch | None = None) -> None:
        super().__init__("indexer_query", heads, device, arch)
        self.tokens = tokens
        self.q = torch.empty((tokens, heads, 128), dtype=torch.uint8, device=device)
        self.weights = torch.empty((tokens, heads), dtype=_F32, device=device)

    def run(
        self,
        *,
        positions: torch.Tensor,
        index_q: torch.Tensor,
        index_q_cos_sin_cache: torch.Tensor,
        index_weights: torch.Tensor,
        index_weights_softmax_scale: float,
        index_weights_head_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (q uint8 [T, H, 128], weights float32 [T, H])."""
        tokens, heads = int(index_q.shape[0]), self.heads
        check_tensor("index_q", index_q, torch.bfloat16, (None, heads, 128))
        check_tensor("positions", positions, torch.int64, (tokens,))
        check_tensor("index_q_cos_sin_cache", index_q_cos_sin_cache, _F32, (None, 64))
        if index_weights.dtype not in (torch.bfloat16, _F32):
            raise ValueError(f"index_weights has dtype {index_weights.dtype}, needs bf16 or float32")
        check_tensor("index_weights", index_weights, index_weights.dtype, (tokens, heads))
        if tokens > self.tokens:
            raise ValueError(f"index_q has {tokens} tokens, the plan holds {self.tokens}")
        if tokens:
            _indexer_query[(tokens, -(-heads // QUERY_HEADS))](
                q_ptr=index_q, position_ptr=positions, cos_sin_ptr=index_q_cos_sin_cache, weight_ptr=index_weights,
                out_ptr=self.q.view(torch.float8_e4m3fn), out_weight_ptr=self.weights,
                softmax_scale=index_weights_softmax_scale, head_scale=index_weights_head_scale, H=heads,
                BH=QUERY_HEADS,
                num_warps=4, num_stages=1,
            )  # fmt: skip
        return self.q[:tokens], self.weights[:tokens]

    def warmup(self) -> None:
        """With weights of both types."""
        for dtype in (torch.bfloat16, _F32):
            inputs = query_inputs({"tokens": min(self.tokens, 1), "heads": self.heads}, self.device, 0)
            self.run(**{**inputs, "index_weights": inputs["index_weights"].to(dtype)})


class LogitsPlan(IndexerPlan):
    """`indexer_logits`; any count of rows and keys."""

    def __init__(self, heads: int, device: torch.device, arch: Arch | None = None) -> None:
        super().__init__("indexer_logits", heads, device, arch)
        self.multiprocessors = multiprocessors(device, self.arch)

    def run(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write into out and return it."""
        rows, keys = int(q.shape[0]), int(k.shape[0])
        check_tensor("q", q.view(torch.uint8), torch.uint8, (None, self.heads, 128))
        check_tensor("k", k.view(torch.uint8), torch.uint8, (None, 128))
        check_tensor("k_scale", k_scale, _F32, (keys,))
        check_tensor("weights", weights, _F32, (rows, self.heads))
        check_tensor("cu_seqlen_ks", cu_seqlen_ks, _I32, (rows,))
        check_tensor("cu_seqlen_ke", cu_seqlen_ke, _I32, (rows,))
        _check_out(out, rows)
        if rows and keys:
            config = select_prefill(self.arch, rows, keys, self.multiprocessors)
            self._launch(
                config, q=q, k=k, k_scale=k_scale, weights=weights, cu_seqlen_ks=cu_seqlen_ks,
                cu_seqlen_ke=cu_seqlen_ke, out=out,
            )  # fmt: skip
        return out

    def _launch(self, c: LogitsConfig, **x: torch.Tensor) -> None:
        rows, keys = int(x["q"].shape[0]), int(x["k"].shape[0])
        _indexer_logits[(-(-keys // c.block_n), -(-rows // c.block_m))](
            q_ptr=x["q"].view(torch.float8_e4m3fn), k_ptr=x["k"].view(torch.float8_e4m3fn), k_scale_ptr=x["k_scale"],
            weight_ptr=x["weights"], start_ptr=x["cu_seqlen_ks"], end_ptr=x["cu_seqlen_ke"], out_ptr=x["out"],
            rows=rows, keys=keys, out_stride=x["out"].stride(0), H=self.heads, HP=self.padded, BM=c.block_m,
            BN=c.block_n, MX=self.mx,
            num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip

    def warmup(self) -> None:
        """Every configuration, with one row and one key: the numbers that select them are far apart."""
        inputs = logits_inputs({"rows": 1, "keys": 1, "heads": self.heads}, self.device, 0)
        for config in PREFILL:
            self._launch(config, **inputs)


class PagedLogitsPlan(IndexerPlan):
    """`indexer_paged_logits` with `next_n` rows per request and contexts of up to `keys` keys."""

    def __init__(
        self,
        next_n: int,
        keys: int,
        heads: int,
        device: torch.device,
        page: int = 64,
        stride: int | None = None,
        arch: Arch | None = None,
    ) -> None:
        super().__init__("indexer_paged_logits", heads, device, arch, page=page, stride=stride or page * 132)
        self.next_n, self.keys, self.page, self.stride = next_n, keys, page, stride or page * 132
        self.multiprocessors = multiprocessors(device, self.arch)

    def run(
        self,
        *,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write into out and return it."""
        batch = int(q.shape[0])
        check_tensor("q", q.view(torch.uint8), torch.uint8, (None, self.next_n, self.heads, 128))
        check_tensor("weights", weights, _F32, (batch * self.next_n, self.heads))
        check_tensor("context_lens", context_lens, _I32, (batch, self.next_n))
        if block_tables.dtype != _I32 or block_tables.shape[0] < batch or block_tables.stride(1) != 1:
            raise ValueError(f"block_tables must be int32 [{batch}, ·] with contiguous rows")
        rows_apart = kv_cache.stride()[1:] != (132, 1) or (kv_cache.shape[0] > 1 and kv_cache.stride(0) != self.stride)
        if kv_cache.dtype != torch.uint8 or tuple(kv_cache.shape[1:]) != (self.page, 132) or rows_apart:
            raise ValueError(f"kv_cache must be uint8 [pages, {self.page}, 132], pages {self.stride} bytes apart")
        if kv_cache.data_ptr() % 16:
            raise ValueError("kv_cache starts at an address that is no multiple of 16 bytes")
        _check_out(out, batch * self.next_n)
        if batch:
            at_once = rows_at_once(self.next_n, self.heads)
            c = select_paged(self.arch, batch, at_once)
            programs = -(-c.waves * self.multiprocessors // batch)
            programs = max(1, min(programs, -(-self.keys // c.block_n)))
            _indexer_paged_logits[(batch, programs)](
                q_ptr=q.view(torch.float8_e4m3fn), cache_ptr=kv_cache.view(torch.float8_e4m3fn), weight_ptr=weights,
                length_ptr=context_lens, table_ptr=block_tables, out_ptr=out, table_stride=block_tables.stride(0),
                out_stride=out.stride(0), NEXT_N=self.next_n, H=self.heads, HP=self.padded,
                LP=at_once, PAGE=self.page, CACHE_STRIDE=self.stride,
                BN=c.block_n, MX=self.mx,
                num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip
        return out

    def warmup(self) -> None:
        """Few requests and many."""
        for batch in (1, MANY_REQUESTS):
            params = {"batch": batch, "next_n": self.next_n, "keys": 1, "heads": self.heads, "page": self.page}
            self.run(**paged_inputs({**params, "stride": self.stride}, self.device, 0))


def _check_out(out: torch.Tensor, rows: int) -> None:
    if out.dtype != _F32 or out.dim() != 2 or out.shape[0] < rows or (out.numel() and out.stride(1) != 1):
        raise ValueError(f"out must be float32 [{rows}, ·] with contiguous rows, is {out.dtype} {tuple(out.shape)}")


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any counts and pages; up to 128 heads; pages that start at multiples of 16 bytes."""
    if not 0 < params["heads"] <= 128:
        return Support(f"indexer: {params['heads']} heads, needs 1 to 128")
    stride = params.get("stride", params.get("page", 4) * 132)
    if stride % 16:
        return Support(f"indexer: pages are {stride} bytes apart, needs a multiple of 16")
    return SUPPORTED


def _bytes_of_logits(params: Mapping[str, Any]) -> int:
    """Each key once, and each score."""
    rows, keys, heads = int(params["rows"]), int(params["keys"]), int(params["heads"])
    return keys * 132 + rows * (heads * 132 + 4 * keys)


_LOGITS = Tolerance(diff=5e-6, rms=4e-3)
_E4M3 = Tolerance(e4m3=True, relative=2.0**-3, absolute=2.0**-9, mismatch=1e-3)

OPERATIONS = (
    Operation(
        name="indexer_query",
        summary="RoPE and quantise the indexer's queries, scales folded into the weights",
        folder="indexer",
        outputs=("q", "weights"),
        cases=(
            case("empty", "cpu gpu", tokens=0, heads=64),
            case("odd", "cpu gpu", tokens=5, heads=17),
            case("t1", "cpu gpu bench", tokens=1, heads=64),
            case("t4096", "gpu bench", tokens=4096, heads=64),
        ),
        make_inputs=query_inputs,
        reference=indexer_query,
        plan=lambda p, device, arch: QueryPlan(p["tokens"], p["heads"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * p["heads"] * (3 * 128 + 6),
        flops=lambda p: 0,
        tolerance=(_E4M3, Tolerance(relative=1e-6, mismatch=1e-3)),
    ),
    Operation(
        name="indexer_logits",
        summary="the indexer's scores of contiguous keys (prefill)",
        folder="indexer",
        outputs=("logits",),
        cases=(
            case("empty", "cpu gpu", rows=0, keys=64, heads=64),
            case("few", "cpu gpu", rows=5, keys=70, heads=64),
            case("heads8", "cpu gpu", rows=3, keys=130, heads=8),
            case("rows", "cpu gpu", rows=67, keys=33, heads=16),
            case("many", "gpu", rows=333, keys=3001, heads=64),
            case("s2048-n2048", "gpu bench", rows=2048, keys=2048, heads=64, dense=True),
            case("s2048-n32768", "bench", rows=2048, keys=32768, heads=64, dense=True),
        ),
        make_inputs=logits_inputs,
        reference=indexer_logits,
        plan=lambda p, device, arch: LogitsPlan(p["heads"], device, arch),
        is_supported=is_supported,
        nbytes=_bytes_of_logits,
        flops=lambda p: 2 * p["rows"] * p["keys"] * p["heads"] * 128,
        tolerance=(_LOGITS,),
        mutates=("out",),
    ),
    Operation(
        name="indexer_paged_logits",
        summary="the indexer's scores of paged keys (decode)",
        folder="indexer",
        outputs=("logits",),
        cases=(
            case("empty", "cpu gpu", batch=0, next_n=1, keys=64, heads=64, page=64),
            case("one", "cpu gpu", batch=2, next_n=1, keys=150, heads=64, page=64),
            case("next3", "cpu gpu", batch=3, next_n=3, keys=77, heads=16, page=4),
            case("apart", "cpu gpu", batch=2, next_n=2, keys=200, heads=64, page=60, stride=9216),
            case("next5", "gpu", batch=7, next_n=5, keys=3333, heads=64, page=64),
            case("b1-n2048", "gpu bench", batch=1, next_n=1, keys=2048, heads=64, page=64, dense=True),
            case("b1-n262144", "gpu bench", batch=1, next_n=1, keys=262144, heads=64, page=64, dense=True),
            case("b8-n32768", "gpu bench", batch=8, next_n=1, keys=32768, heads=64, page=64, dense=True),
            case("b8-n32768-next2", "gpu bench", batch=8, next_n=2, keys=32768, heads=64, page=64, dense=True),
            case("b64-n8192", "gpu bench", batch=64, next_n=1, keys=8192, heads=64, page=64, dense=True),
        ),
        make_inputs=paged_inputs,
        reference=indexer_paged_logits,
        plan=lambda p, device, arch: PagedLogitsPlan(
            p["next_n"], p["keys"], p["heads"], device, p["page"], p.get("stride"), arch
        ),
        is_supported=is_supported,
        nbytes=lambda p: p["batch"] * (p["keys"] * (132 + 4 * p["next_n"]) + p["next_n"] * p["heads"] * 132),
        flops=lambda p: 2 * p["batch"] * p["next_n"] * p["keys"] * p["heads"] * 128,
        tolerance=(_LOGITS,),
        mutates=("out",),
    ),
)
