"""The committed table of the static gate: records, their digests and the results of compiling them.

Imports neither torch nor Triton, as the process that compiles (`gate.child`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4_kernels.arch import Arch

SM12X_SHARED_BYTES = 101_376
PACKAGE = Path(__file__).resolve().parents[1]

# PTX of each kind of matrix instruction. "none": the kernel has no matrix product.
MMA_PATTERNS: Mapping[str, str] = {
    "mx": r"mma\.sync\.[^;\n]*kind::mxf8f6f4[^;\n]*",
    "bf16": r"mma\.sync\.[^;\n]*\.bf16\.bf16[^;\n]*",
    "f16": r"mma\.sync\.[^;\n]*\.f16\.f16[^;\n]*",
    "fp8": r"mma\.sync\.(?![^;\n]*kind::)[^;\n]*\.e4m3\.e4m3[^;\n]*",
    "wgmma-f16": r"wgmma\.mma_async\.[^;\n]*\.f16\.f16[^;\n]*",
    "wgmma-bf16": r"wgmma\.mma_async\.[^;\n]*\.bf16\.bf16[^;\n]*",
    "wgmma-fp8": r"wgmma\.mma_async\.[^;\n]*\.e4m3\.e4m3[^;\n]*",
}


@dataclass(frozen=True)
class Expect:
    """Properties that a compiled configuration must show.

    `mma` names instructions of `MMA_PATTERNS`: the PTX must contain at least one of them and no other; ("none",) means
    no matrix instruction. `cp_async` is the minimum number of asynchronous copies (0: no pipelined loop). `shared` is
    the maximum shared memory in bytes. `spill` is the maximum local memory in bytes.
    """

    mma: tuple[str, ...] = ("none",)
    cp_async: int = 0
    shared: int = SM12X_SHARED_BYTES
    spill: int = 0


@dataclass(frozen=True)
class StaticKernel:
    """One kernel in one configuration for one architecture, as `gate.plans` records its launch.

    `kernel` is "module:function". `arguments` are the Triton types of the run-time arguments in the kernel's order
    ("*bf16", "*u8", "*fp8e4nv", "i32"), None for an optional argument that is absent. Pointers are compiled as
    multiples of 16 bytes, which most plans check, integers in their general form: neither 1 nor a multiple of 16.
    `constants` maps every compile-time argument to its value. `since` and `before` bound the Triton versions that
    launch the record ([since, before)). `label` is unique among the records of the kernel.
    """

    kernel: str
    arch: Arch
    arguments: tuple[str | None, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    since: tuple[int, int] = (3, 6)
    before: tuple[int, int] | None = None
    expect: Expect = field(default_factory=Expect)
    label: str = ""

    @property
    def folder(self) -> str:
        """Folder of the operation."""
        return self.kernel.split(".")[1]

    @property
    def function(self) -> str:
        """Name of the kernel."""
        return self.kernel.rsplit(":", 1)[1]

    @property
    def key(self) -> str:
        """Name of the record in the table."""
        return f"{self.folder}/{self.function}/{self.label}/{self.arch}"

    def applies_to(self, triton: str) -> bool:
        """Return whether a process with Triton `triton` ("3.6") launches the record."""
        major, minor = (int(part) for part in triton.split(".")[:2])
        return self.since <= (major, minor) and (self.before is None or (major, minor) < self.before)

    def digest(self) -> str:
        """SHA-256 (16 digits) of everything that determines the compiled code: the configuration and the source of the
        kernel with the functions and constants that it uses, without comments and docstrings.
        """
        module, function = self.kernel.split(":")
        facts = [list(self.arguments), {name: str(value) for name, value in sorted(self.constants.items())}]
        text = json.dumps([*facts, self.num_warps, self.num_stages, self.arch.value, asdict(self.expect)])
        return hashlib.sha256((text + _source(module, function)).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StaticKernel:
        """Return the record of a JSON object that may have other fields."""
        known = {name: row[name] for name in cls.__dataclass_fields__}
        expect = {**row["expect"], "mma": tuple(row["expect"]["mma"])}
        before = tuple(row["before"]) if row["before"] else None
        changed = {"arch": Arch(row["arch"]), "arguments": tuple(row["arguments"]), "since": tuple(row["since"])}
        return cls(**{**known, **changed, "before": before, "expect": Expect(**expect)})


@functools.cache
def _module(name: str) -> dict[str, ast.stmt | tuple[str, str]]:
    """Return the definitions of a module of the package by name; ("module", "name") for names imported from another."""
    path = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
    found: dict[str, ast.stmt | tuple[str, str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4_kernels."):
            found |= {one.asname or one.name: (str(node.module), one.name) for one in node.names}
    return found


@functools.cache
def _source(module: str, name: str) -> str:
    """Return the code of a kernel and of all that it uses from the package, sorted by name."""
    found: dict[tuple[str, str], str] = {}
    waiting = [(module, name)]
    while waiting:
        module, name = waiting.pop()
        node = _module(module).get(name)
        if isinstance(node, tuple):
            waiting.append(node)
        elif node is not None and (name, module) not in found:
            found[name, module] = _code(node)
            waiting += [(module, used.id) for used in ast.walk(node) if isinstance(used, ast.Name)]
    # Independent of the modules' names, so that a moved function changes nothing.
    return "\n".join(code for _, code in sorted((name, code) for (name, _), code in found.items()))


def _code(node: ast.stmt) -> str:
    if not isinstance(node, ast.FunctionDef):
        return ast.unparse(node)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return ast.unparse(ast.FunctionDef(**{**dict(ast.iter_fields(node)), "body": body}, lineno=1))


def arguments_of(kernel: str) -> dict[str, bool]:
    """Return the names of a kernel's arguments in order, and whether each is a compile-time constant."""
    module, function = kernel.split(":")
    node = _module(module)[function]
    if not isinstance(node, ast.FunctionDef):
        raise TypeError(f"{kernel} is no function")
    return {a.arg: a.annotation is not None and "constexpr" in ast.unparse(a.annotation) for a in node.args.args}


