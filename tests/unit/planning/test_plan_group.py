"""The plan of the Nano model on CPU, and refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_operator.api import DSV4Deployment, Finding, Reason, load
from dsv4_operator.planning import Facts, NodeFacts, PlanRefused, plan_group, revision
from dsv4_runtime.contract import GroupPlan, Role, WeightsSource

EXAMPLES = Path(__file__).parents[3] / "examples"
NANO = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: tiny, namespace: lab}
spec:
  replicas: %(replicas)d
  model: {variant: Nano, source: {nano: {seed: 3}}}
  topology: {hardware: CPU, nodesPerGroup: %(nodes)d, devicesPerNode: %(devices)d}
  engine: {%(engine)s}
  network: {ports: {api: 9000, dashboard: 9001}}
"""
ISOLATED = Facts(
    nodes=tuple(NodeFacts(f"node-{rank}", f"10.0.0.{rank + 1}", "eth0", 4, 2**36) for rank in range(4)),
    isolated=True,
    state_root="/state/tiny",
    weights_root="/weights",
    ray_token_file="/state/tiny/token",
)
SHARED = replace(ISOLATED, nodes=(NodeFacts("local", "127.0.0.1", "lo", 4, 2**36),), isolated=False)


def nano(*, replicas: int = 1, nodes: int = 2, devices: int = 1, engine: str = "") -> DSV4Deployment:
    return load(NANO % {"replicas": replicas, "nodes": nodes, "devices": devices, "engine": engine})


def plan(deployment: DSV4Deployment, facts: Facts = ISOLATED, group: int = 0) -> GroupPlan:
    return plan_group(deployment, facts, group=group, incarnation=5, restarts=(20.0, 10.0))


def test_isolated_members_use_the_usual_ports_at_their_own_addresses() -> None:
    made = plan(nano())
    assert [(member.rank, member.role, member.address) for member in made.members] == [
        (0, Role.HEAD, "10.0.0.1"),
        (1, Role.WORKER, "10.0.0.2"),
    ]
    ports = made.head.ports
    assert (ports.agent, ports.gcs, ports.dashboard, ports.api) == (8090, 6379, 8265, 8000)
    assert made.members[1].ports.model_dump(exclude_none=True) == {"agent": 8090}
    assert made.expectations.world_size == 2
    assert (made.namespace, made.deployment, made.group, made.incarnation) == ("lab", "tiny", 0, 5)
    assert made.restarts == (10.0, 20.0)


def test_the_command_lines_of_ray() -> None:
    head, worker = plan(nano()).members
    assert head.ray_args == (
        "start",
        "--block",
        "--head",
        "--port=6379",
        "--dashboard-host=0.0.0.0",
        "--dashboard-port=8265",
        "--no-monitor",
        "--node-ip-address=10.0.0.1",
        "--num-gpus=1",
        "--num-cpus=1",
        "--object-store-memory=80000000",
        "--temp-dir=/state/tiny/i5/m0/ray",
        "--disable-usage-stats",
        "--include-log-monitor=false",
    )
    assert worker.ray_args[:4] == ("start", "--block", "--address=10.0.0.1:6379", "--node-ip-address=10.0.0.2")
    assert "--temp-dir=/state/tiny/i5/m1/ray" in worker.ray_args


def test_mp_on_several_members_needs_no_ray() -> None:
    made = plan(nano(engine="executor: MP"))
    assert [member.ray_args for member in made.members] == [(), ()]
    common = ("--nnodes=2", "--master-addr=10.0.0.1", "--master-port=6379")
    for member in made.members:
        own = {*common, f"--node-rank={member.rank}", *(["--headless"] if member.rank else [])}
        assert set(member.engine_args) == own
        assert made.engine_args(member.rank) == (*made.engine.args, *member.engine_args)
        assert made.starts_vllm(member.rank)
        env = made.environment(member.rank)
        assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert env["VLLM_HOST_IP"] == member.address
        assert "RAY_ADDRESS" not in env
    assert "--distributed-executor-backend=mp" in made.engine.args
    assert "--tensor-parallel-size=2" in made.engine.args


def test_mp_on_one_member_has_no_other_nodes() -> None:
    made = plan(nano(engine="executor: MP"), SHARED)
    (member,) = made.members
    assert (member.ray_args, member.engine_args) == ((), ())
    assert "--distributed-executor-backend=mp" in made.engine.args


def test_only_rank_0_starts_vllm_with_ray() -> None:
    made = plan(nano())
    assert [made.starts_vllm(rank) for rank in (0, 1)] == [True, False]
    assert [member.engine_args for member in made.members] == [(), ()]


