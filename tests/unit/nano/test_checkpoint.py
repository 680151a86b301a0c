import fcntl
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dsv4_kernels.numerics import dequantize_blocks, dequantize_mxfp4
from dsv4_runtime.nano import checkpoint, weights
from dsv4_runtime.nano.checkpoint import NotANanoCheckpointError, make
from dsv4_runtime.nano.recipe import Drafts, Precision, model_config, recipe_for, word_ids
from dsv4_runtime.nano.weights import Kind, RandomStreams, draws

FEW = 8  # experts: the properties under test do not depend on their number
SECONDS = 60.0


@pytest.fixture(autouse=True)
def few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "recipe_for", lambda *which: replace(recipe_for(*which), experts=FEW))
    monkeypatch.setattr(weights, "_SHARD_BYTES", 1 << 20)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def visible(folder: Path) -> list[str]:
    """Return the names in `folder` without the lock of the checkpoint `nano`."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".nano.lock")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for shard in set(weight_map.values()):
        with safe_open(folder / shard, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 -- not a mapping
    assert found.keys() == weight_map.keys()
    return found


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path):
    one, two, other = (contents(make(tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert one == two
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == {
        "nano.json",
        *(name for name in one if name.endswith(".safetensors")),
    }


def test_a_complete_checkpoint_is_reused(tmp_path: Path):
    path = make(tmp_path / "deep" / "nano")
    before = path.stat().st_ino
    assert make(path) == path
    assert path.stat().st_ino == before
    assert visible(path.parent) == ["nano"]


@pytest.mark.parametrize("harm", ["missing", "short", "no manifest but empty", "other seed", "power loss"])
def test_incomplete_and_different_checkpoints_are_replaced(tmp_path: Path, harm: str):
    path = make(tmp_path / "nano", seed=1 if harm == "other seed" else 0)
    victim = next(path.glob("model-00001-*"))
    if harm == "missing":
        victim.unlink()
    elif harm == "short":
        os.truncate(victim, 100)
    elif harm == "no manifest but empty":
        for file in path.iterdir():
            file.unlink()
    elif harm == "power loss":
        # As ext4 leaves files that were not synchronised: small ones are empty.
        for file in path.glob("*.json"):
            os.truncate(file, 0)
    right = contents(make(tmp_path / "other" / "nano"))
    assert contents(make(path)) == right
    assert visible(tmp_path) == ["nano", "other"]


def test_files_are_on_the_disk_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced, at_rename, path = list[int](), list[int](), tmp_path / "nano"
    fsync, rename = os.fsync, Path.rename

    def noting_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    def noting_rename(source: Path, target: Path) -> Path:
        at_rename.extend(synced)
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    make(path)
    assert {path.stat().st_ino, *(file.stat().st_ino for file in path.iterdir())} <= set(at_rename)
    assert synced[-1] == tmp_path.stat().st_ino


@pytest.mark.parametrize("manifest", [None, "{}", '{"digest": "x", "files": {}}'])
def test_anything_else_is_refused_and_left_alone(tmp_path: Path, manifest: str | None):
    path = tmp_path / "precious"
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    if manifest is not None:
        (path / "nano.json").write_text(manifest)
    before = contents(path)
    with pytest.raises(NotANanoCheckpointError, match=r"precious .*thesis\.tex.*choose another directory"):
        make(path)
    assert contents(path) == before


def test_a_released_checkpoint_is_refused(tmp_path: Path):
    """Its files have the names of a nano checkpoint's."""
    path = make(tmp_path / "nano")
    (path / "nano.json").unlink()
    before = contents(path)
    with pytest.raises(NotANanoCheckpointError, match=r"config\.json"):
        make(path)
    assert contents(path) == before


def test_a_foreign_file_beside_an_unreadable_manifest_is_not_lost(tmp_path: Path):
    path = make(tmp_path / "nano")
    os.truncate(path / "nano.json", 0)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(NotANanoCheckpointError, match=r"checkpoint's \(notes\.txt\)"):
        make(path)
    assert (path / "notes.txt").read_text() == "mine"


def test_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotANanoCheckpointError, match="is a file"):
        make(tmp_path / "file")


