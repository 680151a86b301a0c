"""Ports, units, and the bounds of the Nano model on CPU."""

from __future__ import annotations

from dataclasses import dataclass

AGENT_PORT = 8090
GCS_PORT = 6379
DASHBOARD_PORT = 8265
API_PORT = 8000
"""Ports at a member's own address; those under which a group is published are `spec.network.ports`."""

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class NanoProfile:
    """The Nano model on CPU, two members on two cores.

    Members were measured at 2.9 GiB (rank 0) and 1.6 GiB (rank 1), KV cache included (docs/measurements.md); the bytes
    are upper estimates over that. Seconds are bounds, `ready_seconds` what a start takes on a busy machine.
    """

    max_model_len: int = 1024
    kv_cache_bytes: int = 512 * MIB
    """For each rank; 13 800 tokens, so that one request of the greatest length fits."""
    object_store_bytes: int = 80_000_000
    """Ray's least is 75 MiB; vLLM puts nothing there."""
    queue_bytes: int = 192 * MIB
    """vLLM's message queues in shared memory."""
    head_bytes: int = 2 * GIB
    """Ray's head processes, the API server and the engine core."""
    rank_bytes: int = 1 * GIB
    """Ray's node processes and one worker with its weights, without the KV cache."""
    staging_seconds: float = 120.0
    load_seconds: float = 300.0
    ready_seconds: float = 45.0


NANO = NanoProfile()
