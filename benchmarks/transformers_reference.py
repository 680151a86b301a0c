"""Reference for `dsv4 verify` from transformers: `python benchmarks/transformers_reference.py CHECKPOINT FILE`.

Writes the log-probabilities of the fixed prompts and of their greedy continuations, in the format of docs/verify.md.
transformers has an implementation of DeepSeek-V4 of its own, which shares no code with vLLM or dsv4. It computes on the
CPU in float32 from the weights of the checkpoint, every position anew without a cache. CHECKPOINT is a directory, such
as one made with `dsv4-nano DIR`; its weights must fit into memory in float32.

`--fp8-cache` rounds the entries of the KV cache as vLLM's `fp8_ds_mla` cache does. `--quick` writes the prompts of
`dsv4 verify --quick` only.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from dsv4_operator.verify import oracle

HEAD, ROPE, GROUP, FP8_MAX = 512, 64, 64, 448.0
TOP = 8


def round_as_cached(entry: torch.Tensor) -> torch.Tensor:
    """Round `[…, 512]` as one cache record: 448 e4m3 values with a power-of-two scale per 64, then 64 in bfloat16."""
    entry = entry.to(torch.bfloat16).float()
    plain = entry[..., : HEAD - ROPE].unflatten(-1, (-1, GROUP))
    scale = torch.exp2(torch.ceil(torch.log2(plain.abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX)))
    rounded = (plain / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale
    return torch.cat((rounded.flatten(-2), entry[..., HEAD - ROPE :]), dim=-1)


@contextlib.contextmanager
def fp8_cache(model: Any) -> Iterator[None]:
    """Round the entries of the cache during the block."""
    original = modeling.apply_rotary_pos_emb

    def rotate(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rotated = original(x, *args, **kwargs)
        # Queries and outputs have all heads there, the indexer is narrower.
        is_entry = x.shape[1] == 1 and x.shape[-1] == HEAD
        return round_as_cached(rotated) if is_entry else rotated

    modeling.apply_rotary_pos_emb = rotate
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = original


def load(path: str) -> tuple[Any, dict[str, list[str]]]:
    """Return the model in float32, and the names of weights that were not read or do not fit, by kind."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(map(str, loading[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    return model.eval(), wrong


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logits after each token, `[tokens, vocab]`, float32."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def distribution(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities `[tokens - 1, vocab]`, float32."""
    return logits(model, tokens)[:-1].log_softmax(-1)


def case(model: Any, tokenizer: Any, name: str, prompt: str, count: int) -> oracle.Case:
    """Return the log-probabilities of a prompt and of its greedy continuation of `count` tokens."""
    prompt_ids = list(tokenizer(prompt)["input_ids"])
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(int(logits(model, ids)[-1].argmax()))
    rows: list[dict[str, float] | None] = [None]
    for token, found in zip(ids[1:], distribution(model, ids), strict=True):
        best = [token, *found.topk(TOP).indices.tolist()]
        rows.append({f"token_id:{each}": round(float(found[each]), 5) for each in dict.fromkeys(best)})
    return oracle.Case(
        name=name,
        prompt=prompt,
        prompt_token_ids=prompt_ids,
        token_ids=ids[len(prompt_ids) :],
        scored=rows,
        decoded=[row for row in rows[len(prompt_ids) :] if row is not None],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("file", type=Path)
    parser.add_argument("--fp8-cache", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    model, wrong = load(options.checkpoint)
    if any(wrong.values()):
        parser.error(f"transformers {transformers.__version__} does not read {options.checkpoint} completely: {wrong}")
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    prompts, count = oracle.sizes(quick=options.quick)
    with torch.inference_mode(), fp8_cache(model) if options.fp8_cache else contextlib.nullcontext():
        cases = [case(model, tokenizer, name, prompt, count) for name, prompt in prompts]
    document = oracle.Document(
        format=oracle.FORMAT,
        model=Path(options.checkpoint).name,
        engine=f"transformers {transformers.__version__}, float32{', FP8 cache' if options.fp8_cache else ''}",
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        top=TOP,
        noise=0.0,
        cases=cases,
    )
    options.file.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
