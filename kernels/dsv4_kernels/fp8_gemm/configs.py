"""Configurations of the block-scaled products, how their sums are split, and what the static gate compiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel
from dsv4_kernels.tables import Table, load

# Fewer blocks of 128 than this per share are not worth another program.
LEAST_BLOCKS = 4
GROUP = 8
# Most tokens whose results a product quantises as it stores them, in tiles of as many rows as a scale stands for.
QUANTISED_TOKENS = 16
QUANTISED_N = 128
# Weight rows of a tile of the sm_90 body for many tokens.
HOPPER_N = 128


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


@dataclass(frozen=True)
class HopperConfig:
    """A program of the sm_90 body for many tokens: `warpgroups` × 64 tokens × 128 weight rows. `cost`: time of a tile
    per token, in units of the others' of the table.
    """

    warpgroups: int
    num_stages: int
    cost: float

    @property
    def block_m(self) -> int:
        """Tokens of a tile."""
        return 64 * self.warpgroups

    def tiles(self, tokens: int, n: int, groups: int) -> int:
        """Tiles of a product."""
        return -(-tokens // self.block_m) * -(-n // HOPPER_N) * groups

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"m{self.block_m}-n{HOPPER_N}-s{self.num_stages}"


@functools.cache
def table(arch: Arch) -> Table[GemmConfig]:
    """The rows of `arch`, by tokens, n and k."""
    return load(Path(__file__).parent, arch, "fp8_gemm", GemmConfig)


def select(arch: Arch, tokens: int, n: int, k: int, quantised: bool = False) -> GemmConfig:
    """The configuration for one product; `n` counts the rows of all groups."""
    config = table(arch).select(tokens=tokens, n=n, k=k)
    return replace(config, block_n=QUANTISED_N) if quantised else config


def hopper_from(arch: Arch, n: int, k: int, groups: int) -> int | None:
    """Least tokens from which the body of specialised warps computes a product on a GPU; None where it never does.

    It takes two blocks of 128 values of k a step, and its tiles of weights may run past the end of the last group only.
    """
    if arch is not Arch.SM_90 or k % 256 or (groups > 1 and n % HOPPER_N):
        return None
    return min(row.when["tokens"][0] for row in hopper_table().rows)


@functools.cache
def hopper_table() -> Table[HopperConfig]:
    """The rows of the sm_90 body for many tokens, by tokens, k and groups."""
    return load(Path(__file__).parent, Arch.SM_90, "fp8_gemm_hopper", HopperConfig)


def select_hopper(tokens: int, n: int, k: int, groups: int, multiprocessors: int) -> HopperConfig:
    """Of the rows that hold the shape, the one whose tiles are done first: all multiprocessors take one tile at a time,
    the taller tile takes longer.
    """

    def time(c: HopperConfig) -> float:
        return -(-c.tiles(tokens, n, groups) // multiprocessors) * c.block_m * c.cost

    shape = {"tokens": tokens, "k": k, "groups": groups}
    return min((row.config for row in hopper_table().rows if row.holds(shape)), key=time)


def split_count(config: GemmConfig, tokens: int, n: int, k: int, groups: int, multiprocessors: int) -> int:
    """Shares of K: as many as fill the machine, none shorter than `LEAST_BLOCKS` blocks, all but the last equal."""
    tiles = -(-n // config.block_n) * -(-max(1, tokens) // config.block_m) * groups
    blocks = k // 128
    wanted = max(1, min(blocks // LEAST_BLOCKS, config.waves * multiprocessors // tiles))
    return -(-blocks // -(-blocks // wanted))


def quantised_tokens(arch: Arch, n: int, k: int, groups: int, multiprocessors: int) -> int:
    """Return the most tokens whose results a product should quantise: none where tiles of `QUANTISED_N` rows are too
    few for the machine, since they take longer than a launch then.
    """
    config = select(arch, 1, n * groups, k, quantised=True)
    programs = -(-n // QUANTISED_N) * groups * split_count(config, 1, n, k, groups, multiprocessors)
    return QUANTISED_TOKENS if n % QUANTISED_N == 0 and programs >= multiprocessors else 0


SIGNATURE = {
    "a_ptr": "*fp8e4nv",
    "a_scale_ptr": "*u8",
    "w_ptr": "*fp8e4nv",
    "w_scale_ptr": "*u8",
    "out_ptr": "*bf16",
    "part_ptr": "*fp32",
    "count_ptr": "*i32",
    "code_ptr": "*fp8e4nv",
    "scale_ptr": "*u8",
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
                for split, quant in ((True, False), (False, False), (True, True)) if small else ((False, False),):
                    n, k = (1536, 4096) if split else (32768, 1024)
                    c = replace(row.config, block_n=QUANTISED_N) if quant else row.config
                    # At 8 columns Triton 3.6 widens to fp16 on sm_90 and 3.8 takes wgmma; memory hides either.
                    hopper = ("wgmma-fp8",) if c.block_m > 8 else ("wgmma-fp8", "f16")
                    mma = ("mx",) if mx else hopper if arch is Arch.SM_90 else ("f16", "fp8")
                    record = StaticKernel(
                        operation="fp8_gemm",
                        kernel="dsv4_kernels.fp8_gemm.kernel:fp8_gemm_kernel",
                        label=f"{c.label}-{'mx' if mx else 'dot'}{'-split' if split else ''}{'-o8' if quant else ''}",
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
                            "QUANT": quant,
                        },
                        num_warps=c.num_warps,
                        num_stages=c.num_stages,
                        expect=Expect(mma=mma, cp_async=8, shared=arch.spec.shared_bytes),
                        since=since,
                        before=before,
                    )
                    records.setdefault(record.key, record)
    for hopper_row in hopper_table().rows:
        record = _hopper_record(hopper_row.config)
        records[record.key] = record
    return tuple(records.values())


def _hopper_record(config: HopperConfig) -> StaticKernel:
    def tile(dtype: str, bits: int, rows: int) -> str:
        layout = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, rank=2)"
        return f"tensordesc<{dtype}[{rows}, 128],{layout}>"

    return StaticKernel(
        operation="fp8_gemm",
        kernel="dsv4_kernels.fp8_gemm.hopper:fp8_gemm_hopper_kernel",
        label=config.label,
        arch=Arch.SM_90,
        signature={
            "a_desc": tile("fp8e4nv", 8, 64),
            "a_scale_ptr": "*u8",
            "w_desc": tile("fp8e4nv", 8, HOPPER_N),
            "w_scale_ptr": "*u8",
            "out_desc": tile("bf16", 16, 64),
            **dict.fromkeys(("tokens", "n", "blocks", "groups"), "i32"),
        },
        constexprs={"WARPGROUPS": config.warpgroups, "GROUP": GROUP, "STAGES": config.num_stages},
        num_warps=4,
        num_stages=config.num_stages,
        # One copy of weights and one of tokens for each warpgroup.
        expect=Expect(mma=("wgmma-fp8",), cp_async=1 + config.warpgroups, shared=Arch.SM_90.spec.shared_bytes),
    )
