"""Log lines as evidence: arbitrary text for every phase and reader, and clients' text in the lines of every emitter."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_runtime.agent.decide import death, head
from dsv4_runtime.agent.decide.actions import ReportServing
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    CoreFailed,
    CoreLost,
    FabricFellBack,
    FirstError,
    Loading,
    Now,
    PluginFailed,
    ProcessEnded,
    ShuttingDown,
)
from dsv4_runtime.agent.decide.state import EngineState, Sign
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import Cause, FabricPlan, Phase
from dsv4_runtime.engine import logs, signatures
from dsv4_runtime.engine.logs import LogTail
from dsv4_runtime.engine.signatures import Signature
from dsv4_runtime.fabric import member as member_module
from dsv4_runtime.fabric.member import MemberFabric, NcclLog
from dsv4_runtime.util import log_lines
from dsv4_runtime.util.log_lines import LineFilter, carries_client_text, memory_figures
from dsv4_testkit.documents import group_plan

API, CORE = "(APIServer pid=8)", "(EngineCore pid=9)"
AT = "11-25 16:39:47"
FATAL = f"{CORE} ERROR {AT} [core.py:1512] EngineCore encountered a fatal error."

LINE_READERS: dict[str, Callable[[str], object]] = {
    **{name: read for name, read in vars(logs).items() if inspect.isfunction(read) and hasattr(read, "__wrapped__")},
    "memory_figures": memory_figures,
    "nccl": lambda line: NcclLog().feed(line),
    "fabric": lambda line: rdma().engine_said(line),
    "carries_client_text": carries_client_text,
    "starting": lambda line: LineFilter().clean(line),
    "serving": lambda line: serving_filter().clean(line),
}


def rdma() -> MemberFabric:
    plan = group_plan(fabric=FabricPlan(require_rdma=True))
    assert plan.fabric is not None
    return MemberFabric(plan, plan.fabric, 0, "token")


def serving_filter() -> LineFilter:
    found = LineFilter()
    found.begin(serving=True)
    return found


def patterns() -> dict[str, re.Pattern[str]]:
    """Return every pattern of the modules that read logs."""
    found: dict[str, re.Pattern[str]] = {}

    def look(name: str, value: object) -> None:
        if isinstance(value, re.Pattern):
            found[name] = value
        elif isinstance(value, Signature):
            found[name] = value.pattern
        elif isinstance(value, tuple):
            for number, one in enumerate(value):
                look(f"{name}[{number}]", one)

    for module in (log_lines, logs, signatures, member_module):
        for name, value in vars(module).items():
            look(f"{module.__name__}.{name}", value)
    return found


def literals(pattern: str) -> list[str]:
    """Return text that the parts of a pattern match: its literals, with digits and blanks for character classes."""
    plain = re.sub(r"\(\?[P<>:=!]*\w*>?|\{[^}]*\}|\[[^\]]*\]\+?|[()^$?*|]", "\x00", pattern)
    plain = plain.replace("\\d", "1").replace("\\s", " ").replace("\\w", "a").replace("\\S", "x").replace("\\", "")
    return [part for part in plain.split("\x00") if part.strip()]


KNOWN = sorted({part for pattern in patterns().values() for part in literals(pattern.pattern)})
TEXT = st.lists(
    st.one_of(
        st.sampled_from(KNOWN),
        st.sampled_from(
            ["1.2.3", ",", "-", "9" * 400, "{", '{"op":', "[[[[", "\r", "\x00", "\ud800", API, CORE, AT, " "]
        ),
        st.text(max_size=20),
    ),
    max_size=12,
).map("".join)
RAISED = [
    "Model loading took 1.2.3 GiB",
    "dsv4 weights: 1.2.3 of 4 GB at 5 GB/s",
    "KV cache size: , tokens, Maximum concurrency for 1 tokens per request: 1x",
    "Prefetching checkpoint files: 999% (1/2)",
    "dsv4 kernels of rank 0: " + "[" * 4000,
    "dsv4 weights: " + "9" * 400 + " of 1 GB at 1 GB/s",
    "Available KV cache memory: 1.2.3 GiB",
]


@pytest.mark.parametrize("name", LINE_READERS)
@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_no_reader_raises(name: str, text: str) -> None:
    for line in (text, f"{CORE} ERROR {AT} [core.py:1] {text}", f"vm:1:2 [0] NCCL INFO {text}"):
        LINE_READERS[name](line)


@pytest.mark.parametrize("text", RAISED)
@pytest.mark.parametrize("name", LINE_READERS)
def test_no_reader_raises_at_numbers_that_are_none(name: str, text: str) -> None:
    LINE_READERS[name](text)


@pytest.mark.parametrize("error", [ValueError, RecursionError, KeyError, AssertionError, OverflowError])
def test_a_reader_that_fails_reads_nothing(error: type[Exception]) -> None:
    @log_lines.log_reader(lambda: "nothing")
    def read(line: str) -> str:
        raise error(line)

    assert read("x") == "nothing"


def times(work: Callable[[str], object], text: str) -> Iterator[float]:
    for _ in range(5):
        begun = time.thread_time()
        work(text)
        yield time.thread_time() - begun


def assert_linear(work: Callable[[str], object], unit: str) -> None:
    """Require less than 64 times the duration for 16 times the text; a quadratic pattern would take 256 times."""
    short, long = ((unit * (size // len(unit) + 1))[:size] for size in (4096, 65536))
    bound = max(64 * min(times(work, short)), 0.004)
    found = []
    # The best of several attempts, for a busy machine.
    for one in times(work, long):
        found.append(one)
        if one < bound:
            return
    raise AssertionError((unit, bound, found))


@pytest.mark.parametrize("name", patterns())
def test_every_pattern_takes_linear_time(name: str) -> None:
    pattern = patterns()[name]
    parts = literals(pattern.pattern)
    for unit in {*parts, "".join(parts), " ".join(parts), "".join(parts[:-1]), *(f"{part} 1 " for part in parts)} - {
        ""
    }:
        assert_linear(pattern.search, unit)


@pytest.mark.parametrize(
    "unit",
    [
        "NCCL",
        "NCCL INFO ->",
        "via NET/ ->",
        "No space left on device",
        "Actual usage is 1 GiB for consumed memory",
        "Actual usage is 1 GiB for weight, 1 GiB for peak",
        "RayWorkerProc rank=",
        "\x1b[",
        "(EngineCore pid=1) ",
        "hf_",
        "eyJ",
        "://",
    ],
)
@pytest.mark.parametrize("name", LINE_READERS)
def test_every_reader_takes_linear_time(name: str, unit: str) -> None:
    assert_linear(LINE_READERS[name], unit)
    assert_linear(lambda text: LINE_READERS[name](f"vm:1:2 [0] NCCL INFO {text}"), unit)


@pytest.fixture
async def make_head(tmp_path: Path) -> AsyncIterator[Callable[..., Member]]:
    made: list[Member] = []

    def make(phase: Phase, directory: Path = tmp_path) -> Member:
        member = Member(group_plan(fabric=FabricPlan(require_rdma=True)), 0, directory, "token")
        engine = EngineState(generation=1, started=0.0, load_seconds=math.inf)
        member.loop.state = replace(
            member.loop.state, formed=True, joined=True, phase=phase, generation=1, engine=engine
        )
        member.context.record.begin_generation()
        member.context.record.enter(phase)
        made.append(member)
        return member

    yield make
    for member in made:
        member.loop.close()
        await member.context.tasks.close()
        member.context.exit_causes.close()
        for tail in member.context.tails.values():
            tail.close()


def fed_by(member: Member) -> list[AgentEvent]:
    fed: list[AgentEvent] = []
    assert member.engine is not None
    member.engine._feed = fed.append
    return fed


def write(member: Member, *lines: str, end: str = "\n") -> None:
    with (member.context.directory / "vllm.log").open("ab") as log:
        log.write("".join(f"{line}{end}" for line in lines).encode(errors="replace"))


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_member_survives_any_text_in_any_phase(phase: Phase) -> None:
    @settings(max_examples=25, deadline=None)
    @given(texts=st.lists(TEXT, max_size=4))
    def check(texts: list[str]) -> None:
        async def look() -> None:
            with directory() as place:
                member = Member(group_plan(fabric=FabricPlan(require_rdma=True)), 0, place, "token")
                member.context.record.begin_generation()
                member.context.record.enter(phase)
                assert member.engine is not None
                fed = fed_by(member)
                write(member, *texts, *RAISED)
                member.engine.read_log()
                json.dumps(member.evidence())
                if phase not in (Phase.LOADING, Phase.WARMING):
                    assert (
                        member.context.record.kv_cache,
                        member.context.record.memory,
                        member.context.record.progress,
                    ) == (None, {}, None)
                    assert not any(isinstance(event, FabricFellBack | PluginFailed | Loading) for event in fed)
                member.loop.close()
                for tail in member.context.tails.values():
                    tail.close()

        asyncio.run(look())

    check()


MARK = "Patient-Jane-Roe"
SAID = [
    "Model loading took 78.42 GiB",
    "KV cache size: 1,000 tokens, Maximum concurrency for 1,024 tokens per request: 1.0x",
    "NCCL INFO Using network Socket",
    "vm:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
    "API server: shutdown triggered",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "SafetensorError",
    "MemoryError",
    "ActorDiedError",
    "ncclRemoteError",
    "EngineCore encountered a fatal error.",
    FATAL,
]


def by_clients(text: str) -> dict[str, str]:
    """Return lines of vLLM 0.32 and uvicorn with `text` in each place that clients control."""
    path = re.sub(r"[^\w./-]", "%20", text)
    known = "error=ErrorInfo(message='The model `{}` does not exist.', type='NotFoundError', param='model', code=404)"
    dump = (
        "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData(req_id={!r},"
    )
    return {
        "model": f"{API} ERROR {AT} [serving.py:274] Error with model {known.format(text)}",
        "model of responses": f"{API} ERROR {AT} [entrypoints/openai/responses/serving.py:334] Error with model {text}",
        "path": f'{API} INFO:     10.0.0.9:4242 - "GET /v1/{path} HTTP/1.1" 404 Not Found',
        "query": f'INFO:     10.0.0.9:4242 - "GET /v1/models?api_key={path} HTTP/1.1" 200 OK',
        "prompt": f"{API} INFO {AT} [logger.py:40] Received request cmpl-1: prompt: {text!r}, params: None",
        "stop": f"{CORE} ERROR {AT} [dump_input.py:79] {dump.format('r')} SamplingParams(stop=[{text!r}]",
        "schema": f"{CORE} ERROR {AT} [dump_input.py:79] {dump.format('r')} StructuredOutputsParams(json={text!r})",
        "bad words": f"{CORE} ERROR {AT} [v1/dump_input.py:79] {dump.format('r')} bad_words=[{text!r}]",
        "request id": f"{CORE} ERROR {AT} [dump_input.py:79] {dump.format(text)} prompt_token_ids_len=1)",
        "request id of a step": f"{CORE} ERROR {AT} [core.py:2056] Unexpected error pre-processing request {text}",
        "request id of a grammar": f"{CORE} ERROR {AT} [scheduler.py:2190] grammar rejected [1] for request {text}.",
        "request ids": f"{CORE} ERROR {AT} [scheduler.py:3418] Failing 1 request(s). Request IDs: {text}",
        "request id of a key": f"{CORE} ERROR {AT} [core.py:1390] KeyError: 'chatcmpl-{text}'",
        "grammar": f"{CORE} ERROR {AT} [backend_xgrammar.py:149] Failed to compile {text}",
        "tool": f"{API} ERROR {AT} [qwen3_tool_parser.py:90] Error in extracting tool call {text}",
        "validation": f"{API} ERROR {AT} [exception_handler.py:9] ValidationError: {text}",
        "multimodal": f"{API} WARNING {AT} [connection.py:9] cannot fetch {text}",
        "chat": f"{API} WARNING {AT} [chat_utils.py:9] {text}",
        "aborted": f"{API} INFO {AT} [async_llm.py:450] Aborted request(s) {text}.",
        "utility": f"{API} ERROR {AT} [core_client.py:908] Cancelled call to utility method failed with error: {text}",
        "loose": f"{AT} {text}",
        "asgi": f"ValueError: {text}",
        "asgi indented": f"    {text}",
        "another line of the message": f"{API} ERROR {AT} [serving.py:274] {text}",
    }


@pytest.mark.parametrize("kind", by_clients(""))
@pytest.mark.parametrize("text", SAID)
async def test_clients_text_is_no_evidence_while_an_engine_serves(
    make_head: Callable[..., Member], kind: str, text: str
) -> None:
    member = make_head(Phase.SERVING)
    fed = fed_by(member)
    write(member, by_clients(text)[kind])
    assert member.engine is not None
    member.engine.read_log()
    assert not any(isinstance(event, CoreFailed | CoreLost | ShuttingDown | FabricFellBack) for event in fed), (
        "nothing is dead"
    )
    assert all(isinstance(event, FirstError) and event.cause is None for event in fed), fed
    assert member.context.record.kv_cache is None
    assert member.context.record.memory == {}
    assert member.context.record.progress is None


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        *((kind, Phase.SERVING) for kind in by_clients("")),
        # Without a token the server of a starting engine is reachable too, and a log can contain older lines.
        *((kind, Phase.LOADING) for kind in ("model", "path", "query", "prompt", "stop", "schema", "bad words")),
    ],
)
async def test_evidence_and_status_have_no_text_of_clients(
    make_head: Callable[..., Member], kind: str, phase: Phase
) -> None:
    member = make_head(phase)
    write(member, "INFO one", by_clients(MARK)[kind], FATAL)
    assert member.engine is not None
    member.engine.read_log()
    assert member.context.tails["vllm"].first_fatal == (FATAL, None)
    found = json.dumps(member.evidence()) + member.status().to_json()
    assert MARK not in found
    assert FATAL in found


@pytest.mark.parametrize("secret", ["sk-" + "a" * 40, "hf_" + "b" * 34])
@pytest.mark.parametrize("serving", [True, False])
def test_secrets_are_not_kept(secret: str, serving: bool) -> None:
    tested = LineFilter()
    tested.begin(serving=serving)
    kept, counts = tested.clean(f"{CORE} INFO {AT} [core.py:1] args: {{'api_key': '{secret}'}}")
    assert kept == f"{CORE} INFO {AT} [core.py:1] [text withheld]"
    assert not counts


def traceback(place: str, code: str, error: str, said: str = "EngineCore encountered a fatal error.") -> list[str]:
    prefix = f"{CORE} ERROR {AT} [{place}]"
    frames = ["Traceback (most recent call last):", f'  File "{code}", line 3, in f', "    run(x)", "        ^^^"]
    return [f"{prefix} {text}" for text in (said, *frames, error)]


@pytest.mark.parametrize(
    ("code", "error", "told"),
    [
        (
            "/x/vllm/v1/structured_output/backend_xgrammar.py",
            f"RuntimeError: EBNF {MARK}",
            "RuntimeError: [text withheld]",
        ),
        ("/x/vllm/sampling_params.py", f"ValueError: {MARK}", "ValueError: [text withheld]"),
        ("/x/v1/sample/logits_processor/x.py", MARK + " 1", "[text withheld]"),
        ("/x/vllm/v1/engine/core.py", f"KeyError: 'chatcmpl-{MARK}'", "KeyError: '[text withheld]"),
        ("/x/model.py", f"ValueError: of request {MARK}", "ValueError: of [text withheld]"),
        ("/x/model.py", "RuntimeError: CUDA error: an illegal memory access", None),
        ("/x/dspark.py", "ValueError: DSpark currently requires uniform lengths", None),
    ],
)
def test_errors_of_code_that_handles_requests_are_reported_by_their_type(
    tmp_path: Path, code: str, error: str, told: str | None
) -> None:
    path = tmp_path / "vllm.log"
    tail = LogTail(path)
    tail.survived()
    lines = traceback("core.py:1512", code, error)
    path.write_text("\n".join([*lines, f"{API} INFO {AT} [x.py:1] y", *lines[-1:]]) + "\n")
    tail.read()
    assert tail.first_fatal == (f"{lines[0]} {told or error}", None)
    assert MARK not in str(list(tail.last))
    tail.close()


WORKER = "(Worker_TP0 pid=203) ERROR 07-09 10:11:12 [multiproc_executor.py:990]"
WATCHDOG = (
    "[rank1]:[E709 10:21:20 ProcessGroupNCCL.cpp:700] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=88, OpType=ALLGATHER, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (f"{WORKER} WorkerProc hit an exception.", None),
        (f"{WORKER} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB", Cause.OUT_OF_MEMORY_GPU),
        (f"{WORKER} RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasGemmEx`", None),
        (WATCHDOG, Cause.NCCL_TIMEOUT),
        (f"(RayWorkerProc pid=977, ip=10.88.0.11) {WATCHDOG}", Cause.NCCL_TIMEOUT),
        (f"(EngineCore pid=1) ERROR {AT} [ray_executor_v2.py:522] RayWorkerProc rank=[1] died unexpectedly, shutting",
         Cause.RAY_WORKER_DIED),
        (f"ERROR {AT} [ray_executor_v2.py:522] RayWorkerProc rank=[1] died unexpectedly, shutting down executor.",
         Cause.RAY_WORKER_DIED),
        (f"(EngineCore pid=222) ERROR {AT} [core.py:1361] TimeoutError: RPC call to sample_tokens timed out.",
             Cause.ENGINE_HUNG),
        ("(raylet) 1 worker(s) were killed due to the node running low on memory.", Cause.RAY_MEMORY_KILL),
        (f"(EngineCore_DP0 pid=1) ERROR {AT} [v1/engine/core.py:2663] EngineCore encountered a fatal error.", None),
        (f"{API} ERROR {AT} [async_llm.py:906] AsyncLLM output_handler failed.", None),
    ],
)  # fmt: skip
async def test_a_death_while_serving_is_recognised(
    make_head: Callable[..., Member], line: str, cause: Cause | None
) -> None:
    member = make_head(Phase.SERVING)
    fed = fed_by(member)
    write(member, line)
    assert member.engine is not None
    member.engine.read_log()
    if "fatal error" in line or "[ray_" in line or "ERROR" in line or cause:
        assert FirstError(line, cause) in fed
    assert list(member.context.tails["vllm"].last) == [line]


async def test_an_engine_that_ends_itself_and_a_network_that_fell_back_are_recognised_while_serving(
    make_head: Callable[..., Member],
) -> None:
    member = make_head(Phase.SERVING)
    fed = fed_by(member)
    socket = (
        "(RayWorkerProc pid=7, ip=10.0.0.2) a:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"
    )
    write(
        member,
        FATAL,
        f"{API} WARNING {AT} [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly; cleanup",
        f"{API} INFO {AT} [launcher.py:254] [shutdown] API server: shutdown triggered",
        "INFO:     Shutting down",
        socket,
    )
    assert member.engine is not None
    member.engine.read_log()
    kinds = [type(event) for event in fed]
    assert kinds == [FirstError, CoreFailed, CoreLost, ShuttingDown, ShuttingDown, FabricFellBack]


@pytest.mark.parametrize(("pid", "counts"), [(9, True), (10, False), (None, True)])
async def test_a_quoted_line_of_enginecore_has_another_process_id(
    make_head: Callable[..., Member], monkeypatch: pytest.MonkeyPatch, pid: int | None, counts: bool
) -> None:
    member = make_head(Phase.SERVING)
    fed = fed_by(member)
    if pid is not None:
        monkeypatch.setattr(member.context.watch, "_watched", {pid: ("engine-core", -1)})
    write(member, FATAL)
    assert member.engine is not None
    member.engine.read_log()
    assert any(isinstance(event, CoreFailed) for event in fed) is counts


@pytest.mark.parametrize("phase", list(Phase))
async def test_facts_of_a_start_count_while_an_engine_starts(make_head: Callable[..., Member], phase: Phase) -> None:
    member = make_head(phase)
    fed = fed_by(member)
    lines = [
        f"{CORE} INFO {AT} [kv_cache_utils.py:2327] GPU KV cache size: 13,809 tokens, Maximum concurrency for 1,024 "
        "tokens per request: 13.49x",
        "(Worker_TP0 pid=4) INFO [model_runner.py:425] Model loading took 78.42 GiB memory and 93.1 seconds",
        "vm:1:2 [0] NCCL INFO Using network Socket",
    ]
    write(member, *lines)
    assert member.engine is not None
    member.engine.read_log()
    starts = phase in (Phase.LOADING, Phase.WARMING)
    assert (member.context.record.kv_cache == (13_809, 13.49)) is starts
    assert ("weights" in member.context.record.memory) is starts
    assert any(isinstance(event, FabricFellBack) for event in fed) is starts


async def test_facts_that_are_written_just_before_an_engine_serves_count(make_head: Callable[..., Member]) -> None:
    member = make_head(Phase.WARMING)
    write(member, "GPU KV cache size: 13,809 tokens, Maximum concurrency for 1,024 tokens per request: 13.49x")
    assert member.engine is not None
    member.engine.act(ReportServing())
    assert member.context.record.kv_cache == (13_809, 13.49)
    member.context.record.enter(Phase.SERVING)
    write(member, "GPU KV cache size: 1 tokens, Maximum concurrency for 1 tokens per request: 1x")
    member.engine.read_log()
    assert member.context.record.kv_cache == (13_809, 13.49)


@pytest.mark.parametrize("piece", [1000, 4096, 4097, 8192, 100_000])
def test_pieces_of_a_long_line_are_not_separate_lines(tmp_path: Path, piece: int) -> None:
    """Writers flush long lines in pieces, and a client can make each piece begin like a line of EngineCore."""
    path = tmp_path / "vllm.log"
    tail = LogTail(path)
    tail.survived()
    found = []
    with path.open("wb", buffering=0) as log:
        for begin in (by_clients("x")["model"], *[FATAL] * 20):
            log.write(begin.ljust(piece, "x").encode())
            found += tail.read()
        log.write(f"\n{FATAL}\n".encode())
        found += tail.read()
    assert found == [FATAL]
    tail.close()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_carriage_return_begins_no_line_while_an_engine_serves(tmp_path: Path, end: str) -> None:
    path = tmp_path / "vllm.log"
    tail = LogTail(path)
    tail.survived()
    quoted = by_clients(f"x\r{FATAL}\r")["another line of the message"]
    path.write_bytes(f"{quoted}{end}{FATAL}{end}".encode())
    assert tail.read() == [FATAL]
    tail.close()


def test_a_log_of_any_size_is_read_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text("one line\n" * 400_000)
    tail = LogTail(path)
    assert 0 < len(tail.read()) < 200_000
    assert tail.behind
    tail.forget()
    assert not tail.behind
    tail.close()


def test_a_log_that_cannot_be_read_gives_nothing(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    assert tail.read() == []
    tail.forget()
    assert not tail.behind


def test_a_fatal_line_expires_while_the_engine_serves(tmp_path: Path) -> None:
    clock = [0.0]
    path = tmp_path / "vllm.log"
    tail = LogTail(path, lambda: clock[0])
    path.write_text(f"{WATCHDOG}\n")
    tail.read()
    clock[0] = 1e6
    assert tail.first_fatal is not None, "a start takes what it takes"
    tail.survived()
    with path.open("a") as log:
        log.write(f"{WATCHDOG}\n")
    tail.read()
    clock[0] += log_lines.FATAL_SECONDS
    assert tail.first_fatal == (WATCHDOG, Cause.NCCL_TIMEOUT)
    clock[0] += 1
    assert tail.first_fatal is None
    with path.open("a") as log:
        log.write(f"{FATAL}\n")
    tail.read()
    assert tail.first_fatal == (FATAL, None)
    tail.close()


def now(clock: float) -> Now:
    return Now(clock, 1e6 + clock, 0.0)


ENGINE = EngineState(generation=1, started=0.0, load_seconds=math.inf)


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        (1.0, Cause.ENGINE_EXITED),
        (29.0, Cause.ENGINE_EXITED),
        (31.0, Cause.RAY_WORKER_DIED),
        (3600.0, Cause.RAY_WORKER_DIED),
    ],
)
@pytest.mark.parametrize("gathered", [True, False])
def test_an_old_sign_explains_nothing(before: float, cause: Cause, gathered: bool) -> None:
    signs = (Sign(ShuttingDown(), now(4000 - before)), Sign(ProcessEnded("worker", False, None), now(4000.0)))
    engine = replace(ENGINE, signs=() if gathered else signs)
    for sign in signs if gathered else ():
        engine = death.with_sign(engine, sign)
    found = death.explain(engine)
    assert found is not None
    assert found.cause is cause


def test_signs_are_bounded_and_a_death_is_never_pushed_out() -> None:
    engine = ENGINE
    for number in range(10_000):
        engine = death.with_sign(engine, Sign(ShuttingDown() if number % 2 else CoreLost(), now(number / 1000)))
    assert len(engine.signs) == 2
    engine = death.with_sign(engine, Sign(ProcessEnded("worker", False, None), now(10.0)))
    for number in range(1000):
        event = ProcessEnded("worker", False, (Cause.UNKNOWN, str(number)))
        engine = death.with_sign(engine, Sign(event, now(10.0 + number)))
    assert len(engine.signs) <= death.MAX_SIGNS
    assert death.verdict_due(engine) == pytest.approx(10.05)


@pytest.mark.parametrize(("seconds", "said"), [(10.0, True), (10_000.0, False)])
def test_an_old_first_error_is_not_the_cause_of_a_death(serving: Any, seconds: float, said: bool) -> None:
    replay = serving(0)
    replay.feed(FirstError(WATCHDOG, Cause.NCCL_TIMEOUT))
    engine = replay.state.engine
    assert engine is not None
    assert (death.first_error(engine, replace(now(0.0), clock=replay.clock + seconds)) is not None) is said
    assert head.first_error is death.first_error
