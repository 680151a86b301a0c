"""Log lines: provenance of a line (process, file, whether clients control its text), vLLM's figures of memory. Pure.

vLLM and uvicorn log text that clients choose: model names, paths, query strings, request ids, sampling parameters. Such
text is neither evidence nor kept. While an engine starts it receives no requests, so every line counts except those of
the emitters that log requests. While it serves, a line counts only if it starts like a line of a known emitter.
Formats: vLLM 0.32 and 0.33 (`logger.py`, `logging_utils/formatter.py`), uvicorn, Ray, NCCL, torch's C++ log.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

from dsv4_runtime.util.secrets import has_secret

FATAL_SECONDS = 300.0
"""A fatal line does not explain a death that follows more than this later."""

P = ParamSpec("P")
T = TypeVar("T")
N = TypeVar("N")

# `(EngineCore pid=1) (RayWorkerProc pid=9, ip=10.0.0.2) ERROR 11-23 07:23:32 [core.py:1512] `; each part may be absent.
_PROCESS = r"(?:[ ,]{1,2}(?:pid|ip|rank)=[\w.:]{1,60}){0,3}\) "
_HEAD = re.compile(
    rf"(?:\((?P<process>\w{{1,64}}){_PROCESS}(?:\(\w{{1,64}}{_PROCESS}){{0,2}})?"
    r"(?:(?P<level>[A-Z]{4,8}) [-\d:. ]{0,40}\[(?:[\w.-]{1,80}/){0,8}(?P<file>[\w-]{1,80})\.py:\d{1,6}\](?: |$))?"
)
_ENGINE_PROCESS = re.compile(r"EngineCore|RayWorker|Worker|VllmWorker|raylet$")
# uvicorn's access log: address, request line, status.
_ACCESS = re.compile(rf'(?:\(\w{{1,64}}{_PROCESS}){{0,2}}INFO: {{1,12}}[^"]{{0,80}}- "')
# Source files of vLLM whose messages contain parts of requests: the API's handlers, and the dump at a death.
_REQUEST_FILE = re.compile(r"serving|api_router|dump_input|^(?:request_)?logger$|exception_handler|chat_utils")
# Further such files, whose messages are free of requests while an engine starts.
_CLIENT_FILE = re.compile(
    rf"{_REQUEST_FILE.pattern}|handler|^http|validation|protocol|middleware|render|preprocess|processor|parser|reasoning"
    r"|harmony|connection|multimodal|sampling_params|backend_(?:xgrammar|guidance|outlines|lm)|structured_output|grammar"
    r"|tokenize"
)
# The same for the frames of a traceback: an error that is raised there may quote the request.
_CLIENT_CODE = re.compile(
    r"structured_output|grammar|guidance|outlines|lmformatenforcer|sampling_params|pooling_params|logits_proc|logitsproc"
    r"|tokeniz|parser|reasoning|entrypoints|render|processor|multimodal|jinja|pydantic|fastapi|starlette|/json/"
)
# Messages of vLLM's API process, and of processes without a name, that contain no text of clients.
_KNOWN = re.compile(
    r"async_llm\.py:\d+\] AsyncLLM output_handler failed\.$"
    r"|core_client\.py:\d+\] (?:Engine core proc \S{1,80} died|(?:\[shutdown\] )?MPClient: engine core exited)"
    r"|(?:launcher|core_client)\.py:\d+\] \[shutdown\] [\w :;,.=()/-]{0,200}$"
    r"|loggers\.py:\d+\] Engine \d+: "
    r"|multiproc_executor\.py:\d+\] Worker proc \S{1,80} died unexpectedly"
    r"|ray_executor_v2\.py:\d+\] RayWorkerProc rank=\S{1,80} died unexpectedly"
)
_SHUTTING_DOWN = re.compile(r"(?:\(APIServer[^()]{0,80}\) )?INFO: {1,12}Shutting down$")
_NCCL = re.compile(
    r"[\w.-]{1,64}:\d{1,8}:\d{1,8} (?:\[\d{1,4}\] )?(?:[\w./-]{1,80}:\d{1,6} )?NCCL (?:INFO|WARN|ERROR|version) "
)
# torch's and glog's C++, the C++ runtime, Python's faulthandler.
_NATIVE = re.compile(
    r"(?:\[rank\d{1,6}\]:)?\[[EFW]\d{3,4} [^\[\]]{1,80}\.(?:cpp|cc|cu|h|hpp):\d{1,6}\] "
    r"|terminate called after throwing an instance of '[\w:]{1,80}'$"
    r"|Fatal Python error: [\w ]{1,80}$"
)
# From here on a message names a request, whose id clients choose.
_REQUEST = re.compile(
    r"\b(?:[Rr]equests?|[Rr]eq_ids?|request_ids?)\b|\b(?:chatcmpl|cmpl|resp|msg|embd|pool|score|rerank|classify)-"
)
_ERROR = re.compile(r"[\w.]{1,120}(?=:|$)")
_CHAINED = frozenset(
    {
        "",
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    }
)
_WITHHELD = "[text withheld]"
_TRACEBACKS = 64


# In front of the lines: a container's name (Docker Compose), a pod, a time of `kubectl logs` or Docker, a rank of
# mpirun or srun, a file of grep, the journal, a quotation.
_CARRIER = re.compile(
    r"^(?:[\w.-]{1,80} {0,20}\| ?|\^C|\s{0,8}Line \d{1,7}: ?|\[pod/[^\]]{1,200}\] ?"
    r"|\[?\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-][\d:]{4,6})\]? |\d{4}-\d\d-\d\d [\d:.]{8,15} {1,3}\| ?"
    r"|\[\d{1,4},\d{1,6}\]<std(?:err|out)>: ?|[\w./-]{1,200}\.(?:log|out|err|txt):(?=[(\[A-Za-z])|\d{1,4}: (?=[(\[A-Z])"
    r"|[\w.-]{3,120} [\w.-]{1,60} (?=\((?:APIServer|EngineCore|Worker|RayWorker)[^()]{0,80}\) )"
    r"|[A-Z][a-z]{2} [ \d]\d [\d:]{8} \S{1,80} \S{1,80}\[\d{1,9}\]: |> |\[(?!rank\d)[A-Za-z][\w.-]{0,40}\]: )"
)
# A line of Docker's own files: its text is a JSON string.
_JSON_LINE = re.compile(r'^\{"log": ?"')
# Copied logs have colour codes without their first character, or with one that a program wrote in another way.
_COLOUR = re.compile(r"(?:\x1b|\^\[|#033|\\(?:x1b|033|u001b|e))\[[0-9;]{0,16}[A-Za-z]|\[\d{1,3}(?:;\d{1,3}){0,4}m")
# Times of vLLM, Ray, Docker and Kubernetes; of torch and glog; of the journal.
_TIME = re.compile(
    r"(?:\d{4}-)?\b(?P<month>[01]\d)-(?P<day>[0-3]\d)[T ](?P<time>\d\d:\d\d:\d\d)"
    r"|[DIWEFC](?P<date>\d{3,4}) (?P<clock>\d\d:\d\d:\d\d)"
    r"|^(?:\[[A-Z][a-z]{2} )?(?P<name>[A-Z][a-z]{2}) (?P<number>[ \d]\d) (?P<hour>\d\d:\d\d:\d\d)"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIME_WITHIN = 160

Time = tuple[int, int, str]
"""Month, day and time of day of a line, in the zone of its writer: most programs log no year and no zone."""


class Head(NamedTuple):
    """The part of a line that its logger wrote in front of the message; parts that it lacks are empty."""

    process: str
    level: str
    file: str
    """Name of the source file without `.py`."""
    at: int
    """Index of the file's name in the line."""
    length: int


