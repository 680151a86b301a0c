"""A byte-level tokenizer with DeepSeek-V4's special tokens and a few dozen words.

Any text can be encoded (256 bytes are in the vocabulary) and what the model says can be read: the output layer favours
whole words (see `weights.py`). The special tokens are those that vLLM's `tokenizers/deepseek_v4_encoding.py` writes
into prompts and `parser/deepseek_v4.py` looks up; there is no chat template, because vLLM encodes V4 chats in code.
"""

from typing import Any

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
CONTROL = (BOS, EOS, PAD)  # never shown to a client
MARKERS = (  # kept in decoded text, because the parsers read them there
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜deepseek_image｜>",
)
_TEXT = """
a all and any are as at be by can day do far for from go good has hear how if in is it just know like little long look
many may more most much new no not now of on one or our out over river said same sea see so some sun than that the then
there they this time to two up was water way we what when where wind with world you
"""
WORDS = tuple(_TEXT.split())


def _byte_symbols() -> list[str]:
    """Return the printable stand-in of every byte, by byte, as byte-level BPE defines it (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in symbols]
    symbols.update({byte: chr(256 + number) for number, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]


def _merges() -> list[tuple[str, str]]:
    """Return the merges that build each word, space first, letter by letter; shared beginnings appear once."""
    space = _byte_symbols()[ord(" ")]
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        left = space
        for letter in word:
            merges[(left, letter)] = None
            left += letter
    return list(merges)


def vocabulary() -> dict[str, int]:
    """Map every token's text to its id: control tokens, markers, 256 bytes, then one per merge."""
    tokens = [*CONTROL, *MARKERS, *_byte_symbols(), *(left + right for left, right in _merges())]
    return {token: number for number, token in enumerate(tokens)}


def word_ids() -> list[int]:
    """Return the ids of the whole words (each with its leading space), in the order of `WORDS`."""
    ids, space = vocabulary(), _byte_symbols()[ord(" ")]
    return [ids[space + word] for word in WORDS]


def _added_token(text: str, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": text in CONTROL,
    }


def tokenizer_json() -> dict[str, Any]:
    """Return `tokenizer.json` in the format of the `tokenizers` package."""
    ids = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(text, ids[text]) for text in (*CONTROL, *MARKERS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [list(merge) for merge in _merges()],
        },
    }


def tokenizer_config(max_positions: int) -> dict[str, Any]:
    """Return `tokenizer_config.json`; `max_positions` bounds the length in tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
