"""Torch references, configurations, plan and registry row of the router."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_kernels.arch import Arch, multiprocessors
from dsv4_kernels.interpreter import interpreting
from dsv4_kernels.numerics import seeded
from dsv4_kernels.plan import BF16, F32, I32, I64, SUPPORTED, Input, Launcher, Plan, Size, Support, next_power_of_2
from dsv4_kernels.registry import Operation, Tolerance, case
from dsv4_kernels.router.kernel import router_product_kernel, router_select_kernel

SMALLEST = 2.0**-149
"""The smallest float32: a softplus below it is 0."""


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    scaling: float,
    k: int,
    bias: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights float32 [T, k], ids int32 [T, k]); exact: weights float64, of scores that underflow as float32
    does.
    """
    soft = torch.nn.functional.softplus(x.double() @ weight.double().t())
    score = soft.masked_fill(soft < SMALLEST, 0.0).sqrt()
    if tid2eid is not None and input_ids is not None:
        ids = tid2eid[input_ids.long()].long()
    elif bias is not None:
        ids = torch.sort(score + bias.double(), dim=1, descending=True, stable=True).indices[:, :k]
    else:
        raise ValueError("router needs bias, or tid2eid and input_ids")
    chosen = score.gather(1, ids)
    total = chosen.sum(1, keepdim=True)
    weights = chosen / torch.where(total > 0.0, total, 1.0) * scaling
    if padding is not None:
        weights, ids = weights.masked_fill(padding[:, None], 0.0), ids.masked_fill(padding[:, None], -1)
    return weights if exact else weights.float(), ids.int()


@dataclass(frozen=True)
class RouterConfig:
    """One program: `block_t` tokens × `block_e` experts over `span` columns, `block_k` at a time."""

    block_t: int
    block_e: int
    block_k: int
    span: int
    num_warps: int
    num_stages: int


MAX_SPLITS = 16


