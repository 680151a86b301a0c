"""What of a deployment's specification decides memory: the arguments of `memory_plan`."""

from __future__ import annotations

from dataclasses import replace

from dsv4_operator.api import CudagraphMode, DSV4Deployment, KvCacheDtype, SpeculativeMethod, SpeculativeSpec
from dsv4_operator.planning.catalog.constants import NANO
from dsv4_operator.planning.catalog.records import Machine, Model
from dsv4_operator.planning.memory.advice import LEAST_CONTEXT, longest_context
from dsv4_operator.planning.memory.plan import memory_plan
from dsv4_operator.planning.memory.records import Engine, MemoryPlan, Parallel


def deployment_plan(deployment: DSV4Deployment, model: Model, machine: Machine) -> MemoryPlan:
    """The memory plan of one group. Without `maxModelLen` it has the longest context that fits.

    Args:
        deployment: the specification.
        model: its checkpoint, from the catalog or from the files themselves.
        machine: every machine of the group; on CPU with the memory that it has.

    Raises:
        ValueError: as `memory_plan`.
    """
    parallel = parallel_of(deployment)
    plan = memory_plan(model, machine, parallel, engine_of(deployment, model, machine))
    if deployment.spec.engine.max_model_len is None and machine.sm:
        longest = longest_context(plan) or LEAST_CONTEXT
        return memory_plan(model, machine, parallel, replace(plan.engine, max_model_len=longest))
    return plan


def parallel_of(deployment: DSV4Deployment) -> Parallel:
    """How the group is divided."""
    topology = deployment.spec.topology
    return Parallel(
        tensor=topology.tensor_parallel,
        pipeline=topology.pipeline_parallel_size,
        devices_per_node=topology.devices_per_node,
        expert=topology.expert_parallel,
    )


def engine_of(deployment: DSV4Deployment, model: Model, machine: Machine) -> Engine:
    """The settings that take memory; a context that is not given is the shortest one."""
    engine = deployment.spec.engine
    on_cpu = not machine.sm
    return Engine(
        max_model_len=engine.max_model_len or (NANO.max_model_len if on_cpu else LEAST_CONTEXT),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        async_scheduling=engine.async_scheduling,
        speculative_tokens=_speculative_tokens(engine.speculative, model),
        kv_dtype=_KV_FORMATS.get(engine.kv_cache_dtype),
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_memory=engine.kv_cache_memory or (NANO.kv_cache_bytes if on_cpu else None),
        cuda_graphs=engine.cudagraph_mode is not CudagraphMode.NONE,
    )


_KV_FORMATS = {KvCacheDtype.FP8_DS_MLA: "fp8_ds_mla", KvCacheDtype.NVFP4_DS_MLA: "nvfp4_ds_mla"}
"""Of the others vLLM makes the model's own."""


def _speculative_tokens(asked: SpeculativeSpec, model: Model) -> int:
    if asked.method is SpeculativeMethod.NONE:
        return 0
    return asked.tokens or (model.speculative.tokens if model.speculative else 1)
