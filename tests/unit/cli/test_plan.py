"""`dsv4 plan`: the table, the verdict, the advice, and fields changed on the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.cli import main, plan
from dsv4_operator.cli.output import wrap
from dsv4_operator.cli.plan import memory_text
from dsv4_operator.planning.memory.runs import LoggedStart, runs

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
SAMPLES = re.findall(r"```\n\$ dsv4 plan (\S+)\n(.*?)```", (ROOT / "docs/planning.md").read_text(), flags=re.DOTALL)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], file: str, root: Path, *arguments: str) -> Any:
    return json.loads(run(capsys, file, "--state-dir", str(root), "-o", "json", *arguments)[1])


def test_nano(manifest: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(manifest), "--state-dir", str(root))
    assert (code, err) == (0, "")
    assert "nano: Nano on 2 × CPU, tensor parallel 2" in out
    assert "KV cache size: " in out
    assert "\nIt fits; rank 0 is the tightest" in out
    assert "10.88.0.11" in out
    assert not (root / "nano").exists(), "only shown"


def test_few_modules_are_imported(root: Path) -> None:
    program = (
        "import sys; from dsv4_operator.cli import main; "
        f"code = main.run(['plan', {str(EXAMPLES / 'flash-2x-spark.yaml')!r}, '--state-dir', {str(root)!r}]); "
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = set(ended.stderr.split())
    assert "dsv4_operator.cli.plan" in found
    slow = ("aiohttp", "asyncio", "jinja2", "kopf", "kubernetes", "pynvml", "ray", "torch", "urllib.request", "vllm")
    slow = (*slow, "dsv4_operator.backends.local.supervisor", "dsv4_operator.lifecycle", "dsv4_runtime.util.log_lines")
    slow = (*slow, "dsv4_operator.backends.hosts.documents")
    assert not found & set(slow)


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_a_document(manifest: Path, root: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(manifest), "--state-dir", str(root), "-o", form)
    found = json.loads(out) if form == "json" else yaml.safe_load(out)
    assert code == 0
    assert found["memory"]["fits"] is True
    assert found["groups"][0]["deployment"] == "nano"
    assert len(found["groups"][0]["members"]) == 2


def test_a_set_up_that_does_not_fit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "pro-8x-rtx-pro-6000.yaml")
    code, out, _ = run(capsys, file, "--state-dir", str(root))
    assert code == 2
    assert "\nIt does not fit: " in out
    assert max(map(len, out.splitlines())) < 260
    found = document(capsys, file, root)
    assert re.findall(r"rank \d|[\d.]+ GiB", found["memory"]["problem"]) == ["rank 0", "101.94 GiB", "94.97 GiB"]
    assert found["memory"]["advice"][0]["settings"] == {
        "topology.nodesPerGroup": 2,
        "topology.tensorParallelSize": 8,
        "topology.pipelineParallelSize": 2,
    }
    (refusal,) = found["findings"]
    assert (refusal["reason"], refusal["severity"]) == ("MemoryShort", "refuse")


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES.glob("flash-*")])
def test_the_examples_fit(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, str(EXAMPLES / f"{name}.yaml"), "--state-dir", str(root))
    assert "\nIt fits; rank 0 is the tightest" in out


def test_an_uncertain_plan_has_its_own_exit_code(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, tight = str(EXAMPLES / "pro-8x-spark.yaml"), ("--what-if", "engine.maxModelLen=262144")
    code, out, _ = run(capsys, file, "--state-dir", str(root), *tight)
    assert code == 3
    assert "\nIt is uncertain: " in out
    assert "The largest uncertainty is " in out
    memory = document(capsys, file, root, *tight)["memory"]
    assert (memory["verdict"], memory["fits"]) == ("uncertain", False)
    assert memory["kv"]["concurrencyLeast"] < memory["kv"]["concurrency"] < 1 < memory["kv"]["concurrencyMost"]
    assert memory["advice"]
    assert memory["measurement"]["how"]
    assert "A cluster refuses it unless spec.engine.allowTight is true." in out
    code, out, _ = run(capsys, file, "--state-dir", str(root), *tight, "--what-if", "engine.allowTight=true")
    assert (code, "A cluster starts it, because spec.engine.allowTight is true." in out) == (3, True)


def test_a_plan_has_contexts_by_users_and_the_cost_of_load_formats(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = document(capsys, str(EXAMPLES / "flash-2x-spark.yaml"), root)["memory"]
    contexts = memory["kv"]["longestContexts"]
    assert contexts["1"] >= contexts["2"] >= contexts["4"] >= memory["maxModelLen"]
    formats = {one["name"]: one for one in memory["loadFormats"]}
    assert (
        formats["safetensors"]["bytes"] == 0 < formats["instanttensor"]["bytes"] < formats["instanttensor"]["mostBytes"]
    )


def test_changed_fields_are_planned(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "flash-2x-spark.yaml")
    _, out, _ = run(capsys, file, "--state-dir", str(root), "--what-if", "engine.maxNumBatchedTokens=2048")
    assert "2048 batched tokens" in out
    _, out, _ = run(capsys, file, "--state-dir", str(root), "--what-if", "topology.nodesPerGroup=4")
    assert "4 × DGX Spark, 128 GB (GB10), tensor parallel 4" in out, "tensorParallelSize follows"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("engine.maxNumBatchedTokens", "is not a change"),
        ("engine.maxNumBatchedToken=4096", "maxNumBatchedToken"),
        ("engine.maxNumSeqs=many", "spec.engine.maxNumSeqs"),
        ("topology.hardware.x=1", "spec.topology.hardware: is not a mapping"),
        ("engine.maxNumSeqs=[", "not valid YAML"),
    ],
)
def test_a_change_that_is_wrong(change: str, message: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "flash-2x-spark.yaml")
    code, out, err = run(capsys, file, "--state-dir", str(root), "--what-if", change)
    assert (code, out) == (2, "")
    assert message in err


def test_a_wrong_manifest_is_answered_as_a_document_too(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("apiVersion: dsv4.dev/v1alpha1\nkind: DSV4Deployment\nmetadata: {name: a}\n")
    code, out, err = run(capsys, str(file), "--state-dir", str(root), "-o", "json")
    found = json.loads(out)
    assert code == 2
    assert [(one["field"], one["value"], one["reason"]) for one in found["findings"]] == [("spec", None, "Required")]
    assert err == "".join(f"error: {text}\n" for text in found["errors"])
    assert err.startswith(f"error: {file}: spec: ")


def test_standard_input_that_is_not_utf_8(root: Path) -> None:
    """In the locale C Python reads invalid bytes as surrogates."""
    command = [sys.executable, "-c", "from dsv4_operator.cli.main import main; main()", "plan", "-"]
    for locale in ("C", "C.UTF-8"):
        done = subprocess.run(
            [*command, "--state-dir", str(root)], input=b"a\xffb", capture_output=True, timeout=120, check=False,
            env={**os.environ, "LC_ALL": locale},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (2, b"error: stdin: is not UTF-8 text; save the file as UTF-8\n")


def test_warnings_are_findings_of_the_document(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "flash-2x-spark.yaml")
    found = document(capsys, file, root, "--what-if", "engine.cudagraphMode=None")
    (warning,) = found["findings"]
    assert (warning["field"], warning["value"]) == ("spec.engine.cudagraphMode", "None")
    assert (warning["reason"], warning["severity"], warning["remedy"]) == ("Eager", "warn", "write Auto")
    assert found["groups"]


def test_an_output_that_cannot_be_written(root: Path) -> None:
    """A full disk causes one error message and exit code 1; a closed pipe causes exit code 141 without a message."""
    program = "from dsv4_operator.cli.main import main; main()"
    command = [sys.executable, "-c", program, "plan", str(EXAMPLES / "flash-2x-spark.yaml")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_three_machines_in_stages(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, three = str(EXAMPLES / "flash-2x-spark.yaml"), ("--what-if", "topology.nodesPerGroup=3")
    assert run(capsys, file, "--state-dir", str(root), *three)[0] == 2
    (found,) = document(capsys, file, root, *three)["findings"]
    assert (found["field"], found["value"]) == ("spec.topology.tensorParallelSize", 3)
    assert dict(re.findall(r"(\w+ParallelSize) (\d+)", found["remedy"])) == {
        "pipelineParallelSize": "3",
        "tensorParallelSize": "1",
    }
    staged = (*three, "--what-if", "topology.pipelineParallelSize=3")
    code, out, _ = run(capsys, file, "--state-dir", str(root), *staged)
    assert code == 0
    assert "tensor parallel 1, 3 stages" in out


@pytest.mark.parametrize("checkpoint", ["V4-Flash", "V4.1-Flash", "V4-Pro"])
@pytest.mark.parametrize(
    "topology",
    [
        {"hardware": "GB10", "nodesPerGroup": 3},
        {"hardware": "GB10", "nodesPerGroup": 3, "tensorParallelSize": 2},
        {"hardware": "GB10", "nodesPerGroup": 7},
        {"hardware": "RTXPRO6000", "nodesPerGroup": 2, "devicesPerNode": 3},
    ],
    ids=["3", "3 in twos", "7", "2 x 3"],
)
def test_a_division_that_is_advised_is_accepted(
    topology: dict[str, Any], checkpoint: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rules of the specification know the variant only, and the layers of V4.1 have no three stages."""
    file = tmp_path / "a.yaml"
    variant = "Pro" if "Pro" in checkpoint else "Flash"
    spec = {"model": {"variant": variant, "source": {"path": f"/m/DeepSeek-{checkpoint}"}}, "topology": topology}
    made = {"apiVersion": "dsv4.dev/v1beta1", "kind": "DSV4Deployment", "metadata": {"name": "a"}, "spec": spec}
    file.write_text(yaml.safe_dump(made))
    code, out, _ = run(capsys, str(file), "--state-dir", str(root), "-o", "json")
    (found,) = json.loads(out)["findings"]
    assert code == 2
    assert found["reason"] in ("TensorParallelDivision", "TensorParallelSize")
    spec["topology"] = topology | {
        name: int(size) for name, size in re.findall(r"(\w+) (\d+)", found["remedy"].removeprefix("use "))
    }
    file.write_text(yaml.safe_dump(made))
    code, _, err = run(capsys, str(file), "--state-dir", str(root))
    assert code == 0, err


