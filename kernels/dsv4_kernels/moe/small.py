"""Small batches of W4A16 with the columns kernels (sm_90): the buffers and the three launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from dsv4_kernels.launch import Launcher
from dsv4_kernels.moe.columns import moe_columns_down_kernel, moe_columns_up_kernel, moe_planes_kernel
from dsv4_kernels.moe.configs import ColumnsConfig
from dsv4_kernels.moe.reference import LIMIT
from dsv4_kernels.plan import counters

_moe_columns_down = Launcher(moe_columns_down_kernel)
_moe_columns_up = Launcher(moe_columns_up_kernel)
_moe_planes = Launcher(moe_planes_kernel)


class MoeRun(NamedTuple):
    """What the launches of a run read and write; tensors as in the package's contract, `ready` as in `MoePlan.run`."""

    out: torch.Tensor
    addend: torch.Tensor | None
    ready: Callable[[], None]
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def copies_of(tokens: int) -> int:
    """Return how often x is kept for a batch: about sixteen rows in all. One row, read by 384 programs at once, takes a
    third longer; more than sixteen change nothing (H200)."""
    return max(1, 16 // tokens)


class Columns:
    """Buffers for the batch sizes that `configs` names (tokens to configuration), and how they are run."""

    def __init__(
        self, configs: Mapping[int, ColumnsConfig], shape: Mapping[str, int], ptx: bool, device: torch.device
    ) -> None:
        self.configs, self.shape, self.ptx = configs, shape, ptx
        tokens = max(configs, default=0)
        pairs, hidden, inter = tokens * shape["topk"], shape["hidden"], shape["inter"]

        def empty(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((rows, 2, width), dtype=dtype, device=device)

        copies = max((t * copies_of(t) for t in configs), default=0)
        self.x = empty(copies, hidden, torch.float8_e4m3fn)
        self.x_factor = empty(copies, hidden // 32, torch.float32)
        self.h = empty(pairs, inter, torch.float8_e4m3fn)
        self.h_factor = empty(pairs, inter // 32, torch.float32)
        shares = max((t * c.down_shares for t, c in configs.items() if c.down_shares > 1), default=0)
        self.part = torch.empty((shares * hidden,), dtype=torch.float32, device=device)
        self.count = counters(tokens * hidden // 64, device)

    def run(self, run: MoeRun) -> None:
        """Launch."""
        out, addend, ready, x, ids, weights, w13, w13_scale, w2, w2_scale = run
        tokens = x.shape[0]
        c = self.configs[tokens]
        hidden, inter, experts, topk = (self.shape[n] for n in ("hidden", "inter", "experts", "topk"))
        block, copies = min(1024, hidden & -hidden), copies_of(tokens)
        _moe_planes[(tokens, hidden // block, copies)](
            x_ptr=x, planes_ptr=self.x, factor_ptr=self.x_factor, HIDDEN=hidden, BLOCK=block, PTX=self.ptx,
        )  # fmt: skip
        _moe_columns_up[(tokens * topk, inter // c.up_n)](
            x_ptr=self.x, x_factor_ptr=self.x_factor, ids_ptr=ids, weight_ptr=weights, w_ptr=w13,
            w_scale_ptr=w13_scale, h_ptr=self.h, h_factor_ptr=self.h_factor, copies=copies, EXPERTS=experts, TOPK=topk,
            HIDDEN=hidden, INTER=inter, LIMIT=LIMIT, BLOCK_N=c.up_n, BLOCK_K=c.up_k, STAGES=c.up_stages, PTX=self.ptx,
            num_warps=c.up_warps, num_stages=c.up_stages, launch_pdl=self.ptx and c.up_early,
        )  # fmt: skip
        # Where another stream is waited for, not launched early: no such pair has been captured in a graph yet.
        ready()
        _moe_columns_down[(tokens, -(-hidden // c.down_n), c.down_shares)](
            h_ptr=self.h, h_factor_ptr=self.h_factor, ids_ptr=ids, w_ptr=w2, w_scale_ptr=w2_scale, out_ptr=out,
            addend_ptr=addend, part_ptr=self.part, count_ptr=self.count, EXPERTS=experts, TOPK=topk, HIDDEN=hidden,
            INTER=inter, BLOCK_N=c.down_n, BLOCK_K=c.down_k, STAGES=c.down_stages, SHARES=c.down_shares, PTX=self.ptx,
            num_warps=c.down_warps, num_stages=c.down_stages, launch_pdl=self.ptx and addend is None,
        )  # fmt: skip
