"""The tutorial, run as written: every `sh` block of the page, with the output below it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import charts
import pytest
from clusterkit.client import Cluster

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
CRD = "dsv4deployments.dsv4.dev"
BLOCK_SECONDS = 900.0

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """One `sh` block."""

    line: int
    commands: str
    expected: str | None
    """The following `text` block, if any."""


def steps(page: str) -> list[Step]:
    """Return the blocks that a reader runs, in order."""
    fences = list(_FENCE.finditer(page))
    found = []
    for number, fence in enumerate(fences):
        if fence[1] != "sh":
            continue
        following = fences[number + 1] if number + 1 < len(fences) else None
        said = following[2] if following is not None and following[1] == "text" else None
        found.append(Step(page[: fence.start()].count("\n") + 1, fence[2], said))
    return found


def matches(expected: str, output: str) -> bool:
    """Return whether `output` matches the page: `…` is any text, a line of it any lines, and spaces have any width."""
    pattern = ""
    for line in expected.splitlines():
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*"
        else:
            words = (r"[^\n]*".join(map(re.escape, word.split("…"))) for word in line.split())
            pattern += r"[^\S\n]*" + r"[^\S\n]+".join(words) + r"[^\S\n]*\n"
    return re.fullmatch(pattern, output if output.endswith("\n") else f"{output}\n") is not None


def run(step: Step, environment: dict[str, str]) -> str:
    """Run a block; return its standard output."""
    process = subprocess.Popen(
        ["bash", "-eu", "-c", step.commands],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=BLOCK_SECONDS)
    except subprocess.TimeoutExpired:
        # It has its own session and was not reaped yet: no other process can have its number.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        raise
    where = f"{PAGE.name}, line {step.line}"
    assert process.returncode == 0, f"{where}: exit code {process.returncode}\n{step.commands}\n{output}"
    if step.expected is not None:
        assert matches(step.expected, output), (
            f"{where}:\n{step.commands}\nprinted\n{output}\ninstead of\n{step.expected}"
        )
    return output


@pytest.fixture
def reader(
    cluster: Cluster, definition: dict[str, object], operator_image: str, runtime_image: str, tmp_path: Path
) -> Iterator[dict[str, str]]:
    """Yield the environment of a reader after step 1 of the page; nothing of dsv4 is on the cluster."""
    kubeconfig = shutil.copy(cluster.kubeconfig, tmp_path / "kubeconfig")
    operator, tag = operator_image.rsplit(":", 1)
    runtime, runtime_tag = runtime_image.rsplit(":", 1)
    assert tag == runtime_tag
    folders = (cluster.programs, charts.program().parent, Path(sys.executable).parent)
    environment = {
        **cluster.environment,
        "KUBECONFIG": str(kubeconfig),
        "PATH": ":".join([*map(str, folders), os.environ["PATH"]]),
        "OPERATOR": operator,
        "RUNTIME": runtime,
        "TAG": tag,
    }
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s", seconds=70)
    try:
        yield environment
    finally:
        # Already done if the page was run to its end.
        charts.helm("uninstall", "dsv4", "--ignore-not-found", "--namespace", "dsv4-system", env=environment)
        cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s", seconds=70)
        cluster.kubectl("delete", "namespace", "demo", "dsv4-system", "--ignore-not-found", "--wait=false")
        cluster.apply(definition)
        cluster.until_served(CRD)


@pytest.mark.parametrize(
    ("expected", "output", "as_it_should_be"),
    [
        ("a … c\n", "a  b c\n", True),
        ("a … c\n", "a b d\n", False),
        ("…\nend\n", "one\ntwo\nend\n", True),
        ("…\nend\n", "end\n", True),
        ("…\nend\n", "end\nmore\n", False),
        ('…"n":8…\n', '{"n":8}', True),
        ('…"n":8…\n', '{"n":9}', False),
        ("401\n200\n", "200\n200\n", False),
    ],
)
def test_output_is_compared_with_its_pattern(expected: str, output: str, as_it_should_be: bool) -> None:
    assert matches(expected, output) is as_it_should_be


def test_the_page_has_its_steps() -> None:
    found = steps(PAGE.read_text())
    assert len(found) == 11
    text = "".join(step.commands for step in found)
    for word in ("helm install", "kubectl apply", "chat", "kill -9", "helm upgrade", "kubectl delete dsv4"):
        assert word in text


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_tutorial(reader: dict[str, str]) -> None:
    begun = time.monotonic()
    for step in steps(PAGE.read_text()):
        started = time.monotonic()
        output = run(step, reader)
        print(f"\n$ {step.commands.strip()}\n{output.rstrip()}\n({time.monotonic() - started:.1f} s)", flush=True)
    print(f"the tutorial took {time.monotonic() - begun:.0f} s")
