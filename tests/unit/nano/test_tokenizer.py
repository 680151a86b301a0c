import json

import pytest
from tokenizers import Tokenizer

from dsv4_runtime.nano.recipe import (
    CONTROL,
    MARKERS,
    WORDS,
    Precision,
    recipe_for,
    tokenizer_json,
    vocabulary,
    word_ids,
)

# Tokens named in tokenizers/deepseek_v4_encoding.py and parser/deepseek_v4.py of vLLM 0.32.
NAMED_BY_VLLM = """
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <think> </think> ｜DSML｜ <｜User｜> <｜Assistant｜> <｜latest_reminder｜>
<｜deepseek_image｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜>
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json()))


def test_vocabulary_fits_the_model_and_has_every_token_that_vllm_names():
    ids = vocabulary()
    assert sorted(ids.values()) == list(range(len(ids)))
    assert len(ids) <= min(recipe_for(precision).vocab for precision in Precision)
    assert {*NAMED_BY_VLLM.split()} <= {*CONTROL, *MARKERS} <= {*ids}
    assert (ids[CONTROL[0]], ids[CONTROL[1]]) == (0, 1)


@pytest.mark.parametrize(
    "text", ["", "Hello there, world!\n", " the river", "naïve 水 🐚\t\x00", "｜DSML｜tool", "a  b "]
)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_word_is_one_token(tokenizer: Tokenizer):
    assert len(set(word_ids())) == len(WORDS)
    for word, number in zip(WORDS, word_ids(), strict=True):
        assert tokenizer.encode(f" {word}").ids == [number]


def test_markers_are_one_token_each_and_stay_in_decoded_text(tokenizer: Tokenizer):
    for marker in MARKERS:
        ids = tokenizer.encode(marker).ids
        assert ids == [vocabulary()[marker]]
        assert tokenizer.decode(ids) == marker


def test_control_tokens_are_one_token_each_and_vanish_from_decoded_text(tokenizer: Tokenizer):
    for token in CONTROL:
        ids = tokenizer.encode(token).ids
        assert ids == [vocabulary()[token]]
        assert tokenizer.decode(ids) == ""
