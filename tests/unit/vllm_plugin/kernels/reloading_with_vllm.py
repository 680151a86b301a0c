"""Child process of `test_reloading.py`: vLLM's own reload of weights, over layers with bundled FP8 products.

Prints one JSON object.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import reload

from dsv4_kernels import interpreter
from dsv4_kernels.fp8.api import fp8_gemm, fp8_quant
from dsv4_kernels.mla_decode.reference import mla_merge_o8
from dsv4_kernels.registry import operation
from dsv4_runtime.contract.kernels import ALL_BUNDLED, VARIABLE
from dsv4_runtime.vllm_plugin.kernels import attention, linear

os.environ[VARIABLE] = str(ALL_BUNDLED)
interpreter.install()
TOKENS, N, K = 3, 128, 256
PARAMS = {"tokens": TOKENS, "n": N, "k": K}
X = torch.randn((TOKENS, K), generator=torch.Generator().manual_seed(0)).bfloat16()


def checkpoint(seed: int, odd: bool = False) -> dict[str, torch.Tensor]:
    """Return weight and scales in the format of a checkpoint; odd: scales that are no powers of two."""
    given = operation("fp8_gemm").make_inputs(PARAMS, torch.device("cpu"), seed)
    scale = torch.exp2(given["w_scale"].float() - 127)
    return {"weight": given["w"].view(torch.float8_e4m3fn), "weight_scale_inv": scale * (1.5 if odd else 1.0)}


class Stock:
    """vLLM's kernel as the replacement of another one: requires scales of float32, transposed."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed = layer.weight_scale_inv.data.t().contiguous()
        layer.weight_scale_inv = torch.nn.Parameter(packed, requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("vLLM's own product was asked for")


def kernel(stock: Any) -> linear.BundledFp8BlockScaledMMKernel:
    """Return the bundled kernel of a layer, with `stock` for its other products."""
    made = linear.BundledFp8BlockScaledMMKernel.__new__(linear.BundledFp8BlockScaledMMKernel)
    made.tokens, made.stock, made.config = TOKENS, stock, None
    made._get_layer_params = lambda layer: SimpleNamespace(
        block_scale=layer.weight_scale_inv, block_scale_attr="weight_scale_inv"
    )
    return made


class Method(QuantizeMethodBase):
    """The part of vLLM's FP8 method that handles weights."""

    def __init__(self, stock: Any) -> None:
        self.fp8_linear = kernel(stock)

    def create_weights(self, layer: torch.nn.Module, *_: Any, **__: Any) -> None:
        for name, value in checkpoint(0).items():
            layer.register_parameter(name, torch.nn.Parameter(torch.empty_like(value), requires_grad=False))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        linear.keep_wo_a_scale(layer)
        self.fp8_linear.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.fp8_linear.apply_weights(layer, x, bias)


class Layer(torch.nn.Module):
    """A linear layer with FP8 weights; `bmm`: a wo_a."""

    def __init__(self, name: str, stock: Any = None, bmm: bool = False) -> None:
        super().__init__()
        self.prefix, self.quant_method = name, Method(stock)
        if bmm:
            self.is_bmm = True
        self.quant_method.create_weights(self)


def load(model: torch.nn.Module, seed: int, odd: bool = False) -> None:
    """Load the weights of a checkpoint into all layers, through their parameters' loaders."""
    for layer in model.children():
        for name, value in checkpoint(seed, odd).items():
            parameter = getattr(layer, name)
            default = lambda parameter, value: parameter.data.copy_(value)  # noqa: E731
            getattr(parameter, "weight_loader", default)(parameter, value)


def made(odd: bool = False) -> torch.nn.Module:
    """Return a loaded model: a layer with a stock kernel, one without, and a wo_a."""
    model = torch.nn.Module()
    model.both, model.alone = Layer("both", Stock()), Layer("alone")
    model.wo_a = Layer("wo_a", bmm=True)
    if odd:
        del model.alone, model.wo_a
    reload.record_metadata_for_reloading(model)
    load(model, 1, odd)
    for layer in model.children():
        layer.quant_method.process_weights_after_loading(layer)
    return model


def reloaded(model: torch.nn.Module, seed: int, odd: bool = False) -> None:
    """Let vLLM reload the weights of `model`."""
    reload.initialize_layerwise_reload(model)
    load(model, seed, odd)
    reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))


