"""Each rule on the smallest deployment that breaks it, and that none speaks where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_operator.api import DSV4Deployment, load, parse
from dsv4_operator.planning import Facts, catalog_facts
from dsv4_operator.planning.catalog import machine
from dsv4_operator.planning.rules import RULES, RuleFinding, Severity, findings

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
    # On CPU only the machine itself tells its memory.
    nodes = tuple(replace(node, memory_bytes=node.memory_bytes or 2**36) for node in facts.nodes)
    return replace(facts, nodes=nodes)


def broken(made: DSV4Deployment, facts: Facts | None = None) -> dict[str, RuleFinding]:
    return {finding.rule: finding for finding in findings(made, facts or facts_for(made))}


RTX, CPU = "RTXPRO6000", "CPU"
DSPARK, NANO = "DeepSeek-V4-Flash-0731", "DeepSeek-V4-Nano"


def env(name: str, value: str) -> dict[str, object]:
    return {"env": [{"name": name, "value": value}]}


CASES = [
    (
        "pipeline-requests",
        deployment(topology={"pipelineParallelSize": 2}, engine={"maxNumSeqs": 32}),
        "32 requests in 2",
    ),
    (
        "pipeline-for-nothing",
        deployment(topology={"pipelineParallelSize": 2}),
        "2 where tensorParallelSize 2 is possible",
    ),
    ("ports", deployment(network={"ports": {"api": 10500}}), "network.ports.api: 10500 is among"),
    ("ports", deployment(network={"ports": {"agent": 52365}}), "52365 is the port of Ray's dashboard agent"),
    ("ports", deployment(network={"ports": {"dashboard": 10001}}), "10001 is the port of Ray's client server"),
    ("memory-utilization", deployment(engine={"gpuMemoryUtilization": 0.95}), "0.95 is more than 0.9"),
    ("memory-utilization", deployment(RTX, engine={"gpuMemoryUtilization": 0.99}), "0.99 is more than 0.985"),
    ("memory-utilization-shared", deployment(engine={"gpuMemoryUtilization": 0.87}), "0.87 leaves"),
    (
        "host-tables",
        deployment(RTX, "DeepSeek-V4.1-Flash", topology={"nodesPerGroup": 1, "devicesPerNode": 4}),
        "the tables of V4.1-Flash take 188 GiB of each machine's own memory",
    ),
    ("batched-tokens", deployment(engine={"maxNumBatchedTokens": 16384}), "16384 on unified memory"),
    ("pinned-gid", deployment(network={"fabric": {"members": [{"rank": 0, "gidIndex": 3}]}}), "3 is forced"),
    ("fabric-ranks", deployment(network={"fabric": {"members": [{"rank": 2}]}}), "2 is no member of a group of 2"),
    ("sockets-allowed", deployment(network={"fabric": {"requireRDMA": False}}), "TCP sockets"),
    ("unknown-argument", deployment(engine={"extraArgs": ["--sed=1"]}), 'extraArgs[0]: "--sed" is unknown'),
    ("unknown-variable", deployment(engine=env("NCCL_IB_HCAS", "x")), "did you mean NCCL_IB_HCA?"),
    (
        "unknown-variable",
        deployment(engine=env("VLLM_USE_RAY_COMPILED_DAG", "1")),
        "is no longer read; use spec.engine.executor",
    ),
    ("empty-variable", deployment(engine=env("NCCL_DEBUG", "")), "NCCL_DEBUG is empty"),
    (
        "executor",
        deployment(engine={"executor": "RayLegacy"}),
        "RayLegacy is not part of the image vllm-0.33; use RayV2 or MP",
    ),
    ("mp-machines", deployment(engine={"executor": "MP"}), "MP with 2 machines"),
    (
        "legacy-requests",
        deployment(engine={"executor": "RayLegacy", "profile": "vllm-0.32", "maxNumSeqs": 8}),
        "8 requests",
    ),
    ("image-hardware", deployment(RTX, engine={"profile": "spark-b12x"}), "spark-b12x is not built for RTXPRO6000"),
    ("unpinned-image", deployment(engine={"image": "vllm/vllm-openai:v0.33.0"}), "is a tag"),
    ("remote-code", deployment(engine={"extraArgs": ["--trust-remote-code"]}), "runs Python of the checkpoint"),
    ("kv-cache-dtype", deployment(engine={"kvCacheDtype": "nvfp4_ds_mla"}), "use fp8 or fp8_ds_mla"),
    (
        "speculative-heads",
        deployment(engine={"speculative": {"method": "DSpark"}}),
        "V4-Flash has no heads for DSpark; write MTP",
    ),
    ("speculative-heads", deployment(model=DSPARK, engine={"speculative": {"method": "MTP"}}), "write DSpark"),
    ("speculative-heads", deployment(engine={"speculative": {"tokens": 3}}), "3 without a method"),
    (
        "short-drafts",
        deployment(model=DSPARK, engine={"profile": "spark-b12x", "speculative": {"method": "DSpark", "tokens": 2}}),
        "write 5",
    ),
    (
        "long-drafts",
        deployment(model=DSPARK, engine={"speculative": {"method": "DSpark", "tokens": 7}}),
        "7 is more than",
    ),
    (
        "drafts-memory",
        deployment(RTX, engine={"gpuMemoryUtilization": 0.95, "speculative": {"method": "MTP"}}),
        "write 0.92",
    ),
    (
        "fp4-indexer",
        deployment(engine={"extraArgs": ['--attention-config={"indexer_kv_dtype":"mxfp4"}']}),
        "mxfp4 needs a data-centre GPU",
    ),
    (
        "fp4-indexer",
        deployment(engine={"extraArgs": ["--attention-config.use_fp4_indexer_cache=true"]}),
        "use_fp4_indexer_cache",
    ),
    (
        "attention-backend",
        deployment(engine={"extraArgs": ["--attention-backend=FLASHMLA_SPARSE"]}),
        "FLASHMLA_SPARSE does not serve",
    ),
    (
        "attention-backend",
        deployment(engine={"extraArgs": ["--attention-backend", "B12X"]}),
        "B12X is not DeepSeek-V4's in the image vllm-0.33",
    ),
    ("moe-backend", deployment(engine={"extraArgs": ["--moe-backend=deep_gemm_mega_moe"]}), "needs a data-centre GPU"),
    (
        "moe-backend",
        deployment(topology={"expertParallel": True}, engine={"profile": "spark-b12x"}),
        "the experts of b12x",
    ),
    (
        "expandable-segments",
        deployment(RTX, engine=env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")),
        "ends the start",
    ),
    ("e8m0", deployment(engine=env("VLLM_USE_DEEP_GEMM_E8M0", "0")), "is an error"),
    ("eager", deployment(engine={"cudagraphMode": "None"}), "three times as long"),
    ("graphs-twice", deployment(engine={"cudagraphMode": "Full", "extraArgs": ["-cc.mode=3"]}), "say two things"),
    ("short-steps", deployment(engine={"timeouts": {"executeModel": "5m"}}), "300s is shorter"),
    ("tables-on-disk", deployment(model_tables="disk"), "has none; remove it"),
    (
        "tables-on-disk",
        deployment(model="DeepSeek-V4.1-Flash", model_tables="disk", engine={"gpuMemoryUtilization": 0.88}),
        "is not known of the image vllm-0.33; write memory, or give --engram-config",
    ),
    ("cpu-fields", deployment(CPU, NANO, engine={"cudagraphMode": "Full"}), "has no meaning on CPU"),
    ("cpu-fields", deployment(CPU, NANO, topology={"expertParallel": True}), "does not run on CPU"),
]
ABOUT_FACTS = {
    "wrong-hardware",
    "mixed-machines",
    "unequal-machines",
    "unequal-memory",
    "head-placement",
    "same-address",
    "legacy-interfaces",
}


@pytest.mark.parametrize(("rule", "made", "text"), CASES)
def test_a_broken_rule_says_field_value_and_remedy(rule: str, made: DSV4Deployment, text: str) -> None:
    found = broken(made)
    assert rule in found, sorted(found)
    assert text in found[rule].message
    assert "; " in found[rule].message
    assert found[rule].severity is next(row.severity for row in RULES if row.id == rule)


def test_rules_about_the_machines_at_hand() -> None:
    made = deployment()
    facts = facts_for(made)

    def changed(rank: int, **values: object) -> Facts:
        nodes = tuple(replace(node, **values) if n == rank else node for n, node in enumerate(facts.nodes))  # type: ignore[arg-type]
        return replace(facts, nodes=nodes)

    assert "offers its CPU only" in broken(made, changed(1, machine="cpu"))["wrong-hardware"].message
    smaller = broken(made, changed(1, machine="gb10-64gb"))["unequal-machines"].message
    assert "gb10-0 (gb10), gb10-1 (gb10-64gb); DGX Spark, 64 GB (GB10) is planned; use" in smaller
    mixed = broken(made, changed(1, machine="rtx-pro-6000-server"))["mixed-machines"].message
    assert "gb10-0 (gb10), gb10-1 (rtx-pro-6000-server)" in mixed
    assert "unequal-memory" in broken(made, changed(1, memory_bytes=100 * 2**30))
    assert "head-placement" not in broken(made, changed(1, memory_bytes=100 * 2**30))
    assert (
        "put the machine with the most memory first"
        in broken(made, changed(0, memory_bytes=2**36))["head-placement"].message
    )
    assert "same-address" in broken(made, changed(1, address=facts.nodes[0].address))
    legacy = deployment(engine={"executor": "RayLegacy", "profile": "vllm-0.32"})
    assert "legacy-interfaces" in broken(legacy, changed(1, interface="eth9"))
    assert "legacy-interfaces" not in broken(legacy, facts)


def test_every_rule_is_tried_and_none_is_there_twice() -> None:
    ids = [row.id for row in RULES]
    assert len(set(ids)) == len(ids)
    assert set(ids) == {case[0] for case in CASES} | ABOUT_FACTS


@pytest.mark.parametrize("name", ["flash-2x-spark", "flash-2x-rtx-pro-6000", "nano"])
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
