"""Candidate configurations of each operation for the tuner, and representative shapes of their ranges."""

from __future__ import annotations

from typing import Any

# Per operation: rows of (range, representative shapes, candidates). Fields in the order of the configuration's
# dataclass.
# (block_h, block_n, num_warps, num_stages, waves)
_DECODE_16 = [
    *((16, 32, 4, 1, waves) for waves in (1, 2, 3)),
    (16, 32, 4, 3, 2),
    *((16, 64, 4, 1, waves) for waves in (1, 2, 3)),
    *((16, 64, 8, 1, waves) for waves in (1, 2)),
    (16, 128, 8, 1, 1),
]
_DECODE_32 = [
    *((32, 64, warps, 1, waves) for warps in (4, 8) for waves in (1, 2)),
    (32, 128, 8, 1, 1),
]
_DECODE_64 = [*((64, 64, 8, stages, 1) for stages in (1, 2)), (64, 64, 8, 1, 2), (64, 128, 8, 1, 1)]
_DECODE_TOKENS = [([1, 1], 1), ([2, 2], 2), ([3, 5], 4), ([6, 11], 8), ([12, 23], 16), ([24, 47], 32), ([48, 95], 64)]
_DECODE_TOKENS.append(([96, 191], 128))
_DECODE_HEADS = [
    ({"heads": [1, 16]}, 16, _DECODE_16),
    ({"heads": [17, 32]}, 32, _DECODE_16 + _DECODE_32),
    ({}, 64, _DECODE_16 + _DECODE_32 + _DECODE_64),
]
DECODE_ROWS: list[Any] = []
for _when, _heads, _candidates in _DECODE_HEADS:
    DECODE_ROWS += [({**_when, "tokens": span}, [(t, _heads)], _candidates) for span, t in _DECODE_TOKENS]
    DECODE_ROWS.append((_when, [(256, _heads)], _candidates))
