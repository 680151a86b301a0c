"""Fetch what the gate and the benchmark compare with, into third_party/ (ignored by git).

`python benchmarks/kernels/fetch.py tritons`   the three Tritons of the static gate, one folder each
`python benchmarks/kernels/fetch.py peers`     FlashMLA, DeepGEMM, Marlin and the Triton products of vLLM out of a vLLM
                                               wheel for CUDA; Humming; the sources of FlagGems

Packages are named with exact versions and come from whatever index the machine is set up with; FlagGems comes from its
repository, since its package lacks the operations of DeepSeek-V4. What is there already is not fetched again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TRITONS = ("3.6.0", "3.8.0", "3.9.0")
VLLM = "vllm==0.26.0"
VLLM_KEPT = (
    "vllm/_flashmla_C.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/third_party/flashmla",
    "vllm/third_party/deep_gemm",
    "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
    "vllm/model_executor/layers/quantization/utils/configs",
)
HUMMING = "humming-kernels==0.1.19"
FLAGGEMS, FLAGGEMS_COMMIT = "https://github.com/flagos-ai/FlagGems", "ed2508bcb5a03000e9774734201d840ba362cd11"
FLAGGEMS_KEPT = (
    "src/flag_gems/fused/flash_mla_with_kvcache.py",
    "src/flag_gems/ops/w8a8_block_fp8_matmul.py",
    "src/flag_gems/utils/configs",
)
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "third_party"
PEERS = FOLDER / "peers"


def run(*command: str) -> None:
    """Run a command; its failure ends the program with the command's own message and the line that was run."""
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


def install(package: str, target: Path) -> None:
    """Unpack one package, without what it needs, into a folder; with uv where it is, else with pip."""
    own = ROOT / ".uv/bin/uv"
    uv = str(own) if own.exists() else shutil.which("uv")
    if uv:
        run(uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(target), package)
    else:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), package)


def keep(source: Path, names: tuple[str, ...], target: Path) -> None:
    """Move the named files and folders; names that the source does not have are told, not fatal."""
    for name in names:
        if not (source / name).exists():
            print(f"{name}: not in {source.name}, its peer stays out of the benchmark", file=sys.stderr)
        elif not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source / name, target / name)


def tritons() -> None:
    for version in TRITONS:
        target = FOLDER / f"triton-{version}"
        if not (target / "triton").exists():
            install(f"triton=={version}", target)


def peers() -> None:
    if any(not (PEERS / name).exists() for name in VLLM_KEPT):
        whole = FOLDER / "wheel"
        install(VLLM, whole)
        keep(whole, VLLM_KEPT, PEERS)
        shutil.rmtree(whole)
    if not (PEERS / "humming").exists():
        install(HUMMING, PEERS / "humming")
    if any(not (PEERS / "FlagGems" / name).exists() for name in FLAGGEMS_KEPT):
        clone = FOLDER / "clone"
        shutil.rmtree(clone, ignore_errors=True)
        run("git", "clone", "--quiet", "--no-checkout", "--filter=blob:none", FLAGGEMS, str(clone))
        run("git", "-C", str(clone), "checkout", "--quiet", FLAGGEMS_COMMIT, "--", *FLAGGEMS_KEPT)
        keep(clone, FLAGGEMS_KEPT, PEERS / "FlagGems")
        shutil.rmtree(clone)


if __name__ == "__main__":
    wanted = {"tritons": tritons, "peers": peers}
    if len(sys.argv) != 2 or sys.argv[1] not in wanted:
        raise SystemExit(__doc__)
    wanted[sys.argv[1]]()
