"""Observations of each provider on this card, and the choice that follows from it. Pure.

The shapes are the deployment's own: sizes of the model's `config.json` cut by the tensor parallel size, for the token
counts that matter (one request, a small batch, and where it applies a piece of a prompt).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsv4_kernels.mla_prefill.configs import list_width
from dsv4_runtime.contract.kernels import BUNDLED, BUNDLED_W4A8, ON_REQUEST, STOCK, KernelChoice, Op


@dataclass(frozen=True)
class Trial:
    """One shape of one operation that every provider of it is tried on.

    `operation` is the row of `dsv4_kernels.registry` whose inputs, reference and tolerance judge it.
    """

    op: Op
    name: str
    operation: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """Outcome of one trial of one provider.

    `fault` is None if its result was within the contract's tolerance, else what was seen instead. `microseconds` is the
    median with a cold L2 cache, None if it was not timed; of those that are wrong the ones known to be rough are timed.
    `error` is the largest relative root mean square error of its outputs.
    """

    op: Op
    trial: str
    provider: str
    fault: str | None = None
    microseconds: float | None = None
    error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Standing:
    """Standing of a provider in an operation: `slowness` is its time over the fastest right one's, the mean over the
    trials; None, with the reason in `excluded`, where it must not be used.
    """

    op: Op
    provider: str
    slowness: float | None
    excluded: str | None = None


SIZES = (
    "hidden_size", "q_lora_rank", "head_dim", "num_attention_heads", "o_groups", "o_lora_rank", "moe_intermediate_size",
    "n_routed_experts", "num_experts_per_tok", "sliding_window", "index_topk", "index_n_heads",
)  # fmt: skip
"""Fields of a model's `config.json` that `trials` reads."""


