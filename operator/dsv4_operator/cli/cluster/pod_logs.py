"""Logs of a member's pod, and how `kubectl` gets them."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_operator.cli.cluster.pods import Pod
from dsv4_operator.cli.log_lines import LogComponent, LogOptions, LogOrigin

WHOLE_SECONDS = 120.0
"""Time that a whole log may take."""


@dataclass(frozen=True, slots=True)
class PodLog:
    """One log of one pod."""

    pod: Pod
    origin: LogOrigin
    file: str | None
    """None: what its first process writes, which the kubelet keeps; a file can only be read while the pod runs."""

    def command(self, tail: int | None, *, follow: bool) -> list[str]:
        """Return the words after `kubectl`."""
        if self.file is None:
            return agent_log(self.pod.name, self.pod.container, tail) + ["--follow"] * follow
        count = "+1" if tail is None else str(tail)
        place = [self.pod.name, f"--container={self.pod.container}"]
        return ["exec", *place, "--", "tail", "-n", count, *["-F"] * follow, self.file]


def agent_log(pod: str, container: str, tail: int | None) -> list[str]:
    """Return the words after `kubectl` for what the first process of a container wrote."""
    return ["logs", pod, f"--container={container}", f"--tail={-1 if tail is None else tail}"]


def pod_logs(pod: Pod, request: LogOptions, *, grouped: bool) -> list[PodLog]:
    """Return the logs of `pod` that were asked for and can be read."""
    if request.rank not in (None, pod.rank):
        return []
    found = []
    for component in request.components:
        origin = LogOrigin(pod.rank, component, pod.group if grouped else None)
        if component is LogComponent.AGENT:
            found += [PodLog(pod, origin, None)] if pod.started else []
        elif pod.directory is not None and pod.running and (component is LogComponent.RAY or pod.rank == 0):
            found.append(PodLog(pod, origin, f"{pod.directory}/{component}.log"))
    return found