def test_sixteen_devices_of_one_machine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "pro-8x-rtx-pro-6000.yaml")
    code, out, _ = run(capsys, file, "--state-dir", str(root), "--what-if", "topology.devicesPerNode=16")
    assert code == 0
    assert "16 × RTX PRO 6000 Blackwell Workstation, tensor parallel 16" in out


def test_a_plan_beside_a_log(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "Model loading took 73.90 GiB and 1 seconds\nAvailable KV cache memory: 11.50 GiB\n"
        "KV cache size: 400,000 tokens, Maximum concurrency for 262,144 tokens per request: 3.20x\n"
    )
    file = str(EXAMPLES / "flash-2x-rtx-pro-6000.yaml")
    code, out, _ = run(capsys, file, "--state-dir", str(root), "--from-log", str(log))
    assert code == 0
    assert re.search(r"weights +73.90 GiB +73.77 GiB +72.67 GiB to 75.24 GiB +\+0.13 GiB +yes", out)
    assert re.search(r"KV cache +11.50 GiB +11.76 GiB", out)
    assert re.search("262,144 tokens per request.* 131,072; add --what-if engine.maxModelLen=262144", out)
    _, out, _ = run(capsys, file, "--state-dir", str(root), "--from-log", str(log), "-o", "json")
    *_, concurrency = found = json.loads(out)["log"]
    assert [term["term"] for term in found] == ["weights", "KV cache", "concurrent requests"]
    assert (concurrency["logged"], concurrency["within"]) == (3.2, True)
    log.write_text("Available KV cache memory: 11.50 GiB\n", encoding="utf-16")
    _, out, _ = run(capsys, file, "--state-dir", str(root), "--from-log", str(log))
    assert re.search(r"KV cache +11.50 GiB +11.76 GiB", out), "as PowerShell writes it"
    log.write_text("Model loading took 73.90 GiB and 1 seconds\nAvailable KV cache memory: -1.42 GiB\n")
    code, out, _ = run(capsys, file, "--state-dir", str(root), "--from-log", str(log))
    assert code == 1, "a figure is outside of its range"
    assert "Largest deviation: KV cache, -13.18 GiB (logged -1.42 GiB, planned 11.76 GiB)." in out
    log.write_text("nothing")
    code, out, err = run(capsys, file, "--state-dir", str(root), "--from-log", str(log))
    assert (code, out) == (2, "")
    assert f"{log} contains no memory figures" in err


