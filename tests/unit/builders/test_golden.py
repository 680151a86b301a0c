"""Kubernetes objects of two examples, in the form sent to the API server.

After an intended change: `DSV4_GOLDEN=write python -m pytest tests/unit/builders`, then review the difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, parse
from dsv4_operator.api.spec import KUBERAY_BACKEND, ApiKeysSource
from dsv4_operator.backends.pods.scheduling import Snapshot, facts
from dsv4_operator.builders import frontend, member
from dsv4_operator.planning import plan_group
from dsv4_runtime.contract.gateway import GatewayRoute
from dsv4_testkit.pod_objects import node, sparks

EXAMPLES = Path(__file__).parents[3] / "examples"
GOLDEN = Path(__file__).parent / "golden"
NODES = {
    "nano": [node("node-a"), node("node-b")],
    "kuberay": [node("node-a"), node("node-b")],
    "flash-2x-spark": sparks(),
}
IMAGE = "registry.example/dsv4-runtime@sha256:" + "0" * 64
HOST = member.Host(ClusterPolicy(), IMAGE)


KEYS = ApiKeysSource.model_validate({"secretKeyRef": {"name": "callers", "key": "list"}})


def read(name: str) -> DSV4Deployment:
    data = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    data["metadata"] |= {"namespace": "team", "uid": "5b0c6f52-0000-0000-0000-000000000000"}
    return parse(data)


def objects(name: str) -> list[dict[str, Any]]:
    wanted = read(name)
    plan = plan_group(wanted, facts(wanted, Snapshot.of_pods(tuple(NODES[name]), ())), group=0, incarnation=3)
    pods = [member.member_pod(wanted, plan, rank, host=HOST) for rank in range(len(plan.members))]
    return [
        member.token_key_secret(wanted, "secret"),
        member.token_secret(wanted, plan.group, plan.incarnation, "secret"),
        member.plan_config(wanted, plan),
        member.incarnation_service(wanted, plan.group, plan.incarnation),
        member.head_service(wanted, plan.group, plan.incarnation),
        *([member.ray_cluster(wanted, plan, pods)] if wanted.spec.backend == KUBERAY_BACKEND else pods),
        frontend.gateway_config(wanted, 0, [None]),
        frontend.gateway_deployment(wanted, 0, image=IMAGE),
        frontend.public_service(wanted),
        frontend.network_policy(wanted),
        frontend.disruption_budget(wanted),
    ]


@pytest.mark.parametrize("name", NODES)
def test_the_objects_are_the_kept_ones(name: str) -> None:
    file = GOLDEN / f"{name}.yaml"
    text = yaml.safe_dump_all(objects(name), sort_keys=False, width=120)
    if os.environ.get("DSV4_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", NODES)
def test_everything_goes_with_its_deployment(name: str) -> None:
    for one in objects(name):
        (owner,) = one["metadata"]["ownerReferences"]
        assert owner["uid"] == "5b0c6f52-0000-0000-0000-000000000000"
        assert owner["controller"]
        assert one["metadata"]["namespace"] == "team"
        assert len(one["metadata"]["name"]) <= 63
        assert one["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "dsv4-operator"


def test_the_longest_name_still_makes_valid_names() -> None:
    wanted = read("nano")
    long = wanted.metadata.model_copy(update={"name": "a" * 45})
    wanted = wanted.model_copy(update={"metadata": long, "spec": wanted.spec.model_copy(update={"replicas": 32})})
    nodes = tuple(node(f"n{n}", room={"cpu": "64", "memory": "512Gi"}) for n in range(2))
    plan = plan_group(wanted, facts(wanted, Snapshot.of_pods(nodes, ())), group=31, incarnation=9999)
    pod = member.member_pod(wanted, plan, 1, host=HOST)
    assert len(pod["metadata"]["name"]) <= 63
    assert len(plan.members[1].address) <= 253


def test_only_secret_objects_contain_secrets() -> None:
    texts = [yaml.safe_dump(one) for one in objects("nano") if one["kind"] != "Secret"]
    assert not [text for text in texts if "secret: " in text and "secretName" not in text]


def changed(name: str, host: member.Host = HOST, **spec: Any) -> dict[str, Any]:
    data = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    data["metadata"] |= {"namespace": "team", "uid": "u"}
    for part, fields in spec.items():
        data["spec"][part] = {**data["spec"].get(part, {}), **fields}
    wanted = parse(data)
    plan = plan_group(wanted, facts(wanted, Snapshot.of_pods(tuple(NODES[name]), ())), group=0, incarnation=1)
    return member.member_pod(wanted, plan, 0, host=host)


def mounts(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    return {one["mountPath"]: volumes[one["name"]] for one in pod["spec"]["containers"][0]["volumeMounts"]}


def test_members_are_unprivileged_with_no_capability_but_locked_memory_for_rdma() -> None:
    nano, flash = changed("nano"), changed("flash-2x-spark")
    for pod in (nano, flash):
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["securityContext"]["runAsUser"] == 65532
        (container,) = pod["spec"]["containers"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert not {"privileged", "runAsUser", "runAsNonRoot"} & set(container["securityContext"])
        assert not pod["spec"]["automountServiceAccountToken"]
    (container,) = nano["spec"]["containers"]
    assert "add" not in container["securityContext"]["capabilities"]
    assert container["command"] == ["dsv4-agent"]
    (container,) = flash["spec"]["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert container["command"][0] == "dsv4-lock-memory"
    assert "supplementalGroups" not in flash["spec"]["securityContext"]
    grouped = changed("flash-2x-spark", replace(HOST, policy=ClusterPolicy(device_groups=(44, 109))))
    assert grouped["spec"]["securityContext"]["supplementalGroups"] == [44, 109]


def test_only_members_with_gpus_have_the_administrators_runtime_class() -> None:
    assert "runtimeClassName" not in changed("flash-2x-spark")["spec"]
    host = replace(HOST, policy=ClusterPolicy(runtime_class="nvidia"))
    assert changed("flash-2x-spark", host)["spec"]["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in changed("nano", host)["spec"]


def test_only_the_administrators_image_is_root_and_only_to_give_the_folder_away() -> None:
    other = "registry.example/mine@sha256:" + "2" * 64
    pod = changed("nano", engine={"image": other, "profile": "vllm-cpu-0.32"})
    (owner,) = pod["spec"]["initContainers"]
    assert (owner["image"], pod["spec"]["containers"][0]["image"]) == (IMAGE, other)
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert not owner["securityContext"]["allowPrivilegeEscalation"]
    assert [one["mountPath"] for one in owner["volumeMounts"]] == ["/var/lib/dsv4/deployments/team/nano"]
    assert "env" not in owner
    assert "initContainers" not in changed("nano", storage={"type": "EmptyDir"})["spec"]


def test_sockets_alone_need_neither_the_device_nor_locked_memory() -> None:
    pod = changed("flash-2x-spark", network={"fabric": {"requireRDMA": False}})
    (container,) = pod["spec"]["containers"]
    assert {"nvidia.com/gpu", "memory"} == container["resources"]["limits"].keys()
    assert "add" not in container["securityContext"]["capabilities"]
    assert container["command"] == ["dsv4-agent"]


def test_members_mount_only_their_folder_the_shared_weights_and_allowed_paths() -> None:
    def shown(pod: dict[str, Any]) -> dict[str, tuple[str, str, bool]]:
        of = {one["name"]: one["hostPath"] for one in pod["spec"]["volumes"] if "hostPath" in one}
        mounted = (one for one in pod["spec"]["containers"][0]["volumeMounts"] if one["name"] in of)
        return {
            one["mountPath"]: (of[one["name"]]["path"], one.get("subPath", ""), one.get("readOnly", False))
            for one in mounted
        }

    own = "/var/lib/dsv4/deployments/team/flash"
    shared, model = "/var/lib/dsv4/weights", "/var/lib/dsv4/models/DeepSeek-V4-Flash"
    assert shown(changed("flash-2x-spark")) == {
        own: (own, "", False),
        shared: (shared, "", True),
        # The mount is a path below the allowed one, so that the kubelet follows no link out of it.
        model: ("/var/lib/dsv4/models", "DeepSeek-V4-Flash", True),
    }
    nano = changed("nano", storage={"type": "EmptyDir"})
    assert shown(nano) == {}
    assert "emptyDir" in mounts(nano)["/var/lib/dsv4/deployments/team/nano"]


def test_a_secret_is_mounted_at_the_path_of_the_plan() -> None:
    ref = {"secretKeyRef": {"name": "hub", "key": "token"}}
    source = {"huggingFace": {"repo": "a/DeepSeek-V4-Flash", "revision": "0" * 40, **ref}}
    pod = changed("flash-2x-spark", model={"variant": "Flash", "source": source})
    items = [{"key": "token", "path": "token"}]
    assert mounts(pod)["/etc/dsv4/secrets/hub"]["secret"] == {
        "secretName": "hub",
        "items": items,
        "defaultMode": 0o440,
    }
    assert pod["spec"]["securityContext"]["fsGroup"] == pod["spec"]["securityContext"]["runAsGroup"] == 65532


def test_image_and_placement_fields_of_the_specification_are_in_the_pod() -> None:
    pod = changed(
        "nano",
        engine={"imagePullPolicy": "Never", "imagePullSecrets": [{"name": "pull"}]},
        topology={"tolerations": [{"key": "pool", "operator": "Exists"}], "exclusiveNodes": True},
    )
    (container,) = pod["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == (IMAGE, "Never")
    assert pod["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["spec"]["tolerations"] == [{"key": "pool", "operator": "Exists"}]
    assert "podAntiAffinity" in pod["spec"]["affinity"]


def test_other_limits_replace_a_gateway_and_another_route_does_not() -> None:
    wanted = read("nano")
    stopped = frontend.gateway_config(wanted, 0, ["it is over"])
    assert '"givenUp": "it is over"' in stopped["data"]["route.json"]
    assert frontend.gateway_deployment(wanted, 0, image=IMAGE) == frontend.gateway_deployment(wanted, 0, image=IMAGE)
    gateway = wanted.spec.gateway.model_copy(update={"hold_timeout": 1.0, "api_keys": KEYS})
    other = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"gateway": gateway})})
    before, after = (frontend.gateway_deployment(one, 0, image=IMAGE)["spec"]["template"] for one in (wanted, other))
    assert before["metadata"]["annotations"] != after["metadata"]["annotations"]
    (volume,) = [one for one in after["spec"]["volumes"] if one["name"] == "keys"]
    items = [{"key": "list", "path": "list"}]
    assert volume["secret"] == {"secretName": "callers", "items": items, "defaultMode": 0o440}
    assert frontend.limits(other).api_keys_file == "/etc/dsv4/secrets/callers/list"


def test_variables_of_the_operator_are_those_of_members_and_gateways() -> None:
    wanted = read("nano")
    plan = plan_group(wanted, facts(wanted, Snapshot.of_pods(tuple(NODES["nano"]), ())), group=0, incarnation=3)

    given = {"DSV4_LOG_FORMAT": "json", "DSV4_TRACES": "http://collector:4317"}

    def pods(host: member.Host, **more: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        gateway = frontend.gateway_deployment(wanted, 0, image=IMAGE, **more)["spec"]["template"]
        return member.member_pod(wanted, plan, 0, host=host), gateway

    found = []
    for plain, pod in zip(pods(HOST), pods(replace(HOST, variables=given), variables=given), strict=True):
        before, after = (one["spec"]["containers"][0].pop("env") for one in (plain, pod))
        assert plain == pod
        assert after[: len(before)] == before
        found.append([(each["name"], each["value"]) for each in after[len(before) :]])
    assert found == [[*given.items()], [*given.items(), ("DSV4_LOG_DEPLOYMENT", "team/nano")]]


def test_the_route_of_every_gateway_lists_every_group() -> None:
    wanted = read("nano")
    wanted = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"replicas": 3})})
    route = frontend.gateway_route(wanted, 1, [None, None, "spent"])
    assert [one.group for one in route.groups] == [1, 0, 2]
    assert [one.given_up for one in route.groups] == [None, None, "spent"]
    assert route.agent == "http://nano-1-head.team.svc:8090"
    assert GatewayRoute.model_validate_json(route.to_json()) == route


def test_a_route_of_another_version_is_read() -> None:
    """Gateways and operator are replaced one after the other."""
    wanted = read("nano")
    wanted = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"replicas": 2})})
    route = frontend.gateway_route(wanted, 0, [None, None], {0: ("old",), 1: ("new",)})
    assert [one.served_names for one in route.groups] == [("old",), ("new",)]
    document = json.loads(route.to_json())
    for one in (document, *document["others"]):
        del one["servedNames"]
        one["later"] = 1
    earlier = GatewayRoute.model_validate(document)
    assert [one.served_names for one in earlier.groups] == [(), ()]
    assert frontend.limits(wanted, {1: ("new", "b"), 0: ("old", "b")}).served_names == ("old", "b", "new")
    assert frontend.limits(wanted, {}).served_names == ("nano",)


@pytest.mark.parametrize("name", NODES)
def test_every_member_has_a_memory_limit_far_above_its_plan(name: str) -> None:
    wanted = read(name)
    plan = plan_group(wanted, facts(wanted, Snapshot.of_pods(tuple(NODES[name]), ())), group=0, incarnation=1)
    for rank in range(len(plan.members)):
        (container,) = member.member_pod(wanted, plan, rank, host=HOST)["spec"]["containers"]
        limit, expected = int(container["resources"]["limits"]["memory"]), plan.expectations
        assert int(container["resources"]["requests"]["memory"]) == expected.memory_bytes
        # The page cache of the weights and /dev/shm count against the limit of the container.
        assert limit >= 2 * (expected.memory_bytes + expected.shm_bytes) + (expected.weights_bytes or 0)


def test_other_numbers_of_groups_leave_the_gateways_of_a_group_as_they_are() -> None:
    wanted = read("nano")
    made = []
    for groups in (1, 2, 3):
        scaled = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"replicas": groups})})
        made.append([frontend.gateway_deployment(scaled, group, image=IMAGE) for group in range(groups)])
    assert made[0][0] == made[1][0] == made[2][0]
    assert made[1][1] == made[2][1]


@pytest.mark.parametrize("drain", ["0s", "15s", "1000s"])
def test_a_gateway_that_ends_has_time_for_its_lame_duck_and_its_drain(drain: str) -> None:
    data = yaml.safe_load((EXAMPLES / "nano.yaml").read_text())
    data["metadata"] |= {"namespace": "team", "uid": "u"}
    data["spec"]["gateway"] = {"drain": drain}
    made = frontend.gateway_deployment(parse(data), 0, image=IMAGE)["spec"]
    settings = frontend.limits(parse(data))
    assert settings.lame_duck_seconds >= 5
    needed = settings.lame_duck_seconds + settings.drain_seconds
    assert made["template"]["spec"]["terminationGracePeriodSeconds"] >= needed + 5
    assert made["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize(("groups", "gateways"), [(1, [2]), (2, [2, 1]), (3, [2, 1, 1])])
def test_a_lost_node_leaves_a_gateway(groups: int, gateways: list[int]) -> None:
    wanted = read("nano")
    wanted = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"replicas": groups})})
    made = [frontend.gateway_deployment(wanted, group, image=IMAGE) for group in range(groups)]
    assert [one["spec"]["replicas"] for one in made] == gateways
    budget = frontend.disruption_budget(wanted)
    assert budget["spec"]["maxUnavailable"] == 1
    for one in made:
        pod = one["spec"]["template"]
        (spread,) = pod["spec"]["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
        (key,) = spread["matchLabelKeys"]
        assert pod["metadata"]["labels"][key] == made[0]["spec"]["template"]["metadata"]["labels"][key]
        assert key not in one["spec"]["selector"]["matchLabels"]
        # The selectors match all gateways of the deployment and no other pods.
        for selector in (spread["labelSelector"], budget["spec"]["selector"]):
            assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
            assert selector["matchLabels"]["app.kubernetes.io/component"] == "gateway"


def test_a_gateways_memory_limit_follows_its_buffer_limit() -> None:
    wanted = read("nano")
    (container,) = frontend.gateway_deployment(wanted, 0, image=IMAGE)["spec"]["template"]["spec"]["containers"]
    limit, kept = int(container["resources"]["limits"]["memory"]), frontend.limits(wanted).max_client_bytes
    assert 100 * 2**20 < limit - kept < 200 * 2**20
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["livenessProbe"]["timeoutSeconds"] == 5


def test_groups_and_incarnations_of_one_specification_have_one_model() -> None:
    wanted = read("nano")
    two = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"replicas": 2})})
    nodes = tuple(node(f"n{n}", room={"cpu": "64", "memory": "512Gi"}) for n in range(4))
    known = facts(two, Snapshot(nodes, ()))
    plans = [plan_group(two, known, group=group, incarnation=one) for group, one in ((0, 1), (1, 1), (0, 7))]
    assert len({plan.model_digest for plan in plans}) == 1
    data = yaml.safe_load((EXAMPLES / "nano.yaml").read_text())
    data["metadata"] |= {"namespace": "team", "uid": "u"}
    data["spec"].setdefault("engine", {}).update(
        image="registry.example/other@sha256:" + "1" * 64, profile="vllm-cpu-0.32"
    )
    other = plan_group(parse(data), facts(parse(data), Snapshot(nodes, ())), group=0, incarnation=1)
    assert other.model_digest != plans[0].model_digest
