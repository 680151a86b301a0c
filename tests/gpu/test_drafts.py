"""Speculative decoding with the bundled kernels alone: an MTP layer and DSpark's stages change no greedy token.

Three engines start in parallel: one without drafts, one of each kind. The model before the draft layers is identical to
the byte in both checkpoints.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import needs
import pytest
from page import Page

if reason := needs.gpu() or needs.engine():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.gpu.compare import differences

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.nano.checkpoint import make
from dsv4_runtime.nano.recipe import Drafts, Precision

ROOT = Path(__file__).parents[2]
SECONDS = 220.0
"""Limit for all engines, from the start of their processes."""
TOKENS = {Drafts.MTP: 3, Drafts.DSPARK: 5}
ACCEPTED = 0.5
"""Minimum share of accepted draft tokens; on the CPU 73 % of MTP's and 67 % of DSpark's were (docs/decisions/0002)."""
ORDERS = ("alone", "batched")
OPTIONS = (
    *("--kernels", ",".join(f"{op}=bundled" for op in Op), "--without-compilers", "--memory", "0.2"),
    *("--max-len", "4096", "--prompts", "24", "--answers", *ORDERS, "--batches", "--prefills"),
)
COLUMNS = ("drafts", "greedy tokens", "accepted", "tokens a step", "compiled while it served", "ready", "all answers")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Drafts, dict[str, Any]]:
    """Return the responses, counters and compilations of each engine."""
    folder = tmp_path_factory.mktemp("drafts")
    models = {drafts: make(folder / drafts, precision=Precision.FP8, drafts=drafts) for drafts in TOKENS}
    logs = {drafts: folder / f"{drafts}.log" for drafts in Drafts}
    outs = {drafts: folder / f"{drafts}.json" for drafts in Drafts}
    begun = time.monotonic()
    engines: dict[Drafts, subprocess.Popen[bytes]] = {}
    try:
        for drafts in Drafts:
            asked = ["--speculative", f"{drafts}:{TOKENS[drafts]}"] if drafts in TOKENS else []
            # Without drafts, only the model of the checkpoint is loaded.
            model = models.get(drafts, models[Drafts.MTP])
            command = [sys.executable, "-m", "benchmarks.gpu.engine", str(model), "--out", str(outs[drafts])]
            with logs[drafts].open("wb") as log:
                engines[drafts] = subprocess.Popen(
                    [*command, *OPTIONS, *asked], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
                )
        ended = wait(engines, begun + SECONDS)
    finally:
        for engine in engines.values():
            engine.kill()
            engine.wait()
    # Failed engines come first: the others were ended because of them.
    for drafts in sorted(Drafts, key=lambda one: ended[one] is None):
        seen = logs[drafts].read_text()[-3000:]
        assert ended[drafts] is not None, f"{drafts}: not done after {SECONDS:.0f} s: {seen}"
        assert engines[drafts].returncode == 0, f"{drafts}: {seen}"
    return {
        drafts: {**json.loads(outs[drafts].read_text()), "seconds": (ended[drafts] or begun) - begun}
        for drafts in Drafts
    }


def wait(engines: Mapping[Drafts, subprocess.Popen[bytes]], deadline: float) -> dict[Drafts, float | None]:
    """Return when each process ended; None for those that had not by `deadline`, or when another one failed."""
    ended: dict[Drafts, float | None] = dict.fromkeys(engines)
    while time.monotonic() < deadline and None in ended.values():
        for drafts, engine in engines.items():
            if ended[drafts] is None and engine.poll() is not None:
                ended[drafts] = time.monotonic()
        if any(engine.returncode for engine in engines.values()):
            break
        time.sleep(0.2)
    return ended


@pytest.mark.parametrize("drafts", TOKENS)
def test_drafts_change_no_greedy_token_and_compile_nothing(
    drafts: Drafts, found: dict[Drafts, dict[str, Any]], page: Page
) -> None:
    plain, drafted = found[Drafts.NONE], found[drafts]
    counted = drafted["drafts"]
    accepted = counted["accepted_tokens"] / counted["draft_tokens"]
    compared = {order: differences(plain[order], drafted[order]) for order in ORDERS}
    same = "; ".join(
        f"{order}: {len(plain[order]) - other} of {len(plain[order])} the same, {wrong} no tie, {widest:.2f} nats"
        for order, (other, wrong, widest) in compared.items()
    )
    page.row(
        "Drafts", COLUMNS, f"{drafts}, {TOKENS[drafts]}", same, f"{accepted:.0%}",
        f"{1 + counted['accepted_tokens'] / counted['drafts']:.2f}", drafted["compilations"],
        f"{drafted['ready_s']:.1f} s", f"{drafted['seconds']:.1f} s",
    )  # fmt: skip
    assert plain["drafts"].get("drafts", 0) == 0
    assert all(len(run[order]) == 24 for run in (plain, drafted) for order in ORDERS)
    assert {order: wrong for order, (_, wrong, _) in compared.items()} == dict.fromkeys(ORDERS, 0)
    assert accepted > ACCEPTED
    assert drafted["compiled"] == []
