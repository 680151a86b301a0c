"""Flags and variables that a user may not set."""

import pytest

from dsv4_operator.api.owned import owned_env, owned_flag


@pytest.mark.parametrize(
    "arg",
    [
        "--model",
        "--model=x",
        "--tensor-parallel-size",
        "--tensor_parallel_size",
        "--tensor-par",
        "-tp",
        "-tp=2",
        "--hos",
    ],
)
def test_every_way_to_write_an_owned_flag_is_found(arg: str) -> None:
    assert owned_flag(arg)


@pytest.mark.parametrize(
    "arg",
    ["--model-impl", "--seed", "1", "--hf-overrides", "--moe-backend=marlin", "--max-model-len-factor", "model", "-O3"],
)
def test_other_words_pass(arg: str) -> None:
    assert owned_flag(arg) is None


def test_owned_variables() -> None:
    assert owned_env("RAY_AUTH_TOKEN") == "remove it"
    assert owned_env("VLLM_CPU_KVCACHE_SPACE") == "use spec.engine.kvCacheMemory"
    assert owned_env("DSV4_DEV_PLATFORM")
    assert owned_env("OMP_NUM_THREADS") is None
