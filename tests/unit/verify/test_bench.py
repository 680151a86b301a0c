"""`dsv4 bench`: a run of the real load generator, files, comparisons, bounds, and messages for wrong options."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.cli import bench
from dsv4_operator.cli.main import run
from dsv4_operator.verify import speed
from dsv4_testkit.openai_server import Engine, serving
from dsv4_testkit.waiting import free_ports

KEY = "canary-key-1234"
QUICK = speed.cases([each for each in speed.PROFILES if each.name == "chat"], quick=True)[0]


def stored(path: Path, factor: float = 1.0, **fields: Any) -> Path:
    """Write a finished quick run of three repetitions."""
    found = []
    for part in (0.0, 0.001, 0.002):
        rates = dict.fromkeys(speed.RATES, 100 * (1 + part) / factor)
        times = dict.fromkeys(speed.TIMES, 0.1 * (1 + part) * factor)
        found.append(speed.Repetition({**rates, **times}, QUICK.requests, 0, 255.0, 32.0))
    row = speed.row(QUICK, 0, found).model_dump(mode="json", by_alias=True)
    values = {"dsv4": "1", "started": "2026-01-01T00:00:00+00:00", "model": "m", "engine": "", "generator": "g"}
    document = {"schema": 1, **values, "quick": True, "runs": [{**row, **fields}], "skipped": []}
    path.write_text(json.dumps(document))
    return path


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM, whose load generator is tested")
def test_the_figures_are_those_that_the_generator_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, file, printed = tmp_path / "key", tmp_path / "run.json", tmp_path / "printed"
    key.write_text(KEY)
    recording = f'set -o pipefail\nprintf "%s\\n" "$@" > {printed}.arguments\n{sys.executable} "$@" | tee {printed}'
    python = program(tmp_path / "python", recording)
    command = [
        "bench",
        "--quick",
        "--key-file",
        str(key),
        "--repeat",
        "1",
        "--concurrency",
        "4",
        "--python",
        str(python),
    ]
    with serving(Engine(key=KEY)) as url:
        assert run([*command, "--url", url, "--resume", str(file), "-o", "json", "--timeout", "60s"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document == json.loads(file.read_text())
    row = document["runs"][0]
    assert (row["profile"], row["promptClass"], row["concurrency"], row["failed"]) == ("chat", "prose", 4, 0)
    assert (row["requests"], row["warmupRequests"], row["measuredOutputTokens"]) == (8, 4, 32.0)
    assert row["measuredInputTokens"] == pytest.approx(256, rel=0.03)
    lines = dict(re.findall(r"^(.+?):\s+([\d.]+)\s*$", printed.read_text(), re.MULTILINE))
    assert float(lines["Successful requests"]) == 8
    assert float(lines["Request throughput (req/s)"]) == pytest.approx(row["requestsPerSecond"], abs=0.006)
    assert float(lines["Output token throughput (tok/s)"]) == pytest.approx(row["outputTokensPerSecond"], abs=0.006)
    for name, ours in (("TTFT", "ttftSeconds"), ("ITL", "itlSeconds"), ("E2EL", "requestSeconds")):
        for percentile in ("p50", "p95"):
            seconds = row[ours][percentile] or 0.0
            assert float(lines[f"{percentile.upper()} {name} (ms)"]) == pytest.approx(1000 * seconds, abs=0.006)
    everything = captured.out + captured.err + file.read_text() + Path(f"{printed}.arguments").read_text()
    assert KEY not in everything
    # Neither prompts nor the address of the endpoint.
    assert not re.search(r"127\.0\.0\.1|Question|sailor", captured.out + captured.err)


def test_a_stored_run_needs_no_generator_and_equals_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = stored(tmp_path / "run.json")
    with serving(Engine()) as url:
        command = ["bench", "--url", url, "--quick", "--resume", str(file), "--against", str(file)]
        assert run([*command, "--python", "/bin/false"]) == 0
    out = capsys.readouterr().out
    assert "0 of 3 figures are slower" in out
    assert "100.1 ±0.1%" in out


@pytest.mark.parametrize(("factor", "code"), [(1.06, 1), (1.01, 0), (0.9, 0)])
def test_a_slower_run_fails(factor: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = stored(tmp_path / "before.json"), stored(tmp_path / "after.json", factor)
    with serving(Engine()) as url:
        command = ["bench", "--url", url, "--quick", "--resume", str(after), "--against", str(before), "-o", "json"]
        assert run([*command, "--python", "/bin/false"]) == code
    changes = json.loads(capsys.readouterr().out)["comparison"]["changes"]
    assert {each["verdict"] for each in changes if each["figure"] in speed.JUDGED} == {
        "slower" if code else ("faster" if factor < 1 else "same")
    }


def test_failed_requests_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = stored(tmp_path / "run.json", failed=1)
    with serving(Engine()) as url:
        assert run(["bench", "--url", url, "--quick", "--resume", str(file), "--python", "/bin/false"]) == 1
    capsys.readouterr()


def test_a_run_ends_with_its_time_limit_and_keeps_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, pid = stored(tmp_path / "run.json"), tmp_path / "pid"
    python = program(tmp_path / "python", f"[ -e {pid} ] || trap '' TERM; echo $$ > {pid}; sleep 600 & wait; wait")
    command = ["bench", "--quick", "--concurrency", "1,2", "--resume", str(file), "--python", str(python)]
    began = time.monotonic()
    with serving(Engine()) as url:
        assert run([*command, "--url", url, "--limit", "5s"]) == 3
    assert time.monotonic() - began < 120
    captured = capsys.readouterr()
    assert "the time limit of 5.0 s is reached; raise --limit" in captured.err
    assert len(json.loads(file.read_text())["runs"]) == 1
    assert "chat" in captured.out
    with serving(Engine()) as url:
        assert run([*command, "--url", url, "--limit", "1s", "--concurrency", "2"]) == 3
    capsys.readouterr()
    # Rows of other options are kept.
    assert len(json.loads(file.read_text())["runs"]) == 1
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_run_ends_the_generator(number: signal.Signals, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    python = program(tmp_path / "python", f"echo $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 600")
    with serving(Engine()) as url:
        command = ["bench", "--url", url, "--quick", "--python", str(python)]
        code = f"import sys; from dsv4_operator.cli.main import run; sys.exit(run({command!r}))"
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while not pid.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            child = Path(f"/proc/{pid.read_text().strip()}")
            assert child.exists()
            process.send_signal(number)
            status = process.wait(60)
    deadline = time.monotonic() + 60
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists()
    assert status == (130 if number is signal.SIGINT else -number)


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("echo no module; exit 1", "ended with status 1: no module"),
        ("exit 0", "ended with status 0: no output"),
        (
            'for each; do case $each in --result-dir=*) echo "[]" > ${each#*=}/result.json;; esac; done',
            "unexpected format",
        ),
    ],
)
def test_a_generator_that_fails(script: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = program(tmp_path / "python", script)
    with serving(Engine()) as url:
        assert run(["bench", "--url", url, "--quick", "--python", str(python)]) == 1
    err = capsys.readouterr().err
    assert named in err
    assert "--python" in err


def test_the_limit_of_a_generator_follows_from_its_requests() -> None:
    times = [bench.limit(case, 10.0) for case in speed.cases(speed.PROFILES)]
    assert all(each >= bench.START_SECONDS + 20 for each in times)
    assert bench.limit(QUICK, 10.0) == bench.START_SECONDS + 80


def test_the_generator_gets_the_key_and_no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "other")
    found = bench.environment(KEY)
    assert found["OPENAI_API_KEY"] == KEY
    assert "OPENAI_API_KEY" not in bench.environment("")
    assert not [name for name in found if name.lower().endswith("_proxy") and name.lower() != "no_proxy"]
    assert found["PATH"] == os.environ["PATH"]


def test_an_endpoint_without_an_answer_and_one_with_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports(1)[0]
    assert run(["bench", "--url", f"http://127.0.0.1:{port}", "--python", "/bin/false"]) == 3
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
    with serving(Engine(key=KEY)) as url:
        assert run(["bench", "--url", url, "--python", "/bin/false"]) == 3
    assert "--key-file" in capsys.readouterr().err


def test_rows_that_do_not_fit_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = stored(tmp_path / "run.json")
    with serving(Engine(context=1024)) as url:
        command = ["bench", "--url", url, "--python", "/bin/false", "--quick"]
        assert run([*command, "--input", "256,4096", "--resume", str(file), "-o", "json"]) == 0
        skipped = json.loads(capsys.readouterr().out)["skipped"]
        assert [(each["inputTokens"], "1024" in each["reason"]) for each in skipped] == [(4096, True)]
        assert run([*command, "--input", "4096"]) == 2
    assert "--input 256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--profile", "nope"], "--profile 'nope'"),
        (["--concurrency", "1,x"], "--concurrency '1,x'"),
        (["--concurrency", "0"], "--concurrency '0'"),
        (["--input", ""], "--input ''"),
        (["--model", "nope"], "--model 'nope'"),
        (["--python", "/nonexistent"], "--python '/nonexistent'"),
        (["--resume", "/nonexistent/file"], "'/nonexistent'"),
        (["--against", "/nonexistent"], "'/nonexistent'"),
        (["--against", "/dev/null"], "--against '/dev/null' is no result of dsv4 bench"),
        (["--resume", "/dev/null"], "--resume '/dev/null' is no result of dsv4 bench"),
        (["--repeat", "0"], "--repeat"),
        (["--timeout", "soon"], "--timeout"),
        (["--limit", "0s"], "--limit"),
        (["nano"], "--url and the name 'nano'"),
    ],
)
def test_wrong_options(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine()) as url:
        defaults = [] if "--python" in options else ["--python", "/bin/false"]
        assert run(["bench", "--url", url, *defaults, *options]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert not captured.out


def test_files_of_other_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = stored(tmp_path / "run.json")
    with serving(Engine()) as url:
        command = ["bench", "--url", url, "--python", "/bin/false"]
        assert run([*command, "--resume", str(file)]) == 2
        assert "with another --quick" in capsys.readouterr().err
        assert run([*command, "--quick", "--concurrency", "3", "--against", str(file)]) == 2
        assert "has none of the rows of this run" in capsys.readouterr().err


def test_a_python_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert run(["bench", "--url", "http://127.0.0.1:1"]) == 2
    assert "--python" in capsys.readouterr().err


GENERATOR = """#!{python}
import json, pathlib, sys
given = dict(word[2:].split("=", 1) for word in sys.argv[3:] if "=" in word)
with open({record!r}, "a") as file:
    file.write(given["base-url"] + "\\n")
