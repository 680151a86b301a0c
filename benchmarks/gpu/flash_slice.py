"""Make four layers of DeepSeek-V4-Flash with random weights, on the GPU and in seconds.

    python -m benchmarks.gpu.flash_slice /dev/shm/flash-slice

Every layer has Flash's own sizes (hidden 4096, 64 heads, 256 experts of 2048) in the released formats, 14 GB in total:
the cost of one layer in a step equals that in the real model. The vocabulary and the number of layers are those of the
nano model, so time outside of the layers is not meaningful.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import time
from pathlib import Path

import torch

from dsv4_runtime.nano import weights
from dsv4_runtime.nano.recipe import Precision, Recipe

RECIPE = Recipe(
    precision=Precision.FP8,
    hidden=4096,
    moe_inter=2048,
    heads=64,
    q_lora=1024,
    o_groups=8,
    o_lora=1024,
    index_heads=64,
    max_positions=16384,
)
_LARGE = 1 << 21


@dataclasses.dataclass(frozen=True)
class GpuSource(weights.RandomStreams):
    """Draws large tensors on the GPU; they differ from those drawn on the CPU."""

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        """Draw float32 normals of `shape`, on the GPU if they are weights of a layer's product."""
        small = torch.Size(shape).numel() < _LARGE or not name.startswith("layers.") or "_fn" in name
        if small:
            return super().normal(name, *shape, std=std, mean=mean)
        key = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()[:7]
        generator = torch.Generator("cuda").manual_seed(int.from_bytes(key, "little"))
        return torch.randn(shape, device="cuda", generator=generator) * std + mean


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    if (directory / "config.json").exists():
        print(f"{directory} already exists")
        return
    directory.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    weights.write_files(directory, RECIPE, GpuSource(0), shard_bytes=2 << 30)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: {size / 1e9:.1f} GB in {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
