from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.api import load
from dsv4_operator.cli import main, render
from dsv4_operator.cli.sources.base import DeploymentView
from dsv4_runtime.contract import KernelStatus, ProviderStatus

MOE = KernelStatus(
    op="moe",
    provider="bundled",
    standings=(
        ProviderStatus(provider="bundled", slowness=1.0),
        ProviderStatus(provider="marlin", slowness=1.28),
        ProviderStatus(provider="deep_gemm", excluded="t1: not done after 20 s"),
    ),
)
INDEXER = KernelStatus(op="indexer", provider="stock", note="bundled was chosen; stays with vLLM's own kernels (x)")


def shown(make: Any, *groups: Any, asked: str = "auto", hardware: str = "H100", running: bool = True) -> DeploymentView:
    precision = "bf16" if hardware == "CPU" else "fp8"
    found = load(
        f"""
        apiVersion: dsv4.dev/v1alpha1
        kind: DSV4Deployment
        metadata: {{name: nano}}
        spec:
          model: {{variant: Nano, source: {{nano: {{seed: 0, precision: {precision}}}}}}}
          topology: {{hardware: {hardware}, nodesPerGroup: 1}}
          engine: {{kernels: {asked}}}
        """
    )
    return DeploymentView(found.model_copy(update={"status": make.status(*groups)}), running, make.now)


def test_kernels_lists_providers_and_exclusions(make: Any) -> None:
    assert render.kernels_text(shown(make, make.group(kernels=(MOE, INDEXER)))) == (
        "nano (Serving), spec.engine.kernels: auto\n"
        "\n"
        "OPERATION   PROVIDER   SPEED           NOTE\n"
        "moe         bundled    1.28 x marlin   -\n"
        "indexer     stock      -               bundled was chosen; stays with vLLM's own kernels (x)\n"
        "\n"
        "OPERATION   EXCLUDED    SEEN\n"
        "moe         deep_gemm   t1: not done after 20 s"
    )


def test_a_faster_kernel_on_request_is_named(make: Any) -> None:
    def text(provider: str, **slowness: float) -> str:
        standings = tuple(ProviderStatus(provider=name, slowness=value) for name, value in slowness.items())
        found = KernelStatus(op="moe", provider=provider, standings=standings)
        return render.kernels_text(shown(make, make.group(kernels=(found,))))

    named = "kernels: moe=b12x is 1.25 x as fast"
    assert named in text("bundled", bundled=1.25, marlin=1.5, b12x=1.0)
    assert named in text("stock", bundled=1.5, marlin=1.25, b12x=1.0)
    assert "as fast" not in text("bundled", bundled=1.0, marlin=1.5, b12x=1.25)
    assert "as fast" not in text("b12x", bundled=1.25, b12x=1.0)


def test_several_groups(make: Any) -> None:
    groups = [make.group(index=index, kernels=(found,)) for index, found in enumerate((MOE, INDEXER))]
    lines = render.kernels_text(shown(make, *groups)).splitlines()
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["GROUP", "OPERATION", "PROVIDER"],
        ["0", "moe", "bundled"],
        ["1", "indexer", "stock"],
    ]
    assert lines[6:] == [
        "GROUP   OPERATION   EXCLUDED    SEEN",
        "0       moe         deep_gemm   t1: not done after 20 s",
    ]


@pytest.mark.parametrize(
    ("asked", "hardware", "said"),
    [
        ("'off'", "H100", "vLLM's own kernels compute every operation; kernels: auto picks"),
        ("auto", "CPU", "vLLM's CPU kernels compute every operation"),
        ("auto", "H100", "No engine has reported its kernel providers yet"),
        ("null", "H100", "vLLM's own kernels compute every operation; kernels: auto picks"),
        ("null", "GB10", "No engine has reported its kernel providers yet"),
    ],
)
def test_kernels_without_providers_explains_why(make: Any, asked: str, hardware: str, said: str) -> None:
    assert (
        render.kernels_text(shown(make, make.group(), asked=asked, hardware=hardware)).splitlines()[2].startswith(said)
    )


def test_the_status_names_both_sides(make: Any) -> None:
    item = shown(make, make.group(kernels=(MOE, INDEXER)))
    text = render.deployment_text(item, make.now, wide=False)
    assert text.endswith("\n\nkernels: bundled moe; vLLM's indexer")
    assert "kernels" not in render.deployment_text(shown(make, make.group()), make.now, wide=False)


def test_as_json(
    root: Path, saved: Callable[..., Any], held: Callable[..., int], make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    held(saved(make.status(make.group(kernels=(MOE,)))))
    assert main.run(["kernels", "nano", "-o", "json", "--state-dir", str(root)]) == 0
    document = json.loads(capsys.readouterr().out)
    (operation,) = document["groups"][0]["operations"]
    assert (document["name"], document["phase"], document["kernels"]) == ("nano", "Serving", "default")
    assert operation["next"] == {"provider": "marlin", "speedup": 1.28}
    assert operation["standings"][2] == {"provider": "deep_gemm", "excluded": "t1: not done after 20 s"}


def test_of_a_cluster(deployed: Callable[..., Any], make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(make.status(make.group(kernels=(MOE,))))
    assert main.run(["kernels", "nano", "-n", "default"]) == 0
    assert "moe         bundled    1.28 x marlin" in capsys.readouterr().out


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("example", "arch", "ranks", "hidden"),
    [("flash-2x-spark.yaml", "sm_121", "2", 4096), ("pro-8x-spark.yaml", "sm_121", "8", 7168),
     ("flash-4x-rtx-pro-6000.yaml", "sm_120", "4", 4096)],
)  # fmt: skip
def test_the_compiler_gets_model_and_sizes_of_the_deployment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, example: str, arch: str, ranks: str, hidden: int
) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        assert not check
        _, _, module, model, *options = command
        seen.update(module=module, config=json.loads((Path(model) / "config.json").read_text()), options=options)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("dsv4_operator.cli.plan.subprocess.run", run)
    options = ("--out", str(tmp_path), "--include", "/cache", "--processes", "3", "--state-dir", str(tmp_path))
    assert main.run(["kernels", "compile", str(EXAMPLES / example), *options]) == 0
    given = seen["options"]
    assert given[given.index("--arch") + 1] == arch
    names, values = zip(*(one.split("=") for one in given[:4]), strict=True)
    assert names == ("--tensor-parallel", "--tokens", "--requests", "--context")
    assert values[0] == ranks
    assert min(map(int, values)) > 0
    assert given[-6:] == ["--out", str(tmp_path), "--include", "/cache", "--processes", "3"]
    config = seen["config"]
    assert config["hidden_size"] == hidden
    assert {4, 128} <= set(config["compress_ratios"]) <= {0, 4, 128}
    assert config["num_hidden_layers"] == len(config["compress_ratios"])
    assert (config["q_lora_rank"] > 0, config["index_topk"] in (512, 1024)) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(EXAMPLES / "nano.yaml")], "spec.topology.hardware: CPU has no GPU"),
        ([str(EXAMPLES)], "--arch: a directory has no hardware; name the architectures"),
    ],
)
def test_the_compiler_needs_an_architecture(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["kernels", "compile", *arguments, "--state-dir", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
