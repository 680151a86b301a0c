"""`dsv4 verify --accuracy`: lm-eval on an endpoint, with a threshold, a limit and resumption.

The tests with lm-eval need a Python that has it: this one, or that of DSV4_TEST_LM_EVAL.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.cli.main import run
from dsv4_operator.cli.output import CommandError
from dsv4_operator.cli.verify import Accuracy, judge_accuracy, parse_accuracy
from dsv4_operator.verify.checks import Result, Status
from dsv4_operator.verify.content import ARITHMETIC, arithmetic_files
from dsv4_testkit.openai_server import Engine, serving

PYTHON = os.environ.get("DSV4_TEST_LM_EVAL", sys.executable)
HAS_IT = sys.executable != PYTHON or importlib.util.find_spec("lm_eval") is not None
KEY = "canary-key-1234"

real = pytest.mark.skipif(not HAS_IT, reason="no lm-eval; DSV4_TEST_LM_EVAL names a Python that has it")


def test_the_built_in_questions_have_right_answers() -> None:
    """The answers follow from the numbers in the text, in the order of the four kinds."""
    files = arithmetic_files("/tasks")
    rows = [json.loads(line) for line in files["questions.jsonl"].splitlines()]
    assert len({row["prompt"] for row in rows}) == 200
    kinds = set()
    for row in rows:
        question = row["prompt"].rpartition("Question: ")[2]
        one, two, three = map(int, re.findall(r"\d+", question))
        word = question.split()[0] + question.split()[1]
        kinds.add(word)
        if word == "Atrain":
            # The text is "2 wagons of 11 seats, and 3 are taken".
            one, two = two, one
        expected = {
            "Adahas": one + two * three,
            "Atrain": one * two - three,
            "Abaker": one + two - three,
            "Wangreads": one * two + three,
        }
        assert int(row["answer"]) == expected[word]
        assert row["prompt"].count("Answer: ") == 3
    assert len(kinds) == 4
    assert json.loads(files[f"{ARITHMETIC}.yaml"])["dataset_kwargs"]["data_files"]["test"] == "/tasks/questions.jsonl"


@pytest.mark.parametrize("text", ["gsm8k", "gsm8k=", "gsm8k=1.5", "gsm8k=-1", "=0.5", "a/b=0.5", "gsm8k=nan", "x=y=0"])
def test_a_wrong_task_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--url", "http://127.0.0.1:1", "--accuracy", text]) == 2
    assert f"--accuracy {text!r} is not TASK=MINIMUM" in capsys.readouterr().err


def test_a_metric_may_have_a_filter() -> None:
    assert parse_accuracy("gsm8k:exact_match,strict-match=0.9") == Accuracy("gsm8k", "exact_match,strict-match", 0.9)
    assert parse_accuracy("gsm8k=1") == Accuracy("gsm8k", "", 1.0)


FOUND = {
    "alias": "gsm8k",
    "exact_match,strict-match": 0.5,
    "exact_match_stderr,strict-match": "N/A",
    "exact_match,flexible-extract": 0.75,
    "sample_len": 64,
}


@pytest.mark.parametrize(
    ("metric", "minimum", "status", "value"),
    [
        ("", 0.5, Status.OK, 0.5),
        ("", 0.51, Status.FAILED, 0.5),
        ("exact_match,flexible-extract", 0.75, Status.OK, 0.75),
        ("exact_match,flexible-extract", 0.76, Status.FAILED, 0.75),
        ("exact_match", 0.5, Status.OK, 0.5),
    ],
)
def test_a_value_below_the_minimum_is_a_defect(metric: str, minimum: float, status: Status, value: float) -> None:
    result = judge_accuracy(Accuracy("gsm8k", metric, minimum), FOUND, 64, partial(Result, "accuracy.gsm8k"))
    assert (result.status, result.figures["accuracy"], result.figures["questions"]) == (status, value, 64)
    assert result.figures["standard_error"] == pytest.approx((value * (1 - value) / 64) ** 0.5, abs=1e-4)


def test_an_unknown_metric_names_those_of_the_task() -> None:
    with pytest.raises(CommandError, match="the task has exact_match,strict-match, exact_match,flexible-extract"):
        judge_accuracy(Accuracy("gsm8k", "acc", 0.5), FOUND, 64, partial(Result, "accuracy.gsm8k"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tasks", "."], "--tasks needs --accuracy"),
        (["--python", "/bin/false"], "--python needs --accuracy"),
        (["--accuracy", "a=0", "--tasks", "/absent"], "--tasks '/absent' is no directory"),
        (["--accuracy", "a=0", "--python", "/absent"], "--python '/absent' is no program"),
    ],
)
def test_wrong_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--url", "http://127.0.0.1:1", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="this Python has lm-eval")
def test_without_lm_eval_the_error_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--url", "http://127.0.0.1:1", "--accuracy", "gsm8k=0.9"]) == 2
    assert "install dsv4[accuracy], or name a Python that has it with --python" in capsys.readouterr().err


def test_a_failed_evaluation_shows_its_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'could not reach the hub' >&2\nexit 1\n")
    python.chmod(0o755)
    with serving(Engine()) as url:
        command = ["verify", "--url", url, "--only", "accuracy", "--accuracy", "gsm8k=0.9", "--python", str(python)]
        assert run(command) == 1
    assert f"--accuracy gsm8k: lm-eval of {python} failed: could not reach the hub" in capsys.readouterr().err


def test_a_stored_value_is_used_for_its_minimum_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python, file = tmp_path / "python", tmp_path / "state.json"
    python.write_text("#!/bin/sh\necho 'evaluated again' >&2\nexit 1\n")
    python.chmod(0o755)
    with serving(Engine()) as url:
        command = ["verify", "--url", url, "--resume", str(file)]
        assert run([*command, "--only", "smoke.models"]) == 0
        command += ["--python", str(python), "--only", "accuracy", "--accuracy"]
        stored = json.loads(file.read_text())
        stored["results"].append({"name": "accuracy.gsm8k", "status": "ok", "figures": {"minimum": 0.9}})
        file.write_text(json.dumps(stored))
        assert run([*command, "gsm8k=0.9"]) == 0
        assert run([*command, "gsm8k=0.95"]) == 1
    assert "evaluated again" in capsys.readouterr().err


def results(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    return {each["name"]: each for each in found["results"]}


def slow_down(engine: Engine, requests: int) -> None:
    deadline = time.monotonic() + 60
    while engine.requests < requests and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.delay = 60.0


@real
def test_a_limit_ends_a_run_and_a_resumed_run_sends_only_the_remaining_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, key = tmp_path / "run.json", tmp_path / "key"
    key.write_text(KEY)
    with serving(engine := Engine(key=KEY)) as url:
        command = ["verify", "--url", url, "--key-file", str(key), "--only", "accuracy", "--resume", str(file)]
        command += ["--accuracy", f"{ARITHMETIC}=0", "--questions", "64", "--python", PYTHON, "-o", "json"]
        # After the first responses to lm-eval, the others take longer than the limit.
        slow = threading.Thread(target=slow_down, args=(engine, 24))
        slow.start()
        assert run([*command, "--limit", "25s"]) == 3
        slow.join()
        first = results(capsys)[f"accuracy.{ARITHMETIC}"]
        assert first["reason"] == "TimeLimit"
        asked = engine.requests
        engine.delay = 0.0
        assert run([*command, "--limit", "5m"]) == 0
        second = results(capsys)[f"accuracy.{ARITHMETIC}"]
        probes = 8
        # At least 24 requests, less the probes and the requests without a response so far.
        assert engine.requests - asked <= 64 + probes - (24 - probes - 8), "answers of the first run are kept"
        assert second["figures"]["questions"] == 64
        assert sorted(each.name for each in tmp_path.iterdir()) == ["key", "run.json"], "answers are removed"
        asked = engine.requests
        assert run([*command, "--limit", "5m"]) == 0
        assert engine.requests <= asked + probes
    assert KEY not in file.read_text() + capsys.readouterr().out


@real
def test_an_unknown_task(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine()) as url:
        command = ["verify", "--url", url, "--only", "accuracy", "--accuracy", "absent=0.5", "--python", PYTHON]
        assert run(command) == 1
    assert "there is no task 'absent'" in capsys.readouterr().err
