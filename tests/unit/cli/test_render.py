from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from dsv4_operator.api import ConditionType, GroupPhase, KvCacheStatus, Reason, SecretKeyRef
from dsv4_operator.api.spec import ApiKeysSource
from dsv4_operator.backends.local.supervisor import LoopReport
from dsv4_operator.cli import render
from dsv4_operator.cli.sources.base import DeploymentView
from dsv4_runtime.contract import Cause, Phase, StartStep
from dsv4_runtime.contract.gateway import FatalKind, FatalRequest, FatalRequests, Kind


def shown(make: Any, status: Any, *, running: bool = True) -> DeploymentView:
    return DeploymentView(make.deployment(status), running, make.now - 300)


def test_one_deployment(make: Any) -> None:
    assert render.deployment_text(shown(make, make.status()), make.now, wide=False) == (
        "NAME   READY   PHASE     MODEL   RESTARTS   AGE   ENDPOINT\n"
        "nano   1/1     Serving   Nano    0          5m    http://127.0.0.1:8000/v1\n"
        "\n"
        "RANK   ROLE     ADDRESS      PHASE     MESSAGE\n"
        "0      Head     10.88.0.10   Serving   -\n"
        "1      Worker   10.88.0.11   Serving   -"
    )


def test_the_kv_cache_beside_its_plan(make: Any) -> None:
    found = KvCacheStatus(tokens=13_809, concurrency=13.486, planned_tokens=14_000)
    text = render.deployment_text(shown(make, make.status(make.group(kv_cache=found))), make.now, wide=False)
    assert text.endswith(
        "\n\nKV cache 13,809 tokens (planned 14,000, -1.4 %), 13.49 concurrent requests of the maximum length"
    )


def test_wide(make: Any) -> None:
    item = shown(make, make.status(make.failed_group(make.failure(), total_restarts=2)))
    assert render.deployments_table([item], make.now, wide=True) == (
        "NAME   READY   PHASE     MODEL   RESTARTS   AGE   ENDPOINT                   "
        "HARDWARE   NODES   INCARNATION   CAUSE            DASHBOARD\n"
        "nano   1/1     Serving   Nano    2          5m    http://127.0.0.1:8000/v1   "
        "CPU        2       1             EngineCoreDied   http://127.0.0.1:8265"
    )


def test_a_reason_when_it_is_not_ready(make: Any) -> None:
    waiting = make.condition(ConditionType.READY, true=False, message="0 of 1 groups are ready")
    item = shown(make, make.status(ready=False, conditions=(waiting,)))
    assert "\n\nGroupsNotReady: 0 of 1 groups are ready\n\n" in render.deployment_text(item, make.now, wide=False)


def test_ready_text_can_be_pasted(make: Any) -> None:
    found = make.deployment(make.status())
    metadata = found.metadata.model_copy(update={"annotations": {render.NETWORK_ANNOTATION: "private: own addresses"}})
    text = render.ready_text(
        found.model_copy(update={"metadata": metadata}), 41.2, "/state/nano/token", " --state-dir /state"
    )
    assert text == (
        "nano is serving after 41 s.\n"
        "\n"
        "endpoint    http://127.0.0.1:8000/v1\n"
        "network     private: own addresses\n"
        "dashboard   http://127.0.0.1:8265  (token: /state/nano/token)\n"
        "chat        dsv4 chat nano --state-dir /state\n"
        "\n"
        "curl -sS http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        '  -d \'{"model": "nano", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 24}\''
    )
    curl = text[text.index("curl") :]
    echoed = subprocess.run(
        ["sh", "-c", curl.replace("curl", "printf '%s\\n'", 1)], capture_output=True, text=True, check=True
    )
    assert json.loads(echoed.stdout.splitlines()[-1])["model"] == "nano"


def test_ready_text_of_an_api_with_keys(make: Any) -> None:
    found = make.deployment(make.status())
    keys = ApiKeysSource(secret_key_ref=SecretKeyRef(name="nano-api", key="keys"))
    gateway = found.spec.gateway.model_copy(update={"api_keys": keys})
    found = found.model_copy(update={"spec": found.spec.model_copy(update={"gateway": gateway})})
    lines = render.ready_text(found, 41.2, "/state/nano/token", "").splitlines()
    assert "key         `dsv4 connect FILE` shows it" in lines
    assert lines[-2].endswith("-H 'Content-Type: application/json' -H 'Authorization: Bearer KEY' \\")


def test_why_when_nothing_died(make: Any) -> None:
    assert render.why_text(shown(make, make.status()), make.now) == (
        "nano (Serving)\n"
        "  verdict   Healthy since 2026-09-21 14:12:20\n"
        "  cause     nothing has died\n"
        "  budget    5 of 5 restarts left within 1h"
    )


