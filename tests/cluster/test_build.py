"""Sources of the cluster: pinned, and built again after changes; missing requirements are reported at once."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from clusterkit import build, needs
from clusterkit.layout import Settings
from clusterkit.waiting import ClusterError


@pytest.mark.parametrize("name", build.MODULES)
def test_every_module_is_pinned(name: str) -> None:
    source = build.SOURCES / name
    assert (source / "go.sum").stat().st_size > 0
    module = build.MODULES[name]
    assert re.search(rf"\b{re.escape(module.versioned)} v[0-9]", (source / "go.mod").read_text())


def test_the_ring_needs_no_module_that_only_other_clusters_need() -> None:
    assert set(build.MODULES) == {*build.REQUIRED, *build.OPTIONAL, *build.K3S}
    assert {*Settings(nodes=1, fake=1).modules} <= {*build.REQUIRED}


def test_all_parts_of_kubernetes_have_its_version() -> None:
    """They are published separately, as v0.36.3 for Kubernetes v1.36.3, and are only compatible with each other."""
    text = (build.SOURCES / "kubernetes" / "go.mod").read_text()
    version = re.search(r"k8s\.io/kubernetes v1\.(\S+)", text)
    assert version
    parts = re.findall(r"(k8s\.io/\S+) => (\S+) v0\.(\S+)", text)
    assert len(parts) > 30
    assert {(part, of) for part, replaced, of in parts if part == replaced} == {
        (part, version[1]) for part, _, _ in parts
    }


def test_another_source_is_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(build.SOURCES / "coredns", tmp_path / "coredns")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    module = build.MODULES["coredns"]
    before = build.folder(module)
    assert build.folder(module) == before
    (tmp_path / "coredns" / "notes.txt").write_text("no source")
    assert build.folder(module) == before
    with (tmp_path / "coredns" / "go.sum").open("a") as file:
        file.write("\n")
    assert build.folder(module) != before


def test_a_build_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "go" / "coredns"
    source.mkdir(parents=True)
    (source / "go.mod").write_text("module x\n\ngo 1.26.0\n")
    monkeypatch.setattr(build, "SOURCES", source.parent)
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    with pytest.raises(ClusterError, match=r"`.*go.* list .*coredns` ended with code 1: "):
        build.built("coredns")
    assert list((tmp_path / "cache").glob("*")) == []


def test_missing_requirements_are_one_sentence_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(needs.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(needs.os, "geteuid", lambda: 0)
    said = needs.lacks(nodes=True, images=True)
    assert said
    assert said.startswith("missing packages: containerd, runc, ")
    assert said.endswith(" buildah debootstrap")
    assert "; run as root: apt-get install containerd runc " in said
    assert needs.lacks(nodes=False, images=False) is None
    # With apt-get they can be installed, unless INSTALL=0.
    monkeypatch.setattr(needs.shutil, "which", lambda name, **__: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setenv("INSTALL", "0")
    assert needs.lacks(nodes=True, images=True) == said
    monkeypatch.delenv("INSTALL")
    assert needs.lacks(nodes=True, images=True) is None
    monkeypatch.setattr(needs.os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"real nodes and images need root.*--nodes 0"):
        needs.provide(nodes=True, images=False)
