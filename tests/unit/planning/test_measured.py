"""Memory figures in logs of starts: parsed, compared with the plan, and used for the next plan of the same engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4_operator.api import DeploymentStatus, GroupStatus, MeasuredItem, MeasuredStatus, parse
from dsv4_operator.planning import catalog_facts
from dsv4_operator.planning.catalog import GIB, machine
from dsv4_operator.planning.memory import Measured, MemoryPlan, memory_plan
from dsv4_operator.planning.memory.records import MemoryPool
from dsv4_operator.planning.memory.runs import TERMS, comparisons, largest_deviation, runs, terms
from dsv4_operator.planning.setup import measured_of, memory_of, setup
from dsv4_runtime.contract import KV_CACHE
from dsv4_runtime.util.log_lines import MemoryLog, logged_terms, memory_differences, read_memory_log

NEW = """\
(EngineCore pid=1) INFO [core.py:123] Initializing a V1 LLM engine (v0.26.1) with config: model='/models/ds4'
(Worker_TP1 pid=401) INFO [model_runner.py:305] Model loading took 80.99 GiB and 25.139530 seconds
(Worker_TP0 pid=400) INFO [model_runner.py:1314] Estimated MRV2 CUDA graph memory: 0.64 GiB total (0.31 GiB retained)
(Worker_TP1 pid=401) INFO [gpu_worker.py:675] Available KV cache memory: 8.31 GiB
(Worker_TP0 pid=400) INFO [gpu_worker.py:675] Available KV cache memory: 8.28 GiB
(EngineCore pid=1) INFO GPU KV cache size: 1,249,001 tokens, Maximum concurrency for 1,048,576 tokens per request: 1.19x
(Worker_TP0 pid=400) INFO [gpu_worker.py:855] Free memory on device (93.83/95.01 GiB) on startup. Desired GPU memory \
utilization is (0.975, 92.63 GiB). Actual usage is 82.69 GiB for consumed memory (weights + non-torch), 1.66 GiB for \
peak activation, and 0.19 GiB for CUDAGraph memory. Current kv cache memory in use is 8.28 GiB.
""".splitlines()
OLD = [
    "Actual usage is 42.46 GiB for weight, 1.84 GiB for peak activation, 2.43 GiB for non-torch memory, and 0.0 GiB",
    "(Worker_TP0) INFO Available KV cache memory: 50.57 GiB",
]


def run(name: str) -> MemoryPlan:
    return next(each.plan for each in runs() if each.name == name)


def test_a_log_is_read() -> None:
    log = read_memory_log(["INFO Available KV cache memory: 1.00 GiB", *NEW])
    assert log.kv == round(8.28 * GIB), "of the last start in it, on the rank that has least"
    assert (log.weights, log.graphs, log.consumed) == tuple(round(size * GIB) for size in (80.99, 0.64, 82.69))
    assert (log.concurrency, log.max_model_len, log.kv_tokens, log.utilization) == (1.19, 1_048_576, 1_249_001, 0.975)
    old = read_memory_log(OLD)
    assert (old.weights, old.activations, old.non_torch) == tuple(round(size * GIB) for size in (42.46, 1.84, 2.43))


@pytest.mark.parametrize(
    ("lines", "figures"),
    [
        (
            [
                "ValueError: To serve at least one request with the model's max seq len (1048576), 11.04 GiB KV cache "
                "is needed, which is larger than the available KV cache memory (10.33 GiB). Based on the available "
                "memory, the estimated maximum model length is 921856."
            ],
            {"needed": 11.04, "kv": 10.33, "max_model_len": 1_048_576},
        ),
        (
            ["ValueError: (3.79 GiB needed, which is larger than the available KV cache memory (3.12 GiB)"],
            {"needed": 3.79, "kv": 3.12},
        ),
        (["(Worker_TP0 pid=300) INFO Available KV cache memory: -1.42 GiB"], {"kv": -1.42}),
        (
            ["INFO Initial free memory 110.1 GiB, reserved 12.0 GiB memory for KV Cache as specified"],
            {"reserved": 12.0},
        ),
    ],
)
def test_a_start_that_failed_is_read(lines: list[str], figures: dict[str, float]) -> None:
    log = read_memory_log(lines)
    plain = ("max_model_len",)
    for name, value in figures.items():
        assert getattr(log, name) == (value if name in plain else round(value * GIB))


def test_a_start_that_failed_is_compared() -> None:
    plan = run("2 Sparks, b12x, K5, 1M, 0.85")
    line = "11.04 GiB KV cache is needed, which is larger than the available KV cache memory (3.00 GiB)"
    found = list(terms(plan, read_memory_log([line])))
    assert [(term.name, term.within) for term in found] == [("KV cache", False), ("one request", True)]
    largest = largest_deviation(found)
    assert largest is not None
    assert largest.name == "KV cache"
    given = memory_plan(plan.model, plan.machine, plan.parallel, replace(plan.engine, kv_cache_memory=12 * GIB))
    (term,) = terms(given, read_memory_log(["reserved 12.0 GiB memory for KV Cache"]))
    assert term.within
    (term,) = terms(given, read_memory_log(["reserved 11.5 GiB memory for KV Cache"]))
    assert not term.within


def test_a_measured_start_narrows_the_interval_to_two_percent() -> None:
    plan = run("2 Sparks, b12x, K5, 1M, 0.90")
    log = read_memory_log(["Available KV cache memory: 19.22 GiB"])
    found = memory_differences(plan.budget_items(), log, KV_CACHE)
    again = memory_plan(plan.model, plan.machine, plan.parallel, plan.engine, Measured("x", "2026-11-23", found))
    rank = again.ranks[again.tightest]
    assert rank.kv_available / GIB == pytest.approx(19.22, abs=0.01)
    assert (rank.kv_most - rank.kv_least) / rank.kv_available == pytest.approx(0.04, abs=1e-6)


def test_a_log_is_compared_term_by_term() -> None:
    plan = run("2 RTX, 0731, K5, 1M, 0.975")
    found = {term.name: term for term in terms(plan, read_memory_log(NEW))}
    assert list(found) == ["weights", "non-torch memory", "activations", "CUDA graphs", "KV cache"]
    assert all(term.within for name, term in found.items() if name != "non-torch memory")
    assert found["activations"].logged == round(1.66 * GIB) - round(0.64 * GIB), "less the estimate of the graphs"


def test_the_next_plan_uses_measured_memory() -> None:
    plan = run("2 RTX, 0731, K5, 1M, 0.975")
    for log in (read_memory_log(NEW), read_memory_log(NEW[:5])):
        found = memory_differences(plan.budget_items(), log, KV_CACHE)
        again = memory_plan(plan.model, plan.machine, plan.parallel, plan.engine, Measured("x", "2026-11-23", found))
        assert again.ranks[0].kv_available / GIB == pytest.approx(8.28, abs=0.05), "its card had 95.01 GiB"
        assert "measured here on 2026-11-23" in {item.note for item in again.ranks[0].items}
        assert again.ranks[0].kv_most - again.ranks[0].kv_least < plan.ranks[0].kv_most - plan.ranks[0].kv_least
    fewer = replace(plan.engine, max_num_batched_tokens=2048)
    moved = memory_plan(plan.model, plan.machine, plan.parallel, fewer, again.measured)
    assert moved.ranks[0].kv_available > again.ranks[0].kv_available, "settings still count"


def test_measurements_apply_to_one_model_image_and_machine() -> None:
    spec = {
        "model": {"variant": "Flash", "source": {"path": "/m/DeepSeek-V4-Flash"}},
        "topology": {"hardware": "GB10", "nodesPerGroup": 2},
        "engine": {"maxModelLen": 131_072},
    }
    made = parse({"apiVersion": "dsv4.dev/v1alpha1", "kind": "DSV4Deployment", "metadata": {"name": "a"}, "spec": spec})
    facts = catalog_facts(made, machine(made.spec.topology.hardware), state_root="/s", weights_root="/w")
    plain = setup(made, facts)
    of = memory_of(made, plain.model, plain.machine, plain.profile)
    assert of == "V4-Flash in the default image on gb10"
    same = replace(facts, measured=(Measured(of, "2026-11-23", {"non-torch memory": GIB}),))
    assert setup(made, same).memory.ranks[0].kv_available == plain.memory.ranks[0].kv_available - GIB
    for other in ("V4-Flash in the default image on gb10-64gb", "V4-Pro in the default image on gb10"):
        others = replace(facts, measured=(Measured(other, "2026-11-23", {"non-torch memory": GIB}),))
        assert setup(made, others).memory == plain.memory


def test_measurements_do_not_apply_to_another_profile_or_build_of_an_image() -> None:
    """Differences refer to the planned figures of one profile: with a build that has them, they would count twice."""
    image = "registry.example/own@sha256:" + "ab" * 32

    def found(engine: dict[str, object], start: dict[str, object] | None = None) -> int:
        """Return the KV cache of `engine` after a start with `start`, which had 5 GiB more non-torch memory."""
        made, started = (
            parse(
                {
                    "apiVersion": "dsv4.dev/v1alpha1",
                    "kind": "DSV4Deployment",
                    "metadata": {"name": "a"},
                    "spec": {
                        "model": {"variant": "Flash", "source": {"path": "/m/DeepSeek-V4-Flash"}},
                        "topology": {"hardware": "GB10", "nodesPerGroup": 2},
                        "engine": {"maxModelLen": 131_072, **each},
                    },
                }
            )
            for each in (engine, start or engine)
        )
        facts = catalog_facts(made, machine(made.spec.topology.hardware), state_root="/s", weights_root="/w")
        before = setup(started, facts)
        of = memory_of(started, before.model, before.machine, before.profile)
        facts = replace(facts, measured=(Measured(of, "2026-11-23", {"non-torch memory": 5 * GIB}),))
        return setup(made, facts).memory.ranks[0].kv_available // GIB

    build = {"base": "spark-b12x", "nonTorchGib": 1.5}
    more = {"base": "spark-b12x", "nonTorchGib": 6.5}
    assert found({"build": more}, {"build": build}) == found({"build": build})
    assert found({"image": image, "build": more}, {"image": image, "build": build}) == found({"build": build})
    other = {"image": image, "profile": "spark-b12x"}
    assert found(other, {"image": image, "profile": "vllm-0.33"}) == found(other) + 5
    stock = {"image": "vllm/vllm-openai:v0.33.0"}
    assert found({**stock, "profile": "vllm-0.33"}, stock) == found(stock), "the profile that the image has by itself"


def test_an_incarnation_does_not_change_its_own_plan() -> None:
    told = MeasuredStatus(of="m", incarnation=3, time=1.8e9, items=(MeasuredItem(item="weights", difference=-5),))
    status = DeploymentStatus(groups=(GroupStatus(incarnation=3, measured=told),))
    assert measured_of(status, 3) == ()
    (found,) = measured_of(status, 4)
    assert (found.of, found.date, dict(found.differences)) == ("m", "2027-01-15", {"weights": -5})


def test_every_term_has_starts_with_a_source_and_a_date() -> None:
    for term in TERMS:
        found = list(comparisons(term))
        assert found, f"{term} rests on nothing"
        assert all(each.run.source and each.run.date > "2026-04" for each in found)
        assert all(each.least <= each.planned <= each.most for each in found)


@pytest.mark.parametrize(
    "log",
    [MemoryLog(weights=1, consumed=2, peak=3, graphs=1), MemoryLog(weights=1, non_torch=1, activations=1, graphs=1)],
    ids=["since 0.27", "to 0.26"],
)
def test_every_item_of_the_budget_is_part_of_a_logged_figure(log: MemoryLog) -> None:
    """Otherwise a measured start attributes its memory to another item."""
    known = {name for _, names in logged_terms(log) for name in names}
    items = {item for run in runs() for rank in run.plan.ranks for item in rank.items}
    assert {item.name for item in items if item.where is MemoryPool.BUDGET} <= known
