"""An HTTP server that responds like vLLM with DeepSeek-V4, without weights, and with a chosen defect.

The model is a hash: every token of the context changes all logits. Its tokens are words. In chats it returns the
expected responses to `dsv4 verify`; a weak model (`weak=True`) only continues the text, and its tokens are bytes, as
those of nano.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
import re
import socket
import threading
import zlib
from array import array
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BOS, EOS, USER, ASSISTANT, THINK, END_THINK = range(6)
SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
_SPLIT = re.compile("|".join(map(re.escape, SPECIAL)) + r"|\s?\w+|\s|[^\w\s]")
_WORDS = (" the", " river", " and", " we", " went", " home", " over", " a", " long", " way", " to", " water", " sun")
_CANDIDATES = 24
_TEXTS = {
    "sky": "The sky is blue because air scatters short waves of light more than long ones. Sunlight has all colours. "
    "Blue light is scattered in every direction, so it reaches us from the whole sky. Violet is scattered even more, "
    "but our eyes see less of it. At sunset the path is longer, and red is left.",
    "天空": "天空看起来是蓝色的，因为空气分子更容易散射波长较短的蓝光。太阳光包含各种颜色。"
    "蓝光向四面八方散射，所以我们从整个天空都能看到它。"
    "紫光散射得更多，但人眼对它不敏感。日落时光线穿过更厚的大气，剩下红色。",
    "Fibonacci": "```python\ndef fib(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n"
    "        a, b = b, a + b\n"
    "    return a\n```",
    "17 + 25": "42",
    "capital of France": "Paris",
    "marmalade": "marmalade",
    "spiders": "Two spiders and a dog have 20 legs together.",
    "ticket": '{"priority": "high", "open": true, "queue": 2}',
    "hello": "Hello! How can I help you today, my friend?",
}

DEFECTS = (
    "scaled logits",
    "noisy logits",
    "swapped expert",
    "truncated kv page",
    "stale prefix cache",
    "decode differs from prefill",
    "batch crosstalk",
    "repeated tokens",
    "unseeded",
    "ignored stop",
    "stop only in whole answers",
    "wrong usage",
    "wrong stream usage",
    "no done event",
    "hanging stream",
    "lost chunk",
    "buffered stream",
    "wrong template",
    "no generation prompt",
    "leaked reasoning",
    "reasoning always off",
    "reasoning always on",
    "leaked tool markup",
    "merged parallel calls",
    "broken arguments",
    "no finish for calls",
    "ids repeated",
    "mojibake",
    "replacement characters",
    "wrong language",
    "early end",
    "endless answer",
    "schema ignored",
    "constraints ignored",
    "no message stop",
    "errors are 500",
    "errors are 200",
    "max tokens ignored",
    "rejected drafts",
    "drafts change tokens",
    "broken weights",
    "no context length",
    "unstable numerics",
    "needless calls",
    "truncated under pressure",
    "garbled under pressure",
    "failed under pressure",
    "wrong after pressure",
)


class Model:
    """Tokens and logits of the model."""

    def __init__(self, defect: str, noise: float, noise_seed: int, *, weak: bool) -> None:
        self.defect, self.weak = defect, weak
        self.noise = 0.5 if defect == "unstable numerics" else noise
        self._texts: dict[int, str] = dict(enumerate(SPECIAL))
        self._prefixes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._draw = random.Random(noise_seed)
        self.candidates = [self._id(word) for word in _WORDS] + [self._id(f" w{n}") for n in range(_CANDIDATES - 13)]

    def _id(self, text: str) -> int:
        found = SPECIAL.index(text) if text in SPECIAL else 1000 + zlib.crc32(text.encode()) % 100_000_000
        self._texts[found] = text
        return found

    def encode(self, text: str) -> list[int]:
        pieces = _SPLIT.findall(text)
        if self.weak:
            pieces = [part for piece in pieces for part in ((piece,) if piece in SPECIAL or piece in _WORDS else piece)]
        return [self._id(piece) for piece in pieces]

    def text(self, token: int) -> str:
        return self._texts.get(token, "?")

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.text, tokens))

    def logits(self, context: Sequence[int], own: int | None, *, decoding: bool = False) -> dict[int, float]:
        """Return the logits of the candidates, and of `own`."""
        seen = list(context)
        if self.defect == "truncated kv page" and len(seen) > 150:
            seen = forget(seen)
        key = hashlib.blake2b(array("q", seen).tobytes(), digest_size=8).digest()
        source = random.Random(key)
        found = {token: 16 + 3 * source.gauss(0, 1) for token in self.candidates}
        if own is not None and own not in found:
            found[own] = 6 + own % 1000 / 200
        if self.defect == "scaled logits":
            found = {token: 1.01 * value for token, value in found.items()}
        if self.defect == "noisy logits":
            found = {token: value * (1 + 0.01 * source.gauss(0, 1)) for token, value in found.items()}
        if self.defect == "swapped expert" and key[0] % 4 == 0:
            found = {token: 16 + 3 * source.gauss(0, 1) for token in found}
        if self.defect == "decode differs from prefill" and decoding:
            found = {token: value + 0.5 * source.gauss(0, 1) for token, value in found.items()}
        if self.defect == "drafts change tokens" and decoding and key[0] % 5 == 0:
            found = {token: -value for token, value in found.items()}
        if self.noise:
            found = {token: value + self._draw.gauss(0, self.noise) for token, value in found.items()}
        return found

    def logprobs(self, context: Sequence[int], own: int | None, *, decoding: bool = False) -> dict[int, float]:
        logits = self.logits(context, own, decoding=decoding)
        total = math.log(sum(math.exp(value - 16) for value in logits.values())) + 16
        return {token: value - total for token, value in logits.items()}

    def stale(self, context: Sequence[int]) -> list[int]:
        """Return `context`; with a stale prefix cache, the first computed one with the same first 64 tokens."""
        prefix = tuple(context[:64])
        if len(context) < 100:
            return list(context)
        kept = self._prefixes.setdefault(prefix, tuple(context))
        return list(context if kept == tuple(context) else (*kept[: len(context) // 2], *context[-2:]))

    def generate(self, prompt: Sequence[int], count: int, seed: int | None, temperature: float) -> list[int]:
        context, found = list(prompt), []
        draw = random.Random(seed if seed is not None and self.defect != "unseeded" else None)
        for number in range(count):
            values = self.logprobs(context, None, decoding=True)
            if temperature:
                token = max(
                    values, key=lambda each, v=values: v[each] / temperature - math.log(-math.log(draw.random()))
                )
            else:
                token = max(values, key=lambda each, v=values: v[each])
            if self.defect == "repeated tokens" and number % 3 == 2:
                token = context[-1]
            context.append(token)
            found.append(token)
        return found


def forget(value: Any) -> Any:
    """Return a sequence without its middle fifth."""
    return value[: int(len(value) * 0.4)] + value[int(len(value) * 0.6) :]


def think_text(question: str) -> str:
    return f"The question is about {len(question)} characters. I consider it step by step and answer."


class Bot:
    """Responses to chats."""

    def answer(self, messages: Sequence[dict[str, Any]], tools: Sequence[str]) -> tuple[str, list[Any]]:
        last = messages[-1]
        question = next(str(each["content"]) for each in reversed(messages) if each["role"] == "user")
        if last["role"] == "tool":
            results = [str(each["content"]) for each in messages if each["role"] == "tool"]
            if "Locate ann" in question and len(results) == 1:
                return "", [("get_weather", {"city": results[0]})]
            return f"Here it is: {'; '.join(results)}", []
        if tools and "without any tool" not in question and (calls := self._calls(question, tools)):
            return "", calls
        if code := re.search(r"The code of the green box is (\d+)", question):
            return code[1], []
        return next((text for key, text in _TEXTS.items() if key in question), _TEXTS["hello"]), []

    def _calls(self, question: str, tools: Sequence[str]) -> list[Any]:
        if "Locate ann" in question:
            return [("locate_user", {"user": "ann"})]
        if "weather" in question and "get_weather" in tools:
            return [("get_weather", {"city": city}) for city in re.findall(r"Paris|Rome|Oslo", question)]
        if "time" in question:
            return [("get_time", {"city": "Oslo"})]
        if "light" in question:
            return [("set_light", {"room": "kitchen", "on": True})]
        if "event" in question:
            when = {"date": "2027-03-04", "hour": 15}
            return [("create_event", {"title": "Review", "when": when, "guests": ["ann", "bob"]})]
        if "Add" in question:
            return [("add", {"a": 12.5, "b": 30})]
        return [("save_note", {"text": question.split("text:\n", 1)[1]})]


class Engine:
    """State of one server."""

    def __init__(
        self,
        defect: str = "",
        *,
        weak: bool = False,
        noise: float = 0.0,
        noise_seed: int = 1,
        context: int = 2048,
        key: str = "",
        delay: float = 0.002,
    ) -> None:
        assert defect in ("", *DEFECTS), defect
        self.defect, self.weak, self.context = defect, weak, context
        self.key, self.delay = key, delay
        self.model = Model(defect, noise, noise_seed, weak=weak)
        self.bot = Bot()
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.cache, self.seqs = 4096, 64
        """Tokens of the KV cache, and requests that are computed at the same time."""
        self.used = self.preemptions = 0
        self.cache_metrics = True
        self.single_factor = 1
        """Factor of the used share in the metrics of a single request: a cache with windows."""
        self.failed_status = 500
        """Of requests that fail under pressure."""
        self.over = threading.Event()
        """The server ends: no request is delayed any more."""
        self.open = self.requests = self.drafts = 0
        self.fail_after: int | None = None
        """Number of requests after which connections are closed."""
        self.listed: Any = [{"id": "m", "object": "model", "owned_by": "vllm"}]
        """Models in the list; another value than a list of objects replaces the whole document."""
        self.logprobs = "offered"
        """`ignored` or `rejected`: as servers that are not vLLM."""
        self.chunk: dict[str, Any] = {}
        """Fields added to each chunk of a stream."""
        self.parts_after: int | None = None
        """Tokens after which sampled outputs of simultaneous requests part, as each batch rounds in its own way."""
        self.batch = 0
        """Number of the first requests with a seed that are computed together: each waits for the others."""
        self.seeded = 0
        self.watts = 0.0
        """Power in the metrics of a gateway of dsv4; 0: it is none, negative: the driver reports no power."""

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, thinking: bool) -> str:
        if self.defect == "wrong template":
            return "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant: "
        text = SPECIAL[BOS]
        for number, each in enumerate(messages):
            content, role = str(each.get("content") or ""), each["role"]
            if role == "system":
                text += content
            elif role in ("user", "tool"):
                text += SPECIAL[USER] + content
                if number + 1 < len(messages) and messages[number + 1]["role"] == "assistant":
                    text += SPECIAL[ASSISTANT] + SPECIAL[END_THINK]
            else:
                text += content + json.dumps(each.get("tool_calls") or "") * bool(each.get("tool_calls")) + SPECIAL[EOS]
        text += json.dumps(tools) if tools else ""
        if self.defect == "no generation prompt":
            return text
        return text + SPECIAL[ASSISTANT] + SPECIAL[THINK if thinking else END_THINK]

    # Requests.

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        ids = list(prompt) if isinstance(prompt, list) else self.model.encode(prompt)
        count = int(body.get("max_tokens", 16))
        self.check(ids, count)
        if self.logprobs != "offered" and body.pop("logprobs", None) is not None and self.logprobs == "rejected":
            raise ValueError("logprobs is not supported")
        if self.defect == "max tokens ignored":
            count += 3
        context = ids
        if self.defect == "stale prefix cache" and "cache_salt" not in body:
            context = self.model.stale(ids)
        need = len(ids) + count
        pressed = self._enter(need)
        try:
            together = self._batched(body) or self.open > 1
            self.over.wait(self.delay)
            together |= self.open > 1
            if self.defect == "batch crosstalk" and self.open > 1:
                context = [*ids, ids[-1]]
            if pressed and self.defect == "failed under pressure":
                raise MemoryError("no KV block is free")
            if pressed and self.defect == "truncated under pressure":
                count -= 5
            if (pressed and self.defect == "garbled under pressure") or (
                # Short requests, which never exhaust the cache.
                self.defect == "wrong after pressure" and self.preemptions and len(ids) < 200
            ):
                context = [*ids, ids[-1]]
            sampling = body.get("seed"), float(body.get("temperature", 1.0))
            out = self.model.generate(context, count, *sampling)
            if self.parts_after is not None and together:
                kept = out[: self.parts_after]
                out = kept + self.model.generate([*context, *kept], count - len(kept), None, sampling[1])
        finally:
            with self.room:
                self.open -= 1
                self.used -= need
                self.room.notify_all()
        with self.lock:
            self.drafts += count
        constraint = body.get("structured_outputs")
        if constraint:
            text = constraint["choice"][0] if "choice" in constraint else "ABC-1234"
            out = self.model.encode(" maybe" if self.defect == "constraints ignored" else text)
        finish = "stop" if constraint else "length"
        text = self.model.decode(out)
        streamed = bool(body.get("stream"))
        ignored = self.defect == "ignored stop" or (self.defect == "stop only in whole answers" and streamed)
        for word in () if ignored else body.get("stop") or ():
            if word in text:
                text, finish = text[: text.index(word)], "stop"
        logprobs = None
        if body.get("logprobs") is not None:
            logprobs = self.legacy(context, out, body["logprobs"], bool(body.get("return_tokens_as_token_ids")))
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}
        choice["token_ids"] = out if body.get("return_token_ids") else None
        choice["prompt_token_ids"] = ids if body.get("return_token_ids") else None
        if body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = self.scored(ids, body["prompt_logprobs"])
        return {"object": "text_completion", "choices": [choice], "usage": self.usage(ids, len(out), streamed)}

    def _enter(self, need: int) -> bool:
        """Wait until a request has its part of the KV cache; return whether it had to wait for that of others."""
        with self.room:
            self.room.wait_for(lambda: self.open < self.seqs, 60)
            pressed = self.used > 0 and self.used + need > self.cache
            self.preemptions += pressed
            self.room.wait_for(lambda: self.open < self.seqs and (not self.used or self.used + need <= self.cache), 60)
            self.open += 1
            self.used += need
        return pressed

    def _batched(self, body: dict[str, Any]) -> bool:
        """Return whether a request is one of the first `batch`, once all of them are there."""
        with self.room:
            if body.get("seed") is None or self.seeded >= self.batch:
                return False
            self.seeded += 1
            self.room.notify_all()
            if not self.room.wait_for(lambda: self.seeded >= self.batch, 60):
                raise TimeoutError(f"{self.seeded} of {self.batch} requests")
        return True

    def legacy(self, ids: Sequence[int], out: Sequence[int], top: int, as_ids: bool) -> dict[str, Any]:
        def name(token: int) -> str:
            return f"token_id:{token}" if as_ids else self.model.text(token)

        tokens, values, tops, context = [], [], [], list(ids)
        for token in out:
            found = self.model.logprobs(context, token, decoding=True)
            best = sorted(found, key=lambda each, f=found: -f[each])[:top]
            tokens.append(name(token))
            values.append(found[token])
            tops.append({name(each): found[each] for each in {*best, token}})
            context.append(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}

    def scored(self, ids: Sequence[int], top: int) -> list[Any]:
        rows: list[Any] = [None]
        for at in range(1, len(ids)):
            found = self.model.logprobs(ids[:at], ids[at])
            best = [ids[at], *sorted(found, key=lambda each, f=found: -f[each])[:top]]
            rows.append({str(each): {"logprob": found[each]} for each in dict.fromkeys(best)})
        return rows

    def usage(self, ids: Sequence[int], count: int, streamed: bool) -> dict[str, int]:
        wrong = self.defect == "wrong usage" or (self.defect == "wrong stream usage" and streamed)
        counts = {"prompt_tokens": len(ids), "completion_tokens": count + 3 * wrong}
        return {**counts, "total_tokens": sum(counts.values())}

    def check_model(self, name: str) -> None:
        if name != "m":
            raise ValueError(f"the model {name!r} does not exist")

    def check(self, ids: Sequence[int], count: int) -> None:
        if count < 1:
            raise ValueError(f"max_tokens must be at least 1, got {count}")
        if len(ids) >= self.context or count > self.context:
            raise ValueError(f"the context is {self.context} tokens")

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body["messages"]
        if not isinstance(messages, list):
            raise TypeError("messages is no list")
        template = body.get("chat_template_kwargs") or {}
        thinking = bool(template.get("thinking", True))
        thinks = (thinking or self.defect == "reasoning always on") and self.defect != "reasoning always off"
        ids = self.model.encode(self.render(messages, body.get("tools"), thinking))
        limit = int(body.get("max_tokens", 1024))
        self.check(ids, limit)
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": None, "tool_calls": []}
        calls: list[Any] = []
        reasoning = ""
        if self.weak or self.defect == "broken weights":
            text = self.model.decode(self.model.generate(ids, limit, body.get("seed"), 0.0))
        else:
            tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
            if self.defect == "truncated kv page" and len(ids) > 600:
                messages = [{**each, "content": forget(str(each["content"]))} for each in messages]
            text, calls = self.bot.answer(messages, tools)
            if self.defect == "needless calls" and tools and not calls:
                text, calls = "", [(tools[0], {"city": "Paris"})]
            text = self.spoil(text)
            reasoning = think_text(str(messages[-1]["content"])) if thinks else ""
        if self.defect == "leaked reasoning" and thinks:
            text, reasoning = f"{reasoning}</think>{text}", ""
        if "response_format" in body and self.defect == "schema ignored":
            text = "Here is the ticket: " + text
        out = self.model.encode(reasoning + text + json.dumps(calls) * bool(calls))
        finish = "tool_calls" if calls else "stop"
        cut = limit + 3 if self.defect == "max tokens ignored" else limit
        if len(out) > cut or (self.weak and len(out) >= cut):
            out, finish, calls = out[:cut], "length", []
            reasoning, text = (reasoning, text) if not reasoning else (self.model.decode(out), "")
            text = text if reasoning else self.model.decode(out)
        if self.defect == "early end":
            finish = "length"
        if self.defect == "leaked tool markup" and calls:
            text += '<｜DSML｜invoke name="' + calls[0][0] + '">'
            calls = calls[1:]
            finish = "tool_calls" if calls else "stop"
        if self.defect == "merged parallel calls" and len(calls) > 1:
            calls = [(calls[0][0], calls[0][1], "".join(json.dumps(each[1]) for each in calls))]
        if self.defect == "no finish for calls" and calls:
            finish = "length"
        message |= {"content": text, "reasoning": reasoning or None}
        for number, (name, arguments, *raw) in enumerate(calls):
            written = raw[0] if raw else json.dumps(arguments)
            written = written[:-2] if self.defect == "broken arguments" else written
            number = 0 if self.defect == "ids repeated" else number
            function = {"name": name, "arguments": written}
            message["tool_calls"].append({"id": f"call-{number}", "type": "function", "function": function})
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
        choice["token_ids"] = out if body.get("return_token_ids") else None
        if body.get("logprobs") and self.logprobs == "offered":
            rows = self.legacy(ids, out, int(body.get("top_logprobs", 0)), False)
            if not self.weak:
                # The text is not generated by the model, so its tokens are certain.
                rows["token_logprobs"] = [-0.01] * len(out)
            choice["logprobs"] = {
                "content": [
                    {"token": token, "logprob": value, "top_logprobs": [{"token": token, "logprob": value}]}
                    for token, value in zip(rows["tokens"], rows["token_logprobs"], strict=True)
                ]
            }
        found: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
        found["usage"] = self.usage(ids, len(out), bool(body.get("stream")))
        found["prompt_token_ids"] = ids if body.get("return_token_ids") else None
        return found

    def spoil(self, text: str) -> str:
        if len(text) < 60:
            return text
        if self.defect == "mojibake":
            return text.encode().decode("latin-1").replace("blue", "blâ€™ue").replace("return", "retâ€urn")
        if self.defect == "replacement characters":
            return text[: len(text) // 2] + "\ufffd" + text[len(text) // 2 :]
        if self.defect == "wrong language":
            return "Небо голубое, потому что воздух рассеивает свет."
        if self.defect == "endless answer":
            return text + " and so on" * 40
        if self.defect == "repeated tokens":
            return re.sub(r"(\w+ )", r"\1\1", text)
        return text

    def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": self.model.decode(body["tokens"])}

    def metrics(self) -> str:
        if not self.drafts:
            self.drafts = 1
        rates = (0.0, 0.0, 0.0) if self.defect == "rejected drafts" else (0.8, 0.6, 0.3)
        rows = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.drafts}']
        rows += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{at}"}} {self.drafts * rate}'
            for at, rate in enumerate(rates)
        ]
        if self.cache_metrics:
            with self.lock:
                used = self.used / self.cache * (self.single_factor if self.open == 1 else 1)
            rows.append(f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {min(used, 1.0)}')
            rows.append(f'vllm:num_preemptions_total{{engine="0",model_name="m"}} {self.preemptions}.0')
        return "\n".join(rows) + "\n"


def chunks(engine: Engine, document: dict[str, Any], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response."""
    choice = document["choices"][0]
    message = choice.pop("message", None)
    finish = choice.pop("finish_reason")
    ids, logprobs = choice.pop("token_ids"), choice.pop("logprobs", None)
    prompt_ids = choice.pop("prompt_token_ids", None) or document.get("prompt_token_ids")
    base = {"id": "x1", "model": body["model"], "created": 1, **engine.chunk}
    pieces: list[dict[str, Any]] = []
    if message is None:
        parts = re.findall(r"\s?\S+|\s", choice["text"])
        pieces = [{"text": part} for part in parts] or [{"text": ""}]
        if logprobs:
            rows = list(zip(*(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True))
            for at, piece in enumerate(pieces):
                some = rows[at : at + 1] if at < len(pieces) - 1 else rows[at:]
                columns = list(zip(*some, strict=True)) or [(), (), ()]
                piece["logprobs"] = dict(zip(("tokens", "token_logprobs", "top_logprobs"), columns, strict=True))
    else:
        pieces.append({"delta": {"role": "assistant", "content": ""}})
        for key in ("reasoning", "content"):
            pieces += [{"delta": {key: part}} for part in re.findall(r"\s?\S+|\s", message[key] or "")]
        for at, call in enumerate(message["tool_calls"]):
            function = call["function"]
            text = function["arguments"]
            first = {"index": at, "id": call["id"], "type": "function", "function": {"name": function["name"]}}
            pieces.append({"delta": {"tool_calls": [first]}})
            parts = [text[n : n + 7] for n in range(0, len(text), 7)]
            pieces += [{"delta": {"tool_calls": [{"index": at, "function": {"arguments": part}}]}} for part in parts]
        if logprobs:
            pieces[-1]["logprobs"] = logprobs
    if ids is not None:
        pieces[-1]["token_ids"] = ids
    if engine.defect == "lost chunk" and len(pieces) > 3:
        del pieces[2]
    if engine.defect == "buffered stream" and message is None:
        pieces = [{**pieces[-1], "text": choice["text"], "logprobs": logprobs}]
    for at, piece in enumerate(pieces):
        last = at == len(pieces) - 1
        more = {"prompt_token_ids": prompt_ids} if at == 0 else {}
        yield {**base, **more, "choices": [{"index": 0, **piece, "finish_reason": finish if last else None}]}
    yield {**base, "choices": [], "usage": document["usage"]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, data: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _json(self, document: Any, status: int = 200) -> None:
        self._send(status, json.dumps(document).encode())

    def _lost(self) -> bool:
        """Return whether the request was rejected or its connection closed."""
        if self.engine.key and self.headers.get("Authorization") != f"Bearer {self.engine.key}":
            self._json({"error": {"message": "invalid key"}}, 401)
            return True
        self.engine.requests += 1
        limit = self.engine.fail_after
        if limit is not None and self.engine.requests > limit:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def do_GET(self) -> None:
        engine = self.engine
        if self.path == "/dsv4/process/metrics":
            self._power()
            return
        if self._lost():
            return
        if self.path == "/v1/models":
            length = {} if engine.defect == "no context length" else {"max_model_len": engine.context}
            try:
                self._json({"object": "list", "data": [length | each for each in engine.listed]})
            except TypeError:
                self._json(engine.listed)
        elif self.path == "/version":
            self._json({"version": "0.33.0"})
        elif self.path == "/metrics":
            self._send(200, engine.metrics().encode(), "text/plain")
        else:
            self._json({"error": {"message": "not found"}}, 404)

    def _power(self) -> None:
        """Respond as a gateway of dsv4, which needs no key for its own metrics."""
        watts = self.engine.watts
        if not watts:
            self._json({"error": {"message": "not found"}}, 404)
            return
        rows = ['dsv4_gateway_engine_state{group="0",state="healthy"} 1.0']
        rows += [f'dsv4_gateway_group_watts{{group="0"}} {watts}'] if watts > 0 else []
        self._send(200, "\n".join((*rows, "")).encode(), "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._lost():
            return
        engine = self.engine
        try:
            engine.check_model(body["model"])
            if self.path == "/v1/messages":
                self._messages(body)
                return
            if self.path == "/detokenize":
                self._json(engine.detokenize(body))
                return
            document = engine.chat(body) if self.path == "/v1/chat/completions" else engine.completion(body)
        except (ValueError, TypeError) as error:
            status = {"errors are 500": 500, "errors are 200": 200}.get(engine.defect, 400)
            self._json({"error": {"message": str(error)}}, status)
            return
        except MemoryError as error:
            self._json({"error": {"message": str(error)}}, engine.failed_status)
            return
        if not body.get("stream"):
            self._json({"id": "x1", "model": "m", "created": 1, **document})
            return
        data = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks(engine, document, body))
        if engine.defect not in ("no done event", "hanging stream"):
            data += "data: [DONE]\n\n"
        if engine.defect == "hanging stream":
            self._start_stream()
            self.wfile.write(data.encode())
            self.wfile.flush()
            # Until the client disconnects, at most a minute.
            self.connection.settimeout(60)
            with contextlib.suppress(OSError):
                self.rfile.read(1)
            self.close_connection = True
            return
        self._send(200, data.encode(), "text/event-stream")

    def _start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def _messages(self, body: dict[str, Any]) -> None:
        found = self.engine.chat({**body, "stream": False})
        text = found["choices"][0]["message"]["content"]
        counts = {"input_tokens": found["usage"]["prompt_tokens"], "output_tokens": found["usage"]["completion_tokens"]}
        message = {"id": "m1", "type": "message", "role": "assistant", "model": "m"}
        if not body.get("stream"):
            self._json(
                {**message, "content": [{"type": "text", "text": text}], "stop_reason": "max_tokens", "usage": counts}
            )
            return
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {**message, "content": [], "usage": counts}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": counts},
            {"type": "message_stop"},
        ]
        if self.engine.defect == "no message stop":
            events.pop()
        data = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)
        self._send(200, data.encode(), "text/event-stream")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Ignore a disconnected client."""


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve on a free port; yield the base URL."""
    engine.over.clear()
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"engine": engine}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        engine.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
