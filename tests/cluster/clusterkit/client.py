"""Client of a running cluster, for tests and commands."""

from __future__ import annotations

import base64
import functools
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from clusterkit.layout import State
from clusterkit.processes import COMMAND_SECONDS
from clusterkit.waiting import ClusterError, until

# More than the supervisor's own limit for images on the maximum number of nodes.
_ANSWER_SECONDS = 2500.0


class KubectlError(ClusterError):
    """kubectl failed; the text is its standard error."""


@dataclass(frozen=True)
class Cluster:
    """Access to a running cluster."""

    state: State

    @property
    def directory(self) -> Path:
        return self.state.settings.directory

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.directory / "admin.kubeconfig"

    @property
    def programs(self) -> Path:
        """A folder for PATH: kubectl and the other built programs."""
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
        """Return the standard output of kubectl. `input` is text, or objects that are sent as a JSON list.

        Raises:
            KubectlError: kubectl failed.
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
        """Return the parsed output of `kubectl get … -o json`."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> str:
        """Apply objects with server-side apply."""
        return self.kubectl("apply", "--server-side", "-f", "-", input=list(objects))

    def until_served(self, *definitions: str) -> None:
        """Wait until CustomResourceDefinitions are served."""

        def served(name: str) -> bool:
            # `kubectl wait` fails while there are no conditions at all.
            conditions = self.get("crd", name).get("status", {}).get("conditions") or []
            return any((one["type"], one["status"]) == ("Established", "True") for one in conditions)

        for name in definitions:
            until(f"the definition {name}", functools.partial(served, name), seconds=60, every=0.2)

    def until_account(self, namespace: str, seconds: float = 60.0) -> None:
        """Wait for the account that every namespace gets after its creation: without it no pod is admitted."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        until(
            f"service account of namespace {namespace}", lambda: self.http.get(path).status_code == 200, seconds=seconds
        )

    @functools.cached_property
    def http(self) -> httpx.Client:
        """HTTP client of the API server as the administrator: for data that kubectl hides, and for many requests."""
        config = json.loads(self.kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=authority)
        context.load_cert_chain(self.directory / "admin.crt", self.directory / "admin.key")
        assert user["client-certificate-data"]
        return httpx.Client(base_url=cluster["server"], verify=context, timeout=COMMAND_SECONDS)

    def node(self, command: str, name: str) -> None:
        """`stop`, `start`, `cut` (disconnect the cable) or `plug` (connect it) a real node.

        Raises:
            ClusterError: there is no such node, or the command failed.
        """
        self._ask(command, name)

    def load(self, archive: Path) -> None:
        """Load the images of a docker archive onto every running real node."""
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
    """Return Kubernetes objects as one document."""
    items = objects if isinstance(objects, Sequence) else [objects]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
