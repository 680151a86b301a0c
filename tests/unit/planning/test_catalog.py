"""The catalog's figures have sources, and a checkpoint read from its files agrees with them to the byte."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from dsv4_operator.api import Hardware, load
from dsv4_operator.backends.local.checkpoint import model_here, read_checkpoint
from dsv4_operator.planning.catalog import Machine, machine, machine_named, machines, model, model_for, models
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint
from dsv4_operator.planning.memory import Parallel
from dsv4_operator.planning.memory.weights import rank_weights
from dsv4_runtime.nano.checkpoint import make

FLASH = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: flash}
spec:
  model: {variant: Flash, source: {path: %s}}
  topology: {hardware: GB10, nodesPerGroup: 2}
"""
OWN_WORDS = {"id", "title", "hardware", "unified_memory", "sources"}


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("weights") / "nano")


@pytest.mark.parametrize("found", machines(), ids=lambda found: found.id)
def test_every_figure_of_a_machine_has_a_source(found: Machine) -> None:
    if found.id == "cpu":
        return
    for field in fields(Machine):
        if field.name not in OWN_WORDS and getattr(found, field.name):
            source = found.source(field.name)
            assert source is not None, field.name
            assert source.text
            assert len(source.date) == len("2026-01-01"), field.name


def test_what_nobody_confirmed_says_so() -> None:
    assert {
        (found.id, name) for found in machines() for name, source in found.sources.items() if not source.verified
    } >= {("rtx-5090", "memory_bytes"), ("gb10-64gb", "memory_bytes"), ("rtx-pro-6000-server", "bandwidth")}


def test_every_hardware_has_a_machine() -> None:
    assert {hardware: machine(hardware).id for hardware in Hardware} == {
        Hardware.CPU: "cpu",
        Hardware.GB10: "gb10",
        Hardware.RTXPRO6000: "rtx-pro-6000-workstation",
    }
    with pytest.raises(KeyError, match="no machine 'dgx'; it has cpu, gb10, gb10-64gb"):
        machine_named("dgx")


def test_models_by_name_repository_and_variant() -> None:
    assert model("V4-Pro-0813") is model("deepseek-ai/DeepSeek-V4-Pro-0813")
    assert model("Flash").name == "V4-Flash"
    assert {found.name for found in models()} >= {
        "V4-Flash",
        "V4-Flash-0731",
        "V4-Pro",
        "V4-Pro-0813",
        "V4.1-Flash",
        "Nano",
    }
    with pytest.raises(KeyError, match="no model 'V5'"):
        model("V5")


@pytest.mark.parametrize(
    ("name", "windows", "fours", "others"), [("V4-Flash", 2, 21, 20), ("V4-Pro", 0, 30, 31), ("Nano", 1, 2, 1)]
)
def test_the_layers(name: str, windows: int, fours: int, others: int) -> None:
    ratios = model(name).compress_ratios
    assert (ratios.count(0), ratios.count(4), ratios.count(128)) == (windows, fours, others)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/DeepSeek-V4-Flash-0731", "V4-Flash-0731"),
        ("/models/DeepSeek-V4-Flash-0731/", "V4-Flash-0731"),
        ("/models/something", "V4-Flash"),
        ("/models/DeepSeek-V4-Pro", "V4-Flash"),
    ],
)
def test_a_deployment_names_its_checkpoint(path: str, name: str) -> None:
    assert model_for(load(FLASH % path).spec.model).name == name


def test_the_nano_checkpoint_agrees_to_the_byte(nano: Path) -> None:
    found, known = read_checkpoint(nano, "Nano"), model("Nano")
    assert found is not None
    index = json.loads((nano / "model.safetensors.index.json").read_text())
    assert found.weight_bytes == known.weight_bytes == index["metadata"]["total_size"]
    assert found.compress_ratios == known.compress_ratios
    for size in (1, 2):
        assert rank_weights(found, Parallel(size), 0, drafts=False) == rank_weights(
            known, Parallel(size), 0, drafts=False
        )


def test_an_incomplete_checkpoint_is_not_read(nano: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(nano, tmp_path / "copy"))
    assert model_here(load(FLASH % copy).spec.model) is not None
    next(copy.glob("*.safetensors")).unlink()
    assert model_here(load(FLASH % copy).spec.model) is None
    assert model_here(load(FLASH % (tmp_path / "none")).spec.model) is None


def test_a_damaged_checkpoint_is_named(nano: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(nano, tmp_path / "copy"))
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match=r"00001.*has \d+ bytes, and its header says \d+; download it again"):
        read_checkpoint(copy, "Nano")
    shard.write_bytes(b"short")
    with pytest.raises(BadCheckpoint, match="is not a safetensors file"):
        read_checkpoint(copy, "Nano")


def test_another_architecture_is_refused(nano: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(nano, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(BadCheckpoint, match="the architecture is LlamaForCausalLM"):
        read_checkpoint(copy, "Nano")
    del config["o_groups"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="lacks o_groups"):
        read_checkpoint(copy, "Nano")
