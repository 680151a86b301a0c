"""Report of a model with stock and with bundled kernels: `dsv4 verify`, `dsv4 bench` and `dsv4 report`, one GPU.

The models are nano and four layers of Flash with random weights (14 GB; `-k nano` or `-k slice` selects one). The stock
engine writes log-probabilities and speed to files, with which the bundled engine is compared afterwards. The report and
its data are written beside the page of results: `gpu-report-nano.html`, `gpu-report-nano.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from page import Page
from served import MANIFEST, flash_slice

from dsv4_testkit.harness import Deployment

if reason := needs.gpu() or needs.engine():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.timeout(2400)

STARTS_SECONDS = 900.0
"""vLLM's own kernels for four layers of Flash took 594 s on an H200 beside another engine that compiled."""

COMMAND_SECONDS = 330.0
"""More than the limit of each command."""
LARGEST_REPORT = 2 << 20
TOLERANCE = "0.25"
"""Nats. Stock kernels round differently, and a rounding changes the choice of experts: 0.164 in the mean with nano on
an H200 (2026-11-28), without a decisive difference. `dsv4 verify` also fails on scaled logits and decisive
differences."""
COLUMNS = ("kernels", "output tokens per second", "TTFT", "TPOT")


def document(deployment: Deployment, *words: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Return the JSON document of a command."""
    command, *options = words
    done = deployment.run(command, deployment.name, *options, "-o", "json", timeout=COMMAND_SECONDS)
    assert done.returncode in codes, f"{done.stdout}{done.stderr}\n{deployment.log()}\n{engine_logs(deployment)}"
    return dict(json.loads(done.stdout))


def engine_logs(deployment: Deployment) -> str:
    """Return the ends of the agents' and gateway's logs, which the deployment's end removes."""
    logs = [*deployment.directory.glob("i*/m*/agent.log"), *deployment.directory.glob("gateway*.log")]
    return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(logs))


def verify(deployment: Deployment, *words: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    return document(deployment, "verify", "--quick", "--weak", "--limit", "5m", *words, codes=codes)


def bench(deployment: Deployment, *words: str) -> dict[str, Any]:
    # Code 1: a figure is slower than in the other run, which the page and the report show.
    return document(deployment, "bench", "--quick", "--limit", "5m", *words, codes=(0, 1))


def up(deployment: Deployment, page: Page) -> None:
    seconds = deployment.up(STARTS_SECONDS)
    page.row("Engine", ("what", "here"), f"report, {deployment.name}: from `dsv4 up` to ready", f"{seconds:.1f} s")


def speed_row(page: Page, kernels: str, speed: dict[str, Any]) -> None:
    run = speed["runs"][0]
    assert run["failed"] == 0
    ttft, tpot = (f"{run[name]['p50'] * 1000:.1f} ms" for name in ("ttftSeconds", "tpotSeconds"))
    page.row("Stock and bundled", COLUMNS, kernels, f"{run['outputTokensPerSecond']:.0f}", ttft, tpot)


@pytest.fixture(scope="module", params=["nano", "slice"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def manifest(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the text of the manifest, with bundled kernels."""
    if model == "nano":
        yield MANIFEST
        return
    folder = tmp_path_factory.mktemp("weights") / "slice"
    yield flash_slice(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stock(model: str, manifest: str, tmp_path_factory: pytest.TempPathFactory, page: Page) -> Path:
    """Return a directory with the reference and the speed of the stock engine, which has ended."""
    folder = tmp_path_factory.mktemp("stock")
    own = manifest.replace("kernels: auto", 'kernels: "off"')
    assert own != manifest
    deployment = Deployment(f"{model}-stock", nodes=1, manifest=own)
    try:
        up(deployment, page)
        verify(deployment, "--export", str(folder / "reference.json"))
        speed_row(page, f"{model}, stock", bench(deployment, "--resume", str(folder / "speed.json")))
        return folder
    finally:
        deployment.destroy()


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders") / "order"


@pytest.fixture(scope="module")
def bundled(model: str, manifest: str, stock: Path, orders: Path, page: Page) -> Iterator[Deployment]:
    faults = {"DSV4_FAULT_FILE": str(orders)}
    deployment = Deployment(f"{model}-own", nodes=1, manifest=manifest, environment=faults)
    try:
        up(deployment, page)
        yield deployment
    finally:
        deployment.destroy()


def test_stock_and_bundled_kernels_in_a_report(
    model: str, bundled: Deployment, stock: Path, tmp_path: Path, page: Page
) -> None:
    found = verify(bundled, "--reference", str(stock / "reference.json"), "--tolerance", TOLERANCE)
    results = {each["name"]: each for each in found["results"]}
    assert results["oracle.reference"]["status"] == "ok"
    difference = results["oracle.reference"].get("figures")
    page.row("Engine", ("what", "here"), f"{model}, bundled against stock, log-probabilities", difference)
    speed = bench(bundled, "--against", str(stock / "speed.json"))
    speed_row(page, f"{model}, bundled", speed)
    page.row("Engine", ("what", "here"), f"{model}, bundled against stock, speed", json.dumps(speed["comparison"]))
    for name, content in (("verify", found), ("bench", speed)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    target = page.path.with_name(f"gpu-report-{model}.html")
    files = ("--verify", str(tmp_path / "verify.json"), "--bench", str(tmp_path / "bench.json"))
    done = bundled.run("report", bundled.name, "-f", str(target), *files, timeout=COMMAND_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(target.with_suffix(".json").read_text())
    assert target.stat().st_size < LARGEST_REPORT
    assert {"kernels", "memory", "verify", "bench", "machine"} <= report.keys()
    assert bundled.name not in target.read_text()


def test_wrong_logits_are_found(model: str, bundled: Deployment, orders: Path, tmp_path: Path, page: Page) -> None:
    reference = str(tmp_path / "reference.json")
    verify(bundled, "--export", reference)
    words = ("--only", "oracle.reference", "--reference", reference)
    (right,) = verify(bundled, *words)["results"]
    page.row(
        "Engine", ("what", "here"), f"{model}, bundled against itself, log-probabilities", right.get("figures", "")
    )
    orders.write_text(json.dumps({"kind": "logits", "scale": 1.01}))
    try:
        (wrong,) = verify(bundled, *words, codes=(1,))["results"]
    finally:
        orders.unlink()
    assert "logits are scaled by 1.01" in wrong["text"]
    page.row("Engine", ("what", "here"), f"{model}, logits 1 % too large, log-probabilities", wrong.get("evidence", ""))
