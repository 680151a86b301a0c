"""Origins of checkpoints: each lists its files as a manifest and opens a file at any byte offset.

All bytes come through byte ranges, not through the download functions of the client libraries: a killed transfer
resumes at its last byte, one rate limit covers all streams, and no file is stored twice. The client libraries
(huggingface_hub, boto3) are imported only by the origin that needs them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit

from pydantic import ValidationError

from dsv4_runtime.contract import WeightsPlan, WeightsSource
from dsv4_runtime.util.files import open_regular
from dsv4_runtime.weights.checkpoint import (
    MAKE_SUMS,
    SUMS,
    CheckpointManifest,
    ManifestFile,
    TransientError,
    WeightsError,
    is_wanted,
    parse_sums,
)
from dsv4_runtime.weights.transfer import LARGEST_DOCUMENT, HttpClient, Source, Stream, http_error, with_retries

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


class Origin(Source, Protocol):
    """Source that also lists its files."""

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as listed by the origin now.

        Raises:
            WeightsError: the origin is unreachable or does not have the checkpoint; the message contains the remedy.
        """


def _read_token(plan: WeightsPlan) -> str | None:
    """Return the token in the plan's credentials file; None if the plan has none."""
    if plan.credentials_file is None:
        return None
    try:
        token = Path(plan.credentials_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"the file of secretKeyRef, {plan.credentials_file}, cannot be read: {error}") from error
    if not token or not token.isprintable():
        raise WeightsError(
            f"the file of secretKeyRef, {plan.credentials_file}, has no token; put it there, on one line"
        )
    return token


def _read_sums(text: bytes, where: str) -> dict[str, str]:
    """Return the entries of a `SHA256SUMS` that belong to the checkpoint."""
    try:
        return {name: digest for name, digest in parse_sums(text.decode()).items() if is_wanted(name)}
    except ValueError as error:
        raise WeightsError(f"{where}: {error}") from error


def _build_manifest(plan: WeightsPlan, where: str, rows: Iterable[Mapping[str, object]]) -> CheckpointManifest:
    """Return a manifest of `rows`, the fields of `ManifestFile`; raises WeightsError."""
    try:
        files = tuple(sorted((ManifestFile.model_validate(row) for row in rows), key=lambda file: file.name))
    except ValidationError as error:
        raise WeightsError(f"{where} lists a file that cannot be used: {error.errors()[0]['msg']}") from error
    if not any(file.name == "config.json" for file in files):
        raise WeightsError(f"{where} has no config.json; point spec.model.source at the directory of a checkpoint")
    return CheckpointManifest(identity=plan.identity, files=files)


_SIZE_REQUESTS = 8
"""Requests for sizes at the same time."""


class Http:
    """Directory of a web server at the URL `plan.origin`, listed by its `SHA256SUMS`: directory listings have no
    standard format.
    """

    def __init__(self, plan: WeightsPlan) -> None:
        self._plan = plan
        self._base = (plan.origin or "").rstrip("/")
        self.name = urlsplit(self._base).hostname or self._base
        self._web = HttpClient()
        token = _read_token(plan)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as listed now."""
        url = f"{self._base}/{SUMS}"
        try:
            text = with_retries(lambda: self._web.get(url, self._headers))
        except WeightsError as error:
            raise WeightsError(f"{error}; the directory needs a {SUMS}: `{MAKE_SUMS}`") from None
        return _build_manifest(self._plan, self._base, self._rows(_read_sums(text, url)))

    def _rows(self, sums: dict[str, str]) -> Iterator[dict[str, object]]:
        with ThreadPoolExecutor(_SIZE_REQUESTS, "size") as pool:
            for (name, digest), size in zip(sums.items(), pool.map(self._size, sums), strict=True):
                yield {"name": name, "size": size, "sha256": digest}

    def _size(self, name: str) -> int:
        return with_retries(lambda: self._web.size(self._url(name), self._headers))

    def open(self, file: ManifestFile, start: int) -> AbstractContextManager[Stream]:
        return self._web.range(self._url(file.name), self._headers, start)

    def _url(self, name: str) -> str:
        return f"{self._base}/{quote(name)}"


class _LocalStream:
    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    def readinto(self, room: memoryview, /) -> int:
        try:
            return os.readv(self._descriptor, [room])
        except OSError as error:
            raise TransientError(f"{self._path}: {error.strerror}") from error


def _check_version(descriptor: int, file: ManifestFile, path: Path) -> None:
    """Check time and size, the only known properties of a file without a digest."""
    status = os.fstat(descriptor)
    if file.sha256 is None and (_mtime_tag(status), status.st_size) != (file.tag, file.size):
        raise WeightsError(f"{path} was changed while it was copied; start again once it is complete")


def _mtime_tag(status: os.stat_result) -> str:
    return str(status.st_mtime_ns)


class SharedPath:
    """Directory `plan.origin` of a shared file system (NFS, volume), copied to the member's disk. A `SHA256SUMS` in it
    is verified.
    """

    def __init__(self, plan: WeightsPlan) -> None:
        self._plan = plan
        self._folder = Path(plan.origin or "")
        self.name = str(self._folder)

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as listed now."""
        sums_file = self._folder / SUMS
        try:
            sums = _read_sums(sums_file.read_bytes(), str(sums_file)) if sums_file.is_file() else {}
            rows = []
            for path in sorted(self._folder.rglob("*")):
                name, status = path.relative_to(self._folder).as_posix(), path.lstat()
                if not stat.S_ISDIR(status.st_mode) and (name in sums or (not sums and is_wanted(name))):
                    if not stat.S_ISREG(status.st_mode):
                        raise WeightsError(f"{path} is a link or no regular file; put the file itself there")
                    row = {"name": name, "size": status.st_size, "sha256": sums.get(name)}
                    rows.append({**row, "tag": _mtime_tag(status)})
        except OSError as error:
            raise WeightsError(f"{self._folder} cannot be read: {error.strerror}; check that it is mounted") from error
        if missing := set(sums) - {str(row["name"]) for row in rows}:
            raise WeightsError(f"{self._folder} lacks {min(missing)}, which its {SUMS} lists; copy it there")
        return _build_manifest(self._plan, str(self._folder), rows)

    @contextlib.contextmanager
    def open(self, file: ManifestFile, start: int) -> Iterator[Stream]:
        """Open `file` from byte `start` on; raise, also at the end, if it is not the listed version."""
        path = self._folder / file.name
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
        try:
            _check_version(descriptor, file, path)
            os.lseek(descriptor, start, os.SEEK_SET)
            os.posix_fadvise(descriptor, start, 0, os.POSIX_FADV_SEQUENTIAL)
            yield _LocalStream(descriptor, path)
            _check_version(descriptor, file, path)
        finally:
            os.close(descriptor)


