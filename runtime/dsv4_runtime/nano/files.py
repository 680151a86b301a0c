"""Writes a checkpoint's files: shards, index, configuration, tokenizer."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dsv4_runtime.nano.recipe import Recipe, model_config
from dsv4_runtime.nano.tokenizer import tokenizer_config, tokenizer_json
from dsv4_runtime.nano.weights import RandomStreams, draws, stored

_SHARD_BYTES = 32 << 20


def _shards(recipe: Recipe, source: RandomStreams, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Group the stored tensors into shards of about `shard_bytes`, in the order in which they are drawn."""
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
    """Keep torch to one thread: thousands of small operations gain nothing from more and lose on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write(folder: Path, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Write one checkpoint into the empty `folder`; return seed, precision, and every file's bytes and SHA-256."""
    with _one_thread():
        write_files(folder, recipe, RandomStreams(seed))
    files = {file.name: _entry(file) for file in sorted(folder.iterdir())}
    return {"seed": seed, "precision": recipe.precision, "files": files}


def write_files(folder: Path, recipe: Recipe, source: RandomStreams, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write the files of the checkpoint that `source` draws into the empty `folder`."""
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


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
