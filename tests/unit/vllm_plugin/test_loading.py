"""Log lines about the weights: their frequency and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dsv4_runtime.vllm_plugin import loading
from dsv4_runtime.vllm_plugin.loading import counted, refusing


def said(sizes: Sequence[int], seconds: Sequence[float], total: int) -> list[tuple[int, int, float]]:
    """Return the reports on tensors of these `sizes` in bytes, each of which the model loads in `seconds`."""
    found: list[tuple[int, int, float]] = []
    now = [0.0]
    weights = ((str(number), torch.empty(size, dtype=torch.uint8)) for number, size in enumerate(sizes))
    yielded = counted(weights, total, lambda *figures: found.append(figures), lambda: now[0])
    for number, (name, _) in enumerate(yielded):
        assert name == str(number)
        now[0] += seconds[number]
    return found


def test_a_line_a_second_at_most_with_the_rate_since_the_last() -> None:
    assert said([1000] * 5, (0.4, 0.4, 0.4, 2.0, 0.1), 5100) == [
        (3000, 5100, pytest.approx(3000 / 1.2)),
        (4000, 5100, pytest.approx(1000 / 2.0)),
        (5000, 5100, pytest.approx(5000 / 3.3)),
    ]


def test_no_line_for_less_than_a_hundredth() -> None:
    done = [done for done, *_ in said([1] * 250, [1.5] * 250, 500)]
    assert done == [*range(5, 255, 5), 250]


@pytest.mark.parametrize(("text", "cpu", "made"), [
    (None, False, True), ("off", False, True), ("auto", False, False), ("moe=bundled", False, False),
    ("auto", True, True),
])  # fmt: skip
def test_weights_of_another_process_are_refused_before_they_are_loaded_where_kernels_may_be_bundled(
    monkeypatch: pytest.MonkeyPatch, text: str | None, cpu: bool, made: bool
) -> None:
    """vLLM's loader would fall back to a second copy; its constructor refuses before, with a message of one line."""

    class IpcModelLoader:
        def __init__(self, load_config: Any) -> None:
            self.config = load_config

    monkeypatch.setattr(loading.patch, "is_cpu_build", lambda: cpu)
    monkeypatch.delenv("DSV4_KERNELS", raising=False)
    if text is not None:
        monkeypatch.setenv("DSV4_KERNELS", text)
    kind = refusing(IpcModelLoader)
    assert issubclass(kind, IpcModelLoader)
    if made:
        assert kind("config").config == "config"  # type: ignore[call-arg, attr-defined]
        return
    with pytest.raises(ValueError, match=f"^DSV4_KERNELS={text} does not work with load format ipc_cache.*=off"):
        kind("config")  # type: ignore[call-arg]
