"""Compared part of one run of a bundled operation, and the inputs of its reference.

Operations that compute each token independently are compared in the first and the last rows of a run (`HALF` of each).
Operations that write into a cache of the engine are compared in the entries written by the run: the reference receives
a copy of their blocks, with the slots renumbered. Rows and blocks are copied before the run, which may overwrite its
inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from dsv4_kernels.registry import Operation, fresh

Tensors = tuple[torch.Tensor, ...]

HALF = {"moe_w4a16": 16, "moe_w4a8": 16}
"""Rows from each end of a run, if different from `USUAL`: the reference widens every expert that the rows use."""
USUAL = 64

# Inputs with a row for each token, and the dimension of the rows.
_MHC = ("residual", "x", "post_layer_mix", "comb_res_mix", "hs_flat")
_DECODE = ("q", "swa_idx", "swa_len", "cmp_idx", "cmp_len", "positions", "request", "counts")
_ROWS: Mapping[str, Mapping[str, int]] = {
    "fp8_quant": {"x": 0},
    "silu_mul_quant": {"x": 0},
    "front_norm": {"qr": 0, "kv": 0},
    "fp8_gemm": {"a": 0, "a_scale": 0},
    "wo_a_einsum": {"a": 0, "a_scale": 0},
    "mla_decode": dict.fromkeys(_DECODE, 0),
    "mla_decode_o8": dict.fromkeys(_DECODE, 0),
    "mla_prefill": dict.fromkeys(("q", "indices", "lengths"), 0),
    "mla_merge": {"o": 1, "lse": 1},
    "mla_merge_o8": {"o": 1, "lse": 1, "positions": 0},
    "mhc_pre": dict.fromkeys(_MHC, 0),
    "mhc_pre_broadcast": dict.fromkeys(_MHC, 0),
    "mhc_post_pre": dict.fromkeys(_MHC, 0),
    "mhc_post": dict.fromkeys(_MHC, 0),
    "mhc_head": dict.fromkeys(_MHC, 0),
    "moe_w4a16": {"x": 0, "topk_ids": 0, "topk_weights": 0, "addend": 0},
    "moe_w4a8": {"x": 0, "topk_ids": 0, "topk_weights": 0, "addend": 0},
    "indexer_query": {"positions": 0, "index_q": 0, "index_weights": 0},
    "router": {"x": 0, "input_ids": 0, "padding": 0},
    "topk": {"logits": 0, "lengths": 0},
    "indexer_logits": {"q": 0, "weights": 0, "cu_seqlen_ks": 0, "cu_seqlen_ke": 0},
}


def _as_it_is(results: Tensors) -> Tensors:
    return results


def _both(results: Tensors, expected: Tensors) -> tuple[Tensors, Tensors]:
    return results, expected


@dataclass(frozen=True)
class Sample:
    """Part of a run: the reference's `inputs`, and functions that align the run's results with the reference's.

    `pick` selects it from the run's results. `level` changes both sides alike, after the operation's own `compared`.
    """

    inputs: Mapping[str, Any]
    pick: Callable[[Tensors], Tensors] = _as_it_is
    level: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]] = _both


def sample(plan: Any, operation: Operation, inputs: Mapping[str, Any]) -> Sample | None:
    """Return the compared part of a run of `plan`, before it runs; None if the run writes nothing."""
    known = inspect.signature(operation.reference).parameters
    given = {name: value for name, value in inputs.items() if name in known}
    if "pages" in known:
        given.setdefault("pages", plan.shape["pages"])
    name = operation.name
    if name == "compressor_save":
        return _saved(given)
    if name == "projections":
        return _projected(given)
    if name in ("compressor_store", "compressor_store_indexer"):
        return _stored(given)
    if name == "mla_prefill_lists":
        return _listed(given)
    if name == "front_insert":
        return _inserted(given)
    if name == "indexer_paged_logits":
        return _paged_scores(given)
    if name == "topk":
        # The reference would also write into the engine's buffer; lengths are by request and row.
        given = {**given, "lengths": given["lengths"].flatten(), "out": None}
    if name not in _ROWS:
        return Sample(fresh(operation, given))
    found = _rows(name, given)
    if found is None or name != "indexer_logits":
        return found
    lengths = found.inputs["cu_seqlen_ke"] - found.inputs["cu_seqlen_ks"]
    width = inputs["out"].shape[1]
    return Sample({**found.inputs, "out": _zeros(lengths, width)}, found.pick, _within(lengths, width))


def _rows(name: str, inputs: Mapping[str, Any]) -> Sample | None:
    """Return the first and the last rows of a run with a row for each token."""
    by_row = {key: dim for key, dim in _ROWS[name].items() if inputs.get(key) is not None}
    key, dim = next(iter(by_row.items()))
    device, count = inputs[key].device, inputs[key].shape[dim]
    if not count:
        return None
    half = HALF.get(name, USUAL)
    rows = torch.arange(count, device=device)
    if count > 2 * half:
        rows = torch.cat((rows[:half], rows[count - half :]))
    # Indexing copies: a run of hyper-connections overwrites its own inputs. Positions may be longer.
    taken = {key: inputs[key].index_select(dim, rows) for key, dim in by_row.items()}
    level = _by_size if name.startswith("moe_") else _both
    return Sample({**inputs, **taken}, lambda results: tuple(result[rows] for result in results), level)


def _by_size(results: Tensors, expected: Tensors) -> tuple[Tensors, Tensors]:
    """Scale the expected values to a root mean square of one, to which the experts' absolute limit refers."""
    size = expected[0].double().square().mean().sqrt()
    scale = torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    return (results[0].double() / scale,), (expected[0].double() / scale,)


