"""Fetch what the gate and the benchmark compare with, into third_party/ (ignored by git).

`python benchmarks/kernels/fetch.py tritons`   the three Tritons of the static gate, one folder each
`python benchmarks/kernels/fetch.py peers`     FlashMLA and DeepGEMM, out of a vLLM wheel for CUDA

Packages are named with exact versions and come from whatever index the machine is set up with.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TRITONS = ("3.6.0", "3.8.0", "3.9.0")
PEERS = "vllm==0.26.0"
KEPT = (
    "vllm/_flashmla_C.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/third_party/flashmla",
    "vllm/third_party/deep_gemm",
)
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "third_party"


def install(package: str, target: Path) -> None:
    own = ROOT / ".uv/bin/uv"
    uv = str(own) if own.exists() else "uv"
    command = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--python",
        sys.executable,
        "--target",
        str(target),
        package,
    ]
    subprocess.run(command, check=True)


def tritons() -> None:
    for version in TRITONS:
        target = FOLDER / f"triton-{version}"
        if not (target / "triton").exists():
            install(f"triton=={version}", target)


def peers() -> None:
    whole, target = FOLDER / "wheel", FOLDER / "peers"
    install(PEERS, whole)
    for name in KEPT:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if not (target / name).exists():
            shutil.move(whole / name, target / name)
    shutil.rmtree(whole)


if __name__ == "__main__":
    wanted = {"tritons": tritons, "peers": peers}
    if len(sys.argv) != 2 or sys.argv[1] not in wanted:
        raise SystemExit(__doc__)
    wanted[sys.argv[1]]()