def test_a_document_names_the_figure_outside_its_range(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("Maximum concurrency for 131,072 tokens per request: 9.99x\n")
    file = str(EXAMPLES / "flash-2x-rtx-pro-6000.yaml")
    code, out, _ = run(capsys, file, "--state-dir", str(root), "--from-log", str(log), "-o", "json")
    (found,) = json.loads(out)["log"]
    assert (code, found["term"], found["logged"], found["within"]) == (1, "concurrent requests", 9.99, False)
    assert found["least"] <= found["planned"] <= found["most"] < 9.99


def test_a_log_of_a_start_with_other_settings_of_the_cache(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("Initial free memory 90.1 GiB, reserved 12.0 GiB memory for KV Cache as specified\n")
    beside = (str(EXAMPLES / "flash-2x-rtx-pro-6000.yaml"), "--state-dir", str(root), "--from-log", str(log))
    code, out, _ = run(capsys, *beside)
    assert code == 1, "nothing was compared"
    assert "No figure of the log is in the plan: " in out
    (advice,) = re.findall(r"a KV cache of fixed size, 12.00 GiB; add (.*)", out)
    assert advice == "--what-if engine.kvCacheMemory=12288Mi --what-if engine.gpuMemoryUtilization=null"
    code, out, _ = run(capsys, *beside, *advice.split())
    assert code == 0
    assert re.search(r"KV cache +12.00 GiB +12.00 GiB .* yes", out)
    log.write_text("Available KV cache memory: 11.50 GiB\n")
    _, out, _ = run(capsys, *beside, *advice.split())
    assert "add --what-if engine.kvCacheMemory=null" in out


def test_the_build_of_a_log(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = yaml.safe_load((EXAMPLES / "flash-2x-spark.yaml").read_text())
    engine = given["spec"]["engine"]
    engine["extraArgs"] = ["--own-flag=3", "--load-format=own_format"]
    engine["env"] = [{"name": "VLLM_OWN_VARIABLE", "value": "1"}]
    file, log, written = tmp_path / "own.yaml", tmp_path / "vllm.log", tmp_path / "build.yaml"
    file.write_text(yaml.safe_dump(given))
    log.write_text("Model loading took 79.10 GiB and 1 seconds\nAvailable KV cache memory: 9.25 GiB\n")
    beside = (str(file), "--state-dir", str(root), "--from-log", str(log))
    code, _, err = run(capsys, *beside, "--write-build", str(written))
    assert code == 1, "the log is outside of the ranges of the base"
    assert "VLLM_OWN_VARIABLE" in err, "and a variable is unknown to it"
    build = yaml.safe_load(written.read_text())["spec"]["engine"]["build"]
    assert (build["flags"], build["variables"]) == (["--own-flag"], ["VLLM_OWN_VARIABLE"])
    assert build["loadFormats"][0] == "own_format"
    engine["build"] = build
    file.write_text(yaml.safe_dump(given))
    code, out, err = run(capsys, *beside)
    assert (code, err) == (0, "")
    assert re.search(r"KV cache +9.25 GiB +9.25 GiB .* yes", out)
    assert re.search(r"weights +79.10 GiB +79.10 GiB .* yes", out)
    code, _, err = run(capsys, *beside, "--write-build", str(written))
    assert code == 2
    assert "File exists" in err, "files of users are kept"
    assert "add --from-log LOG" in run(capsys, str(file), "--write-build", "other")[2]
    log.write_text("Model loading took 9.10 GiB and 1 seconds\n")
    other = tmp_path / "other.yaml"
    assert "too far from the plan" in run(capsys, *beside, "--write-build", str(other))[2]
    assert not other.exists()


def test_mistakes_of_a_file_do_not_become_part_of_a_build(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = yaml.safe_load((EXAMPLES / "flash-2x-spark.yaml").read_text())
    given["spec"]["engine"]["extraArgs"] = ["--own-flag", "--moe-backend marlin", "--load-format=My-Format"]
    known = {"name": "VLLM_RINGBUFFER_WARNING_INTERVAL", "value": "soon"}
    given["spec"]["engine"]["env"] = [known, {"name": "VLLM_OWN_VARIABLE", "value": "1"}]
    file, log, written = tmp_path / "own.yaml", tmp_path / "vllm.log", tmp_path / "build.yaml"
    file.write_text(yaml.safe_dump(given))
    log.write_text("Model loading took 74.10 GiB and 1 seconds\n")
    beside = ("--state-dir", str(root), "--from-log", str(log), "--write-build", str(written))
    _, _, err = run(capsys, str(file), *beside)
    build = yaml.safe_load(written.read_text())["spec"]["engine"]["build"]
    assert (build["flags"], build["variables"]) == (["--own-flag"], ["VLLM_OWN_VARIABLE"])
    assert "loadFormats" not in build
    assert "write --moe-backend=marlin" in err
    assert "VLLM_RINGBUFFER_WARNING_INTERVAL" in err


def test_explain_lists_the_sources_of_a_figure(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--state-dir", str(root), "--explain", "kv")
    assert code == 0
    assert re.search(r"2026-08-29 +2 RTX, 0731, K5, 1M, 0.975 +8.28 ", out)
    assert "https://forums.developer.nvidia.com/t/370416" in out
    _, out, _ = run(capsys, "--state-dir", str(root), "--explain", "weights", "-o", "json")
    assert json.loads(out)["runs"][0]["logged"] == 80.99
    error = run(capsys, "--state-dir", str(root), "--explain", "heads")[2]
    assert error.startswith('error: --explain: "heads" is not a term')
    assert error.endswith("; use one of weights, activations, graphs, kv, concurrency\n")
    assert "FILE is required" in run(capsys, "--state-dir", str(root))[2]


def test_another_machine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "flash-2x-spark.yaml")
    code, out, _ = run(capsys, file, "--state-dir", str(root), "--machine", "gb10-64gb")
    assert code == 2
    assert "is not confirmed" in out
    code, _, err = run(capsys, file, "--state-dir", str(root), "--machine", "rtx-pro-6000-max-q")
    assert code == 2
    assert "spec.topology.hardware is GB10" in err


def test_a_refused_specification_is_not_reported_as_fitting(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "flash-2x-spark.yaml")
    change = "engine.extraArgs=[--moe-bakend=x]"
    code, out, err = run(capsys, file, "--state-dir", str(root), "--what-if", change)
    assert code == 2
    assert "\nThe memory is sufficient; rank 0" in out
    assert "It fits" not in out
    assert err.startswith("error: flash: spec.engine.extraArgs[0]: ")
    (found,) = document(capsys, file, root, "--what-if", change)["findings"]
    assert (found["field"], found["reason"]) == ("spec.engine.extraArgs[0]", "UnknownArgument")
    code, out, err = run(capsys, file, "--state-dir", str(root), "--what-if", change, "--machine", "gb10-64gb")
    assert code == 2
    assert "It does not fit" in out
    assert "--moe-bakend" in err, "both are said at once"


def test_groups_that_are_elsewhere(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "flash-2x-spark.yaml")
    _, out, _ = run(capsys, file, "--state-dir", str(root), "--what-if", "replicas=2")
    assert "one of 2 equal groups on 4 machines" in out
    assert "192.0.2.x" in out


@pytest.mark.parametrize(
    ("nodes", "code", "verdict"),
    [
        (2, 2, ("does not fit", 142.38, "rank 0: the weights need 233.63 GiB, and the machine has 121.69 GiB")),
        (8, 0, ("fits", 0, None)),
    ],
)
def test_a_checkpoint_by_its_name(
    nodes: int, code: int, verdict: tuple[str, float, str | None], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(EXAMPLES / "flash-2x-spark.yaml")
    changes = ["--what-if", "model.source.path=/m/DeepSeek-V4.1-Flash", "--what-if", f"topology.nodesPerGroup={nodes}"]
    ended, out, _ = run(capsys, file, "--state-dir", str(root), "-o", "json", *changes)
    assert ended == code
    memory = json.loads(out)["memory"]
    assert (memory["verdict"], round(memory["shortBytes"] / 2**30, 2), memory.get("problem")) == verdict


@pytest.mark.parametrize(("file", "shown"), SAMPLES)
def test_the_page_shows_the_printed_output(
    file: str, shown: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run(capsys, str(ROOT / file), "--state-dir", str(root))
    assert out + err == shown


def test_the_page_shows_every_accelerator_example() -> None:
    # Of Flash on one RTX machine, the example with the fewest cards.
    others = {"nano", "nano-gpu", "kuberay", "flash-4x-rtx-pro-6000", "flash-8x-rtx-pro-6000"}
    wanted = {f"examples/{path.name}" for path in EXAMPLES.glob("*.yaml") if path.stem not in others}
    assert wanted == dict(SAMPLES).keys()


@pytest.mark.parametrize("start", runs(), ids=lambda start: start.name)
def test_the_memory_of_every_logged_start_fits_a_terminal_of_80_columns(start: LoggedStart) -> None:
    """Together the starts have every item of a plan."""
    text = wrap(memory_text(start.plan, (), "flash", ("safetensors", "instanttensor")), 80)
    assert [line for line in text.split("\n") if len(line) > 80] == []


RECORDER = """
import json, sys
from pathlib import Path
print(json.dumps([sys.argv[2:], json.loads(Path(sys.argv[1], "config.json").read_text())["hidden_size"]]))
"""
ONE_GPU = """
apiVersion: dsv4.dev/v1beta1
kind: DSV4Deployment
metadata: {name: one}
spec:
  model: {variant: Nano, source: {nano: {seed: 0, precision: fp8}}}
  topology: {hardware: H100, nodesPerGroup: 1}
  engine: {maxModelLen: 4096, maxNumSeqs: 8, maxNumBatchedTokens: 2048}
"""


@pytest.mark.parametrize(
    ("file", "options", "expected", "hidden"),
    [
        (ONE_GPU, [], "--tokens=2048 --requests=8 --context=4096 --arch sm_90", None),
        (
            "flash-2x-spark.yaml",
            ["--arch", "sm_121,sm_120", "--processes", "2"],
            "--tensor-parallel=2 --tokens=4096 --requests=4 --context=131072 --arch sm_121 sm_120 --processes 2",
            4096,
        ),
    ],
    ids=["one GPU", "two Sparks"],
)
def test_kernels_are_compiled_for_the_engine_of_a_deployment(
    file: str, options: list[str], expected: str, hidden: int | None, root: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "recorder.py").write_text(RECORDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(plan, "_COMPILER", "recorder")
    named = tmp_path / "one.yaml" if file == ONE_GPU else EXAMPLES / file
    if file == ONE_GPU:
        named.write_text(file)
    assert main.run(["kernels", "compile", str(named), "--state-dir", str(root), *options]) == 0
    given, size = json.loads(capfd.readouterr().out)
    assert " ".join(given) == expected
    assert hidden in (None, size)
