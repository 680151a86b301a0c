"""The bundled decode in vLLM's attention, interpreted."""

from __future__ import annotations

from pathlib import Path

from dsv4_testkit.vllm_script import told_by_fork


def test_pages_of_chosen_entries_equal_those_of_vllm() -> None:
    """For few tokens the attention looks the pages up, with results equal bit for bit; padding has no entries."""
    found = told_by_fork(Path(__file__).with_name("decoding_with_vllm.py"))
    assert found == {"same": True, "launches of vLLM's": [[], [5]], "nothing": True}
