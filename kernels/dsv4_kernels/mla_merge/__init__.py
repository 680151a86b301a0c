"""Merge partial results of attention, with the sink, and optionally what follows: inverse rotation and FP8
quantisation.

Each part s of S holds o[s] normalised by its own sum and lse[s] = log Σ exp(score) over its entries. With m = max_s
lse[s] and w[s] = exp(lse[s] − m):

    o   = Σ_s w[s]·o[s] / Σ_s w[s] · 1 / (1 + exp(sink − lse)),     lse = m + log Σ_s w[s]     (natural; without the
    sink)

A part without entries has lse −inf (or +inf, as FlashMLA writes it) and counts nothing, whatever its o holds, NaN
included. If no part has entries, o = 0 and lse = −inf. sink −inf leaves o as it is; +inf makes it 0.

`mla_merge`: o bf16 [S, T, H, 512], lse float32 [S, T, H], sink float32 [H] → o bf16 [T, H, 512], lse float32 [T, H].
`mla_merge_two`: the same for two subsets held apart: o0, lse0, o1, lse1 without the leading S.
`mla_merge_o8`: as `mla_merge`, then the last 64 dimensions rotated back and every 128 values quantised (see
mla_decode): positions int64 [T], cos_sin float32 [positions, 64] → code uint8 [T, H, 512], scale uint8 [T, H, 4].

T = 0 launches nothing. Any S ≥ 1. Computed in float32 in a fixed order, so the result repeats bit by bit.
Tolerance: one rounding to bf16; codes may differ where the float32 value is within an ulp of a rounding boundary.
Source: FlashDecoding (arXiv 2311.01282, section 3); the sink as in FlashMLA's combine.
"""
