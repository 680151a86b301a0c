"""vLLM's index lists of prefills, compiled for every alignment that their pointers may have."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_runtime.vllm_plugin.kernels.warmup import every_alignment

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]

POINTERS = ("topk_indices", "query_start_loc", "seq_lens", "gather_lens")


@pytest.fixture
def config() -> Any:
    model = SimpleNamespace(index_topk=512, sliding_window=128, compress_ratios=[0, 4, 128, 4], vision_n_layers=0)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=64),
        model_config=SimpleNamespace(hf_config=model, max_model_len=9216),
    )


def test_every_list_is_compiled_for_every_alignment(config: Any) -> None:
    from vllm.models.deepseek_v4.common.ops.cache_utils import CombineTopkSwaIndicesKernel

    kernel = CombineTopkSwaIndicesKernel()
    stock = kernel.get_warmup_keys(config)
    keys = every_alignment(type(kernel).get_warmup_keys)(kernel, config)
    assert set(stock) < set(keys)
    assert len(set(keys)) == len(keys)
    found = defaultdict(set)
    for key in keys:
        inputs = kernel.warmup_inputs(key)
        found[key.COMPRESS_RATIO, key.TOP_K].add(tuple(inputs[name].aligned for name in POINTERS))
    assert len(found) == len({(key.COMPRESS_RATIO, key.TOP_K) for key in stock})
    # The requests' lengths begin where their tokens do, in tensors of one type.
    every = {(lists, start, start, prefills) for lists, start, prefills in itertools.product((True, False), repeat=3)}
    assert all(alignments == every for alignments in found.values())
