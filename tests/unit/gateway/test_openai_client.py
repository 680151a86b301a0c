"""OpenAI's client against the gateway: the responses that it reads, and the errors that it raises."""

from __future__ import annotations

import openai
import pytest

ASK = {"model": "nano", "messages": [{"role": "user", "content": "Once"}], "temperature": 0, "max_tokens": 30}


def client(lab, key="first"):
    return openai.AsyncOpenAI(base_url=lab.url + "/v1", api_key=key, max_retries=0, timeout=120)


async def read(stream):
    """Return text, finish reason and usage of a stream."""
    text, reason, usage = "", None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage.completion_tokens


async def test_a_stream_over_a_death_is_one_stream(kit):
    async with kit.Lab() as lab, client(lab) as api:
        ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        whole = await read(await api.chat.completions.create(**ask))
        lab.engine.faults = [kit.Fault(after=11), kit.Fault(after=8, kind="error")]
        assert await read(await api.chat.completions.create(**ask)) == whole
        assert whole[1:] == ("length", 30)
        assert await lab.metric("dsv4_gateway_continued_total") == 2
        assert (await api.completions.create(model="nano", prompt="Once", max_tokens=5)).choices[0].text


async def test_a_stream_that_cannot_be_continued_raises_its_error(kit):
    async with kit.Lab() as lab, client(lab) as api:
        lab.engine.faults = [kit.Fault(after=11)]
        stream = await api.chat.completions.create(**{**ASK, "stream": True, "seed": 1, "temperature": 1})
        assert (await anext(stream)).choices
        with pytest.raises(openai.APIError, match="the engine died, and the answer cannot be continued: seed") as error:
            await read(stream)
        assert error.value.code == "engine_lost"


async def test_refusals_are_the_errors_that_programs_expect(kit):
    lab = kit.Lab(keys="first\n", max_body_bytes=400, hold_timeout_seconds=0.1)
    async with lab, client(lab) as api, client(lab, "other") as stranger:
        with pytest.raises(openai.AuthenticationError, match="requires a valid key"):
            await stranger.chat.completions.create(**ASK)
        with pytest.raises(openai.APIStatusError, match="longer than 400 bytes") as large:
            await api.completions.create(model="nano", prompt="x" * 400)
        assert large.value.status_code == 413
        await lab.engine.change(phase="Restarting", health="Dead")
        await lab.ready(503)
        with pytest.raises(openai.InternalServerError, match="did not recover") as away:
            await api.chat.completions.create(**ASK)
        assert (away.value.status_code, away.value.response.headers["Retry-After"]) == (503, "10")
        assert [model.id async for model in api.models.list()] == ["nano"]
        with pytest.raises(openai.InternalServerError) as late:
            await api.chat.completions.create(**ASK, extra_headers={"X-Request-Timeout": "0.01"})
        assert (late.value.status_code, late.value.code) == (504, "request_timeout")