def head(line: str) -> Head:
    """Return the head of `line`."""
    found = _HEAD.match(line)
    assert found is not None  # noqa: S101  (every part is optional)
    return Head(found["process"] or "", found["level"] or "", found["file"] or "", found.start("file"), found.end())


def bare(line: str) -> str:
    """Return a line without colours and what carried it."""
    line = _COLOUR.sub("", line).rstrip().removesuffix("^M")
    if _JSON_LINE.match(line):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            line = _COLOUR.sub("", str(json.loads(line)["log"])).rstrip()
    for _ in range(2):
        line = _CARRIER.sub("", line, count=1)
    return line


def time_of(line: str) -> Time | None:
    """Return the time of a line: its own, else that of its carrier; None: it has none."""
    return _time(bare(line)) or _time(line)


def _time(line: str) -> Time | None:
    if (found := _TIME.search(line[:_TIME_WITHIN])) is None:
        return None
    if found["month"]:
        return int(found["month"]), int(found["day"]), found["time"]
    if found["date"]:
        return int(found["date"][:-2]), int(found["date"][-2:]), found["clock"]
    if found["name"] in _MONTHS:
        return _MONTHS.index(found["name"]) + 1, int(found["number"]), found["hour"]
    return None


def carries_client_text(line: str) -> bool:
    """Return whether the emitter of `line` logs parts of requests: such a line is no evidence in any phase."""
    if _ACCESS.match(line):
        return True
    return _REQUEST_FILE.search(head(line).file) is not None


