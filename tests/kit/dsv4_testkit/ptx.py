"""Emulation of the PTX instructions in the kernels' inline assembly, which Triton's interpreter does not support."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import dsv4_kernels

Word = torch.Tensor
"""Registers of many threads: int64 with the values of unsigned 32-bit integers."""
MASK = 0xFFFFFFFF


def assemblies() -> dict[tuple[str, str], list[str]]:
    """Return the inline assemblies of the package by file and function, in source order."""
    found: dict[tuple[str, str], list[str]] = {}
    root = Path(dsv4_kernels.__path__[0])
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            target.id: node.value.args[0].value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.args[0], ast.Constant)
        }
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            for text in _of(function, names):
                found.setdefault((str(path.relative_to(root)), function.name), []).append(text)
    return found


def _of(function: ast.FunctionDef, names: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("inline_asm_elementwise"):
            first = node.args[0]
            yield first.value if isinstance(first, ast.Constant) else names[ast.unparse(first)]


def run(assembly: str, inputs: dict[int, Word]) -> dict[int, Word]:
    """Run `assembly` with the operands `inputs` by number; return the operands that it writes."""
    registers: dict[str, Word] = {f"${number}": word for number, word in inputs.items()}
    for statement in assembly.replace("{", "").replace("}", "").split(";"):
        line = statement.strip()
        if not line or line.startswith(".reg"):
            continue
        opcode, _, operands = line.partition(" ")
        target, *sources = (one.strip() for one in operands.split(","))
        values = [_value(one, registers) for one in sources]
        registers[target] = INSTRUCTIONS[opcode](*values) & MASK
    return {
        int(name[1:]): word
        for name, word in registers.items()
        if re.fullmatch(r"\$\d+", name) and int(name[1:]) not in inputs
    }


def _value(text: str, registers: dict[str, Word]) -> Word:
    return registers[text] if text in registers else torch.tensor(int(text, 0), dtype=torch.int64)


def _prmt(a: Word, b: Word, selector: Word) -> Word:
    """Select four of the eight bytes of a (0 to 3) and b (4 to 7)."""
    out = torch.zeros_like(a + b)
    for place in range(4):
        which = int(selector) >> (4 * place) & 15
        assert which < 8, "no replication of signs"
        source = a if which < 4 else b
        out = out | (source >> (8 * (which % 4)) & 255) << (8 * place)
    return out


def _lop3(a: Word, b: Word, c: Word, table: Word) -> Word:
    """Return a function of three bits: bit 4a + 2b + c of the table."""
    out = torch.zeros_like(a | b | c)
    for row in range(8):
        if int(table) >> row & 1:
            terms = [value if row >> place & 1 else ~value for value, place in ((a, 2), (b, 1), (c, 0))]
            out = out | (terms[0] & terms[1] & terms[2] & MASK)
    return out


def bf16(word: Word, half: int) -> torch.Tensor:
    """Return the lower (0) or upper (1) half of words as bf16."""
    bits = word >> (16 * half) & 0xFFFF
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)


def pair(lower: torch.Tensor, upper: torch.Tensor) -> Word:
    """Return two bf16 as words."""
    low, high = (one.contiguous().view(torch.int16).long() & 0xFFFF for one in (lower, upper))
    return high << 16 | low


def _mul_bf16x2(a: Word, b: Word) -> Word:
    # A product of two bf16 is exact in float32, except for values below its smallest.
    halves = [(bf16(a, half).float() * bf16(b, half).float()).to(torch.bfloat16) for half in (0, 1)]
    return pair(*halves)


INSTRUCTIONS: dict[str, Callable[..., Word]] = {
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "shr.u32": lambda a, count: a >> count,
    "shl.b32": lambda a, count: a << count,
    "and.b32": lambda a, b: a & b,
    "mov.b32": lambda a: a,
    "mul.lo.u32": lambda a, b: (a & MASK) * (b & MASK),
    "mad.lo.u32": lambda a, b, c: (a & MASK) * b + c,
    "mul.bf16x2": _mul_bf16x2,
}
