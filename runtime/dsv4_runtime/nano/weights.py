"""Tensors of the nano model, their quantisation, and the checkpoint's files.

Names follow vLLM's mapping (`models/deepseek_v4/nvidia/model.py`, `cpu/model.py`). Each tensor has its own random
stream, derived from seed and tensor name, so that neither the order nor the size of other tensors changes it.

Purely random weights make a poor test model: in bfloat16 the summation order decides which expert is sixth and which
token is first, so that two correct engines soon diverge. Therefore most of an expert is common to all experts of its
layer, and the output layer has two parts: one favours a fixed successor of each word, which provides margins; the other
is random and reads the rest of the hidden state, which makes the output depend on the context. Figures:
docs/decisions/0002-nano-model.md.

The draft layers favour the same successor, so that many but not all drafts are accepted: an MTP layer passes the last
word nearly unchanged, and DSpark's bias by the previous token has the same successor.

Both quantised formats of the released checkpoints use power-of-two scales stored as UE8M0: one byte, the exponent plus
127, no sign and no mantissa. Sources: vLLM `model_executor/layers/quantization/{fp8,mxfp4}.py`; OCP Microscaling
Formats v1.0, section 6.3 (MXFP4).
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dsv4_runtime.nano.recipe import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    Drafts,
    Precision,
    Recipe,
    model_config,
    tokenizer_config,
    tokenizer_json,
    word_ids,
)

_BIAS = 127
_FP8_MAX = 448.0
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_MAX_EXPONENT = 2  # 6.0 = 1.5 * 2**2
_FP4_LAST = len(_FP4_VALUES) - 1
_ROUND_E2M1 = (1 << 21) - 1 - (((_BIAS - 1) * 2) << 22)
"""Half of the last bit that E2M1 keeps, less one so that halfway values are rounded down, less the bits of 0.5."""


def _ue8m0(exponent: torch.Tensor) -> torch.Tensor:
    """Store integer exponents (any integer dtype) as `float8_e8m0fnu` of the same shape."""
    return (exponent.clamp(-_BIAS, _BIAS) + _BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _log2(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the base-2 logarithm of positive float32 values rounded down and up, exactly, as int32."""
    mantissa, exponent = torch.frexp(value)  # mantissa from 0.5, below 1
    down = exponent - 1
    return down, torch.where(mantissa == 0.5, down, exponent)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return `2**exponent` exactly, as float32, for int32 exponents; subnormal results become 2**-126."""
    return ((exponent.clamp(-126, 127) + _BIAS) << 23).view(torch.float32)


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 `[n, k]` to e4m3 `[n, k]` and UE8M0 scales `[n/128, k/128]`.

    The scale is the smallest power of two that brings the block into the e4m3 range, so that no value saturates.

    Raises:
        ValueError: `n` or `k` is not a multiple of 128.
    """
    rows, columns = weight.shape
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        raise ValueError(
            f"FP8 weight of shape [{rows}, {columns}]: both sizes must be multiples of {FP8_BLOCK}; change the recipe"
        )
    blocks = weight.reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    peak = blocks.abs().amax(dim=(1, 3)).clamp_min(torch.finfo(torch.float32).tiny)
    _, exponent = _log2(peak / _FP8_MAX)
    scaled = blocks * _power(-exponent)[:, None, :, None]
    return scaled.to(torch.float8_e4m3fn).reshape(weight.shape), _ue8m0(exponent)


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 `[n, k]` to packed E2M1 int8 `[n, k/2]` and UE8M0 scales `[n, k/32]`.

    Even `k` is in the low nibble. The exponent follows OCP MX: the exponent of the block's peak minus that of the
    format's peak, so that values above 6 after scaling saturate. Halfway values are rounded to the smaller magnitude.

    Raises:
        ValueError: `k` is not a multiple of 32.
    """
    rows, columns = weight.shape
    if columns % MXFP4_BLOCK:
        raise ValueError(
            f"MXFP4 weight of shape [{rows}, {columns}]: the second size must be a multiple of {MXFP4_BLOCK}; "
            "change the recipe"
        )
    blocks = weight.reshape(rows, columns // MXFP4_BLOCK, MXFP4_BLOCK)
    peak = blocks.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    exponent = _log2(peak)[0] - _FP4_MAX_EXPONENT
    scaled = (blocks * _power(-exponent)[..., None]).reshape(rows, columns)
    code = _e2m1(scaled.abs()) | ((scaled < 0).to(torch.uint8) << 3)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return packed.view(torch.int8), _ue8m0(exponent)


def _e2m1(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the uint8 codes of float32 values of 0 and more: the indices of the nearest of `_FP4_VALUES`."""
    # Of values above 0.75, the exponent and the first bit of the mantissa, rounded, count from 0.5 on.
    rounded = ((magnitude.view(torch.int32) + _ROUND_E2M1) >> 22).clamp(0, _FP4_LAST)
    below = (magnitude > 0.25).to(torch.uint8) + (magnitude > 0.75)
    return torch.maximum(rounded.to(torch.uint8), below)


