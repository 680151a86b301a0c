"""DeepSeek-V4's compressor: one cache entry for every `ratio` tokens, out of the projections of the tokens before it.

`compressor_save`: a token's projections go into the state cache, for this and later chunks of its request:

    state[slot, 0:W] = kv,     state[slot, W:2W] = score + ape[position mod ratio]

`compressor_store` (head 512) and `compressor_store_indexer` (head 128): only tokens with (position + 1) mod ratio = 0.
Ratio 4 overlaps: its window is the last 8 tokens, W = 2·head, and the first 4 rows use columns 0..head of kv and of
score, the last 4 columns head..2·head. Ratio 128: the last 128 tokens, W = head. Per column, over the window's rows
with position ≥ 0:

    c = Σ_rows softmax_rows(score)·kv;     n = c / sqrt(mean(c²) + eps) · weight         (float32)

Head 512: the first 448 of n are rounded to bf16 and quantised, the last 64 turned by RoPE (interleaved pairs) at
position ⌊position/ratio⌋·ratio and stored as bf16, in the layout of mla_cache. Head 128: RoPE on the last 64, all 128
rounded to bf16 and quantised with one scale s = 2^⌈log2(max(max|x|, 1e-4)/448)⌉; a page of P entries is P·128 E4M3
bytes, then P float32 scales.

Inputs: kv and score float32 [T', W] (rows may be apart), ape float32 [ratio, W], positions int64 [T'],
state_cache float32 [blocks, block, 2W] (blocks may be apart), slot_mapping int64 [T] into it, T ≤ T';
token_to_req_indices int32 [T'], block_table int32 [requests, ·], cos_sin_cache float32 [positions, 64] (32 cosines, 32
sines), rms_norm_weight bf16 or float32 [head], kv_cache uint8 [pages, page, 584 or 132] (pages may be apart),
kv_slot_mapping int64 [T]. The names are those of vLLM's compressor.

Edges: slot −1 in slot_mapping is a padded token and neither saved nor stored; −1 in kv_slot_mapping is not stored; rows
with position < 0 are not read, nor is any block of the table beyond the window. T = 0 launches nothing.
Tolerance: saved states bitwise; stored values one step of their format where float32 and float64 fall on different
sides of a boundary. Ratio 128 and head 512 of one token are spread over the multiprocessors by columns; the last
program to arrive stores the entry. Source: the DeepSeek-V4 report; vLLM's compressor for the layouts.

Projections of an attention layer's input for its compressors and its indexer, of few tokens in one launch.

    kv | score = x · weightᵀ                                       (float32; the first W rows of weight make kv)
    state[slot, 0:W] = kv,     state[slot, W:2W] = score + ape[position mod ratio]

as `compressor_save` saves it, of the layer's compressor and, where there is an indexer, of that one's with weight, ape,
state cache and slots of its own (`index_…`), and, rounded to bf16, the weights of the indexer's heads:

    heads = x · head_weightᵀ

Each program has a few rows of one of the weights and all of x, so that nothing is left to add: one launch stands for
up to three products, three additions of their parts, and two launches that save.

Inputs: x bf16 [T, H], positions int64 [T' ≥ S], weight bf16 [2W, H], ape float32 [ratio, W], state_cache float32
[blocks, block, 2W] (blocks may be apart, written in place), slot_mapping int64 [S] into it, S ≤ T; the same of the
indexer and head_weight bf16 [N, H], or none of the five. Outputs: (state_cache,), or (state_cache, index_state_cache,
heads bf16 [T, N]), heads being a view of the plan's buffer.

Edges: slot −1 is a padded token and not saved, nor is a token beyond S, whose heads are computed all the same; T up to
32; H a multiple of 8; W a multiple of 32; any N. T = 0 launches nothing.
Tolerance: float32 sums of bf16 products in another order; heads one rounding to bf16.
Source: the DeepSeek-V4 report; vLLM's DeepseekV4Attention for the inputs of each product.
"""
