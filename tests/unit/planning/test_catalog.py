"""The catalog's figures have sources, and a checkpoint that is read from its files agrees with them to the byte."""

from __future__ import annotations

import json
import logging
import random
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.api import Hardware, load
from dsv4_operator.backends.local import facts
from dsv4_operator.backends.local.facts import CheckpointFiles, model_here, read_checkpoint, read_header
from dsv4_operator.planning.catalog import Machine, machine, machine_named, machines, model, model_for, models
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint, model_from_files
from dsv4_operator.planning.catalog.records import Model, Part
from dsv4_operator.planning.catalog.tables import UnknownCheckpoint
from dsv4_operator.planning.memory import EngineSettings, Parallel, memory_plan
from dsv4_operator.planning.memory.items import rank_weights
from dsv4_runtime.nano.checkpoint import make
from dsv4_runtime.nano.recipe import Drafts
from dsv4_testkit.errors import raises_naming

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


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("weights") / "mtp", drafts=Drafts.MTP)


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


def test_unconfirmed_figures_are_marked() -> None:
    assert {
        (found.id, name) for found in machines() for name, source in found.sources.items() if not source.verified
    } >= {("rtx-5090", "memory_bytes"), ("gb10-64gb", "memory_bytes"), ("rtx-pro-6000-server", "bandwidth")}


def test_every_hardware_has_a_machine() -> None:
    assert {hardware: machine(hardware).id for hardware in Hardware} == {
        Hardware.CPU: "cpu",
        Hardware.GB10: "gb10",
        Hardware.RTXPRO6000: "rtx-pro-6000-workstation",
        Hardware.H100: "h100",
        Hardware.H200: "h200",
    }
    with raises_naming(KeyError, "'dgx'", *(f" {one.id}" for one in machines())):
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
        ("/models/deepseek-v4-flash-0731", "V4-Flash-0731"),
        ("/models/DEEPSEEK_V4_FLASH", "V4-Flash"),
        ("/hub/models--deepseek-ai--DeepSeek-V4-Flash-0731/snapshots/" + "9e" * 20, "V4-Flash-0731"),
        ("/mnt/DeepSeek-V4.1-Flash/weights", "V4.1-Flash"),
    ],
)
def test_a_deployment_names_its_checkpoint(path: str, name: str) -> None:
    assert model_for(load(FLASH % path).spec.model).name == name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("s3: {bucket: llm-b, prefix: llm/DeepSeek-V4-Flash-0731/}", "V4-Flash-0731"),
        ("s3: {bucket: deepseek-v4.1-flash}", "V4.1-Flash"),
        ("http: {url: 'https://host/DeepSeek-V4-Flash/main/'}", "V4-Flash"),
        ("sharedPath: /nfs/deepseek-v4.1-flash", "V4.1-Flash"),
        (f"huggingFace: {{repo: nvidia/DeepSeek-V4-Flash-0731-NVFP4, revision: {'ab' * 20}}}", "V4-Flash-0731-NVFP4"),
    ],
)
def test_every_source_names_its_checkpoint(source: str, name: str) -> None:
    made = load(FLASH.replace("source: {path: %s}", f"source: {{{source}}}"))
    assert model_for(made.spec.model).name == name


@pytest.mark.parametrize(
    ("path", "field", "value", "reason"),
    [
        ("/models/something", "spec.model.source.path", "/models/something", "UnknownCheckpoint"),
        *(
            (path, "spec.model.source.path", path, "UnknownCheckpoint")
            for path in ("/models/DeepSeek-V4-Flash-0731-AWQ", "/models/DeepSeek-V4-Flash/int4")
        ),
        ("/models/DeepSeek-V4-Pro", "spec.model.variant", "Flash", "VariantMismatch"),
    ],
)
def test_unknown_checkpoints_are_refused(path: str, field: str, value: str, reason: str) -> None:
    with pytest.raises(UnknownCheckpoint) as caught:
        model_for(load(FLASH % path).spec.model)
    found = caught.value.finding
    assert (found.field, found.value, found.reason) == (field, value, reason)


