"""A repository on a Hugging Face hub.

The hub's own client lists the files with their digests, finds the token and makes the URLs. The bytes come by plain
ranges from those URLs: so a killed transfer goes on where it stopped, all streams keep to one limit, and nothing is
kept twice on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, hf_hub_url

# The base of all that the HTTP library of the installed client raises: httpx for 1.x, httpx2 for 2.x.
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, exported lazily

from dsv4_runtime.contract import WeightsPlan
from dsv4_runtime.weights.errors import TransientError, WeightsError
from dsv4_runtime.weights.fetch import Stream
from dsv4_runtime.weights.manifest import CheckpointManifest, ManifestFile, is_wanted
from dsv4_runtime.weights.origins import common
from dsv4_runtime.weights.transfer import Web, patiently, refusal

_TIMEOUT = 30.0
"""Seconds to connect, and seconds without a byte."""


class HuggingFace:
    """`plan.origin` at `plan.revision`. The token is the plan's, else what the hub's client finds (`HF_TOKEN`)."""

    def __init__(self, plan: WeightsPlan) -> None:
        self._plan = plan
        self._repo, self._revision = plan.origin or "", plan.revision
        # `HF_ENDPOINT` of the environment, or the public hub.
        self._endpoint = plan.endpoint or constants.ENDPOINT
        if constants.HF_HUB_OFFLINE:
            # The client itself refuses to list files then; the bytes do not come through it.
            raise WeightsError(
                f"HF_HUB_OFFLINE forbids to ask {self.name} for {self._repo}; unset it on this machine, or give "
                "spec.model.source.path"
            )
        self._token = common.secret(plan)
        self._headers = build_hf_headers(token=self._token, library_name="dsv4")
        self._web = Web(explain=self._explain)

    @property
    def name(self) -> str:
        """Return its name for people."""
        return urlsplit(self._endpoint).hostname or self._endpoint

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as they are there now."""
        return common.manifest(self._plan, f"{self._repo} on {self.name}", patiently(lambda: list(self._rows())))

    def _rows(self) -> Iterator[dict[str, object]]:
        api = HfApi(endpoint=self._endpoint, token=self._token, library_name="dsv4")
        try:
            info = api.model_info(self._repo, revision=self._revision, files_metadata=True, timeout=_TIMEOUT)
        except HfHubHTTPError as error:
            raise self._explain(self.name, error.response.status_code, error.response.headers) from error
        except HTTPError as error:
            raise TransientError(f"{self.name} did not answer: {str(error) or type(error).__name__}") from error
        except HFValidationError as error:
            raise WeightsError(f"spec.model.source.huggingFace.repo: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            # No JSON, or not the hub's: a login page of a proxy, a mirror that knows files alone.
            raise WeightsError(
                f"{self._endpoint} does not list the files of {self._repo} as a hub does ({type(error).__name__}: "
                f"{error}); check spec.model.source.huggingFace.endpoint, and proxies on the way"
            ) from error
        for sibling in info.siblings or ():
            if not is_wanted(sibling.rfilename):
                continue
            row: dict[str, object] = {"name": sibling.rfilename, "size": sibling.size}
            yield {**row, "sha256": sibling.lfs.sha256} if sibling.lfs else {**row, "git_blob": sibling.blob_id}

    def open(self, file: ManifestFile, start: int) -> AbstractContextManager[Stream]:
        """Open `file` from byte `start` on."""
        url = hf_hub_url(self._repo, file.name, revision=self._revision, endpoint=self._endpoint)
        return self._web.range(url, self._headers, start)

    def _explain(self, where: str, status: int, headers: Mapping[str, str]) -> TransientError | WeightsError:
        """Return what the hub means by an answer; the list of files and the bytes are refused alike."""
        text = self._meant(status, headers)
        return WeightsError(text) if text else refusal(where, status, headers)

    def _meant(self, status: int, headers: Mapping[str, str]) -> str | None:
        """Return what the hub means by `X-Error-Code`; its statuses mean several things (`hf_raise_for_status`)."""
        code, message = headers.get("X-Error-Code", ""), headers.get("X-Error-Message", "")
        repository = f"the repository {self._repo}"
        whose = f"of secretKeyRef {self._plan.credentials_file}" if self._token else "of this machine (HF_TOKEN)"
        if code == "GatedRepo":
            # The files of such a repository are listed for everybody; only their bytes are refused.
            return (
                f"{repository} asks for consent to its terms; give it on {self._endpoint}/{self._repo}, and a token of "
                "that account in secretKeyRef"
            )
        if code == "RevisionNotFound":
            return f"{repository} has no commit {self._revision}; copy all 40 digits from the page of its commits"
        if message == "Access to this resource is disabled.":
            return f"{repository} has been disabled on {self.name}; choose another one"
        if status == 401 and message == "Invalid credentials in Authorization header":
            return f"the token {whose} is none that {self.name} knows; make one at {self._endpoint}/settings/tokens"
        if status == 403 and message and "authorization" in self._headers:
            return (
                f"the token {whose} may not read {self._repo} ({message}); allow it to at "
                f"{self._endpoint}/settings/tokens"
            )
        if code == "RepoNotFound" or status == 401:
            return (
                f"{repository} is not on {self.name}, or is not public; check the name, or give a token that may read "
                "it in secretKeyRef"
            )
        return None