# (block_m, block_n, num_warps, num_stages, waves)
_GEMM_8 = [
    *((8, 64, 4, stages, waves) for stages in (4, 6, 8) for waves in (1, 2, 3, 4)),
    *((8, 32, 2, stages, waves) for stages in (6, 8) for waves in (1, 2, 4)),
    *((8, 128, 4, stages, waves) for stages in (4, 6) for waves in (1, 2)),
    *((16, 64, 4, 6, waves) for waves in (1, 2)),
]
# Ranges of n and k that separate the shapes of the two models, at 1 to 8 tokens.
_GEMM_8_ROWS: list[tuple[dict[str, Any], list[tuple[int, int]]]] = [
    ({"n": [16384, None]}, [(32768, 1024), (65536, 1536)]),
    ({"n": [7168, None], "k": [1, 2048]}, [(8192, 1024)]),
    ({"n": [7168, None], "k": [1, 3072]}, [(7168, 3072)]),
    ({"n": [7168, None], "k": [1, 8192]}, [(8192, 4096)]),
    ({"n": [7168, None]}, [(7168, 16384)]),
    ({"n": [1, 2560]}, [(1536, 4096)]),
    ({"k": [1, 2048]}, [(4096, 2048)]),
    ({"k": [1, 4096]}, [(4096, 4096)]),
    ({}, [(4096, 8192)]),
]
_GEMM_16 = [(16, n, 4, stages, waves) for n in (64, 128) for stages in (4, 6) for waves in (2, 4)]
_GEMM_64 = [(32, 64, 4, 5, 2), (64, 64, 4, 5, 2), (32, 128, 4, 4, 2), (64, 128, 8, 4, 1)]
_GEMM_256 = [(64, 128, 4, 4, 1), (128, 128, 8, 4, 1), (128, 64, 4, 4, 2), (64, 64, 4, 5, 2)]
_GEMM_MANY = [(128, 128, 8, 4, 1), (64, 128, 4, 4, 1), (256, 64, 8, 4, 1), (256, 128, 8, 3, 1)]
GEMM_ROWS: list[Any] = [
    ({"tokens": [1, 8], **when}, [(t, *size) for size in sizes for t in (1, 8)], _GEMM_8)
    for when, sizes in _GEMM_8_ROWS
]
GEMM_ROWS += [
    ({"tokens": [9, 16], "n": [16384, None]}, [(16, 32768, 1024)], _GEMM_16),
    ({"tokens": [9, 16]}, [(16, 1536, 4096), (16, 4096, 8192), (16, 4096, 2048)], _GEMM_16),
    ({"tokens": [17, 64], "n": [16384, None]}, [(32, 32768, 1024)], _GEMM_64),
    ({"tokens": [17, 64]}, [(32, 1536, 4096), (32, 4096, 8192), (32, 4096, 2048)], _GEMM_64),
    ({"tokens": [65, 256], "n": [16384, None]}, [(128, 32768, 1024)], _GEMM_256),
    ({"tokens": [65, 256], "n": [1, 4096], "k": [1, 4096]}, [(128, 1536, 4096), (128, 4096, 2048)], _GEMM_256),
    ({"tokens": [65, 256]}, [(128, 4096, 8192), (128, 8192, 1024)], _GEMM_256),
    ({"n": [16384, None]}, [(1024, 32768, 1024), (4096, 32768, 1024)], _GEMM_MANY),
    ({"n": [4097, None], "k": [1, 2048]}, [(1024, 8192, 1024), (4096, 8192, 1024)], _GEMM_MANY),
    ({"n": [4097, None]}, [(1024, 7168, 16384), (4096, 7168, 3072), (4096, 7168, 16384)], _GEMM_MANY),
    ({}, [(1024, 4096, 8192), (4096, 4096, 8192)], _GEMM_MANY),
]
# (block_t, block_c, span, num_warps, num_stages, apart, apply_warps, coefficients)
_MHC = [
    (64, 32, 512, 8, 2, False, 8, 0),
    *((*tile, True, 8, 32) for tile in ((64, 32, 512, 8, 2), (64, 32, 512, 8, 3), (128, 32, 512, 16, 2))),
    *((128, 16, span, 8, 2, True, 8, 32) for span in (256, 512, 1024)),
    (128, 16, 512, 8, 3, True, 8, 32),
    *((64, 16, span, 4, 2, True, 8, 32) for span in (256, 512, 1024)),
    (64, 16, 512, 4, 3, True, 8, 32),
    (64, 16, 512, 4, 2, False, 8, 32),
    (32, 32, 512, 4, 2, True, 8, 32),
    *((64, 16, 512, 4, 2, True, warps, tokens) for warps, tokens in ((4, 32), (16, 32), (8, 16), (8, 64))),
    *((32, block, span, 4, stages, True, 8, 32) for block, span, stages in ((32, 256, 2), (32, 1024, 2), (32, 512, 3))),
    *((32, 64, 512, warps, 2, True, 8, 32) for warps in (4, 8)),
    *((32, 32, 512, 4, 2, True, warps, tokens) for warps, tokens in ((4, 32), (8, 8), (8, 16))),
    (16, 64, 512, 4, 2, True, 8, 32),
]
_MHC_ONE = (16, 32, 32, 4, 2, False, 8, 0)
_MHC_FEW = [(16, 32, 512, 4, 2, False, 8, 0), (16, 32, 512, 4, 2, False, 8, 32)]
MHC_ROWS: list[Any] = [
    ({"tokens": [t, t], "hidden": [h, h]}, [(t, h)], _MHC + _MHC_FEW * (t < 1024))
    for h in (4096, 7168)
    for t in (256, 1024, 2048, 4096, 8192)
]
# One token and a few tokens: a single candidate, whose time serves for comparison.
MHC_ROWS += [({"tokens": [t, t], "hidden": [4096, 4096]}, [(t, 4096)], [_MHC_ONE]) for t in (1, 8)]
# (m, up_n, up_k, up_warps, up_stages, up_split, down_n, down_k, down_warps, down_stages, down_split): tiles of each
# product with those of the other unchanged.
_MOE_UP = [(32, 128, 4, 2), (32, 128, 4, 3), (32, 128, 4, 4), (32, 128, 8, 2), (64, 128, 8, 2), (64, 128, 4, 2)]
_MOE_DOWN = [(64, 128, 4, 2), (128, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2), (64, 256, 4, 2), (256, 128, 8, 2)]


def _moe(*sizes: int) -> list[tuple[int, ...]]:
    pairs = [(up, _MOE_DOWN[0]) for up in _MOE_UP] + [(_MOE_UP[0], down) for down in _MOE_DOWN[1:]]
    return [(m, *up, 1, *down, 1) for m in sizes for up, down in pairs]


# Tokens of Flash with 12, 24 and 48 pairs per expert.
MOE_ROWS: list[Any] = [
    ({"rows": [6, 16]}, [(512,)], [(16, 32, 256, 2, 3, 1, 32, 256, 2, 3, 1), *_moe(16, 32)]),
    ({"rows": [17, 32]}, [(1024,)], _moe(32, 64)),
    ({"rows": [33, 63]}, [(2048,)], _moe(64, 32, 128)),
]
# (block_parts, num_warps, rows); whole heads of one, two and several parts of attention.
_MERGE = [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8), (4, 16), (8, 16)]
MERGE_ROWS: list[Any] = [
    ({"parts": [parts, parts]}, [(tokens, parts)], [(parts, *rest) for rest in _MERGE] + [(2, 2, 1)] * (parts == 1))
    for parts in (1, 2)
    for tokens in (8, 128, 512, 2048)
]
# (block_t, block_e, block_k, span, num_warps, num_stages), divided into as many spans as result in 128 programs.
_ROUTER = [(64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4)]
_ROUTER += [(128, 64, 64, 8, 4), (64, 256, 64, 8, 4), (128, 256, 64, 8, 3)]