def is_nccl(line: str) -> bool:
    """Return whether `line` starts like a line of NCCL's log, possibly behind the name of a process of the engine."""
    return _NCCL.match(line, head(line).length) is not None


def log_reader(nothing: Callable[[], N]) -> Callable[[Callable[P, T]], Callable[P, T | N]]:
    """Decorate a reader whose last `str` argument is a line of a log: for client text and after an error it returns
    `nothing()`, and it never raises."""

    def decorate(read: Callable[P, T]) -> Callable[P, T | N]:
        @functools.wraps(read)
        def reader(*args: P.args, **kwargs: P.kwargs) -> T | N:
            if any(isinstance(given, str) and carries_client_text(given) for given in args):
                return nothing()
            try:
                return read(*args, **kwargs)
            except Exception:
                # A log can contain anything; one line that is misread must not end the process that reads it.
                return nothing()

        return reader

    return decorate


class _Traceback:
    """One traceback that a logger writes: whether it passed code that handles requests, and source lines to come."""

    def __init__(self) -> None:
        self.withheld = False
        self.source = 0


class LineFilter:
    """Removes the text of clients from the lines of one log, and decides which lines are evidence."""

    def __init__(self) -> None:
        self._serving = False
        self._tracebacks: dict[str, _Traceback] = {}

    @property
    def serving(self) -> bool:
        """Return whether clients can write into the log."""
        return self._serving

    def begin(self, *, serving: bool) -> None:
        """Judge the lines that follow as those of an engine that starts, or that serves."""
        self._serving = serving
        self._tracebacks.clear()

    def clean(self, line: str) -> tuple[str | None, bool]:
        """Return (`line` without client text, whether it is evidence); None for a line that is dropped.

        A message that is withheld keeps its head: process, level, time and place.
        """
        text, counts = self._serving_line(line) if self._serving else self._starting_line(line)
        if text is not None and has_secret(text):
            return _withhold(line), False
        return text, counts

    def _starting_line(self, line: str) -> tuple[str | None, bool]:
        return (_withhold(line), False) if carries_client_text(line) else (line, True)

    def _serving_line(self, line: str) -> tuple[str | None, bool]:
        if _NATIVE.match(line) or _SHUTTING_DOWN.match(line):
            return line, True
        if _NCCL.match(line):
            # Its format is easily imitated: while the process serves, it counts only after that process's name.
            return line, False
        found = head(line)
        prefix = line[: found.length]
        if _ENGINE_PROCESS.match(found.process):
            if _NATIVE.match(line, found.length) or _NCCL.match(line, found.length):
                return line, True
            if _CLIENT_FILE.search(found.file):
                return _withhold(line), False
            return self._message(prefix, line[found.length :]), True
        if found.file and _KNOWN.match(line, found.at):
            self._follow(prefix)
            return line, True
        if found.file and prefix in self._tracebacks:
            return self._message(prefix, line[found.length :]), True
        return _withhold(line), False

    def _follow(self, prefix: str) -> _Traceback:
        """Return the state of the traceback of the record with this head."""
        known = self._tracebacks.setdefault(prefix, _Traceback())
        if len(self._tracebacks) > _TRACEBACKS:
            del self._tracebacks[next(iter(self._tracebacks))]
        return known

    def _message(self, prefix: str, text: str) -> str:
        """Return a line of an engine process without parts of requests in its message."""
        known = self._follow(prefix)
        if text.startswith('  File "'):
            known.withheld = known.withheld or _CLIENT_CODE.search(text) is not None
            known.source = 2
            return prefix + text
        if known.source and text.startswith("    "):
            known.source -= 1
            return prefix + text
        known.source = 0
        if text in _CHAINED or text.startswith("Traceback ("):
            return prefix + text
        if known.withheld:
            error = _ERROR.match(text)
            return f"{prefix}{error[0]}: {_WITHHELD}" if error else prefix + _WITHHELD
        if named := _REQUEST.search(text):
            return f"{prefix}{text[: named.start()]}{_WITHHELD}"
        return prefix + text


