"""vLLM's own parser accepts every rendered command line: of stored manifests and of random ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from plan import facts

from dsv4_operator.api import DSV4Deployment, Hardware, InvalidDeployment, load, parse
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_operator.planning.images import profile_named, profiles
from dsv4_testkit.planspecs import manifest

ROOT = Path(__file__).parents[3]
VLLM = "0.32.0"
"""The installed version; the flags of the other versions are in planning/images/surface."""
KEPT = [*sorted(ROOT.glob("examples/*.yaml")), *sorted(ROOT.glob("tests/unit/planning/golden/*/manifest.yaml"))]
RANDOM = 2000


def rendered(made: DSV4Deployment) -> Iterator[dict[str, object]]:
    try:
        plan = plan_group(made, facts(made), group=0, incarnation=1)
    except PlanRefused:
        return
    yield {"args": list(plan.engine.args), "env": plan.environment(0)}


def with_profile(made: DSV4Deployment, name: str) -> DSV4Deployment:
    engine = made.spec.engine.model_copy(update={"profile": name, "image": None})
    return made.model_copy(update={"spec": made.spec.model_copy(update={"engine": engine})})


def lines() -> Iterator[dict[str, object]]:
    names = [one.name for one in profiles() if one.surface_name == f"vllm-{VLLM}"]
    for file in KEPT:
        made = load(file.read_text(), lambda: Hardware.H100)
        for name in names:
            yield from rendered(with_profile(made, name))
    source = random.Random(20_261_123)
    for _ in range(RANDOM):
        document = manifest(source.choice)
        document["spec"].setdefault("engine", {})["profile"] = source.choice(names)
        document["spec"]["engine"].pop("image", None)
        try:
            made = parse(document)
        except InvalidDeployment:
            continue
        yield from rendered(made)


def test_vllm_takes_every_command_line() -> None:
    asked = list(lines())
    assert len(asked) > RANDOM // 10
    legacy = [line for line in asked if line["env"].get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND") == "0"]  # type: ignore[attr-defined]
    assert legacy, "the executor that cannot schedule asynchronously is among them"
    refused = dict(legacy[0])
    refused["args"] = [word.replace("--no-async-scheduling", "--async-scheduling") for word in refused["args"]]  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("command_lines_vllm.py")],
        input=json.dumps([*asked, refused]),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *said, last = json.loads(done.stdout.splitlines()[-1])
    assert last == "`ray` does not support async scheduling yet.", "the test sees what it is for"
    wrong = [(text, line["args"]) for text, line in zip(said, asked, strict=True) if text]
    assert not wrong, f"{len(wrong)} of {len(asked)}: {wrong[0]}"


def test_the_profiles_of_this_vllm_are_tried() -> None:
    assert profile_named("vllm-0.32").surface_name == profile_named("vllm-cpu-0.32").surface_name == f"vllm-{VLLM}"