def select(arch: Arch, tokens: int, experts: int, hidden: int, multiprocessors: int) -> RouterConfig:
    """Few tokens are spread over the columns until every multiprocessor has a program."""
    block_t, block_e, block_k = (16, 32, 128) if tokens <= 64 else (64, 64, 64)
    tiles = -(-tokens // block_t) * -(-experts // block_e)
    wanted = max(1, min(multiprocessors // tiles, MAX_SPLITS))
    # Spans that double from one block on: few different kernels.
    span = block_k
    while -(-hidden // span) > wanted:
        span *= 2
    return RouterConfig(block_t, block_e, block_k, span, 4, 4)


_router_product = Launcher(router_product_kernel)
_router_select = Launcher(router_select_kernel)


class RouterPlan(Plan):
    """Routing of up to `tokens` tokens of `hidden` values to k of `experts`; results are views."""

    def __init__(
        self, tokens: int, hidden: int, experts: int, k: int, device: torch.device, arch: Arch | None = None
    ) -> None:
        shape = {"tokens": tokens, "hidden": hidden, "experts": experts, "k": k}
        super().__init__("router", shape, device, arch, is_supported)
        self.tokens, self.hidden, self.experts, self.k = tokens, hidden, experts, k
        self.inputs = self.declare(
            x=Input(BF16, (Size("tokens", most=tokens), hidden)),
            weight=Input(BF16, (experts, hidden)),
            bias=Input(F32, (experts,), optional=True),
            tid2eid=Input(I32, (None, k), optional=True),
            input_ids=Input((I32, I64), ("tokens",), aligned=False, optional=True),
            padding=Input(torch.bool, ("tokens",), aligned=False, optional=True),
        )
        self.early = not interpreting()
        self.multiprocessors = multiprocessors(device, self.arch)
        rows = max((t * self._splits(self._config(t)) for t in range(1, tokens + 1)), default=0)
        self.part = torch.empty((rows * experts,), dtype=torch.float32, device=device)
        self.weights = torch.empty((tokens, k), dtype=torch.float32, device=device)
        self.ids = torch.empty((tokens, k), dtype=torch.int32, device=device)

    def _config(self, tokens: int) -> RouterConfig:
        return select(self.arch, tokens, self.experts, self.hidden, self.multiprocessors)

    def _splits(self, config: RouterConfig) -> int:
        return -(-self.hidden // config.span)

    def run(
        self,
        *,
        x: torch.Tensor,
        weight: torch.Tensor,
        scaling: float,
        k: int,
        bias: torch.Tensor | None = None,
        tid2eid: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weights float32 [T, k], ids int32 [T, k])."""
        tokens = int(x.shape[0])
        if k != self.k:
            raise ValueError(f"router: k is {k}, the plan was made for {self.k}")
        hashed = tid2eid is not None and input_ids is not None
        if hashed == (bias is not None):
            raise ValueError("router needs either bias, or tid2eid and input_ids")
        self.inputs.check(x=x, weight=weight, bias=bias, tid2eid=tid2eid, input_ids=input_ids, padding=padding)
        weights, ids = self.weights[:tokens], self.ids[:tokens]
        if tokens:
            c = self._config(tokens)
            splits = self._splits(c)
            _router_product[(-(-tokens // c.block_t), -(-self.experts // c.block_e), splits)](
                x_ptr=x, weight_ptr=weight, part_ptr=self.part, tokens=tokens, E=self.experts, H=self.hidden,
                SPAN=c.span, BT=c.block_t, BE=c.block_e, BK=c.block_k, EARLY=self.early,
                num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip
            _router_select[(tokens,)](
                part_ptr=self.part, bias_ptr=weights if bias is None else bias,
                table_ptr=ids if tid2eid is None else tid2eid, input_ptr=ids if input_ids is None else input_ids,
                padding_ptr=ids if padding is None else padding, out_weight_ptr=weights, out_id_ptr=ids,
                tokens=tokens, splits=splits, scaling=scaling, E=self.experts,
                EP=next_power_of_2(self.experts), K=k, HASH=hashed, PADDED=padding is not None,
                EARLY=self.early,
                num_warps=1, num_stages=1, launch_pdl=self.early,
            )  # fmt: skip
        return weights, ids

    def warmup(self) -> None:
        """Every configuration that a token count up to the planned one selects, learned and hashed.

        The selection is the same for every count: with padding or not, and for identifiers of either width.
        """
        for tokens in self.first_of_each(self.tokens, self._config):
            self.run(**_inputs({**self.shape, "tokens": tokens}, self.device, 0))
        if not self.tokens:
            return
        padding = torch.zeros((1,), dtype=torch.bool, device=self.device)
        for hashed, flags in itertools.product((False, True), (None, padding)):
            inputs = _inputs({**self.shape, "tokens": 1, "hashed": hashed}, self.device, 0)
            self.run(**inputs, padding=flags)
            if hashed:
                self.run(**{**inputs, "input_ids": inputs["input_ids"].int()}, padding=flags)


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any tokens; up to 1024 experts and 8 of them per token; rows that start at multiples of 16 bytes."""
    if not 0 < params["k"] <= min(8, params["experts"]) or params["experts"] > 1024:
        return Support(f"router: {params['k']} of {params['experts']} experts, needs up to 8 of up to 1024")
    if params["hidden"] % 8:
        return Support(f"router: hidden is {params['hidden']}, needs a multiple of 8")
    return SUPPORTED


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    draw = seeded(device, seed)
    tokens, hidden, experts, k = (params[name] for name in ("tokens", "hidden", "experts", "k"))
    inputs: dict[str, Any] = {
        "x": torch.randn((tokens, hidden), generator=draw, device=device).bfloat16(),
        "weight": (3 * torch.randn((experts, hidden), generator=draw, device=device) * hidden**-0.5).bfloat16(),
        "scaling": 1.5,
        "k": k,
    }
    if params.get("padded"):
        inputs["padding"] = torch.arange(tokens, device=device) % 3 == 2
    if params.get("hashed"):
        order = torch.rand((50, experts), generator=draw, device=device).argsort(1)
        return {
            **inputs,
            "tid2eid": order[:, :k].int().contiguous(),
            "input_ids": torch.randint(0, 50, (tokens,), generator=draw, device=device),
        }
    return {**inputs, "bias": torch.randn((experts,), generator=draw, device=device) / 4}


def _by_expert(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Weights and ids in the order of ids: two experts with almost equal sums may stand in either order."""
    weights, ids = outputs
    ids, order = ids.sort(1)
    return weights.gather(1, order), ids


_FLASH = {"hidden": 4096, "experts": 256, "k": 6}
# An expert whose sum is within float32's error of the sixth's may be taken in its place.
OPERATIONS = (
    Operation(
        name="router",
        summary="the router's product, scores and selection, learned or hashed",
        folder="router",
        outputs=("weights", "ids"),
        cases=(
            case("empty", "cpu gpu", tokens=0, hidden=64, experts=8, k=2),
            case("small", "cpu gpu", tokens=5, hidden=200, experts=24, k=6),
            case("hashed", "cpu gpu", tokens=3, hidden=136, experts=40, k=6, hashed=True),
            case("padded", "cpu gpu", tokens=4, hidden=64, experts=24, k=6, padded=True),
            case("padded-hashed", "cpu gpu", tokens=4, hidden=64, experts=24, k=6, padded=True, hashed=True),
            case("many", "cpu gpu", tokens=70, hidden=72, experts=16, k=4),
            case("flash-t1", "gpu bench", tokens=1, **_FLASH),
            case("flash-t32", "gpu bench", tokens=32, **_FLASH),
            case("flash-t4096", "gpu bench", tokens=4096, **_FLASH),
            case("pro-t1", "gpu bench", tokens=1, hidden=7168, experts=384, k=6),
            case("flash-hashed-t1", "gpu bench", tokens=1, hashed=True, **_FLASH),
        ),
        make_inputs=_inputs,
        reference=router,
        plan=lambda p, device, arch: RouterPlan(p["tokens"], p["hidden"], p["experts"], p["k"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: 2 * p["hidden"] * (p["tokens"] + p["experts"]) + 8 * p["tokens"] * p["k"],
        flops=lambda p: 2 * p["tokens"] * p["hidden"] * p["experts"],
        tolerance=(Tolerance(absolute=1e-5, mismatch=2e-3), Tolerance(bitwise=True, mismatch=1e-3)),
        compared=_by_expert,
    ),
)
