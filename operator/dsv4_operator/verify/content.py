"""Checks of content: a matrix of languages and reasoning modes, dialogues with tool calls, structured output; a task of
lm-eval.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dsv4_operator.verify.checks import Check, Figures, Session, no_markup, user
from dsv4_operator.verify.endpoint import Client, Defect, Reason, Reply, Skip, ToolCall

# Generation.

LANGUAGES: Mapping[str, str] = {
    "english": "Explain in four or five sentences why the sky is blue.",
    "chinese": "请用四五句话解释天空为什么是蓝色的。",
    "code": "Write a Python function that returns the n-th Fibonacci number. Answer with one Python code block only.",
}
MODES: Mapping[str, tuple[bool | str, int]] = {"off": (False, 1024), "high": ("high", 4096), "max": ("max", 8192)}
"""Reasoning mode -> template argument, limit of tokens."""
_UNIT = re.compile(r"(\w[^\n]{0,59}?)\1{5,}")
_MOJIBAKE = re.compile(r"Ã[\x80-\xbf¡-¿]|â€|ï»¿|å[\x80-\xbf]|\\u[0-9a-f]{4}")


def language_problem(language: str, text: str) -> str:
    """Return why `text` is not in the language; empty if it is."""
    if language == "code":
        block = re.search(r"```(?:python|py)?\n(.*?)```", text, re.DOTALL)
        source = block[1] if block else text
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"the code does not compile: {str(error) or 'it is nested too deeply'}"
        has_function = any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))
        return "" if has_function else "the code defines no function"
    letters = [char for char in text if char.isalpha()]
    if not letters:
        return "the text has no letters"
    chinese = sum("\u4e00" <= char <= "\u9fff" for char in letters) / len(letters)
    latin = sum(char.isascii() for char in letters) / len(letters)
    share = chinese if language == "chinese" else latin
    return "" if share > (0.6 if language == "chinese" else 0.9) else f"only {share:.0%} of the letters are {language}"


def repetition_problem(text: str) -> str:
    """Return the repetition in `text`; empty if there is none."""
    if found := _UNIT.search(text):
        return f"{found[1]!r} is repeated {len(found.group()) // len(found[1])} times in a row"
    words = text.split()
    twice = sum(one == other for one, other in itertools.pairwise(words))
    if len(words) > 20 and twice > len(words) // 12:
        return f"{twice} of {len(words)} words repeat the word before"
    lines = Counter(line.strip() for line in text.splitlines() if len(line.strip()) > 20)
    if lines and (most := lines.most_common(1)[0])[1] > 5:
        return f"the line {most[0][:40]!r} occurs {most[1]} times"
    return ""


def garble_problem(text: str) -> str:
    """Return the sign of broken decoding in `text`; empty if there is none."""
    if "\ufffd" in text:
        return "the text has replacement characters (U+FFFD)"
    for char in text:
        if unicodedata.category(char) in ("Cc", "Co", "Cn", "Cs") and char not in "\n\t\r":
            return f"the text has the character U+{ord(char):04X}"
    if found := _MOJIBAKE.search(text):
        return f"the text has wrongly decoded bytes: {found.group()!r}"
    return ""


def generation(language: str, mode: str) -> Callable[[Session], Awaitable[Figures]]:
    """Return the check of one cell of the matrix."""
    thinking, limit = MODES[mode]

    async def run(session: Session) -> Figures:
        tokens = min(limit, session.facts.context(0.5))
        reply = await session.client.chat(user(LANGUAGES[language]), thinking=thinking, max_tokens=tokens)
        if reply.finish != "stop":
            raise Defect(f"the answer is truncated after {reply.completion_tokens} tokens", reply.text[-300:])
        no_markup(reply)
        if not reply.content.strip():
            raise Defect("the answer is empty", reply.text)
        if thinking and len(reply.reasoning.strip()) < 10:
            raise Defect("the reasoning is empty", reply.text)
        if not thinking and reply.reasoning:
            raise Defect("there is reasoning although it is off", reply.reasoning)
        for text in (reply.content, reply.reasoning):
            if problem := repetition_problem(text) or garble_problem(text):
                raise Defect(problem, text)
        if problem := language_problem(language, reply.content):
            raise Defect(problem, reply.content)
        return {"tokens": reply.completion_tokens, "reasoning_characters": len(reply.reasoning)}

    return run


# Tool calls.


def _tool(name: str, description: str, required: Sequence[str] | None = None, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_TEXT, _NUMBER, _INTEGER, _FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
_WEATHER = _tool("get_weather", "Current weather of a city.", city=_TEXT)
_ADD = _tool("add", "Sum of two numbers.", a=_NUMBER, b=_NUMBER)
_LOCATE = _tool("locate_user", "City in which a user is at present.", user=_TEXT)
_LIGHT = _tool(
    "set_light", "Switch a light.", room={"type": "string", "enum": ["kitchen", "bedroom", "hall"]}, on=_FLAG
)
_EVENT = _tool(
    "create_event",
    "Create a calendar event.",
    title=_TEXT,
    when={
        "type": "object",
        "properties": {"date": {"type": "string", "description": "YYYY-MM-DD"}, "hour": _INTEGER},
        "required": ["date", "hour"],
        "additionalProperties": False,
    },
    guests={"type": "array", "items": _TEXT},
)
_NOTE = _tool("save_note", "Save a note with exactly the given text.", text=_TEXT)
_MANY = (_WEATHER, _ADD, _LOCATE, _LIGHT, _EVENT, _NOTE, _tool("get_time", "Local time of a city.", city=_TEXT))

Arguments = Mapping[str, Any]
Expected = tuple[str, Arguments]


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of a dialogue: expected calls with their results, or expected text."""

    calls: tuple[Expected, ...] = ()
    results: tuple[str, ...] = ()
    text: str = ""
    """Part of the answer if there are no calls; empty: any answer."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation with tools."""

    name: str
    question: str
    tools: tuple[dict[str, Any], ...]
    steps: tuple[Step, ...]
    stream: bool = False
    thinking: bool = False
    choice: Any = "auto"
    """`tool_choice` of the first request."""


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


