"""The router of DeepSeek-V4's experts: its product, and which experts a token goes to.

    logit = x · weightᵀ,     score = sqrt(softplus(logit))         (float32; E experts)

A layer with learned routing takes the k experts of the largest score + bias; of equal ones the lower. A layer with
hashed routing (the first three) takes tid2eid[input_ids[t]]. The weights are the scores without the bias:

    weights[t, i] = score[t, ids[t, i]] / Σ_j score[t, ids[t, j]]·scaling

Inputs: x bf16 [T, H], weight bf16 [E, H], bias float32 [E] or, for hashed routing, tid2eid int32 [V, k] with input_ids
int32 or int64 [T]; padding bool [T] or none: a token that is padding gets the weights 0 and the ids −1.
Outputs: weights float32 [T, k] and ids int32 [T, k], learned ones by falling score + bias.

Edges: T = 0 launches nothing; any E up to 1024, H a multiple of 8, k up to 8; NaN in one token
stays in that token, whose ids are experts. Where every chosen score underflows (logits below −104) the denominator is
1 and the weights are 0, as in vLLM's kernels.
Two launches: few tokens are spread over the columns of the product, the second launch adds and selects.
Tolerance: weights 1e-5; two experts whose sums lie within float32's error of each other may change places.
Source: the DeepSeek-V4 report; DeepSeek-V3 report, section 2.1.2, for the bias.
"""
