"""Translation of the source of predicates into CEL."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsv4_operator.api import Hardware, Variant, cel
from dsv4_operator.api.rules import RULES
from dsv4_operator.api.spec import DeploymentSpec, EngineSpec, TopologySpec

SIZES = (1, 2)


def required(topology: TopologySpec) -> bool:
    return topology.hardware is Hardware.GB10


def default(topology: TopologySpec) -> bool:
    return topology.devices_per_node != 1 or not topology.expert_parallel


def presence(engine: EngineSpec) -> bool:
    return engine.max_model_len is None or engine.max_model_len <= 8192


def nested(spec: DeploymentSpec) -> bool:
    return spec.engine.gpu_memory_utilization is not None and spec.engine.max_num_seqs > 1


def members(spec: DeploymentSpec) -> bool:
    return spec.model.variant in (Variant.NANO, Variant.FLASH) or spec.topology.nodes_per_group not in SIZES


def inlined(topology: TopologySpec) -> bool:
    return topology.world_size % topology.pipeline_parallel_size == 0


def missing(topology: TopologySpec) -> bool:
    return topology.tensor_parallel == 1


@pytest.mark.parametrize(
    ("predicate", "condition"),
    [
        (required, "self.hardware == 'GB10'"),
        (default, "self.?devicesPerNode.orValue(1) != 1 || !(self.?expertParallel.orValue(false))"),
        (presence, "!has(self.maxModelLen) || self.maxModelLen <= 8192"),
        (
            nested,
            "(has(self.engine) && has(self.engine.gpuMemoryUtilization)) && self.?engine.?maxNumSeqs.orValue(4) > 1",
        ),
        (
            members,
            "self.model.variant in ['Nano', 'Flash'] || !(self.topology.?nodesPerGroup.orValue(1) in [1, 2])",
        ),
        (
            inlined,
            "self.?nodesPerGroup.orValue(1) * self.?devicesPerNode.orValue(1) % "
            "self.?pipelineParallelSize.orValue(1) == 0",
        ),
        (
            missing,
            "self.?tensorParallelSize.orValue(self.?nodesPerGroup.orValue(1) * self.?devicesPerNode.orValue(1) / "
            "self.?pipelineParallelSize.orValue(1)) == 1",
        ),
    ],
)
def test_a_predicate_becomes_a_condition(predicate: Callable[[object], bool], condition: str) -> None:
    assert cel.condition(predicate) == condition


def lower(topology: TopologySpec) -> bool:
    return topology.hardware.lower() == "cpu"


def always(topology: TopologySpec) -> bool:
    return topology.hardware is not None


@pytest.mark.parametrize("predicate", [lower, always])
def test_predicates_without_an_equivalent_in_cel_are_refused(predicate: Callable[[object], bool]) -> None:
    with pytest.raises(ValueError, match=r"no equivalent in CEL|always present"):
        cel.condition(predicate)


def test_every_rule_has_a_condition_or_is_left_to_the_policy() -> None:
    without = [each.reason for each in RULES if each.conditions == ()]
    assert without == ["InvalidURL"]
    assert all(cel.condition(each.holds) for each in RULES if each.conditions is None and each.holds is not None)


def test_reasons_are_identifiers() -> None:
    assert [each.reason for each in RULES if not each.reason.isalnum() or not each.reason[0].isupper()] == []
    assert all("; " in each.text for each in RULES)