_HUB_TIMEOUT = 30.0
"""Seconds to connect, and seconds without a byte."""


class HuggingFace:
    """Repository `plan.origin` at `plan.revision` on a Hugging Face hub, with the plan's token or the client's
    (`HF_TOKEN`).

    The hub's client lists files with digests, finds the token and creates the URLs.
    """

    def __init__(self, plan: WeightsPlan) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

        self._plan = plan
        self._repo, self._revision = plan.origin or "", plan.revision
        # `HF_ENDPOINT` or the public hub.
        self._endpoint = plan.endpoint or constants.ENDPOINT
        self.name = urlsplit(self._endpoint).hostname or self._endpoint
        if constants.HF_HUB_OFFLINE:
            # The client refuses to list files; the range requests would not be affected.
            raise WeightsError(
                f"HF_HUB_OFFLINE forbids requests to {self.name} for {self._repo}; unset it on this machine, or give "
                "spec.model.source.path"
            )
        self._token = _read_token(plan)
        self._headers = build_hf_headers(token=self._token, library_name="dsv4")
        self._web = HttpClient(explain=self._explain)

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as listed now."""
        return _build_manifest(self._plan, f"{self._repo} on {self.name}", with_retries(lambda: list(self._rows())))

    def _rows(self) -> Iterator[dict[str, object]]:
        from huggingface_hub import HfApi

        # HTTPError is the base class of all errors of the client's HTTP library (httpx for 1.x, httpx2 for 2.x).
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            HfHubHTTPError,
            HFValidationError,
            HTTPError,
        )

        api = HfApi(endpoint=self._endpoint, token=self._token, library_name="dsv4")
        try:
            info = api.model_info(self._repo, revision=self._revision, files_metadata=True, timeout=_HUB_TIMEOUT)
        except HfHubHTTPError as error:
            raise self._explain(self.name, error.response.status_code, error.response.headers) from error
        except HTTPError as error:
            raise TransientError(f"{self.name} did not answer: {str(error) or type(error).__name__}") from error
        except HFValidationError as error:
            raise WeightsError(f"spec.model.source.huggingFace.repo: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            # No JSON, or not a hub: login page of a proxy, or a mirror without the API.
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
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self._repo, file.name, revision=self._revision, endpoint=self._endpoint)
        return self._web.range(url, self._headers, start)

    def _explain(self, where: str, status: int, headers: Mapping[str, str]) -> TransientError | WeightsError:
        """Return the error for a response of the hub, for listing and download alike."""
        text = self._meant(status, headers)
        return WeightsError(text) if text else http_error(where, status, headers)

    def _meant(self, status: int, headers: Mapping[str, str]) -> str | None:
        """Return the meaning of `X-Error-Code`, because statuses are ambiguous (`hf_raise_for_status`)."""
        code, message = headers.get("X-Error-Code", ""), headers.get("X-Error-Message", "")
        repository = f"the repository {self._repo}"
        whose = f"of secretKeyRef {self._plan.credentials_file}" if self._token else "of this machine (HF_TOKEN)"
        if code == "GatedRepo":
            # The files of a gated repository are listed publicly; only the download is refused.
            return (
                f"{repository} requires consent to its terms; give it on {self._endpoint}/{self._repo}, and a token of "
                "that account in secretKeyRef"
            )
        if code == "RevisionNotFound":
            return f"{repository} has no commit {self._revision}; copy all 40 digits from the page of its commits"
        if message == "Access to this resource is disabled.":
            return f"{repository} has been disabled on {self.name}; choose another one"
        if status == 401 and message == "Invalid credentials in Authorization header":
            return f"the token {whose} is not valid at {self.name}; make one at {self._endpoint}/settings/tokens"
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


_SIGNED_SECONDS = 3600


class S3:
    """Prefix `s3://BUCKET/PREFIX` of an S3-compatible store. Requests are unsigned if there are no credentials.

    boto3 finds the credentials, lists the objects and signs a URL per transfer.
    """

    def __init__(self, plan: WeightsPlan) -> None:
        import boto3
        import botocore
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        self._plan = plan
        parts = urlsplit(plan.origin or "")
        self._bucket, prefix = parts.netloc, parts.path.strip("/")
        self.name = f"s3://{self._bucket}"
        self._prefix = f"{prefix}/" if prefix else ""
        if plan.credentials_file is not None:
            # This process serves one staging job, so its environment can be changed.
            os.environ["AWS_SHARED_CREDENTIALS_FILE"] = plan.credentials_file
        try:
            session = boto3.Session(region_name=plan.region or os.environ.get("AWS_REGION") or "us-east-1")
            signed = session.get_credentials() is not None
            if plan.credentials_file is not None and not signed:
                raise WeightsError(
                    f"the file of secretKeyRef, {plan.credentials_file}, has no [default] with aws_access_key_id and "
                    "aws_secret_access_key; write them there"
                )
            config = Config(
                signature_version="s3v4" if signed else botocore.UNSIGNED,
                # Stores other than AWS rarely have a host name per bucket.
                s3={"addressing_style": "path" if plan.endpoint else "auto"},
                connect_timeout=10,
                read_timeout=60,
                retries={"mode": "standard", "total_max_attempts": 4},
            )
            self._client: Any = session.client("s3", endpoint_url=plan.endpoint, config=config)
        except (BotoCoreError, ValueError) as error:
            raise WeightsError(f"the S3 client cannot be made: {error}") from error
        self._web = HttpClient()

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as listed now."""
        return _build_manifest(self._plan, self._plan.origin or "", with_retries(lambda: list(self._rows())))

    def _rows(self) -> Iterator[dict[str, object]]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            objects = {entry["Key"][len(self._prefix) :]: entry for page in pages for entry in page.get("Contents", ())}
            sums: dict[str, str] = {}
            if SUMS in objects:
                body = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}{SUMS}")["Body"]
                sums = _read_sums(body.read(LARGEST_DOCUMENT), f"{self._plan.origin}/{SUMS}")
        except ClientError as error:
            raise self._explained(error) from error
        except BotoCoreError as error:
            raise TransientError(f"{self.name}: {error}") from error
        if missing := set(sums) - set(objects):
            raise WeightsError(f"{self._plan.origin} lacks {min(missing)}, which its {SUMS} lists; upload it")
        for name, entry in objects.items():
            if name in sums or (not sums and name and not name.endswith("/") and is_wanted(name)):
                yield {"name": name, "size": entry["Size"], "sha256": sums.get(name), "tag": entry.get("ETag")}

    def _explained(self, error: ClientError) -> WeightsError | TransientError:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status == 429 or status >= 500:
            return TransientError(f"{self.name} answered {status} {code}")
        remedy = {
            "NoSuchBucket": "check the bucket's name and the endpoint",
            "AccessDenied": "give credentials that may list and read it, in secretKeyRef",
            "InvalidAccessKeyId": "check the access key in secretKeyRef",
            "SignatureDoesNotMatch": "check the secret key in secretKeyRef",
        }.get(code, "check spec.model.source.s3")
        return WeightsError(f"{self.name} answered {code or status}; {remedy}")

    def open(self, file: ManifestFile, start: int) -> AbstractContextManager[Stream]:
        """Open the listed version of `file` from byte `start` on."""
        params = {"Bucket": self._bucket, "Key": f"{self._prefix}{file.name}"}
        url: str = self._client.generate_presigned_url("get_object", Params=params, ExpiresIn=_SIGNED_SECONDS)
        return self._web.range(url, {"If-Match": file.tag} if file.tag else {}, start)


def open_origin(plan: WeightsPlan) -> Origin:
    """Return the origin that `plan` names.

    Raises:
        WeightsError: the credentials cannot be read, or the client library refuses the configuration.
    """
    origins: dict[WeightsSource, Callable[[WeightsPlan], Origin]] = {
        WeightsSource.HUGGING_FACE: HuggingFace,
        WeightsSource.S3: S3,
        WeightsSource.HTTP: Http,
        WeightsSource.SHARED_PATH: SharedPath,
    }
    if plan.source not in origins:
        raise ValueError(f"{plan.source} is not fetched from anywhere")
    return origins[plan.source](plan)