def _zeros(lengths: torch.Tensor, width: int) -> torch.Tensor:
    return torch.zeros((lengths.numel(), width), dtype=torch.float32, device=lengths.device)


def _within(lengths: torch.Tensor, width: int) -> Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]:
    """Return a function that excludes the columns beyond each row's keys, which are not written."""
    there = torch.arange(width, device=lengths.device) < lengths.flatten()[:, None]

    def level(results: Tensors, expected: Tensors) -> tuple[Tensors, Tensors]:
        return (results[0].masked_fill(~there, 0.0),), (expected[0].masked_fill(~there, 0.0),)

    return level


def _paged_scores(inputs: Mapping[str, Any]) -> Sample | None:
    """Return all rows of a step: there are few, and those of a request are scored together."""
    lengths, width = inputs["context_lens"].clone(), inputs["out"].shape[1]
    if not lengths.numel():
        return None
    rows = lengths.numel()
    return Sample(
        {**inputs, "context_lens": lengths, "out": _zeros(lengths, width)},
        lambda results: (results[0][:rows],),
        _within(lengths, width),
    )


@dataclass(frozen=True)
class _Blocks:
    """Blocks of a cache that a run writes into; entry `offset` of block `where` of `blocks` is written.

    `slots` are those of the run, renumbered into `blocks`; slots that are not written are −1.
    """

    blocks: torch.Tensor
    where: torch.Tensor
    offset: torch.Tensor
    slots: torch.Tensor

    def entries(self, results: Tensors, expected: Tensors) -> tuple[Tensors, Tensors]:
        """Return the written entries of both sides."""
        at = (self.where, self.offset)
        return tuple(x[at] for x in results), tuple(x[at] for x in expected)


