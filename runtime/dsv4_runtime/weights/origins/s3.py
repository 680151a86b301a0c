"""A prefix in a bucket of an S3-compatible store.

boto3 finds the credentials as every AWS program does, lists the objects and signs a URL for each transfer; the bytes
come by plain ranges from those URLs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from dsv4_runtime.contract import WeightsPlan
from dsv4_runtime.weights.errors import TransientError, WeightsError
from dsv4_runtime.weights.fetch import Stream
from dsv4_runtime.weights.manifest import SUMS, CheckpointManifest, ManifestFile, is_wanted
from dsv4_runtime.weights.origins import common
from dsv4_runtime.weights.transfer import LARGEST_DOCUMENT, Web, patiently

_SIGNED_SECONDS = 3600


class S3:
    """`plan.origin` is `s3://BUCKET/PREFIX`. Without any credentials the requests are not signed."""

    def __init__(self, plan: WeightsPlan) -> None:
        self._plan = plan
        parts = urlsplit(plan.origin or "")
        self._bucket, prefix = parts.netloc, parts.path.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        if plan.credentials_file is not None:
            # This process is for one staging alone, so its environment is as good a place as any.
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
                # Stores other than AWS rarely have a host name for each bucket.
                s3={"addressing_style": "path" if plan.endpoint else "auto"},
                connect_timeout=10,
                read_timeout=60,
                retries={"mode": "standard", "total_max_attempts": 4},
            )
            self._client: Any = session.client("s3", endpoint_url=plan.endpoint, config=config)
        except (BotoCoreError, ValueError) as error:
            raise WeightsError(f"the S3 client cannot be made: {error}") from error
        self._web = Web()

    @property
    def name(self) -> str:
        """Return its name for people."""
        return f"s3://{self._bucket}"

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as they are there now."""
        return common.manifest(self._plan, self._plan.origin or "", patiently(lambda: list(self._rows())))

    def _rows(self) -> Iterator[dict[str, object]]:
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            objects = {entry["Key"][len(self._prefix) :]: entry for page in pages for entry in page.get("Contents", ())}
            sums: dict[str, str] = {}
            if SUMS in objects:
                body = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}{SUMS}")["Body"]
                sums = common.sums(body.read(LARGEST_DOCUMENT), f"{self._plan.origin}/{SUMS}")
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
        """Open `file` from byte `start` on, in the version that was listed."""
        params = {"Bucket": self._bucket, "Key": f"{self._prefix}{file.name}"}
        url: str = self._client.generate_presigned_url("get_object", Params=params, ExpiresIn=_SIGNED_SECONDS)
        return self._web.range(url, {"If-Match": file.tag} if file.tag else {}, start)
