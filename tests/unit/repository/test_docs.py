"""The documentation is complete: each cause has a page, and no relative link is broken."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dsv4_runtime.contract import Cause

ROOT = Path(__file__).parents[3]
FAILURES = ROOT / "docs" / "failures"
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^()<>\s]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
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


def test_links_are_found() -> None:
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
