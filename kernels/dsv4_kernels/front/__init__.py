"""Steps between an attention layer's projections and its attention: norms, RoPE, the window's cache entry.

`front_norm`: two RMSNorms with weights in one launch, the query's low-rank part and the KV row:
x / sqrt(mean(x²) + eps)·weight, in float32, rounded to bf16. qr bf16 [T, Q] and kv bf16 [T, 512] may be parts of one
projection, with rows apart; q_weight bf16 [Q], kv_weight bf16 [512] → (qr bf16 [T, Q], kv bf16 [T, 512]).

`front_norm_o8`: the same, and qr as `fp8_quant` makes it of the rounded values, in the same launch → (qr, kv, code
uint8 [T, Q], scale uint8 [T, Q/128]); Q is a multiple of 128. A plan with `quantised` does it.

`front_insert`: every head of q bf16 [T, H, 512] is normalised without a weight, x / sqrt(mean(x²) + eps), and its last
64 turned by RoPE (interleaved pairs) at `positions` int64 [T]: q bf16 [T, P, 512], heads beyond H zero. The KV row, kv
bf16 [T', 512] with its norm applied, has its last 64 turned as well and goes into the packed cache (see mla_cache): 448
E4M3 codes with one scale per 64, 64 bf16 values. cos_sin_cache float32 [positions, 64] (32 cosines, 32 sines),
slot_mapping int64 [C] with C ≤ T, kv_cache uint8 [pages, bytes] with pages of `page` tokens, `stride` bytes apart, is
written in place → (q, kv_cache). The arguments are those of vLLM's fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.

Edges: T = 0 launches nothing; slot −1 and tokens beyond C leave the cache alone, their queries are computed; P ≥ H, any
H from 1; Q a multiple of 8 up to 8192 (of 128 where it is quantised); slots are addressed with 64 bits; bytes of other
slots stay as they are.
Tolerance: one rounding to bf16; codes and scales of qr bitwise those of this qr; stored codes bitwise (their input is
bf16 and is not changed).
Source: the DeepSeek-V4 report; RoFormer (arXiv 2104.09864) for RoPE.
"""
