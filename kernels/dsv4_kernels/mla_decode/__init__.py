"""Sparse multi-head latent attention for decoding, over a window cache and a compressed cache, with attention sinks.

For every token t and head h, over the valid entries j of both index lists (an index listed twice counts twice):

    s[j]   = 512^-0.5 · q[t, h] · kv[j]
    lse    = log Σ_j exp s[j]                      (natural logarithm, without the sink; −inf if no entry is valid)
    o      = Σ_j exp(s[j] − lse) · kv[j] · 1 / (1 + exp(sink[h] − lse))         (0 if no entry is valid)

Inputs
    q          bf16 [T, H, 512], H from 1 to 128; T counts query tokens, however many belong to one request
    swa_cache  uint8 [pages, bytes], `numerics.ds_mla` pages; the stride between pages is taken from the tensor, a
               multiple of 16; scale bytes of named slots up to `numerics.LARGEST_SCALE`, that is values up to 57,344
               (larger bytes give undefined values on a GPU; a normed row with weights below 2,500 has none)
    swa_idx    int32 [T, W] slots (page · page tokens + offset), −1 anywhere means no entry
    swa_len    int32 [T], entries of the row that count; slots listed behind them are never read
    cmp_cache, cmp_idx [T, K], cmp_len: the same for the compressed cache; K = 0 where a layer has none
    table      int32 [requests, ·], rows may be apart, in place of cmp_len: cmp_idx then counts the entries of the
               token's own request, whose page n is page table[request, n] of the cache; request int32 [T]; counts
               bool [T], false where the token has no compressed entry. For few tokens, of plans that are made for it
    sink       float32 [H]; −inf: no sink, +inf: the output is 0
Outputs of `mla_decode`: o bf16 [T, H, 512], lse float32 [T, H].
Outputs of `mla_decode_o8`, which feeds the wo_a product: the last 64 dimensions of o are rotated back by the position
of the token (interleaved pairs: e' = e·cos + o·sin, o' = o·cos − e·sin, cos_sin float32 [positions, 64] = 32 cos | 32
sin), then every 128 values are quantised with one power of two (amax at least 1e-10): code uint8 [T, H, 512], scale
uint8 [T, H, 4].

Products are bf16 with float32 sums: q and the dequantised kv are exact in it, the weights of the softmax are rounded.
Edges: T = 0; rows without a valid entry; any page size; NaN bytes in slots that no index names change nothing.
Offsets are 64-bit. Nothing is read by the host, the grid depends on T, H, W and K only, so a graph may be captured.
Tolerance: |Δo| ≤ 1e-3 + 2.01/128·|o|, diff ≤ 5e-6; |Δlse| ≤ 1e-3 + 8.01/65536·|lse| (bf16 products, the reference is
float64).
Sources: DeepSeek-V3.2 technical report (sparse attention); FlashMLA's interface and its tests for tolerances and the
sink; splits are merged as in FlashDecoding (arXiv 2311.01282, section 3).

`mla_merge`, `mla_merge_two` and `mla_merge_o8` merge partial results of attention, with the sink; the last also rotates
back and quantises. Each part s of S holds o[s] normalised by its own sum and lse[s] = log Σ exp(score) over its
entries. With m = max_s lse[s] and w[s] = exp(lse[s] − m):

    o   = Σ_s w[s]·o[s] / Σ_s w[s] · 1 / (1 + exp(sink − lse)),     lse = m + log Σ_s w[s]     (natural; without the
    sink)

A part without entries has lse −inf (or +inf, as FlashMLA writes it) and counts nothing, with any o, NaN included.
If no part has entries, o = 0 and lse = −inf. sink −inf leaves o as it is; +inf makes it 0.

`mla_merge`: o bf16 [S, T, H, 512], lse float32 [S, T, H], sink float32 [H] → o bf16 [T, H, 512], lse float32 [T, H].
`mla_merge_two`: the same for two subsets held apart: o0, lse0, o1, lse1 without the leading S.
`mla_merge_o8`: as `mla_merge`, then the last 64 dimensions rotated back and every 128 values quantised (see
`mla_decode_o8`): positions int64 [T], cos_sin float32 [positions, 64] → code uint8 [T, H, 512], scale uint8 [T, H, 4].

T = 0 launches nothing. Any S ≥ 1. Computed in float32 in a fixed order, so the result repeats bit by bit.
Tolerance: one rounding to bf16; codes may differ where the float32 value is within an ulp of a rounding boundary.
Source: FlashDecoding (arXiv 2311.01282, section 3); the sink as in FlashMLA's combine.
"""