_BEGINS = re.compile(
    rf"(?:\(APIServer{_PROCESS})?INFO [-\d:. ]{{0,40}}\[[\w./-]{{1,200}}:\d{{1,6}}\] .{{0,40}}version \d+\.\d+"
)
_READY = re.compile(rf"(?:\(\w{{1,64}}{_PROCESS})?INFO: {{1,12}}Application startup complete\.$")


class ServerLogFilter:
    """Removes the text of clients from the log of a vLLM server that starts and serves, possibly several times."""

    def __init__(self) -> None:
        self._lines = LineFilter()

    @property
    def strict(self) -> bool:
        """Return whether clients may have written the next line."""
        return self._lines.serving

    def distrust(self) -> None:
        """Treat the following lines as those of a server that serves, until one starts."""
        self._lines.begin(serving=True)

    def clean(self, line: str, *, serving: bool = False) -> str | None:
        """Return the permitted part of `line`; None if it is dropped. `serving`: no server starts in this line."""
        if serving and not self.strict:
            self.distrust()
        elif not serving and _BEGINS.match(line):
            self._lines.begin(serving=False)
        text, _ = self._lines.clean(line)
        if _READY.match(line):
            self.distrust()
        return text


def without_client_text(lines: Iterable[str]) -> Iterator[str]:
    """Yield the permitted parts of the lines of a log (`ServerLogFilter`)."""
    judge = ServerLogFilter()
    for line in lines:
        if (text := judge.clean(line)) is not None:
            yield text


def _withhold(line: str) -> str | None:
    """Return the head of a line whose message is not kept; None if it has no place."""
    found = head(line)
    return line[: found.length] + _WITHHELD if found.file else None


_GIB = 2**30
_FIGURE = r"(\d[\d,]{0,20}(?:\.\d{1,9})?)"
_SIGNED = r"(-?\d[\d,]{0,20}(?:\.\d{1,9})?)"
_PATTERNS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(rf"Model loading took {_FIGURE} GiB"), ("weights",)),
    (re.compile(rf"Available KV cache memory: {_SIGNED} GiB"), ("kv",)),
    # Of a start that fails, because one request has no room.
    (re.compile(rf"max seq len \({_FIGURE}\)"), ("max_model_len",)),
    (
        re.compile(rf"{_FIGURE} GiB (?:KV cache )?(?:is )?needed.{{0,100}}?available[^\d-]{{0,40}}{_SIGNED}"),
        ("needed", "kv"),
    ),
    (re.compile(rf"reserved {_FIGURE} GiB memory for KV Cache"), ("reserved",)),
    (re.compile(rf"Estimated (?:MRV2 )?CUDA graph memory: {_FIGURE} GiB"), ("graphs",)),
    (re.compile(rf"KV cache size: {_FIGURE} tokens"), ("kv_tokens",)),
    (
        re.compile(rf"Maximum concurrency for {_FIGURE} tokens per request: {_FIGURE}x"),
        ("max_model_len", "concurrency"),
    ),
    (re.compile(rf"Desired GPU memory utilization is \({_FIGURE},"), ("utilization",)),
    (
        re.compile(rf"Actual usage is {_FIGURE} GiB for consumed memory.{{0,200}}?, {_FIGURE} GiB for peak"),
        ("consumed", "peak"),
    ),
    (
        re.compile(
            rf"Actual usage is {_FIGURE} GiB for weight, {_FIGURE} GiB for peak.{{0,200}}?, "
            r"(-?\d{1,9}(?:\.\d{1,9})?) GiB for non-torch"
        ),
        ("weights", "activations", "non_torch"),
    ),
)
_ENGINE_BEGINS = re.compile(r"Initializing a V1 LLM engine")
_PLAIN = frozenset({"kv_tokens", "max_model_len", "concurrency", "utilization"})
"""Figures that are no memory."""


