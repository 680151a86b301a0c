"""Configurations, plans and registry rows of the indexer: queries, scores and selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_kernels.arch import Arch, multiprocessors, native_mx
from dsv4_kernels.indexer.kernel import (
    indexer_logits_kernel,
    indexer_paged_logits_kernel,
    indexer_query_kernel,
    topk_bound_kernel,
    topk_choose_kernel,
    topk_gather_kernel,
    topk_kernel,
)
from dsv4_kernels.indexer.reference import (
    indexer_logits,
    indexer_paged_logits,
    indexer_query,
    logits_inputs,
    paged_inputs,
    query_inputs,
    topk,
)
from dsv4_kernels.interpreter import interpreting
from dsv4_kernels.numerics import seeded
from dsv4_kernels.plan import BF16, F32, I32, I64, ROWS, SUPPORTED, U8, Input, Launcher, Plan, Size, Support
from dsv4_kernels.registry import Operation, Provider, Tolerance, case


@dataclass(frozen=True)
class LogitsConfig:
    """A tile is `block_n` keys. Prefill: `block_m` rows per program; decode: `waves` programs per multiprocessor."""

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 1
    waves: int = 1


QUERY_HEADS = 16


PREFILL = tuple(LogitsConfig(128, 4, 3, block_m=rows) for rows in (4, 16, 64))


def select_prefill(arch: Arch, rows: int, keys: int, multiprocessors: int) -> LogitsConfig:
    """Return the tile of a prefill's scores: keys stay while rows pass by, the more rows the more there are of both.

    About eight programs per multiprocessor were the fastest on an H200 for 512 to 8,192 rows and 128 to 32,768 keys
    (2026-11-24).
    """
    wanted = rows * -(-keys // PREFILL[0].block_n) // (8 * multiprocessors)
    return next((config for config in PREFILL if wanted < 2 * config.block_m), PREFILL[-1])


MANY_REQUESTS = 32


def select_paged(arch: Arch, batch: int, rows_at_once: int) -> LogitsConfig:
    """Return the tile of paged scores: rows stay while pages pass by, several tiles in flight.

    On sm_90 the fastest of 21 candidates with 1 and 8 requests, and with 64 (H200, 2026-11-24).
    """
    if arch is not Arch.SM_90:
        return LogitsConfig(64, 4, 4, waves=2)
    waves = 6 if batch >= MANY_REQUESTS else 4
    if rows_at_once > 1:
        return LogitsConfig(64, 4, 6, waves=waves)
    return LogitsConfig(64 if batch >= MANY_REQUESTS else 128, 4, 3, waves=waves)


def padded_heads(heads: int) -> int:
    """Columns of the product for one row."""
    return max(16, 1 << (heads - 1).bit_length())


def rows_at_once(next_n: int, heads: int) -> int:
    """Return how many rows of a request are in one product, a power of two: all of up to 128 columns, else 1.

    Beside queries that do not stay, two rows would not fit the registers of SM12x.
    """
    together = 1 << (next_n - 1).bit_length()
    return together if together * padded_heads(heads) <= 128 else 1


_indexer_logits = Launcher(indexer_logits_kernel)
_indexer_paged_logits = Launcher(indexer_paged_logits_kernel)
_indexer_query = Launcher(indexer_query_kernel)

_CODES = (U8, torch.float8_e4m3fn)


class IndexerPlan(Plan):
    """Common part of the plans of the indexer's operations: `heads` and the device."""

    def __init__(self, operation: str, heads: int, device: torch.device, arch: Arch | None, **shape: int) -> None:
        super().__init__(operation, {"heads": heads, **shape}, device, arch, is_supported)
        self.heads, self.padded = heads, padded_heads(heads)
        self.mx = operation != "indexer_query" and native_mx(self.arch)


