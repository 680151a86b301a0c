"""Speed probe of an all-reduce over all members: a program of its own, one on every member, that ends when it is done.

It prints one line of JSON and lets NCCL write its log beside it, which shows the transport. A process of its own,
because a CUDA context keeps memory until its process ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

RESULT = "dsv4 fabric bandwidth: "
BYTES = 256 * 2**20
_ROUNDS, _WARM = 8, 2


@dataclass(frozen=True, slots=True)
class Result:
    """Result of the probe."""

    bandwidth: float | None
    """Bus bandwidth in bytes a second; None if it was not measured."""
    skipped: str | None
    """Reason why it was not measured."""


def command(rank: int, world: int, address: str, port: int, seconds: float) -> list[str]:
    """Return the command line of the probe of one member; `address` and `port` are those of rank 0's rendezvous."""
    arguments = {"--rank": rank, "--world": world, "--address": address, "--port": port, "--seconds": seconds}
    words = [str(word) for pair in arguments.items() for word in pair]
    return [sys.executable, "-m", "dsv4_runtime.fabric.bandwidth", *words]


def parse_result(output: str) -> Result | None:
    """Return what a finished probe printed; None if it never came so far."""
    for line in reversed(output.splitlines()):
        if line.startswith(RESULT):
            try:
                document = json.loads(line.removeprefix(RESULT))
                return Result(document.get("bandwidth"), document.get("skipped"))
            except (ValueError, AttributeError):
                return None
    return None


def bus_bandwidth(size: int, world: int, seconds: float) -> float:
    """Return the bytes a second through the slowest link of a ring all-reduce of `size` bytes, as nccl-tests does."""
    return 2 * (world - 1) / world * size / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the probe: its entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("rank", int), ("world", int), ("address", str), ("port", int), ("seconds", float)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        _print_result({"skipped": "no GPU"})
        return 0
    _print_result({"bandwidth": _measure(torch, given), "gpu": torch.cuda.get_device_name(0)})
    return 0


def _measure(torch: Any, given: argparse.Namespace) -> float:
    """Measure, and raise what torch raises: the parent reads it in the log."""
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"tcp://{given.address}:{given.port}",
        rank=given.rank,
        world_size=given.world,
        timeout=timedelta(seconds=given.seconds),
    )
    data = torch.ones(BYTES // 2, dtype=torch.bfloat16, device="cuda")
    best = float("inf")
    for turn in range(_WARM + _ROUNDS):
        data.fill_(1)
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begun = time.monotonic()
        torch.distributed.all_reduce(data)
        torch.cuda.synchronize()
        # The first turns connect the ranks.
        if turn >= _WARM:
            best = min(best, time.monotonic() - begun)
    wrong = int((data != given.world).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {data.numel()} sums are wrong: the fabric or a GPU corrupts data")
    torch.distributed.destroy_process_group()
    return bus_bandwidth(BYTES, given.world, best)


def _print_result(document: dict[str, object]) -> None:
    print(RESULT + json.dumps(document), flush=True)


if __name__ == "__main__":
    sys.exit(main())
