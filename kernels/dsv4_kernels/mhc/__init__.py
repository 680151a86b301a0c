"""Manifold-constrained hyper-connections (mHC), between two sublayers of DeepSeek-V4.

A token's residual is four streams r[0..3] of H values. Before a sublayer, with x = the 4H values in a row:

    m      = (x · fnᵀ) / sqrt(mean(x²) + rms_eps)                            24 values
    pre    = σ(m[0:4]·scale[0] + base[0:4]) + pre_eps                        4 values
    post   = σ(m[4:8]·scale[1] + base[4:8]) · post_mult                      4 values
    comb   = sinkhorn(softmax_rows(m[8:24]·scale[2] + base[8:24]) + sinkhorn_eps)      4×4
    y      = Σ_i pre[i]·r[i];     with norm_weight: y = y / sqrt(mean(y²) + norm_eps) · norm_weight

sinkhorn divides by (column sums + sinkhorn_eps), then `sinkhorn_repeat` − 1 times by row sums and column sums, each +
sinkhorn_eps. After the sublayer, which made x of y:  r'[j] = post[j]·x + Σ_i comb[i, j]·r[i], rounded to bf16.

Shapes: residual bf16 [T, 4, H], x and y bf16 [T, H], post float32 [T, 4, 1], comb float32 [T, 4, 4], fn float32
[24, 4H], hc_scale float32 [3], hc_base float32 [24], norm_weight bf16 [H] or None. H is a multiple of 16, T ≥ 0.

`mhc_pre`: (residual, fn, …) → (post, comb, y).
`mhc_pre_broadcast`: the first layer, four equal streams: residual bf16 [T, H], fn_broadcast float32 [24, H] = the sum
of fn over streams → (residual bf16 [T, 4, H], post, comb, y).
`mhc_post_pre`: (x, residual, post, comb, fn, …) → (residual', post', comb', y'), the seam between two sublayers: the
coefficients come from the rounded residual'. Two launches.
`mhc_post_pre_o8`: the same, and y' as `fp8_quant` makes it of the rounded values, in the same launches → (residual',
post', comb', y', code uint8 [T, H], scale uint8 [T, H/128]); H is a multiple of 128. Every plan before a sublayer does
it up to its `quantised` tokens, and `codes` returns them: bitwise those of `fp8_quant`, which then need not run.
`mhc_post`: (x, residual, post, comb) → residual'.
`mhc_head`: hs bf16 [T, 4, H], fn float32 [4, 4H], hc_scale float32 [1], hc_base float32 [4] → Σ_i (σ(m[i]·scale +
base[i]) + hc_eps)·hs[i], bf16 [T, H].

Arguments have the names of vLLM's `mhc_*_tilelang` functions. Results are views of the plan's buffers, and may be fed
back to the same plan's next run as its inputs. T = 0 launches nothing.

Tolerance: float32 throughout (fn enters the tensor cores as three bf16 terms, which hold all its 24 bits; the residual
is bf16), but tensor cores add with truncation: post and comb 2e-4 with an RMS of 5e-5, y and residual' one rounding to
bf16. Sources: mHC (arXiv 2512.24880); the DeepSeek-V4 report for the constants.
"""