def test_the_command_line_of_vllm() -> None:
    engine = "maxModelLen: 2048, maxNumSeqs: 2, maxNumBatchedTokens: 256, kvCacheMemory: 1Gi, extraArgs: [--seed, '1']"
    made = plan(nano(engine=engine))
    assert made.engine.args == (
        "--model=/weights/nano-s3-bf16",
        "--served-model-name",
        "tiny",
        "--host=10.0.0.1",
        "--port=8000",
        "--middleware=dsv4_runtime.engine.token_auth.TokenAuth",
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=1",
        "--distributed-executor-backend=ray",
        "--block-size=256",
        "--max-model-len=2048",
        "--max-num-seqs=2",
        "--max-num-batched-tokens=256",
        f"--kv-cache-memory-bytes={2**30}",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--seed",
        "1",
    )
    assert made.engine.served_name == "tiny"
    assert (made.weights.source, made.weights.seed, made.weights.precision) == (WeightsSource.NANO, 3, "bf16")


@pytest.mark.parametrize(
    ("method", "tokens"),
    [
        ("MTP", '{"method":"mtp","num_speculative_tokens":1}'),
        ("DSpark", '{"method":"dspark","num_speculative_tokens":5,'),
    ],
)
def test_a_nano_checkpoint_with_drafts(method: str, tokens: str) -> None:
    text = (NANO % {"replicas": 1, "nodes": 2, "devices": 1, "engine": f"speculative: {{method: {method}}}"}).replace(
        "seed: 3", f"seed: 3, drafts: {method}"
    )
    made = plan(load(text))
    assert (made.weights.path, made.weights.drafts) == (f"/weights/nano-s3-bf16-{method.lower()}", method.lower())
    assert any(flag.startswith(f"--speculative-config={tokens}") for flag in made.engine.args)


def test_drafts_without_the_layers_for_them_are_refused() -> None:
    reason, (found,) = refused(nano(engine="speculative: {method: MTP}"))
    assert reason is Reason.PLAN_REFUSED
    assert (found.field, found.value, found.reason) == ("spec.engine.speculative.method", "MTP", "SpeculativeHeads")
    assert "MTP as spec.model.source.nano.drafts" in found.remedy