def agrees(model: torch.nn.Module, seed: int) -> dict[str, bool]:
    """Return for each layer whether it multiplies by the weights of checkpoint `seed`."""
    given = operation("fp8_gemm").make_inputs(PARAMS, torch.device("cpu"), seed)
    code, scale = fp8_quant(x=X)
    want = fp8_gemm(a=code, a_scale=scale, w=given["w"], w_scale=given["w_scale"])
    found = {name: getattr(model, name).quant_method.apply(getattr(model, name), X) for name in ("both", "alone")}
    return {name: torch.allclose(one.float(), want.float(), rtol=2e-2, atol=2e-2) for name, one in found.items()}


def tensors(model: torch.nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    """Return address and value of every tensor that a CUDA graph of `model` reads."""
    return {
        f"{name}.{what}": (value.data_ptr(), value.clone())
        for name, layer in model.named_children()
        for what, value in (("weight", linear.weight_bytes(layer.weight)), ("scale", getattr(layer, linear.SCALE)))
    }


def reload_keeps_graphs() -> dict[str, Any]:
    """Reload other weights; a graph reads the same addresses, which must contain the new values."""
    model = made()
    before = tensors(model)
    first = agrees(model, 1)
    reloaded(model, 2)
    after, fresh = tensors(model), checkpoint(2)
    wanted = {
        "weight": fresh["weight"].view(torch.uint8),
        "scale": linear.ue8m0_bytes(fresh["weight_scale_inv"]),
    }
    return {
        "first": first,
        "moved": [name for name in before if after[name][0] != before[name][0]],
        "stale": [name for name in after if not torch.equal(after[name][1], wanted[name.partition(".")[2]])],
        "eager": agrees(model, 2),
        "exported": sorted(name for name in model.state_dict() if name.endswith(linear.SCALE)),
        "persistent": [name for name, layer in model.named_children() if layer._non_persistent_buffers_set],
        "others": [name for name, value in vars(model.both).items() if isinstance(value, torch.Tensor)],
    }


def slept() -> dict[str, Any]:
    """Lose all memory as in sleep level 2, restore the buffers, and load the weights again."""
    model = made()
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for layer in model.children():
        for value in (linear.weight_bytes(layer.weight), getattr(layer, linear.SCALE)):
            value.fill_(0xFF)
        for plan in getattr(layer, "dsv4_product", None) or ():
            for one in vars(plan).values():
                if isinstance(one, torch.Tensor):
                    one.view(torch.uint8).fill_(0xFF)
    for name, buffer in model.named_buffers():
        buffer.copy_(saved[name])
    restored = [torch.equal(getattr(one, linear.SCALE), saved[f"{name}.{linear.SCALE}"]) for name, one in
                model.named_children()]  # fmt: skip
    reloaded(model, 3)
    return {"restored": restored, "eager": agrees(model, 3)}


def other_scales() -> dict[str, Any]:
    """Reload scales that are no powers of two in place of powers of two, and the reverse."""
    said = []
    for first, then in ((False, True), (True, False)):
        model = made(odd=first)
        if not first:
            del model.alone, model.wo_a
        try:
            reloaded(model, 2, odd=then)
            said.append(f"{linear.SCALE in model.both._buffers}, {model.both.dsv4_product}")
        except ValueError as error:
            said.append(str(error))
    try:
        layer = Layer("layers.0.wo_a", bmm=True)
        layer.weight_scale_inv.data.fill_(1.5)
        linear.keep_wo_a_scale(layer)
    except ValueError as error:
        said.append(str(error))
    return {"said": said}


def output_of_prompts() -> list[bool]:
    """Quantise the attention's output of prompts; the shared buffers contain garbage before each run."""
    heads, tokens = 2, 3
    given = operation("mla_merge_o8").make_inputs(
        {"parts": 1, "tokens": tokens, "heads": heads}, torch.device("cpu"), 4
    )
    layer = attention.BundledAttention.__new__(attention.BundledAttention)
    vars(layer).update(
        n_local_heads=heads, _most_tokens=4, attn_sink=torch.zeros(heads),
        rotary_emb=SimpleNamespace(cos_sin_cache=given["cos_sin"]),
    )  # fmt: skip
    layer._output = attention._Output(layer)
    lse, sink = torch.zeros((1, tokens, heads)), torch.full((heads,), float("-inf"))
    wanted = mla_merge_o8(**{**given, "lse": lse, "sink": sink})
    found = []
    for garbage in (float("nan"), 0.0, 3e38):
        for one in (layer._output.lse, layer._output.sink):
            one.fill_(garbage)
        out = layer._output.first(tokens)
        layer._quantize(given["o"][0], given["positions"], out.rows(0))
        found.append(torch.equal(out.code, wanted[0]) and torch.equal(out.scale, wanted[1]))
    return found


if __name__ == "__main__":
    told = {"reload": reload_keeps_graphs(), "sleep": slept(), "other": other_scales(), "output": output_of_prompts()}
    print(json.dumps(told))
