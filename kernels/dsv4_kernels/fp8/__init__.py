"""Per-token FP8 quantisation of activations: one power-of-two scale per 128 values.

    amax[t, g]  = max(max |x[t, 128g : 128g+128]|, 1e-4)
    scale[t, g] = 127 + ceil(log2(amax / 448))              (UE8M0 byte)
    code[t, i]  = e4m3(clamp(x[t, i] · 2^(127 − scale), ±448))   (round to nearest even)

Inputs: x bf16 [T, K], K a multiple of 128, T ≥ 0.
Outputs: code uint8 [T, K] (E4M3), scale uint8 [T, K/128] (UE8M0).
Edges: T = 0 launches nothing; rows of zeros give code 0 with the scale of 1e-4. x must be finite.
Tolerance: bitwise.

`silu_mul_quant`: activation and quantisation between an expert's two products, in one launch. x bf16 [T, 2K] holds
gate and up of each token → y = silu(min(gate, limit)) · clamp(up, ±limit), bf16 [T, K], and code and scale as
`fp8_quant` makes them of y. limit is a float, infinite where nothing is clamped.
Tolerance: y one rounding to bf16, code and scale bitwise those of this y.

Source: DeepSeek-V3 report, section 3.3 (arXiv 2412.19437), with the UE8M0 scales of DeepSeek-V3.1 and V4.

FP8 matrix products with DeepSeek's block scales, plain and grouped (wo_a).

    out[t, g, n] = Σ_kb 2^(sa[t, g, kb] − 127) · 2^(sw[g, ⌊n/128⌋, kb] − 127) · Σ_{k in block kb} a[t, g, k] · w[g, n,
    k]

Recipe (1, 128, 128): activations have a scale per token and 128 values, weights one per 128×128 block; all scales are
UE8M0 bytes. Products are exact in float32, sums are float32, the result is rounded to bf16 once.

`fp8_gemm`: a uint8 (E4M3) [T, K], a_scale uint8 [T, K/128], w uint8 (E4M3) [N, K], w_scale uint8 [⌈N/128⌉, K/128] →
bf16 [T, N]. `wo_a_einsum` ("bhr,hdr->bhd"): a [T, G, K], a_scale [T, G, K/128], w [G, N, K], w_scale [G, ⌈N/128⌉,
K/128] → bf16 [T, G, N]. `wo_a_einsum_o8`: the same of up to 16 tokens, and the result as `fp8_quant` makes it, in the
same launch → (bf16 [T, G, N], code uint8 [T, G·N], scale uint8 [T, G·N/128]); N is a multiple of 128. A plan does it
up to its `quantised` tokens. K must be a multiple of 128, N of 16; N need not be one of 128 otherwise. T = 0 launches
nothing.

On sm_12x the products are block-scaled MMA ("mx": the 128-blocks' scales are repeated per 32 values, which is exact);
elsewhere, and where the compiler would emulate them, they are plain FP8 products scaled once per 128 ("dot"). Weights
are the left operand: at small T the wide side of the instruction is filled with weights, not with padding. Where tiles
are too few for the machine the sum is split over K; the last program to arrive adds the parts in a fixed order, so the
result repeats bit by bit.

Tolerance: diff < 1e-6 against the same quantised numbers in float64 before bf16 rounding (2e-6 with it); codes and
scales bitwise those of this result.
Sources: DeepSeek-V3 report, section 3.3 (arXiv 2412.19437); DeepGEMM's README for the recipe's names.
"""
