"""vLLM's FP8 linear layers (weights in blocks of 128 x 128), computed by `dsv4_kernels.fp8` where it is faster."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.fp8.api import GemmPlan, QuantPlan, hopper_from, is_supported, places
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.choice import choice
from dsv4_runtime.vllm_plugin.kernels.hooks import Assignment, check_overrides
from dsv4_runtime.vllm_plugin.kernels.plans import DEVICE, announce, given_codes, shared_plan, want_codes
from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
    Fp8BlockScaledMMLinearKernel,
    PlatformEnum,
    current_platform,
    get_current_vllm_config,
    replace_parameter,
)
from dsv4_runtime.vllm_plugin.kernels.vllm_api import linear_kernels as registry

SMALL = 32
"""Maximum tokens of a bundled product where only the kernels for few tokens are faster."""
SCALE = "dsv4_weight_scale"
"""Buffer of a layer: its block scales as UE8M0 bytes, uint8 [⌈N/128⌉, K/128], as in the checkpoint."""
OVERRIDDEN = (
    "is_supported",
    "can_implement",
    "process_weights_after_loading",
    "apply_weights",
    "apply_block_scaled_mm",
)
"""Replaced methods of vLLM's FP8 kernels."""
_LAYER = re.compile(r"\blayers\.\d+\.")


def ue8m0_bytes(scale: torch.Tensor) -> torch.Tensor | None:
    """Return block scales as UE8M0 bytes; None if they are not powers of two (checkpoints with float32 scales)."""
    if scale.dtype == torch.uint8:
        return scale.clone()
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8).clone()
    bits = scale.float().contiguous().view(torch.int32)
    return None if bool((bits & 0x7FFFFF).any()) else (bits >> 23).to(torch.uint8)


def keep_scale(layer: torch.nn.Module, scale: torch.Tensor) -> None:
    """Store `scale`, uint8 [⌈N/128⌉, K/128], as a persistent buffer of `layer`.

    Only for parameters and persistent buffers vLLM restores the values after sleep, and copies the values of reloaded
    weights into the tensors that CUDA graphs read.
    """
    held = layer._buffers.get(SCALE)
    if held is not None and held.shape == scale.shape and held.device == scale.device:
        held.copy_(scale)
    else:
        layer.register_buffer(SCALE, scale, persistent=True)


def keep_wo_a_scale(layer: torch.nn.Module) -> None:
    """Store the scales of `layer`, a wo_a, as bytes before vLLM's kernel packs them.

    Raises:
        ValueError: the scales are not powers of two.
    """
    if not getattr(layer, "is_bmm", False) or hasattr(layer, SCALE):
        return
    scale = ue8m0_bytes(layer.weight_scale_inv.data)
    if scale is None:
        name = getattr(layer, "prefix", "wo_a")
        raise ValueError(f"{name}: its block scales are no powers of two; set DSV4_KERNELS=o_proj=stock")
    keep_scale(layer, scale)


def keeping_wo_a_scale(original: Callable[..., None]) -> Callable[..., None]:
    """Return vLLM's `Fp8LinearMethod.process_weights_after_loading`, which keeps the scales of wo_a before."""

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        # Other layers get no attribute besides their parameters: models are shared between processes by names.
        if getattr(layer, "is_bmm", False) and choice().bundled(Op.O_PROJ):
            keep_wo_a_scale(layer)
        original(self, layer)

    return process_weights_after_loading


def weight_bytes(weight: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 codes of `weight`, a parameter of vLLM, as uint8.

    Do not store the result: vLLM may move the parameter. Views of vLLM's parameter class would otherwise be dispatched
    in Python.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return weight.view(torch.uint8)


def _others(bundled: type) -> list[type]:
    """Return vLLM's own kernels of FP8 products, best first."""
    return [kernel for kernel in registry._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA] if kernel is not bundled]


def _pick(config: Any, kernels: list[type]) -> Any:
    """Return the first of `kernels` that vLLM accepts; ValueError if there is none."""
    return registry.choose_scaled_mm_linear_kernel(config, {PlatformEnum.CUDA: kernels}, quantization="fp8_block_w8a8")


def _stock(config: Any, bundled: type) -> Any:
    """Return vLLM's kernel for the other products: CUTLASS, which is precompiled, else vLLM's selection, or None."""
    kernels = _others(bundled)
    for possible in ([k for k in kernels if k.__name__ == "CutlassFp8BlockScaledMMKernel"], kernels):
        with contextlib.suppress(ValueError):
            found = _pick(config, possible)
            if issubclass(found, Fp8BlockScaledMMLinearKernel):
                return found
    return None


def _arch() -> Arch:
    return detect(torch.device("cuda")) or DEFAULT_ARCH


def preferred(module: ModuleType) -> list[Assignment]:
    """Return the assignment that prepends the bundled kernel to vLLM's list of kernels for CUDA."""
    check_overrides(BundledFp8BlockScaledMMKernel, Fp8BlockScaledMMLinearKernel, OVERRIDDEN)
    kernels = module._POSSIBLE_FP8_BLOCK_KERNELS
    return [(kernels, PlatformEnum.CUDA, [BundledFp8BlockScaledMMKernel, *kernels[PlatformEnum.CUDA]])]


