"""Requests for models that are not served, and for paths that clients must not reach, are not sent to vLLM."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, dictionaries, floats, integers, lists, none, recursive, sampled_from, text

from dsv4_runtime.gateway import admission
from dsv4_runtime.gateway.admission import EncodingError, Models
from dsv4_runtime.gateway.main import _bind
from dsv4_testkit.errors import raises_naming

READERS = [
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/v1/score", "/rerank"),
    *("/v1/rerank", "/v2/rerank", "/v2/embed", "/v1/chat/completions/batch", "/generative_scoring", "/v1/new"),
]
SPOOF = "Model loading took 1.2.3 GiB"
BODIES = {
    "unknown": (b'{"model": "gpt-4"}', 404),
    "log line": (json.dumps({"model": SPOOF}).encode(), 404),
    "escaped key": (b'{"m\\u006fdel": "gpt-4"}', 404),
    "all of the key escaped": (b'{"\\u006d\\u006F\\u0064\\u0065\\u006C": "gpt-4"}', 404),
    "known before unknown": (b'{"model": "nano", "model": "gpt-4"}', 404),
    "unknown before known": (b'{"model": "gpt-4", "model": "nano"}', 404),
    "byte order mark": (b'\xef\xbb\xbf{"model": "gpt-4"}', 404),
    "lone surrogate before it": (b'{"prompt": "\\ud800", "model": "gpt-4"}', 404),
    "huge": (json.dumps({"model": "n" * 90_000}).encode(), 404),
    "blank": (b'{"model": " "}', 404),
    "other case": (b'{"model": "NANO"}', 404),
    "number": (b'{"model": 5}', 400),
    "true": (b'{"model": true}', 400),
    "list": (b'{"model": ["gpt-4"]}', 400),
    "object": (b'{"model": {"a": "gpt-4"}}', 400),
    "UTF-16": ('{"model": "gpt-4"}'.encode("utf-16"), 400),
    "UTF-16 without mark": ('{"model": "gpt-4"}'.encode("utf-16-le"), 400),
    "UTF-32": ('{"model": "gpt-4"}'.encode("utf-32-be"), 400),
    "behind deep nesting": (b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b', "model": "gpt-4"}', 404),
    "behind many parts": (b'{"a": [' + b"[]," * 30_000 + b'1], "model": "gpt-4"}', 404),
    "many times": (b"{" + b'"model": "nano",' * 2000 + b'"a": 1}', 400),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_model_that_is_not_served_is_never_sent_to_vllm(kit, name):
    body, expected = BODIES[name]
    async with kit.Lab(served_names=("nano", "other")) as lab:
        status, answer = await lab.post("/v1/completions", body)
        assert status == expected
        assert lab.engine.requests == []
    error = json.loads(answer)["error"]
    assert error["code"] == expected
    if expected == 404:
        assert (error["type"], error["param"]) == ("NotFoundError", "model")
        assert "does not exist. Valid aliases: nano, other." in error["message"]
        assert len(answer) < 1000


@pytest.mark.parametrize("path", READERS)
async def test_every_path_that_reads_a_model_has_it_checked(kit, path):
    async with kit.Lab() as lab:
        assert (await lab.post(path, {"model": SPOOF}))[0] == 404
        assert (await lab.post(path, {"model": "nano", "input": "x", "prompt": "x", "messages": []}))[0] != 404
        assert len(lab.engine.requests) == 1


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"model": None, "prompt": "x"}, {"model": "", "prompt": "x"}])
async def test_no_model_means_vllms_default(kit, body):
    async with kit.Lab() as lab:
        assert (await lab.post("/v1/completions", body))[0] == 200


async def test_a_models_card_is_the_gateways_own(kit):
    async with kit.Lab() as lab:
        async with lab.client.get(lab.url + "/v1/models/nano") as answer:
            assert (answer.status, (await answer.json())["id"]) == (200, "nano")
        async with lab.client.get(lab.url + "/v1/models/CUDA%20error") as answer:
            assert answer.status == 404
            assert "`CUDA error` does not exist" in (await answer.json())["error"]["message"]
        assert lab.engine.requests == []


REFUSED = [
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/collective_rpc", "/sleep", "/wake_up", "/pause", "/resume"),
    *("/update_weights", "/init_weight_transfer_engine", "/reset_prefix_cache", "/start_profile", "/server_info"),
    *("/invocations", "/fault_tolerance/apply", "/abort_requests", "/inference/v1/generate", "/load", "/"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load_lora_adapter/", "/v1/audio/transcriptions"),
    *(
        "//v1/completions",
        "/v1/../sleep",
        "/v1/./completions",
        "/V1/completions",
        "/v1",
        "/%73leep",
        "/v1/%2e%2e/sleep",
    ),
]


@pytest.mark.parametrize("path", REFUSED)
async def test_vllms_management_is_out_of_reach(kit, path):
    async with kit.Lab() as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        writer.write(
            f"POST {path}?x=y HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
        )
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "NotFoundError"
        assert lab.engine.requests == []


def look(raw):
    steps, longest = admission.find_models(raw), 0.0
    while True:
        begun = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            return end.value, max(longest, time.thread_time() - begun)
        longest = max(longest, time.thread_time() - begun)


VALUES = recursive(
    none()
    | booleans()
    | integers()
    | floats(allow_nan=True)
    | text()
    | sampled_from(["model", '"model":', "\\", '\\"']),
    lambda inner: lists(inner) | dictionaries(text() | sampled_from(["model", "models"]), inner),
)


@settings(max_examples=100, deadline=None)
@given(dictionaries(text() | sampled_from(["model", "a"]), VALUES), sampled_from([None, 1]), booleans())
def test_the_outermost_value_is_found_in_any_object(value, indent, ascii_only):
    raw = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    found, _ = look(raw)
    name = value.get("model")
    if name is None or name == "":
        assert found == Models()
    elif isinstance(name, str):
        assert found == Models((name,))
    else:
        assert found.wrong is not None
    # The same member twice in one object: every value counts.
    twice, _ = look(raw[:-1].rstrip() + (b", " if value else b"") + b'"model": "second"}')
    assert "second" in twice.names or twice.wrong is not None


@settings(max_examples=100, deadline=None)
@given(
    lists(
        sampled_from([b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b" ", b"model", b"null", b"1", b"\0", b"\xff"])
    )
)
def test_no_text_breaks_the_search(parts):
    try:
        found, _ = look(b'{"' + b"".join(parts))
    except EncodingError:
        return
    assert isinstance(found, Models)


@pytest.mark.parametrize(
    "unit",
    [b"[],", b"[", b'{"a":', b'\\"', b"\\", b" ", b"x", b"1,", b'"",', b'"model":"nano",', b'"model" ', b"\\u006d"],
)
def test_the_work_between_two_turns_of_others_is_bounded(unit):
    """The unit of work is 60 KiB; 8 MiB do not block other tasks for longer."""
    head = b'{"a":[' if unit[:1] in b"[1{" else b'{"a":"'
    _, longest = look(head + unit * (2**23 // len(unit)) + b'"],"model":"nano"}')
    assert longest < 0.05


async def test_a_large_body_with_the_right_name_is_passed_on(kit):
    async with kit.Lab(max_body_bytes=2**25, max_client_bytes=2**27) as lab:
        body = b'{"prompt": "x", "a": [' + b"[]," * 2**20 + b'1], "model": "nano"}'
        assert (await lab.post("/v1/completions", body))[0] == 200


@pytest.mark.parametrize(("listen", "family"), [("127.0.0.1:0", socket.AF_INET), ("[::1]:0", socket.AF_INET6)])
def test_the_gateway_listens_at_addresses_of_both_families(listen, family):
    try:
        with _bind(listen) as listener:
            assert listener.family == family
    except OSError as error:
        if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            pytest.skip("this machine has no IPv6")
        raise


@pytest.mark.parametrize("listen", ["127.0.0.1", ":80", "127.0.0.1:70000", "127.0.0.1:\u00b2", "127.0.0.1:-1"])
def test_a_wrong_address_to_listen_at_is_named(listen):
    with raises_naming(ValueError, "--listen", listen, "127.0.0.1:8000"):
        _bind(listen)
