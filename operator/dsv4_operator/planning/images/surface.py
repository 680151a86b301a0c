"""Flags and variables that the command line and environment of an engine accept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from dsv4_operator.api.values import split_remedy


class Problem(NamedTuple):
    """One problem of an argument or a variable of the engine."""

    value: object
    """The flag, the variable or its value."""
    message: str
    remedy: str

    def of(self, name: str) -> Problem:
        """Return the same problem of a value of the flag or variable `name`."""
        return self._replace(message=f"as the value of {name} {self.message}")


@dataclass(frozen=True, slots=True)
class Accepts:
    """Accepted values of one flag or variable."""

    values: int | str = 1
    """0: none; 1: exactly one; `?`: at most one; `+` and `*`: several."""
    kind: str | None = None
    """`integer`, `number`, `size` (4096 or 4k), `integer or auto`, `json`; None: any text."""
    choices: tuple[str, ...] = ()
    list: bool = False
    """Whether a value is a comma-separated list of `choices`."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def problem(self, value: str) -> Problem | None:
        """Return the problem with `value`; None without a known problem."""
        if self.choices:
            given = value.split(",") if self.list else [value]
            if wrong := [one for one in given if one not in self.choices]:
                nearest = get_close_matches(wrong[0], self.choices, n=1, cutoff=0.5)
                remedy = f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(self.choices)}"
                return Problem(wrong[0], "is not supported", remedy)
            return None
        if self.kind is None or (self.kind == "integer or auto" and value == "auto"):
            return None
        try:
            if self.kind == "json":
                json.loads(value)
                return None
            number = _number(value, self.kind)
        except ValueError:
            return Problem(value, *split_remedy(f"is not {_WANTED[self.kind]}"))
        return self._out_of_range(value, number)

    def _out_of_range(self, value: str, number: float) -> Problem | None:
        remedy = ""
        if self.least is not None and number < self.least:
            remedy = f"the minimum is {self.least:g}"
        if self.above is not None and number <= self.above:
            remedy = f"write more than {self.above:g}"
        if self.most is not None and number > self.most:
            remedy = f"the maximum is {self.most:g}"
        if self.below is not None and number >= self.below:
            remedy = f"write less than {self.below:g}"
        return Problem(value, "is out of range", remedy) if remedy else None


_WANTED = {
    "integer": "a whole number; write for example 1",
    "number": "a number; write for example 0.5",
    "size": "a whole number; write for example 4096 or 4k",
    "integer or auto": "a whole number; write one, or auto",
    "json": 'JSON; write for example {"key": 1}, in single quotes',
}
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _number(value: str, kind: str) -> float:
    if kind == "number":
        return float(value)
    if kind != "integer" and value[-1:] in _SUFFIXES:
        return float(value[:-1]) * _SUFFIXES[value[-1]]
    return float(int(value))


@dataclass(frozen=True, slots=True)
class Surface:
    """Flags and variables of one vLLM."""

    vllm: str
    flags: Mapping[str, Accepts]
    aliases: Mapping[str, str]
    """Short and negated forms, and their flag."""
    env: Mapping[str, Accepts] = field(default_factory=dict)

    def flag(self, name: str) -> str | None:
        """Return the flag for `name` (`--async-scheduling` for `--no-async-scheduling`); None if it is unknown."""
        if name in self.flags:
            return name
        return self.aliases.get(name)

    def flag_names(self) -> Iterator[str]:
        """Return all names of all flags."""
        yield from self.flags
        yield from self.aliases


@cache
def surface(name: str) -> Surface:
    """Return the surface in the file `surface/<name>.json`."""
    data = surface_document(name)
    return Surface(
        vllm=data["vllm"],
        flags={flag: _accepts(entry) for flag, entry in data["flags"].items()},
        aliases=data["aliases"],
        env={variable: _accepts(entry) for variable, entry in data["env"].items()},
    )


@cache
def library(name: str) -> tuple[str, frozenset[str]]:
    """Return the prefix and names of the variables of a library, from the file `surface/<name>.json`."""
    data = _read(name)
    return data["prefix"], frozenset(data["names"])


