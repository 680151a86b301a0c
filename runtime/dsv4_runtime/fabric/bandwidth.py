"""Bandwidth probe: one process per member runs an all-reduce over all members and exits.

It prints one line of JSON; NCCL's log beside it shows the transport. It is a separate process because a CUDA context
holds memory until its process ends.
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
    """Bus bandwidth in bytes per second; None if not measured."""
    skipped: str | None
    """Reason for a skipped measurement."""


def command(rank: int, world: int, address: str, port: int, seconds: float) -> list[str]:
    """Return the probe's command line for one member; `address` and `port` are those of rank 0's rendezvous."""
    arguments = {"--rank": rank, "--world": world, "--address": address, "--port": port, "--seconds": seconds}
    words = [str(word) for pair in arguments.items() for word in pair]
    return [sys.executable, "-m", "dsv4_runtime.fabric.bandwidth", *words]


def parse_result(output: str) -> Result | None:
    """Return the result printed by a probe; None if there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith(RESULT):
            try:
                document = json.loads(line.removeprefix(RESULT))
                return Result(document.get("bandwidth"), document.get("skipped"))
            except (ValueError, AttributeError):
                return None
    return None


def bus_bandwidth(size: int, world: int, seconds: float) -> float:
    """Return the bytes per second of the slowest link of a ring all-reduce of `size` bytes, as defined by
    nccl-tests.
    """
    return 2 * (world - 1) / world * size / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the probe."""
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
    """Measure; exceptions of torch propagate to the log, which the parent process reads."""
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
        # The first rounds connect the ranks.
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