def test_the_environment() -> None:
    engine = "env: [{name: EXTRA, value: '1'}], timeouts: {executeModel: 90s}"
    made = plan(nano(engine=engine))
    env = made.environment(1)
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == made.ray_token_file == "/state/tiny/token"
    assert env["TORCHINDUCTOR_CACHE_DIR"].endswith("/inductor")
    assert env["RAY_enable_metrics_collection"] == "0"
    assert env["DSV4_DEV_PLATFORM"] == env["TRITON_INTERPRET"] == env["EXTRA"] == "1"
    assert env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "90"
    assert (env["VLLM_HOST_IP"], env["GLOO_SOCKET_IFNAME"]) == ("10.0.0.2", "eth0")
    assert "RAY_ADDRESS" not in env
    assert made.environment(0)["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert made.environment(0)["OMP_NUM_THREADS"] == "4"


def test_users_may_override_proposed_variables() -> None:
    made = plan(nano(engine="env: [{name: OMP_NUM_THREADS, value: '2'}, {name: HF_HUB_OFFLINE, value: '0'}]"))
    assert made.environment(0)["OMP_NUM_THREADS"] == "2"
    assert made.environment(1)["HF_HUB_OFFLINE"] == "0"


def test_on_a_shared_machine_one_member_has_all_devices_and_the_published_ports() -> None:
    made = plan(nano(), SHARED)
    assert len(made.members) == 1
    assert made.head.devices == 2
    assert (made.head.ports.api, made.head.ports.dashboard) == (9000, 9001)
    assert "--num-gpus=2" in made.head.ray_args
    assert "--distributed-executor-backend=ray" in made.engine.args
    assert not [arg for arg in made.engine.args if "token_auth" in arg], "clients ask vLLM itself: there is no gateway"
    assert made.environment(0)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("facts", [ISOLATED, SHARED])
def test_a_single_rank_needs_no_executor(facts: Facts) -> None:
    made = plan(nano(nodes=1), facts)
    assert not [arg for arg in made.engine.args if "executor" in arg or "parallel" in arg]


def test_each_group_has_machines_of_its_own() -> None:
    made = plan(nano(replicas=2), group=1)
    assert [member.address for member in made.members] == ["10.0.0.3", "10.0.0.4"]


def test_a_checkpoint_of_ones_own() -> None:
    deployment = load(
        (NANO % {"replicas": 1, "nodes": 1, "devices": 1, "engine": ""}).replace("nano: {seed: 3}", "path: /w")
    )
    weights = plan(deployment).weights
    assert (weights.source, weights.path, weights.seed) == (WeightsSource.PATH, "/w", None)


def test_the_plan_survives_being_written_and_holds_no_secret() -> None:
    made = plan(nano())
    assert GroupPlan.model_validate_json(made.to_json()) == made


def refused(deployment: DSV4Deployment, facts: Facts = ISOLATED, group: int = 0) -> tuple[Reason, tuple[Finding, ...]]:
    with pytest.raises(PlanRefused) as caught:
        plan(deployment, facts, group)
    assert str(caught.value) == caught.value.message == "; ".join(map(str, caught.value.findings))
    return caught.value.reason, caught.value.findings


def test_too_few_machines() -> None:
    reason, (found,) = refused(nano(replicas=3), group=2)
    assert reason is Reason.NODES_MISSING
    assert (found.field, found.value, found.reason) == ("spec.replicas", 3, "NodesMissing")
    assert found.remedy == "decrease spec.replicas to 2, or add machines"
    few = replace(ISOLATED, nodes=ISOLATED.nodes[:1])
    assert refused(nano(), few)[1][0].remedy == "decrease spec.topology.nodesPerGroup, or add machines"
    assert refused(nano(), replace(SHARED, nodes=()))[0] is Reason.NODES_MISSING


def test_one_shared_machine_holds_one_group() -> None:
    reason, (found,) = refused(nano(replicas=2), SHARED, group=1)
    assert reason is Reason.NODES_MISSING
    assert (found.field, found.value, found.remedy) == ("spec.replicas", 2, "write 1")


def test_too_little_memory() -> None:
    small = replace(ISOLATED, nodes=tuple(replace(node, memory_bytes=2**30) for node in ISOLATED.nodes))
    reason, (found,) = refused(nano(), small)
    assert reason is Reason.MEMORY_SHORT
    assert re.findall(r"node-\d|[\d.]+ GiB", found.message) == ["node-0", "1.0 GiB", "3.5 GiB"]
    assert "spec.engine.kvCacheMemory" in found.remedy


@pytest.mark.parametrize("name", ["flash-2x-spark", "pro-8x-spark", "flash-2x-rtx-pro-6000"])
def test_a_machine_without_accelerators_is_refused_in_one_sentence(name: str) -> None:
    deployment = load((EXAMPLES / f"{name}.yaml").read_text())
    count = deployment.spec.topology.nodes_per_group
    nodes = tuple(replace(ISOLATED.nodes[0], name=f"n{n}", address=f"10.0.0.{n}", machine="cpu") for n in range(count))
    reason, found = refused(deployment, replace(ISOLATED, nodes=nodes))
    assert reason is Reason.HARDWARE_UNSUPPORTED
    assert {one.reason for one in found} == {"WrongHardware"}
    assert (found[0].field, found[0].value) == ("spec.topology.hardware", deployment.spec.topology.hardware)
    assert "the machine n0" in found[0].message


def test_the_nano_sample_is_planned() -> None:
    found = plan(load((EXAMPLES / "nano.yaml").read_text()))
    assert found.expectations.world_size == 2
    # A GPU of the machine is not used by the engine, so it is no sign of its life.
    assert not found.health.gpus


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("replicas: 1", "replicas: 2", True),
        ("replicas: 1", "suspend: true", True),
        ("replicas: 1", "recovery: {maxRestarts: 1}", True),
        ("engine: {}", "engine: {maxNumSeqs: 4}", True),  # the default, written out
        ("name: tiny", "name: tiny, labels: {a: b}", True),
        ("seed: 3", "seed: 4", False),
        ("api: 9000", "api: 9002", False),
        ("engine: {}", "engine: {extraArgs: [--seed, '1']}", False),
        ("engine: {}", "engine: {timeouts: {load: 1m}}", False),
    ],
)
def test_only_fields_of_members_change_the_revision(old: str, new: str, same: bool) -> None:
    text = NANO % {"replicas": 1, "nodes": 2, "devices": 1, "engine": ""}
    assert old in text
    assert (revision(load(text)) == revision(load(text.replace(old, new)))) is same


def test_groups_that_share_a_machine_have_a_token_each() -> None:
    facts = replace(ISOLATED, one_machine=True, group_directories=True)
    made = [plan(nano(replicas=2), facts, group) for group in range(2)]
    assert [one.ray_token_file for one in made] == ["/state/tiny/token", "/state/tiny/g1/token"]
    assert [one.env["RAY_AUTH_TOKEN_PATH"] for one in made] == [one.ray_token_file for one in made]
    # In pods each member has its own token file at the same path.
    assert plan(nano(replicas=2), ISOLATED, 1).ray_token_file == "/state/tiny/token"


def test_without_its_own_network_a_members_dashboard_binds_only_its_address() -> None:
    head = plan(nano(), replace(ISOLATED, own_networks=False), 0).head
    assert f"--dashboard-host={head.address}" in head.ray_args
