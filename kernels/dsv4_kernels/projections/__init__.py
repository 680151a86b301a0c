"""Projections of an attention layer's input for its compressors and its indexer, of few tokens in one launch.

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
Source: the DeepSeek-V4 report; vLLM's DeepseekV4Attention for what is computed of which input.
"""