number = len(open({record!r}).readlines())
slow = 1.08 if given["base-url"].endswith(":{slow}") else 1.0
times = {{f"p{{p}}_{{name}}_ms": 100 * slow * (1 + number % 3 / 1000)
         for p in (50, 95) for name in ("ttft", "tpot", "itl", "e2el")}}
result = {{"completed": 8, "failed": 0, "duration": slow, "request_throughput": 8 / slow,
          "output_throughput": 256 / slow * (1 + number % 3 / 1000), "total_input_tokens": 2048,
          "total_output_tokens": 256, **times}}
pathlib.Path(given["result-dir"], given["result-filename"]).write_text(json.dumps(result))
"""


@pytest.mark.parametrize(("slower", "code"), [("this", 1), ("other", 0), ("none", 0)])
def test_another_endpoint_in_alternation(
    slower: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The generator of this test writes fixed figures; vLLM's is tested above."""
    record, python, file = tmp_path / "record", tmp_path / "python", tmp_path / "run.json"
    key = tmp_path / "key"
    key.write_text(KEY)
    with serving(Engine()) as url, serving(Engine(key=KEY)) as other:
        ports = {"this": url, "other": other, "none": ":0/v1"}
        port = ports[slower].removesuffix("/v1").rpartition(":")[2]
        python.write_text(GENERATOR.format(python=sys.executable, record=str(record), slow=port))
        python.chmod(0o755)
        command = ["bench", "--url", url, "--quick", "--against", other, "--against-key-file", str(key)]
        command += ["--python", str(python), "--repeat", "4", "--resume", str(file)]
        assert run([*command, "-o", "json"]) == code
        document = json.loads(capsys.readouterr().out)
        one, two = url.removesuffix("/v1"), other.removesuffix("/v1")
        assert record.read_text().split() == [one, two, two, one] * 2
        comparison = document["comparison"]
        assert comparison["engine"] == "0.33.0"
        judged = {each["verdict"] for each in comparison["changes"] if each["figure"] in speed.JUDGED}
        assert judged == {{"this": "slower", "other": "faster", "none": "same"}[slower]}
        assert [each["repetitions"] for each in (*document["runs"], *document["against"])] == [4, 4]
        # A finished row is not measured again; without --against it is a plain run.
        assert run([*command, "-o", "json"]) == code
        again = json.loads(capsys.readouterr().out)
        assert again == document
        assert run(["bench", "--url", url, "--quick", "--python", str(python), "--resume", str(file)]) == 0
        assert "--against" not in capsys.readouterr().out
    assert len(record.read_text().split()) == 8
    assert KEY not in file.read_text()