def _router(tokens: int) -> list[tuple[int, ...]]:
    found = []
    for t, e, k, *rest in _ROUTER:
        splits = max(1, 128 * t * e // (tokens * 256))
        found += [(t, e, k, 4096 // s, *rest) for s in {splits, max(1, splits // 2)}]
    return found


ROUTER_ROWS: list[Any] = [
    ({"tokens": [t, t]}, [(t, 4096, 256)], _router(t)) for t in (128, 256, 512, 1024, 2048, 4096, 8192)
]
# (block_n, num_warps, num_stages, block_m)
_LOGITS = [(128, 4, 3, m) for m in (64, 4, 8, 16, 32, 128)] + [(64, 4, 3, m) for m in (8, 16, 64)]
_LOGITS += [(128, 8, 3, m) for m in (16, 64)] + [(256, 8, 3, m) for m in (8, 16, 64)] + [(128, 4, 4, 64)]
LOGITS_ROWS: list[Any] = [
    ({"rows": [rows, rows], "keys": [keys, keys]}, [(rows, keys)], _LOGITS)
    for rows, keys in ((512, 128), (2048, 512), (2048, 2048), (8192, 2048), (2048, 32768))
]
# (block_n, num_warps, num_stages, block_m, waves)
_PAGED = [(128, 4, 4, 1, waves) for waves in (2, 3, 4)] + [(128, 4, 3, 1, waves) for waves in (2, 3, 4, 6)]
_PAGED += [(64, 4, stages, 1, waves) for stages in (3, 4, 6) for waves in (2, 4, 6)]
_PAGED += [(256, 8, 3, 1, 1), (256, 8, 3, 1, 2), (256, 8, 2, 1, 2), (128, 4, 2, 1, 4), (128, 8, 4, 1, 2)]
PAGED_ROWS: list[Any] = [
    ({"batch": [batch, batch], "next_n": [next_n, next_n]}, [(batch, next_n, keys)], _PAGED)
    for batch, next_n, keys in (
        (1, 1, 2048),
        (1, 1, 262144),
        (8, 1, 32768),
        (8, 2, 32768),
        (64, 1, 8192),
        (64, 2, 8192),
    )
]
# (block_h, block_n, num_warps, num_stages)
_PREFILL = [(64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 8, 2), (64, 32, 8, 3), (64, 32, 8, 4), (64, 64, 8, 1)]
_PREFILL += [(64, 128, 8, 1), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2), (128, 64, 8, 2), (64, 16, 8, 4)]
PREFILL_ROWS: list[Any] = [
    ({"heads": [heads, heads]}, [(tokens, heads, width)], _PREFILL)
    for tokens, heads, width in ((512, 64, 640), (2048, 64, 640), (2048, 128, 1152))
]
ROWS: dict[str, list[Any]] = {
    "mla_decode": DECODE_ROWS,
    "fp8_gemm": GEMM_ROWS,
    "mhc_post_pre": MHC_ROWS,
    "moe_w4a16": MOE_ROWS,
    "mla_merge_o8": MERGE_ROWS,
    "router": ROUTER_ROWS,
    "indexer_logits": LOGITS_ROWS,
    "indexer_paged_logits": PAGED_ROWS,
    "mla_prefill": PREFILL_ROWS,
}


# Names of a shape's numbers, and the other parameters.
_PARAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla_decode": ("tokens heads", {"window": 128, "topk": 512, "dense": True}),
    "fp8_gemm": ("tokens n k", {}),
    "mhc_post_pre": ("tokens hidden", {"norm": True}),
    "moe_w4a16": ("tokens", {"hidden": 4096, "inter": 2048, "experts": 256, "topk": 6}),
    "mla_merge_o8": ("tokens parts", {"heads": 64}),
    "router": ("tokens hidden experts", {"k": 6}),
    "indexer_logits": ("rows keys", {"heads": 64, "dense": True}),
    "indexer_paged_logits": ("batch next_n keys", {"heads": 64, "page": 64, "dense": True}),
    "mla_prefill": ("tokens heads width", {"rows": 4096, "dense": True}),
}


def params_of(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    names, others = _PARAMS[name]
    return {**dict(zip(names.split(), shape, strict=True)), **others}
