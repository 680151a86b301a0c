"""A running cluster in the hands of a test or of a command."""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from clusterkit.layout import State
from clusterkit.processes import COMMAND_SECONDS
from clusterkit.waiting import ClusterError

# More than the supervisor allows itself for images on the most nodes that there can be.
_ANSWER_SECONDS = 2500.0


class KubectlError(ClusterError):
    """kubectl said no; the text is what it said on standard error."""


@dataclass(frozen=True)
class Cluster:
    """What is needed to speak to it."""

    state: State

    @property
    def directory(self) -> Path:
        return self.state.settings.directory

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.directory / "admin.kubeconfig"

    @property
    def programs(self) -> Path:
        """A folder for PATH: kubectl and whatever else was built."""
        return self.directory / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """The environment for a child that uses this cluster."""
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{self.programs}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        }

    def kubectl(self, *arguments: str, input: object = None, seconds: float = COMMAND_SECONDS) -> str:
        """Standard output of kubectl. `input` is text, or objects that are sent as a JSON list.

        Raises:
            KubectlError: it said no.
        """
        text = input if isinstance(input, str) or input is None else as_list(input)
        try:
            done = subprocess.run(
                [str(self.programs / "kubectl"), *arguments],
                input=text or "",
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                env=self.environment,
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(f"kubectl {' '.join(arguments)} took longer than {seconds:.0f} s") from None
        if done.returncode:
            raise KubectlError(done.stderr.strip() or f"kubectl {' '.join(arguments)}: code {done.returncode}")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """What `kubectl get … -o json` says, parsed."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> str:
        """Server-side apply."""
        return self.kubectl("apply", "--server-side", "-f", "-", input=list(objects))

    @cached_property
    def http(self) -> httpx.Client:
        """The API server by HTTP, as the administrator: for what kubectl hides, and for many requests."""
        config = json.loads(self.kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=authority)
        context.load_cert_chain(self.directory / "admin.crt", self.directory / "admin.key")
        assert user["client-certificate-data"]
        return httpx.Client(base_url=cluster["server"], verify=context, timeout=COMMAND_SECONDS)

    def node(self, command: str, name: str) -> None:
        """`stop`, `start`, `cut` (pull the cable) or `plug` a real node.

        Raises:
            ClusterError: there is no such node, or it did not do so.
        """
        self._ask(command, name)

    def load(self, archive: Path) -> None:
        """Put the images of a docker archive on every real node that runs."""
        self._ask("load", str(archive))

    def _ask(self, *words: str) -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(_ANSWER_SECONDS)
            try:
                line.connect(str(self.directory / "control"))
                line.sendall(json.dumps(words).encode() + b"\n")
                said = line.makefile().readline()
            except OSError as error:
                raise ClusterError(
                    f"the supervisor of {self.state.settings.name!r} does not answer ({error})"
                ) from None
        if said.strip() != "ok":
            raise ClusterError(said.strip() or f"the supervisor ended while it had to {' '.join(words)}")


def as_list(objects: object) -> str:
    """Kubernetes objects as one document."""
    items = objects if isinstance(objects, Sequence) else [objects]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
