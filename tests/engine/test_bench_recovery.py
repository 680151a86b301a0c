"""`dsv4 bench recovery` on a serving nano engine: real signals, the figures of the status, and no lost request."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dsv4_runtime.util.files import LOG_FIELDS
from dsv4_testkit.harness import Deployment


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_and_stops_under_load(tmp_path: Path) -> None:
    deployment = Deployment("recov", restarts=6, environment={"DSV4_LOG_FORMAT": "json"})
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
        check_json_logs(deployment)
        file = tmp_path / "recovery.json"
        file.write_text(done.stdout)
        report = deployment.run("report", "--recovery", str(file), "-o", "json")
        assert report.returncode == 0, report.stderr
        runs = json.loads(report.stdout)["recovery"]["runs"]
        assert [each["fault"] for each in runs] == list(rows)
    finally:
        deployment.destroy()


def check_json_logs(deployment: Deployment) -> None:
    """Check that every line of agents, loop and gateways is JSON with its fields."""
    agents = sorted(deployment.directory.glob("i*/m*/agent.log"))
    gateways = sorted(deployment.directory.glob("gateway*.log"))
    assert len(agents) == 2
    assert len(gateways) >= 2
    generations = set()
    for file in (*agents, *gateways, deployment.directory / "loop.log"):
        found = [json.loads(line) for line in file.read_text().splitlines()]
        assert found
        assert all(set(LOG_FIELDS) <= set(each) for each in found)
        assert {each["deployment"] for each in found[1:]} == {"recov"}
        if file in agents:
            # The first line may precede the plan.
            assert {(each["group"], each["incarnation"], each["rank"]) for each in found[1:]} == {
                (0, 1, agents.index(file))
            }
            generations |= {each["generation"] for each in found[1:]}
    assert {1, 2, 3, 4} <= generations
    lines = deployment.run("logs", deployment.name, "--tail", "20").stdout
    assert '"deployment": "recov"' in lines
