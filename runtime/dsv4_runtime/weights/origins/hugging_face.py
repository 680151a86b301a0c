"""A repository on a Hugging Face hub.

The hub's own client lists the files with their digests, finds the token and makes the URLs. The bytes come by plain
ranges from those URLs: so a killed transfer goes on where it stopped, all streams keep to one limit, and nothing is
kept twice on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, exported lazily

from dsv4_runtime.contract import WeightsPlan
from dsv4_runtime.weights.errors import TransientError, WeightsError
from dsv4_runtime.weights.fetch import Stream
from dsv4_runtime.weights.manifest import Manifest, wanted
from dsv4_runtime.weights.origins import common
from dsv4_runtime.weights.transfer import Web, patiently

_TIMEOUT = 30.0


class HuggingFace:
    """`plan.origin` at `plan.revision`. The token is the plan's, else what the hub's client finds (`HF_TOKEN`)."""

    def __init__(self, plan: WeightsPlan) -> None:
        self._plan = plan
        self._repo, self._revision = plan.origin or "", plan.revision
        # `HF_ENDPOINT` of the environment, or the public hub.
        self._endpoint = plan.endpoint or constants.ENDPOINT
        self._token = common.secret(plan)
        self._headers = build_hf_headers(token=self._token, library_name="dsv4")
        self._web = Web()

    @property
    def name(self) -> str:
        """For people."""
        return urlsplit(self._endpoint).hostname or self._endpoint

    def manifest(self) -> Manifest:
        """The checkpoint's files as they are there now."""
        return common.manifest(self._plan, f"{self._repo} on {self.name}", patiently(lambda: list(self._rows())))

    def _rows(self) -> Iterator[dict[str, object]]:
        what = f"the repository {self._repo}"
        api = HfApi(endpoint=self._endpoint, token=self._token, library_name="dsv4")
        try:
            info = api.model_info(self._repo, revision=self._revision, files_metadata=True, timeout=_TIMEOUT)
        except GatedRepoError as error:
            raise WeightsError(
                f"{what} asks for consent to its terms on {self.name}; give it there, and a token of that account "
                "in credentialsFile"
            ) from error
        except RevisionNotFoundError as error:
            raise WeightsError(
                f"{what} has no commit {self._revision}; copy it from the page of its commits"
            ) from error
        except RepositoryNotFoundError as error:
            raise WeightsError(
                f"{what} is not on {self.name}, or is not public; check the name, or give a token in credentialsFile"
            ) from error
        except OfflineModeIsEnabled as error:
            raise WeightsError(
                f"HF_HUB_OFFLINE forbids to ask {self.name}; unset it, or give a path instead"
            ) from error
        except HfHubHTTPError as error:
            code = error.response.status_code if error.response is not None else 0
            if code == 429 or code >= 500 or code == 0:
                raise TransientError(f"{self.name} answered {code}") from error
            raise WeightsError(f"{self.name} answered {code} for {what}: {error}") from error
        except Exception as error:
            # Which HTTP library the client stands on, and so what it raises for a cut line, changes with its version.
            raise TransientError(f"{self.name} did not answer: {error or type(error).__name__}") from error
        for sibling in info.siblings or ():
            if not wanted(sibling.rfilename):
                continue
            row: dict[str, object] = {"name": sibling.rfilename, "size": sibling.size}
            yield {**row, "sha256": sibling.lfs.sha256} if sibling.lfs else {**row, "git_blob": sibling.blob_id}

    def open(self, name: str, start: int) -> AbstractContextManager[Stream]:
        """File `name` from byte `start` on."""
        url = hf_hub_url(self._repo, name, revision=self._revision, endpoint=self._endpoint)
        return self._web.range(url, self._headers, start)
