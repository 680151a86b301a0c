"""Layout of the KV cache in vLLM: groups of layers that share blocks, bytes of a block, blocks of a request.

vLLM (0.29 to 0.33) has one pool of blocks of equal size. Layers of one kind form groups; the widest group determines
the bytes of a block. A request holds blocks for its whole context in the compressed groups, and in the window groups
(sliding window, compressor state) for its window and every token in flight (scheduled, not settled). V4.1 has a ring of
one block for the compressor state. Follows `v1/core/kv_cache_utils.py` (`_get_packed_kv_cache_groups`,
`get_max_concurrency_for_kv_cache_config`) and `max_admission_blocks_per_request` in `v1/kv_cache_interface.py`; a test
compares it with vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from dsv4_operator.planning.catalog.records import Model, Range

_WINDOW_TOKENS = 64
_WINDOW_TOKENS_SHARED = 32
"""For models whose layers share their compressed caches (V4.1)."""
_STATE_TOKENS = {4: 4, 128: 8}
_INDEX_EXTRA = 4  # one FP32 scale beside the 128 values of an indexer key


@dataclass(frozen=True, slots=True)
class Format:
    """Storage format of a token."""

    name: str
    token_bytes: int
    """Bytes in the main cache."""
    alignment: int
    """Multiple to which pages are rounded up."""

    def padded(self, size: int) -> int:
        """Return the bytes of a page for `size` bytes."""
        return -(-size // self.alignment) * self.alignment


FORMATS = {
    form.name: form
    for form in (
        # 448 FP8 values, 64 BF16 values of the rotary part, 8 bytes of scales.
        Format("fp8_ds_mla", 584, 576),
        Format("bf16", 1024, 512),
        # Community builds only; the bytes of a token follow from the logged block size, 1 065 792 bytes for Flash.
        Format("nvfp4_ds_mla", 584, 576),
    )
}
_LOGGED_BLOCK = {("nvfp4_ds_mla", 43): 1_065_792}
"""Logged bytes of a block of builds whose format is not public, by format and layers."""
_RELEASED_REQUEST = Range(0.995, 1.0, 1.005)
"""Logged over planned blocks of a request of builds with a public format."""
_LOGGED_REQUEST = Range(0.91, 0.95, 1.03)
"""Correction for those builds: three of 0.26 hold 6 to 9 % fewer blocks for a request, one of 0.25 1 % more."""


@dataclass(frozen=True, slots=True)
class _LayerCache:
    """One cache of a layer."""

    layer: int
    kind: tuple[str, int]
    """Kind (whole context, window or ring) and tokens of a block; caches of one kind share a bucket."""
    window: int
    page: int


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with a common block table."""

    block_tokens: int
    """0: one block for a request of any length."""
    window: int
    """0: the whole context."""
    pages: tuple[tuple[int, int], ...]
    """(layer, bytes) of every cache of the group."""

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Return the maximum blocks of a request of `tokens` with `in_flight` tokens."""
        if not self.block_tokens:
            return 1
        if not self.window:
            return -(-tokens // self.block_tokens)
        # One more, because the window may begin within a block.
        return -(-min(self.window - 1 + in_flight, tokens) // self.block_tokens) + 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups of a model."""

    groups: tuple[KVGroup, ...]
    logged_block: int | None = None
    reserve: Range = _RELEASED_REQUEST
    """Logged over planned blocks of one request."""

    def bytes_per_block(self, layers: range) -> int:
        """Return the bytes of a block on a stage with `layers`; draft layers follow the last decoder layer."""
        if self.logged_block is not None:
            return self.logged_block
        return max((sum(page for layer, page in group.pages if layer in layers) for group in self.groups), default=0)

    def blocks_per_request(self, tokens: int, in_flight: int) -> int:
        """Return the maximum blocks of a request of `tokens`."""
        return math.ceil(self.reserve.expected * sum(group.blocks(tokens, in_flight) for group in self.groups))


@cache
def layout(
    model: Model, kv_format: str, drafts: int, draft_tokens: int = 0, window_groups: int = 3, state_pages: int = 0
) -> Layout:
    """Return vLLM's groups for the caches of `model` with `drafts` draft layers and `draft_tokens` of a step.

    `window_groups` and `state_pages` are those of the build (`Build`).

    Raises:
        ValueError: the format is unknown, or the model does not support it.
    """
    if kv_format not in FORMATS:
        raise ValueError(f"the KV cache format {kv_format!r} is unknown; known are {', '.join(FORMATS)}")
    if model.kv_sources:
        if kv_format == "nvfp4_ds_mla":
            raise ValueError(f"{model.name} has the KV cache format nvfp4_ds_mla on SM100 only; leave kvCacheDtype out")
        return Layout(_groups(list(_shared_caches(model, FORMATS[kv_format], drafts, draft_tokens, state_pages))))
    groups = _groups(list(_caches(model, FORMATS[kv_format], drafts)))
    if drafts > 1:
        # Logs of builds with several DSpark stages match three groups of window layers (ECO, MIA; NEP two), those of
        # b12x builds for Spark six.
        groups = _with_window_groups(groups, model.window, window_groups)
    logged = _LOGGED_BLOCK.get((kv_format, len(model.layers)))
    return Layout(groups, logged, _LOGGED_REQUEST if logged else _RELEASED_REQUEST)