def surface_document(name: str) -> dict[str, Any]:
    """Return the complete document of a vLLM, with the rows that `surface/<name>.json` takes from its base."""
    document: dict[str, Any] = _read(name)
    if "base" not in document:
        return document
    base = surface_document(document["base"])
    for table in ("flags", "aliases", "env"):
        rows = base[table] | document[table]
        base[table] = {row: rows[row] for row in sorted(rows) if rows[row] is not None}
    return base | {"vllm": document["vllm"]}


def _read(name: str) -> Any:
    return json.loads((resources.files(__package__) / "surface" / f"{name}.json").read_text(encoding="utf-8"))


def _accepts(entry: Mapping[str, Any]) -> Accepts:
    return Accepts(**{**entry, "choices": tuple(entry.get("choices", ()))})


_FLAG = re.compile(r"-[A-Za-z-]")


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag with its values on a command line."""

    index: int
    """Index of the flag in the list."""
    written: str
    """The flag as given, without a value after `=`."""
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the normalized flag: dashes for underscores, without the key after a dot."""
        flag = self.written.partition(".")[0]
        return flag.replace("_", "-") if flag.startswith("--") else flag

    @property
    def key(self) -> str:
        """Return the key in `--flag.key value`; empty without one."""
        return self.written.partition(".")[2]


def read_arguments(args: Sequence[str]) -> tuple[Argument, ...]:
    """Return the flags in `args`, as the parser of the engine reads them. Words before the first flag are dropped."""
    found: list[Argument] = []
    for index, word in enumerate(args):
        if _FLAG.match(word):
            flag, equals, value = word.partition("=")
            found.append(Argument(index, flag, (value,) if equals else ()))
        elif found:
            last = found.pop()
            found.append(Argument(last.index, last.written, (*last.values, word)))
    return tuple(found)


def argument_problems(args: Sequence[str], surface: Surface) -> Iterator[tuple[int, Problem]]:
    """Yield the index in `args` and the problem of every argument that the engine of `surface` would refuse."""
    for argument in read_arguments(args):
        name = surface.flag(argument.name)
        if name is None and (joined := _without_equals(argument.written, surface)):
            yield argument.index, Problem(argument.written, "has no = between flag and value", f"write {joined}")
            continue
        if name is None:
            yield argument.index, unknown(argument.written, list(surface.flag_names()), f"vLLM {surface.vllm}")
            continue
        yield from ((argument.index, problem) for problem in _value_problems(argument, surface.flags[name]))


def _without_equals(written: str, surface: Surface) -> str:
    """Return `--flag=value` for `--flag value` or `--flagvalue` in one word; empty if it has no known flag."""
    flag, space, value = written.partition(" ")
    if space and surface.flag(flag.replace("_", "-")):
        return f"{flag}={value.strip()}"
    known = [name for name in surface.flag_names() if name.startswith("--") and written.startswith(name)]
    longest = max(known, key=len, default="")
    value = written[len(longest) :]
    return f"{longest}={value}" if longest and value[:1].isdigit() else ""


def unknown(name: str, known: Sequence[str], of: str) -> Problem:
    """Return the problem of an unknown `name`, with the nearest known name as the remedy."""
    nearest = get_close_matches(name.replace("_", "-") if name.startswith("-") else name, known, n=1, cutoff=0.7)
    remedy = f"did you mean {nearest[0]}?" if nearest else "remove it"
    return Problem(name, f"is unknown to {of}", remedy)


def _value_problems(argument: Argument, accepts: Accepts) -> Iterator[Problem]:
    flag, count = argument.written, len(argument.values)
    if argument.key:
        if accepts.kind != "json":
            yield Problem(flag, f"has a key, and {argument.name} takes no key", f"write {argument.name} VALUE")
        elif not count:
            yield Problem(flag, "takes a value", f"write {flag}=VALUE")
        return
    if accepts.values == 0 and count:
        yield Problem(argument.values[0], f"follows {flag}, which takes no value", "remove it")
    elif accepts.values == 1 and count != 1:
        yield Problem(flag, f"takes one value, and {count} follow", f"write {flag}=VALUE")
    elif accepts.values == "?" and count > 1:
        yield Problem(flag, f"takes at most one value, and {count} follow", "remove the others")
    elif accepts.values == "+" and not count:
        yield Problem(flag, "takes at least one value", f"write {flag} VALUE")
    else:
        for value in argument.values:
            if problem := accepts.problem(value):
                yield problem.of(flag)
