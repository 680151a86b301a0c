"""Settings of a deployment's specification that decide memory: the arguments of `memory_plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsv4_operator.api import (
    CudagraphMode,
    DSV4Deployment,
    Executor,
    KvCacheDtype,
    SpeculativeMethod,
    SpeculativeSpec,
    TablesPlace,
)
from dsv4_operator.planning.catalog.constants import NANO
from dsv4_operator.planning.catalog.records import Machine, Model
from dsv4_operator.planning.images import ImageProfile, read_arguments
from dsv4_operator.planning.memory.advice import LEAST_CONTEXT, longest_context
from dsv4_operator.planning.memory.plan import memory_plan
from dsv4_operator.planning.memory.records import EngineSettings, Measured, MemoryPlan, Parallel

_NCCL_BUFFER, _NCCL_CHANNELS = 4 * 2**20, 16
"""NCCL's own buffer of a channel, and the channels that it opens at most between machines."""


def deployment_plan(
    deployment: DSV4Deployment, model: Model, machine: Machine, profile: ImageProfile, measured: Measured | None = None
) -> MemoryPlan:
    """Return the memory plan of one group. Without `maxModelLen` it has the longest context that fits.

    Args:
        deployment: the specification.
        model: its checkpoint, from the catalog or from the files themselves.
        machine: every machine of the group; on CPU with the memory that it has.
        profile: what is in the image.
        measured: what a start of the same model, image and machine logged.

    Raises:
        ValueError: as `memory_plan`.
    """
    parallel = parallel_of(deployment)
    plan = memory_plan(model, machine, parallel, engine_of(deployment, model, machine, profile), measured)
    if deployment.spec.engine.max_model_len is None and machine.sm:
        longest = longest_context(plan) or LEAST_CONTEXT
        return memory_plan(model, machine, parallel, replace(plan.engine, max_model_len=longest), measured)
    return plan


def parallel_of(deployment: DSV4Deployment) -> Parallel:
    """Return the division of the group over devices and machines."""
    topology = deployment.spec.topology
    return Parallel(
        tensor=topology.tensor_parallel,
        pipeline=topology.pipeline_parallel_size,
        devices_per_node=topology.devices_per_node,
        expert=topology.expert_parallel,
    )


def engine_of(deployment: DSV4Deployment, model: Model, machine: Machine, profile: ImageProfile) -> EngineSettings:
    """Return the settings that take memory; a context that is not given is the shortest one."""
    engine = deployment.spec.engine
    on_cpu = not machine.sm
    return EngineSettings(
        max_model_len=engine.max_model_len or (NANO.max_model_len if on_cpu else LEAST_CONTEXT),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        # vLLM 0.32, config/vllm.py: "`ray` does not support async scheduling yet" of the compiled graphs.
        async_scheduling=engine.async_scheduling and engine.executor is not Executor.RAY_LEGACY,
        speculative_tokens=_speculative_tokens(engine.speculative, model),
        kv_dtype=_KV_FORMATS.get(engine.kv_cache_dtype),
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_memory=engine.kv_cache_memory or (NANO.kv_cache_bytes if on_cpu else None),
        cuda_graphs=engine.cudagraph_mode is not CudagraphMode.NONE,
        capture_size=max(_sizes(engine.extra_args, "--max-cudagraph-capture-size"), default=None),
        capture_sizes=_sizes(engine.extra_args, "--cudagraph-capture-sizes"),
        ray=engine.executor is not Executor.MP,
        ray_legacy=engine.executor is Executor.RAY_LEGACY,
        build=profile.build,
        tables_on_disk=deployment.spec.model.tables is TablesPlace.DISK,
        nccl_share=_nccl_share({**profile.env, **{given.name: given.value for given in engine.env}}),
    )


def _sizes(args: Sequence[str], flag: str) -> tuple[int, ...]:
    """Return the numbers that the user gives to `flag`; none where one of them is no number."""
    given = [value for argument in read_arguments(args) if argument.name == flag for value in argument.values]
    return tuple(map(int, given)) if all(value.isdecimal() for value in given) else ()


def _nccl_share(env: Mapping[str, str]) -> float:
    """Return what NCCL's buffers take of their bytes at its defaults."""
    size, channels = (env.get(name, "") for name in ("NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS"))
    share = int(size) / _NCCL_BUFFER if size.isdecimal() else 1.0
    return share * (min(int(channels), _NCCL_CHANNELS) / _NCCL_CHANNELS if channels.isdecimal() else 1.0)


_KV_FORMATS = {KvCacheDtype.FP8_DS_MLA: "fp8_ds_mla", KvCacheDtype.NVFP4_DS_MLA: "nvfp4_ds_mla"}
"""Of the others vLLM makes the model's own."""


def _speculative_tokens(asked: SpeculativeSpec, model: Model) -> int:
    if asked.method is SpeculativeMethod.NONE:
        return 0
    return asked.tokens or (model.speculative.tokens if model.speculative else 1)
