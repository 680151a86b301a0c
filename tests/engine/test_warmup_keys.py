"""vLLM's kernels around a prefill and its top-k, compiled for all values that requests may have."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_runtime.vllm_plugin.kernels import compile_ahead, hooks
from dsv4_runtime.vllm_plugin.kernels.warmup import every_alignment, every_block, every_gather

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
    # The lengths of the requests begin at the same offset as their tokens, in tensors of one type.
    every = {(lists, start, start, prefills) for lists, start, prefills in itertools.product((True, False), repeat=3)}
    assert all(alignments == every for alignments in found.values())


def test_the_windows_entries_are_gathered_from_the_pages_that_there_are(config: Any) -> None:
    from vllm.models.deepseek_v4.common.ops.cache_utils import DequantizeAndGatherKCacheKernel

    def layer(page: int, stride: int, **more: object) -> SimpleNamespace:
        return SimpleNamespace(kv_cache=torch.empty(0).as_strided((0, page, 584), (stride, 584, 1)), **more)

    class Kernel(DequantizeAndGatherKCacheKernel):
        """A separate class, because the change is made to the class."""

    layers = (
        layer(64, 93888, window_size=128),
        layer(64, 93888, window_size=128),
        layer(2, 1728, window_size=128, compress_ratio=128),
        layer(8, 512),
    )
    config.cache_config = SimpleNamespace(block_size=256)
    config.compilation_config = SimpleNamespace(static_forward_context=dict(enumerate(layers)))
    stock = Kernel().get_warmup_keys(config)
    hooks.apply(every_gather(SimpleNamespace(DequantizeAndGatherKCacheKernel=Kernel)))
    for longest, pointers in ((9216, 2), (9000, 3)):
        config.model_config.max_model_len = longest
        keys = [key for key in Kernel().get_warmup_keys(config) if hasattr(key, "unaligned")]
        # The entries begin at 1, at a multiple of 16, or elsewhere; each pointer is aligned or not.
        assert len(keys) == len(set(keys)) == 3 * 2**pointers
        assert {(key.cache_block_size, key.block_stride) for key in keys} == {(64, 93888)}
        assert {key.max_blocks_per_seq for key in keys} == {-(-longest // 64)}
        for key in keys:
            inputs = Kernel().warmup_inputs(key)
            names = {name for name in ("seq_lens", "gather_lens", "block_table") if not inputs[name].aligned}
            assert names == key.unaligned
            assert inputs["block_table"].shape == (1, key.max_blocks_per_seq)
    config.model_config.max_model_len = 9216
    assert set(stock) < set(Kernel().get_warmup_keys(config))


@pytest.mark.parametrize(("stride", "compiled"), [(512, "aligned"), (1030, "odd")])
def test_top_k_is_compiled_for_the_rows_that_there_are(
    monkeypatch: pytest.MonkeyPatch, stride: int, compiled: str
) -> None:
    from vllm.model_executor.warmup import jit_warmup
    from vllm.v1.sample.ops import topk_topp_sampler

    def key(name: str, distance: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, inputs=(("logits", SimpleNamespace(strides=(distance, 1))),))

    class Kernel:
        def __init__(self) -> None:
            self.compiled: list[str] = []

        def get_warmup_keys(self, vllm_config: str) -> list[SimpleNamespace]:
            assert vllm_config == "config"
            return [key("aligned", 16), key("odd", 2)]

        def compile_many(self, keys: list[SimpleNamespace]) -> None:
            self.compiled += [key.name for key in keys]

    kernels = [Kernel(), Kernel()]
    monkeypatch.setattr(
        topk_topp_sampler,
        "register_top_k_top_p_warmups",
        lambda: [jit_warmup.JitWarmupRegistry.register(kernel) for kernel in kernels],  # type: ignore[arg-type]
    )
    compile_ahead.compile_top_k_top_p("config", stride)
    assert [kernel.compiled for kernel in kernels] == [[compiled]] * 2


class Launches:
    """Replacement for a Triton kernel: records the block and the programs of each launch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return lambda *_, BLOCK_SIZE, **__: self.seen.append((BLOCK_SIZE, grid[1]))


@pytest.mark.parametrize("drafted", [1, 5, 7, 8])
def test_drafts_of_every_step_find_their_inputs_kernel(monkeypatch: pytest.MonkeyPatch, drafted: int) -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    monkeypatch.setattr(speculator, "_prepare_dflash_inputs_kernel", launches := Launches())
    prepare = every_block(speculator.prepare_dflash_inputs)
    names = list(inspect.signature(prepare).parameters)
    tables = [torch.zeros((2, 4), dtype=torch.int32) for _ in range(2)]

    def launched(longest: int, table: torch.Tensor) -> list[tuple[int, int]]:
        launches.seen = []
        anything = defaultdict(int, num_query_per_req=drafted, block_table=table)
        anything["input_buffers"] = SimpleNamespace(
            input_ids=0, positions=0, is_padding=0, query_start_loc=0, seq_lens=0
        )
        batch = SimpleNamespace(num_reqs=2, num_scheduled_tokens=np.array([1, longest]))
        anything["input_batch"] = SimpleNamespace(**vars(batch), positions=0, query_start_loc=0, idx_mapping=0)
        # Called as by vLLM: in order, without the last arguments that have a default.
        prepare(*(anything[name] for name in names if name != "num_reqs_override"))
        assert anything["input_batch"].num_scheduled_tokens.tolist() == [1, longest]
        return launches.seen

    own = {longest: step(longest, drafted) for longest in range(1, 600)}
    for table in tables:
        *compiled, last = launched(drafted + 1, table)
        assert last == own[drafted + 1], "the step's own launch is the last one"
        assert len(compiled) == len(set(compiled))
        assert {block for block, _ in compiled} == {block for block, _ in own.values()}
    for longest, launch in own.items():
        assert launched(longest, tables[longest % 2]) == [launch]


def step(longest: int, drafted: int) -> tuple[int, int]:
    """Return block and programs of a step, as in `prepare_dflash_inputs` of vLLM 0.33.0."""
    block = min(256, 1 << (longest + drafted - 1).bit_length())
    return block, -(-(longest + drafted) // block)
