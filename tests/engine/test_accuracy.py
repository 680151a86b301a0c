"""`dsv4 verify --accuracy` with lm-eval on a nano engine: needs a Python with lm-eval in DSV4_TEST_LM_EVAL."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4_testkit.harness import Deployment

PYTHON = os.environ.get("DSV4_TEST_LM_EVAL", "")
WORDS = ("river", "stone", "cloud", "north", "paper", "green", "seven", "alpha")


def task(folder: Path, name: str, answers: dict[str, str]) -> None:
    """Write a task: prompts and their exact continuations."""
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\u0000"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(document))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON, reason="DSV4_TEST_LM_EVAL names no Python with lm-eval")
def test_a_task_whose_answers_are_those_of_the_engine(tmp_path: Path) -> None:
    deployment = Deployment("accur", nodes=1)
    try:
        deployment.up()
        answers = {}
        for word in WORDS:
            prompt = f"The {word} is"
            answers[prompt] = deployment.complete(prompt, tokens=8)["choices"][0]["text"]
        task(tmp_path, "own_answers", answers)
        # Six of eight match the engine.
        wrong = {prompt: text if number < 6 else f"{text}x" for number, (prompt, text) in enumerate(answers.items())}
        task(tmp_path, "some_answers", wrong)
        words = ("--accuracy", "own_answers=1.0", "--accuracy", "some_answers=0.8", "--accuracy", "dsv4_arithmetic=0")
        began = time.monotonic()
        options = ("--tasks", str(tmp_path), "--python", PYTHON, "--questions", "8", "--only", "accuracy", "-o", "json")
        done = deployment.run("verify", *words, *options)
        print(f"{time.monotonic() - began:.0f} s\n{done.stdout}")
        assert done.returncode == 1, done.stderr
        found = {each["name"]: each for each in json.loads(done.stdout)["results"]}
        assert found["accuracy.own_answers"]["figures"]["accuracy"] == 1.0
        assert found["accuracy.own_answers"]["status"] == "ok"
        some = found["accuracy.some_answers"]
        assert (some["status"], some["figures"]["accuracy"]) == ("failed", 0.75)
        assert found["accuracy.dsv4_arithmetic"]["status"] == "ok"
    finally:
        deployment.destroy()
