"""The development platform's class, apart from its entry point because importing it imports vLLM's CPU platform."""

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform


class DevCpuPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM ships no types that strict mode accepts
    """vLLM's CPU platform, with a Ray resource for a member's device and sockets between the members."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the communicator's qualified name."""
        return "dsv4_runtime.vllm_plugin.dev_communicator.SocketCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Do what the CPU platform does, but start no Python process that imports vLLM again where one thread computes.

        Importing vLLM takes longer than starting the nano model. The CPU platform spawns the engine core, and a worker
        even for one rank, to bind OpenMP threads to cores; with one thread nothing is to bind and forking is safe.
        """
        wanted = vllm_config.parallel_config.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        if os.environ.get("OMP_NUM_THREADS") == "1":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            if wanted == "uni":
                vllm_config.parallel_config.distributed_executor_backend = "uni"
