"""Reading ahead, within the available memory."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_runtime.contract import PageCache
from dsv4_runtime.weights import checkpoint, writer
from dsv4_testkit.weights_servers import cached_share, write_shard

GIB = 1 << 30


def test_files_are_read_into_the_page_cache_and_leave_it(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_shard(file, 20_000_000, "t", 0)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    writer.drop([file])
    assert cached_share(file) < 0.05
    assert writer.read_ahead([file], 1 << 40, lambda *_: None) == file.stat().st_size
    assert cached_share(file) > 0.99
    writer.drop([file, tmp_path / "none"])
    assert cached_share(file) < 0.05
    assert writer.read_ahead([tmp_path / "none", file], 5_000_000, lambda *_: None) == 5_000_000


@pytest.mark.parametrize(("pause", "least", "most"), [(0.0, 3, 9), (3600.0, 0, 0)])
def test_reading_is_reported_by_time_not_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float, least: int, most: int
) -> None:
    file = tmp_path / "a.safetensors"
    write_shard(file, 20_000_000, "t", 0)
    monkeypatch.setattr(writer, "_CHECK_BYTES", 1 << 20)
    monkeypatch.setattr(writer, "_REPORT_SECONDS", pause)
    reported: list[int] = []
    writer.read_ahead([file], 1 << 40, lambda read, _: reported.append(read))
    assert least <= len(reported) <= most
    assert reported == sorted(reported)


def test_files_leave_the_page_cache_when_free_memory_is_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "a.safetensors", tmp_path / "other.bin"
    for path in (file, other):
        write_shard(path, 20_000_000, "t", 0)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    monkeypatch.setattr(writer, "FLOOR_BYTES", 0)
    assert not writer.keep_free(tmp_path)
    assert cached_share(file) > 0.99
    monkeypatch.setattr(writer, "FLOOR_BYTES", 1 << 60)
    assert writer.keep_free(tmp_path)
    assert cached_share(file) < 0.05
    # Files that do not belong to the checkpoint keep their pages.
    assert cached_share(other) > 0.99


def test_reading_ends_when_memory_runs_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    write_shard(file, 20_000_000, "t", 0)
    monkeypatch.setattr(writer, "_CHECK_BYTES", 8 << 20)
    monkeypatch.setattr(writer, "available_bytes", lambda: writer.RESERVE_BYTES - 1)
    assert writer.read_ahead([file], 1 << 40, lambda *_: None) == 8 << 20


@pytest.mark.parametrize(
    ("stored", "read", "expected"),
    [
        (10 * GIB, 10 * GIB, 5 * GIB),
        (5 * GIB, 10 * GIB, 2.5 * GIB),
        # Nearly all of it was in memory, so the speed of the disk is unknown.
        (GIB, 150 * GIB, None),
        (1 << 25, 1 << 25, None),
    ],
)
def test_disk_speed_is_computed_from_the_bytes_read_from_disk(stored: int, read: int, expected: float | None) -> None:
    assert writer.disk_rate(stored, read, 2.0) == expected


@pytest.mark.parametrize(
    ("policy", "available", "resident", "expected"),
    [
        (PageCache.WARM, 100 * GIB, 90 * GIB, 96 * GIB),
        (PageCache.UNIFIED, 100 * GIB, 90 * GIB, 6 * GIB),
        (PageCache.UNIFIED, 100 * GIB, 97 * GIB, 0),
        (PageCache.WARM, 3 * GIB, 0, 0),
    ],
)
def test_room(policy: PageCache, available: int, resident: int, expected: int) -> None:
    assert writer.read_ahead_limit(policy, available, resident) == expected


def test_a_containers_limit_bounds_available_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable: 8388608 kB\n")
    assert writer.available_bytes(tmp_path, tmp_path) == 8 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert writer.available_bytes(tmp_path, tmp_path) == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"inactive_file {GIB}\nactive_file {GIB}\n")
    assert writer.available_bytes(tmp_path, tmp_path) == 3 * GIB


def test_a_stage_needs_only_the_files_of_its_layers(tmp_path: Path) -> None:
    names = {f"model.layers.{layer}.w": f"{layer}.safetensors" for layer in range(7)}
    names["model.embed.weight"] = "embed.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    def found(first: int, last: int, count: int) -> set[str]:
        return {path.stem for path in checkpoint.shards(tmp_path, (first, last, count))}

    # Three stages of seven layers: 2, 3, 2, as vLLM divides them.
    assert found(0, 0, 3) == {"embed", "0", "1"}
    assert found(1, 1, 3) == {"embed", "2", "3", "4"}
    assert found(2, 2, 3) == {"embed", "5", "6"}
    assert found(0, 2, 3) == found(0, 0, 1) == {"embed", *map(str, range(7))}
    assert checkpoint.shards(tmp_path) == sorted(checkpoint.shards(tmp_path))


def division_of_vllm() -> Callable[[int, int, int], tuple[int, int]]:
    """Return vLLM's function without an import of its package, which takes seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "distributed" / "utils.py").read_text()
    (function,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "get_pp_indices"]
    names: dict[str, Any] = {"envs": SimpleNamespace(VLLM_PP_LAYER_PARTITION=None), "logger": logging.getLogger()}
    exec(compile(ast.Module([function], []), spec.origin, "exec"), names)
    found: Callable[[int, int, int], tuple[int, int]] = names["get_pp_indices"]
    return found


@pytest.mark.parametrize("layers", [7, 61, 43, 64])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_stages_are_divided_as_vllm_divides_them(layers: int, stages: int) -> None:
    theirs = division_of_vllm()
    for stage in range(stages):
        assert checkpoint._layers(layers, stage, stage, stages) == theirs(layers, stage, stages)