class QueryPlan(IndexerPlan):
    """`indexer_query` of up to `tokens` tokens; results are views of the plan's buffers."""

    def __init__(self, tokens: int, heads: int, device: torch.device, arch: Arch | None = None) -> None:
        super().__init__("indexer_query", heads, device, arch)
        self.tokens = tokens
        self.inputs = self.declare(
            index_q=Input(BF16, (Size("tokens", most=tokens), heads, 128)),
            positions=Input(I64, ("tokens",)),
            index_q_cos_sin_cache=Input(F32, (None, 64)),
            index_weights=Input((BF16, F32), ("tokens", heads)),
        )
        self.q = torch.empty((tokens, heads, 128), dtype=torch.uint8, device=device)
        self.weights = torch.empty((tokens, heads), dtype=F32, device=device)

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
        self.inputs.check(
            index_q=index_q, positions=positions, index_q_cos_sin_cache=index_q_cos_sin_cache,
            index_weights=index_weights,
        )  # fmt: skip
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
        for dtype in (BF16, F32):
            inputs = query_inputs({"tokens": min(self.tokens, 1), "heads": self.heads}, self.device, 0)
            self.run(**{**inputs, "index_weights": inputs["index_weights"].to(dtype)})


class LogitsPlan(IndexerPlan):
    """`indexer_logits`; any count of rows and keys."""

    def __init__(self, heads: int, device: torch.device, arch: Arch | None = None) -> None:
        super().__init__("indexer_logits", heads, device, arch)
        self.inputs = self.declare(
            q=Input(_CODES, ("rows", heads, 128)),
            k=Input(_CODES, ("keys", 128)),
            k_scale=Input(F32, ("keys",)),
            weights=Input(F32, ("rows", heads)),
            cu_seqlen_ks=Input(I32, ("rows",)),
            cu_seqlen_ke=Input(I32, ("rows",)),
            out=_scores("rows"),
        )
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
        self.inputs.check(
            q=q, k=k, k_scale=k_scale, weights=weights, cu_seqlen_ks=cu_seqlen_ks, cu_seqlen_ke=cu_seqlen_ke, out=out
        )
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
        self.inputs = self.declare(
            q=Input(_CODES, ("batch", next_n, heads, 128)),
            context_lens=Input(I32, ("batch", next_n)),
            weights=Input(F32, (f"batch*{next_n}", heads)),
            block_tables=Input(I32, (Size(least="batch"), None), strides=ROWS, aligned=False),
            kv_cache=Input(U8, (None, page, 132), strides=(self.stride, 132, 1)),
            out=_scores(f"batch*{next_n}"),
        )
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
        self.inputs.check(
            q=q, context_lens=context_lens, weights=weights, block_tables=block_tables, kv_cache=kv_cache, out=out
        )
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


