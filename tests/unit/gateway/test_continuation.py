"""Streams that continue after the death of their engine, with a model whose tokens are predictable."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def request(path, tokens=40, **more):
    body = {"model": "nano", "stream": True, "temperature": 0, "max_tokens": tokens, **more}
    return body | ({"prompt": "Once"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Once"}]})


def text(found):
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for chunk in found
        if isinstance(chunk, dict)
        for choice in chunk.get("choices", ())
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_token_ids": True},
        {"return_token_ids": False},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"seed": 3, "temperature": 1},
    ],
)
async def test_a_healthy_stream_is_the_engines_own_byte_for_byte(kit, path, group, more):
    async with kit.Lab(engine=kit.Engine(group=group)) as lab:
        body = request(path, **more)
        assert await lab.post(path, body) == await lab.post(path, body, base=lab.upstream)
        sent, direct = lab.engine.requests
        assert sent[1].get("return_token_ids") or "seed" in more
        assert {**sent[1], "return_token_ids": None} == {**direct[1], "return_token_ids": None}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    path=st.sampled_from([COMPLETIONS, CHAT]),
    cuts=st.lists(st.integers(0, 30_000), min_size=1, max_size=3),
    kind=st.sampled_from(["reset", "close", "hang", "glitch"]),
    group=st.integers(1, 5),
    usage=st.booleans(),
    ids=st.booleans(),
)
def test_cut_anywhere_in_the_bytes_a_greedy_stream_is_whole(kit, path, cuts, kind, group, usage, ids):
    """The result is the whole stream or, if the position of the cut cannot be determined, a clear error."""
    body = request(path, stream_options={"include_usage": usage}, return_token_ids=ids)

    async def scenario():
        async with kit.Lab(engine=kit.Engine(group=group)) as lab:
            _, whole = await lab.post(path, body)
            # A third death would make the request a suspect.
            faults = [kit.Fault(after=cut, kind=kind, bytes=True) for cut in cuts[: 3 if kind == "glitch" else 2]]
            lab.engine.faults = list(faults)
            _, broken = await lab.post(path, body)
            return kit.chunks(whole), kit.chunks(broken)

    whole, broken = asyncio.run(scenario())
    if "error" in broken[-1]:
        # The client requested the id of each token, so a cut within a character cannot be undone.
        assert ids
        assert broken[-1]["error"]["code"] == "engine_lost"
        assert text(whole).startswith(text(broken))
        assert "[DONE]" not in broken
        return
    assert text(broken) == text(whole)
    assert broken[-1] == "[DONE]"
    assert broken.count("[DONE]") == 1
    assert len({(chunk["id"], chunk["created"]) for chunk in broken[:-1]}) == 1
    if usage:
        assert broken[-2]["usage"] == whole[-2]["usage"]
    finishes = [c["choices"][0]["finish_reason"] for c in broken[:-1] if c["choices"]]
    assert finishes.count("length") == 1
    if ids:
        given_ids = [token for c in broken[:-1] for choice in c["choices"] for token in choice.get("token_ids") or ()]
        assert given_ids == kit.generate(list(b"Once"), 40)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("missing", [1, 2])
async def test_a_finished_stream_gets_the_usage_and_the_end_that_its_engine_owed(kit, path, missing):
    """If the engine dies before the usage, or between the usage and `[DONE]`, the client receives both exactly once."""
    async with kit.Lab() as lab:
        body = request(path, stream_options={"include_usage": True})
        _, whole = await lab.post(path, body)
        events = len(kit.chunks(whole))
        lab.engine.faults = [kit.Fault(after=events - missing)]
        _, broken = await lab.post(path, body)
        found = kit.chunks(broken)
        assert found[-1] == "[DONE]"
        assert [chunk["usage"] for chunk in found[:-1] if not chunk["choices"]] == [kit.chunks(whole)[-2]["usage"]]
        assert len(lab.engine.requests) == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", ["reset", "error", "close", "hang", "glitch"])
async def test_every_way_of_dying_between_tokens(kit, path, kind):
    async with kit.Lab() as lab:
        body = request(path)
        _, whole = await lab.post(path, body)
        for after in (0, 1, 2, 7, 39, 40):
            lab.engine.faults = [kit.Fault(after=after, kind=kind)]
            _, broken = await lab.post(path, body)
            found = kit.chunks(broken)
            assert found[-1] == "[DONE]"
            assert text(found) == text(kit.chunks(whole)), after
            deltas = [chunk["choices"][0].get("delta", {}) for chunk in found[:-1]]
            assert ["role" in delta for delta in deltas].count(True) == (path == CHAT)


async def test_the_continuation_requests_only_the_missing_tokens(kit):
    async with kit.Lab() as lab:
        lab.engine.faults = [kit.Fault(after=12, kind="reset")]
        body = request(
            CHAT, top_p=0.9, min_tokens=15, repetition_penalty=1.1, reasoning_effort="high", logit_bias={"3": 1}
        )
        await lab.post(CHAT, body)
        (_, first, _), (path, second, headers) = lab.engine.requests
        assert first == {**body, "return_token_ids": True}
        kept = len(second["prompt"]) - len("Once")
        assert path == COMPLETIONS
        assert second == {
            **{"model": "nano", "stream": True, "temperature": 0, "top_p": 0.9, "repetition_penalty": 1.1},
            **{"logit_bias": {"3": 1}, "min_tokens": 15 - kept, "max_tokens": 40 - kept, "return_token_ids": True},
            "prompt": [*b"Once", *kit.generate(list(b"Once"), kept)],
        }
        assert 8 <= kept <= 12
        assert headers["x-request-id"] == lab.engine.requests[0][2]["x-request-id"]


@pytest.mark.parametrize(
    ("path", "limits", "count"),
    [
        (COMPLETIONS, {}, 16),
        (CHAT, {}, 96),
        (CHAT, {"max_tokens": None}, 96),
        (CHAT, {"max_tokens": 90, "max_completion_tokens": 30}, 30),
        (CHAT, {"max_tokens": 30, "max_completion_tokens": None}, 30),
        (CHAT, {"max_tokens": 100}, 96),
    ],
)
async def test_a_continued_stream_ends_at_the_limit_of_the_uninterrupted_one(kit, path, limits, count):
    """Without a limit in the request, vLLM's limits for completions and chat differ; chat continues as completion."""
    body = request(path, stream_options={"include_usage": True})
    body = {name: value for name, value in body.items() if name != "max_tokens"} | limits
    async with kit.Lab() as lab:
        whole = kit.chunks((await lab.post(path, body))[1])
        assert whole[-2]["usage"]["completion_tokens"] == count
        lab.engine.faults = [kit.Fault(after=9), kit.Fault(after=3)]
        broken = kit.chunks((await lab.post(path, body))[1])
        assert (text(broken), broken[-2]["usage"]) == (text(whole), whole[-2]["usage"])
        assert broken[-3]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_without_a_known_context_length_is_not_continued(kit):
    body = request(CHAT, max_tokens=None)
    async with kit.Lab(served_names=("nano", "alias")) as lab:
        lab.engine.faults = [kit.Fault(after=9)]
        last = kit.chunks((await lab.post(CHAT, {**body, "model": "alias"}))[1])[-1]
        assert "does not report its context length" in last["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (COMPLETIONS, {"max_tokens": None}),
        (COMPLETIONS, {"max_tokens": "40"}),
        (COMPLETIONS, {"max_completion_tokens": 40}),
        (CHAT, {"min_tokens": 3.0}),
        (COMPLETIONS, {"n": 2}),
        (COMPLETIONS, {"seed": 1, "temperature": 0.7}),
        (COMPLETIONS, {"seed": 1, "temperature": None}),
        (COMPLETIONS, {"logprobs": 0}),
        (CHAT, {"logprobs": True}),
        (COMPLETIONS, {"stop": ["x"]}),
        (COMPLETIONS, {"presence_penalty": 0.5}),
        (COMPLETIONS, {"frequency_penalty": -1}),
        (COMPLETIONS, {"bad_words": ["x"]}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}),
        (CHAT, {"structured_outputs": {"regex": "a+"}}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}),
        (COMPLETIONS, {"a_field_of_a_later_version": 1}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "user", "content": "Once"}]},
        ),
        (COMPLETIONS, {"prompt": [1, 2, 3], "prompt_embeds": "x"}),
    ],
)
async def test_streams_that_cannot_be_continued_exactly_end_with_an_error_event(kit, path, more):
    async with kit.Lab() as lab:
        lab.engine.faults = [kit.Fault(after=5, kind="error")]
        status, broken = await lab.post(path, request(path) | more)
        found = kit.chunks(broken)
        assert status == 200
        assert [("error" in chunk) for chunk in found] == [False] * (len(found) - 1) + [True]
        assert found[-1]["error"]["code"] == "engine_lost"
        assert next(iter(more)) in found[-1]["error"]["message"] or path == CHAT or "prompt" in more
        assert len(lab.engine.requests) == 1
        assert await lab.metric("dsv4_gateway_cut_total") == 1
        # A response proves that requests of this kind do not kill engines.
        await lab.ready(200)
        assert kit.chunks((await lab.post(path, request(path) | more))[1])[-1] == "[DONE]"
        # The same request is sent again if its stream has not begun.
        lab.engine.faults = [kit.Fault(after=0, kind="error")]
        assert kit.chunks((await lab.post(path, request(path) | more))[1])[-1] == "[DONE]"


