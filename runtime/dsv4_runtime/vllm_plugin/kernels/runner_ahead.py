"""Launch the kernels of vLLM's model runner on the host, for processes that compile and have no GPU.

A step's inputs, block tables, structured output, the sampler and the update after it: some 35 small kernels, of which
vLLM gives no keys away. Its own objects launch them here, with the sizes of the configuration and tensors on the host;
in a process that launches nothing, the arguments are all that counts. Read in vLLM 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dsv4_runtime.vllm_plugin.kernels.sampling import ROWS, requests

_HOST = torch.device("cpu")
_LARGE = 1 << 20
# Numbers of a tensor that gets no pages: nothing reads what no kernel has written.


class HostRunner:
    """The parts of vLLM's runner that launch kernels of their own."""

    def __init__(self, vllm_config: Any) -> None:
        """Args:
        vllm_config: vLLM's configuration of the engine.

        Raises:
            AttributeError, ImportError, TypeError: this vLLM has another runner.
        """
        with _on_host():
            self._make(vllm_config)

    def launch_all(self) -> None:
        """Launch the kernels of a step of one request and of two, and of the sampler for requests of every kind.

        Raises:
            AttributeError, ImportError, TypeError: this vLLM has another runner. Some kernels may have been launched.
        """
        with _on_host(), torch.inference_mode():
            for rows in ROWS[: self.most]:
                self._step(rows)

    def _make(self, vllm_config: Any) -> None:
        from vllm.v1.worker.gpu.block_table import BlockTables
        from vllm.v1.worker.gpu.input_batch import InputBuffers
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState
        from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        self.most = scheduler.max_num_seqs
        self.vocabulary = model.get_vocab_size()
        self.dtype = model.dtype
        self.drafts = vllm_config.num_speculative_tokens
        sizes = {
            "max_num_reqs": self.most, "max_model_len": model.max_model_len, "device": _HOST,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens, "vocab_size": self.vocabulary,
        }  # fmt: skip
        ahead = max(1, getattr(vllm_config, "num_prefill_lookahead_tokens", 1))
        self.states = _called(RequestState, **sizes, num_speculative_steps=self.drafts, num_prefill_lookahead=ahead)
        self.buffers = InputBuffers(self.most, scheduler.max_num_batched_tokens, _HOST)
        # The kernels read pages and widths; those of DeepSeek-V4 have several groups, one of them with a window.
        self.tables = _called(
            BlockTables, **sizes, block_sizes=[64, 256], max_num_blocks_per_group=[16, 16],
            sliding_window_reach=[128, 0],
        )  # fmt: skip
        self.sampler = _called(
            Sampler, **sizes, vllm_config=vllm_config, req_states=self.states, num_speculative_tokens=self.drafts + 1,
            logprobs_mode=model.logprobs_mode, use_fp64_gumbel=model.use_fp64_gumbel,
        )  # fmt: skip
        self.constraints = _called(
            StructuredOutputsWorker, **sizes, max_num_logits=self.most * (self.drafts + 1),
            mask_stride=self.drafts + 1, num_bonus_tokens=1,
        )  # fmt: skip

    def _step(self, rows: int) -> None:
        from vllm.v1.worker.gpu.input_batch import InputBatch

        for row in range(rows):
            self.states.add_request(str(row), 2, [0, 0], 0, 1)
            self.tables.append_block_ids(row, ([1], [1]), overwrite=True)
        self.states.apply_staged_writes()
        self.tables.apply_staged_writes()
        batch = InputBatch.make_dummy(rows, rows, self.buffers)
        self._prepare(batch)
        logits = torch.empty((rows, self.vocabulary), dtype=self.dtype)
        # vLLM 0.33 has a mask for each draft there could be; 0.32, which takes `num_bonus_tokens`, for those there are.
        masks = rows if hasattr(self.constraints, "num_bonus_tokens") else rows * (self.drafts + 1)
        mask = np.empty((masks, -(-self.vocabulary // 32)), dtype=np.int32)
        self.constraints.apply_grammar_bitmask(logits, batch, batch.req_ids, mask)
        for kind in requests():
            for row in range(rows):
                self.sampler.add_request(row, kind)
            self.sampler.apply_staged_writes()
            sampled = self.sampler(logits, batch)
        self._update(batch, sampled)
        for row in range(rows):
            self.states.remove_request(str(row))

    def _prepare(self, batch: Any) -> None:
        from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
        from vllm.v1.worker.gpu import input_batch
        from vllm.v1.worker.gpu.sample.prompt_logprob import get_prompt_logprobs_token_ids

        states, buffers, rows = self.states, self.buffers, batch.num_reqs
        computed, tokens = states.num_computed_tokens.gpu, states.all_token_ids.gpu
        where = (batch.idx_mapping, batch.query_start_loc)
        input_batch.prepare_prefill_inputs(
            buffers.input_ids, states.next_prefill_tokens, *where, tokens, states.prefill_len.gpu, computed
        )
        input_batch.prepare_pos_seq_lens(*where, computed, buffers.positions, buffers.seq_lens)
        input_batch.combine_sampled_and_draft_tokens(
            buffers.input_ids, batch.idx_mapping, states.last_sampled_tokens, batch.query_start_loc, batch.seq_lens,
            states.prefill_len.gpu, states.draft_tokens, batch.cu_num_logits, rows,
        )  # fmt: skip
        _called(
            self.tables.gather_block_tables, idx_mapping=batch.idx_mapping, num_reqs_padded=rows,
            num_computed_tokens=computed,
        )  # fmt: skip
        self.tables.compute_slot_mappings(*where, batch.positions, batch.num_tokens)
        compute_token_to_req_indices(batch.query_start_loc, torch.empty(rows, dtype=torch.int32), rows, rows)
        get_prompt_logprobs_token_ids(batch.num_tokens, batch.query_start_loc, batch.idx_mapping, computed, tokens)

    def _update(self, batch: Any, sampled: Any) -> None:
        from vllm.v1.worker.gpu.input_batch import post_update

        states = self.states
        _called(
            post_update, idx_mapping=batch.idx_mapping, num_computed_tokens=states.num_computed_tokens.gpu,
            last_sampled_tokens=states.last_sampled_tokens,
            output_bin_counts=self.sampler.penalties_state.output_bin_counts, sampled_tokens=sampled.sampled_token_ids,
            num_sampled=sampled.num_sampled, num_rejected=sampled.num_rejected, query_start_loc=batch.query_start_loc,
            all_token_ids=states.all_token_ids.gpu, total_len=states.total_len.gpu,
            draft_tokens_out=states.draft_tokens,
        )  # fmt: skip


class _NoStream:
    """A CUDA stream on the host: nothing waits."""

    def wait_stream(self, stream: object) -> None:
        """Wait for nothing."""


def _called(function: Callable[..., Any], **values: Any) -> Any:
    """Call `function` with those of `values` that this vLLM's takes."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in known})


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Have vLLM's runner make its tensors on the host, none of them pinned, the large ones without pages."""
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import sampler

    def not_pinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *values, pin_memory=False, **options: make(*values, **options)

    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        made = torch.empty(*size, **options)
        return made if made.numel() > _LARGE else made.zero_()

    def unchanged(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def as_they_are(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        # Top-k and top-p are compiled by their keys.
        return logits

    replaced: list[tuple[Any, str, Any]] = [
        (torch, "empty", not_pinned(torch.empty)),
        (torch, "tensor", not_pinned(torch.tensor)),
        (torch, "zeros", zeros),
        (torch.cuda, "Stream", _NoStream),
        (torch.cuda, "current_stream", _NoStream),
        (torch.cuda, "stream", contextlib.nullcontext),
        (buffer_utils, "is_uva_available", lambda: True),
        (buffer_utils, "get_accelerator_view_from_cpu_tensor", unchanged),
        (sampler, "flashinfer_sampler_supported", lambda: False),
        (sampler, "apply_top_k_top_p", as_they_are),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