def _caches(model: Model, form: Format, drafts: int) -> Iterator[_LayerCache]:
    padded = form.padded
    for layer, ratio in enumerate((*model.compress_ratios, *(0,) * drafts)):
        # In registration order of vLLM's layers: it determines the first layer of a group, not their number.
        yield _LayerCache(layer, ("window", _WINDOW_TOKENS), model.window, padded(_WINDOW_TOKENS * form.token_bytes))
        if ratio not in _STATE_TOKENS:
            continue
        tokens, width = _STATE_TOKENS[ratio], 2 if ratio == 4 else 1
        yield _LayerCache(
            layer, ("whole", model.block_tokens), 0, padded(model.block_tokens // ratio * form.token_bytes)
        )
        state = tokens * 2 * width * 4
        yield _LayerCache(layer, ("window", tokens), width * ratio, padded(state * model.head_dim))
        if ratio == 4:
            keys = model.block_tokens // ratio * (model.index_dim + _INDEX_EXTRA)
            yield _LayerCache(layer, ("whole", model.block_tokens), 0, padded(keys))
            yield _LayerCache(layer, ("window", tokens), width * ratio, padded(state * model.index_dim))


def _shared_caches(
    model: Model, form: Format, drafts: int, draft_tokens: int, state_pages: int
) -> Iterator[_LayerCache]:
    """Yield the caches of V4.1 (`models/deepseek_v41/attention.py`, `compressor.py`).

    Few layers have a compressed cache and index keys. Rows before compression are in a ring of one block per request.
    """
    window_tokens = state_pages or _WINDOW_TOKENS_SHARED
    # A power of two for the rows of a step and one earlier row.
    rows = max(8, 1 << (draft_tokens + 1).bit_length())
    for layer, ratio in enumerate((*model.compress_ratios, *(0,) * drafts)):
        window = form.padded(window_tokens * form.token_bytes)
        yield _LayerCache(layer, ("window", window_tokens), model.window, window)
        if layer not in model.kv_sources:
            continue
        tokens = state_pages * ratio or model.block_tokens
        states = tokens // ratio
        yield _LayerCache(layer, ("whole", tokens), 0, form.padded(states * form.token_bytes))
        yield _LayerCache(layer, ("whole", tokens), 0, form.padded(states * (model.index_dim + _INDEX_EXTRA)))
        if ratio > 1:
            yield _LayerCache(layer, ("ring", 0), 0, rows * 2 * 4 * model.head_dim)


def _groups(caches: Sequence[_LayerCache]) -> tuple[KVGroup, ...]:
    buckets: dict[tuple[str, int, int], list[_LayerCache]] = {}
    for each in caches:
        buckets.setdefault((*each.kind, each.window), []).append(each)
    by_page = [_by_page(bucket) for bucket in buckets.values()]
    balanced = [len({len(same) for same in pages}) == 1 for pages in by_page]
    repeats = [max(len(same) for same in pages) for pages in by_page]
    even = [count for count, is_even in zip(repeats, balanced, strict=True) if is_even]
    # A bucket with a repeated pattern of several page sizes remains whole; buckets of one size are split to match it.
    whole = [count for count, pages, is_even in zip(repeats, by_page, balanced, strict=True) if is_even and pages[1:]]
    size = _split_size(even, max(whole)) if whole else 0
    parts_of = [-(-count // size) if is_even and size else 1 for count, is_even in zip(repeats, balanced, strict=True)]
    # Caches with few blocks per request may be split down to one layer a group, so that they do not widen the blocks.
    splits = [kind == "ring" or (kind == "window" and not size) for kind, _, _ in buckets]
    width = max(
        sum(-(-len(same) // (sum(map(len, pages)) if split else parts)) * same[0].page for same in pages)
        for pages, split, parts in zip(by_page, splits, parts_of, strict=True)
    )
    found = []
    for (_, tokens, window), pages, split, least in zip(buckets, by_page, splits, parts_of, strict=True):
        fitting = max(width // pages[0][0].page, 1)
        parts = max(least, -(-sum(map(len, pages)) // fitting)) if split else least
        if parts == 1:
            found.append(KVGroup(tokens, window, _pages(each for same in pages for each in same)))
            continue
        rows = list(zip(*pages, strict=True))
        for part in range(parts):
            found.append(KVGroup(tokens, window, _pages(each for row in rows[part::parts] for each in row)))
    return tuple(found)


def _by_page(bucket: Iterable[_LayerCache]) -> list[list[_LayerCache]]:
    sizes: dict[int, list[_LayerCache]] = {}
    for each in bucket:
        sizes.setdefault(each.page, []).append(each)
    return list(sizes.values())


def _pages(caches: Iterable[_LayerCache]) -> tuple[tuple[int, int], ...]:
    return tuple((each.layer, each.page) for each in caches)


def _split_size(counts: Sequence[int], floor: int) -> int:
    """Return the group size of at least `floor` with the least total padding; of equal ones the greatest."""
    return max(range(floor, max(counts) + 1), key=lambda size: (-sum(-count % size for count in counts), size))


def _with_window_groups(groups: tuple[KVGroup, ...], window: int, count: int) -> tuple[KVGroup, ...]:
    """Return `groups` with at least `count` groups of window layers."""
    found = sum(group.window == window and group.block_tokens == _WINDOW_TOKENS for group in groups)
    return (*groups, *(KVGroup(_WINDOW_TOKENS, window, ()),) * (count - found))
