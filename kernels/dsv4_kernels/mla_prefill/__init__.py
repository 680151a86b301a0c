"""Sparse MLA prefill over a workspace of dequantised rows: one KV head, K = V, a sink per head.

For a query token s and head h, over the entries j of the token's index list:

    score[j] = 512^-0.5·q[s, h]·kv[idx[s, j]],     lse[s, h] = log Σ_j exp(score[j])      (natural; without the sink)
    o[s, h]  = Σ_j exp(score[j] − lse)·kv[idx[s, j]] · 1 / (1 + exp(sink[h] − lse))

Inputs: q bf16 [S, H, 512], kv bf16 [N, 512] (what mla_cache_read or vLLM's gather writes), indices int32 [S, K] of rows
of kv in any order, lengths int32 [S], sink float32 [H]. Outputs: o bf16 [S, H, 512], lse float32 [S, H].
The list holds window and compressed entries one behind the other, for any K: causality lies in the list alone.

Edges: an index of −1 counts nothing, wherever it stands; nothing behind lengths[s] is read; an index that stands twice
counts twice; rows that no list names are not read. A token without entries gives o = 0, lse = −inf. sink −inf leaves o
as it is, +inf makes it 0. S = 0 launches nothing. Rows are addressed with 64 bits. 1 to 128 heads.

Packed pages need no workspace: mla_decode takes any number of tokens, too. It dequantises an entry for every token that
names it, this operation reads what was dequantised once.

Tolerance: products of bf16 with float32 sums against float64: abs 1e-3, rel 2.01/128, diff 5e-6, as in FlashMLA's
tests. Source: FlashMLA's flash_mla_sparse_fwd for the contract; FlashAttention (arXiv 2205.14135) for the running
softmax.
"""