@pytest.mark.parametrize(
    "more",
    [
        {
            "seed": None,
            "n": 1,
            "logprobs": False,
            "stop": [],
            "response_format": {"type": "text"},
            "metadata": {"a": "b"},
        },
        {"seed": 5},
        {"temperature": 1.0},
        {"tools": [], "tool_choice": "none"},
        {"stop_token_ids": [300], "include_stop_str_in_output": True},
    ],
)
async def test_neutral_values_do_not_forbid_it(kit, more):
    async with kit.Lab() as lab:
        lab.engine.faults = [kit.Fault(after=9, kind="reset")]
        assert kit.chunks((await lab.post(CHAT, request(CHAT) | more))[1])[-1] == "[DONE]"


@pytest.mark.parametrize(("path", "event"), [("/v1/messages", "error"), ("/v1/responses", "error")])
async def test_other_streams_end_with_the_error_of_their_api(kit, path, event):
    async def script(request, body):
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'event: first\ndata: {"type":"first"}\n\nevent: half\nda')
        await asyncio.sleep(0.02)
        await lab.engine.die(0.02)
        request.transport.abort()
        return response

    async with kit.Lab() as lab:
        lab.engine.script = script
        status, body = await lab.post(path, {"stream": True})
        assert status == 200
        assert body.startswith(b'event: first\ndata: {"type":"first"}\n\nevent: error\ndata: {')
        last = kit.chunks(body)[-1]
        assert last["type"] == event
        assert "engine died" in (last.get("message") or last["error"]["message"])