def test_a_field_identifies_a_checkpoint_with_an_unknown_name() -> None:
    text = FLASH.replace("source: {path: %s}", "checkpoint: V4-Flash-0731, source: {path: /models/ds4}")
    assert model_for(load(text).spec.model).name == "V4-Flash-0731"
    with pytest.raises(UnknownCheckpoint) as caught:
        model_for(load(text.replace("V4-Flash-0731", "V5")).spec.model)
    found = caught.value.finding
    assert (found.field, found.value) == ("spec.model.checkpoint", "V5")
    assert "V4-Flash" in found.remedy


@pytest.mark.parametrize("drafts", [Drafts.MTP, Drafts.DSPARK])
def test_the_layers_that_draft_agree_to_the_byte(drafts: Drafts, tmp_path: Path) -> None:
    name = {Drafts.MTP: "Nano-MTP", Drafts.DSPARK: "Nano-DSpark"}[drafts]
    path, known = make(tmp_path / "nano", drafts=drafts), model(name)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert known.weight_bytes == known.checkpoint_bytes == index["metadata"]["total_size"]
    assert len(set(index["weight_map"].values())) == known.shards
    assert known.speculative is not None
    assert known.speculative.layers == json.loads((path / "config.json").read_text())["num_nextn_predict_layers"]


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


def headers_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        file.name: read_header(file.name, file.read_bytes(), file.stat().st_size)
        for file in folder.glob("*.safetensors")
    }


def test_an_incomplete_checkpoint_is_not_read(nano: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(nano, tmp_path / "DeepSeek-V4-Flash"))
    assert model_here(load(FLASH % copy).spec.model) is not None
    next(copy.glob("*.safetensors")).unlink()
    assert model_here(load(FLASH % copy).spec.model) is None
    assert model_here(load(FLASH % (tmp_path / "none")).spec.model) is None


def test_a_released_checkpoint_is_that_of_the_catalog(nano: Path, mtp: Path) -> None:
    """Its entry has more than the files: sources, and the formats of engines."""
    assert [
        model_here(load((FLASH % folder).replace("variant: Flash", "variant: Nano")).spec.model) is None
        for folder in (nano, mtp)
    ] == [True, False]