def _scores(rows: str) -> Input:
    return Input(F32, (Size(least=rows), None), strides=ROWS, aligned=False)


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any counts and pages; up to 128 heads; pages that start at multiples of 16 bytes."""
    if not 0 < params["heads"] <= 128:
        return Support(f"indexer: {params['heads']} heads, needs 1 to 128")
    stride = params.get("stride", params.get("page", 4) * 132)
    if stride % 16:
        return Support(f"indexer: pages are {stride} bytes apart, needs a multiple of 16")
    return SUPPORTED


_LOGITS = Tolerance(diff=5e-6, rms=4e-3)
_E4M3 = Tolerance(e4m3=True, relative=2.0**-3, absolute=2.0**-9, mismatch=1e-3)

_INDEXER = (
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
        nbytes=lambda p: p["keys"] * 132 + p["rows"] * (p["heads"] * 132 + 4 * p["keys"]),
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


# 32 warps with 16 keys per thread; the limit of spilled bytes is in `gate.plans`. Chunks of half the size need a third
# launch for 262,144 scores.
LARGEST = 16384
LEAST = 1024


@dataclass(frozen=True)
class Level:
    """One launch: every row of `width` scores or candidates in `parts` chunks."""

    width: int
    chunk: int
    parts: int

    @property
    def num_warps(self) -> int:
        """Sixteen keys per thread."""
        return max(4, self.chunk // 512)


def levels(width: int, k: int) -> tuple[Level, ...]:
    """The launches for rows of `width` scores; the last has one part."""
    found: list[Level] = []
    while True:
        chunk = min(max(LEAST, 1 << max(0, width - 1).bit_length()), LARGEST)
        found.append(Level(width, chunk, max(1, -(-width // chunk))))
        if found[-1].parts == 1:
            return tuple(found)
        width = found[-1].parts * k


FEW_ROWS = 8
"""Up to so many rows of more than `FEW_WIDTH` scores all multiprocessors first compute a bound: see `few`."""
FEW_WIDTH = 8192
MOST_FEW = 1024
"""The greatest k for which the scores that reach the bound, about 2k, fit into `ROOM`."""
PARTS = 128
SPAN = 4
ROOM = 4096


@dataclass(frozen=True)
class Few:
    """Three launches: a bound below the k-th largest, its candidates, the choice among them."""

    chunk: int
    """Scores of a part."""
    each: int
    """Scores that a part has above its bound; half of the parts have k of them together."""

    @property
    def num_warps(self) -> int:
        """Sixteen keys per thread."""
        return min(max(1, self.chunk // 512), 8)


CHOOSE_WARPS = 8


def few(rows: int, width: int, k: int) -> Few | None:
    """The launches for a few long rows; None where `levels` serves."""
    if rows > FEW_ROWS or width <= FEW_WIDTH or k > MOST_FEW:
        return None
    return Few(1 << (-(-width // PARTS) - 1).bit_length(), -(-k // (PARTS // 2)))


def constexprs(which: str, config: Few, k: int, *, early: bool) -> dict[str, object]:
    """Return the compile-time arguments of one of the three launches, in the kernel's order."""
    chunk = config.chunk
    own: dict[str, dict[str, object]] = {
        "bound": {"EACH": config.each, "CHUNK": chunk, "SPAN": SPAN},
        "gather": {"PARTS": PARTS, "CHUNK": chunk},
        "choose": {"KP": 1 << (k - 1).bit_length(), "HALVINGS": PARTS.bit_length() - 1, "CHUNK": chunk, "ROOM": ROOM},
    }
    return {"K": k, **own[which], "EARLY": early}


_topk_bound = Launcher(topk_bound_kernel)
_topk_choose = Launcher(topk_choose_kernel)
_topk_gather = Launcher(topk_gather_kernel)
_topk = Launcher(topk_kernel)