class _Product(NamedTuple):
    """Plans of a layer's product. Each run reads the weight from the layer: vLLM may replace it."""

    quant: QuantPlan
    gemm: GemmPlan


class BundledFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 products: all with a kernel for many tokens (sm_90), else those of up to `SMALL` tokens.

    vLLM's kernel computes the others, if there is one.
    """

    apply_input_quant = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        whole = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        n, k = config.weight_shape
        stock = _stock(config, type(self))
        self.stock = None if stock is None else stock(config)
        all_here = self.stock is None or hopper_from(_arch(), n, k, 1) is not None
        self.tokens = whole if all_here else min(SMALL, whole)
        want_codes(k, self.tokens)
        announce(QuantPlan, self.tokens, k, DEVICE)
        announce(GemmPlan, self.tokens, n, k, None, DEVICE)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return whether the card has compute capability 9.0 or more."""
        if not current_platform.is_cuda() or not current_platform.has_device_capability(90):
            return False, "needs an NVIDIA card of compute capability 9.0 or more"
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return whether the layer's sizes and types are supported."""
        if not choice().bundled(Op.FP8_LINEAR):
            return False, "is not chosen for fp8_linear"
        able, reason = super().can_implement(config)
        if not able:
            return able, reason
        n, k = config.weight_shape
        support = is_supported({"n": n, "k": k}, _arch())
        if not support:
            return False, support.reason
        if config.out_dtype != torch.bfloat16:
            return False, f"its output is {config.out_dtype}, needs bfloat16"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Store the scales as bytes, then let vLLM's own kernel prepare the layer.

        vLLM calls this again for reloaded weights, with the CUDA graphs of the first load.

        Raises:
            ValueError: the scales are not powers of two, and there is no other kernel for the product.
        """
        if getattr(layer, "is_bmm", False):
            if choice().bundled(Op.O_PROJ):
                keep_wo_a_scale(layer)
            else:
                # vLLM's output projection reads it, so that the kernel selected by vLLM prepares it.
                _pick(self.config, _others(type(self)))(self.config).process_weights_after_loading(layer)
            return
        params = self._get_layer_params(layer)
        scale = ue8m0_bytes(params.block_scale.data)
        if self.stock is not None:
            self.stock.process_weights_after_loading(layer)
            prepared = getattr(layer, params.block_scale_attr)
            if prepared.dtype == torch.float8_e8m0fnu:
                # DeepGEMM repacks them; other kernels require float32.
                replace_parameter(layer, params.block_scale_attr, prepared.to(torch.float32))
        elif scale is None:
            raise ValueError(
                f"{layer.prefix}: its block scales are no powers of two, and vLLM has no FP8 kernel here; "
                "set DSV4_KERNELS=fp8_linear=stock"
            )
        first = not hasattr(layer, "dsv4_product")
        if scale is None and not first and layer.dsv4_product is not None:
            raise ValueError(
                f"{layer.prefix}: the block scales of the new weights are no powers of two, those that the engine was "
                "started with are; restart the engine"
            )
        if scale is not None and (first or layer.dsv4_product is not None):
            keep_scale(layer, scale)
        if first:
            layer.dsv4_product = None if scale is None else self._product(layer)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Return x [..., K] · weight [N, K] transposed, bf16 [..., N]."""
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        tokens, product = rows.shape[0], layer.dsv4_product
        if product is None or tokens > self.tokens:
            return self.stock.apply_weights(layer, x, bias, **kwargs)  # type: ignore[union-attr]
        code, code_scale = given_codes(x) or product.quant.run(x=rows.contiguous(), out=places(tokens, width, x.device))
        weight = weight_bytes(layer.weight)
        out = torch.empty((tokens, weight.shape[0]), dtype=torch.bfloat16, device=x.device)
        product.gemm.run(a=code, a_scale=code_scale, w=weight, w_scale=getattr(layer, SCALE), out=out)
        if bias is not None:
            out = out + bias
        return out.view(*x.shape[:-1], -1)

    def apply_block_scaled_mm(self, **_: torch.Tensor) -> torch.Tensor:
        """Raise: `apply_weights` computes the whole product."""
        raise TypeError("the bundled FP8 product quantises its input itself; call apply_weights")

    def _product(self, layer: torch.nn.Module) -> _Product:
        """Return the plans of the product of `layer`."""
        (n, k), device = layer.weight.shape, layer.weight.device
        quant = shared_plan((Op.FP8_LINEAR, k, self.tokens, device, "quant"), lambda: QuantPlan(self.tokens, k, device))
        # By role: layers with concurrent products on two streams have different roles.
        role = _LAYER.sub("", getattr(layer, "prefix", "") or str(id(layer)))
        gemm = shared_plan(
            (Op.FP8_LINEAR, role, n, k, self.tokens, device), lambda: GemmPlan(self.tokens, n, k, None, device)
        )
        return _Product(quant, gemm)
