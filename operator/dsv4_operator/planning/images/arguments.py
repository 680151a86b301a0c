"""Reading command line arguments as the engine's parser would, and saying what it would refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from dsv4_operator.api.values import quoted
from dsv4_operator.planning.images.surface import Accepts, Surface

_FLAG = re.compile(r"-[A-Za-z-]")


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag with its values, as it was written."""

    index: int
    """Place in the list at which it begins."""
    written: str
    """The flag as it was written, without a value behind `=`."""
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the flag as the parser reads it: dashes for underscores, without the key behind a dot."""
        flag = self.written.partition(".")[0]
        return flag.replace("_", "-") if flag.startswith("--") else flag

    @property
    def key(self) -> str:
        """Return what follows the dot in `--flag.key value`; empty if there is none."""
        return self.written.partition(".")[2]


def read_arguments(args: Sequence[str]) -> tuple[Argument, ...]:
    """Return the flags in `args`. Words before the first flag belong to none and are left out."""
    found: list[Argument] = []
    for index, word in enumerate(args):
        if _FLAG.match(word):
            flag, equals, value = word.partition("=")
            found.append(Argument(index, flag, (value,) if equals else ()))
        elif found:
            last = found.pop()
            found.append(Argument(last.index, last.written, (*last.values, word)))
    return tuple(found)


def argument_problems(args: Sequence[str], surface: Surface) -> Iterator[tuple[int, str]]:
    """Yield the position in `args` and a sentence, for everything that the engine of `surface` would refuse."""
    for argument in read_arguments(args):
        name = surface.flag(argument.name)
        if name is None:
            yield argument.index, unknown(argument.written, list(surface.flag_names()), f"vLLM {surface.vllm}")
            continue
        yield from ((argument.index, text) for text in _value_problems(argument, surface.flags[name]))


def unknown(name: str, known: Sequence[str], of: str) -> str:
    """Say that `name` is unknown, with the nearest name that is known."""
    nearest = get_close_matches(name.replace("_", "-") if name.startswith("-") else name, known, n=1, cutoff=0.7)
    remedy = f"did you mean {nearest[0]}?" if nearest else "remove it"
    return f'"{name}" is unknown to {of}; {remedy}'


def _value_problems(argument: Argument, accepts: Accepts) -> Iterator[str]:
    flag, count = argument.written, len(argument.values)
    if argument.key:
        if accepts.kind != "json":
            yield f'"{flag}" has a key, and {argument.name} takes none; write {argument.name} VALUE'
        elif not count:
            yield f"{flag} takes a value; write {flag}=VALUE"
        return
    if accepts.values == 0 and count:
        yield f"{quoted(argument.values[0])} follows {flag}, which takes no value; remove it"
    elif accepts.values == 1 and count != 1:
        yield f"{flag} takes one value, and {count} follow; write {flag}=VALUE"
    elif accepts.values == "?" and count > 1:
        yield f"{flag} takes at most one value, and {count} follow"
    elif accepts.values == "+" and not count:
        yield f"{flag} takes at least one value; write {flag} VALUE"
    else:
        for value in argument.values:
            if problem := accepts.problem(value):
                yield f"{flag}: {problem}"