async def test_reasoning_deltas_are_not_continued_as_text(kit):
    async def script(request, body):
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in ({"role": "assistant", "content": ""}, {"reasoning": "hm"}):
            chunk = {"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": None, "token_ids": [1]}]}
            await response.write(b"data: " + json.dumps({**chunk, "prompt_token_ids": [1]}).encode() + b"\n\n")
        await asyncio.sleep(0.02)
        await lab.engine.die(0.02)
        request.transport.abort()
        return response

    async with kit.Lab() as lab:
        lab.engine.script = script
        found = kit.chunks((await lab.post(CHAT, request(CHAT)))[1])
        assert "reasoning" in found[-1]["error"]["message"]
        assert len(lab.engine.requests) == 1


async def test_a_parsers_silent_tokens_do_not_reach_the_client(kit):
    async def script(request, body):
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas = ({"role": "assistant", "content": ""}, {}, {"content": "hi"})
        for index, delta in enumerate(deltas):
            if not delta and not body.get("return_token_ids"):
                continue
            reason = "stop" if index == 2 else None
            ids = {"token_ids": [index] if body.get("return_token_ids") else None} if index else {}
            chunk = {"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": reason, **ids}]}
            await response.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async with kit.Lab() as lab:
        lab.engine.script = script
        through, direct = await lab.post(CHAT, request(CHAT)), await lab.post(CHAT, request(CHAT), base=lab.upstream)
        assert through == direct


@pytest.mark.parametrize("messages", [5, True, 1.5, "text", {"role": "user"}, [5]])
async def test_messages_of_a_wrong_type_are_vllms_to_refuse(kit, messages):
    from aiohttp import web

    async def script(request, body):
        return web.json_response({"error": {"message": "messages: no list", "code": 400}}, status=400)

    async with kit.Lab(engine=kit.Engine(script=script)) as lab:
        body = {"model": "nano", "messages": messages, "stream": True}
        async with lab.client.post(lab.url + "/v1/chat/completions", json=body) as answer:
            assert (answer.status, (await answer.json())["error"]["message"]) == (400, "messages: no list")


async def test_a_genuine_error_event_of_a_living_engine_is_passed_on(kit):
    async def script(request, body):
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"error": {"message": "KV load failed", "code": 500}}\n\ndata: [DONE]\n\n')
        return response

    async with kit.Lab() as lab:
        lab.engine.script = script
        status, body = await lab.post(COMPLETIONS, request(COMPLETIONS))
        assert (status, body) == (
            200,
            b'data: {"error": {"message": "KV load failed", "code": 500}}\n\ndata: [DONE]\n\n',
        )
        assert len(lab.engine.requests) == 1