_NEXT_WORD_GAIN = 26.0  # logits added to the favoured successor where the state contains nothing but the last word
_CONTEXT_GAIN = 2.5  # standard deviation of the other word logits
_SILENT_GAIN = 0.1  # the same for other tokens, so that greedy text is readable
_ATTENTION_GAIN = 2.0  # of the outputs of attention and experts: the context outweighs
_EXPERT_GAIN = 0.5  # the last word
_EXPERT_SPREAD = 0.15  # individual share of an expert
_DRAFT_SPREAD = 1.5  # weight of the target's state in a draft layer's input, relative to the last word
_MARKOV_GAIN = 12.0  # logits of DSpark's bias for the favoured successor
_MARKOV_NOISE = 0.05  # standard deviation of the remaining entries of the bias's two factors


class Kind(StrEnum):
    """Storage format of a tensor in the released checkpoints."""

    LINEAR = "linear"  # FP8 128x128 with scales
    EXPERT = "expert"  # MXFP4 with scales
    BF16 = "bf16"
    FP32 = "fp32"
    INT64 = "int64"


@dataclass(frozen=True)
class Draw:
    """One tensor before it is stored: `value` is float32, or int64 for `Kind.INT64`."""

    name: str
    kind: Kind
    value: torch.Tensor


@dataclass(frozen=True)
class RandomStreams:
    """Random streams of a checkpoint."""

    seed: int

    def _stream(self, name: str) -> np.random.Generator:
        key = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()[:16]
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        """Draw float32 normals of `shape`."""
        return torch.from_numpy(self._stream(name).standard_normal(shape, dtype=np.float32)) * std + mean

    def permutation(self, name: str, count: int) -> torch.Tensor:
        """Draw the numbers below `count` in random order, int64 `[count]`."""
        return torch.from_numpy(self._stream(name).permutation(count))

    def rows_of_distinct(self, name: str, rows: int, columns: int, below: int) -> torch.Tensor:
        """Draw int64 `[rows, columns]` in `[0, below)` without repeats inside a row."""
        order = self._stream(name).random((rows, below)).argsort(axis=1)[:, :columns]
        return torch.from_numpy(np.ascontiguousarray(order))


def _norm(source: RandomStreams, name: str, dim: int) -> Draw:
    # Not exactly 1, so that a missing or repeated norm is visible.
    return Draw(name, Kind.BF16, source.normal(name, dim, std=0.1, mean=1.0))


def _compressor(source: RandomStreams, prefix: str, recipe: Recipe, ratio: int, dim: int) -> Iterator[Draw]:
    width = dim * (2 if ratio == 4 else 1)  # ratio 4 has overlapping windows: two series per token
    for part in ("wkv", "wgate"):
        name = f"{prefix}.{part}.weight"
        yield Draw(name, Kind.BF16, source.normal(name, width, recipe.hidden, std=recipe.hidden**-0.5))
    yield Draw(f"{prefix}.ape", Kind.FP32, source.normal(f"{prefix}.ape", ratio, width, std=0.3))
    yield _norm(source, f"{prefix}.norm.weight", dim)