@dataclass(frozen=True, slots=True)
class MemoryLog:
    """The figures of one start, memory in bytes; None: the log does not have it."""

    weights: int | None = None
    kv: int | None = None
    """Available for the KV cache on the rank that has least."""
    needed: int | None = None
    """KV cache of one request of the greatest length, logged by a start that fails."""
    reserved: int | None = None
    """Given size of the KV cache."""
    graphs: int | None = None
    """The estimate."""
    consumed: int | None = None
    """Weights, non-torch memory, and other memory that remains after the profile."""
    peak: int | None = None
    """Of the activations, with the graphs' estimate; logged with `consumed`."""
    activations: int | None = None
    """Of the activations alone, as vLLM up to 0.26 logs it."""
    non_torch: int | None = None
    kv_tokens: float | None = None
    concurrency: float | None = None
    max_model_len: float | None = None
    utilization: float | None = None


@log_reader(dict[str, float])
def memory_figures(line: str) -> dict[str, float]:
    """Return the figures that `line` of vLLM's log has, by the fields of `MemoryLog`; none for most lines."""
    found: dict[str, float] = {}
    for pattern, names in _PATTERNS:
        if match := pattern.search(line):
            for name, text in zip(names, match.groups(), strict=True):
                value = float(text.replace(",", ""))
                found[name] = value if name in _PLAIN else round(value * _GIB)
    return found


def read_memory_log(lines: Iterable[str]) -> MemoryLog:
    """Return the figures of the last start in `lines`: of several ranks the first, of their KV caches the smallest."""
    figures: dict[str, float] = {}
    for line in lines:
        if _ENGINE_BEGINS.search(line):
            figures = {}
        for name, value in memory_figures(line).items():
            figures[name] = min(value, figures.get(name, value)) if name == "kv" else figures.get(name, value)
    return MemoryLog(**figures)  # type: ignore[arg-type]


_TABLES = "rotary tables, top-k buffer"
_WORKSPACES = ("indexer workspace", "attention workspace", "attention in the profile")
_NON_TORCH = ("non-torch memory", "engine processes", "load format", "NCCL in the profile")
_ACTIVATIONS = ("activations", "MoE scratch", "images in the profile")


def logged_terms(log: MemoryLog) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each figure of `log` in bytes, with the items of a memory plan that it is the sum of."""
    if log.weights is not None:
        yield log.weights, ("weights", _TABLES)
    if log.consumed is not None and log.weights is not None:
        yield log.consumed - log.weights, (*_NON_TORCH, *_WORKSPACES)
    elif log.non_torch is not None:
        yield log.non_torch, _NON_TORCH
    if log.peak is not None:
        yield log.peak - (log.graphs or 0), _ACTIVATIONS
    elif log.activations is not None:
        yield log.activations, (*_ACTIVATIONS, *_WORKSPACES)
    if log.graphs is not None:
        yield log.graphs, ("CUDA graphs",)


def memory_differences(planned: Mapping[str, int], log: MemoryLog, cache: str) -> dict[str, int]:
    """Return by item the bytes by which `log` exceeds the plan; the first item of a figure gets its whole difference.

    `planned` has the bytes of each item in the engine's budget on the most limited rank, and of the KV cache under
    the name `cache`.
    """
    found = {names[0]: logged - sum(planned.get(name, 0) for name in names) for logged, names in logged_terms(log)}
    if log.kv is not None and cache in planned and _NON_TORCH[0] not in found:
        # The part of the KV cache's difference that no figure explains.
        found[_NON_TORCH[0]] = planned[cache] - log.kv - sum(found.values())
    return found
