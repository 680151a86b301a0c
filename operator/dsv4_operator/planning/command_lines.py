"""The argument lists of Ray and vLLM. docs/rendering.md says why each is there."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dsv4_operator.api import CudagraphMode, Executor, SpeculativeMethod
from dsv4_operator.planning.catalog import NANO
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.members import Placement
from dsv4_operator.planning.setup import Setup

OBJECT_STORE_BYTES = 2**30
"""Of Ray on accelerators: shared memory that is taken only as it fills; only compiled graphs use it."""

_LEAST_PREFILL = 1024
_SAFETENSORS = ("auto", "safetensors")
"""Formats that are read with a strategy; `auto` is `safetensors` for a checkpoint of such files."""
_GRAPH_MODES = {
    CudagraphMode.PIECEWISE: "PIECEWISE",
    CudagraphMode.FULL: "FULL",
    CudagraphMode.FULL_DECODE_ONLY: "FULL_DECODE_ONLY",
    CudagraphMode.FULL_AND_PIECEWISE: "FULL_AND_PIECEWISE",
}


def ray_args(chosen: Setup, placement: Placement, head: Placement, facts: Facts, incarnation: int) -> tuple[str, ...]:
    """Return what follows `ray` on the command line of the member in `placement`."""
    role = (
        (
            "--head",
            f"--port={head.ports.gcs}",
            # Where the member has a network of its own, on its loopback too: that is where a port-forward arrives.
            f"--dashboard-host={'0.0.0.0' if facts.isolated else head.node.address}",  # noqa: S104  (it wants the token)
            f"--dashboard-port={head.ports.dashboard}",
            "--no-monitor",
        )
        if placement is head
        else (f"--address={head.node.address}:{head.ports.gcs}",)
    )
    return (
        "start",
        "--block",
        *role,
        f"--node-ip-address={placement.node.address}",
        f"--num-gpus={placement.devices}",
        # Ray starts as many idle Python processes as it has processors, and the engine asks for devices only.
        f"--num-cpus={placement.devices}",
        f"--object-store-memory={NANO.object_store_bytes if chosen.on_cpu else OBJECT_STORE_BYTES}",
        f"--temp-dir={facts.member_root(incarnation, placement.rank)}/ray",
        "--disable-usage-stats",
        "--include-log-monitor=false",
    )


def engine_args(chosen: Setup, head: Placement, weights_path: str) -> tuple[str, ...]:
    """Return what follows the API server's program name."""
    deployment = chosen.deployment
    engine = deployment.spec.engine
    return (
        f"--model={weights_path}",
        "--served-model-name",
        *deployment.served_names,
        f"--host={head.node.address}",
        f"--port={head.ports.api}",
        # Where members share their machine's network there is no gateway, and clients ask vLLM itself.
        *(("--middleware=dsv4_runtime.engine.token_auth.TokenAuth",) if chosen.facts.isolated else ()),
        *_parallel(chosen),
        f"--block-size={chosen.model.block_tokens}",
        f"--max-model-len={chosen.max_model_len}",
        f"--max-num-seqs={engine.max_num_seqs}",
        f"--max-num-batched-tokens={engine.max_num_batched_tokens}",
        *(_on_cpu(chosen) if chosen.on_cpu else _on_accelerators(chosen)),
        *engine.extra_args,
    )


def _parallel(chosen: Setup) -> Iterator[str]:
    topology, executor = chosen.deployment.spec.topology, chosen.deployment.spec.engine.executor
    if topology.world_size == 1:
        # vLLM's own choice: the engine's process computes by itself, and Ray only shows the member.
        return
    yield f"--tensor-parallel-size={topology.tensor_parallel}"
    yield f"--pipeline-parallel-size={topology.pipeline_parallel_size}"
    yield f"--distributed-executor-backend={'mp' if executor is Executor.MP else 'ray'}"
    if topology.expert_parallel:
        yield "--enable-expert-parallel"


def _on_cpu(chosen: Setup) -> Iterator[str]:
    yield f"--kv-cache-memory-bytes={chosen.memory.engine.kv_cache_memory}"
    # Neither graphs nor compilation pay on CPU.
    yield "--enforce-eager"
    # Every prompt is computed, so that two answers to one prompt are the same token for token.
    yield "--no-enable-prefix-caching"
    yield from _speculative(chosen)


def _on_accelerators(chosen: Setup) -> Iterator[str]:
    engine = chosen.deployment.spec.engine
    yield f"--kv-cache-dtype={chosen.kv_cache_dtype}"
    yield f"--gpu-memory-utilization={chosen.utilization:g}"
    if engine.kv_cache_memory is not None:
        yield f"--kv-cache-memory-bytes={engine.kv_cache_memory}"
    yield "--async-scheduling" if chosen.async_scheduling else "--no-async-scheduling"
    if engine.cudagraph_mode is CudagraphMode.NONE:
        yield "--enforce-eager"
    yield from _speculative(chosen)
    for flag, value in _proposed(chosen):
        if value != "" and not chosen.gives(flag):
            yield f"{flag}={value}" if value is not None else flag


def _proposed(chosen: Setup) -> Iterator[tuple[str, str | None]]:
    """Yield the flags that give way to the user's own.

    One with an empty value, which the model has no use for, is left out.
    """
    model, engine, profile = chosen.model, chosen.deployment.spec.engine, chosen.profile
    yield "--tokenizer-mode", model.tokenizer_mode
    yield "--reasoning-parser", model.reasoning_parser
    yield "--tool-call-parser", model.tool_call_parser
    yield "--enable-auto-tool-choice", None if model.tool_call_parser else ""
    yield "--enable-prefix-caching", None
    yield "--load-format", profile.load_formats[0]
    if (chosen.value("--load-format") or profile.load_formats[0]) in _SAFETENSORS:
        yield "--safetensors-load-strategy", "prefetch"
    threshold = max(_LEAST_PREFILL, engine.max_num_batched_tokens // 2)
    if engine.max_num_seqs > 1 and threshold < engine.max_num_batched_tokens:
        yield "--long-prefill-token-threshold", str(threshold)
    if engine.cudagraph_mode is not CudagraphMode.NONE:
        # vLLM refuses a largest size that is not the largest of the sizes.
        if not chosen.gives("--cudagraph-capture-sizes"):
            yield "--max-cudagraph-capture-size", str(engine.max_num_seqs * (1 + chosen.draft_tokens))
        if compilation := _compilation(chosen):
            yield "--compilation-config", compilation
    if chosen.memory.engine.tables_on_disk and profile.tables_on_disk:
        yield "--engram-config", _json(dict(profile.tables_on_disk))
    yield from profile.args.items()


def _compilation(chosen: Setup) -> str:
    asked = _GRAPH_MODES.get(chosen.deployment.spec.engine.cudagraph_mode)
    settings = {**chosen.profile.compilation, **({"cudagraph_mode": asked} if asked else {})}
    return _json(settings) if settings else ""


def _speculative(chosen: Setup) -> Iterator[str]:
    method = chosen.deployment.spec.engine.speculative.method
    if method is SpeculativeMethod.NONE:
        return
    settings = {"method": method.lower(), "num_speculative_tokens": chosen.draft_tokens}
    if method is SpeculativeMethod.DSPARK:
        # With vLLM's default, greedy, the field saw garbled answers and a lower acceptance.
        settings |= {"draft_sample_method": "probabilistic", **chosen.profile.drafts}
    yield f"--speculative-config={_json(settings)}"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