def trials(config: Mapping[str, Any], tensor_parallel: int) -> tuple[Trial, ...]:
    """Return the shapes of a rank of the model that `config` (its `config.json`) describes."""
    hidden, q_lora, head = config["hidden_size"], config["q_lora_rank"], config["head_dim"]
    heads, groups = config["num_attention_heads"] // tensor_parallel, config["o_groups"] // tensor_parallel
    inter = config["moe_intermediate_size"] // tensor_parallel
    lora = config["o_lora_rank"]
    products = {
        "wqa_wkv": (q_lora + head, hidden),
        "wq_b": (heads * head, q_lora),
        "wo_b": (hidden, groups * lora),
        "w13": (2 * inter, hidden),
        "w2": (hidden, inter),
    }
    found = [
        Trial(Op.FP8_LINEAR, f"{name}-t{tokens}", "fp8_gemm", {"tokens": tokens, "n": n, "k": k})
        for name, (n, k) in products.items()
        for tokens in (1, 16)
    ]
    experts, topk = config["n_routed_experts"], config["num_experts_per_tok"]
    window, chosen = config["sliding_window"], config["index_topk"]
    # Of a request's pieces: rows of the workspace are window and compressed entries of some thousand tokens, as a cache
    # gives them, so that who reads packed pages can be compared.
    columns = list_width(chosen, window)
    prefill = {"heads": heads, "width": columns, "window": window, "rows": 4096, "dense": True, "packed": True}
    found += [
        *_at((1, 8, 128), Op.MOE, "moe_w4a16", hidden=hidden, inter=inter, experts=experts, topk=topk),
        *_at((1, 8, 64), Op.MLA_DECODE, "mla_decode", heads=heads, window=window, topk=chosen),
        *_at((128, 1024), Op.MLA_PREFILL, "mla_prefill", **prefill),
        *_at((1, 64), Op.FRONT, "front_insert", heads=heads, padded=heads, page=64, dense=True),
        Trial(Op.FRONT, "norm-t64", "front_norm", {"tokens": 64, "rank": q_lora}),
        *_at((1, 8, 128), Op.O_PROJ, "wo_a_einsum", groups=groups, n=lora, k=heads // groups * head),
        *_at((1, 8, 128), Op.MHC, "mhc_post_pre", hidden=hidden, norm=True),
    ]
    found += [
        Trial(
            Op.COMPRESSOR,
            f"r{ratio}-t{tokens}",
            "compressor_store",
            {"tokens": tokens, "head": head, "ratio": ratio, "page": 256 // ratio, "dense": True},
        )
        for ratio in (4, 128)
        for tokens in (1, 32)
    ]
    found += [
        Trial(
            Op.INDEXER,
            f"b{batch}-k{keys}",
            "indexer_paged_logits",
            {"batch": batch, "next_n": 1, "keys": keys, "heads": config["index_n_heads"], "page": 64},
        )
        for batch, keys in ((1, 4096), (8, 4096))
    ]
    found += _at((1, 8, 128), Op.ROUTER, "router", hidden=hidden, experts=experts, k=topk)
    # Decode steps, with scores of 16 Ki and 128 Ki tokens of context, and a piece of a prompt.
    found += [
        Trial(Op.TOPK, f"r{rows}-n{width}", "topk", {"rows": rows, "width": width, "k": chosen, "dense": True})
        for rows, width in ((1, 4096), (8, 4096), (8, 32768), (1024, 4096))
    ]
    return tuple(found)


def _at(counts: Iterable[int], op: Op, operation: str, **params: Any) -> list[Trial]:
    """Return the trials of one operation at several token counts."""
    return [Trial(op, f"t{tokens}", operation, {"tokens": tokens, **params}) for tokens in counts]


def standings(seen: Iterable[Seen], tried: Sequence[Trial]) -> tuple[Standing, ...]:
    """Return how every provider stands: excluded by the first fault that was seen, or by a trial without a time."""
    by: dict[tuple[Op, str], dict[str, Seen]] = {}
    for one in seen:
        by.setdefault((one.op, one.provider), {})[one.trial] = one
    wanted = {op: [t.name for t in tried if t.op is op] for op in Op}
    excluded = {key: _fault(found, wanted[key[0]]) for key, found in by.items()}
    result = []
    for (op, provider), found in by.items():
        reason = excluded[op, provider]
        right = [other for (o, p), other in by.items() if o is op and excluded[o, p] is None]
        if reason is not None:
            rough = _slowness(found, right, wanted[op])
            if rough is not None:
                trial, _, fault = reason.partition(": ")
                reason = f"{trial}: {rough:.2f} of the fastest right one's time, but {fault}"
            result.append(Standing(op, provider, None, reason))
            continue
        result.append(Standing(op, provider, _slowness(found, right, wanted[op])))
    return tuple(result)


def _slowness(found: Mapping[str, Seen], right: Sequence[Mapping[str, Seen]], wanted: Sequence[str]) -> float | None:
    """Return a provider's time over the fastest right one's, the mean over the trials; None without a time."""
    times = [found[name].microseconds if name in found else None for name in wanted]
    if not right or not all(times):
        return None
    best = [min(other[name].microseconds or math.inf for other in right) for name in wanted]
    return math.exp(sum(math.log((mine or 0.0) / least) for mine, least in zip(times, best, strict=True)) / len(best))


def _fault(found: Mapping[str, Seen], wanted: Sequence[str]) -> str | None:
    for name in wanted:
        one = found.get(name)
        if one is None:
            return f"{name}: no result"
        if one.fault is not None:
            return f"{name}: {one.fault}"
        if one.microseconds is None:
            return f"{name}: not timed"
    return None


def choose(found: Sequence[Standing], *, eight_bit_activations: bool) -> KernelChoice:
    """Return the fastest right choice: a bundled kernel, or vLLM's own pick where one of its kernels is faster.

    What vLLM takes only if its options name it (`ON_REQUEST`) is compared, not chosen: its own pick would be another.

    Args:
        found: how the providers stand.
        eight_bit_activations: whether W4A8 may be chosen, which rounds the experts' input; only where vLLM's own pick
            does so too.
    """
    providers: dict[Op, str] = {}
    for op in Op:
        right = {s.provider: s.slowness for s in found if s.op is op and s.slowness is not None}
        for name in ON_REQUEST if eight_bit_activations else (BUNDLED_W4A8, *ON_REQUEST):
            right.pop(name, None)
        if not right:
            continue
        best = min(right, key=lambda provider: right[provider])
        providers[op] = best if best in (BUNDLED, BUNDLED_W4A8) else STOCK
    return KernelChoice(providers)