class TopkPlan(Plan):
    """Selection of k of rows with up to `width` scores, up to rows × width scores at once."""

    def __init__(self, rows: int, width: int, k: int, device: torch.device, arch: Arch | None = None) -> None:
        super().__init__("topk", {"rows": rows, "width": width, "k": k}, device, arch, topk_supported)
        self.rows, self.width, self.k = rows, width, k
        self.inputs = self.declare(
            logits=Input(F32, ("rows", Size(most=width)), strides=ROWS),
            lengths=Input(I32, ("rows",), aligned=False),
            out=Input(I32, (Size(least="rows"), Size(least=k)), strides=ROWS, aligned=False),
        )
        self.early = not interpreting()
        self.out = torch.empty((rows, k), dtype=torch.int32, device=device)
        # Of each level but the last: candidates of rows × parts chunks.
        sizes = [rows * level.parts * k for level in levels(width, k)[:-1]]
        self.keys = [torch.empty((size,), dtype=torch.int32, device=device) for size in sizes]
        self.columns = [torch.empty((size,), dtype=torch.int32, device=device) for size in sizes]
        # For a few long rows: bound, count and end of every part, and its candidates thrice.
        config = few(min(rows, FEW_ROWS), width, k)
        parts = (min(rows, FEW_ROWS), PARTS) if config else (0, 0)
        self.ends = torch.empty((3, *parts), dtype=torch.int32, device=device)
        self.found = torch.empty((3, *parts, config.chunk if config else 0), dtype=torch.int32, device=device)

    def holds(self, rows: int, width: int) -> bool:
        """Return whether the buffers have room for `rows` of `width` scores, whose result goes to the caller's rows."""
        if width > self.width:
            return False
        if few(rows, width, self.k):
            return rows <= self.rows
        kept = zip(levels(width, self.k)[:-1], self.keys, strict=False)
        return all(rows * level.parts * self.k <= keys.numel() for level, keys in kept)

    def run(
        self, *, logits: torch.Tensor, lengths: torch.Tensor, k: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int32 [R, k]; logits [R, W] with W at most the planned width."""
        rows, width = int(logits.shape[0]), int(logits.shape[1])
        if k != self.k:
            raise ValueError(f"topk: k is {k}, the plan was made for {self.k}")
        if out is None and rows > self.rows:
            raise ValueError(f"topk: logits has {rows} rows, the plan holds {self.rows}")
        out = self.out[:rows] if out is None else out
        # Of requests with several rows they come as a matrix.
        flat = lengths.view(-1) if lengths.is_contiguous() else lengths
        self.inputs.check(logits=logits, lengths=flat, out=out)
        config = few(rows, width, k)
        if config is not None and rows:
            self._launch_few(logits, lengths, out, config)
            return out[:rows, :k]
        if not self.holds(rows, width):
            raise ValueError(f"{rows} rows of {width} scores, the plan holds {self.rows} of {self.width}")
        if rows:
            self._launch(logits, lengths, out, levels(width, k))
        return out[:rows, :k]

    def _launch(self, logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, chain: tuple[Any, ...]) -> None:
        rows, early = logits.shape[0], self.early and len(chain) > 1
        scores, columns, stride = logits, self.out, logits.stride(0)
        for index, level in enumerate(chain):
            first, last = index == 0, index == len(chain) - 1
            out_keys = self.out if last else self.keys[index]
            out_columns = out if last else self.columns[index]
            _topk[(rows, level.parts)](
                score_ptr=scores, column_ptr=columns, length_ptr=lengths, out_key_ptr=out_keys, out_ptr=out_columns,
                score_stride=stride, out_stride=out.stride(0), width=level.width, K=self.k,
                KP=1 << (self.k - 1).bit_length(), CHUNK=level.chunk, FIRST=first, LAST=last, EARLY=early,
                num_warps=level.num_warps, num_stages=1, launch_pdl=early and not first,
            )  # fmt: skip
            if not last:
                scores, columns, stride = out_keys, out_columns, level.parts * self.k

    def _launch_few(self, logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, config: Few) -> None:
        rows, stride = logits.shape[0], logits.stride(0)
        bound, count, end = self.ends
        found, keys, flat = self.found
        grid, warps = (rows, PARTS), config.num_warps
        _topk_bound[grid](
            score_ptr=logits, length_ptr=lengths, bound_ptr=bound, score_stride=stride,
            **constexprs("bound", config, self.k, early=self.early),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        _topk_gather[grid](
            score_ptr=logits, length_ptr=lengths, bound_ptr=bound, count_ptr=count, found_ptr=found,
            score_stride=stride, **constexprs("gather", config, self.k, early=self.early),
            num_warps=warps, num_stages=1, launch_pdl=self.early,
        )  # fmt: skip
        _topk_choose[(rows,)](
            score_ptr=logits, length_ptr=lengths, count_ptr=count, found_ptr=found, end_ptr=end, flat_key_ptr=keys,
            flat_ptr=flat, out_ptr=out, score_stride=stride, out_stride=out.stride(0),
            **constexprs("choose", config, self.k, early=self.early),
            num_warps=CHOOSE_WARPS, num_stages=1, launch_pdl=self.early,
        )  # fmt: skip

    def warmup(self) -> None:
        """Every chain of levels up to the planned width, and the launches for a few long rows."""
        widths, width = {self.width}, self.width
        while width > 1:
            width = 1 << (width - 1).bit_length() - 1
            widths.add(width)
        # More rows than a few take the other way at the same width.
        for width in widths:
            for rows in {min(1, self.rows), min(FEW_ROWS + 1, self.rows)} - {0}:
                lengths = torch.full((rows,), width, dtype=torch.int32, device=self.device)
                logits = torch.zeros((1, width), device=self.device).expand(rows, width)
                self.run(logits=logits, lengths=lengths, k=self.k)


def topk_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any rows and widths; k up to 4096."""
    if not 0 < params["k"] <= 4096:
        return Support(f"topk: k is {params['k']}, needs 1 to 4096")
    return SUPPORTED


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Rows with many equal scores, −∞ and lengths from 0 up; behind the length everything is NaN."""
    draw = seeded(device, seed)
    rows, width, k = params["rows"], params["width"], params["k"]
    if params.get("dense"):
        logits = torch.randn((rows, width), generator=draw, device=device)
        return {"logits": logits, "lengths": torch.full((rows,), width, device=device).int(), "k": k}
    logits = torch.randn((rows, width + 3), generator=draw, device=device)
    row = torch.arange(rows, device=device)
    coarse = (logits * 2).round() / 2
    logits = torch.where((row % 3 == 1)[:, None], coarse, logits)
    logits = torch.where((row % 5 == 2)[:, None] & (logits < 1.0), -torch.inf, logits)
    lengths = torch.randint(0, width + 1, (rows,), generator=draw, device=device)
    lengths = torch.where(row % 2 == 0, width - row, lengths)
    lengths[-1:] = min(k, width)
    lengths = lengths.clamp(0, width)
    logits = logits.masked_fill(torch.arange(width + 3, device=device) >= lengths[:, None], torch.nan)
    return {"logits": logits[:, :width], "lengths": lengths.int(), "k": k}


def _torch(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    def call(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        return torch.topk(logits, k, dim=1, sorted=False).indices.int()

    return call


def _cases() -> Any:
    bench = [
        case(f"r{rows}-n{width}-k{k}", "gpu bench" if rows * width < 1 << 25 else "bench", rows=rows, width=width, k=k,
             dense=True)
        for rows, width, k in (
            (1, 2048, 512), (1, 16384, 512), (1, 32768, 512), (1, 262144, 512), (1, 262144, 1024), (8, 32768, 512),
            (64, 8192, 512), (2048, 2048, 512), (2048, 32768, 512),
        )
    ]  # fmt: skip
    return (
        case("empty", "cpu gpu", rows=0, width=64, k=16),
        case("narrow", "cpu gpu", rows=3, width=7, k=16),
        case("one-level", "cpu gpu", rows=12, width=1500, k=512),
        case("k256", "cpu gpu", rows=5, width=777, k=256),
        case("two-levels", "cpu gpu", rows=9, width=20000, k=512),
        case("few-long", "cpu gpu", rows=4, width=40000, k=512),
        case("k-odd", "cpu gpu", rows=3, width=20000, k=1000),
        case("three-levels", "gpu", rows=5, width=262144, k=2048),
        case("ties", "gpu", rows=31, width=70000, k=1024),
        *bench,
    )


OPERATIONS = (
    *_INDEXER,
    Operation(
        name="topk",
        summary="columns of the k largest scores of every row",
        folder="indexer",
        outputs=("columns",),
        cases=_cases(),
        make_inputs=_inputs,
        reference=topk,
        plan=lambda p, device, arch: TopkPlan(p["rows"], p["width"], p["k"], device, arch),
        is_supported=topk_supported,
        nbytes=lambda p: 4 * p["rows"] * (p["width"] + p["k"] + 1),
        tolerance=(Tolerance(bitwise=True),),
        extra_providers=(Provider("torch.topk", lambda: None, _torch, rough="takes any of equal scores"),),
        # Others return them in any order.
        compared=lambda outputs: (outputs[0].sort(-1).values,),
    ),
)