def _blocks(slots: torch.Tensor, written: torch.Tensor, size: int) -> _Blocks | None:
    """Return the blocks of `size` entries that contain the `written` slots, limited to slots with a single token."""
    each, token_of, counts = torch.unique(slots[written], return_inverse=True, return_counts=True)
    alone = written.clone()
    # vLLM's null block may receive several tokens; the entry that remains is undefined.
    alone[written] = counts[token_of] == 1
    kept = each[counts == 1]
    if not kept.numel():
        return None
    blocks, where = torch.unique(slots[alone] // size, return_inverse=True)
    offset = slots[alone] % size
    renumbered = torch.full_like(slots, -1)
    renumbered[alone] = where * size + offset
    return _Blocks(blocks, where, offset, renumbered)


def _saved(inputs: Mapping[str, Any]) -> Sample | None:
    """Return the states that a run of `compressor_save` writes."""
    cache, slots = inputs["state_cache"], inputs["slot_mapping"]
    touched = _blocks(slots, slots >= 0, cache.shape[1])
    if touched is None:
        return None
    copied = {"state_cache": cache[touched.blocks], "slot_mapping": touched.slots}
    return Sample({**inputs, **copied}, lambda results: (results[0][touched.blocks],), touched.entries)


def _projected(inputs: Mapping[str, Any]) -> Sample | None:
    """Return the states that a run of `projections` writes, and its other results."""
    prefixes = [prefix for prefix in ("", "index_") if inputs.get(f"{prefix}state_cache") is not None]
    found: list[_Blocks] = []
    copied: dict[str, torch.Tensor] = {}
    for prefix in prefixes:
        cache, slots = inputs[f"{prefix}state_cache"], inputs[f"{prefix}slot_mapping"]
        touched = _blocks(slots, slots >= 0, cache.shape[1])
        if touched is None:
            return None
        found.append(touched)
        copied |= {f"{prefix}state_cache": cache[touched.blocks], f"{prefix}slot_mapping": touched.slots}

    def entries(results: Tensors) -> Tensors:
        states = (result[b.where, b.offset] for result, b in zip(results, found, strict=False))
        return (*states, *results[len(found) :])

    return Sample(
        {**inputs, **copied},
        lambda results: (*(r[b.blocks] for r, b in zip(results, found, strict=False)), *results[len(found) :]),
        lambda results, expected: (entries(results), entries(expected)),
    )


def _listed(inputs: Mapping[str, Any]) -> Sample | None:
    """Return the lists of the last tokens of each request: the reference writes them sequentially on the host."""
    starts = inputs["query_start_loc"].tolist()
    kept = [min(USUAL, end - begin) for begin, end in pairwise(starts)]
    if not sum(kept):
        return None
    ends = [end - starts[0] for end in starts[1:]]
    device = inputs["chosen"].device
    rows = torch.cat([torch.arange(end - count, end, device=device) for end, count in zip(ends, kept, strict=True)])
    fewer = torch.tensor([0, *accumulate(kept)], dtype=torch.int32, device=device)
    taken = {"chosen": inputs["chosen"][rows], "query_start_loc": fewer}
    return Sample({**inputs, **taken}, lambda results: tuple(result[rows] for result in results))


def _inserted(inputs: Mapping[str, Any]) -> Sample | None:
    """Return the queries of the first and the last rows of a run of `front_insert`, and the entries of these rows.

    If none of them has a slot, the queries are compared with a page into which nothing is written.
    """
    tokens, cache, page = inputs["q"].shape[0], inputs["kv_cache"], inputs["page"]
    if not tokens:
        return None
    rows = torch.arange(tokens, device=cache.device)
    rows = torch.cat((rows[:USUAL], rows[tokens - USUAL :])) if tokens > 2 * USUAL else rows
    # A step padded by a graph has fewer slots, and fewer keys, than queries.
    slots = torch.nn.functional.pad(inputs["slot_mapping"], (0, tokens - inputs["slot_mapping"].shape[0]), value=-1)
    keys = inputs["kv"].index_select(0, rows.clamp(max=inputs["kv"].shape[0] - 1))
    none = torch.zeros(0, dtype=torch.int64, device=cache.device)
    touched = _blocks(slots[rows], slots[rows] >= 0, page)
    touched = touched or _Blocks(none, none, none, torch.full_like(rows, -1))
    taken = {"q": inputs["q"][rows], "positions": inputs["positions"][rows], "kv": keys}
    copied = {"kv_cache": cache[touched.blocks], "slot_mapping": touched.slots}

    def entries(results: Tensors) -> Tensors:
        data, scales = results[1][:, : page * 576], results[1][:, page * 576 : page * 584]
        whole = torch.cat((data.view(-1, page, 576), scales.view(-1, page, 8)), 2)
        return results[0], whole[touched.where, touched.offset]

    return Sample(
        {**inputs, **taken, **copied},
        lambda results: (results[0][rows], results[1][touched.blocks]),
        lambda results, expected: (entries(results), entries(expected)),
    )


def _stored(inputs: Mapping[str, Any]) -> Sample | None:
    """Return the entries that a run of `compressor_store` writes: those with a complete window."""
    cache, slots, places = inputs["kv_cache"], inputs["slot_mapping"], inputs["kv_slot_mapping"]
    last = (inputs["positions"][: slots.shape[0]] + 1) % inputs["compress_ratio"] == 0
    touched = _blocks(places, (slots >= 0) & (places >= 0) & last, cache.shape[1])
    if touched is None:
        return None
    copied = {"kv_cache": cache[touched.blocks], "kv_slot_mapping": touched.slots}
    return Sample({**inputs, **copied}, lambda results: (results[0][touched.blocks],), touched.entries)