def test_a_foreign_file_beside_a_damaged_checkpoint_is_not_lost(tmp_path: Path):
    path = make(tmp_path / "nano")
    (path / "config.json").unlink()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(NotANanoCheckpointError, match=r"notes\.txt"):
        make(path)
    assert (path / "notes.txt").read_text() == "mine"


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(weights, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        make(tmp_path / "nano")
    assert visible(tmp_path) == []


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("killed")

    (tmp_path / ".nano.doubted").touch()
    (tmp_path / ".nano.mine1234").mkdir()
    (tmp_path / ".nano.mine1234" / "notes.txt").touch()
    with monkeypatch.context() as killed:
        killed.setattr(weights, "save_file", fail)
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(OSError, match="killed"):
            make(tmp_path / "nano")
    assert len(visible(tmp_path)) == 3
    make(tmp_path / "nano")
    assert visible(tmp_path) == [".nano.doubted", ".nano.mine1234", "nano"]


def test_writers_of_one_checkpoint_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, write, writers, waiting = tmp_path / "nano", weights.write, list[Path](), threading.Event()
    flock = fcntl.flock

    def noting_flock(descriptor: int, operation: int) -> None:
        if writers:
            waiting.set()
        flock(descriptor, operation)

    def write_beside_another(folder: Path, *arguments: Any) -> Any:
        writers.append(folder)
        if len(writers) == 1:
            second.start()
            assert waiting.wait(SECONDS)
        return write(folder, *arguments)

    monkeypatch.setattr(fcntl, "flock", noting_flock)
    monkeypatch.setattr(weights, "write", write_beside_another)
    second = threading.Thread(target=make, args=(path,))
    make(path)
    second.join(SECONDS)
    assert not second.is_alive()
    assert len(writers) == 1
    assert visible(tmp_path) == ["nano"]


def test_a_checkpoint_published_on_another_machine_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lock does not exclude its writer."""
    path, write = tmp_path / "nano", weights.write
    other = make(tmp_path / "other" / "nano")

    def write_after_another(*arguments: Any) -> Any:
        other.rename(path)
        return write(*arguments)

    inode = other.stat().st_ino
    monkeypatch.setattr(weights, "write", write_after_another)
    make(path)
    assert path.stat().st_ino == inode
    assert visible(tmp_path) == ["nano", "other"]


@pytest.fixture(scope="module")
def drawn() -> dict[tuple[Any, ...], torch.Tensor]:
    """Return the tensors that were drawn; most of them are the same in several checkpoints."""
    return {}


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch, drawn: dict[tuple[Any, ...], torch.Tensor]) -> None:
    draw = RandomStreams.normal

    def normal(source: RandomStreams, name: str, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        key = (source, name, shape, std, mean)
        if key not in drawn:
            drawn[key] = draw(source, name, *shape, std=std, mean=mean)
        # A copy, since some are changed in place.
        return drawn[key].clone()

    monkeypatch.setattr(RandomStreams, "normal", normal)


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.parametrize("drafts", Drafts)
def test_fp8_files_hold_the_draw_in_the_released_formats(tmp_path: Path, drafts: Drafts):
    recipe = replace(recipe_for(Precision.FP8, drafts), experts=FEW)
    found = tensors(make(tmp_path / "nano", precision=Precision.FP8, drafts=drafts))
    plain = {Kind.BF16: torch.bfloat16, Kind.FP32: torch.float32, Kind.INT64: torch.int64}
    for draw in draws(recipe, RandomStreams(0)):
        weight = found.pop(draw.name)
        if draw.kind in plain:
            assert weight.dtype is plain[draw.kind]
            assert torch.equal(weight, draw.value.to(weight.dtype))
            continue
        scale = found.pop(draw.name.removesuffix("weight") + "scale")
        assert scale.dtype is torch.float8_e8m0fnu
        back, bound = (dequantize_blocks, 0.04) if draw.kind is Kind.LINEAR else (dequantize_mxfp4, 0.15)
        assert (back(weight.view(torch.uint8), scale.view(torch.uint8)) - draw.value).norm() / draw.value.norm() < bound
    assert not found


def test_bf16_files_hold_the_draw_rounded(tmp_path: Path):
    found = tensors(make(tmp_path / "nano"))
    for draw in draws(replace(recipe_for(Precision.BF16), experts=FEW), RandomStreams(0)):
        assert torch.equal(found.pop(draw.name), draw.value.to(found_dtype(draw.kind)))
    assert not found


@pytest.mark.parametrize(
    ("drafts", "layers", "heads"),
    [
        (Drafts.MTP, 1, {"mtp.0.e_proj.weight", "mtp.0.h_proj.weight", "mtp.0.norm.weight", "mtp.0.hc_head_fn"}),
        (Drafts.DSPARK, 2, {"mtp.0.main_proj.weight", "mtp.1.markov_head.markov_w2.weight", "mtp.1.norm.weight"}),
    ],
)
def test_layers_that_draft_come_beside_the_same_model(tmp_path: Path, drafts: Drafts, layers: int, heads: set[str]):
    plain, found = tensors(make(tmp_path / "plain")), tensors(make(tmp_path / "nano", drafts=drafts))
    assert all(torch.equal(found.pop(name), value) for name, value in plain.items())
    assert {name.split(".")[1] for name in found} == {str(layer) for layer in range(layers)}
    assert all(name.startswith("mtp.") for name in found)
    assert heads <= found.keys()
    config = json.loads((tmp_path / "nano" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == layers
    assert config["compress_ratios"] == [0, 4, 128, 4] + [0] * layers


def test_the_drafts_favour_the_output_layers_next_word(tmp_path: Path):
    """The product of DSpark's two factors is greatest at the word that the output layer favours after the same word."""
    found = tensors(make(tmp_path / "nano", drafts=Drafts.DSPARK))
    bias = found["mtp.1.markov_head.markov_w1.weight"].float() @ found["mtp.1.markov_head.markov_w2.weight"].float().T
    favoured = found["embed.weight"].float() @ found["head.weight"].float().T
    words = torch.tensor(word_ids())
    assert torch.equal(bias[words].argmax(1), favoured[words].argmax(1))


def found_dtype(kind: Kind) -> torch.dtype:
    return {Kind.FP32: torch.float32, Kind.INT64: torch.int64}.get(kind, torch.bfloat16)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("ranks", [1, 2])
def test_dimensions_divide_among_ranks(precision: Precision, ranks: int):
    recipe = recipe_for(precision)
    assert {0, 4, 128} == set(recipe.compress_ratios)
    assert 0 < recipe.hash_layers < recipe.layers
    for size in (recipe.heads, recipe.o_groups, recipe.experts, recipe.vocab // 64):
        assert size % ranks == 0
    if precision is Precision.FP8:
        for size in (
            recipe.hidden,
            recipe.q_lora,
            recipe.moe_inter // ranks,
            recipe.o_lora,
            recipe.heads * 512 // ranks,
        ):
            assert size % 128 == 0
        assert model_config(recipe)["quantization_config"]["weight_block_size"] == [128, 128]
    else:
        assert recipe.moe_inter // ranks % 32 == 0
        assert "quantization_config" not in model_config(recipe)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert checkpoint.main([str(tmp_path / "nano"), "--seed", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "nano")
    assert json.loads((tmp_path / "nano" / "nano.json").read_text())["seed"] == 3
    assert checkpoint.main([str(tmp_path / "nano"), "--seed", "3", "--drafts", "mtp"]) == 0
    assert json.loads((tmp_path / "nano" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    capsys.readouterr()
    (tmp_path / "file").write_text("x")
    assert checkpoint.main([str(tmp_path / "file")]) == 1
    assert "is a file" in capsys.readouterr().err
    assert checkpoint.main([str(tmp_path / "nano"), "--seed", "-1"]) == 1
    assert "seed -1 is negative" in capsys.readouterr().err


def test_a_damaged_file_is_named_and_the_checkpoint_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    right = contents(make(tmp_path / "nano"))
    shard = min((tmp_path / "nano").glob("*.safetensors"))
    before = shard.stat()
    shard.write_bytes(right[shard.name][:-1] + bytes([right[shard.name][-1] ^ 1]))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert checkpoint.main([str(tmp_path / "nano")]) == 0
    assert contents(tmp_path / "nano") != right, "its size is right"
    capsys.readouterr()
    assert checkpoint.main([str(tmp_path / "nano"), "--verify"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"damaged: {shard.name}"
    assert contents(tmp_path / "nano") == right
    assert checkpoint.main([str(tmp_path / "nano"), "--verify"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'nano'}\n"
    assert visible(tmp_path) == ["nano"]


def test_a_writer_that_hangs_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_LOCK_SECONDS", 0.2)
    with checkpoint._lock(tmp_path / "nano"), pytest.raises(TimeoutError, match=r"\.nano\.lock: another process"):
        checkpoint.make(tmp_path / "nano")
    assert checkpoint.make(tmp_path / "nano").is_dir()
