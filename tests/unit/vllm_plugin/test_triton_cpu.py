import pytest
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from dsv4_runtime.vllm_cpu.triton_cpu import InterpretedOnlyError
from dsv4_runtime.vllm_cpu.triton_cpu import driver as driver_module
from dsv4_runtime.vllm_cpu.triton_cpu.compiler import CPUBackend
from dsv4_runtime.vllm_cpu.triton_cpu.driver import CPUDriver


@pytest.mark.parametrize(
    ("interpret", "cuda", "active"),
    [("1", False, True), ("1", True, False), ("0", False, False), (None, False, False), (None, True, False)],
)
def test_active_only_where_kernels_are_interpreted_and_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, interpret: str | None, cuda: bool, active: bool
):
    monkeypatch.setattr(driver_module, "_cuda_is_here", lambda: cuda)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert CPUDriver.is_active() is active


def test_triton_finds_both_halves():
    assert (backends["cpu"].driver, backends["cpu"].compiler) == (CPUDriver, CPUBackend)


def test_the_halves_agree_on_the_target_and_on_no_other():
    assert CPUBackend.supports_target(CPUDriver().get_current_target())
    assert not CPUBackend.supports_target(GPUTarget("cuda", 120, 32))


def test_a_kernel_is_timed_by_running_it():
    calls: list[int] = []
    benchmark = CPUDriver().get_benchmarker()
    assert len(benchmark(lambda: calls.append(1), quantiles=[0.5, 0.2])) == 2
    assert benchmark(lambda: calls.append(1)) >= 0
    assert calls == [1, 1]


def test_nothing_is_compiled():
    backend = CPUBackend(CPUDriver().get_current_target())
    with pytest.raises(InterpretedOnlyError, match=r"compiler stages: .* set TRITON_INTERPRET=1"):
        backend.add_stages({}, None)
    with pytest.raises(InterpretedOnlyError, match=r"compiler options: .* set TRITON_INTERPRET=1"):
        backend.parse_options({})
    with pytest.raises(InterpretedOnlyError, match=r"C\+\+ type for \*fp16: .* set TRITON_INTERPRET=1"):
        CPUDriver().map_python_to_cpp_type("*fp16")
