"""The nano model gives the same results on one rank, on two ranks over Ray, and in transformers.

Every figure with a bound is printed (`pytest -s`); docs/decisions/0002-nano-model.md explains the bounds.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsv4_runtime.nano.checkpoint import make
from dsv4_runtime.nano.recipe import vocabulary, word_ids

HERE = Path(__file__).parent
LENGTHS = (5, 8, 13, 21, 34, 55, 64, 89, 100, 120, 127, 128, 129, 144, 200, 233, 256, 257, 300, 400)
NEW_TOKENS = 20
SCORED = (40, 300)
BEYOND_THE_INDEXER = 2300  # more than 4 * index_topk tokens, so ratio 4 has to choose

# Distances between log-probabilities over the whole vocabulary, in nats.
MEAN_BOUND = 0.1
P99_BOUND = 0.5
SAME_CHOICE_BOUND = 0.9

# Logits are bfloat16: from 8 on, neighbours are 1/16 apart. Two correct implementations that round differently diverge
# at margins of less than two steps.
TIE = 0.125
TIES_ALLOWED = 2

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


def prompt(length: int) -> list[int]:
    """Return words and bytes that end with a word, so that the model has a favourite for the next token."""
    source = random.Random(length)
    words, tokens = word_ids(), range(16, len(vocabulary()))
    return [source.choice(words) if source.random() < 0.5 else source.choice(tokens) for _ in range(length - 1)] + [
        source.choice(words)
    ]


@dataclass(frozen=True)
class Answers:
    one_rank: dict[str, Any]
    two_ranks: dict[str, Any]
    transformers: dict[str, Any]


@pytest.fixture(scope="module")
def cluster_helpers() -> Any:
    sys.path.insert(0, str(HERE))
    try:
        import equivalence_cluster
    finally:
        sys.path.remove(str(HERE))
    return equivalence_cluster


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, cluster_helpers: Any) -> Answers:
    folder = tmp_path_factory.mktemp("equivalence")
    model = make(folder / "nano")
    run: Callable[..., None] = cluster_helpers.run_child

    def write(name: str, scored: tuple[int, ...]) -> Path:
        path = folder / name
        requests = {"generate": [prompt(length) for length in LENGTHS], "max_tokens": NEW_TOKENS}
        path.write_text(json.dumps({**requests, "score": [prompt(length) for length in scored]}))
        return path

    full, short = write("full.json", (*SCORED, BEYOND_THE_INDEXER)), write("short.json", SCORED)
    one, two, figures = (folder / name for name in ("one.json", "two.json", "figures.json"))
    run("equivalence_vllm.py", model, full, one, 1, log=folder / "one.log", timeout_s=300)
    with cluster_helpers.two_ray_nodes(folder) as address:
        where = {"RAY_ADDRESS": address, "VLLM_HOST_IP": cluster_helpers.HEAD}
        run("equivalence_vllm.py", model, short, two, 2, log=folder / "two.log", timeout_s=300, **where)
    run("equivalence_transformers.py", model, full, one, figures, log=folder / "transformers.log", timeout_s=300)
    return Answers(*(json.loads(path.read_text()) for path in (one, two, figures)))


def test_two_ranks_over_ray_generate_the_same_tokens_as_one_rank(answers: Answers) -> None:
    pairs = list(zip(answers.one_rank["generated"], answers.two_ranks["generated"], strict=True))
    margins = sorted(margin for one, _ in pairs for margin in one["margins"])
    equal, ties, wrong = 0, [], []
    for length, (one, two) in zip(LENGTHS, pairs, strict=True):
        parting = next((at for at in range(NEW_TOKENS) if one["tokens"][at] != two["tokens"][at]), None)
        if parting is None:
            equal += 1
        else:
            margin = one["margins"][parting]
            what = f"prompt of {length} tokens, answer's token {parting}: margin {margin:.3f} nats"
            (ties if margin < TIE else wrong).append(what)
    print(
        f"\n{equal} of {len(pairs)} prompts equal, {len(margins)} tokens; ties that parted: {ties or 'none'};"
        f" margins: least {margins[0]:.3f}, 1% below {margins[len(margins) // 100]:.3f}, median"
        f" {margins[len(margins) // 2]:.2f} nats"
    )
    print(f"seconds: one rank {answers.one_rank['seconds']}, two ranks {answers.two_ranks['seconds']}")
    assert not wrong, "; ".join(wrong)
    assert len(ties) <= TIES_ALLOWED


def test_two_ranks_give_the_distributions_of_one_rank(answers: Answers) -> None:
    pairs = zip(
        answers.one_rank["scored"], answers.two_ranks["scored"], strict=False
    )  # one rank scored one prompt more
    for length, (one, two) in zip(SCORED, pairs, strict=True):
        differences = sorted(abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))
        mean = sum(differences) / len(differences)
        print(f"\n{length} tokens, two ranks against one: mean {mean:.4f}, most {differences[-1]:.3f} nats")
        assert mean <= MEAN_BOUND


def test_the_model_generates_different_answers(answers: Answers) -> None:
    generated = [tuple(answer["tokens"]) for answer in answers.one_rank["generated"]]
    variety = sum(len(set(tokens)) for tokens in generated) / len(generated)
    different = len(set(generated))
    print(
        f"\n{different} different answers of {len(generated)}; {variety:.1f} different tokens of {NEW_TOKENS} in each"
    )
    assert different >= 0.9 * len(generated)  # two prompts that end in the same word may continue alike
    assert variety >= NEW_TOKENS / 2


def test_transformers_reads_every_tensor(answers: Answers) -> None:
    assert answers.transformers["loading"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}


@pytest.mark.parametrize("variant", ["plain", "fp8 cache"])
def test_vllm_agrees_with_transformers(answers: Answers, variant: str) -> None:
    for length, found in zip((*SCORED, BEYOND_THE_INDEXER), answers.transformers["variants"][variant], strict=True):
        print(f"\n{length} tokens, vLLM against transformers ({variant}): {_shown(found)}")
        assert found["mean"] <= MEAN_BOUND
        assert found["p99"] <= P99_BOUND
        assert found["same choice"] >= SAME_CHOICE_BOUND


def test_the_bounds_are_of_the_size_of_bfloat16_itself(answers: Answers) -> None:
    for length, found in zip(SCORED, answers.transformers["variants"]["bfloat16"], strict=True):
        print(f"\n{length} tokens, transformers in bfloat16 against float32: {_shown(found)}")
        assert found["mean"] <= MEAN_BOUND <= 20 * found["mean"]


@pytest.mark.parametrize("missing", ["sinks", "half the window", "ratio 4", "ratio 128"])
def test_the_comparison_detects_a_missing_mechanism(answers: Answers, missing: str) -> None:
    found = answers.transformers["variants"][f"without {missing}"][-1]
    print(f"\ntransformers without {missing}: {_shown(found)}")
    assert found["mean"] > MEAN_BOUND


def _shown(found: dict[str, float]) -> str:
    return (
        f"mean {found['mean']:.4f}, p99 {found['p99']:.3f}, most {found['max']:.3f} nats,"
        f" same first choice {found['same choice']:.1%} of {found['positions']:.0f}"
    )