TIMED = """#!{python}
import json, pathlib, sys, time
given = dict(word[2:].split("=", 1) for word in sys.argv[3:] if "=" in word)
time.sleep({seconds})
times = {{f"p{{p}}_{{name}}_ms": 100.0 for p in (50, 95) for name in ("ttft", "tpot", "itl", "e2el")}}
result = {{"completed": 8, "failed": 0, "duration": {seconds}, "request_throughput": 8.0, "output_throughput": 256.0,
          "total_input_tokens": 2048, "total_output_tokens": 256, **times}}
pathlib.Path(given["result-dir"], given["result-filename"]).write_text(json.dumps(result))
"""


@pytest.mark.parametrize(
    ("watts", "named"),
    [(200.0, ""), (0.0, "no gateway of dsv4"), (-1.0, "not every GPU of group 0 reports its power")],
)
def test_energy(
    watts: float, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_POWER_SECONDS", 0.05)
    python = tmp_path / "python"
    python.write_text(TIMED.format(python=sys.executable, seconds=3.0))
    python.chmod(0o755)
    engine = Engine(key=KEY)
    engine.watts = watts
    key = tmp_path / "key"
    key.write_text(KEY)
    with serving(engine) as url:
        command = ["bench", "--url", url, "--key-file", str(key), "--quick", "--repeat", "1", "--python", str(python)]
        assert run([*command, "-o", "json", "--resume", str(tmp_path / "run.json")]) == 0
        row = json.loads(capsys.readouterr().out)["runs"][0]
        assert run([*command, "--resume", str(tmp_path / "run.json")]) == 0
    captured = capsys.readouterr()
    if not named:
        assert row["gpuWatts"] == pytest.approx(200.0)
        assert row["joulesPerOutputToken"] == pytest.approx(200.0 * 3 / 256)
        assert "N/A" not in captured.out
        return
    assert row["gpuWatts"] is row["joulesPerOutputToken"] is None
    assert named in row["energyMissing"]
    assert captured.out.split().count("N/A") == 2
    assert f"energy: N/A, {row['energyMissing']}" in captured.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--against-key-file", "key"], "--against-key-file needs --against URL"),
        (["--against", "http://"], "--against 'http://' is no URL"),
        (["--against", "http://127.0.0.1:{port}"], "error: --against: http://127.0.0.1:{port}"),
    ],
)
def test_wrong_other_endpoints(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_ports(1)[0])
    with serving(Engine()) as url:
        command = ["bench", "--url", url, "--quick", "--python", "/bin/false"]
        assert run([*command, *(word.replace("{port}", port) for word in words)]) in (2, 3)
    assert text.replace("{port}", port) in capsys.readouterr().err
