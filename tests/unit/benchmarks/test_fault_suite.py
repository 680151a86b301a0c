"""Results of the fault suite from its observations, and the outcomes that its client distinguishes."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from dsv4_runtime.contract import Cause
from dsv4_runtime.health.samples import ProcessView, RankView, Sample
from dsv4_testkit.faults import report, series
from dsv4_testkit.faults.actions import How
from dsv4_testkit.faults.judge import Result, judge, moment
from dsv4_testkit.faults.load import Outcome, Request, ask, outage
from dsv4_testkit.faults.matrix import BY_NAME, MATRIX
from dsv4_testkit.faults.soak import Watch
from dsv4_testkit.faults.store import Store
from dsv4_testkit.faults.system import Verdict, increase
from dsv4_testkit.faults.table import FAULTS, PROCESS_DEATHS, Kind

STRUCK = 1000.0
STOP = BY_NAME["SIGSTOP worker of rank 1"]
LOSS = BY_NAME["all frames of member 1 lost for 8 s"]
SHM = BY_NAME["/dev/shm of member 0 full"]


KILLED_GATEWAY = BY_NAME["kill -9 gateway"]


def judged(fault: Any, verdicts: list[Verdict], *, replaced: float | None, restarts: int) -> Result:
    more = {"restarts": restarts, "replayed": None, "patience": 90.0, "replaced": replaced}
    return judge("dsv4", fault, 1, 0.5, STRUCK, verdicts, [], **more)


def result(fault: Any, verdicts: list[Verdict], requests: list[Request] = [], restarts: int | None = 1) -> Result:  # noqa: B006
    return judge("dsv4", fault, 1, 0.5, STRUCK, verdicts, requests, restarts=restarts, replayed=None, patience=90.0)


def answered(ended: float) -> Request:
    return Request(ended - 1.0, ended, False, Outcome.ANSWERED)


def test_names_are_unique_and_causes_are_of_the_contract():
    assert len(BY_NAME) == len(MATRIX) > len(FAULTS) >= 18
    for fault in MATRIX:
        assert {Cause(cause) for cause in fault.causes} or fault.kind in (Kind.NONE, Kind.OWN)
    assert {fault.level for fault in PROCESS_DEATHS} == {1, 2}


def test_the_increase_of_a_counter_whose_gateways_are_replaced():
    first, second = 'replayed_total{gateway="0"}', 'replayed_total{gateway="1"}'
    assert increase({first: 40.0, second: 3.0}, {first: 41.0, second: 5.0}) == 3.0
    assert increase({first: 40.0, second: 3.0}, {first: 1.0, second: 5.0}) == 3.0
    assert increase({first: 40.0}, {second: 2.0}) == 2.0
    assert increase(None, {first: 1.0}) is None


def test_a_right_verdict():
    found = result(STOP, [Verdict(STRUCK + 4.0, "EngineHung", 1, 1, "progress", STRUCK + 20.0)])
    assert (found.detected, found.recovered, found.missed, found.false_restarts) == (4.0, 20.0, False, 0)
    assert (found.cause_right, found.culprit_right, found.level_right) == (True, True, True)


def test_a_wrong_cause_and_culprit_and_a_restart_too_many():
    found = result(STOP, [Verdict(STRUCK + 4.0, "EngineCoreDied", 0, 2, "exit")], restarts=3)
    assert (found.cause_right, found.culprit_right, found.level_right) == (False, False, False)
    assert found.false_restarts == 2


def test_a_run_without_a_verdict_is_a_miss_without_a_cause():
    found = result(STOP, [], restarts=0)
    assert (found.verdict, found.missed, found.cause_right, found.detected) == ("Healthy", True, None, None)


def test_a_verdict_where_nothing_died_is_a_false_restart():
    assert result(LOSS, [], restarts=0).false_restarts == 0
    found = result(LOSS, [Verdict(STRUCK + 5.0, "NodeLost", 1, 2)], restarts=1)
    assert (found.verdict, found.false_restarts, found.missed, found.cause_right) == ("Dead", 1, False, None)


def test_a_system_that_names_no_cause_is_not_judged_by_it():
    found = result(STOP, [Verdict(STRUCK + 4.0, by="health")], restarts=None)
    assert (found.missed, found.cause_right, found.culprit_right, found.level_right) == (False, None, None, None)
    assert result(LOSS, [Verdict(STRUCK + 4.0, by="health")], restarts=None).false_restarts == 1


def test_the_death_that_the_action_itself_causes_does_not_count():
    first = Verdict(STRUCK + 0.2, "EngineCoreDied", 0, 1)
    assert result(SHM, [first]).missed
    tried = [Verdict(STRUCK + 9.0, "SharedMemoryFull", 0, 1), Verdict(STRUCK + 18.0, "SharedMemoryFull", 0, 2)]
    found = result(SHM, [first, *tried], restarts=3)
    assert (found.cause_right, found.detected, found.missed, found.false_restarts) == (True, 9.0, False, 0)
    assert (found.level, found.level_right) == (2, True), "what repaired it in the end"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([990.0, 999.0], None),
        # One response was in flight at the fault: the outage ends with the later one.
        ([999.0, 1000.2, 1020.0, 1021.0], 20.0),
        ([999.0, 1001.0, 1002.0], 1.0),
        ([1007.0], 7.0),
    ],
    ids=["none after", "a straggler", "no outage", "none before"],
)
def test_the_outage_ends_with_the_longest_wait(ends: list[float], expected: float | None):
    assert outage([answered(end) for end in ends], STRUCK) == expected


def test_moments_are_random_and_the_same_again():
    moments = {moment(0, fault, run) for fault in FAULTS for run in (1, 2, 3)}
    assert len(moments) == 3 * len(FAULTS)
    assert all(0.5 <= found <= 5.0 for found in moments)
    assert moment(7, STOP, 2) == moment(7, STOP, 2) != moment(8, STOP, 2)


def test_results_are_kept_and_found_again(tmp_path: Path):
    store = Store(tmp_path / "results.json")
    found = result(STOP, [Verdict(STRUCK + 4.0, "EngineHung", 1, 1, "progress", STRUCK + 20.0)], [answered(1030.0)])
    store.add(found)
    again = Store(tmp_path / "results.json")
    assert again.has("dsv4", STOP.name, 1)
    assert not again.has("dsv4", STOP.name, 2)
    assert not again.has("bare vLLM", STOP.name, 1)
    assert again.runs[0].to_json() | {"errors": ()} == found.to_json()
    assert "1970-01-01" in again.machines()[0]


def test_the_page_has_the_measured_results(tmp_path: Path):
    store = Store(None)
    store.add(result(STOP, [Verdict(STRUCK + 4.0, "EngineHung", 1, 1, "progress", STRUCK + 20.0)], [answered(1030.0)]))
    before = f"# Faults\n\nBy hand.\n{report.BEGIN}\nold\n{report.END}\nMore by hand.\n"
    text = report.update(before, store)
    assert text.startswith(f"# Faults\n\nBy hand.\n{report.BEGIN}\n|")
    assert text.endswith(f"\n{report.END}\nMore by hand.\n")
    assert "old" not in text
    assert report.update(text, store) == text
    with pytest.raises(ValueError, match="needs a line"):
        report.update("# Faults\n", store)
    expectations, results = text.split("## Results")
    assert all(f"| {fault.name} |" in expectations for fault in MATRIX)
    row = next(line for line in results.splitlines() if line.startswith(f"| {STOP.name} |"))
    assert "| 4.0 | EngineHung | 1 of 1 | 1 of 1 | 1 | 30.0 | 1 | 1 | - | 0 | 0 | 0 | 0 |" in row
    assert "| hang | 1 | 4.00 | 4.00 | 4.00 | 6 | 0 |" in text
    assert "Beside bare vLLM" not in text
    assert "## Results" not in report.page(Store(None))
    for late in (2.0, 9.0):
        store.add(result(STOP, [Verdict(STRUCK + late, "EngineHung", 1, 1, "progress", STRUCK + 20.0)]))
    assert f"| {STOP.name} | 3 | 2.0 / 4.0 / 9.0 | EngineHung | 3 of 3 | 3 of 3 | 1 | 30.0 |" in report.page(store)


def test_a_process_of_dsv4_is_replaced_without_an_effect_on_the_engine():
    assert KILLED_GATEWAY.kind is Kind.OWN
    found = judged(KILLED_GATEWAY, [], replaced=0.7, restarts=0)
    assert (found.verdict, found.detected, found.missed, found.false_restarts) == ("Replaced", 0.7, False, 0)
    assert "replaced after 0.7 s" in report.line(found)
    assert judged(KILLED_GATEWAY, [], replaced=None, restarts=0).missed
    dead = judged(KILLED_GATEWAY, [Verdict(STRUCK + 2.0, "EngineCoreDied", 0, 1)], replaced=0.7, restarts=1)
    assert (dead.verdict, dead.false_restarts, dead.cause_right) == ("Dead", 1, None)


def test_the_matrix_has_every_process_and_way():
    names = [fault.name for fault in MATRIX]
    assert len(set(names)) == len(names)
    for how in How:
        for process in ("gateway", "loop", "standby server"):
            assert f"{how} {process}" in names
        for process in ("API process", "EngineCore", "Ray worker of rank 1"):
            assert f"{how} {process} of a start" in names


def test_a_stored_series_equals_the_heads_samples_with_shifted_times():
    ranks = (RankView(0, 7063.5, processes=(ProcessView("worker", "S", 0.0),)), RankView(1, 7061.25, round_trip=0.0004))
    seen = [Sample(time=7000.0 + t, answered=7001.5, stepped=6990.0, outstanding=2, ranks=ranks) for t in range(64)]
    kept = TypeAdapter(list[Sample]).validate_python(series.trimmed([asdict(sample) for sample in seen], 30.0))
    assert (len(kept), kept[0].time, kept[-1].time) == (31, 1000.0, 1030.0)
    assert (kept[0].answered, kept[0].stepped, kept[0].outstanding) == (968.5, 957.0, 2)
    assert kept[-1].ranks == (
        RankView(0, 1030.5, processes=ranks[0].processes),
        RankView(1, 1028.25, round_trip=0.0004),
    )


def test_a_soak_separates_suspicions_during_losses_from_others():
    watch = Watch()
    for phase, lines in (("losses", ["Healthy", "Suspect", "Suspect"]), ("pauses", ["Suspect", "Dead", "unreachable"])):
        watch.phase = phase
        watch.follow(json.dumps([health, {"in": phase}]) for health in lines)
    assert (watch.count("Suspect"), watch.count("Suspect", during="losses"), watch.count("Dead")) == (3, 2, 1)
    assert watch.count("Healthy", "Suspect", "Dead", "Starting") == 5, "the unreachable is no sample"
    assert watch.first("Dead") == [{"in": "pauses"}]


def test_the_page_has_the_resource_usage_of_the_agents():
    store = Store(None)
    agents = [{"rank": 0, "core": 0.0081, "mebibytes": 55.2}, {"rank": 1, "core": 0.004, "mebibytes": 54.0}]
    store.note("costs", {"struck": STRUCK, "minutes": 2.0, "idle": agents, "serving": agents})
    assert "idle: rank 0 0.81% of a core and 55 MiB, rank 1 0.40% of a core and 54 MiB; serving:" in report.page(store)


@pytest.mark.parametrize(("share", "expected"), [(50, 2.0), (95, 4.0), (100, 4.0), (1, 1.0)])
def test_percentiles(share: float, expected: float):
    assert report.percentile([4.0, 1.0, 3.0, 2.0], share) == expected


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TOKEN = event(choices=[{"text": "a", "finish_reason": None}])
LAST = event(choices=[{"text": "", "finish_reason": "length"}])
ERROR = event(error={"message": "the engine died"})
DONE = b"data: [DONE]\n\n"
WHOLE = json.dumps({"choices": [{"text": "a", "finish_reason": "length"}]}).encode()


@pytest.fixture
def server() -> Iterator[tuple[int, dict[str, bytes]]]:
    says: dict[str, bytes] = {}

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline().strip().lower()) != b"":
                length = int(line.split(b":")[1]) if line.startswith(b"content-length") else length
            self.rfile.read(length)
            self.wfile.write(says["answer"])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        yield listener.server_address[1], says
        listener.shutdown()
        thread.join(60)


@pytest.mark.parametrize(
    ("stream", "answer", "outcome"),
    [
        (True, HEAD + TOKEN + LAST + DONE, Outcome.ANSWERED),
        (True, HEAD + TOKEN + ERROR + DONE, Outcome.ENDED),
        (True, HEAD + ERROR, Outcome.FAILED),
        (True, HEAD + TOKEN, Outcome.SILENT),
        (True, HEAD + TOKEN + LAST, Outcome.SILENT),
        (True, HEAD + TOKEN + DONE, Outcome.SILENT),
        (True, HEAD, Outcome.FAILED),
        (True, b"", Outcome.FAILED),
        (True, b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", Outcome.FAILED),
        (False, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE, Outcome.ANSWERED),
        (False, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE[:9], Outcome.FAILED),
    ],
)
def test_ways_to_end(server: tuple[int, dict[str, bytes]], stream: bool, answer: bytes, outcome: Outcome):
    port, says = server
    says["answer"] = answer
    assert ask(port, "/v1/completions", {"stream": stream}, 60.0).outcome is outcome
