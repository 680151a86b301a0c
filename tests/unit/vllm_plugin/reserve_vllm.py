"""Child process of `test_reserve.py`: vLLM's own classes, before and after the changes of dsv4.

Prints one JSON object. Tensors are in host memory; a step without metadata skips the computation of attention.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.models.deepseek_v4 import sparse_mla
from vllm.models.deepseek_v4.nvidia import flashinfer_sparse, flashmla
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu import model_runner

from dsv4_runtime.vllm_plugin import loading

TOKENS, LENGTH = 64, 1 << 20
torch.accelerator.empty_cache = lambda: None


class Largest(TorchDispatchMode):
    """Records the size in bytes of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.append(result.nbytes)
        return result


def spec(ratio: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=256, num_kv_heads=1, head_size=512, dtype=torch.uint8, tokens_per_state=ratio, alignment=576,
        cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4", state_content_bytes=584, max_tp_shards=1,
    )  # fmt: skip


def config() -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=LENGTH, hf_config=SimpleNamespace(index_topk=512)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
        parallel_config=SimpleNamespace(
            num_ubatches=1, use_ubatching=False, enable_dbo=False, decode_context_parallel_size=1
        ),
        speculative_config=None,
        kv_transfer_config=None,
    )


def builder_bytes() -> int:
    """Return the bytes of the buffers of ratio 128 that vLLM's builder makes."""
    made = sparse_mla.DeepseekV4SparseMLAMetadataBuilder(spec(128), [], config(), torch.device("cpu"))
    return sum(
        value.nbytes for name, value in vars(made).items() if name.startswith("c128a") and hasattr(value, "nbytes")
    )


def profiled(ratios: tuple[int, ...]) -> list[int]:
    """Return the sizes of the tensors made around a profile by a runner whose own profile makes none."""
    runner = SimpleNamespace(
        vllm_config=config(), device="cpu", get_kv_cache_spec=lambda: {str(ratio): spec(ratio) for ratio in ratios}
    )
    with Largest() as seen:
        loading.holding_buffers(lambda self: None)(runner)
    return seen.made


def layer(ratio: int) -> SimpleNamespace:
    return SimpleNamespace(
        compress_ratio=ratio, max_model_len=LENGTH, max_num_batched_tokens=TOKENS, window_size=128, max_image_tokens=0,
        PREFILL_CHUNK_SIZE=flashmla.DeepseekV4FlashMLAAttention.PREFILL_CHUNK_SIZE,
        topk_indices_buffer=torch.empty((TOKENS, 512), dtype=torch.int32), kv_cache_torch_dtype=torch.uint8,
    )  # fmt: skip


def dummy_step(forward: Callable[..., None], one: Any, heads: int = 64) -> None:
    q = torch.zeros((TOKENS, heads, 512), dtype=torch.bfloat16)
    forward(one, q, None, None, torch.ones((TOKENS, 64 if one.padded else heads, 512), dtype=torch.bfloat16))


def gather_workspace(forward: Callable[..., None]) -> int:
    """Return the bytes of the workspace after a dummy step of a layer of ratio 128."""
    manager = workspace.WorkspaceManager(torch.device("cpu"))
    workspace._manager = manager
    one = layer(128)
    one.padded = False
    dummy_step(forward, one)
    return manager._current_workspaces[0].nbytes


def needed_workspace() -> int:
    """Return the workspace that `_forward_prefill` needs at the longest context: rows of the index buffers' width."""
    manager = workspace.WorkspaceManager(torch.device("cpu"))
    columns = flashmla.round_up(loading.c128_width(LENGTH) + 128, 128)
    manager.get_simultaneous(
        ((layer(128).PREFILL_CHUNK_SIZE, LENGTH // 128 + 128 + TOKENS, 512), torch.bfloat16),
        ((TOKENS, columns), torch.int32), ((TOKENS,), torch.int32),
    )  # fmt: skip
    return manager._current_workspaces[0].nbytes


def prefill_copies(forward: Callable[..., None], ratio: int) -> list[int]:
    one = layer(ratio)
    one.padded = True
    one._reserve_empty_forward_workspace = lambda: None
    with Largest() as seen:
        dummy_step(forward, one, heads=8)
    return sorted(set(seen.made))


def prepared() -> int:
    """Return the bytes of the queries that a prefill of 8 heads copies into 64."""
    one = layer(128)
    q, output = (torch.zeros((TOKENS, heads, 512), dtype=torch.bfloat16) for heads in (8, 64))
    return flashinfer_sparse.DeepseekV4FlashInferSM120Attention._prepare_query(one, q, output).nbytes


no_metadata = SimpleNamespace(attn_metadata=None)
flashmla.get_forward_context = flashinfer_sparse.get_forward_context = lambda: no_metadata
mla, sm120 = flashmla.DeepseekV4FlashMLAAttention, flashinfer_sparse.DeepseekV4FlashInferSM120Attention
before = {"workspace": gather_workspace(mla.forward_mqa), "copies": prefill_copies(sm120.forward_mqa, 128)}
stock = (model_runner.GPUModelRunner.profile_run, mla.forward_mqa, sm120.forward_mqa)
for name, change in loading._CHANGES.items():
    loading._attach_reserve(name, change)
changed = (model_runner.GPUModelRunner.profile_run, mla.forward_mqa, sm120.forward_mqa)
print(
    json.dumps(
        {
            "builder": builder_bytes(),
            "reserved": loading.buffers_bytes(TOKENS, LENGTH),
            "profiled": profiled((1, 4, 128)),
            "profiled without": profiled((1, 4)),
            "attached": [one is not other for one, other in zip(stock, changed, strict=True)],
            "before": before,
            "workspace": gather_workspace(mla.forward_mqa),
            "needed": needed_workspace(),
            "copies": prefill_copies(sm120.forward_mqa, 128),
            "prepared": prepared(),
            "copies of 4": prefill_copies(sm120.forward_mqa, 4),
            "copies of windows": prefill_copies(sm120.forward_mqa, 1),
        }
    )
)
