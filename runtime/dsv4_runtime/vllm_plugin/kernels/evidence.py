"""Observations of each provider on this card, their persistent form, and the resulting choice. Pure.

The shapes are those of the deployment: sizes from the model's `config.json`, divided among the engine's ranks, for one
request, a small batch, and a piece of a prompt where the operation also processes prompts.

Only conclusive outcomes are kept: a correct provider with a time, or a result that differs by comparison. Other faults
(timeouts, signals, exceptions, lack of memory, missing packages) may be temporary: the provider is tried again at the
next start, and counted, until it is excluded permanently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dsv4_kernels.mla_prefill.api import list_width
from dsv4_runtime.contract.kernels import BUNDLED, BUNDLED_W4A8, ON_REQUEST, STOCK, KernelChoice, Op


@dataclass(frozen=True)
class Trial:
    """One shape of one operation on which every provider is tried.

    `operation` is the row of `dsv4_kernels.registry` with inputs, reference and tolerance.
    """

    op: Op
    name: str
    operation: str
    params: Mapping[str, Any]


WRONG = "wrong: "
"""Prefix of the fault of a compared result outside of the tolerance."""
ABSENT = "not here"
"""Prefix of the fault of a provider without its package."""
STARTS = 3
"""Attempts, at different starts, without a conclusive outcome before a provider is excluded permanently."""
PREFILL = 1024
"""Tokens of a piece of a prompt."""


@dataclass(frozen=True)
class Seen:
    """Outcome of one trial of one provider.

    `fault` is None for a result within the contract's tolerance, else a description. `microseconds` is the median with
    a cold L2 cache, None without timing; of wrong providers only the known rough ones are timed. `error` is the largest
    relative root mean square error of the outputs.
    """

    op: Op
    trial: str
    provider: str
    fault: str | None = None
    microseconds: float | None = None
    error: float | None = None

    @property
    def conclusive(self) -> bool:
        """Whether the outcome is valid for all starts on this card."""
        return self.microseconds is not None if self.fault is None else self.fault.startswith(WRONG)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, document: Any) -> Seen:
        """Return the object serialized by `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: invalid document.
        """
        found = cls(**{**document, "op": Op(document["op"])})
        if not all(isinstance(text, str) for text in (found.trial, found.provider, found.fault or "")):
            raise TypeError(f"no text: {document}")
        if found.microseconds is not None and not 0.0 < found.microseconds < math.inf:
            raise ValueError(f"no time: {found.microseconds}")
        return found


@dataclass(frozen=True)
class Failed:
    """Number of starts without a conclusive outcome of a provider, and the last fault."""

    starts: int
    fault: str


@dataclass(frozen=True)
class Kept:
    """Conclusive outcomes, and the providers without one, by operation and name."""

    seen: tuple[Seen, ...] = ()
    failed: Mapping[tuple[Op, str], Failed] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "seen": [one.to_dict() for one in self.seen],
            "failed": [
                {"op": op, "provider": name, "starts": one.starts, "fault": one.fault}
                for (op, name), one in self.failed.items()
            ],
        }

    @classmethod
    def from_dict(cls, document: Any) -> Kept:
        """Return the object serialized by `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: invalid document.
        """
        seen = tuple(map(Seen.from_dict, document["seen"]))
        failed = {
            (Op(one["op"]), str(one["provider"])): Failed(int(one["starts"]), str(one["fault"]))
            for one in document["failed"]
        }
        return cls(tuple(one for one in seen if one.conclusive), failed)

    def outcomes(self, tried: Sequence[Trial]) -> tuple[Seen, ...]:
        """Return the conclusive outcomes, and the fault of the other trials of failed providers."""
        done = {(one.op, one.provider, one.trial) for one in self.seen}
        faults = tuple(
            Seen(op, trial.name, name, fault=f"{one.fault} ({_starts(one.starts)})")
            for (op, name), one in self.failed.items()
            for trial in tried
            if trial.op is op and (op, name, trial.name) not in done
        )
        return self.seen + faults

    def after(self, seen: Iterable[Seen], tried: Sequence[Trial]) -> Kept:
        """Return the state after one more start with the observations `seen`."""
        now = tuple(seen)
        known = {(one.op, one.provider, one.trial): one for one in self.seen}
        known |= {(one.op, one.provider, one.trial): one for one in now if one.conclusive}
        merged = Kept(tuple(known.values()))
        failed = dict(self.failed)
        for job in dict.fromkeys((one.op, one.provider) for one in now):
            before = failed.pop(job, Failed(0, ""))
            faults = [one.fault or "not timed" for one in now if (one.op, one.provider) == job and not one.conclusive]
            if not merged.is_decided(job, tried):
                failed[job] = Failed(before.starts + 1, faults[0] if faults else "no result")
        return replace(merged, failed=failed)

    def is_decided(self, job: tuple[Op, str], tried: Sequence[Trial]) -> bool:
        """Return whether the provider is not tried again: all trials are conclusive, or it is excluded permanently."""
        done = {one.trial for one in self.seen if (one.op, one.provider) == job}
        return self._is_excluded(job) or {trial.name for trial in tried if trial.op is job[0]} <= done

    def open(self, jobs: Sequence[tuple[Op, str]], tried: Sequence[Trial]) -> tuple[tuple[Op, str], ...]:
        """Return the members of `jobs` (operation and provider) to try at this start.

        With a failed provider the others of its operation are timed again for comparable times. A missing provider is
        tried alone.
        """
        undecided = {job for job in jobs if not self.is_decided(job, tried)}
        anew = {op for op, name in undecided if not self._is_absent((op, name))}
        return tuple(job for job in jobs if job in undecided or (job[0] in anew and not self._is_excluded(job)))

    def _is_absent(self, job: tuple[Op, str]) -> bool:
        return job in self.failed and self.failed[job].fault.startswith(ABSENT)

    def _is_excluded(self, job: tuple[Op, str]) -> bool:
        wrong = any(one.fault for one in self.seen if (one.op, one.provider) == job)
        return wrong or (job in self.failed and self.failed[job].starts >= STARTS)


def _starts(number: int) -> str:
    return f"attempt {number} of {STARTS}, at most one a day" if number < STARTS else f"{STARTS} attempts, for good"


@dataclass(frozen=True)
class Standing:
    """Result of a provider for an operation: `slowness` is the mean ratio of its time to the fastest correct one over
    the trials; None, with the reason in `excluded`, if it must not be used.
    """

    op: Op
    provider: str
    slowness: float | None
    excluded: str | None = None


SIZES = (
    "hidden_size", "q_lora_rank", "head_dim", "num_attention_heads", "o_groups", "o_lora_rank", "moe_intermediate_size",
    "n_routed_experts", "num_experts_per_tok", "sliding_window", "index_topk", "index_n_heads",
)  # fmt: skip
"""Fields of a model's `config.json` used by `trials`."""


