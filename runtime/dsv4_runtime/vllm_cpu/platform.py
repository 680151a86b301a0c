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
        return f"{__name__}.SocketCommunicator"

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


def __getattr__(name: str) -> Any:
    """Return `SocketCommunicator`, made on demand: the import of its base needs the current platform."""
    if name != "SocketCommunicator":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    class SocketCommunicator(CpuCommunicator):  # type: ignore[misc]  # vLLM has no types that strict mode accepts
        """Collectives between CPU workers by gloo over sockets, never by shared memory.

        vLLM uses shared memory if the ranks agree on a name, which ranks on one machine do even in different network
        namespaces. A link cut would then have no effect, and waiting ranks would spin on the cores of slower ones.
        """

        def _all_group_ranks_share_shm_group_name(self) -> bool:
            return False

    return SocketCommunicator
