"""Fetch the software for comparison in the gate and the benchmark into third_party/ (ignored by git).

`python benchmarks/kernels/fetch.py tritons`   the three Tritons of the static gate, one folder each
`python benchmarks/kernels/fetch.py peers`     FlashMLA, DeepGEMM, CUTLASS, Marlin and the Triton products of vLLM from
                                               a vLLM wheel for CUDA; Humming; the sources of FlagGems

Packages have exact versions and come from the configured index of the machine; FlagGems comes from its repository,
because its package lacks the operations of DeepSeek-V4. Existing files are not fetched again. A peer that cannot be
fetched is reported, and the others are still fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TRITONS = ("3.6.0", "3.8.0", "3.9.0")
VLLM = "vllm==0.26.0"
VLLM_KEPT = (
    "vllm/_flashmla_C.abi3.so",
    "vllm/_C_stable_libtorch.abi3.so",
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


class FetchError(Exception):
    """A package or repository could not be fetched; the text has the reason."""


def run(*command: str) -> None:
    """Run a command.

    Raises:
        FetchError: the command cannot be run or failed; with its last line of output.
    """
    try:
        # For a repository that is not public, git would prompt for a name and a password.
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=environment)
    except OSError as error:
        raise FetchError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise FetchError(f"{Path(command[0]).name} {command[1]}: {said[-1]}")


def install(package: str, target: Path) -> None:
    """Unpack one package without its dependencies into a folder; with uv if available, else with pip."""
    own = ROOT / ".uv/bin/uv"
    uv = str(own) if own.exists() else shutil.which("uv")
    if uv:
        command = (uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable)
    else:
        command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
    try:
        run(*command, "--target", str(target), package)
    except FetchError:
        # A partial package would be taken for a complete one.
        shutil.rmtree(target, ignore_errors=True)
        raise


def keep(source: Path, names: tuple[str, ...], target: Path) -> None:
    """Move the named files and folders; names missing in the source are reported as warnings."""
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


def vllm() -> None:
    """Fetch the compared libraries and modules of vLLM's wheel."""
    if all((PEERS / name).exists() for name in VLLM_KEPT):
        return
    whole = FOLDER / "wheel"
    install(VLLM, whole)
    keep(whole, VLLM_KEPT, PEERS)
    shutil.rmtree(whole)


def humming() -> None:
    """Fetch Humming's package."""
    if not (PEERS / "humming").exists():
        install(HUMMING, PEERS / "humming")


def flaggems() -> None:
    """Fetch the compared sources of FlagGems."""
    if all((PEERS / "FlagGems" / name).exists() for name in FLAGGEMS_KEPT):
        return
    clone = FOLDER / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    run("git", "clone", "--quiet", "--no-checkout", "--filter=blob:none", FLAGGEMS, str(clone))
    run("git", "-C", str(clone), "checkout", "--quiet", FLAGGEMS_COMMIT, "--", *FLAGGEMS_KEPT)
    keep(clone, FLAGGEMS_KEPT, PEERS / "FlagGems")
    shutil.rmtree(clone)


def peers() -> None:
    """Fetch each peer independently: a failure does not prevent the others from being fetched."""
    each = {"FlashMLA, DeepGEMM, CUTLASS, Marlin, vLLM's Triton": vllm, "Humming": humming, "FlagGems": flaggems}
    for name, fetch in each.items():
        try:
            fetch()
        except FetchError as error:
            print(f"{name}: could not be fetched ({error}); its comparisons are left out", file=sys.stderr)


if __name__ == "__main__":
    wanted = {"tritons": tritons, "peers": peers}
    if len(sys.argv) != 2 or sys.argv[1] not in wanted:
        raise SystemExit(__doc__)
    try:
        wanted[sys.argv[1]]()
    except FetchError as error:
        raise SystemExit(f"failed: {error}") from error
