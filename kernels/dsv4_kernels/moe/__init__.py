"""Mixture of experts with MXFP4 weights: the routed part of a DeepSeek-V4 layer, after the router.

    g = x · W1ᵀ, u = x · W3ᵀ              rows of w13[e]: I of W1 (gate), then I of W3 (up)
    h = silu(min(g, 10)) · clamp(u, −10, 10) · topk_weights[t, j]
    out[t] = Σ_j h_j · W2ᵀ                 over the valid j, in order, accumulated in float32
    out[t] = addend[t] + out[t]            if a plan adds: both bf16, out was rounded before

W4A16: x and h are bf16. W4A8: x and h are rounded to E4M3 in groups of 32 along their last dimension, each with the
least power of two ≥ amax/448 as scale (MXFP8, the input of block-scaled MMA; finer than the 1×128 of DeepSeek's own
recipe).
On sm_90, up to 64 pairs and with I a multiple of 128, W4A16's x and h enter the products as two E4M3 planes: exact for
a bf16 within 2^-13 of the largest of its group of 32, else to 2^-21 of the largest. Sums of 32 are the FP8
instruction's, which keeps about 14 bits (DeepSeek-V3 technical report, section 3.3.2); all others are float32.

Inputs: x bf16 [T, H]; topk_ids int32 [T, K]; topk_weights float32 [T, K]; w13 uint8 [E, 2I, H/2] and w2 uint8 [E, H,
I/2], two E2M1 codes per byte, low nibble first; w13_scale uint8 [E, 2I, H/32] and w2_scale uint8 [E, H, I/32], UE8M0
codes 64..190 (2^-63..2^63), one per 32 along k; addend bf16 [T, H] (the shared experts). All contiguous. H a multiple
of 128, I a multiple of 32 (any tensor-parallel shard of 2048 or 3072).
Output: bf16 [T, H], a view of the plan's buffer, valid until the next run.
Edges: an id outside 0..E−1 (−1 of expert parallelism, padding of graphs) contributes exactly 0 and its weight is never
used; a token without a valid id gives zeros; an expert listed twice counts twice; experts without tokens cost nothing;
T = 0 launches nothing. The result of a row is bitwise independent of the batch's other rows at the same T,
and from run to run.
Tolerance against float64 on the dequantised weights: relative RMS 5e-3, and 2e-2 of the output's RMS for every element
(W4A16); relative RMS 5e-3 against a reference with the same rounding of x and h (W4A8).
Launches: up to 64 pairs (T·K) 2, with the two planes 3 (prepare x, up, down); above 5 (sort, prepare x, up, down, sum).
Source: DeepSeek-V4 reference inference code (Expert, MoE), OCP MX 1.0 for the formats.
"""