def test_a_damaged_checkpoint_is_named(nano: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(nano, tmp_path / "copy"))
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match=r"00001.*has \d+ bytes, and its header says \d+; download it again"):
        read_checkpoint(copy, "Nano")
    shard.write_bytes(b"short")
    with pytest.raises(BadCheckpoint, match="is not a safetensors file"):
        read_checkpoint(copy, "Nano")
    index = copy / "model.safetensors.index.json"
    for name in ("../copy/config.json", "/etc/passwd"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with raises_naming(BadCheckpoint, index.name, f"'{name}'", "not in that directory"):
            read_checkpoint(copy, "Nano")


@pytest.mark.parametrize("seed", range(4))
def test_a_start_reads_the_files_as_a_plan_does(
    seed: int, nano: Path, mtp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After random changes of files; those that cannot be parsed are logged once, and the catalog applies."""
    folder, damaged, gone = tmp_path / "mine", tmp_path / "damaged", tmp_path / "gone"
    folder.mkdir()
    damaged.mkdir()
    shards = {file.name for each in (nano, mtp) for file in each.glob("*.safetensors")}
    files = sorted({"config.json", "model.safetensors.index.json", *shards})
    for name in files:
        (damaged / name).write_text("short")
    reads: list[str] = []
    monkeypatch.setattr(facts, "model_here", lambda spec: (reads.append("read"), model_here(spec))[1])
    caplog.set_level(logging.WARNING, logger=facts.__name__)
    started, chance, logged, bad, seen = CheckpointFiles(), random.Random(seed), 0, False, set()
    spec = load((FLASH % folder).replace("variant: Flash", "variant: Nano")).spec.model
    for step in range(60):
        # Whole checkpoints, then parts of several ones and links that lead nowhere.
        whole = step % 5 == 0
        place = chance.choice([nano, mtp] if whole else [nano, mtp, damaged, damaged, gone, None])
        for name in files if whole else [chance.choice(files)]:
            (folder / name).unlink(missing_ok=True)
            if place is gone or (place is not None and (place / name).exists()):
                (folder / name).symlink_to(place / name)
        try:
            wanted, problem = model_here(spec), False
        except BadCheckpoint:
            wanted, problem = None, True
        logged, bad = logged + (problem and not bad), problem
        seen.add((wanted is not None, problem))
        assert started.model(spec) == wanted
        before = len(reads)
        assert started.model(spec) == wanted
        assert len(reads) == before, "nothing has changed"
        assert len(caplog.records) == logged
    assert seen == {(True, False), (False, False), (False, True)}


def test_another_architecture_is_refused(nano: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(nano, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with raises_naming(BadCheckpoint, "LlamaForCausalLM", "DeepseekV41ForCausalLM", "DeepseekV4ForCausalLM"):
        read_checkpoint(copy, "Nano")
    del config["o_groups"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="lacks o_groups"):
        read_checkpoint(copy, "Nano")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "many"}, "hidden_size: 'many' is not a whole number"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers: 'x'"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0"),
        ({"vocab_size": 1.5}, "vocab_size: 1.5"),
        ({"compress_ratios": None}, "values of a wrong kind"),
        ({"compress_ratios": ["a"] * 99}, "values of a wrong kind"),
        ({"architectures": {"a": 1}}, "values of a wrong kind"),
    ],
)
def test_values_of_a_wrong_kind_are_named(change: dict[str, object], named: str, nano: Path) -> None:
    config = json.loads((nano / "config.json").read_text())
    with pytest.raises(BadCheckpoint, match=named):
        model_from_files("/m/a", "Nano", config | change, headers_of(nano))


def test_headers_of_another_form_are_an_error(nano: Path) -> None:
    config = json.loads((nano / "config.json").read_text())
    for header in ({"layers.0.x": {"data_offsets": [0, 1]}}, {"layers.0.x": {"dtype": "I8", "data_offsets": [1]}}):
        with pytest.raises(BadCheckpoint, match="values of a wrong kind"):
            model_from_files("/m/a", "Nano", config, headers_of(nano) | {"other": header})


# Names of V4.1's tensors that V4 does not have, as vLLM's `models/deepseek_v41` loads them, and some of V4's.
V41_CONFIG = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "text_config": {
        **{"hidden_size": 5120, "moe_intermediate_size": 2304, "num_attention_heads": 64, "head_dim": 512},
        **{"q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024, "n_routed_experts": 384, "num_experts_per_tok": 6},
        **{"n_shared_experts": 1, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4},
        **{"sliding_window": 128, "vocab_size": 129280, "max_position_embeddings": 1048576, "num_hidden_layers": 40},
        **{"compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0], "kv_source_layer_ids": [2, 8, 14, 20]},
    },
}
TABLE = 101_000_000_000


def v41(**text: object) -> Model:
    """Return the model of a V4.1 checkpoint with a few tensors in every layer."""
    sizes = {"embed.weight": 1000, "head.weight": 1000, "vision.blocks.0.wqkv.weight": 700, "aligner.w1.weight": 30}
    for layer in range(40):
        sizes |= {f"layers.{layer}.attn.wq_b.weight": 800, f"layers.{layer}.ffn.experts.0.w1.weight": 4608}
    for layer in (1, 14):
        sizes |= {f"layers.{layer}.engram.embed.weight": TABLE, f"layers.{layer}.engram.embed.scale": 96}
        sizes |= {f"layers.{layer}.engram.wkv.weight": 80, f"layers.{layer}.engram.q_weight": 7}
    for stage in range(3):
        sizes[f"mtp.{stage}.attn.wq_b.weight"] = 500
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "F8_E4M3", "data_offsets": [end, end + size]}
        end += size
    config = {**V41_CONFIG, "text_config": {**V41_CONFIG["text_config"], **text}}  # type: ignore[dict-item]
    found = model_from_files("/models/v41", "Flash", config, {"model-00001.safetensors": header})
    assert found.weight_bytes == found.checkpoint_bytes == end, "every byte is somewhere"
    return found


def test_a_checkpoint_of_v41_is_read() -> None:
    found, known = v41(), model("V4.1-Flash")
    for name in ("compress_ratios", "kv_sources", "block_tokens", "tokenizer_mode", "tool_call_parser", "hash_layers"):
        assert getattr(found, name) == getattr(known, name), name
    assert [(part.part, part.bytes) for part in found.host_components] == [(Part.ENGRAM, 2 * (TABLE + 96))]
    assert found.speculative is not None
    assert (found.speculative.method, found.speculative.layers) == ("dspark", 3)
    # The tables' projection is divided between ranks, their gate is not.
    kinds = [{part.division: part.bytes for part in layer if part.part is Part.OTHER} for layer in found.layers]
    assert [number for number, kind in enumerate(kinds) if kind] == [1, 14]
    assert sorted(kinds[1].values()) == [7, 80]
    # The blocks of the KV cache follow from the configuration alone.
    settings = EngineSettings(max_model_len=131072, max_num_seqs=2, max_num_batched_tokens=4096)
    made, wanted = (memory_plan(each, machine("GB10"), Parallel(8), settings).kv for each in (found, known))
    assert made is not None
    assert wanted is not None
    assert (made.bytes_per_block, made.blocks_per_request) == (wanted.bytes_per_block, wanted.blocks_per_request)


def test_a_checkpoint_of_v41_with_another_body_gets_its_familys_parsers() -> None:
    assert v41(hidden_size=4096).tokenizer_mode == "deepseek_v41"
    assert v41(num_hash_layers=2).hash_layers == 2


def test_a_checkpoint_of_v41_needs_its_sources() -> None:
    text = {name: value for name, value in V41_CONFIG["text_config"].items() if name != "kv_source_layer_ids"}  # type: ignore[attr-defined]
    with raises_naming(BadCheckpoint, "config.json", "kv_source_layer_ids", "download"):
        model_from_files("/models/v41", "Flash", {**V41_CONFIG, "text_config": text}, {})


def test_a_configuration_alone_identifies_the_checkpoint(tmp_path: Path) -> None:
    """The name does not identify the checkpoint; of several checkpoints with this body, the largest is assumed."""
    folder = tmp_path / "ds4"
    folder.mkdir()
    flash = model("V4-Flash")
    (folder / "config.json").write_text(
        json.dumps({"hidden_size": flash.hidden, "compress_ratios": [*flash.compress_ratios, 0]})
    )
    found = model_here(load(FLASH % folder).spec.model)
    assert found is not None
    assert (found.hidden, found.compress_ratios) == (flash.hidden, flash.compress_ratios)
    assert found.weight_bytes == max(each.weight_bytes for each in models() if each.hidden == flash.hidden)
    with pytest.raises(BadCheckpoint, match=r"spec\.model\.variant: Pro contradicts .*config\.json, which is of Flash"):
        model_here(load((FLASH % folder).replace("variant: Flash", "variant: Pro")).spec.model)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8192}))
    with pytest.raises(BadCheckpoint, match="describes no supported checkpoint"):
        model_here(load(FLASH % folder).spec.model)
    named = tmp_path / "DeepSeek-V4-Flash"
    folder.rename(named)
    assert model_here(load(FLASH % named).spec.model) is None, "its name says it"


def test_a_pruned_checkpoint_is_planned_by_its_size() -> None:
    """Libertai, 256 of 384 experts: 94.01 GiB of weights a rank on two Sparks, tables on disk."""
    sized = FLASH.replace("source:", "checkpoint: V4.1-Flash, size: %s, tables: disk, source:")
    whole = model("V4.1-Flash")
    pruned = model_for(load(sized % ("373Gi", "/m/REAP-256E")).spec.model)
    assert pruned.checkpoint_bytes == 373 * 2**30
    assert whole.weight_bytes - pruned.weight_bytes == pytest.approx(whole.checkpoint_bytes - 373 * 2**30, abs=1000)
    engine = EngineSettings(32_768, 8, 4096, speculative_tokens=5, tables_on_disk=True)
    plan = memory_plan(pruned, machine_named("gb10"), Parallel(2), engine)
    assert plan.ranks[0].items[0].bytes / 2**30 == pytest.approx(94.01, abs=0.5)
    for size, shown in (("5Gi", "5Gi"), ("2Ti", "2048Gi")):
        with pytest.raises(UnknownCheckpoint) as caught:
            model_for(load(sized % (size, "/m/x")).spec.model)
        found = caught.value.finding
        assert (found.field, found.value) == ("spec.model.size", shown)
        assert found.remedy.startswith("write 200Gi to ")
