"""Facts in the log lines of Ray and vLLM: progress of a start, and causes of a death.

Lines pass `util.log_lines` first: a line that a client may have written is no evidence. No reader raises.

The children write their logs to files themselves, so that they neither wait for a stopped agent nor die with it; the
agent reads along. Line texts: vLLM 0.32 and 0.33 (`v1/worker`, `model_executor/model_loader`, `v1/engine/core.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dsv4_runtime.contract import Cause, KernelStatus, Progress, WeightsProgress
from dsv4_runtime.engine.signatures import REMEDIES, SIGNAL, SIGNATURES, Signature, match, minor, row, split
from dsv4_runtime.util.log_lines import (
    FATAL_SECONDS,
    LineFilter,
    Time,
    bare,
    carries_client_text,
    head,
    log_reader,
    time_of,
)
from dsv4_runtime.util.procfs import entry

_log = logging.getLogger(__name__)

RAY_STARTED = "Ray runtime started."
# Level, time and place, from the start of a line.
_AT = r"[-\d:. ]{0,40}\[(?:[\w.-]{1,80}/){0,8}"
_API = r"(?:\(APIServer[^()]{0,80}\) )?"
_SHUTTING_DOWN = re.compile(
    rf"{_API}(?:INFO {_AT}launcher\.py:\d+\] (?:\[shutdown\] )?API server: shutdown triggered$"
    r"|INFO: {1,12}Shutting down$)"
)
_CORE_FAILED = re.compile(
    rf"\(EngineCore[^()]{{0,80}}\) ERROR {_AT}core\.py:\d+\] EngineCore encountered a fatal error"
)
# vLLM to 0.31; vLLM from 0.32 on.
_CORE_LOST = re.compile(
    rf"{_API}(?:ERROR|WARNING) {_AT}core_client\.py:\d+\] (?:"
    r"Engine core proc \S{1,80} died unexpectedly|(?:\[shutdown\] )?MPClient: engine core exited unexpectedly)"
)
# Of `monitor_workers` of the MP executor, which logs nothing once the executor itself ends its workers.
_WORKER_LOST = re.compile(
    rf"\(EngineCore[^()]{{0,80}}\) ERROR {_AT}multiproc_executor\.py:\d+\] Worker proc \S{{1,80}} died unexpectedly"
)
# vLLM continues without a plugin (`plugins/__init__.py`). Its API server loads plugins before it configures its log.
_PLUGIN_FAILED = re.compile(rf"^(?:(?:\([^()]{{1,80}}\) )?ERROR {_AT}__init__\.py:\d+\] )?Failed to load plugin dsv4$")
_ANSI = re.compile(r"\x1b\[[0-9;]{0,16}m")
_LINE_LIMIT = 4096
# Per call; the rest is read by the next call, so that the caller's other work is not delayed.
_READ_BYTES = 1 << 20
# In the log of a serving engine, lines of these levels announce no death.
_NO_ERRORS = frozenset({"DEBUG", "INFO", "WARNING"})
_KEEP = 200


class LogTail:
    """Reads the new lines of a growing file, without colour codes and without client text.

    A carriage return also ends a line while an engine starts: progress bars overwrite theirs.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._file: BinaryIO | None = None
        self._rest = b""
        # The beginning of a long line was returned; the rest of that line is discarded.
        self._cut = False
        self._filter = LineFilter()
        self.last: deque[str] = deque(maxlen=_KEEP)
        """The last 200 lines read, without the text of clients."""
        self._first: tuple[str, Cause | None] | None = None
        self._first_time = 0.0
        # Of that line while a traceback may follow (empty: its lines stand alone), and whether one has begun.
        self._origin: str | None = None
        self._traced = False

    @property
    def first_fatal(self) -> tuple[str, Cause | None] | None:
        """Return the first line read that announces a death, with the error that a traceback below it ends in, and its
        cause if either names one. One without a cause gives way to one with a cause, and to EngineCore's own last word.

        While the engine serves, one that is older than `FATAL_SECONDS` is forgotten.
        """
        if self._filter.serving and self._clock() - self._first_time > FATAL_SECONDS:
            self._first = self._origin = None
        return self._first

    @property
    def behind(self) -> bool:
        """Return whether the last call left unread data."""
        with contextlib.suppress(OSError):
            return self._file is not None and os.fstat(self._file.fileno()).st_size > self._file.tell()
        return False

    def read(self) -> list[str]:
        """Return new lines that are evidence; an unfinished one waits for its end, or for 4096 bytes.

        One call reads at most 1 MiB (`behind`). A log that cannot be read gives no lines.
        """
        return self._take(self._gained())

    def _take(self, data: bytes) -> list[str]:
        evidence = []
        for piece in self._pieces(data):
            line = _ANSI.sub("", piece.decode(errors="replace")).rstrip()[:_LINE_LIMIT]
            kept, counts = self._filter.clean(line) if line else (None, False)
            if kept is None:
                continue
            self.last.append(kept)
            if counts:
                evidence.append(kept)
                self._check_fatal(kept)
        return evidence

    def _gained(self) -> bytes:
        try:
            if self._file is None:
                # Closed by `close`: the file is read as long as its writer lives.
                self._file = self._path.open("rb")
            if os.fstat(self._file.fileno()).st_size < self._file.tell():
                # The file was truncated (`bound`); its content is new.
                self._file.seek(0)
                self._rest, self._cut = b"", False
            return self._file.read(_READ_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            _log.warning("%s cannot be read: %s", self._path, error)
            return b""

    def _pieces(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` ends, and keep the rest."""
        if self._cut:
            _, end, data = data.partition(b"\n")
            self._cut = not end
        pieces = (self._rest + data).split(b"\n")
        self._rest = pieces.pop()
        if self._filter.serving:
            # vLLM ends the lines of one message with CR LF. Behind any other CR clients' text may go on.
            pieces = [piece.partition(b"\r")[0] for piece in pieces]
        else:
            *ended, self._rest = self._rest.split(b"\r")
            pieces = [part for piece in (*pieces, *ended) for part in piece.split(b"\r")]
        if len(self._rest) > _LINE_LIMIT:
            pieces.append(self._rest)
            self._rest, self._cut = b"", True
        return pieces

    def forget(self) -> None:
        """Discard the lines up to now: they belong to an ended engine. The following lines belong to a start."""
        while data := self._gained():
            self._take(data)
        self._first = self._origin = None
        self.guard(serving=False)

    def survived(self) -> None:
        """Discard the lines up to now: the engine serves despite them. From now on clients write into the log."""
        self._first = self._origin = None
        self.guard(serving=True)

    def guard(self, *, serving: bool) -> None:
        """Treat the following lines as those of an engine that serves clients, or of one that starts."""
        if serving is not self._filter.serving:
            self._filter.begin(serving=serving)

    def _check_fatal(self, line: str) -> None:
        if self._filter.serving and head(line).level in _NO_ERRORS:
            return
        if self._outranks(found := fatal(line), line):
            self._first, self._first_time = found, self._clock()
            origin = _ORIGIN.match(line)
            self._origin, self._traced = (origin[0] if origin else "" if plugin_failed(line) else None), False
        # Lines of other processes may occur in between.
        elif self._origin is not None and line.startswith(self._origin):
            rest = line.removeprefix(self._origin)
            if rest.startswith("Traceback ("):
                self._traced = True
            elif not (self._traced and rest.startswith(" ")):
                below = _BELOW.match(rest)
                if self._traced:
                    said, cause = self._first or ("", None)
                    error = below[0] if below else rest
                    self._first = f"{said} {error}"[:1024], cause or (fatal(rest) or ("", None))[1]
                if not (self._traced and below):
                    self._origin = None

    def _outranks(self, found: tuple[str, Cause | None] | None, line: str) -> bool:
        if found is None or (first := self.first_fatal) is None:
            return found is not None
        if first[1] is not None or core_failed(first[0]):
            return False
        # Lines of a traceback are reported with the line that it belongs to.
        within = self._origin is not None and line.startswith(self._origin)
        return not within and (found[1] is not None or core_failed(line))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class WorkerLogs:
    """Follows the logs of Ray's worker processes of one node: each has its own files, and Ray forwards none of them."""

    def __init__(self, ray_logs: Path) -> None:
        """Take the log directory of Ray's session; it need not exist yet."""
        self._folder = ray_logs
        self._tails: dict[Path, LogTail] = {}
        self._ended: set[Path] = set()
        """Logs of workers that ended before the present engine."""

    def read(self) -> list[str]:
        """Return the new lines of all files, file after file. After a start they may quote requests."""
        try:
            paths = sorted(self._folder.glob("worker-*"))
        except OSError as error:
            # For example without free descriptors: the logs that are open are followed nevertheless.
            _log.warning("%s cannot be read: %s", self._folder, error)
            paths = []
        for path in paths:
            if path.suffix in (".out", ".err") and path not in self._tails.keys() | self._ended:
                self._tails[path] = LogTail(path)
        return [line for tail in self._tails.values() for line in tail.read()]

    def forget(self) -> None:
        """Discard the lines up to now: they belong to an ended engine. Logs of workers that have ended are closed."""
        self.read()
        for path, tail in list(self._tails.items()):
            tail.forget()
            # Ray's names end in the process id.
            pid = path.stem.rpartition("-")[2]
            try:
                ended = pid.isdecimal() and entry(int(pid)) is None
            except OSError:
                # Unknown for lack of a file descriptor.
                ended = False
            if ended:
                tail.close()
                del self._tails[path]
                self._ended.add(path)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


def bound(path: Path, limit: int) -> None:
    """Truncate a log of more than `limit` bytes, and keep its last half as `<name>.1`.

    Its writers append, so they continue at the new end. Lines written between copy and truncation are lost: a few of
    hundreds of thousands.
    """
    try:
        if path.stat().st_size <= limit:
            return
        with path.open("rb") as file:
            file.seek(-limit // 2, os.SEEK_END)
            file.readline()
            path.with_name(f"{path.name}.1").write_bytes(file.read())
        os.truncate(path, 0)
    except FileNotFoundError:
        return
    except OSError as error:
        # A full disk must not end the agent; the next call tries again.
        _log.warning("%s could not be cut: %s", path, error)


# In the order of a start; a later line never reduces the progress.
_STAGES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"vLLM API server version|non-default args"), "starting the API server"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine"),
    (re.compile(r"Started a local Ray instance|Connected to Ray cluster|Connecting to existing Ray"), "joining Ray"),
    (re.compile(r"Waiting for creating a placement group"), "waiting for Ray's resources"),
    (re.compile(r"world_size=\d{1,6} rank=\d"), "connecting the ranks"),
    (re.compile(r"Starting to load model"), "loading the model"),
    (re.compile(r"Loading weights took|Model loading took"), "weights loaded"),
    (re.compile(r"Available KV cache memory|GPU KV cache size|CPU KV cache size"), "sizing the KV cache"),
    (re.compile(r"Capturing CUDA graphs|Graph capturing"), "capturing graphs"),
    (re.compile(r"init engine \(profile, create kv cache"), "engine ready"),
    (re.compile(r"Application startup complete"), "API server ready"),
)
_SHARDS = re.compile(
    r"(?:Loading safetensors checkpoint shards(?: \(eager\))?|Multi-thread loading shards):"
    r"\s{1,8}\d{1,3}% Completed \| (\d{1,7})/(\d{1,7})"
)
_NUMBER = r"(\d{1,12}(?:\.\d{1,9})?)"
_BYTES = re.compile(rf"dsv4 weights: {_NUMBER} of {_NUMBER} GB at {_NUMBER} GB/s")
_PREFETCH = re.compile(r"Prefetching checkpoint files: (\d{1,2}|100)% \((\d{1,7})/(\d{1,7})\)")


@log_reader(lambda: None)
def progress(line: str, before: Progress | None = None) -> Progress | None:
    """Return the progress in a line of vLLM's log; None for most lines.

    `before` is the progress of the lines before it: vLLM logs files, and dsv4's loader bytes.
    """
    known = (before and before.weights) or WeightsProgress()
    if match := _SHARDS.search(line):
        return _loading(known.model_copy(update={"shards": int(match[1]), "shards_total": int(match[2])}))
    if match := _BYTES.search(line):
        done, total, rate = (round(float(text) * 1e9) for text in match.groups())
        return _loading(
            known.model_copy(update={"bytes_done": done, "bytes_total": total, "bytes_per_second": rate}),
        )
    if match := _PREFETCH.search(line):
        return Progress(stage=f"prefetching files {match[2]}/{match[3]}", percent=float(match[1]))
    for pattern, stage in _STAGES:
        if pattern.search(line):
            return Progress(stage=stage)
    return None


def _loading(weights: WeightsProgress) -> Progress:
    share, parts = 0.0, []
    if weights.shards is not None and weights.shards_total:
        share = weights.shards / weights.shards_total
        parts.append(f"shards {weights.shards}/{weights.shards_total}")
    if weights.bytes_done is not None and weights.bytes_total:
        share = weights.bytes_done / weights.bytes_total
        unit, size = ("GB", 1e9) if weights.bytes_total >= 1e9 else ("MB", 1e6)
        amount = f"{weights.bytes_done / size:.1f}/{weights.bytes_total / size:.1f} {unit}"
        parts.append(f"{amount} at {(weights.bytes_per_second or 0) / 1e9:.2f} GB/s")
    return Progress(stage=f"loading {', '.join(parts)}", percent=round(min(100 * share, 100.0), 1), weights=weights)


_COUNT = r"\d{1,3}(?:,?\d{3}){0,5}"
_KV_CACHE = re.compile(
    rf"KV cache size: ({_COUNT}) tokens, Maximum concurrency for {_COUNT} tokens per request: {_NUMBER}x"
)


@log_reader(lambda: None)
def kv_cache(line: str) -> tuple[int, float] | None:
    """Return (tokens, requests of the maximum length at once) of the KV cache; None for any other line."""
    found = _KV_CACHE.search(line)
    return (int(found[1].replace(",", "")), float(found[2])) if found else None


_KERNELS = re.compile(r"dsv4 kernels of rank (\d{1,6}): (?=\{)")
_NO_KERNELS = re.compile(r"dsv4 kernels: ([a-z0-9_, ]{1,500}) (stays with vLLM's own kernels \(.{1,2000}\))")


@log_reader(lambda: None)
def kernels(line: str) -> tuple[int, KernelStatus] | None:
    """Return (rank, provider of an operation there) from a line of dsv4's plugin; None for any other line."""
    if (found := _KERNELS.search(line)) is None:
        return None
    try:
        # Ray appends the number of repetitions of a line.
        document, _ = json.JSONDecoder().raw_decode(line, found.end())
        return int(found[1]), KernelStatus.model_validate(document)
    except ValueError:
        return None


@log_reader(lambda: None)
def kernels_not_attached(line: str) -> tuple[tuple[str, ...], str] | None:
    """Return (operations, reason) if dsv4's plugin attached no bundled kernel to them; None for any other line."""
    found = _NO_KERNELS.search(line)
    return (tuple(found[1].split(", ")), found[2]) if found else None


_LOADED = re.compile(rf"Model loading took {_NUMBER} GiB")


@log_reader(lambda: None)
def loaded_bytes(line: str) -> int | None:
    """Return the memory of a rank's weights in bytes; None for any other line."""
    found = _LOADED.search(line)
    return round(float(found[1]) * 2**30) if found else None


# Error whose text is on the next lines: its name stands alone, or Ray appends the traceback of another process.
_BELOW = re.compile(r"^(?:\S.*:$|[\w.]{0,200}\bRayTaskError\(\w{1,200}\):)")
# Process, level, time and place of a line of vLLM's, the same on each line of a traceback.
_ORIGIN = re.compile(r"\([^()]{1,200}\) [A-Z]{4,8} \S{1,40} \S{1,40} \[[^\]]{1,200}\] ")

# What dsv4 checks itself before it starts an engine.
_BEFORE_ENGINE = (Cause.PREFLIGHT_FAILED, Cause.STAGING_FAILED)
# vLLM logs its inputs as errors before the error itself. An observation of a kernel provider, such as a lack of memory,
# belongs to a process that only tried it.
_NO_DEATH = re.compile(r"dump_input\.py:\d+\] Dumping |dsv4 kernels(?: of rank \d+)?: ")


@log_reader(bool)
def shutting_down(line: str) -> bool:
    """Return whether vLLM logs a regular shutdown, as on SIGTERM."""
    return _SHUTTING_DOWN.search(line) is not None


@log_reader(bool)
def core_lost(line: str) -> bool:
    """Return whether vLLM's API process logs the end of its EngineCore, after which it ends itself."""
    return _CORE_LOST.match(line) is not None


@log_reader(bool)
def core_failed(line: str) -> bool:
    """Return whether EngineCore logs that it cannot continue.

    vLLM then shuts down regularly, which may take seconds, because its executor waits for Ray first. Only lines of
    EngineCore count: the API process logs text of clients.
    """
    return _CORE_FAILED.match(line) is not None


@log_reader(bool)
def worker_lost(line: str) -> bool:
    """Return whether EngineCore logs that a worker ended that its executor did not end."""
    return _WORKER_LOST.match(line) is not None


@log_reader(bool)
def plugin_failed(line: str) -> bool:
    """Return whether vLLM logs that it could not load dsv4's plugin and continues without it."""
    return _PLUGIN_FAILED.match(line) is not None


@log_reader(lambda: None)
def fatal(line: str) -> tuple[str, Cause | None] | None:
    """Return (line, its cause or None) of a fatal line; None for any other line."""
    if _NO_DEATH.search(line):
        return None
    if plugin_failed(line):
        return line[:1024], Cause.PLUGIN_NOT_LOADED
    signature = match(line)
    if signature is None or signature.waits:
        return None
    cause = signature.cause
    if cause in _BEFORE_ENGINE or (signature.consequence and cause is not None and cause.deterministic):
        # Often caught, for example the import of an optional package: it must not hide the cause of a later line.
        cause = None
    return (line[:1024], cause) if cause is not None or SIGNATURES[-1].pattern.search(line) else None


_QUOTED = re.compile(r"^\s{1,8}(?:Value error|Assertion failed), (.+)")
_PYDANTIC = re.compile(r"\d+ validation errors? for \w")
# The message of a C++ exception and Kubernetes' description of a pod are indented like the frames of a traceback.
_FRAME = re.compile(
    r"^(?!\s+(?:Reason: +OOMKilled|Exit Code: +137|Warning +[A-Z]\w+ |what\(\): ))\s+(?:File \"|\S|\^)"
    r"|^Traceback |^\s*$|^\s*[~^]+\s*$"
)
_EXCEPTION = re.compile(r"^[\w.]{1,200}(?:Error|Exception)\b")
# The end of a traceback; not all classes are named Error.
_RAISED = re.compile(r"^[A-Za-z_]\w{0,80}(?:\.\w{1,80}){0,12}(?::|$)")
# The end of a traceback that is no error: a person or a signal ended the program.
_ENDED = re.compile(r"^(?:KeyboardInterrupt|SystemExit|(?:asyncio\.)?(?:exceptions\.)?CancelledError|GeneratorExit)\b")
# From here on other processes report that their peers are gone.
_STOPS = re.compile(
    r"^KeyboardInterrupt\b|^INFO: +Shutting down$|Shutting down FastAPI HTTP server|API server: shutdown triggered"
)
_LOOKED_UP = re.compile(r"^(?:KeyError|StopIteration|LookupError)\b")
_CHAINED = re.compile(r"^(?:During handling of|The above exception was)")
# Errors that the program survives: of one request, of a destructor.
_CONTAINED = re.compile(r"Exception in ASGI application|^Exception ignored ")
# A kernel that a search for the fastest one leaves out.
_TRIED = re.compile(r"torch/_inductor/select_algorithm\.py:\d|\bautotuner\.py:\d|Ignoring this choice")
_SERVES = re.compile(r"INFO: +Application startup complete")
# What was waited for has happened.
_PROGRESS = re.compile(
    r"Ray runtime started|Resolved architecture|Initializing a V1 LLM engine|vLLM is using nccl|Starting to load model"
    r"|Model loading took|Available KV cache memory|init engine \(profile|Avg (?:prompt|generation) throughput"
)
_REPEATED = re.compile(r"Worker failed with error '(.{1,600}?)(?:', please check|$)")
_RUNS = re.compile(r"encountered a fatal error|generation throughput: \d|EngineDeadError|output_handler failed")
_LOADS = re.compile(r"Starting to load model|Loading (?:safetensors|weights)|Model loading took|throughput: \d")
_P2P_CHANNEL = re.compile(r"NCCL INFO Channel .{1,80} via P2P/")
_FIRST_COLLECTIVE = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=[1-9],")
_EVIDENCE = 5
_DETAIL_LINES = 8
_TIMED_LINES = 32
_CORE_DIED = re.compile(
    r"EngineCore (?:encountered a fatal error|failed to start|hit an exception)|EngineDeadError"
    r"|Engine core initialization failed|[Ee]ngine core (?:proc .{1,80} died|exited) unexpectedly"
)
# Of Python, in front of the exception that ends EngineCore.
_CORE_ENDS = re.compile(r"^Process EngineCore")
# Of a worker, in front of its traceback.
_WORKER_ENDS = re.compile(r"WorkerProc (?:hit an exception|failed to start)")
_NOTED = re.compile(
    "|".join(one.pattern for one in (_LOADS, _PROGRESS, _P2P_CHANNEL, _CORE_DIED, _CORE_ENDS, _WORKER_ENDS, _RUNS)),
)
_BY_FRAME = (
    row(
        r"/vllm/(?:config[/.]|engine/arg_utils\.py|transformers_utils/|model_executor/models/registry\.py)"
        r"|/transformers/(?:configuration_|models/auto/)",
        Cause.CONFIG_ERROR,
        "the innermost frame of a traceback",
        "",
        consequence=True,
    ),
    row(
        r"/vllm/model_executor/.{1,200}\", line \d{1,6}, in (?:load_weights|\w{0,40}weight_loader|_load_\w{1,40})",
        Cause.CONFIG_ERROR,
        "the innermost frame of a traceback",
        "",
        consequence=True,
        remedy="use a build of vLLM that reads this checkpoint's quantization, or another checkpoint of the model",
    ),
    row(r"/huggingface_hub/", Cause.STAGING_FAILED, "the innermost frame of a traceback", "", consequence=True),
)
"""For errors without a signature: the code that raised them."""


_REFUSED = re.compile(
    r"^(?:ValueError|NotImplementedError|AssertionError|AttributeError|RuntimeError): "
    r".{0,600}(?:[Uu]nsupported|[Ii]nvalid |not support|not implemented|only supports?\b|not compatible|[Ii]ncompatible"
    r"|\bmust\b|\bshould be\b|\brequires?\b|\bexceeds\b"
    r"|cannot be|(?:greater|less|larger|smaller) than|[Uu]nknown |expected .{1,80} got |--[a-z]{2,40}-)"
)
_OF_KERNEL = re.compile(r"\bkernels?\b|compute capability|\b(?:SM|sm)_?\d{2,3}|(?:current|this) (?:device|GPU)")
_NEGATIVE = (
    r"(?=.{0,600}?(?:\b(?:[Nn]ot?|[Nn]one|[Cc]annot|[Oo]nly|without|[Mm]issing|must|[Uu]nable|lacks?)\b|n't\b"
    r"|[Uu]nsupported|[Uu]nknown|[Ii]nvalid|[Ff]ail|[Ii]ncompatible|[Mm]ismatch|\brequire|\bneeds?\b|\bexpect))"
)
"""In front of words: that the text also refuses or misses something."""
_OF_DOWNLOADS = row(
    r"^(?:requests|urllib3|aiohttp|httpx|httpcore|ssl|hf_xet|botocore|boto3)\.|\b(?:huggingface|hf)\.co\b|\bxethub\b"
    r"|(?:[Dd]ownload|[Ff]etch)\w{0,4} .{0,80}(?:fail|error)|(?:[Ff]ail|[Ee]rror).{0,40}download",
    Cause.STAGING_FAILED,
    "errors of downloads",
    "",
)
_BY_WORDS = (
    row(
        rf"^{_NEGATIVE}.{{0,600}}?(?:\b(?:SM|sm|compute)[ _]?\d{{2,3}}[a-z]?\b|[Cc]ompute capability|capability \d"
        r"|\bHopper\b|\bBlackwell\b|\barch(?:itecture)?s? .{0,20}\d{2})",
        Cause.KERNEL_MISSING,
        "errors about the capability of a GPU",
        "",
    ),
    row(
        r"not implemented for '\w{1,40}'|\b(?:cubin|fatbin|PTX|SASS)\b",
        Cause.KERNEL_MISSING,
        "torch ATen/Dispatch.h, the CUDA driver",
        "",
    ),
    row(
        r"\b(?:GPU|device|CUDA|VRAM)\b.{0,60}\b(?:memory|allocat).{0,60}(?:insufficient|not enough|exhaust|fail)"
        r"|(?:[Ii]nsufficient|[Nn]ot enough) (?:free )?(?:GPU|device|CUDA|VRAM)\b",
        Cause.OUT_OF_MEMORY_GPU,
        "errors about the memory of a GPU",
        "",
    ),
    row(
        r"(?:shared memory|/dev/shm).{1,60}(?:too small|insufficient|not enough|exhaust|full\b)"
        r"|(?:[Ii]nsufficient|[Nn]ot enough|[Tt]oo little) shared memory (?!per\b)(?!.{0,60}\b(?:block|SM)\b)",
        Cause.SHARED_MEMORY_FULL,
        "errors about shared memory",
        "",
    ),
    row(
        rf"^{_NEGATIVE}.{{0,600}}?(?:\bNVML\b|(?:CUDA|NVIDIA|GPU|display) driver|driver version"
        r"|visible (?:CUDA )?device)",
        Cause.PREFLIGHT_FAILED,
        "errors about the driver",
        "",
    ),
    row(
        r"[Pp]ermission denied|[Oo]peration not permitted",
        Cause.PREFLIGHT_FAILED,
        "errno 1 and 13",
        "",
        remedy="give the container's user access to what the message names: volumes, devices, capabilities",
    ),
    row(
        rf"^{_NEGATIVE}.{{0,600}}?(?:shared (?:object|librar)|\bABI\b|\bsymbol\b|[Pp]ackage"
        r"|[Pp]lease (?:install|upgrade)|pip install|\b[\w.-]{1,40}[<>=]=\d|version of [\w-]{2,40})",
        Cause.PREFLIGHT_FAILED,
        "errors about packages",
        "",
        remedy="the installed packages do not fit each other: use an image that was built as a whole",
    ),
)
_OF_SETTINGS = row(
    rf"^{_NEGATIVE}.{{0,600}}?(?:model_type|[Tt]okenizer|chat.template|\bconfig(?:uration)?\b|hf_config"
    r"|[Cc]heckpoint|[Qq]uantiz|(?:command.line|engine|server) arguments?\b|--[a-z]{2,40}\b|\bmax_[a-z_]{2,40}\b"
    r"|\b(?:[Ss]upported|[Vv]alid|[Aa]vailable|[Aa]llowed) (?:dtypes|data types|values|options|presets|choices)\b)",
    Cause.CONFIG_ERROR,
    "errors about a configuration, before an engine serves",
    "",
)
# vLLM refuses settings by these classes.
_REFUSAL = re.compile(r"^(?:ValueError|NotImplementedError): (?!.{0,200}(?:shape|tensor))\S+ \S+ \S")
# Python raises them too, where a program is wrong.
_OF_PYTHON = re.compile(r"values to unpack|could not broadcast|invalid literal for |math domain error|is not in list$")
_BY_CLASS = (
    row(r"^torch\.distributed\.DistStoreError\b", Cause.MEMBER_MISSING, "the class of an exception", ""),
    row(r"^torch\.distributed\.Dist(?:Network|Backend)Error\b", Cause.NCCL_TIMEOUT, "the class of an exception", ""),
    row(
        r"^(?:triton|tilelang|tvm|tvm_ffi|cutlass)\.[\w.]{1,120}(?:Error|Exception|Resources)\b|^\w{0,80}DSL\w{0,80}Error\b",
        Cause.KERNEL_MISSING,
        "the class of an exception",
        "",
        remedy="a kernel cannot be compiled for this GPU: use a build for it, or the bundled kernels "
        "(`spec.engine.kernels: auto`)",
    ),
    row(r"^jinja2\.", Cause.CONFIG_ERROR, "the class of an exception", ""),
)
"""For exceptions without a signature: the library that raises them."""
# Names of files are not words of a message, except that of the shared memory.
_PATHS = re.compile(r"(?<!\S)(?!\S?/dev/shm)\S*/\S*")
_SHARED_MEMORY = next(one for one in SIGNATURES if one.cause is Cause.SHARED_MEMORY_FULL)
_SHARED_MEMORY_FRAME = re.compile(r"multiprocessing/shared_memory\.py|/shm_broadcast\.py")


# The rank of reports that another process failed.
_LAST = 3
# What a process reports about a peer: the peer's own error is the cause, whenever it was logged.
_WAITED_FOR = {Cause.FABRIC_ERROR: 0.25, Cause.ENGINE_HUNG: 0.5, Cause.MEMBER_MISSING: 0.5}


class _Hit(NamedTuple):
    number: int
    text: str
    signature: Signature
    who: str
    at: Time | None
    """Time of this line, or of the last one before it that has one."""
    fatal: bool
    """Whether it ends the first traceback of a worker that reports its own end."""


class _Log:
    """Facts of one log, which `read` collects line by line."""

    def __init__(self) -> None:
        self.hits: list[_Hit] = []
        self.channel: tuple[int, str] | None = None
        """A channel of NCCL over PCIe."""
        self.core: tuple[int, str] | None = None
        """The end of EngineCore."""
        self.loads = False
        """Whether the engine came to its weights."""
        self.served = False
        """Whether the engine has served, as far as the log shows."""
        self._stops = False
        # The last lines, for the time of a line that has none.
        self._recent: deque[str] = deque(maxlen=_TIMED_LINES)
        self._at: Time | None = None
        # Of each process: the last frame and the first line of a traceback, an error that it survives, its own end.
        self._frames: dict[str, str] = {}
        self._traced: dict[str, int] = {}
        self._contained: set[str] = set()
        self._ends: set[str] = set()
        # Whose exception ends EngineCore.
        self._core_of: str | None = None

    def read(self, number: int, line: str) -> str:
        """Take a line, and return its text."""
        line = line[:_LINE_LIMIT]
        self._recent.append(line)
        line = bare(line)
        who, level, text = split(line)
        # No library begins a line with this: it is a note of a person. Other lines quote requests of clients.
        if text.startswith("# ") or carries_client_text(line) or _TRIED.search(text):
            return text
        if _SERVES.search(text):
            self.hits, self.core, self.served = [], None, True
        elif not self._passes_over(number, who, level, text):
            self._note(number, who, text)
            self._take(number, who, level, line, text)
        return text

    def _passes_over(self, number: int, who: str, level: str, text: str) -> bool:
        """Return whether a line is the part of a traceback that names no error, or of an error that was survived."""
        self._stops = self._stops or _STOPS.search(text) is not None
        if _CONTAINED.search(text):
            self._contained.add(who)
            return True
        if _FRAME.match(text):
            if text.startswith("Traceback "):
                self._frames[who], self._traced[who] = "", number
            elif text.lstrip().startswith('File "'):
                self._frames[who] = text
            return not text.startswith("Traceback ") or who in self._contained
        if who in self._contained:
            if not level and (_RAISED.match(text) or _CHAINED.match(text)):
                self._frames.pop(who, None)
                return True
            self._contained.discard(who)
        if _ENDED.match(text):
            self._frames.pop(who, None)
            begun = self._traced.get(who, number)
            self.hits = [one for one in self.hits if one.who != who or one.number < begun]
            return True
        if text.startswith("During handling of "):
            # A look-up that failed only led to the error that follows.
            self.hits = [one for one in self.hits if not (one.who == who and _LOOKED_UP.match(one.text))]
        return False

    def _note(self, number: int, who: str, text: str) -> None:
        if _NOTED.search(text) is None:
            return
        self.loads = self.loads or _LOADS.search(text) is not None
        if _PROGRESS.search(text):
            self.hits = [one for one in self.hits if not one.signature.waits]
        if self.channel is None and _P2P_CHANNEL.search(text):
            self.channel = number, text
        if self.core is None and (self.hits or not self._stops) and _CORE_DIED.search(text):
            self.core = number, text
        if _CORE_ENDS.match(text):
            self._core_of = who
        if _WORKER_ENDS.search(text):
            self._ends.add(who)
        self.served = self.served or _RUNS.search(text) is not None

    def _take(self, number: int, who: str, level: str, line: str, text: str) -> None:
        signature, ends = match(line), False
        if not text.startswith("Traceback ") and (frame := self._frames.pop(who, None)) is not None:
            signature = _by_frame(frame, text, signature, level)
            ends = who in self._ends
            self._ends.discard(who)
            if who == self._core_of and self.core is None:
                self.core = number, text
        if signature is None or (self._stops and not self.hits and _of_peers(signature)):
            return
        self._at = next((at for each in reversed(self._recent) if (at := time_of(each)) is not None), self._at)
        last = ends and signature is SIGNATURES[-1] and _RAISED.match(text) is not None
        self.hits.append(_Hit(number, text, signature, who, self._at, last))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause of a failure according to log lines."""

    cause: Cause | None
    message: str
    """Error text without time and process, at most 1 KiB."""
    core_died: bool
    """Whether the log reports the end of EngineCore."""
    evidence: tuple[tuple[int, str], ...]
    """Numbers, from 1, and texts of the lines that prove it, the decisive one first."""
    remedy: str = ""
    """Remedy in one sentence; empty: none is known."""


def diagnose(*logs: Iterable[str]) -> Diagnosis | None:
    """Return the cause that log lines prove; None if no line is an error.

    The first line that proves a cause counts; of several logs the earliest by time if the lines have times, else that
    of the first log. What a process reports about a peer that it waits for yields to the peer's own error, and errors
    that follow the first exception of a worker that reports its own end yield to it. Without a proof, the first
    exception of its own or text that usually follows another failure counts, whichever is earlier. Of errors without a
    cause the exception that ends the first traceback is the message. Errors before the start was complete were
    survived and prove nothing, nor does the end that a person or a signal gives a program.

    Args:
        logs: lines of each log of vLLM, Ray or NCCL, in order of time, with or without vLLM's prefixes.
    """
    texts: list[str] = []
    read = [_Log() for _ in logs]
    for log, lines in zip(read, logs, strict=True):
        for line in lines:
            texts.append(log.read(len(texts) + 1, line))
    hits = [hit for log in read for hit in log.hits]
    peer_to_peer = next((log.channel for log in read if log.channel), None)
    core = next((log.core for log in read if log.core), None)
    starting = not any(log.served for log in read)
    if not hits:
        return Diagnosis(None, core[1][:1024], True, (core,), REMEDIES[Cause.ENGINE_CORE_DIED]) if core else None
    best = _first(read)
    if best.signature.cause is Cause.RAY_WORKER_DIED:
        # The loss of a node explains the death of its worker.
        best = next((one for one in hits if one.signature.cause in (Cause.NODE_LOST, Cause.RAYLET_DIED)), best)
    number, text, signature, who = best[:4]
    cause, evidence = signature.cause, [(number, text)]
    if _PYDANTIC.search(text) and (refused := _of_value(texts, number)) is not None:
        signature, cause = refused, refused.cause
    if cause is None and (inferred := _inferred(best, hits, starting)) is not None:
        signature, cause = inferred, inferred.cause
    if peer_to_peer is not None and (
        (cause is Cause.NCCL_TIMEOUT and _FIRST_COLLECTIVE.search(text))
        or (cause is Cause.ENGINE_HUNG and not any(log.loads for log in read))
    ):
        # The first collectives over PCIe never end where IOMMU or ACS redirect the copies (NVIDIA/nccl#2079).
        cause = Cause.PEER_TO_PEER_HANG
        evidence.append(peer_to_peer)
    if cause is None and re.search(SIGNAL, text):
        if "EngineCore" not in who and ("Worker" in who or any(_worker_died(one) for one in hits)):
            cause = Cause.RAY_WORKER_DIED
        elif "EngineCore" in who:
            core = core or (number, text)
    message = _message(texts, number, hits)
    if cause is None and not _RAISED.match(text) and (error := _exception(texts, number)) is not None:
        message = error[1]
        evidence.insert(0, error)
    others = [(one.number, one.text) for one in hits if one.signature.cause is not None]
    if "NCCL error" in text and cause is signature.cause and (warned := _nccl_warning(texts, number)) is not None:
        message = f"{warned[1]} {message}"
        evidence.insert(0, warned)
    proof = tuple([*evidence, *(one for one in others if one not in evidence)][:_EVIDENCE])
    kind = cause or (Cause.ENGINE_CORE_DIED if core else Cause.UNKNOWN)
    remedy = REMEDIES.get(kind, "")
    if signature.remedy and cause is signature.cause:
        remedy = signature.remedy
    return Diagnosis(cause, message[:1024], core is not None, proof, remedy)


def _by_frame(frame: str, text: str, signature: Signature | None, level: str) -> Signature | None:
    """Return the signature of the end of a traceback, where the code that raised it is more exact than its text."""
    if signature is not None and signature.cause is Cause.DISK_FULL and _SHARED_MEMORY_FRAME.search(frame):
        return _SHARED_MEMORY
    if signature not in (None, SIGNATURES[-1]) or minor(level) or not _RAISED.match(text):
        return signature
    return next((one for one in _BY_FRAME if one.pattern.search(frame)), SIGNATURES[-1])


def _inferred(best: _Hit, hits: list[_Hit], starting: bool) -> Signature | None:
    """Return the family of sentences that an error without a signature is of; None: it names no cause."""
    if best.signature is SIGNATURES[-1]:
        return _family(best.text, starting) if _RAISED.match(best.text) else None
    # EngineCore repeats the error of a worker, whose own log may be missing.
    repeated = next((found[1] for one in hits if (found := _REPEATED.search(one.text))), None)
    if repeated is None or _rank(best) < _LAST:
        return None
    return _family(repeated if _RAISED.match(repeated) else f"RuntimeError: {repeated}", starting)


def _family(text: str, starting: bool) -> Signature | None:
    if _OF_PYTHON.search(text):
        return None
    words = _PATHS.sub(" ", text)
    if starting and _REFUSED.match(text):
        # Settings without support raise one of these errors before vLLM serves.
        if _OF_KERNEL.search(words):
            return _BY_WORDS[0]
        if not text.startswith("RuntimeError"):
            return _OF_SETTINGS
    if _OF_DOWNLOADS.pattern.search(text):
        return _OF_DOWNLOADS
    families = (*_BY_WORDS, *_BY_CLASS, _OF_SETTINGS) if starting else (*_BY_WORDS, *_BY_CLASS)
    found = next((one for one in families if one.pattern.search(words)), None)
    return _OF_SETTINGS if found is None and starting and _REFUSAL.match(text) else found


def _of_value(texts: list[str], number: int) -> Signature | None:
    """Return the signature of the error that pydantic quotes below line `number`; None: it names no cause."""
    below = (_QUOTED.match(text) for text in texts[number : number + _DETAIL_LINES])
    quoted = next((found for found in below if found), None)
    signature = match(f"ValueError: {quoted[1]}") if quoted else None
    return signature if signature is not None and signature.cause is not None else None


def _worker_died(hit: _Hit) -> bool:
    return hit.signature.cause is Cause.RAY_WORKER_DIED


def _of_peers(signature: Signature) -> bool:
    """Return whether a text may only report that other processes ended."""
    return signature.consequence or signature is SIGNATURES[-1]


def _first(logs: list[_Log]) -> _Hit:
    """Return the decisive line of all logs: the first of the highest rank of one log, the earliest of several."""
    heads = [min(log.hits, key=lambda one: (_rank(one), one.number)) for log in logs if log.hits]
    rank = min(map(_rank, heads))
    heads = [head for head in heads if _rank(head) == rank]
    times = [head.at for head in heads if head.at is not None]
    if len(times) < len(heads):
        return heads[0]
    return heads[times.index(min(times))]


def _rank(hit: _Hit) -> float:
    """Return the rank of a line; the lowest is the strongest."""
    signature = hit.signature
    if signature.cause is None and signature.consequence:
        return _LAST
    if signature.waits:
        return 2.5
    if signature is SIGNATURES[-1] and not _RAISED.match(hit.text):
        return 2
    if hit.fatal and not hit.text.startswith("TimeoutError"):
        return 0
    if signature.cause is None or signature.consequence:
        return 1
    return _WAITED_FOR.get(signature.cause, 0)


def _message(texts: list[str], number: int, hits: list[_Hit]) -> str:
    """Return the text of line `number`, with the lines below it that complete it."""
    text = texts[number - 1]
    below = texts[number : number + _DETAIL_LINES]
    if _PYDANTIC.search(text):
        details = [part.strip() for part in below if part.startswith(" ") or "rror" in part]
        return " ".join([text, *details[:2]])
    if text.endswith(":"):
        return " ".join([text, *[part.strip() for part in below if part.strip()][:2]])
    cause = next(one.signature.cause for one in hits if one.number == number)
    more = (one.text for one in hits if number < one.number <= number + _DETAIL_LINES and one.signature.cause is cause)
    detail = next((one for one in more if one not in text and text not in one), None)
    return f"{text} {detail}" if cause is not None and detail else text


def _nccl_warning(texts: list[str], number: int) -> tuple[int, str] | None:
    """Return number and text of NCCL's last warning before line `number`, which explains its error."""
    before = range(number - 1, 0, -1)
    return next(((at, texts[at - 1]) for at in before if " NCCL WARN " in texts[at - 1]), None)


def _exception(texts: list[str], number: int) -> tuple[int, str] | None:
    """Return number and text of the exception that ends the first traceback from line `number` on."""
    begun = False
    for index in range(number - 1, len(texts)):
        text = texts[index]
        if text.startswith("Traceback "):
            begun = True
        elif begun and not _FRAME.match(text):
            return index + 1, text
    return None
