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
"""
