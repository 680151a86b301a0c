"""Child process of `test_equivalence.py`: completes prompts with vLLM's offline engine and writes the result as JSON.

Usage: `python equivalence_vllm.py MODEL REQUESTS ANSWERS TENSOR_PARALLEL`. REQUESTS contains `{"generate": [[token, …],
…], "max_tokens": n, "score": [[token, …], …]}`. ANSWERS gets, per generated prompt, the tokens, their log-probabilities
and the margin over the runner-up; and per scored prompt the log-probabilities of the whole vocabulary after each of its
tokens but the last.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def _generated(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    chosen, margins = [], []
    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        own = candidates[token].logprob
        others = [entry.logprob for number, entry in candidates.items() if number != token]
        chosen.append(own)
        margins.append(own - max(others))
    return {"tokens": list(completion.token_ids), "logprobs": chosen, "margins": margins, "text": completion.text}


def _scored(output: Any, vocab: int) -> list[list[float]]:
    # vLLM gives the distribution *for* each prompt token; the first has none.
    return [[row[token].logprob for token in range(vocab)] for row in output.prompt_logprobs[1:]]


def main() -> None:
    model, requests_path, answers_path, tensor_parallel = sys.argv[1:]
    requests = json.loads(Path(requests_path).read_text())
    begin = time.monotonic()
    from vllm import LLM, SamplingParams

    ray = {"distributed_executor_backend": "ray"} if int(tensor_parallel) > 1 else {}
    engine = LLM(
        model,
        tensor_parallel_size=int(tensor_parallel),
        block_size=256,
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=32,
        max_logprobs=-1,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        **ray,
    )
    started = time.monotonic()
    greedy = SamplingParams(temperature=0, max_tokens=requests["max_tokens"], logprobs=2, ignore_eos=True)
    prompts = [{"prompt_token_ids": tokens} for tokens in requests["generate"]]
    generated = engine.generate(prompts, greedy, use_tqdm=False)
    generation_done = time.monotonic()
    vocab = engine.llm_engine.model_config.get_vocab_size()
    scored = []
    for tokens in requests["score"]:  # one by one: a batch of full distributions takes too much memory
        every = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
        scored.append(_scored(engine.generate([{"prompt_token_ids": tokens}], every, use_tqdm=False)[0], vocab))
    answers = {
        "generated": [_generated(output) for output in generated],
        "scored": scored,
        "seconds": {
            "start": started - begin,
            "generate": generation_done - started,
            "score": time.monotonic() - generation_done,
        },
    }
    Path(answers_path).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
