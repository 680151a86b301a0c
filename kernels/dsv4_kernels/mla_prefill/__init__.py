"""Sparse MLA prefill over a workspace of dequantised rows: one KV head, K = V, a sink per head.

For a query token s and head h, over the entries j of the token's index list:

    score[j] = 512^-0.5·q[s, h]·kv[idx[s, j]],     lse[s, h] = log Σ_j exp(score[j])      (natural; without the sink)
    o[s, h]  = Σ_j exp(score[j] − lse)·kv[idx[s, j]] · 1 / (1 + exp(sink[h] − lse))

Inputs: q bf16 [S, H, 512], kv bf16 [N, 512] (output of mla_cache_read or vLLM's gather), indices int32 [S, K] of rows
of kv in any order, lengths int32 [S], sink float32 [H]. Outputs: o bf16 [S, H, 512], lse float32 [S, H].
The list holds window and compressed entries one behind the other, for any K: causality lies in the list alone.

Edges: an index of −1 counts nothing, wherever it stands; nothing behind lengths[s] is read; an index that stands twice
counts twice; rows that no list names are not read. A token without entries gives o = 0, lse = −inf. sink −inf leaves o
as it is, +inf makes it 0. S = 0 launches nothing. Rows are addressed with 64 bits. 1 to 128 heads.

`mla_prefill_lists` writes these lists and lengths: for each token first the compressed rows chosen for it, then its
window. The workspace has `rows` rows for each of B requests: compressed entry i of request b is row b·rows + i, and the
positions from seq_lens[b] − gather_lens[b] on follow from row b·rows + first. Inputs: chosen int32 [T, ≥ topk] (rows
may be apart), entries of the token's own request, of which the first min((position + 1) // ratio, topk) count;
query_start_loc int32 [B + 1], of which the first is token 0 here; seq_lens, gather_lens int32 [B]. Outputs: indices
int32 [T, W], lengths int32 [T], where W is topk + window, rounded up to 128, and columns behind a length are −1. topk
0: the window alone. An entry of −1 stays −1, and one that the token does not see yet, (position + 1) // ratio or more,
becomes −1: its row may be anything. Bitwise. Source: vLLM's `combine_topk_swa_indices` without images, which
takes one launch more for the −1.

Packed pages need no workspace: mla_decode takes any number of tokens, too. It dequantises an entry for every token that
names it, this operation reads rows that were dequantised once.

Tolerance: products of bf16 with float32 sums against float64: abs 1e-3, rel 2.01/128, diff 5e-6, as in FlashMLA's
tests. Source: FlashMLA's flash_mla_sparse_fwd for the contract; FlashAttention (arXiv 2205.14135) for the running
softmax.
"""