def _attention(source: RandomStreams, prefix: str, recipe: Recipe, ratio: int) -> Iterator[Draw]:
    heads_dim = recipe.heads * recipe.head_dim
    linears = {
        "wq_a": (recipe.q_lora, recipe.hidden),
        "wq_b": (heads_dim, recipe.q_lora),
        "wkv": (recipe.head_dim, recipe.hidden),
        "wo_a": (recipe.o_groups * recipe.o_lora, heads_dim // recipe.o_groups),
        "wo_b": (recipe.hidden, recipe.o_groups * recipe.o_lora),
    }
    for part, (rows, columns) in linears.items():
        name = f"{prefix}.{part}.weight"
        gain = _ATTENTION_GAIN if part == "wo_b" else 1.0
        yield Draw(name, Kind.LINEAR, source.normal(name, rows, columns, std=gain * columns**-0.5))
    yield Draw(f"{prefix}.attn_sink", Kind.FP32, source.normal(f"{prefix}.attn_sink", recipe.heads, std=1.0))
    yield _norm(source, f"{prefix}.q_norm.weight", recipe.q_lora)
    yield _norm(source, f"{prefix}.kv_norm.weight", recipe.head_dim)
    if ratio:
        yield from _compressor(source, f"{prefix}.compressor", recipe, ratio, recipe.head_dim)
    if ratio == 4:
        name = f"{prefix}.indexer.wq_b.weight"
        shape = (recipe.index_heads * recipe.index_dim, recipe.q_lora)
        yield Draw(name, Kind.LINEAR, source.normal(name, *shape, std=recipe.q_lora**-0.5))
        name = f"{prefix}.indexer.weights_proj.weight"
        yield Draw(name, Kind.BF16, source.normal(name, recipe.index_heads, recipe.hidden, std=recipe.hidden**-0.5))
        yield from _compressor(source, f"{prefix}.indexer.compressor", recipe, ratio, recipe.index_dim)


def _experts(source: RandomStreams, prefix: str, recipe: Recipe, layer: int) -> Iterator[Draw]:
    shapes = {"w1": (recipe.moe_inter, recipe.hidden), "w2": (recipe.hidden, recipe.moe_inter)}
    shapes["w3"] = shapes["w1"]
    gains = {"w1": 1.0, "w2": _EXPERT_GAIN, "w3": 1.0}
    stds = {part: gains[part] * shape[1] ** -0.5 for part, shape in shapes.items()}
    common = {part: source.normal(f"{prefix}.common.{part}", *shape, std=stds[part]) for part, shape in shapes.items()}
    for number in range(recipe.experts):
        for part, shape in shapes.items():
            name = f"{prefix}.experts.{number}.{part}.weight"
            own = source.normal(name, *shape, std=_EXPERT_SPREAD * stds[part])
            yield Draw(name, Kind.EXPERT, common[part] * (1 - _EXPERT_SPREAD**2) ** 0.5 + own)
    for part, shape in shapes.items():
        name = f"{prefix}.shared_experts.{part}.weight"
        yield Draw(name, Kind.LINEAR, source.normal(name, *shape, std=stds[part]))
    name = f"{prefix}.gate.weight"
    yield Draw(name, Kind.BF16, source.normal(name, recipe.experts, recipe.hidden, std=2 * recipe.hidden**-0.5))
    if layer < recipe.hash_layers:
        name = f"{prefix}.gate.tid2eid"
        table = source.rows_of_distinct(name, recipe.vocab, recipe.experts_per_token, recipe.experts)
        yield Draw(name, Kind.INT64, table)
    else:
        yield Draw(f"{prefix}.gate.bias", Kind.FP32, source.normal(f"{prefix}.gate.bias", recipe.experts, std=0.1))


def _hyper_connection(source: RandomStreams, prefix: str, recipe: Recipe, outputs: int, scales: int) -> Iterator[Draw]:
    width = recipe.hc_mult * recipe.hidden
    yield Draw(f"{prefix}_fn", Kind.FP32, source.normal(f"{prefix}_fn", outputs, width, std=0.5 * width**-0.5))
    base = source.normal(f"{prefix}_base", outputs, std=0.3)
    if outputs > recipe.hc_mult:  # pre, post, then the mixing matrix: mostly separate streams
        base[2 * recipe.hc_mult :] += 2 * torch.eye(recipe.hc_mult).flatten()
    yield Draw(f"{prefix}_base", Kind.FP32, base)
    yield Draw(f"{prefix}_scale", Kind.FP32, torch.ones(scales))


def _word_order(source: RandomStreams) -> torch.Tensor:
    """Return the words' ids, int64 `[words]`; each is followed by its favoured successor, the last by the first."""
    words = torch.tensor(word_ids())
    return words[source.permutation("word order", len(words))]


def _head(source: RandomStreams, embedding: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the output layer, float32 `[vocab, hidden]`, with the two parts described at the top of the module."""
    order = _word_order(source)
    gains = torch.full((recipe.vocab, 1), _SILENT_GAIN)
    gains[order] = _CONTEXT_GAIN
    head = source.normal("head.weight", recipe.vocab, recipe.hidden, std=recipe.hidden**-0.5) * gains
    directions = embedding[order] / embedding[order].norm(dim=1, keepdim=True)
    # Remove the last word from the random part, otherwise some words would repeat forever. In float64, so that after
    # rounding to bfloat16 the result does not depend on the linear algebra library.
    basis = torch.linalg.qr(directions.T.double()).Q
    head -= (head.double() @ basis @ basis.T).float()
    head[order.roll(-1)] += directions * (_NEXT_WORD_GAIN * recipe.hidden**-0.5)
    return head


def _layer(source: RandomStreams, prefix: str, recipe: Recipe, layer: int, ratio: int) -> Iterator[Draw]:
    mix = (2 + recipe.hc_mult) * recipe.hc_mult
    yield from _attention(source, f"{prefix}.attn", recipe, ratio)
    yield from _experts(source, f"{prefix}.ffn", recipe, layer)
    for part in ("attn", "ffn"):
        yield _norm(source, f"{prefix}.{part}_norm.weight", recipe.hidden)
        yield from _hyper_connection(source, f"{prefix}.hc_{part}", recipe, mix, scales=3)


def _stem(source: RandomStreams, prefix: str, recipe: Recipe) -> Iterator[Draw]:
    """Yield the tensors between the last layer and the output layer."""
    yield _norm(source, f"{prefix}norm.weight", recipe.hidden)
    yield from _hyper_connection(source, f"{prefix}hc_head", recipe, recipe.hc_mult, scales=1)


def _projection(source: RandomStreams, name: str, recipe: Recipe, inputs: int, identity: float) -> Draw:
    value = source.normal(name, recipe.hidden, inputs, std=_DRAFT_SPREAD * inputs**-0.5)
    return Draw(name, Kind.LINEAR, value + identity * torch.eye(recipe.hidden, inputs))


def _markov(source: RandomStreams, prefix: str, recipe: Recipe) -> Iterator[Draw]:
    """Yield DSpark's bias by the previous token: one column per word, large at the word and its successor."""
    order, names = _word_order(source), (f"{prefix}.markov_w1.weight", f"{prefix}.markov_w2.weight")
    column = torch.arange(len(order))
    for name, tokens, loud in zip(names, (order, order.roll(-1)), (1.0, _MARKOV_GAIN), strict=True):
        value = source.normal(name, recipe.vocab, recipe.markov_rank, std=_MARKOV_NOISE)
        value[tokens, column] += loud
        yield Draw(name, Kind.BF16, value)


def _drafts(source: RandomStreams, recipe: Recipe) -> Iterator[Draw]:
    """Yield the draft layers `mtp.*`, which share embedding and output layer with the model."""
    for stage in range(recipe.draft_layers):
        yield from _layer(source, f"mtp.{stage}", recipe, recipe.layers + stage, ratio=0)
    if recipe.drafts is Drafts.MTP:
        yield _norm(source, "mtp.0.enorm.weight", recipe.hidden)
        yield _norm(source, "mtp.0.hnorm.weight", recipe.hidden)
        yield _projection(source, "mtp.0.e_proj.weight", recipe, recipe.hidden, identity=1.0)
        yield _projection(source, "mtp.0.h_proj.weight", recipe, recipe.hidden, identity=0.0)
        yield from _stem(source, "mtp.0.", recipe)
    elif recipe.drafts is Drafts.DSPARK:
        last, inputs = f"mtp.{recipe.draft_layers - 1}.", recipe.hidden * len(recipe.target_layers)
        yield _projection(source, "mtp.0.main_proj.weight", recipe, inputs, identity=0.5)
        yield _norm(source, "mtp.0.main_norm.weight", recipe.hidden)
        yield from _stem(source, last, recipe)
        yield from _markov(source, f"{last}markov_head", recipe)
        name, width = f"{last}confidence_head.proj.weight", recipe.hidden + recipe.markov_rank
        yield Draw(name, Kind.FP32, source.normal(name, 1, width, std=width**-0.5))


def draws(recipe: Recipe, source: RandomStreams) -> Iterator[Draw]:
    """Yield every tensor of the checkpoint, unquantised, layer by layer."""
    embedding = source.normal("embed.weight", recipe.vocab, recipe.hidden, std=1.0)
    yield Draw("embed.weight", Kind.BF16, embedding)
    for layer, ratio in enumerate(recipe.compress_ratios):
        yield from _layer(source, f"layers.{layer}", recipe, layer, ratio)
    yield from _stem(source, "", recipe)
    yield Draw("head.weight", Kind.BF16, _head(source, embedding, recipe))
    yield from _drafts(source, recipe)


_PLAIN = {Kind.BF16: torch.bfloat16, Kind.FP32: torch.float32, Kind.INT64: torch.int64}
_QUANTISERS: dict[Kind, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    Kind.LINEAR: to_fp8,
    Kind.EXPERT: to_mxfp4,
}


def stored(draw: Draw, precision: Precision) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a draw: `{name: tensor}`, and its `.scale` where the format has one."""
    quantise = _QUANTISERS.get(draw.kind)
    if quantise is None:
        return {draw.name: draw.value.to(_PLAIN[draw.kind])}
    if precision is Precision.BF16:
        return {draw.name: draw.value.to(torch.bfloat16)}
    weight, scale = quantise(draw.value)
    return {draw.name: weight, draw.name.removesuffix("weight") + "scale": scale}


_SHARD_BYTES = 32 << 20


def _shards(recipe: Recipe, source: RandomStreams, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Group the stored tensors into shards of about `shard_bytes`, in drawing order."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for draw in draws(recipe, source):
        for name, tensor in stored(draw, recipe.precision).items():
            shard[name] = tensor.contiguous().cpu()
            size += tensor.nbytes
        if size >= shard_bytes:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: many small operations gain nothing from more, and lose on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write(folder: Path, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Write one checkpoint into the empty `folder`; return seed, precision, and bytes and SHA-256 of every file."""
    with _one_thread():
        write_files(folder, recipe, RandomStreams(seed))
    files = {file.name: _file_entry(file) for file in sorted(folder.iterdir())}
    return {"seed": seed, "precision": recipe.precision, "files": files}


def write_files(folder: Path, recipe: Recipe, source: RandomStreams, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write the files of the checkpoint drawn from `source` into the empty `folder`."""
    shards = list(_shards(recipe, source, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", model_config(recipe))
    _write_json(
        folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0}
    )
    _write_json(folder / "tokenizer.json", tokenizer_json())
    _write_json(folder / "tokenizer_config.json", tokenizer_config(recipe.max_positions))


def _file_entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
