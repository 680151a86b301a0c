"""Spans of the gateway, received over OTLP by OpenTelemetry's own classes."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time

import pytest

from dsv4_runtime.agent import context
from dsv4_runtime.agent.context import trace_settings
from dsv4_runtime.gateway.metrics import Traces, open_traces
from dsv4_runtime.util import trace_receiver
from dsv4_testkit.otlp import Receiver
from dsv4_testkit.waiting import free_port, until

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once upon a time", "max_tokens": 5}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def receiver(tmp_path):
    with Receiver(f"unix:{tmp_path}/otlp.sock") as found:
        yield found


@pytest.fixture
def traces(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    found = Traces(receiver.url, {"dsv4.deployment": "nano"})
    yield found
    found.close()


async def spans(receiver, count):
    return await asyncio.to_thread(receiver.until, lambda found: len(found) >= count)


def child_of(headers):
    version, trace, span, flags = headers["traceparent"].split("-")
    assert (version, int(flags, 16) & 1) == ("00", 1)
    return trace, span


async def test_vllm_gets_a_child_context_and_the_span_has_no_content(kit, receiver, traces):
    async with kit.Lab(traces=traces) as lab:
        headers = {"traceparent": PARENT, "tracestate": "vendor=1", "X-Request-Id": "mine"}
        assert (await lab.post(COMPLETIONS + "?secret=query", ASK, headers=headers))[0] == 200
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        child, alone = await spans(receiver, 2)
        sent = [one[2] for one in lab.engine.requests]
    assert child.trace == PARENT.split("-")[1]
    assert child.parent == PARENT.split("-")[2]
    assert child_of(sent[0]) == (child.trace, child.id)
    assert sent[0]["tracestate"] == "vendor=1"
    assert alone.parent == ""
    assert child_of(sent[1]) == (alone.trace, alone.id)
    assert child.span.name == "POST /v1/completions"
    assert child.resource["service.name"] == "dsv4-gateway"
    assert child.resource["dsv4.deployment"] == "nano"
    found = child.attributes
    assert 0 < found.pop("dsv4.first_byte_seconds") < 60
    assert found == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": "mine",
        "dsv4.outcome": "ok",
        "dsv4.held_seconds": 0.0,
        "dsv4.replays": 0,
        "dsv4.continuations": 0,
    }
    assert child.events == [("sent", {"dsv4.group": 0, "dsv4.incarnation": 1, "dsv4.generation": 1})]
    everything = str(child.span) + str(alone.span)
    assert "Once upon" not in everything
    assert "secret" not in everything


async def test_a_death_is_events_of_one_span(kit, receiver, traces):
    async with kit.Lab(traces=traces) as lab:
        # A broken connection is doubt for 2 s, then a death.
        lab.engine.faults = [kit.Fault(kind="reset", back=2.5)]
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        (span,) = await spans(receiver, 1)
        contexts = {child_of(one[2]) for one in lab.engine.requests}
    assert [(name, about.get("dsv4.generation")) for name, about in span.events] == [
        ("sent", 1),
        ("engine lost", 1),
        ("held", None),
        ("replayed", 2),
    ]
    assert span.attributes["dsv4.replays"] == 1
    assert 0.2 < span.attributes["dsv4.held_seconds"] < 60
    assert contexts == {(span.trace, span.id)}, "both attempts belong to the span"
    times = [event.time_unix_nano for event in span.span.events]
    assert span.span.start_time_unix_nano <= times[0] <= times[-1] <= span.span.end_time_unix_nano
    assert times[3] - times[2] > 0.2e9


async def test_a_stream_that_continues(kit, receiver, traces):
    async with kit.Lab(traces=traces) as lab:
        lab.engine.faults = [kit.Fault(after=2, kind="reset")]
        assert (await lab.post(COMPLETIONS, ASK | {"stream": True, "max_tokens": 8}))[0] == 200
        (span,) = await spans(receiver, 1)
    assert [name for name, _ in span.events][-1] == "continued"
    assert span.attributes["dsv4.continuations"] == 1


async def test_failures_are_errors_and_refused_paths_have_no_span(kit, receiver, traces):
    async with kit.Lab(traces=traces, hold_timeout_seconds=0.2) as lab:
        await lab.engine.change(phase="Loading", health="Starting")
        await lab.ready(503)
        assert (await lab.post(COMPLETIONS, ASK))[0] == 503
        assert (await lab.post("/pause", {}))[0] == 404
        await lab.client.get(lab.url + "/healthz")
        (span,) = await spans(receiver, 1)
        await asyncio.sleep(0.2)
        assert len(receiver.spans()) == 1
    assert span.attributes["dsv4.outcome"] == "unavailable"
    assert span.span.status.code == span.span.status.STATUS_CODE_ERROR
    assert [name for name, _ in span.events] == ["held"]


async def test_a_request_without_a_response_has_no_status_code(kit, receiver, traces):
    async with kit.Lab(traces=traces) as lab:
        await lab.engine.change(phase="Loading", health="Starting")
        await lab.ready(503)
        waiting = asyncio.create_task(lab.post(COMPLETIONS, ASK))
        await lab.holds(1)
        waiting.cancel()
        (span,) = await spans(receiver, 1)
    assert span.attributes["dsv4.outcome"] == "cancelled"
    assert "http.response.status_code" not in span.attributes


async def test_an_unsampled_parent_is_kept_and_sends_nothing(kit, receiver, traces):
    async with kit.Lab(traces=traces) as lab:
        assert (await lab.post(COMPLETIONS, ASK, headers={"traceparent": PARENT[:-1] + "0"}))[0] == 200
        assert lab.engine.requests[0][2]["traceparent"].endswith("-00")
        assert (await lab.post(COMPLETIONS, ASK, headers={"traceparent": "wrong"}))[0] == 200
        (span,) = await spans(receiver, 1)
    assert span.parent == ""


async def test_without_a_receiver_requests_are_answered_and_the_end_is_quick(kit, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    before = set(threading.enumerate())
    traces = Traces(f"http://127.0.0.1:{free_port()}", {})
    async with kit.Lab(traces=traces) as lab:
        for _ in range(5):
            assert (await lab.post(COMPLETIONS, ASK))[0] == 200
    began = time.monotonic()
    traces.close()
    assert time.monotonic() - began < 30
    # It sets its pauses with the global `random`, which Hypothesis observes in the tests after this one.
    await until(lambda: not any(thread.daemon for thread in {*threading.enumerate()} - before))


async def test_off_the_clients_context_passes_through(kit):
    async with kit.Lab() as lab:
        assert (await lab.post(COMPLETIONS, ASK, headers={"traceparent": PARENT, "tracestate": "a=b"}))[0] == 200
        given = lab.engine.requests[0][2]
    assert (given["traceparent"], given["tracestate"]) == (PARENT, "a=b")


def test_off_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys; from dsv4_runtime.gateway import main; assert main.open_traces(None, None, None) is None;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'grpc'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["http://collector:4317", "http://10.0.0.1:4317/", "unix:/run/otlp", "unix:///run/x"])
def test_receivers(text: str) -> None:
    assert trace_receiver(text) == text


@pytest.mark.parametrize(
    "text", ["https://c:4317", "c:4317", "http://c", "http://user@c:4317", "unix:x", "http://c:1 2"]
)
def test_wrong_receivers(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="write http://HOST:4317 or unix:/PATH"):
        trace_receiver(text)
    caplog.set_level(logging.WARNING)
    assert open_traces(text, None, None) is None
    assert "DSV4_TRACES" in caplog.text


def test_vllm_gets_the_receiver_unless_it_has_one() -> None:
    on = {"DSV4_TRACES": "http://c:4317"}
    arguments, variables = trace_settings(("--model=x",), on)
    assert arguments == ("--otlp-traces-endpoint=http://c:4317",)
    assert variables == {"OTEL_SERVICE_NAME": "vllm", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    assert trace_settings(("--otlp-traces-endpoint=http://d:1",), on) == ((), {})
    assert trace_settings(("--model=x",), {}) == ((), {})
    assert trace_settings((), {"DSV4_TRACES": ""}) == ((), {})


def test_without_a_package_vllm_starts_without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_VLLM_IMPORTS", ("opentelemetry.sdk", "opentelemetry.missing.module"))
    with pytest.raises(ValueError, match=r"has no opentelemetry.missing.module; install dsv4\[tracing\]"):
        trace_settings((), {"DSV4_TRACES": "http://c:4317"})