def trials(
    config: Mapping[str, Any],
    tensor_parallel: int,
    *,
    data_parallel: int = 1,
    expert_parallel: bool = False,
    redundant_experts: int = 0,
    large_products: bool = False,
) -> tuple[Trial, ...]:
    """Return the shapes of a rank of an engine.

    Args:
        config: the fields `SIZES` of the model's `config.json`.
        tensor_parallel: ranks that share a layer's heads.
        data_parallel: replicas of these ranks; experts are distributed over all ranks.
        expert_parallel: ranks have whole experts instead of a share of each.
        redundant_experts: additional copies of experts with expert parallelism.
        large_products: FP8 products of prompts are bundled too.
    """
    hidden, q_lora, head = config["hidden_size"], config["q_lora_rank"], config["head_dim"]
    heads, groups = config["num_attention_heads"] // tensor_parallel, config["o_groups"] // tensor_parallel
    width, lora = config["moe_intermediate_size"], config["o_lora_rank"]
    # vLLM divides the shared experts in whole blocks.
    shared = -(-(width // 128) // tensor_parallel) * 128 if width % 128 == 0 else width // tensor_parallel
    padded = next((most for most in (8, 16, 32, 64, 128) if heads <= most), heads)
    products = {
        "wqa_wkv": (q_lora + head, hidden),
        "wq_b": (heads * head, q_lora),
        "wo_b": (hidden, groups * lora),
        "w13": (2 * shared, hidden),
        "w2": (hidden, shared),
    }
    found = [
        Trial(Op.FP8_LINEAR, f"{name}-t{tokens}", "fp8_gemm", {"tokens": tokens, "n": n, "k": k})
        for name, (n, k) in products.items()
        for tokens in ((1, 16, PREFILL) if large_products else (1, 16))
    ]
    experts, topk = config["n_routed_experts"], config["num_experts_per_tok"]
    spread = tensor_parallel * data_parallel
    moe: dict[str, Any] = {"inter": width // spread, "experts": experts}
    if expert_parallel and spread > 1:
        # Most experts of a token are on other ranks.
        local = -(-(experts + redundant_experts) // spread)
        moe = {"inter": width, "experts": local, "routing": "holes", "ranks": spread}
    window, chosen = config["sliding_window"], config["index_topk"]
    # Workspace rows are window and compressed entries of some thousand tokens with values of a packed cache, so that
    # providers that read packed pages are comparable.
    columns = list_width(chosen, window)
    prefill = {"heads": heads, "width": columns, "window": window, "rows": 4096, "dense": True, "packed": True}
    found += [
        *_at((1, 8, 128, PREFILL), Op.MOE, "moe_w4a16", hidden=hidden, topk=topk, **moe),
        *_at((1, 8, 64), Op.MLA_DECODE, "mla_decode", heads=heads, window=window, topk=chosen),
        *_at((128, PREFILL), Op.MLA_PREFILL, "mla_prefill", **prefill),
        *_at((1, 64, PREFILL), Op.FRONT, "front_insert", heads=heads, padded=padded, page=64, dense=True),
        *(Trial(Op.FRONT, f"norm-t{t}", "front_norm", {"tokens": t, "rank": q_lora}) for t in (64, PREFILL)),
        *_at((1, 8, 128, PREFILL), Op.O_PROJ, "wo_a_einsum", groups=groups, n=lora, k=heads // groups * head),
        *_at((1, 8, 128, PREFILL), Op.MHC, "mhc_post_pre", hidden=hidden, norm=True),
    ]
    for ratio, tokens in itertools.product((4, 128), (1, 32, PREFILL)):
        entries = {"tokens": tokens, "head": head, "ratio": ratio, "page": 256 // ratio, "dense": True}
        found.append(Trial(Op.COMPRESSOR, f"r{ratio}-t{tokens}", "compressor_store", entries))
    scores = {"keys": 4096, "heads": config["index_n_heads"]}
    for batch in (1, 8):
        paged = {"batch": batch, "next_n": 1, "page": 64, **scores}
        found.append(Trial(Op.INDEXER, f"b{batch}-k4096", "indexer_paged_logits", paged))
    prompt = {"rows": PREFILL, "dense": True, **scores}
    found.append(Trial(Op.INDEXER, f"s{PREFILL}-k4096", "indexer_logits", prompt))
    found += _at((1, 8, 128, PREFILL), Op.ROUTER, "router", hidden=hidden, experts=experts, k=topk)
    # Decode steps, with scores of 16 Ki and 128 Ki tokens of context, and a piece of a prompt.
    found += [
        Trial(Op.TOPK, f"r{rows}-n{width}", "topk", {"rows": rows, "width": width, "k": chosen, "dense": True})
        for rows, width in ((1, 4096), (8, 4096), (8, 32768), (PREFILL, 4096))
    ]
    return tuple(found)


def _at(counts: Iterable[int], op: Op, operation: str, **params: Any) -> list[Trial]:
    """Return the trials of one operation at several token counts."""
    return [Trial(op, f"t{tokens}", operation, {"tokens": tokens, **params}) for tokens in counts]


def standings(seen: Iterable[Seen], tried: Sequence[Trial]) -> tuple[Standing, ...]:
    """Return the result of each provider: excluded by its first fault, or by a trial without a time."""
    by: dict[tuple[Op, str], dict[str, Seen]] = {}
    for one in seen:
        by.setdefault((one.op, one.provider), {})[one.trial] = one
    wanted = {op: [t.name for t in tried if t.op is op] for op in Op}
    excluded = {key: _fault(found, wanted[key[0]]) for key, found in by.items()}
    result = []
    for (op, provider), found in by.items():
        reason = excluded[op, provider]
        right = [other for (o, p), other in by.items() if o is op and excluded[o, p] is None]
        slowness = _slowness(found, right, wanted[op])
        if reason is not None and slowness is not None:
            trial, _, fault = reason.partition(": ")
            reason = f"{trial}: {slowness:.2f} of the fastest right one's time, but {fault}"
        result.append(Standing(op, provider, slowness if reason is None else None, reason))
    return tuple(result)


def _slowness(found: Mapping[str, Seen], right: Sequence[Mapping[str, Seen]], wanted: Sequence[str]) -> float | None:
    """Return the mean ratio of a provider's time to the fastest correct one over the trials; None without a time."""
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
    """Return the fastest correct choice: a bundled kernel, or vLLM's own selection where one of its kernels is faster.

    Kernels that vLLM uses only by an explicit option (`ON_REQUEST`) are compared but not chosen: vLLM would select
    another one.

    Args:
        found: results of the providers.
        eight_bit_activations: allow W4A8, which rounds the experts' input; only where vLLM's own selection does the
            same.
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
