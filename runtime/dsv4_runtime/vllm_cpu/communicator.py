"""Collectives of the development platform; a module of its own because vLLM's imports the current platform."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class SocketCommunicator(CpuCommunicator):  # type: ignore[misc]  # vLLM has no types that strict mode accepts
    """Collectives between CPU workers by gloo over sockets, never by shared memory.

    vLLM uses shared memory if the ranks agree on a name, which ranks on one machine do even in different network
    namespaces. A link cut would then have no effect, and waiting ranks would spin on the cores of slower ones.
    """

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
