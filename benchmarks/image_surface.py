"""Write the accepted flags and environment variables of an engine, for the image profiles of the planner.

    S=operator/dsv4_operator/planning/images/surface
    python benchmarks/image_surface.py vllm > $S/vllm-0.33.0.json
    python benchmarks/image_surface.py vllm --base $S/vllm-0.33.0.json > $S/vllm-0.32.0.json  # differences only
    python benchmarks/image_surface.py names NCCL_ libnccl.so.2 …  # names of variables in a library or in Python files

`vllm` examines the vLLM that Python imports (PYTHONPATH selects another, unpacked version): its own parser for the
flags, its configuration classes for the bounds of numbers, its table for the variables. No result is derived from a
text.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PARSERS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
"""Modules of `make_arg_parser`: from 0.33, and before."""

_NO_NUMBER = "?"
_LIMITS = {"ge": "least", "gt": "above", "le": "most", "lt": "below"}


def vllm_surface() -> dict[str, Any]:
    """Return flags, their short forms, and environment variables of the vLLM that Python imports."""
    import vllm
    from vllm import envs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = _make_parser()(FlexibleArgumentParser())
    bounds = _bounds()
    flags: dict[str, dict[str, Any]] = {}
    aliases: dict[str, str] = {}
    for action in parser._actions:
        long = [option for option in action.option_strings if option.startswith("--")]
        if not long or long[0] == "--help":
            continue
        name = long[0]
        flags[name] = _flag(action, bounds.get(action.dest, {}))
        # Not the action's own list: vLLM 0.33 still accepts --no-enable-x, but lists only --disable-x.
        aliases |= {other: name for other, its in parser._option_string_actions.items() if its is action}
        del aliases[name]
    variables = {name: _variable(name, getter) for name, getter in envs.environment_variables.items()}
    return {
        "vllm": vllm.__version__,
        "flags": dict(sorted(flags.items())),
        "aliases": dict(sorted(aliases.items())),
        "env": dict(sorted(variables.items())),
    }


def _make_parser() -> Any:
    for name in _PARSERS:
        try:
            return importlib.import_module(name).make_arg_parser
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"this vLLM has its parser in none of {', '.join(_PARSERS)}; add its module")


def _flag(action: argparse.Action, bounds: Mapping[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if action.nargs == 0:
        return {"values": 0}
    if action.nargs in {"+", "*", "?"}:
        found["values"] = action.nargs
    if action.choices is not None:
        found["choices"] = sorted({str(choice) for choice in action.choices if choice is not None})
    else:
        kind = _kind(action.type)
        if kind:
            found["kind"] = kind
    return found | bounds


def _kind(parse: Any) -> str | None:
    """Return the kind of values that `parse`, a flag's type, accepts; determined by calls."""
    if parse is None or _takes(parse, "seven"):
        return None
    if _takes(parse, "{}"):
        return "json"
    if not _takes(parse, "1"):
        return None
    if _takes(parse, "auto"):
        return "integer or auto"
    if _takes(parse, "4k"):
        return "size"
    return "number" if _takes(parse, "0.5") else "integer"


def _takes(parse: Any, text: str) -> bool:
    try:
        parse(text)
    except (ValueError, TypeError, argparse.ArgumentTypeError, SystemExit):
        return False
    return True


def _bounds() -> dict[str, dict[str, float]]:
    """Return the limits of numbers in vLLM's configuration classes, by the common name of field and flag."""
    import vllm.config

    found: dict[str, list[dict[str, float]]] = {}
    for config in vars(vllm.config).values():
        if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
            continue
        for name, field in getattr(config, "__pydantic_fields__", {}).items():
            limits = {
                ours: getattr(item, theirs)
                for item in field.metadata
                for theirs, ours in _LIMITS.items()
                if getattr(item, theirs, None) is not None
            }
            found.setdefault(name, []).append(limits)
    # A name in two classes may have two meanings.
    return {name: limits[0] for name, limits in found.items() if len(limits) == 1 and limits[0]}


def _variable(name: str, getter: Any) -> dict[str, Any]:
    for cell in getter.__closure__ or ():
        if isinstance(cell.cell_contents, list) and getter.__name__.startswith("_get_validated_env"):
            found: dict[str, Any] = {"choices": sorted(map(str, cell.cell_contents))}
            if "list" in getter.__name__ or "set" in getter.__name__:
                found["list"] = True
            return found
    kept = os.environ.get(name)
    try:
        os.environ[name] = _NO_NUMBER
        getter()
    except ValueError as error:
        if "int()" in str(error):
            return {"kind": "integer"}
        if "to float" in str(error):
            return {"kind": "number"}
    except Exception as error:  # Some read files or call other libraries; they are not described.
        print(f"{name}: {error!r}", file=sys.stderr)
    finally:
        if kept is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = kept
    return {}


def names(prefix: str, paths: list[Path]) -> list[str]:
    """Return names that begin with `prefix` and are separate strings in a library, or quoted in Python files."""
    return sorted({name for path in paths for name in _names_in(prefix, path)})


def _names_in(prefix: str, path: Path) -> Iterator[str]:
    word = re.escape(prefix.encode()) + rb"[A-Za-z0-9][A-Za-z0-9_]*"
    if path.is_dir():
        for source in path.rglob("*.py"):
            for match in re.finditer(rb"[\"'](" + word + rb")[\"']", source.read_bytes()):
                yield match[1].decode()
    else:
        for match in re.finditer(rb"\0(" + word + rb")(?=\0)", path.read_bytes()):
            yield match[1].decode()


def difference(document: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return the rows of `document` that differ from those in `base`, a complete document; None for removed rows."""
    complete = json.loads(base.read_text(encoding="utf-8"))
    found: dict[str, Any] = {"vllm": document["vllm"], "base": base.stem}
    for table in ("flags", "aliases", "env"):
        rows, others = document[table], complete[table]
        found[table] = {row: rows.get(row) for row in sorted(rows | others) if rows.get(row) != others.get(row)}
    return found


def _write(document: Mapping[str, Any]) -> str:
    """Return JSON with one flag or variable per line, so that versions can be compared."""
    lines = []
    for key, value in document.items():
        if isinstance(value, dict) and value:
            rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{rows}\n  }}")
        elif isinstance(value, list) and value:
            rows = ",\n".join(f"    {json.dumps(entry)}" for entry in value)
            lines.append(f"  {json.dumps(key)}: [\n{rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    surface = tasks.add_parser("vllm")
    surface.add_argument("--base", type=Path, help="file of another vLLM; write only the differences")
    listing = tasks.add_parser("names")
    listing.add_argument("prefix")
    listing.add_argument("paths", nargs="+", type=Path)
    listing.add_argument("--library", default="", help="name and version for the output")
    chosen = parser.parse_args()
    if chosen.task == "vllm":
        # vLLM writes its log to standard output, which receives the document.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # A build for CUDA finds no platform without a GPU, and its parser requires one.
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        document = vllm_surface()
        sys.stdout.write(_write(difference(document, chosen.base) if chosen.base else document))
    else:
        document = {"library": chosen.library, "prefix": chosen.prefix, "names": names(chosen.prefix, chosen.paths)}
        sys.stdout.write(_write(document))


if __name__ == "__main__":
    main()
