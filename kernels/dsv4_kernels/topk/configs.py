"""Configurations of the selection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel

# 32 warps with 16 keys per thread. A thread of 32 warps has 64 registers, and up to 56 bytes around the scan do not fit
# them (16 with 16 warps, where Triton 3.8 stops at 64 too); chunks of half the size need a third launch for 262144
# scores. The limit keeps it from growing.
LARGEST = 16384
SPILL = 64
LEAST = 1024


@dataclass(frozen=True)
class Level:
    """One launch: every row of `width` scores or candidates in `parts` chunks."""

    width: int
    chunk: int
    parts: int

    @property
    def num_warps(self) -> int:
        """Sixteen keys per thread."""
        return max(4, self.chunk // 512)


def levels(width: int, k: int) -> tuple[Level, ...]:
    """The launches for rows of `width` scores; the last has one part."""
    found: list[Level] = []
    while True:
        chunk = min(max(LEAST, 1 << max(0, width - 1).bit_length()), LARGEST)
        found.append(Level(width, chunk, max(1, -(-width // chunk))))
        if found[-1].parts == 1:
            return tuple(found)
        width = found[-1].parts * k


FEW_ROWS = 8
"""Up to so many rows of more than `FEW_WIDTH` scores all multiprocessors first look for a bound: see `few`."""
FEW_WIDTH = 8192
MOST_FEW = 1024
"""The greatest k for which what reaches the bound, about 2k, fits `ROOM`."""
PARTS = 128
SPAN = 4
ROOM = 4096


@dataclass(frozen=True)
class Few:
    """Three launches: a bound below the k-th largest, its candidates, the choice among them."""

    chunk: int
    """Scores of a part."""
    each: int
    """Scores that a part has above its bound; half of the parts have k of them together."""

    @property
    def num_warps(self) -> int:
        """Sixteen keys per thread."""
        return min(max(1, self.chunk // 512), 8)


CHOOSE_WARPS = 8


def few(rows: int, width: int, k: int) -> Few | None:
    """The launches for a few long rows; None where `levels` serves."""
    if rows > FEW_ROWS or width <= FEW_WIDTH or k > MOST_FEW:
        return None
    return Few(1 << (-(-width // PARTS) - 1).bit_length(), -(-k // (PARTS // 2)))


_SCORES = {"score_ptr": "*fp32", "length_ptr": "*i32"}
_FEW_SIGNATURES = {
    "bound": {**_SCORES, "bound_ptr": "*i32", "score_stride": "i32"},
    "gather": {**_SCORES, "bound_ptr": "*i32", "count_ptr": "*i32", "found_ptr": "*i32", "score_stride": "i32"},
    "choose": {
        **_SCORES,
        **dict.fromkeys(("count_ptr", "found_ptr", "end_ptr", "flat_key_ptr", "flat_ptr", "out_ptr"), "*i32"),
        "score_stride": "i32",
        "out_stride": "i32",
    },
}


def constexprs(which: str, config: Few, k: int, *, early: bool) -> dict[str, object]:
    """Return the compile-time arguments of one of the three launches, in the kernel's order."""
    chunk = config.chunk
    own: dict[str, dict[str, object]] = {
        "bound": {"EACH": config.each, "CHUNK": chunk, "SPAN": SPAN},
        "gather": {"PARTS": PARTS, "CHUNK": chunk},
        "choose": {"KP": 1 << (k - 1).bit_length(), "HALVINGS": PARTS.bit_length() - 1, "CHUNK": chunk, "ROOM": ROOM},
    }
    return {"K": k, **own[which], "EARLY": early}


def _few_kernels(arch: Arch) -> Iterator[StaticKernel]:
    for width, k in ((16384, 512), (32768, 512), (262144, 512), (262144, 1024)):
        config = few(1, width, k)
        if config is None:
            continue
        for which, signature in _FEW_SIGNATURES.items():
            yield StaticKernel(
                operation="topk",
                kernel=f"dsv4_kernels.topk.kernel:topk_{which}_kernel",
                label=f"k{k}-c{config.chunk}",
                arch=arch,
                signature=signature,
                constexprs=constexprs(which, config, k, early=True),
                num_warps=CHOOSE_WARPS if which == "choose" else config.num_warps,
                num_stages=1,
            )


SIGNATURE = {
    "score_ptr": "*fp32",
    "column_ptr": "*i32",
    "length_ptr": "*i32",
    "out_key_ptr": "*i32",
    "out_ptr": "*i32",
    "score_stride": "i32",
    "out_stride": "i32",
    "width": "i32",
}


def static_kernels() -> tuple[StaticKernel, ...]:
    """Rows of 2048 to 262144 scores, for both models' k."""
    records: dict[str, StaticKernel] = {}
    for arch in Arch:
        for width, k in ((2048, 512), (16384, 512), (262144, 512), (262144, 1024), (262144, 2048)):
            chain = levels(width, k)
            for index, level in enumerate(chain):
                first, last = index == 0, index == len(chain) - 1
                place = "only" if first and last else "first" if first else "last" if last else "middle"
                record = StaticKernel(
                    operation="topk",
                    kernel="dsv4_kernels.topk.kernel:topk_kernel",
                    label=f"k{k}-c{level.chunk}-{place}",
                    arch=arch,
                    signature={**SIGNATURE, "score_ptr": "*fp32" if first else "*i32"},
                    constexprs={
                        "K": k,
                        "KP": k,
                        "CHUNK": level.chunk,
                        "FIRST": first,
                        "LAST": last,
                        "EARLY": len(chain) > 1,
                    },
                    num_warps=level.num_warps,
                    num_stages=1,
                    expect=Expect(spill=SPILL if level.num_warps >= 16 else 0),
                )
                records[record.key] = record
        records.update((record.key, record) for record in _few_kernels(arch))
    return tuple(records.values())