def test_why_reports_the_progress_of_a_start(make: Any) -> None:
    message = "loading shards 2/4, 20.1/78.4 GB at 3.10 GB/s (26 %)"
    members = (make.member(0, Phase.LOADING, message), make.member(1, Phase.JOINING))
    item = shown(make, make.status(make.group(GroupPhase.STARTING, members=members), ready=False))
    assert f"\n  starting   rank 0 Loading: {message}\n" in render.why_text(item, make.now)
    assert render.why_document(item, make.now)["starting"] == f"rank 0 Loading: {message}"
    assert "starting" not in render.why_document(shown(make, make.status()), make.now)


def test_why_names_requests_that_engines_died_of(make: Any) -> None:
    requests = tuple(FatalRequest(id=name, size=12345, engines=3, time=make.now) for name in ("one", "two"))
    kind = FatalKind(kinds=(Kind.STRUCTURED_OUTPUT, Kind.TOOLS), engines=2, seconds=540.0)
    fatal = FatalRequests(requests=requests, kinds=(kind,))
    text = render.why_text(shown(make, make.status()), make.now, fatal)
    assert "  request   two (12,345 bytes) and 1 more: 3 engines died of it, refused since\n" in text + "\n"
    document = render.why_document(shown(make, make.status()), make.now, fatal)
    assert [request["id"] for request in document["fatalRequests"]] == ["one", "two"]
    assert (
        "kinds     requests with structured output and tools are refused for another 9 min 0 s: 2 engines died" in text
    )
    assert document["fatalKinds"][0]["kinds"] == ["structured output", "tools"]
    assert "fatalRequests" not in render.why_document(shown(make, make.status()), make.now)


def test_why_after_a_recovery(make: Any) -> None:
    first = make.failure(make.now - 500, cause=Cause.RAYLET_DIED, recover_seconds=30)
    last = make.failure(recover_seconds=12.34)
    group = make.failed_group(first, last, restarts=(make.now - 500, make.now - 100), total_restarts=2)
    assert render.why_text(shown(make, make.status(group)), make.now) == (
        "nano (Serving)\n"
        "  verdict    Healthy since 2026-09-21 14:12:20\n"
        "  detected   2026-09-21 14:11:40, by exit\n"
        "  cause      EngineCoreDied on rank 0 (local-0): killed by SIGKILL\n"
        "  evidence   /state/nano/evidence/1\n"
        "  repair     level 1, the engine is restarted in place\n"
        "  serving    again after 12 s\n"
        "  earlier    RayletDied 14:05:00\n"
        "  budget     3 of 5 restarts left within 1h"
    )


def test_why_is_short_also_at_its_longest(make: Any) -> None:
    failures = [make.failure(make.now - 60 * index, level=3) for index in range(10, 0, -1)]
    group = make.failed_group(*failures, phase=GroupPhase.FAILED, restarts=[each.time for each in failures])
    exhausted = make.condition(ConditionType.RECOVERY_EXHAUSTED, true=True, message="all spent")
    text = render.why_text(shown(make, make.status(group, ready=False, conditions=(exhausted,))), make.now)
    assert len(text.splitlines()) <= 10
    assert "  verdict    Dead\n" in text
    assert "and 6 more" in text
    assert "0 of 5 restarts left" in text


def test_why_repeats_nothing(make: Any) -> None:
    first = make.failure(make.now - 500, cause=Cause.MEMBER_LOST, level=2)
    last = make.failure(evidence=None)
    waiting = make.condition(ConditionType.READY, true=False, message="down: killed by SIGKILL")
    group = make.failed_group(first, last, phase=GroupPhase.RESTARTING)
    text = render.why_text(shown(make, make.status(group, ready=False, conditions=(waiting,))), make.now)
    assert text.count("killed by SIGKILL") == 1
    assert "  serving    not again yet\n" in text


@pytest.mark.parametrize("earlier", [False, True])
def test_why_before_the_cause_is_determined(make: Any, earlier: bool) -> None:
    """Agents report a death immediately, and its cause after a comparison of the members."""
    before = [make.failure(make.now - 500, cause=Cause.RAYLET_DIED, recover_seconds=30)] * earlier
    group = make.failed_group(*before, phase=GroupPhase.RESTARTING) if earlier else make.group()
    dead = group.members[0].model_copy(update={"message": "the EngineCore process ended"})
    update = {"phase": GroupPhase.RESTARTING, "members": (dead, *group.members[1:])}
    item = shown(make, make.status(group.model_copy(update=update), ready=False))
    text = render.why_text(item, make.now)
    assert "  cause     not determined yet; first sign: the EngineCore process ended\n" in text
    assert "nothing has died" not in text
    assert text.endswith("; the restart for this death is not counted yet")
    assert ("RayletDied" in text) is earlier
    assert render.why_document(item, make.now)["undetermined"] == "the EngineCore process ended"


def reported(make: Any, **loop: Any) -> DeploymentView:
    found = LoopReport(7, **{"loop": 8, "beat": make.now - 0.4, **loop})
    return replace(shown(make, make.status()), loop=found)


