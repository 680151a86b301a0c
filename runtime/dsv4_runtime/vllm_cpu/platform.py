"""The development platform; apart from its entry point because this module imports vLLM's CPU platform."""

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform


class DevCpuPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM has no types that strict mode accepts
    """vLLM's CPU platform with a Ray resource per member device and socket collectives between members."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the qualified name of the communicator."""
        return "dsv4_runtime.vllm_cpu.communicator.SocketCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Apply the CPU platform's changes, but with one OpenMP thread fork instead of spawn.

        A spawned process imports vLLM again, which takes longer than the start of the nano model. The CPU platform
        spawns the engine core, and a worker even for one rank, to bind OpenMP threads to cores; with one thread there
        is nothing to bind and a fork is safe.
        """
        wanted = vllm_config.parallel_config.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        if os.environ.get("OMP_NUM_THREADS") == "1":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            if wanted == "uni":
                vllm_config.parallel_config.distributed_executor_backend = "uni"
