"""Make Triton's interpreter compute bf16, FP8 and block-scaled products as the hardware does.

Triton 3.6–3.9's interpreter truncates where the hardware rounds to nearest even, multiplies bf16 operands as the
integers that it stores them in, and has no block-scaled product. `install()` replaces these three by exact torch
conversions, so that a kernel's own source can be compared bitwise on a CPU.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic

_FORMATS = {"bf16": tl.bfloat16, "e4m3": tl.float8e4nv}


def _to_f32(data: Any, dtype: Any) -> Any:
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype == tl.float8e4nv:
        flat = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(torch.float8_e4m3fn)
        return flat.to(torch.float32).numpy()
    return data.astype(np.float32)


def _from_f32(data: Any, dtype: Any) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(data))
    if dtype == tl.bfloat16:
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    # cvt.rn.satfinite: saturate, keep NaN.
    return tensor.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _ue8m0(data: Any) -> Any:
    code = data.view(np.uint8)
    with np.errstate(over="ignore"):
        value = np.exp2(code.astype(np.float32) - 127.0)
    return np.where(code == 255, np.float32("nan"), value.astype(np.float32))


@functools.cache
def _languages(fn: Any) -> frozenset[str]:
    """Return the modules of Triton's language that a function names, of those that the interpreter patches."""
    return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)


def interpreting() -> bool:
    """Return whether kernels run in the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def install() -> None:
    """Patch the interpreter of this process; harmless to call again and where nothing is interpreted."""
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    if getattr(builder, "_dsv4_exact", False):
        return
    plain_cast, plain_binary = builder.cast_impl, builder.binary_op
    narrow = (tl.bfloat16, tl.float8e4nv)

    def cast(self: Any, src: Any, dst_type: Any, *_: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target:
            return handle(src.data, target)
        if source not in narrow and target not in narrow:
            return plain_cast(self, src, dst_type)
        wide = _to_f32(src.data, source)
        if target in narrow:
            return handle(_from_f32(wide, target), target)
        return handle(wide.astype(interpreter._get_np_dtype(target)), target)

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(_to_f32(a.data, a.dtype.scalar), _to_f32(b.data, b.dtype.scalar))
        return handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    def dot_scaled(
        self: Any, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any, *rest: Any
    ) -> Any:
        acc = rest[-1]
        if lhs_scale is None or rhs_scale is None:
            # Without both scales every Triton from 3.6 to 3.9 silently uses another instruction.
            raise ValueError("dot_scaled needs both scales as tensors")
        a = _to_f32(lhs.data, lhs.dtype.scalar) * np.repeat(_ue8m0(lhs_scale.data), 32, axis=-1)
        b = _to_f32(rhs.data, rhs.dtype.scalar) * np.repeat(_ue8m0(rhs_scale.data), 32, axis=-1).swapaxes(-1, -2)
        return handle((np.matmul(a, b) + acc.data).astype(np.float32), acc.dtype.scalar)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16 or op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
            return plain_binary(self, lhs, rhs, op)
        output = op(_to_f32(lhs.data, tl.bfloat16), _to_f32(rhs.data, tl.bfloat16))
        return handle(output if output.dtype == np.bool_ else _from_f32(output, tl.bfloat16), tl.bfloat16)

    for name in (
        "create_fp_ext",
        "create_fp_trunc",
        "create_si_to_fp",
        "create_ui_to_fp",
        "create_fp_to_si",
        "create_fp_to_ui",
    ):
        setattr(builder, name, cast)
    builder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode=None: cast(self, src, dst_type)
    builder.cast_impl = cast
    builder.binary_op = binary
    builder.create_dot = dot
    builder.create_dot_scaled = dot_scaled
    builder._dsv4_exact = True
    plain_scaled = TritonSemantic.dot_scaled

    def scaled(
        self: Any, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any, *rest: Any
    ) -> Any:
        # The compiler wraps literals as constants; the interpreter hands them over as they are.
        lhs_format, rhs_format = (
            f if isinstance(f, tl.constexpr) else tl.constexpr(f) for f in (lhs_format, rhs_format)
        )
        return plain_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *rest)

    TritonSemantic.dot_scaled = scaled
    plain_call, plain_patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[str] = set()

    def patch(fn: Any) -> Any:
        # Every call of a device function patches the whole language again, which takes half of a launch's time.
        names = _languages(fn)
        if names <= patched:
            return getattr(interpreter, "_LangPatchScope", lambda: None)()
        patched.update(names)
        return plain_patch(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        # log2(0), inf − inf and their like are ordinary values on a GPU, not warnings.
        with np.errstate(all="ignore"):
            return plain_call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call
    interpreter._patch_lang = patch
