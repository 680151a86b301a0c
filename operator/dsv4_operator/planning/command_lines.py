"""The argument lists of Ray and vLLM."""

from __future__ import annotations

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.planning.catalog import NANO
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.members import Seat

KV_BLOCK_TOKENS = 256
"""The only block size that the model's compressed caches page into."""


def ray_args(seat: Seat, head: Seat, facts: Facts, incarnation: int) -> tuple[str, ...]:
    """What follows `ray` on the command line of the member in `seat`."""
    role = (
        (
            "--head",
            f"--port={head.ports.gcs}",
            f"--dashboard-host={head.node.address}",
            f"--dashboard-port={head.ports.dashboard}",
        )
        if seat is head
        else (f"--address={head.node.address}:{head.ports.gcs}",)
    )
    return (
        "start",
        "--block",
        *role,
        f"--node-ip-address={seat.node.address}",
        f"--num-gpus={seat.devices}",
        # Ray starts as many idle Python processes as it has processors, and the engine asks for devices only.
        f"--num-cpus={seat.devices}",
        f"--object-store-memory={NANO.object_store_bytes}",
        f"--temp-dir={facts.member_root(incarnation, seat.rank)}/ray",
        "--disable-usage-stats",
        "--include-log-monitor=false",
    )


def engine_args(deployment: DSV4Deployment, head: Seat, weights_path: str) -> tuple[str, ...]:
    """What follows the API server's program name."""
    spec = deployment.spec
    return (
        f"--model={weights_path}",
        "--served-model-name",
        *deployment.served_names,
        f"--host={head.node.address}",
        f"--port={head.ports.api}",
        *_parallel(deployment),
        f"--block-size={KV_BLOCK_TOKENS}",
        f"--max-model-len={spec.engine.max_model_len or NANO.max_model_len}",
        f"--max-num-seqs={spec.engine.max_num_seqs}",
        f"--max-num-batched-tokens={spec.engine.max_num_batched_tokens}",
        f"--kv-cache-memory-bytes={kv_cache_bytes(deployment)}",
        # Neither graphs nor compilation pay on CPU.
        "--enforce-eager",
        # Every prompt is computed, so that two answers to one prompt are the same token for token.
        "--no-enable-prefix-caching",
        *spec.engine.extra_args,
    )


def kv_cache_bytes(deployment: DSV4Deployment) -> int:
    """Memory for the KV cache of each rank."""
    return deployment.spec.engine.kv_cache_memory or NANO.kv_cache_bytes


def _parallel(deployment: DSV4Deployment) -> tuple[str, ...]:
    topology = deployment.spec.topology
    if topology.world_size == 1:
        # vLLM's own choice: the engine's process computes by itself, and Ray only shows the member.
        return ()
    return (
        f"--tensor-parallel-size={topology.tensor_parallel}",
        f"--pipeline-parallel-size={topology.pipeline_parallel_size}",
        "--distributed-executor-backend=ray",
    )
