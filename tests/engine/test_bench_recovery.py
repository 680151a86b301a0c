"""`dsv4 bench recovery` on a serving nano engine: real signals, the figures of the status, and no lost request."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dsv4_testkit.harness import Deployment


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_and_stops_under_load(tmp_path: Path) -> None:
    deployment = Deployment("recov", restarts=6)
    try:
        print(f"up {deployment.up():.1f} s")
        began = time.monotonic()
        words = ("--fault", "kill-engine", "--fault", "stop-engine", "--fault", "kill-worker", "--repeat", "1")
        done = deployment.run("bench", "recovery", *words, "--yes", "-o", "json", "--limit", "8m", timeout=500)
        print(done.stderr, f"{time.monotonic() - began:.0f} s")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        rows = {each["fault"]: each for each in found["runs"]}
        assert list(rows) == ["kill-engine", "stop-engine", "kill-worker"]
        causes = {name: list(each["causes"]) for name, each in rows.items()}
        assert causes == {
            "kill-engine": ["EngineCoreDied"],
            "stop-engine": ["EngineHung"],
            "kill-worker": ["RayWorkerDied"],
        }
        for each in rows.values():
            assert each["lost"] == 0
            assert each["requests"] >= 8
            assert each["levels"] == {"1": 1}
            assert 0 <= each["detectSeconds"] < each["recoverSeconds"] < each["outageSeconds"] + 10
            assert each["detectSeconds"] < (3 if each["fault"].startswith("kill") else 30)
        # The status has the same failures, and no other restart.
        group = deployment.group()
        assert [each["cause"] for each in group["history"]] == ["EngineCoreDied", "EngineHung", "RayWorkerDied"]
        assert group["totalRestarts"] == 3
        # Three of six restarts are left: a run of three faults would leave none.
        refused = deployment.run("bench", "recovery", *words, "--yes")
        assert refused.returncode == 2
        assert "has 3 left" in refused.stderr
        assert deployment.run("bench", "recovery", *words).returncode == 2, "no --yes and no terminal"
        file = tmp_path / "recovery.json"
        file.write_text(done.stdout)
        report = deployment.run("report", "--recovery", str(file), "-o", "json")
        assert report.returncode == 0, report.stderr
        runs = json.loads(report.stdout)["recovery"]["runs"]
        assert [each["fault"] for each in runs] == list(rows)
    finally:
        deployment.destroy()
