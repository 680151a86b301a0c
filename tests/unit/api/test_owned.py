"""Flags and variables that users may not set, in all notations that the engine's parser accepts."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_operator.api.security import FLAGS, flag_reason, owned_env, owned_flag, owned_flags, spellings
from dsv4_operator.planning.images import profiles

SURFACES = {profile.surface.vllm: profile.surface for profile in profiles()}
REFUSED = {*owned_flags(), *(spelling for flag in FLAGS for spelling in spellings(flag))}


class Parser(argparse.ArgumentParser):
    """Flags of one vLLM version; unknown and ambiguous arguments are errors."""

    def __init__(self, version: str) -> None:
        super().__init__(add_help=False, exit_on_error=False)
        surface = SURFACES[version]
        for flag in surface.flag_names():
            self.add_argument(flag, dest=flag, nargs="?", default=argparse.SUPPRESS)
        self._parsed: dict[str, set[str]] = {}

    def error(self, message: str) -> None:  # type: ignore[override]
        raise argparse.ArgumentError(None, message)

    def flags(self, arg: str) -> set[str]:
        """Return the flags that `arg` sets by the rules of vLLM's parser: `_` for `-`, and dotted keys for JSON."""
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            arg = re.sub(r"(?<=--)[^.]*", lambda found: found[0].replace("_", "-"), name, count=1) + equals + value
        if arg.startswith("-") and "." in arg.partition("=")[0]:
            arg = arg.partition("=")[0].partition(".")[0]
        if arg not in self._parsed:
            try:
                self._parsed[arg] = set(vars(self.parse_args([arg])))
            except (argparse.ArgumentError, SystemExit):
                self._parsed[arg] = set()
        return self._parsed[arg]


PARSERS = {version: Parser(version) for version in SURFACES}


def written(flag: str) -> Iterator[str]:
    """Yield notations of `flag`."""
    for end in range(2, len(flag) + 1):
        for start in {flag[:end], flag[:end].replace("-", "_").replace("__", "--", 1), flag[:end].replace("-", "_", 3)}:
            yield from (start, f"{start}=1", f"{start}=", f"{start}.key=1", f"{start}.a.b", f"{start}1", f"{start}+")


@functools.cache
def unseen() -> list[str]:
    """Return notations of refused flags that the checks do not recognize."""
    found = {arg for flag in REFUSED for arg in written(flag) if not owned_flag(arg) and not flag_reason(arg, ())}
    return sorted(found)


@pytest.mark.parametrize("version", SURFACES)
def test_every_way_to_write_a_refused_flag_is_found(version: str) -> None:
    assert [arg for arg in unseen() if PARSERS[version].flags(arg) & REFUSED] == []


def test_this_modules_parser_agrees_with_the_one_of_vllm() -> None:
    parser = PARSERS["0.33.0"]
    assert parser.flags("--tensor_par=2") == {"--tensor-parallel-size"}
    assert parser.flags("--speculative_config.method=mtp") == {"--speculative-config"}
    assert parser.flags("-n2") == {"-n"}
    assert parser.flags("--no-such-flag") == set()


@pytest.mark.parametrize("version", SURFACES)
def test_every_other_flag_is_taken_as_it_is(version: str) -> None:
    surface = SURFACES[version]
    others = [flag for flag in surface.flag_names() if flag not in REFUSED]
    opposite = {flag for flag in others if surface.aliases.get(flag) in REFUSED}
    assert len(others) > 200
    for flag in set(others) - opposite:
        for arg in (flag, flag.replace("-", "_").replace("__", "--", 1), f"{flag}=1", f"{flag}.key=1"):
            assert owned_flag(arg) is None, arg
            assert flag_reason(arg, ()) is None, arg


@settings(deadline=None)
@given(st.text(alphabet="-_=.tpndcarmodel0", min_size=1, max_size=20))
def test_no_text_sets_a_refused_flag_unseen(text: str) -> None:
    for parser in PARSERS.values():
        for arg in (text, f"-{text}", f"--{text}"):
            assert not parser.flags(arg) & set(owned_flags()) or owned_flag(arg), arg


@pytest.mark.parametrize(
    "arg",
    ["--model", "--model=x", "--tensor-parallel-size", "--tensor_parallel_size", "--tensor-par", "-tp", "-tp=2",
    "--hos",
    "-dpl", "-dpl=1", "-dpa", "-dpa=1.2.3.4", "-dcp", "-dcp=2", "-pcp", "-n2", "-r1", "-t",
    "--speculative-config.method=mtp",
    "--speculative_config.method", "-sc.method", "--data-parallel-address", "--"],
)  # fmt: skip
def test_an_owned_flag_is_named_with_its_remedy(arg: str) -> None:
    assert owned_flag(arg)


@pytest.mark.parametrize(
    "arg",
    ["--model-impl", "--seed", "1", "--hf-overrides", "--moe-backend=marlin", "--max-model-len-factor", "model",
    "-O3", "-1",
    "-q", "-dc", "-cc", "-cc.mode=3", "--hf-overrides.a=1", ""],
)  # fmt: skip
def test_other_arguments_are_accepted(arg: str) -> None:
    assert owned_flag(arg) is None


def test_owned_variables() -> None:
    assert owned_env("RAY_AUTH_TOKEN") == "remove it"
    assert owned_env("VLLM_CPU_KVCACHE_SPACE") == "use spec.engine.kvCacheMemory"
    assert owned_env("DSV4_DEV_PLATFORM")
    assert owned_env("OMP_NUM_THREADS") is None
