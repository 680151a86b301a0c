"""Per-token FP8 quantisation of activations: one power-of-two scale per 128 values.

    amax[t, g]  = max(max |x[t, 128g : 128g+128]|, 1e-4)
    scale[t, g] = 127 + ceil(log2(amax / 448))              (UE8M0 byte)
    code[t, i]  = e4m3(clamp(x[t, i] · 2^(127 − scale), ±448))   (round to nearest even)

Inputs: x bf16 [T, K], K a multiple of 128, T ≥ 0.
Outputs: code uint8 [T, K] (E4M3), scale uint8 [T, K/128] (UE8M0).
Edges: T = 0 launches nothing; rows of zeros give code 0 with the scale of 1e-4. x must be finite.
Tolerance: bitwise.

`silu_mul_quant`: what lies between an expert's two products, and its quantisation, in one launch. x bf16 [T, 2K] holds
gate and up of each token → y = silu(min(gate, limit)) · clamp(up, ±limit), bf16 [T, K], and code and scale as
`fp8_quant` makes them of y. limit is a float, infinite where nothing is clamped.
Tolerance: y one rounding to bf16, code and scale bitwise those of this y.

Source: DeepSeek-V3 report, section 3.3 (arXiv 2412.19437), with the UE8M0 scales of DeepSeek-V3.1 and V4.
"""