_SUNNY = Step((("get_weather", {"city": "Paris"}),), ('{"weather": "sunny", "degrees": 21}',))
_TRICKY = 'He said "5 < 6 & 7 > 2";\nthen: naïve café 日本'
DIALOGUES = (
    Dialogue("single", "What is the weather in Paris?", (_WEATHER,), (_SUNNY, Step(text="21"))),
    Dialogue("streamed", "What is the weather in Paris?", (_WEATHER,), (_SUNNY, Step(text="21")), stream=True),
    Dialogue("reasoning", "What is the weather in Paris?", (_WEATHER,), (_SUNNY, Step(text="21")), thinking=True),
    Dialogue(
        "reasoning-streamed",
        "What is the weather in Paris?",
        (_WEATHER,),
        (_SUNNY, Step(text="21")),
        stream=True,
        thinking=True,
    ),
    Dialogue(
        "parallel",
        "What is the weather in Paris and in Rome? Call the tool for both cities at once.",
        (_WEATHER,),
        (
            Step((("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})), ("sunny, 21", "rainy, 14")),
            Step(text="14"),
        ),
    ),
    Dialogue(
        "parallel-streamed",
        "What is the weather in Paris, in Rome and in Oslo? Call the tool for all three cities at once.",
        (_WEATHER,),
        (
            Step(
                tuple(("get_weather", {"city": city}) for city in ("Paris", "Rome", "Oslo")),
                ("sunny, 21", "rainy, 14", "snow, -3"),
            ),
            Step(text="14"),
        ),
        stream=True,
    ),
    Dialogue(
        "chain",
        "What is the weather where the user ann is? Locate ann first.",
        (_LOCATE, _WEATHER),
        (
            Step((("locate_user", {"user": "ann"}),), ("Rome",)),
            Step((("get_weather", {"city": "Rome"}),), ("rainy, 14",)),
            Step(text="14"),
        ),
    ),
    Dialogue("no-tool", "Say hello without any tool.", (_WEATHER,), (Step(text="ello"),)),
    Dialogue(
        "selection",
        "What is the local time in Oslo?",
        _MANY,
        (Step((("get_time", {"city": "Oslo"}),), ("18:05",)), Step(text="18:05")),
    ),
    Dialogue(
        "enumeration",
        "Switch on the light in the kitchen.",
        (_LIGHT, _WEATHER),
        (Step((("set_light", {"room": "kitchen", "on": True}),), ("done",)), Step()),
    ),
    Dialogue(
        "nested",
        "Create the event Review on 2027-03-04 at hour 15 with the guests ann and bob.",
        (_EVENT,),
        (
            Step(
                (
                    (
                        "create_event",
                        {"title": "Review", "when": {"date": "2027-03-04", "hour": 15}, "guests": ["ann", "bob"]},
                    ),
                ),
                ("created",),
            ),
            Step(),
        ),
    ),
    Dialogue(
        "numbers",
        "Add 12.5 and 30 with the tool.",
        (_ADD,),
        (Step((("add", {"a": 12.5, "b": 30}),), ("42.5",)), Step(text="42.5")),
        stream=True,
    ),
    Dialogue(
        "characters",
        f"Save a note with exactly this text:\n{_TRICKY}",
        (_NOTE,),
        (Step((("save_note", {"text": _TRICKY}),), ("saved",)), Step()),
        stream=True,
    ),
    Dialogue(
        "required",
        "What is the weather in Paris?",
        (_WEATHER, _NOTE),
        (_SUNNY, Step(text="21")),
        choice="required",
    ),
    Dialogue(
        "named",
        "What is the weather in Paris?",
        (_NOTE, _WEATHER),
        (_SUNNY, Step(text="21")),
        choice=_named("get_weather"),
    ),
)


def dialogue(item: Dialogue) -> Callable[[Session], Awaitable[Figures]]:
    """Return the check of a dialogue. A violation of the protocol is a defect, another call only if it is repeated."""

    async def run(session: Session) -> Figures:
        problem = ""
        for attempt in (1, 2):
            sampling = {} if attempt == 1 else {"temperature": 0.6, "seed": attempt}
            problem, requests = await _converse(session.client, item, sampling)
            if not problem:
                return {"requests": requests, "attempts": attempt}
        raise Defect(problem)

    return run


async def _converse(client: Client, item: Dialogue, sampling: Mapping[str, Any]) -> tuple[str, int]:
    """Return how the model failed, empty if it did not, and the number of requests."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": item.question}]
    for number, step in enumerate(item.steps):
        reply = await client.chat(
            messages,
            thinking=item.thinking,
            tools=list(item.tools),
            tool_choice=item.choice if number == 0 else "auto",
            max_tokens=2048 if item.thinking else 512,
            stream=item.stream,
            optional=number == 0,
            **sampling,
        )
        check_calls(reply, item.tools)
        if problem := _difference(step, reply):
            return f"request {number + 1}: {problem}", number + 1
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
        if calls:
            messages.append({"role": "assistant", "content": reply.content or None, "tool_calls": calls})
            order = _order(step.calls, reply.calls)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": step.results[order[at]]}
                for at, call in enumerate(reply.calls)
            ]
    return "", len(item.steps)


def check_calls(reply: Reply, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise `Defect` if the tool calls of a reply violate the protocol or their schemas, or if markup has leaked."""
    no_markup(reply)
    if reply.calls and reply.finish not in ("tool_calls", "stop"):
        raise Defect(f"finish_reason is {reply.finish!r} with {len(reply.calls)} tool calls", reply.content)
    ids = [call.id for call in reply.calls]
    if not all(ids) or len(set(ids)) != len(ids):
        raise Defect(f"the ids of the tool calls are empty or equal: {ids}")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in reply.calls:
        if call.name not in schemas:
            raise Defect(f"the called tool {call.name!r} does not exist", call.arguments)
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            raise Defect(f"the arguments of {call.name} are no JSON: {error}", call.arguments) from None
        for problem in violations(arguments, schemas[call.name], call.name):
            raise Defect(f"the arguments do not match the schema: {problem}", call.arguments)
        if re.search(r"</?think>|<｜|DSML", call.arguments):
            raise Defect(f"the arguments of {call.name} have markup", call.arguments)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def violations(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the violations of the subset of JSON Schema that the tools use."""
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{path} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is none of {schema['enum']}"
    if isinstance(value, dict):
        yield from (f"{path}.{key} is missing" for key in schema["required"] if key not in value)
        for key, part in value.items():
            if key not in schema["properties"]:
                yield f"{path}.{key} is not in the schema"
            else:
                yield from violations(part, schema["properties"][key], f"{path}.{key}")
    elif isinstance(value, list):
        for part in value:
            yield from violations(part, schema["items"], f"{path}[]")


def _difference(step: Step, reply: Reply) -> str:
    """Return how the reply differs from the expected calls or text; empty if it does not."""
    if not step.calls:
        if reply.calls:
            return f"unexpected call of {reply.calls[0].name}"
        return "" if step.text in reply.content and reply.content.strip() else f"the answer lacks {step.text!r}"
    if len(reply.calls) != len(step.calls):
        return f"{len(reply.calls)} calls instead of {len(step.calls)}"
    return "" if len(_order(step.calls, reply.calls)) == len(step.calls) else "other calls or arguments than requested"


def _order(expected: Sequence[Expected], calls: Sequence[ToolCall]) -> list[int]:
    """Return for each call the index of the expected one; shorter if one has none."""
    left, order = list(range(len(expected))), []
    for call in calls:
        found = next((at for at in left if _matches(expected[at], call)), None)
        if found is None:
            break
        left.remove(found)
        order.append(found)
    return order


def _matches(expected: Expected, call: ToolCall) -> bool:
    return call.name == expected[0] and _equal(expected[1], json.loads(call.arguments))


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, Mapping):
        return isinstance(found, dict) and all(_equal(value, found.get(key)) for key, value in expected.items())
    if isinstance(expected, str) and isinstance(found, str) and expected.isalpha():
        # `Paris, France` is Paris.
        return expected.casefold() in found.casefold()
    return bool(expected == found)


# Structured output.


class Ticket(BaseModel):
    """Schema of the checks; every part of it is bounded, so that any model completes it."""

    model_config = ConfigDict(extra="forbid")
    priority: Literal["low", "high"]
    open: bool
    queue: Literal[1, 2, 3]


_TICKET_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "priority": {"type": "string", "enum": ["low", "high"]},
        "open": {"type": "boolean"},
        "queue": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["priority", "open", "queue"],
    "additionalProperties": False,
}


def json_schema(*, streamed: bool) -> Callable[[Session], Awaitable[Figures]]:
    """Return the check of a response format with a JSON schema."""

    async def run(session: Session) -> Figures:
        form = {"type": "json_schema", "json_schema": {"name": "ticket", "strict": True, "schema": _TICKET_SCHEMA}}
        reply = await session.client.chat(
            user("The printer is on fire. Write the ticket as JSON: priority, open, queue 2."),
            max_tokens=128,
            response_format=form,
            stream=streamed,
            optional=True,
        )
        if reply.finish == "length" and not session.facts.capable:
            raise Skip(Reason.TOO_WEAK, "the output did not end within 128 tokens")
        try:
            Ticket.model_validate_json(reply.content)
        except ValidationError as error:
            found = error.errors()[0]["msg"]
            raise Defect(f"the output does not match its JSON schema: {found}", reply.text) from None
        return {"tokens": reply.completion_tokens}

    return run


async def choice(session: Session) -> Figures:
    """Check that the output is one of the given choices."""
    choices = ["positive", "negative"]
    reply = await _guided(session, {"choice": choices})
    if reply.content not in choices:
        raise Defect(f"the output is none of {choices}", reply.content)
    return {"output": reply.content}


async def regex(session: Session) -> Figures:
    """Check that the output matches the given regular expression."""
    pattern = "[A-Z]{3}-[0-9]{4}"
    reply = await _guided(session, {"regex": pattern})
    if not re.fullmatch(pattern, reply.content):
        raise Defect(f"the output does not match {pattern!r}", reply.content)
    return {"output": reply.content}


async def _guided(session: Session, constraint: Mapping[str, Any]) -> Reply:
    if not session.facts.vllm:
        raise Skip(Reason.NOT_OFFERED, "structured_outputs is a parameter of vLLM")
    return await session.client.complete(
        "Review: it works well. Result:", max_tokens=32, structured_outputs=dict(constraint), optional=True
    )


_MATRIX_REMEDY = "compare with --thinking off in `dsv4 chat`; check reasoning parser, chat template and kernels"
_TOOL_REMEDY = "check --tool-call-parser, --enable-auto-tool-choice and the chat template"


def content_checks() -> Iterator[Check]:
    """Yield the checks of the matrix and of the dialogues."""
    for language in LANGUAGES:
        for mode in MODES:
            quick = (language, mode) == ("english", "off")
            summary = f"an answer in {language}, reasoning {mode}, is complete and readable"
            run = generation(language, mode)
            yield Check(f"generation.{language}-{mode}", summary, run, _MATRIX_REMEDY, quick=quick, content=True)
    for item in DIALOGUES:
        summary = f"dialogue with tools: {item.name}, {len(item.steps)} requests"
        yield Check(
            f"tools.{item.name}", summary, dialogue(item), _TOOL_REMEDY, quick=item.name == "single", content=True
        )


# A task of lm-eval that needs no download.

ARITHMETIC = "dsv4_arithmetic"
_ARITHMETIC_QUESTIONS = 200
_EXAMPLES = 3
_SUMS: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    ("Ada has {a} apples and buys {b} bags of {c} apples. How many apples does she have?", lambda a, b, c: a + b * c),
    ("A train has {b} wagons of {a} seats, and {c} seats are taken. How many are free?", lambda a, b, c: a * b - c),
    (
        "A baker sells {a} loaves before noon and {b} later; {c} come back. How many are sold?",
        lambda a, b, c: a + b - c,
    ),
    ("Wang reads {a} pages a day for {b} days, then {c} more. How many pages are that?", lambda a, b, c: a * b + c),
)


def arithmetic_files(folder: str) -> dict[str, str]:
    """Return name and content of the files of the task `dsv4_arithmetic` for a folder: 200 sums in words."""
    source = random.Random(ARITHMETIC)  # noqa: S311  (the same questions everywhere)
    sums: list[tuple[str, int]] = []
    while len(sums) < _ARITHMETIC_QUESTIONS + _EXAMPLES:
        text, solve = source.choice(_SUMS)
        a, b, c = source.randint(11, 60), source.randint(2, 9), source.randint(2, 12)
        if (pair := (text.format(a=a, b=b, c=c), solve(a, b, c))) not in sums:
            sums.append(pair)
    start = "".join(f"Question: {text}\nAnswer: {answer}\n\n" for text, answer in sums[:_EXAMPLES])
    rows = [{"prompt": f"{start}Question: {text}\nAnswer:", "answer": str(answer)} for text, answer in sums[_EXAMPLES:]]
    task = {
        "task": ARITHMETIC,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{folder}/questions.jsonl"}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 32},
        "filter_list": [
            {
                "name": "number",
                "filter": [{"function": "regex", "regex_pattern": "(-?[0-9]+)"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }
    # YAML contains JSON.
    return {f"{ARITHMETIC}.yaml": json.dumps(task), "questions.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