@dataclass(frozen=True)
class Row:
    """A record, the digest of its sources, and the result of each Triton by its version ("3.6")."""

    record: StaticKernel
    digest: str
    results: Mapping[str, Mapping[str, Any]]


def read(path: Path) -> list[Row]:
    """Read the table; an absent file is an empty table."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return [Row(StaticKernel.from_json(row), row["digest"], row["results"]) for row in rows]


def triton_version(folder: Path) -> str:
    """Return the version ("3.6") of the Triton in a folder."""
    info = next(folder.glob("triton-*.dist-info"))
    return ".".join(info.name.split("-")[1].split(".")[:2])


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write one row per line, sorted by key, without times: a changed configuration is a diff of its lines."""
    lines = []
    for row in sorted(rows, key=lambda row: row.record.key):
        results = {version: result_of(row.results[version]) for version in sorted(row.results)}
        lines.append(json.dumps({**row.record.as_json(), "digest": row.digest, "results": results}))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def result_of(compiled: Mapping[str, Any]) -> dict[str, Any]:
    """Return a compilation as the table keeps it: values that are not zero or empty, without key and time."""
    return {name: compiled[name] for name in sorted(compiled) if compiled[name] and name not in {"key", "seconds"}}


def differences(key: str, version: str, committed: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[str]:
    """Return the values of a fresh compilation that differ from those in the table."""
    fresh = result_of(fresh)
    return [
        f"{key} (Triton {version}): {name} is {fresh.get(name)}, in the table {committed.get(name)}"
        for name in sorted(fresh.keys() | committed.keys())
        if committed.get(name) != fresh.get(name)
    ]


def stale(rows: Iterable[Row], records: Iterable[StaticKernel], versions: Iterable[str]) -> list[str]:
    """Return rows that are missing, superfluous, incomplete or made from other sources than `records`."""
    committed, due = {row.record.key: row for row in rows}, {record.key: record for record in records}
    versions = tuple(versions)

    def problems() -> Iterator[str]:
        yield from (f"{key}: no row" for key in due.keys() - committed.keys())
        yield from (f"{key}: row of a configuration that is gone" for key in committed.keys() - due.keys())
        for key in due.keys() & committed.keys():
            row, record = committed[key], due[key]
            if record != row.record or record.digest() != row.digest:
                yield f"{key}: made from other sources"
            elif set(row.results) != {version for version in versions if record.applies_to(version)}:
                yield f"{key}: has results of Triton {', '.join(sorted(row.results))}"

    return sorted(problems())


def render(rows: Iterable[Row]) -> str:
    """Return the table as Markdown: one line per record with the worst numbers of all Tritons and broken promises."""
    lines = [
        "| kernel | configuration | arch | Triton | shared B | registers | stack B | matrix instruction | cp.async "
        "| verdict |",
        "|---|---|---|---|---:|---:|---:|---|---:|---|",
    ]
    for row in rows:
        record, results = row.record, row.results.values()
        worst = {name: max((one.get(name, 0) for one in results), default=0) for name in ("shared", "registers")}
        spill = max((one.get("stack", 0) + one.get("local", 0) for one in results), default=0)
        mma = sorted({name for result in results for name in result.get("mma", ())})
        copies = min((result.get("cp_async", 0) for result in results), default=0)
        broken = [f"{version}: {text}" for version, result in row.results.items() for text in result.get("broken", ())]
        cells = (
            record.function,
            record.label,
            record.arch,
            ", ".join(row.results),
            *worst.values(),
            spill,
            ", ".join(mma) or "–",
        )
        lines.append(f"| {' | '.join(map(str, cells))} | {copies} | {'; '.join(broken) or 'holds'} |")
    return "\n".join(lines) + "\n"
