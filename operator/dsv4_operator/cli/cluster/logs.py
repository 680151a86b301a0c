"""`kubectl dsv4 logs`: what members' pods wrote, and what the operator decided about them."""

from __future__ import annotations

import time
from typing import Protocol

from dsv4_operator.cli.cluster.follow import Follower
from dsv4_operator.cli.cluster.kubectl import Kubectl, KubectlError
from dsv4_operator.cli.cluster.pod_logs import WHOLE_SECONDS, pod_logs
from dsv4_operator.cli.cluster.pods import list_events, member_pods, read_event
from dsv4_operator.cli.errors import ExitCode, bad_input
from dsv4_operator.cli.log_lines import LogComponent, LogOptions, LogOrigin, show_line, shown_text
from dsv4_operator.cli.look import DeploymentView
from dsv4_operator.cli.output import note
from dsv4_operator.cli.patience import Patience

LOOK_SECONDS = 2.0
"""Between two looks for new pods, or new events."""


class DeploymentReader(Protocol):
    """Questions to the cluster besides those for logs."""

    def names(self, *, seconds: float = ...) -> list[str]:
        """Return the name of every deployment."""
        ...

    def command(self, verb: str, name: str = "") -> str:
        """Return what to type for `verb`."""
        ...


def show(kubectl: Kubectl, item: DeploymentView, request: LogOptions, deployments: DeploymentReader) -> ExitCode:
    """Print what there is; with `follow` go on, also into the next incarnation, until the deployment is gone."""
    if request.component is LogComponent.LOOP:
        return _events(kubectl, item, request, deployments)
    grouped = max(item.object.spec.replicas, len(item.status.groups)) > 1
    if request.follow:
        with Follower(kubectl, item.name, request, grouped=grouped) as follower:
            if not follower.look():
                note(f"{item.name} has no members yet; waiting for them")
            patient = Patience()
            # None: the cluster did not answer, so nothing is known to be over.
            while patient(lambda: follower.look() or item.name in deployments.names()) is not False:
                follower.read(LOOK_SECONDS)
        return ExitCode.OK
    pods = member_pods(kubectl, item.name)
    wanted = [log for pod in pods for log in pod_logs(pod, request, grouped=grouped)]
    if not wanted:
        ranks = ", ".join(dict.fromkeys(str(pod.rank) for pod in pods))
        hint = f"; its ranks are {ranks}" if ranks else f"; see `{deployments.command('status', item.name)}`"
        what = f"rank {request.rank}" if request.rank is not None else f"component {request.component}"
        raise bad_input(f"{item.name!r} has no logs of {what}{hint}")
    failed = []
    for log in wanted:
        try:
            text = kubectl.run(*log.command(request.tail, follow=False), seconds=WHOLE_SECONDS)
        except KubectlError as error:
            failed.append(error)
            note(f"{log.origin.label}: {error.reason}")
            continue
        for line in text.encode().removesuffix(b"\n").split(b"\n") if text else ():
            show_line(log.origin, shown_text(line), request)
    return ExitCode.FAILED if len(failed) == len(wanted) else ExitCode.OK


def _events(kubectl: Kubectl, item: DeploymentView, request: LogOptions, deployments: DeploymentReader) -> ExitCode:
    """Print what the operator said about the deployment, oldest first."""
    shown: set[tuple[str, int]] = set()

    def look(tail: int | None) -> bool:
        """Print what is new; whether there is the deployment still."""
        listed = list_events(kubectl, f"involvedObject.uid={item.object.metadata.uid}")
        found = sorted(map(read_event, listed), key=lambda each: each.time)
        fresh = [each for each in found if (each.uid, each.count) not in shown]
        for each in fresh if tail is None else fresh[len(fresh) - min(tail, len(fresh)) :]:
            show_line(LogOrigin(None, LogComponent.LOOP), str(each), request)
        shown.update((each.uid, each.count) for each in fresh)
        return not request.follow or item.name in deployments.names()

    look(request.tail)
    if not shown:
        why = deployments.command("why", item.name)
        note(f"there are no events of {item.name}; a cluster keeps them for an hour: see `{why}`")
    patient = Patience()
    while request.follow:
        time.sleep(LOOK_SECONDS)
        if patient(lambda: look(None)) is False:
            break
    return ExitCode.OK
