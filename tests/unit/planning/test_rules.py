"""Each rule on the smallest deployment that breaks it, and no finding for the examples."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_operator.api import DSV4Deployment, Finding, Severity, load, parse
from dsv4_operator.planning import Facts, catalog_facts
from dsv4_operator.planning.catalog import machine
from dsv4_operator.planning.images import profiles
from dsv4_operator.planning.rules import RULES, findings
from dsv4_operator.planning.setup import with_settings

ROOT = Path(__file__).parents[3]


def deployment(
    hardware: str = "GB10", model: str = "DeepSeek-V4-Flash", model_tables: str = "memory", **parts: object
) -> DSV4Deployment:
    variant = next(name for name in ("Nano", "Pro", "Flash") if name in model)
    wide = {"RTXPRO6000": {"devicesPerNode": 2}}.get(hardware, {"nodesPerGroup": 2})
    topology = {"hardware": hardware, **wide, **parts.pop("topology", {})}  # type: ignore[dict-item]
    spec = {
        "model": {"variant": variant, "source": {"path": f"/m/{model}"}, "tables": model_tables},
        "topology": topology,
    } | parts
    header = {"apiVersion": "dsv4.dev/v1alpha1", "kind": "DSV4Deployment", "metadata": {"name": "any"}}
    return parse({**header, "spec": spec})


def facts_for(made: DSV4Deployment) -> Facts:
    kind = machine(made.spec.topology.hardware)
    facts = catalog_facts(made, kind, state_root="/s", weights_root="/w")
    # On CPU only the machine itself knows its memory.
    nodes = tuple(replace(node, memory_bytes=node.memory_bytes or 2**36) for node in facts.nodes)
    return replace(facts, nodes=nodes)


def broken(made: DSV4Deployment, facts: Facts | None = None) -> dict[str, Finding]:
    return {finding.reason: finding for finding in findings(made, facts or facts_for(made))}


RTX, CPU = "RTXPRO6000", "CPU"
B12X_IMAGE = "eugr/spark-vllm-b12x@sha256:" + "ab" * 32
DSPARK, NANO = "DeepSeek-V4-Flash-0731", "DeepSeek-V4-Nano"


def env(name: str, value: str) -> dict[str, object]:
    return {"env": [{"name": name, "value": value}]}


TIERS = (
    '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
    '{"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, '
    '"secondary_tiers": [{"type": "fs", "root_dir": "/cache"}]}}'
)
TIERS_KEY = "kv_connector_extra_config.spec_name"

CASES = [
    (
        "PipelineRequests",
        deployment(topology={"pipelineParallelSize": 2}, engine={"maxNumSeqs": 32}),
        "spec.engine.maxNumSeqs",
        32,
    ),
    (
        "PipelineForNothing",
        deployment(topology={"pipelineParallelSize": 2}),
        "spec.topology.pipelineParallelSize",
        2,
    ),
    ("Ports", deployment(network={"ports": {"api": 10500}}), "spec.network.ports.api", 10500),
    ("Ports", deployment(network={"ports": {"agent": 52365}}), "spec.network.ports.agent", 52365),
    ("Ports", deployment(network={"ports": {"dashboard": 10001}}), "spec.network.ports.dashboard", 10001),
    ("MemoryUtilization", deployment(engine={"gpuMemoryUtilization": 0.95}), "spec.engine.gpuMemoryUtilization", 0.95),
    (
        "MemoryUtilization",
        deployment(RTX, engine={"gpuMemoryUtilization": 0.99}),
        "spec.engine.gpuMemoryUtilization",
        0.99,
    ),
    (
        "MemoryUtilizationShared",
        deployment(engine={"gpuMemoryUtilization": 0.87}),
        "spec.engine.gpuMemoryUtilization",
        0.87,
    ),
    (
        "HostTables",
        deployment(RTX, "DeepSeek-V4.1-Flash", topology={"nodesPerGroup": 1, "devicesPerNode": 4}),
        "spec.model",
        None,
    ),
    ("BatchedTokens", deployment(engine={"maxNumBatchedTokens": 16384}), "spec.engine.maxNumBatchedTokens", 16384),
    (
        "PinnedGID",
        deployment(network={"fabric": {"members": [{"rank": 0, "gidIndex": 3}]}}),
        "spec.network.fabric.members[0].gidIndex",
        3,
    ),
    (
        "FabricRanks",
        deployment(network={"fabric": {"members": [{"rank": 2}]}}),
        "spec.network.fabric.members[0].rank",
        2,
    ),
    (
        "SocketsAllowed",
        deployment(network={"fabric": {"requireRDMA": False}}),
        "spec.network.fabric.requireRDMA",
        False,
    ),
    ("UnknownArgument", deployment(engine={"extraArgs": ["--sed=1"]}), "spec.engine.extraArgs[0]", "--sed"),
    ("UnknownVariable", deployment(engine=env("NCCL_IB_HCAS", "x")), "spec.engine.env[0].name", "NCCL_IB_HCAS"),
    (
        "UnknownVariable",
        deployment(engine=env("VLLM_USE_RAY_COMPILED_DAG", "1")),
        "spec.engine.env[0].name",
        "VLLM_USE_RAY_COMPILED_DAG",
    ),
    ("EmptyVariable", deployment(engine=env("NCCL_DEBUG", "")), "spec.engine.env[0].value", ""),
    (
        "Executor",
        deployment(engine={"executor": "RayLegacy"}),
        "spec.engine.executor",
        "RayLegacy",
    ),
    (
        "LegacyRequests",
        deployment(engine={"executor": "RayLegacy", "profile": "vllm-0.32", "maxNumSeqs": 8}),
        "spec.engine.maxNumSeqs",
        8,
    ),
    ("ImageHardware", deployment(RTX, engine={"profile": "spark-b12x"}), "spec.engine.profile", "spark-b12x"),
    (
        "ImageHardware",
        deployment(RTX, engine={"build": {"base": "spark-b12x"}}),
        "spec.engine.build.base",
        "spark-b12x",
    ),
    ("ImageHardware", deployment(RTX, engine={"image": B12X_IMAGE}), "spec.engine.image", B12X_IMAGE),
    (
        "UnpinnedImage",
        deployment(engine={"image": "vllm/vllm-openai:v0.33.0"}),
        "spec.engine.image",
        "vllm/vllm-openai:v0.33.0",
    ),
    ("RemoteCode", deployment(engine={"extraArgs": ["--trust-remote-code"]}), "spec.engine.extraArgs", None),
    ("KVCacheDtype", deployment(engine={"kvCacheDtype": "nvfp4_ds_mla"}), "spec.engine.kvCacheDtype", "nvfp4_ds_mla"),
    (
        "SpeculativeHeads",
        deployment(engine={"speculative": {"method": "DSpark"}}),
        "spec.engine.speculative.method",
        "DSpark",
    ),
    (
        "SpeculativeHeads",
        deployment(model=DSPARK, engine={"speculative": {"method": "MTP"}}),
        "spec.engine.speculative.method",
        "MTP",
    ),
    ("SpeculativeHeads", deployment(engine={"speculative": {"tokens": 3}}), "spec.engine.speculative.tokens", 3),
    (
        "ShortDrafts",
        deployment(model=DSPARK, engine={"profile": "spark-b12x", "speculative": {"method": "DSpark", "tokens": 2}}),
        "spec.engine.speculative.tokens",
        2,
    ),
    (
        "LongDrafts",
        deployment(model=DSPARK, engine={"speculative": {"method": "DSpark", "tokens": 7}}),
        "spec.engine.speculative.tokens",
        7,
    ),
    (
        "DraftsMemory",
        deployment(RTX, engine={"gpuMemoryUtilization": 0.95, "speculative": {"method": "MTP"}}),
        "spec.engine.gpuMemoryUtilization",
        0.95,
    ),
    (
        "FP4Indexer",
        deployment(engine={"extraArgs": ['--attention-config={"indexer_kv_dtype":"mxfp4"}']}),
        "spec.engine.extraArgs",
        None,
    ),
    (
        "FP4Indexer",
        deployment(engine={"extraArgs": ["--attention-config.use_fp4_indexer_cache=true"]}),
        "spec.engine.extraArgs",
        None,
    ),
    (
        "AttentionBackend",
        deployment(engine={"extraArgs": ["--attention-backend=FLASHMLA_SPARSE"]}),
        "spec.engine.extraArgs",
        None,
    ),
    (
        "AttentionBackend",
        deployment(engine={"extraArgs": ["--attention-backend", "B12X"]}),
        "spec.engine.extraArgs",
        None,
    ),
    ("B12xKernels", deployment("H100", engine={"kernels": "moe=b12x"}), "spec.engine.kernels", "moe=b12x"),
    (
        "MoEBackend",
        deployment(topology={"expertParallel": True}, engine={"kernels": "moe=b12x"}),
        "spec.topology.expertParallel",
        True,
    ),
    (
        "MoEBackend",
        deployment(engine={"extraArgs": ["--moe-backend=deep_gemm_mega_moe"]}),
        "spec.engine.extraArgs",
        None,
    ),
    (
        "MoEBackend",
        deployment(topology={"expertParallel": True}, engine={"profile": "spark-b12x"}),
        "spec.topology.expertParallel",
        True,
    ),
    (
        "ExpandableSegments",
        deployment(RTX, engine=env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")),
        "spec.engine.env",
        None,
    ),
    *(
        ("OffloadedCache", deployment(engine={"extraArgs": [argument]}), "spec.engine.extraArgs", None)
        for argument in (f"--kv-transfer-config={TIERS}", f"--kv-transfer-config.{TIERS_KEY}=TieringOffloadingSpec")
    ),
    ("E8M0", deployment(engine=env("VLLM_USE_DEEP_GEMM_E8M0", "0")), "spec.engine.env", None),
    ("Eager", deployment(engine={"cudagraphMode": "None"}), "spec.engine.cudagraphMode", "None"),
    (
        "GraphsTwice",
        deployment(engine={"cudagraphMode": "Full", "extraArgs": ["-cc.mode=3"]}),
        "spec.engine.cudagraphMode",
        "Full",
    ),
    ("ShortSteps", deployment(engine={"timeouts": {"executeModel": "5m"}}), "spec.engine.timeouts.executeModel", "5m"),
    ("TablesOnDisk", deployment(model_tables="disk"), "spec.model.tables", "disk"),
    (
        "TablesOnDisk",
        deployment(model="DeepSeek-V4.1-Flash", model_tables="disk", engine={"gpuMemoryUtilization": 0.88}),
        "spec.model.tables",
        "disk",
    ),
    ("CPUFields", deployment(CPU, NANO, engine={"cudagraphMode": "Full"}), "spec.engine.cudagraphMode", "Full"),
    ("CPUFields", deployment(CPU, NANO, topology={"expertParallel": True}), "spec.topology.expertParallel", True),
]
ABOUT_FACTS = {
    "WrongHardware",
    "MixedMachines",
    "UnequalMachines",
    "UnequalMemory",
    "HeadPlacement",
    "SameAddress",
    "LegacyInterfaces",
    "UnsafeCopies",
    "LostMemory",
    "DriverChanged",
    "DriversDiffer",
}


def test_profiles_that_a_remedy_names_are_accepted() -> None:
    """Otherwise the remedy leads to the next refusal."""
    for made, rule, changed in (
        (deployment(model="DeepSeek-V4.1-Flash", model_tables="disk"), "TablesOnDisk", "profile"),
        (deployment(RTX, model="DeepSeek-V4.1-Flash", model_tables="disk"), "TablesOnDisk", "profile"),
        (deployment(RTX, engine={"profile": "spark-b12x"}), "ImageHardware", "profile"),
        (deployment(engine={"build": {"base": "vllm-cpu-0.32"}}), "ImageHardware", "build.base"),
    ):
        remedy = broken(made)[rule].remedy
        named = [one.name for one in profiles() if re.search(rf"\b{re.escape(one.name)}\b", remedy)]
        assert named
        for name in named:
            assert rule not in broken(with_settings(made, {f"engine.{changed}": name})), name


@pytest.mark.parametrize(("rule", "made", "field", "value"), CASES)
def test_a_broken_rule_names_field_and_value(rule: str, made: DSV4Deployment, field: str, value: object) -> None:
    found = broken(made)
    assert rule in found, sorted(found)
    assert (found[rule].field, found[rule].value) == (field, value)
    assert found[rule].remedy
    assert found[rule].severity is next(row.severity for row in RULES if row.id == rule)


def test_rules_about_the_machines_at_hand() -> None:
    made = deployment()
    facts = facts_for(made)

    def changed(rank: int, **values: object) -> Facts:
        nodes = tuple(replace(node, **values) if n == rank else node for n, node in enumerate(facts.nodes))  # type: ignore[arg-type]
        return replace(facts, nodes=nodes)

    wrong = broken(made, changed(1, machine="cpu"))["WrongHardware"]
    assert (wrong.field, wrong.value) == ("spec.topology.hardware", "GB10")
    assert facts.nodes[1].name in wrong.message
    lost = broken(made, changed(1, lost_bytes=3 * 2**30))["LostMemory"]
    assert f"{facts.nodes[1].name} drivers have kept 3.0 GiB" in lost.message
    assert "LostMemory" not in broken(made, changed(1, lost_bytes=2**30))
    newer = broken(made, changed(1, driver="590.44", driver_before="580.95"))["DriverChanged"]
    assert f"{facts.nodes[1].name} has the NVIDIA driver 590.44, and engines ran there with 580.95" in newer.message
    assert "DriverChanged" not in broken(made, changed(1, driver="590.44", driver_before="590.44"))
    both = replace(facts, nodes=tuple(replace(one, driver=f"59{n}") for n, one in enumerate(facts.nodes)))
    assert f"{facts.nodes[0].name} 590, {facts.nodes[1].name} 591" in broken(made, both)["DriversDiffer"].message
    # A machine whose version is not known differs from none.
    assert "DriversDiffer" not in broken(made, changed(1, driver="590.44"))
    smaller = broken(made, changed(1, machine="gb10-64gb"))["UnequalMachines"]
    assert "gb10-0 (gb10), gb10-1 (gb10-64gb)" in smaller.message
    assert "DGX Spark, 64 GB (GB10)" in smaller.message
    mixed = broken(made, changed(1, machine="rtx-pro-6000-server"))["MixedMachines"]
    assert "gb10-0 (gb10), gb10-1 (rtx-pro-6000-server)" in mixed.message
    assert "UnequalMemory" in broken(made, changed(1, memory_bytes=100 * 2**30))
    assert "HeadPlacement" not in broken(made, changed(1, memory_bytes=100 * 2**30))
    assert facts.nodes[0].name in broken(made, changed(0, memory_bytes=2**36))["HeadPlacement"].message
    assert "SameAddress" in broken(made, changed(1, address=facts.nodes[0].address))
    legacy = deployment(engine={"executor": "RayLegacy", "profile": "vllm-0.32"})
    assert "LegacyInterfaces" in broken(legacy, changed(1, interface="eth9"))
    assert "LegacyInterfaces" not in broken(legacy, facts)
    cards = deployment(RTX)
    facts = facts_for(cards)
    assert "the reason" in broken(cards, changed(0, unsafe_copies="the reason"))["UnsafeCopies"].message
    assert "UnsafeCopies" not in broken(cards, facts)


def test_an_offloaded_cache_of_one_machine_and_other_connectors_are_accepted() -> None:
    def reasons(hardware: str, argument: str) -> set[str]:
        return set(broken(deployment(hardware, engine={"extraArgs": [f"--kv-transfer-config={argument}"]})))

    assert "OffloadedCache" not in reasons(RTX, TIERS)
    other = '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}'
    assert "OffloadedCache" not in reasons("GB10", other)


def test_every_rule_is_tried_and_none_is_there_twice() -> None:
    ids = [row.id for row in RULES]
    assert len(set(ids)) == len(ids)
    assert set(ids) == {case[0] for case in CASES} | ABOUT_FACTS


@pytest.mark.parametrize(
    "name", ["flash-2x-spark", "flash-2x-spark-b12x", "flash-2x-rtx-pro-6000", "flash-2x-rtx-pro-6000-b12x", "nano"]
)
def test_the_samples_break_no_rule(name: str) -> None:
    assert broken(load((ROOT / "examples" / f"{name}.yaml").read_text())) == {}


def test_refusals_come_before_warnings() -> None:
    made = deployment(engine={"cudagraphMode": "None", "extraArgs": ["--sed=1"], "image": "vllm/vllm-openai:v0.33.0"})
    severities = [finding.severity for finding in findings(made, facts_for(made))]
    assert severities == [Severity.REFUSE, Severity.WARN, Severity.WARN]


def test_the_page_has_every_rule_with_its_evidence() -> None:
    page = (ROOT / "docs" / "rendering.md").read_text()
    for row in RULES:
        assert f"| `{row.id}` | {row.severity} | {row.condition} | {row.source} |" in page
