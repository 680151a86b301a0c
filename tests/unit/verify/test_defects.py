"""Each check finds its defects in a server that responds like vLLM; without a defect none of the checks fails.

The table lists every defect of the server. The last test fails if a check finds no defect.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_operator.cli.main import run
from dsv4_operator.cli.verify import CHECKS
from dsv4_testkit.openai_server import DEFECTS, Engine, serving

REFERENCE, SELF = "oracle.reference", "oracle.self"
MATRIX = tuple(check.name for check in CHECKS if check.group == "generation")
REASONING = tuple(name for name in MATRIX if not name.endswith("-off"))
CALLS = tuple(check.name for check in CHECKS if check.group == "tools" and check.name != "tools.no-tool")
STREAMED_CALLS = ("tools.streamed", "tools.reasoning-streamed", "tools.parallel-streamed")
PARALLEL = ("tools.parallel", "tools.parallel-streamed")
SCHEMA = ("structured.json", "structured.json-streamed")

# Defect -> checks that find it with any weights, and checks that need a model with sensible answers.
FOUND_BY: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "scaled logits": ((REFERENCE,), ()),
    "noisy logits": ((REFERENCE, "speculative.tokens"), ()),
    "swapped expert": ((REFERENCE, "speculative.tokens"), ()),
    "truncated kv page": ((REFERENCE, "context.reach"), ("context.needles",)),
    "stale prefix cache": (("context.prefix-cache",), ()),
    "decode differs from prefill": ((SELF,), ()),
    "batch crosstalk": (("smoke.parallel",), ()),
    "repeated tokens": (("smoke.completions", REFERENCE), ("generation.english-off", "generation.code-off")),
    "unseeded": (("smoke.seed",), ()),
    "ignored stop": (("smoke.stop",), ()),
    "stop only in whole answers": (("smoke.stop",), ()),
    "wrong usage": (("smoke.usage", "smoke.completions"), ()),
    "wrong stream usage": (("smoke.stream",), ()),
    "no done event": (("smoke.stream", "smoke.stop"), ("structured.json-streamed", *STREAMED_CALLS)),
    "hanging stream": (("smoke.stream",), ()),
    "lost chunk": (("smoke.stream",), ("structured.json-streamed",)),
    "buffered stream": (("smoke.stream",), ()),
    "wrong template": (("smoke.template",), ()),
    "no generation prompt": (("smoke.template",), ()),
    "leaked reasoning": ((), ("smoke.thinking", *REASONING, "tools.reasoning", "tools.reasoning-streamed")),
    "reasoning always off": ((), ("smoke.thinking", *REASONING)),
    "reasoning always on": ((), ("smoke.thinking",)),
    "leaked tool markup": ((), CALLS),
    "merged parallel calls": ((), PARALLEL),
    "broken arguments": ((), CALLS),
    "no finish for calls": ((), CALLS),
    "ids repeated": ((), PARALLEL),
    "mojibake": ((), MATRIX),
    "replacement characters": ((), MATRIX),
    "wrong language": ((), MATRIX),
    "early end": ((), MATRIX),
    "endless answer": ((), MATRIX),
    "schema ignored": ((), SCHEMA),
    "constraints ignored": (("structured.choice", "structured.regex"), ()),
    "no message stop": (("smoke.messages",), ()),
    "errors are 500": (("smoke.errors",), ()),
    "errors are 200": (("smoke.errors",), ()),
    "max tokens ignored": (("smoke.chat", "smoke.completions", "smoke.messages"), ()),
    "rejected drafts": (("speculative.acceptance",), ()),
    "drafts change tokens": (("speculative.tokens", SELF), ()),
    "broken weights": ((), ("smoke.capability",)),
    "no context length": (("smoke.models", "smoke.long-prompt"), ()),
    "unstable numerics": (("oracle.repetition",), ()),
    "needless calls": ((), ("tools.no-tool",)),
    "truncated under pressure": (("context.pressure",), ()),
    "garbled under pressure": (("context.pressure",), ()),
    "failed under pressure": (("context.pressure",), ()),
    "wrong after pressure": (("context.pressure",), ()),
}

Verify = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    def verified(url: str, *options: str) -> tuple[int, dict[str, Any]]:
        code = run(["verify", "--url", url, "-o", "json", *options])
        out, err = capsys.readouterr()
        assert out, err
        return code, json.loads(out)

    return verified


def failed(document: dict[str, Any]) -> set[str]:
    return {each["name"] for each in document["results"] if each["status"] == "failed"}


@pytest.mark.parametrize("weak", [False, True], ids=["capable", "weak"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_the_defect_is_found(defect: str, weak: bool, verify: Verify) -> None:
    serving_only, content = FOUND_BY[defect]
    expected = set(serving_only) if weak else {*serving_only, *content}
    if not expected:
        pytest.skip("needs a model that answers")
    only = [option for name in sorted(expected) for option in ("--only", name)]
    # Long enough that simultaneous requests overlap.
    delay = 0.3 if "pressure" in defect else 0.1 if defect == "batch crosstalk" else 0.002
    timeout = "5s" if defect == "hanging stream" else "30s"
    with serving(Engine("", weak=weak)) as good, serving(Engine(defect, weak=weak, delay=delay)) as url:
        code, document = verify(url, "--against", good, "--timeout", timeout, *only)
    results = {each["name"]: each for each in document["results"]}
    assert failed(document) == expected, results
    assert code == 1
    for each in results.values():
        assert each["text"]
        assert each["remedy"]


@pytest.mark.parametrize("number", range(20))
def test_no_false_alarm(number: int, verify: Verify) -> None:
    """Logits have the noise of kernels whose order of summation varies; capable and weak models in turn."""
    weak, noise = bool(number % 2), 0.002 * (number % 10)
    engines = [Engine("", weak=weak, noise=noise, noise_seed=2 * number + each) for each in (0, 1)]
    with serving(engines[0]) as good, serving(engines[1]) as url:
        code, document = verify(url, "--against", good)
    assert failed(document) == set(), [each for each in document["results"] if each["status"] == "failed"]
    assert code == 0
    ok = {each["name"] for each in document["results"] if each["status"] == "ok"}
    assert {REFERENCE, SELF, "smoke.template", "context.prefix-cache", "speculative.tokens"} <= ok
    assert weak == (not ok & {*MATRIX, *CALLS})


@pytest.mark.parametrize("tokens", [0, 4])
def test_seeded_outputs_may_part_in_a_batch_but_not_at_once(tokens: int, verify: Verify) -> None:
    """Four layers of Flash with random weights on an H200: outputs of one seed parted at the fourth token."""
    engine = Engine("", weak=True)
    engine.parts_after, engine.batch = tokens, 5
    with serving(engine) as url:
        code, document = verify(url, "--only", "smoke.seed")
    (result,) = document["results"]
    assert (code, result["status"]) == ((0, "ok") if tokens else (1, "failed")), result
    if tokens:
        assert result["figures"]["common_prefix_same_seed"] == 1.0
    else:
        assert "simultaneous outputs have only" in result["text"]


def test_every_check_finds_a_defect() -> None:
    assert set(FOUND_BY) == set(DEFECTS)
    found = {name for checks in FOUND_BY.values() for group in checks for name in group}
    assert found == {check.name for check in CHECKS}
    assert {check.name for check in CHECKS if check.content} <= {name for _, more in FOUND_BY.values() for name in more}
