"""The indexer of DeepSeek-V4's sparse attention: its queries, and the scores of all compressed keys.

`indexer_query`: index_q bf16 [T, H, 128] has its last 64 turned by RoPE (interleaved pairs) at `positions` int64 [T],
is rounded to bf16 and quantised per token and head, s = 2^⌈log2(max(max|q|, 1e-4)/448)⌉; the scale goes into the
weights, since relu commutes with it:

    weights[t, h] = index_weights[t, h]·s[t, h]·softmax_scale·head_scale

index_q_cos_sin_cache float32 [positions, 64] (32 cosines, 32 sines), index_weights bf16 or float32 [T, H] → (q uint8
[T, H, 128] of E4M3, weights float32 [T, H]).

`indexer_logits` (prefill) and `indexer_paged_logits` (decode) write, for the keys j that row t may see,

    out[t, ·] = kscale[j]·Σ_h weights[t, h]·relu(q[t, h]·k[j])

into `out` float32, whose rows may be apart. Nothing else of it is touched.

`indexer_logits`: q [M, H, 128], k uint8 or E4M3 [N, 128], k_scale float32 [N], cu_seqlen_ks and cu_seqlen_ke int32 [M]:
row t sees keys ks[t] to ke[t] (none where ke ≤ ks), the first of them in column 0.
`indexer_paged_logits`: q [B, next_n, H, 128] for any next_n, kv_cache uint8 [pages, page, 132] (pages may be apart; a
page is all its E4M3 keys, then all its float32 scales), weights [B·next_n, H], context_lens int32 [B, next_n],
block_tables int32 [B, ·]; row b·next_n + n sees context_lens[b, n] keys, which may be 0.

Edges: M, N, B = 0 launch nothing; slots that were never written and table entries beyond the context are not read; H up
to 128. Pages and keys are addressed with 64 bits. Tolerance: diff 5e-6 against float64 on the same codes (products of
E4M3 values are exact; sm_90 adds them in its tensor cores with fewer bits than float32). Source: DeepSeek-V3.2-Exp
report, lightning indexer; DeepGEMM's fp8_mqa_logits for the layout.

The k largest scores of every row, as the indexer's selection of compressed keys.

Row r has lengths[r] valid scores, the first of them in column 0. It gets the columns of its k largest, in ascending
order; of equal scores at the boundary the lower columns are taken, so the result is unique and repeats bit by bit. A
row with lengths[r] ≤ k gets 0 … lengths[r] − 1 and then −1; its scores are not read.

Inputs: logits float32 [R, ·] (rows may be apart), lengths int32 of R values in any shape.
Output: int32 [R, k], a view of the plan's buffer or `out` (int32 [R, ·], whose rows may be apart).

Edges: R = 0 launches nothing; columns beyond the length are not read; −∞ is a score like any other; −0 is less than +0;
NaN is greater than everything if its sign is clear and less if it is set. Any k up to 4096 and any width.

A program keeps a chunk of the row in registers and finds the k-th largest key bit by bit. Rows of more than one chunk
leave k candidates per chunk, from which the next launch chooses in the same way.

Up to 8 rows of more than 16384 scores, with k up to 1024, go another way, in three launches. 128 programs a row read
interleaved parts of it; each finds a bound below its ⌈k/64⌉-th largest. At least k scores reach the 64th largest of the
bounds, about 2k where the best scores are spread over the row or lie together. 128 programs collect these, and one
chooses among them. Where far more reach the bound, as with equal scores, that program works on them tile by tile.
The grid depends only on the widths that the plan was made for.
Tolerance: bitwise. Source: vLLM's `top_k_per_row_prefill` and `top_k_per_row_decode` for the results.
"""