def test_the_age_of_the_status(make: Any) -> None:
    texts = {
        "Reported 0.4 s ago": reported(make),
        "Reported 0.4 s ago; the loop was killed by signal 9 3.0 s ago and was restarted": reported(
            make, restarts=((make.now - 3.0, "was killed by signal 9"),)
        ),
        "Reported 4.0 s ago; the loop ended with exit code 1 4.0 s ago; it is being restarted": reported(
            make, loop=None, beat=make.now - 4.0, restarts=((make.now - 4.0, "ended with exit code 1"),)
        ),
        "The loop (process 8) has not responded for 12 s; no member answers directly": reported(
            make, beat=make.now - 12.0
        ),
        "The loop (process 8) has not responded for 12 s; the members were queried directly": replace(
            reported(make, beat=make.now - 12.0), queried=True
        ),
    }
    for text, item in texts.items():
        assert render.loop_text(item, make.now) == text
        assert f"\n\n{text}\n\n" in render.deployment_text(item, make.now, wide=False)
        assert f"  loop      {text}\n" in render.why_text(item, make.now)
        assert render.why_document(item, make.now)["loop"] == text
    old = reported(make, restarts=((make.now - 3600.0, "was killed by signal 9"),))
    assert render.loop_text(old, make.now) == "Reported 0.4 s ago"


def test_killed_processes_are_not_an_older_cause(make: Any) -> None:
    item = replace(shown(make, make.status(make.failed_group(make.failure())), running=False), lost="All were killed")
    assert "  loop       All were killed\n" in render.why_text(item, make.now)
    assert "\n\nAll were killed" in render.deployment_text(item, make.now, wide=False)


def test_a_status_that_cannot_be_saved(make: Any) -> None:
    full = make.condition(ConditionType.PROGRESSING, true=True, message="the disk is full")
    full = full.model_copy(update={"reason": Reason.STATE_NOT_SAVED})
    text = render.deployment_text(shown(make, make.status(conditions=(full,))), make.now, wide=False)
    assert "\n\nStateNotSaved: the disk is full\n\n" in text


def test_a_member_that_has_not_answered_yet(make: Any) -> None:
    group = make.group()
    silent = {"silent_since": make.now - 7.0}
    members = (
        group.members[0].model_copy(update={**silent, "phase": None}),
        group.members[1].model_copy(update=silent),
    )
    text = render.members_table(make.status(group.model_copy(update={"members": members})), make.now)
    assert "started; no answer yet after 7.0 s" in text.splitlines()[1]
    assert "Serving   no answer for 7.0 s" in text.splitlines()[2]


def test_why_document(make: Any) -> None:
    group = make.failed_group(make.failure(recover_seconds=12.34), restarts=(make.now - 100,), total_restarts=1)
    document = render.why_document(shown(make, make.status(group)), make.now)
    assert document["verdict"] == "Healthy"
    assert document["lastFailure"]["cause"] == "EngineCoreDied"
    assert document["lastFailure"]["recoverSeconds"] == 12.34
    assert document["restarts"] == {"total": 1, "spent": 1, "left": 4, "max": 5, "windowSeconds": 3600.0}
    assert json.loads(json.dumps(document)) == document


def test_the_steps_of_a_start(make: Any) -> None:
    group = make.group(
        start=(
            StartStep(phase=Phase.PREFLIGHT, seconds=1.0),
            StartStep(phase=Phase.LOADING, step="loading weights", seconds=3.04),
        ),
        incarnation=2,
        engine_generation=1,
    )
    item = shown(make, make.status(group))
    assert render.start_text(item) == (
        "nano: started in 4.0 s, incarnation 2, engine generation 1\n"
        "PHASE       STEP              SECONDS   SHARE\n"
        "Preflight   -                 1.0       25 %\n"
        "Loading     loading weights   3.0       75 %"
    )
    document = render.start_document(item)
    assert document["groups"][0]["seconds"] == 4.04
    assert document["groups"][0]["steps"][1] == {"phase": "Loading", "step": "loading weights", "seconds": 3.04}
    assert json.loads(json.dumps(document)) == document
    unserved = shown(make, make.status(make.group(start=())))
    assert render.start_text(unserved) == "nano: no group has served yet"
    assert render.start_document(unserved)["groups"] == []


def test_why_of_a_deployment_that_never_started(make: Any) -> None:
    item = DeploymentView(make.deployment(), False, None)
    assert render.why_text(item, make.now) == "nano (Stopped)\n  verdict   Stopped\n  cause     nothing has died"


def test_status_shows_the_warnings_of_members(make: Any) -> None:
    text = "GPU 0 runs at 799 of 3003 MHz under load, 20 W"
    members = (make.member(0), make.member(1, node="spark2", warnings=(text,)))
    shown_text = render.deployment_text(shown(make, make.status(make.group(members=members))), make.now, wide=False)
    assert f"\nWarning: rank 1 on spark2: {text}" in shown_text
