"""The development platform's collectives."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class SocketCommunicator(CpuCommunicator):  # type: ignore[misc]  # vLLM ships no types that strict mode accepts
    """Collectives between CPU workers by gloo over sockets, never by shared memory.

    vLLM takes shared memory when the ranks agree on a name, which ranks of one machine do even in different network
    namespaces. Then a cut link is not felt, and ranks that wait for a slower one spin on the cores that it needs.
    """

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
