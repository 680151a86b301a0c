"""The files that docs/architecture.md names exist, and so do the functions in its step-by-step parts.

In those parts, a code span that ends with `.py` names the file, and one that ends with `()` a function in it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = (ROOT, ROOT / "operator" / "dsv4_operator", ROOT / "runtime" / "dsv4_runtime")
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
WALKS = ("A deployment's first decision", "A worker's death", "A request's way")
CHANGES = [
    line.split("|")[1:4] for line in SECTIONS["Everyday changes"].splitlines() if re.match(r"\| (?!change |--)", line)
]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def place(name: str) -> Path | None:
    return next((folder / name for folder in FOLDERS if (folder / name).exists()), None)


def functions(path: Path) -> set[str]:
    """Return the functions of a file, methods with their class."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef

    def named(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, kinds):
                yield prefix + node.name
            elif isinstance(node, ast.ClassDef):
                yield from named(node.body, f"{node.name}.")

    return set(named(ast.parse(path.read_text()).body, ""))


def is_path(span: str) -> bool:
    return "/" in span and re.fullmatch(r"[\w./-]+", span) is not None and not span.startswith("/")


@pytest.mark.parametrize("section", WALKS)
def test_every_function_on_the_way_is_there(section: str) -> None:
    missing, file, count = [], None, 0
    for span in spans(SECTIONS[section]):
        if is_path(span) and span.endswith(".py"):
            file = place(span)
            assert file is not None, span
        elif span.endswith("()"):
            assert file is not None, f"{span} stands before any file"
            count += 1
            if span[:-2] not in functions(file):
                missing.append(f"{span} in {file.relative_to(ROOT)}")
    assert missing == []
    assert count > 10


def files(cell: str) -> Iterator[tuple[str, bool]]:
    """Yield the files of a cell, and whether each exists.

    A bare file name refers to the directory of the last path before it, or to the root.
    """
    folder = ROOT
    for span in spans(cell):
        if is_path(span):
            path = place(span)
            folder = ROOT if path is None else path if path.is_dir() else path.parent
            yield span, path is not None
        elif re.fullmatch(r"[\w-]+(\.[\w-]+)*\.(py|toml|txt|md|json|yaml)", span):
            yield span, any((parent / span).exists() for parent in (folder, ROOT))


def test_files_exist_at_the_paths_of_the_page() -> None:
    found = [file for row in SECTIONS["Where things are"].splitlines() for file in files("".join(row.split("|")[2:]))]
    assert [name for name, exists in found if not exists] == []
    assert sum("/" not in name for name, _ in found) > 20


def test_every_file_of_an_everyday_change_is_there() -> None:
    found = [file for row in CHANGES for cell in row[1:] for file in files(cell)]
    assert [name for name, exists in found if not exists] == []
    assert len(CHANGES) >= 20
    assert [row[0].strip() for row in CHANGES if not any(is_path(span) for span in spans(row[1]))] == []
