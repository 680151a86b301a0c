"""A Hugging Face hub: its own client and dsv4's transfers against a server with the hub's responses."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from dsv4_runtime.agent.staging import _run
from dsv4_runtime.contract import Cause, WeightsPlan, WeightsSource
from dsv4_runtime.weights import staging
from dsv4_runtime.weights.checkpoint import WeightsError
from dsv4_runtime.weights.members import StagingJob, StagingReport
from dsv4_testkit.weights_servers import COMMIT, FileServer, Server, same_files, wanted_files

Serve = Callable[[web.Application], Server]
SHARD = "model-00002-of-00003.safetensors"
INVALID = "Invalid credentials in Authorization header"


class Hub:
    """The hub's list of files in a repository, and redirects to a second server that has the bytes.

    Statuses and headers of refusals are those of the public hub, because its client depends on them.
    """

    def __init__(self, folder: Path, content: str) -> None:
        self.folder = folder
        self.content = content
        self.token: str | None = None
        self.gated = False
        self.asked = 0
        """Number of requests for the list."""
        self.answer: Callable[[web.Request], web.Response | None] = lambda _: None
        """Replacement for the list; None from it: the list."""
        self.stalls = 0.0
        """Delay of the list in seconds."""
        self.cuts = 0
        """Number of further lists that end in the middle."""
        self.app = web.Application()
        self.app.router.add_get("/api/models/{owner}/{name}/revision/{revision}", self.info)
        self.app.router.add_get(f"/deepseek-ai/Nano/resolve/{COMMIT}/{{name:.+}}", self.resolve)

    def _check(self, request: web.Request) -> None:
        given = request.headers.get("Authorization")
        if given and self.token and given != f"Bearer {self.token}":
            raise web.HTTPUnauthorized(headers={"X-Error-Message": INVALID})
        if self.token and not given:
            raise web.HTTPUnauthorized(
                headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            )

    async def info(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        await asyncio.sleep(self.stalls)
        if (answer := self.answer(request)) is not None:
            return answer
        self._check(request)
        if request.match_info["name"] != "Nano":
            raise web.HTTPUnauthorized(headers={"X-Error-Code": "RepoNotFound"})
        if request.match_info["revision"] != COMMIT:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        assert request.query.get("blobs")
        siblings = []
        for name in [*wanted_files(self.folder), "pytorch_model.bin", ".gitattributes"]:
            data = (self.folder / name).read_bytes()
            entry = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name.endswith(".safetensors"):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        whole = web.json_response({"id": "deepseek-ai/Nano", "sha": COMMIT, "siblings": siblings})
        if not self.cuts:
            return whole
        self.cuts -= 1
        body = whole.body
        assert isinstance(body, bytes)
        half = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await half.prepare(request)
        await half.write(body[: len(body) // 2])
        assert request.transport
        request.transport.abort()
        return half

    async def resolve(self, request: web.Request) -> web.Response:
        self._check(request)
        if self.gated:
            # The list is public nevertheless.
            raise web.HTTPUnauthorized(
                headers={
                    "X-Error-Code": "GatedRepo",
                    "X-Error-Message": "Access to model deepseek-ai/Nano is restricted.",
                }
            )
        raise web.HTTPFound(f"{self.content}/{request.match_info['name']}")


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the token of the user who runs the tests, and long pauses."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr("dsv4_runtime.weights.transfer._FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture
def content(checkpoint: Path) -> FileServer:
    return FileServer(checkpoint)


@pytest.fixture
def hub(content: FileServer, serve: Serve) -> Hub:
    return Hub(content.folder, serve(content.app).url)


@pytest.fixture
def plan(hub: Hub, serve: Serve, tmp_path: Path) -> WeightsPlan:
    return WeightsPlan(
        source=WeightsSource.HUGGING_FACE,
        path=str(tmp_path / "weights"),
        origin="deepseek-ai/Nano",
        revision=COMMIT,
        endpoint=serve(hub.app).url,
    )


def stage(plan: WeightsPlan) -> int:
    return staging.stage(StagingJob(weights=plan), lambda _: None).fetched


def refused(plan: WeightsPlan) -> str:
    with pytest.raises(WeightsError) as caught:
        stage(plan)
    assert caught.value.cause is Cause.STAGING_FAILED
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_token(plan: WeightsPlan, folder: Path, token: str) -> WeightsPlan:
    (folder / "token").write_text(f"{token}\n")
    return plan.model_copy(update={"credentials_file": str(folder / "token")})


def test_all_files_are_fetched_and_a_restart_sends_no_request(plan: WeightsPlan, hub: Hub, content: FileServer) -> None:
    content.cut_after = 1_500_000
    assert stage(plan) > 9_900_000
    assert same_files(content.folder, Path(plan.path))
    assert len([name for name, _ in content.requests if name == SHARD]) >= 3
    asked = hub.asked, len(content.requests)
    assert stage(plan) == 0
    assert (hub.asked, len(content.requests)) == asked


def test_small_files_are_checked_by_their_git_blobs(plan: WeightsPlan, content: FileServer) -> None:
    content.damage["config.json"] = 9
    with pytest.raises(WeightsError, match=r"config\.json from 127\.0\.0\.1 has git blob") as caught:
        stage(plan)
    assert caught.value.cause is Cause.WEIGHTS_CORRUPT


def test_the_token_gives_access_and_is_sent_only_to_the_hub(
    plan: WeightsPlan, hub: Hub, content: FileServer, tmp_path: Path
) -> None:
    given: list[str | None] = []

    def see(request: web.Request) -> None:
        given.append(request.headers.get("Authorization"))

    content.answer = see
    # Another host name: a redirect to it must not carry the token.
    hub.content = hub.content.replace("127.0.0.1", "localhost")
    hub.token = "hf_secret"
    assert "Nano is not on 127.0.0.1, or is not public; check the name, or give a token" in refused(plan)
    text = refused(with_token(plan, tmp_path, "hf_old"))
    assert f"the token of secretKeyRef {tmp_path}/token is not valid at 127.0.0.1; make one at" in text
    assert "hf_old" not in text
    stage(with_token(plan, tmp_path, "hf_secret"))
    assert same_files(content.folder, tmp_path / "weights")
    assert set(given) == {None}


def test_a_gated_repository_is_named_though_its_list_is_public(plan: WeightsPlan, hub: Hub) -> None:
    hub.gated = True
    text = refused(plan)
    assert "deepseek-ai/Nano requires consent to its terms" in text
    assert f"give it on {plan.endpoint}/deepseek-ai/Nano, and a token of that account in secretKeyRef" in text
    hub.answer = lambda _: web.Response(status=403, headers={"X-Error-Code": "GatedRepo"})
    assert "requires consent" in refused(plan)


def test_a_token_without_the_right_is_named(plan: WeightsPlan, hub: Hub, tmp_path: Path) -> None:
    message = "Please enable access to public gated repositories in your fine-grained token settings."
    hub.answer = lambda _: web.Response(status=403, headers={"X-Error-Message": message})
    text = refused(with_token(plan, tmp_path, "hf_narrow"))
    assert f"token may not read deepseek-ai/Nano ({message}); allow it to at {plan.endpoint}/settings/tokens" in text


def test_missing_repositories_and_commits_are_named_at_once(plan: WeightsPlan, hub: Hub) -> None:
    other = "f" * 40
    text = refused(plan.model_copy(update={"revision": other}))
    assert f"the repository deepseek-ai/Nano has no commit {other}; copy all 40 digits" in text
    assert "deepseek-ai/None is not on 127.0.0.1" in refused(plan.model_copy(update={"origin": "deepseek-ai/None"}))
    assert "huggingFace.repo: " in refused(plan.model_copy(update={"origin": "deepseek-ai/a--b"}))
    hub.answer = lambda _: web.Response(status=403, headers={"X-Error-Message": "Access to this resource is disabled."})
    assert "has been disabled on 127.0.0.1; choose another one" in refused(plan)
    assert hub.asked == 3


def test_requests_to_a_busy_hub_are_repeated_at_its_requested_time(
    plan: WeightsPlan, hub: Hub, content: FileServer
) -> None:
    answers = iter([web.Response(status=429, headers={"Retry-After": "1"}), web.Response(status=503)])
    hub.answer = lambda _: next(answers, None)
    begun = time.monotonic()
    stage(plan)
    assert time.monotonic() - begun >= 1
    assert hub.asked == 3
    assert same_files(content.folder, Path(plan.path))


def test_a_list_that_is_cut_is_requested_again(plan: WeightsPlan, hub: Hub, content: FileServer) -> None:
    hub.cuts = 2
    stage(plan)
    assert hub.asked == 3
    assert same_files(content.folder, Path(plan.path))


def test_a_hub_that_stays_busy_cut_or_silent_is_named(
    plan: WeightsPlan, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cuts = 99
    text = refused(plan)
    assert text.startswith("127.0.0.1 did not answer: ")
    assert text.endswith("; check that this machine reaches it")
    hub.answer = lambda _: web.Response(status=503)
    assert "127.0.0.1 answered 503 Service Unavailable; check that this machine" in refused(plan)
    monkeypatch.setattr("dsv4_runtime.weights.origins._HUB_TIMEOUT", 0.5)
    hub.stalls = 60
    begun = time.monotonic()
    assert "127.0.0.1 did not answer: " in refused(plan)
    assert time.monotonic() - begun < 50
    assert hub.asked == 15


def test_a_hub_that_is_not_there_is_named(plan: WeightsPlan) -> None:
    text = refused(plan.model_copy(update={"endpoint": "http://127.0.0.1:9"}))
    assert "127.0.0.1 did not answer: " in text
    assert "refused" in text


@pytest.mark.parametrize("body", ["<html>Please log in</html>", "[]", '{"error": "no"}'])
def test_a_server_that_is_no_hub_is_named_at_once(plan: WeightsPlan, hub: Hub, body: str) -> None:
    hub.answer = lambda _: web.Response(text=body, content_type="text/html")
    text = refused(plan)
    assert f"{plan.endpoint} does not list the files of deepseek-ai/Nano as a hub does" in text
    assert "endpoint, and proxies on the way" in text
    assert hub.asked == 1


async def test_offline_mode_is_named_and_kept_to(
    plan: WeightsPlan, hub: Hub, content: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a separate process, as the agent does: the client reads the variable at import.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    news: list[StagingReport] = []
    assert await _run("stage", StagingJob(weights=plan), news.append) == 1
    assert "HF_HUB_OFFLINE forbids requests to 127.0.0.1 for deepseek-ai/Nano; unset it" in (news[-1].error or "")
    assert (hub.asked, content.requests) == (0, [])
