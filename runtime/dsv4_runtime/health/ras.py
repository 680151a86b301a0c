"""NCCL's report of its own state: the RAS thread of a worker answers for all ranks (NCCL 2.24 and later).

NVIDIA's NCCL guide, "RAS": https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import asyncio

PORT = 28028
"""NCCL's own default; on each machine the first process that uses NCCL listens there, at the loopback only."""
LIMIT_SECONDS = 5.0
_PEERS_SECONDS = 3
_MOST_BYTES = 1 << 18


async def report(port: int = PORT, seconds: float = LIMIT_SECONDS) -> str:
    """Return NCCL's verbose status: its communicators, ranks that do not answer, and how many operations each began.

    Args:
        port: where a worker's RAS thread listens on this machine.
        seconds: of waiting at most; a stopped process takes the question and never answers.

    Raises:
        OSError: nobody listens there, or nothing was said in time.
    """
    said = bytearray()
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                # A peer that does not answer is named after this many seconds; by default NCCL waits longer.
                writer.write(f"timeout {_PEERS_SECONDS}\nverbose status\n".encode())
                while (part := await reader.read(1 << 16)) and len(said) < _MOST_BYTES:
                    said += part
            finally:
                writer.close()
    except TimeoutError:
        # What has come by then is worth having.
        pass
    text = said[:_MOST_BYTES].decode(errors="replace").removeprefix("OK\n")
    if not text:
        raise TimeoutError(f"NCCL's RAS said nothing within {seconds:g} s")
    return text
