"""Wrong output of an engine that otherwise works, for the tests of `dsv4 verify`.

An order of this kind applies as long as it is in the file of orders, on every rank:

| kind | effect | process |
|---|---|---|
| `logits` | logits times `scale` (1), each times its own factor of deviation `spread` (0) from `seed` (0) | worker |
| `expert` | the weights of the `experts` (pairs of numbers) of `layer` are exchanged | worker |
| `page` | the slots of the KV cache of positions from `first` on, below `last`, are not written | worker |
| `repeat` | at every `every`-th position the previous token is sampled again | worker |
| `script` | the output is `answer`, or `reasoned` if the prompt ends with `think`; all are token ids | worker |
| `parser` | as `script`, and the API server does not parse it: reasoning stays in the content | both |
| `stop` | stop strings are ignored | API server |
| `template` | the markers of roles in prompts of chats are `User:` and `Assistant:` | API server |

The defects of workers are for vLLM's model runner V2.
"""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv4_runtime.vllm_plugin.patch import after_import, expect_parameters

Undo = Callable[[], None]

_DETOKENIZER = "vllm.v1.engine.detokenizer"
_ENCODING = "vllm.tokenizers.deepseek_v4"
_CHAT = "vllm.entrypoints.openai.chat_completion.serving"
_SAMPLE = [
    *("logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos"),
    *("seq_lens_upper_bound_np", "return_logprobs"),
]
_SLOTS = ["idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"]
_NO_SLOT = -1


def ordered(file: Path, *kinds: str) -> dict[str, Any] | None:
    """Return the order in `file` if it is a defect of one of `kinds`."""
    try:
        order = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    return order if isinstance(order, dict) and order.get("kind") in kinds else None


def switch(worker: Any, file: Path) -> None:
    """Begin the defect that is in `file` in `worker`, an instance of vLLM's `Worker`, and end an earlier one."""
    order = ordered(file, *_BEGIN)
    if order == getattr(worker, "defect", None):
        return
    if (undo := getattr(worker, "undo", None)) is not None:
        undo()
    worker.undo = None if order is None else _BEGIN[order["kind"]](worker.model_runner, order)
    worker.defect = order


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Undo:
    """Replace a method of one object."""
    kept = vars(owner).get(name)
    setattr(owner, name, replacement)
    return functools.partial(delattr, owner, name) if kept is None else functools.partial(setattr, owner, name, kept)


def _logits(runner: Any, order: dict[str, Any]) -> Undo:
    import torch

    original = runner.model.compute_logits

    @functools.cache
    def factors(count: int, device: Any) -> Any:
        source = torch.Generator().manual_seed(order.get("seed", 0))
        drawn = 1 + order.get("spread", 0.0) * torch.randn(count, generator=source)
        return (order.get("scale", 1.0) * drawn).to(device)

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return (found.float() * factors(found.shape[-1], found.device)).to(found.dtype)

    return _replace(runner.model, "compute_logits", compute_logits)


def _expert(runner: Any, order: dict[str, Any]) -> Undo:
    import torch

    inside = f"layers.{order['layer']}."
    layer = next(part for name, part in runner.model.named_modules() if inside in name and hasattr(part, "w13_weight"))

    def exchange() -> None:
        with torch.inference_mode():
            for one, other in order["experts"]:
                for weight in (layer.w13_weight, layer.w2_weight):
                    weight[[one, other]] = weight[[other, one]]

    exchange()
    return exchange


def _page(runner: Any, order: dict[str, Any]) -> Undo:
    tables = runner.block_tables
    original = tables.compute_slot_mappings
    expect_parameters("BlockTables.compute_slot_mappings", original, _SLOTS)

    def compute_slot_mappings(idx_mapping: Any, query_start_loc: Any, positions: Any, *rest: Any, **more: Any) -> Any:
        slots = original(idx_mapping, query_start_loc, positions, *rest, **more)
        position = positions[: slots.shape[1]]
        slots[:, : len(position)][:, (position >= order["first"]) & (position < order["last"])] = _NO_SLOT
        return slots

    return _replace(tables, "compute_slot_mappings", compute_slot_mappings)


def _sampled(runner: Any, change: Callable[..., Any]) -> Undo:
    """Replace the sampled tokens, int64 `[T]`, by `change(sampled, requests, positions, previous tokens)`."""
    original = runner.sampler.sample
    expect_parameters("Sampler.sample", original, _SAMPLE)

    def sample(logits: Any, requests: Any, idx: Any, idx_np: Any, pos: Any, input_ids: Any, *rest: Any, **more: Any):
        sampled, processed = original(logits, requests, idx, idx_np, pos, input_ids, *rest, **more)
        return change(sampled, requests, pos, input_ids).to(sampled.dtype), processed

    return _replace(runner.sampler, "sample", sample)


def _repeat(runner: Any, order: dict[str, Any]) -> Undo:
    return _sampled(runner, lambda sampled, _, pos, previous: sampled.where(pos % order["every"] != 0, previous))


def _script(runner: Any, order: dict[str, Any]) -> Undo:
    states = runner.req_states

    def written(sampled: Any, requests: Any, positions: Any, _previous: Any) -> Any:
        found = sampled.clone()
        for row, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
            begun = int(states.prompt_len.np[request])
            last = int(states.all_token_ids.gpu[request, begun - 1])
            tokens = order["reasoned"] if last == order["think"] else order["answer"]
            found[row] = next(itertools.islice(itertools.cycle(tokens), max(position + 1 - begun, 0), None))
        return found

    return _sampled(runner, written)


_BEGIN: dict[str, Callable[[Any, dict[str, Any]], Undo]] = {
    "logits": _logits,
    "expert": _expert,
    "page": _page,
    "repeat": _repeat,
    "script": _script,
    "parser": _script,
}


def register(file: Path) -> None:
    """Patch the API server after the import of its modules."""
    after_import(_DETOKENIZER, functools.partial(_attach_stop, file))
    after_import(_ENCODING, functools.partial(_attach_template, file))
    after_import(_CHAT, functools.partial(_attach_parser, file))


def _attach_stop(file: Path) -> None:
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    original = BaseIncrementalDetokenizer.__init__

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if ordered(file, "stop"):
            self.stop, self.stop_buffer_length = [], 0

    BaseIncrementalDetokenizer.__init__ = begin


def _attach_template(file: Path) -> None:
    from vllm.tokenizers import deepseek_v4

    original = deepseek_v4.encode_messages

    @functools.wraps(original)
    def encode_messages(*args: Any, **kwargs: Any) -> str:
        text: str = original(*args, **kwargs)
        if ordered(file, "template"):
            text = text.replace("<｜User｜>", "\n\nUser: ").replace("<｜Assistant｜>", "\n\nAssistant: ")
        return text

    deepseek_v4.encode_messages = encode_messages


def _attach_parser(file: Path) -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    original = OpenAIServingChat.create_chat_completion

    @functools.wraps(original)
    async def create_chat_completion(self: Any, *args: Any, **kwargs: Any) -> Any:
        parser = self.__dict__.setdefault("kept_parser", self.parser_cls)
        self.parser_cls = None if ordered(file, "parser") else parser
        return await original(self, *args, **kwargs)

    OpenAIServingChat.create_chat_completion = create_chat_completion
