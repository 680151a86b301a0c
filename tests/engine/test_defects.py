"""`dsv4 verify` on a real engine with injected defects: each is found, and no check fails before and after them.

One engine serves all tests; the plugin `dsv4_faults` switches the defects on and off (`tests/kit/dsv4_faults`). The
reference is exported from the same engine. docs/verify.md has the results as a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dsv4_runtime.nano.recipe import tokenizer_json
from dsv4_testkit.harness import MANIFEST, Deployment

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

SHORT = (
    *("smoke.completions", "smoke.stop", "smoke.template", "smoke.thinking", "smoke.parallel"),
    *("oracle.self", "oracle.reference"),
)
REACH = "context.reach"
QUICK_CASES = 3
SAME_ENGINE = 0.005
"""Tolerance in nats of a comparison with the same engine on the same machine, far above its noise."""
PAIRS = [[number, number + 1] for number in range(0, 256, 2)]
"""All routed experts of a layer."""


@dataclass(frozen=True)
class Engine:
    """An engine, its reference, and the file of orders."""

    deployment: Deployment
    folder: Path

    @contextmanager
    def defect(self, order: dict[str, Any]) -> Iterator[None]:
        """Have a defect during the block."""
        written, file = self.folder / "written", self.folder / "order"
        written.write_text(json.dumps(order))
        written.replace(file)
        try:
            yield
        finally:
            file.unlink()

    def verify(self, *checks: str, reference: str = "short.json", tolerance: float = 0.05) -> dict[str, dict[str, Any]]:
        """Return the results of `checks` by name."""
        only = [word for name in checks for word in ("--only", name)]
        options = ("--quick", "--weak", "--limit", "5m", "--reference", str(self.folder / reference), "-o", "json")
        options += ("--tolerance", str(tolerance))
        done = self.deployment.run("verify", self.deployment.name, *options, *only, timeout=330)
        assert done.stdout, done.stderr
        document = json.loads(done.stdout)
        results = {each["name"]: each for each in document["results"]}
        print(f"\n{document['seconds']:.0f} s")
        for name, result in results.items():
            print(name, result["status"], result.get("text", ""), result.get("figures") or result.get("evidence", ""))
        assert set(results) == set(checks)
        return results


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("defects")
    # On CPUs dsv4 leaves the parser to the user.
    limits = "maxModelLen: 1024, extraArgs: [--reasoning-parser=deepseek_v4]"
    manifest = MANIFEST.replace("maxModelLen: 1024", limits)
    assert limits in manifest
    order = {"DSV4_FAULT_FILE": str(folder / "order")}
    deployment = Deployment("defects", nodes=1, manifest=manifest, environment=order)
    try:
        deployment.up()
        # The check is the cheapest one; the reference is written after it.
        export = ("--only", "smoke.models", "--export", str(folder / "long.json"), "-o", "json")
        done = deployment.run("verify", deployment.name, *export)
        assert done.returncode == 0, done.stdout + done.stderr
        document = json.loads((folder / "long.json").read_text())
        document["cases"] = document["cases"][:QUICK_CASES]
        (folder / "short.json").write_text(json.dumps(document))
        yield Engine(deployment, folder)
    finally:
        deployment.destroy()


@cache
def tokens(text: str) -> list[int]:
    return list(Tokenizer.from_str(json.dumps(tokenizer_json())).encode(text).ids)


def failed(results: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, result in results.items() if result["status"] == "failed"}


def no_defect(engine: Engine) -> None:
    found = engine.verify(*SHORT, REACH, reference="long.json", tolerance=SAME_ENGINE)
    assert {result["status"] for result in found.values()} == {"ok"}


def test_no_check_fails_without_a_defect(engine: Engine) -> None:
    no_defect(engine)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({"kind": "logits", "scale": 1.01}, {"oracle.reference"}),
        ({"kind": "expert", "layer": 1, "experts": PAIRS}, {"oracle.reference"}),
        ({"kind": "repeat", "every": 5}, {"smoke.completions", "oracle.reference"}),
        ({"kind": "stop"}, {"smoke.stop"}),
        ({"kind": "template"}, {"smoke.template"}),
    ],
    ids=["logits", "experts", "repeat", "stop", "template"],
)
def test_a_defect_is_found(engine: Engine, order: dict[str, Any], expected: set[str]) -> None:
    with engine.defect(order):
        assert failed(engine.verify(*SHORT)) == expected


@pytest.mark.parametrize(
    ("order", "difference"),
    [
        ({"kind": "logits", "spread": 0.01}, "0.059"),
        ({"kind": "expert", "layer": 1, "experts": PAIRS[:1]}, "0.013"),
    ],
    ids=["random logits", "two experts"],
)
def test_a_small_defect_needs_a_tolerance_for_the_same_engine(
    engine: Engine, order: dict[str, Any], difference: str
) -> None:
    """Random errors of 1 % are as large as the default tolerance, which they exceed in five of nine draws.

    Experts of nano have most of their weights in common, and few tokens select one of the two.
    """
    with engine.defect(order):
        found = engine.verify("oracle.reference", tolerance=SAME_ENGINE)["oracle.reference"]
    assert found["status"] == "failed"
    assert f"differ by {difference[:-1]}" in found["text"]


def test_a_truncated_page_is_found(engine: Engine) -> None:
    """The last quarter of the first page of 256 tokens, which contains the sentence at 35 % of the prompt."""
    with engine.defect({"kind": "page", "first": 192, "last": 256}):
        found = engine.verify(REACH, "oracle.reference", reference="long.json")
    assert failed(found) == {REACH, "oracle.reference"}
    assert "at 35% of" in found[REACH]["text"]


def test_a_leaking_parser_is_found(engine: Engine) -> None:
    """The output of random weights may have any token, so the sampler writes sensible answers with reasoning."""
    end = tokens("<｜end▁of▁sentence｜>")
    script = {
        "think": tokens("<think>")[0],
        "answer": tokens("42 paris") + end,
        "reasoned": tokens("so it is</think>42 paris") + end,
    }
    with engine.defect({"kind": "script", **script}):
        assert engine.verify("smoke.thinking")["smoke.thinking"]["status"] == "ok"
    with engine.defect({"kind": "parser", **script}):
        found = engine.verify("smoke.thinking")
    assert failed(found) == {"smoke.thinking"}
    assert "'</think>'" in found["smoke.thinking"]["text"]


def test_no_check_fails_after_the_defects(engine: Engine) -> None:
    no_defect(engine)
