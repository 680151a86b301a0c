"""A real Prometheus with rules, for tests of alerts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusterkit import build

from dsv4_testkit.waiting import free_port

needed = pytest.mark.skipif(
    not {"all", "cluster"} & set(os.environ.get("DSV4_TEST_REQUIRE", "").split(","))
    and not build.folder(build.MODULES["prometheus"]).is_dir(),
    reason="Prometheus is not built yet (`make cluster-build`)",
)
FASTER = 20
"""Thirty minutes become 90 s, an hour three minutes."""


def faster(text: str) -> str:
    """Return rules with shorter durations."""
    units = {"m": 60, "h": 3600, "d": 86400}

    def seconds(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) * units[found[3]] // FASTER}s{found[4]}"

    return re.sub(r"(\[|for: )(\d+)([mhd])(\]|$)", seconds, text, flags=re.MULTILINE)


@contextlib.contextmanager
def running(
    folder: Path, ports: Mapping[str, int], labels: Mapping[str, Mapping[str, str]], rules: Path
) -> Iterator[str]:
    """Run Prometheus; yield its address.

    Args:
        folder: for its files.
        ports: of this machine to scrape, by name.
        labels: of the samples of each.
        rules: rule file.
    """
    jobs = [
        {
            "job_name": name,
            "honor_labels": True,
            "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": dict(labels[name])}],
        }
        for name, port in ports.items()
    ]
    config = folder / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": jobs,
            }
        )
    )
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                build.built("prometheus") / "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def ask(url: str, query: str) -> list[Any]:
    """Return the result of an instant query."""
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=60) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
    return found


def firing(url: str) -> set[str]:
    """Return the names of the firing alerts."""
    return {one["metric"]["alertname"] for one in ask(url, 'ALERTS{alertstate="firing"}')}
