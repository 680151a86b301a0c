"""The projections as an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.compressor.configs import state_block
from dsv4_kernels.launch import Launcher
from dsv4_kernels.numerics import seeded
from dsv4_kernels.plan import SUPPORTED, Plan, Support, check_tensor, require_thawed
from dsv4_kernels.projections.configs import MOST_TOKENS, select
from dsv4_kernels.projections.kernel import projections_kernel
from dsv4_kernels.projections.reference import projections
from dsv4_kernels.registry import Operation, Tolerance, case

_projections = Launcher(projections_kernel)


class ProjectionPlan(Plan):
    """Projections of up to `tokens` tokens; `width` is W, `index_width` that of the indexer's compressor, 0 without.

    Blocks of the state caches lie `state_stride` and `index_stride` floats apart.
    """

    operation = "projections"

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        hidden: int,
        ratio: int,
        width: int,
        index_width: int = 0,
        heads: int = 0,
        state_stride: int | None = None,
        index_stride: int | None = None,
        arch: Arch | None = None,
    ) -> None:
        require_thawed(self.operation)
        self.arch = arch or detect(device) or DEFAULT_ARCH
        self.shape = {
            "tokens": tokens, "hidden": hidden, "ratio": ratio, "width": width, "index_width": index_width,
            "heads": heads,
        }  # fmt: skip
        support = is_supported(self.shape, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.tokens, self.hidden, self.ratio, self.device = tokens, hidden, ratio, device
        self.width, self.index_width, self.n_heads, self.block = width, index_width, heads, state_block(ratio)
        self.state_stride = state_stride or self.block * 2 * width
        self.index_stride = index_stride or self.block * 2 * index_width
        if self.state_stride % 4 or self.index_stride % 4:
            raise ValueError("projections: blocks of states must start at multiples of 16 bytes")
        self.heads = torch.empty((tokens, heads), dtype=torch.bfloat16, device=device)

    def run(
        self,
        *,
        x: torch.Tensor,
        positions: torch.Tensor,
        weight: torch.Tensor,
        ape: torch.Tensor,
        state_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        index_weight: torch.Tensor | None = None,
        index_ape: torch.Tensor | None = None,
        index_state_cache: torch.Tensor | None = None,
        index_slot_mapping: torch.Tensor | None = None,
        head_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Write into the state caches; return (state_cache,) or (state_cache, index_state_cache, heads)."""
        tokens, saved = int(x.shape[0]), int(slot_mapping.shape[0])
        check_tensor("x", x, torch.bfloat16, (None, self.hidden))
        if tokens > self.tokens or saved > tokens:
            raise ValueError(f"x has {tokens} tokens and {saved} slots, the plan holds {self.tokens} of each")
        _check_row("positions", positions, saved)
        self._check("", self.width, self.state_stride, weight, ape, state_cache, slot_mapping, saved)
        index = (index_weight, index_ape, index_state_cache, index_slot_mapping)
        if self.index_width:
            self._check("index_", self.index_width, self.index_stride, *index, saved)
            if head_weight is None:
                raise ValueError("head_weight is missing, the plan was made with an indexer")
            check_tensor("head_weight", head_weight, torch.bfloat16, (self.n_heads, self.hidden))
        else:
            # Never read: no program has columns of them.
            index, head_weight = (weight, ape, state_cache, slot_mapping), weight
        heads = self.heads[:tokens]
        if tokens:
            c = select(self.arch, tokens)
            columns = 2 * (self.width + self.index_width) + self.n_heads
            _projections[(-(-columns // c.block_n),)](
                x_ptr=x, position_ptr=positions, weight_ptr=weight, ape_ptr=ape, state_ptr=state_cache,
                slot_ptr=slot_mapping, index_weight_ptr=index[0], index_ape_ptr=index[1], index_state_ptr=index[2],
                index_slot_ptr=index[3], head_weight_ptr=head_weight, head_ptr=heads, tokens=tokens, saved=saved,
                H=self.hidden, W=self.width, INDEX_W=self.index_width, HEADS=self.n_heads, RATIO=self.ratio,
                BLOCK=self.block, STATE_STRIDE=self.state_stride, INDEX_STRIDE=self.index_stride,
                BT=c.block_t, BN=c.block_n, BK=c.block_k,
                num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip
        return (state_cache, index_state_cache, heads) if index_state_cache is not None else (state_cache,)

    def _check(
        self,
        which: str,
        width: int,
        stride: int,
        weight: torch.Tensor | None,
        ape: torch.Tensor | None,
        state_cache: torch.Tensor | None,
        slot_mapping: torch.Tensor | None,
        saved: int,
    ) -> None:
        """Raise ValueError unless the four tensors of a compressor, `which` before their names, are as planned."""
        if weight is None or ape is None or state_cache is None or slot_mapping is None:
            raise ValueError(f"{which}weight, ape, state_cache or slot_mapping is missing, the plan has an indexer")
        check_tensor(f"{which}weight", weight, torch.bfloat16, (2 * width, self.hidden))
        check_tensor(f"{which}ape", ape, torch.float32, (self.ratio, width))
        _check_row(f"{which}slot_mapping", slot_mapping, saved)
        rows = (self.block, 2 * width)
        if state_cache.dtype != torch.float32 or tuple(state_cache.shape[1:]) != rows:
            raise ValueError(f"{which}state_cache must be float32 [blocks, {rows[0]}, {rows[1]}]")
        apart = state_cache.stride(0) == stride or state_cache.shape[0] == 1
        if state_cache.stride()[1:] != (rows[1], 1) or not apart or state_cache.data_ptr() % 16:
            raise ValueError(
                f"{which}state_cache has strides {state_cache.stride()}, needs ({stride}, {rows[1]}, 1) and 16 bytes"
            )

    def warmup(self) -> None:
        """Run every configuration that a token count up to the planned one selects; no slot is written."""
        seen = set()
        for tokens in range(1, self.tokens + 1):
            if (config := select(self.arch, tokens)) not in seen:
                seen.add(config)
                strides = {"state_stride": self.state_stride, "index_stride": self.index_stride}
                inputs = _inputs({**self.shape, **strides, "tokens": tokens}, self.device, 0)
                for name in inputs.keys() & {"slot_mapping", "index_slot_mapping"}:
                    inputs[name].fill_(-1)
                self.run(**inputs)


def _check_row(name: str, tensor: torch.Tensor, least: int) -> None:
    """Raise ValueError unless `tensor` is contiguous int64 of `least` tokens or more; it may start anywhere."""
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape[0] < least or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, needs contiguous int64 of {least} tokens")


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Accept few tokens, rows that start at multiples of 16 bytes, and widths that programs of 32 columns divide."""
    if params["tokens"] > MOST_TOKENS:
        return Support(f"projections: {params['tokens']} tokens, needs {MOST_TOKENS} or fewer")
    if params["ratio"] not in (4, 128):
        return Support(f"projections: ratio is {params['ratio']}, needs 4 or 128")
    if params["hidden"] % 8:
        return Support(f"projections: hidden is {params['hidden']}, needs a multiple of 8")
    index, heads = params.get("index_width", 0), params.get("heads", 0)
    if not params["width"] or params["width"] % 32 or index % 32 or bool(index) != bool(heads):
        return Support(
            f"projections: widths are {params['width']} and {index} with {heads} heads, need multiples of 32, and "
            "heads with the second alone"
        )
    return SUPPORTED


def _states(params: Mapping[str, Any], width: int, stride: int | None, device: torch.device, seed: int) -> torch.Tensor:
    block = state_block(params["ratio"])
    blocks, size = 2 * params["tokens"] + 1, block * 2 * width
    flat = torch.randn((blocks, stride or size), generator=seeded(device, seed), device=device)
    return flat[:, :size].unflatten(1, (block, 2 * width))


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Draw tokens anywhere in their windows; of more than two, one is padding and the last has no slot."""
    draw = seeded(device, seed)
    tokens, hidden, ratio = params["tokens"], params["hidden"], params["ratio"]
    saved = tokens - 1 if tokens > 2 else tokens

    def matrix(rows: int) -> torch.Tensor:
        return (torch.randn((rows, hidden), generator=draw, device=device) * hidden**-0.5).bfloat16()

    def compressor(name: str, width: int, stride: int | None, seed: int) -> dict[str, torch.Tensor]:
        state = _states(params, width, stride, device, seed)
        slots = torch.randperm(state.shape[0] * state.shape[1], generator=torch.Generator().manual_seed(seed))[:saved]
        if tokens > 2:
            slots[1] = -1
        return {
            f"{name}weight": matrix(2 * width),
            f"{name}ape": torch.randn((ratio, width), generator=draw, device=device),
            f"{name}state_cache": state,
            f"{name}slot_mapping": slots.to(device),
        }

    inputs = {
        "x": torch.randn((tokens, hidden), generator=draw, device=device).bfloat16(),
        "positions": torch.randint(0, 3 * ratio, (tokens,), generator=draw, device=device),
        **compressor("", params["width"], params.get("state_stride"), seed + 1),
    }
    if index := params.get("index_width", 0):
        inputs |= compressor("index_", index, params.get("index_stride"), seed + 2)
        inputs["head_weight"] = matrix(params["heads"])
    return inputs


def _nbytes(params: Mapping[str, Any]) -> int:
    widths = 2 * (int(params["width"]) + int(params.get("index_width", 0)))
    heads, tokens, hidden = int(params.get("heads", 0)), int(params["tokens"]), int(params["hidden"])
    return 2 * hidden * (tokens + widths + heads) + tokens * (4 * widths + 2 * widths + 2 * heads)


def _three(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return three outputs, empty ones in the place of those that are not there."""
    nothing = outputs[0].new_empty((0,))
    return (*outputs, nothing, nothing)[:3]


# A sum in another order; near zero the terms' rounding is more than the sum's.
_SUM = Tolerance(absolute=1e-4, relative=1e-4, rms=1e-5)
_C4 = {"ratio": 4, "width": 1024, "index_width": 256, "heads": 64}
_C128 = {"ratio": 128, "width": 512}
_SMALL = {"hidden": 200, "ratio": 4, "width": 64, "index_width": 32, "heads": 24}
OPERATIONS = (
    Operation(
        name="projections",
        summary="projections of few tokens for compressors and indexer, saved as states",
        folder="projections",
        outputs=("state", "index_state", "heads"),
        cases=(
            case("empty", "cpu gpu", tokens=0, **_SMALL),
            case("t1", "cpu gpu", tokens=1, **_SMALL),
            case("small", "cpu gpu", tokens=5, **_SMALL),
            case("most", "cpu gpu", tokens=32, **_SMALL),
            case("apart", "cpu gpu", tokens=19, **{**_SMALL, "state_stride": 4096, "index_stride": 2052}),
            case("plain", "cpu gpu", tokens=3, hidden=136, ratio=128, width=96),
            case("c4-t1", "gpu bench", tokens=1, hidden=4096, **_C4),
            case("c4-t32", "gpu bench", tokens=32, hidden=4096, **_C4),
            case("c128-t1", "gpu bench", tokens=1, hidden=4096, **_C128),
            case("c128-t32", "gpu bench", tokens=32, hidden=4096, **_C128),
            case("pro-c4-t1", "gpu bench", tokens=1, hidden=7168, **_C4),
        ),
        make_inputs=_inputs,
        reference=projections,
        plan=lambda p, device, arch: ProjectionPlan(device, **p, arch=arch),
        is_supported=is_supported,
        nbytes=_nbytes,
        flops=lambda p: (
            2 * p["tokens"] * p["hidden"] * (2 * (p["width"] + p.get("index_width", 0)) + p.get("heads", 0))
        ),
        tolerance=(_SUM, _SUM, Tolerance(absolute=1e-4, relative=2.0**-8)),
        mutates=("state_cache", "index_state_cache"),
        compared=_three,
    ),
)
