"""Configurations of the block-scaled products, how their sums are split, and what the static gate compiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel
from dsv4_kernels.tables import Table, load

# Fewer blocks of 128 than this per share are not worth another program.
LEAST_BLOCKS = 4
GROUP = 8


@dataclass(frozen=True)
class GemmConfig:
    """One program: `block_n` weights rows × `block_m` tokens. `waves`: programs per multiprocessor that splitting K
    aims at.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: int

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"m{self.block_m}-n{self.block_n}-w{self.num_warps}-s{self.num_stages}"


def table(arch: Arch) -> Table[GemmConfig]:
    """The rows of `arch`, by tokens, n and k."""
    return load(Path(__file__).parent, arch, "fp8_gemm", GemmConfig)


def select(arch: Arch, tokens: int, n: int, k: int) -> GemmConfig:
    """The configuration for one product; `n` counts the rows of all groups."""
    return table(arch).select(tokens=tokens, n=n, k=k)


def split_count(config: GemmConfig, tokens: int, n: int, k: int, groups: int, multiprocessors: int) -> int:
    """Shares of K: as many as fill the machine, none shorter than `LEAST_BLOCKS` blocks, all but the last equal."""
    tiles = -(-n // config.block_n) * -(-max(1, tokens) // config.block_m) * groups
    blocks = k // 128
    wanted = max(1, min(blocks // LEAST_BLOCKS, config.waves * multiprocessors // tiles))
    return -(-blocks // -(-blocks // wanted))


SIGNATURE = {
    "a_ptr": "*fp8e4nv",
    "a_scale_ptr": "*u8",
    "w_ptr": "*fp8e4nv",
    "w_scale_ptr": "*u8",
    "out_ptr": "*bf16",
    "part_ptr": "*fp32",
    "count_ptr": "*i32",
    "tokens": "i32",
    "splits": "i32",
}


def static_kernels() -> tuple[StaticKernel, ...]:
    """Every row of every table with the body that its Triton would take; small rows split and whole."""
    records: dict[str, StaticKernel] = {}
    for arch in Arch:
        for row in table(arch).rows:
            c = row.config
            small = c.block_m <= 16
            bodies: list[tuple[bool, tuple[int, int], tuple[int, int] | None]] = [(False, (3, 6), None)]
            if arch.spec.mx_since is not None:
                bodies = [(True, arch.spec.mx_since, None)]
                if arch.spec.mx_since > (3, 6):
                    bodies.append((False, (3, 6), arch.spec.mx_since))
            for mx, since, before in bodies:
                for split in (True, False) if small else (False,):
                    n, k = (1536, 4096) if split else (32768, 1024)
                    # At 8 columns Triton 3.6 widens to fp16 on sm_90 and 3.8 takes wgmma; memory hides either.
                    hopper = ("wgmma-fp8",) if c.block_m > 8 else ("wgmma-fp8", "f16")
                    mma = ("mx",) if mx else hopper if arch is Arch.SM_90 else ("f16", "fp8")
                    record = StaticKernel(
                        operation="fp8_gemm",
                        kernel="dsv4_kernels.fp8_gemm.kernel:fp8_gemm_kernel",
                        label=f"{c.label}-{'mx' if mx else 'dot'}{'-split' if split else ''}",
                        arch=arch,
                        signature=SIGNATURE,
                        constexprs={
                            "N": n,
                            "K": k,
                            "G": 1,
                            "BM": c.block_m,
                            "BN": c.block_n,
                            "GROUP": GROUP,
                            "SPLIT": split,
                            "MX": mx,
                        },
                        num_warps=c.num_warps,
                        num_stages=c.num_stages,
                        expect=Expect(mma=mma, cp_async=8, shared=arch.spec.shared_bytes),
                        since=since,
                        before=before,
                    )
                    records.setdefault(record.key, record)
    return tuple(records.values())
