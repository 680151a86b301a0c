"""The documentation is complete and right: each cause has a page, no relative link is broken, and commands, options and
targets exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from dsv4_operator.cli.commands import app
from dsv4_runtime.contract import Cause

ROOT = Path(__file__).parents[3]
FAILURES = ROOT / "docs" / "failures"
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^()<>\s]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
SHELL = re.compile(r"^ *```(?:sh|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^ *|[|;&] *)(?:kubectl |\S*/)?dsv4 (.*)")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
HEADING = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)


def page_of(cause: Cause) -> str:
    return WORD_ENDS.sub("-", cause.value).lower() + ".md"


def links(page: Path) -> list[str]:
    """Return the relative links of a page, without code and without `https:` and other schemes."""
    found = [inline or reference for inline, reference in LINK.findall(CODE.sub("", page.read_text()))]
    return [link for link in found if not re.match(r"[a-z][a-z0-9+.-]*:", link)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as links use them after `#`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_its_page(cause: Cause) -> None:
    page = FAILURES / page_of(cause)
    assert page.is_file(), f"write docs/failures/{page.name}"
    assert page.read_text().splitlines()[0] == f"# {cause.value}"
    assert f"[{cause.value}]({page.name})" in (FAILURES / "README.md").read_text()


def test_every_page_has_its_cause() -> None:
    assert {path.name for path in FAILURES.glob("*.md")} == {"README.md", *map(page_of, Cause)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    broken = []
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        known = target.is_relative_to(ROOT) and target.exists()
        if not known or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def calls(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command line of `dsv4` and `kubectl dsv4` in the shell blocks of a page."""
    for block in SHELL.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if call := CALL.search(line):
                yield shlex.split(re.split(r"\s[|&;>]", call[1])[0], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_has_its_options(page: Path) -> None:
    unknown = []
    for words in calls(page):
        name = next((name for length in (2, 1) if (name := " ".join(words[:length])) in COMMANDS), None)
        known = {text for one in COMMANDS[name].params for text in (*one.opts, *one.secondary_opts)} if name else set()
        options = [word.partition("=")[0] for word in words if re.match("--?[a-zA-Z]", word)]
        if name is None or not known.issuperset(options):
            unknown.append(" ".join(words))
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_target_and_example_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for block in SHELL.findall(text) for name in re.findall(r"^ *make ([a-z-]+)", block, re.MULTILINE)}
    assert named | set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    assert [name for name in re.findall(r"\bexamples/[\w.-]+\.yaml", text) if not (ROOT / name).is_file()] == []


def test_links_and_commands_are_found() -> None:
    assert ["kernels", "compile", "/models/flash", "--arch", "sm_121,sm_120"] in list(
        calls(ROOT / "docs" / "kernels" / "engine.md")
    )
    assert "docs/quickstart.md" in links(ROOT / "README.md")
    assert "images/group.svg" in links(ROOT / "docs" / "concepts.md")


def test_the_installation_with_kubectl_replaces_both_images() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    [command] = re.findall(r"^(sed .*?install\.yaml)", page, re.MULTILINE | re.DOTALL)
    script = ["bash", "-c", command]
    installed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    images = re.findall(r"(?:^ +image: |--runtime-image=)\"?([^:\s]+)", installed, re.MULTILINE)
    assert images == ["REGISTRY/dsv4-operator", "REGISTRY/dsv4-runtime"]


@pytest.mark.parametrize("record", sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_every_decision_is_listed(record: Path) -> None:
    assert f"({record.name})" in (record.parent / "README.md").read_text(), "add a line to docs/decisions/README.md"
