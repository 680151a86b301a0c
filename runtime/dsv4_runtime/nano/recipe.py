"""Configuration and tokenizer of the nano model: a `DeepseekV4ForCausalLM` with every mechanism at small dimensions.

The four layers are one SWA-only layer with hash routing, then ratio 4, ratio 128 and ratio 4 with a learned gate. With
`Drafts`, layers for speculative decoding follow under `mtp.*`, as in the released checkpoints: one multi-token
prediction layer, or DSpark's stages. `index_topk`, head size, window and expert count are those of DeepSeek-V4-Flash,
because vLLM has kernels for exactly these; width and depth are not.

The byte-level tokenizer has DeepSeek-V4's special tokens and a few dozen words. Any text can be encoded (256 bytes are
in the vocabulary), and output is readable, because the output layer favours whole words (`weights.py`). The special
tokens are those that vLLM's `tokenizers/deepseek_v4_encoding.py` writes into prompts and `parser/deepseek_v4.py` looks
up; there is no chat template, because vLLM encodes V4 chats in code.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

FORMAT = 6  # incremented when the same recipe and seed give different bytes
FP8_BLOCK = 128  # one scale per 128x128 block of FP8 weights
MXFP4_BLOCK = 32  # one scale per 32 values of FP4 experts along the input dimension


class Drafts(StrEnum):
    """Layers for speculative decoding."""

    NONE = "none"
    MTP = "mtp"  # one multi-token prediction layer, as released in April
    DSPARK = "dspark"  # stages that draft a block at once, as released since July


class Precision(StrEnum):
    """Storage format of the weights on disk."""

    BF16 = "bf16"  # for CPU: no quantisation
    FP8 = "fp8"  # the released format: FP8 e4m3 linears, MXFP4 experts


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Dimensions of a nano model."""

    precision: Precision
    hidden: int
    moe_inter: int
    heads: int
    q_lora: int
    o_groups: int
    o_lora: int
    index_heads: int
    head_dim: int = 512
    rope_dim: int = 64
    index_dim: int = 128
    index_topk: int = 512
    experts: int = 256
    experts_per_token: int = 6
    compress_ratios: tuple[int, ...] = (0, 4, 128, 4)
    hash_layers: int = 1
    window: int = 128
    hc_mult: int = 4
    vocab: int = 512
    max_positions: int = 8192
    drafts: Drafts = Drafts.NONE
    markov_rank: int = 128  # of DSpark's bias by the previous token; at least one per word

    @property
    def layers(self) -> int:
        """Return the number of decoder layers without draft layers."""
        return len(self.compress_ratios)

    @property
    def draft_layers(self) -> int:
        """Return the number of draft layers: `mtp.0`, `mtp.1`, …."""
        return _DRAFT_LAYERS[self.drafts]

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Return the decoder layers whose outputs DSpark reads: the last three, as in the released checkpoints."""
        return tuple(range(self.layers - 3, self.layers))

    def digest(self, seed: int) -> str:
        """Return the digest of the checkpoint of this recipe and `seed`: equal digests mean equal files."""
        text = json.dumps([FORMAT, seed, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_DRAFT_LAYERS = {Drafts.NONE: 0, Drafts.MTP: 1, Drafts.DSPARK: 2}
_NOISE_TOKEN = 2  # padding token: DSpark's input where the draft's tokens are not known yet
_BLOCK_TOKENS = 5  # per DSpark draft

_RECIPES = {
    # 32 expert rows per rank at TP 2, the minimum of vLLM's CPU MoE kernels.
    Precision.BF16: Recipe(
        precision=Precision.BF16, hidden=256, moe_inter=64, heads=8, q_lora=128, o_groups=2, o_lora=64, index_heads=8
    ),
    # Every quantised dimension is a multiple of 128 at TP 2; wo_a reads 8 heads per group as in the released models.
    Precision.FP8: Recipe(
        precision=Precision.FP8,
        hidden=512,
        moe_inter=256,
        heads=16,
        q_lora=256,
        o_groups=2,
        o_lora=1024,
        index_heads=64,
    ),
}


def recipe_for(precision: Precision, drafts: Drafts = Drafts.NONE) -> Recipe:
    """Return the recipe of a precision and a kind of drafts."""
    return replace(_RECIPES[precision], drafts=drafts)


def _draft_config(recipe: Recipe) -> dict[str, Any]:
    if recipe.drafts is not Drafts.DSPARK:
        return {"num_nextn_predict_layers": recipe.draft_layers}
    return {
        "num_nextn_predict_layers": recipe.draft_layers,
        "n_mtp_layers": recipe.draft_layers,
        "dspark_block_size": _BLOCK_TOKENS,
        "dspark_markov_rank": recipe.markov_rank,
        "dspark_noise_token_id": _NOISE_TOKEN,
        "dspark_target_layer_ids": list(recipe.target_layers),
    }


def model_config(recipe: Recipe) -> dict[str, Any]:
    """Return `config.json` with the keys of the released DeepSeek-V4 checkpoints.

    YaRN starts at 512 positions instead of 65536, so that short prompts exercise it.
    """
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "compress_ratios": [*recipe.compress_ratios, *(0 for _ in range(recipe.draft_layers))],
        "compress_rope_theta": 160000,
        "expert_dtype": "fp4",
        "hc_eps": 1e-6,
        "hc_mult": recipe.hc_mult,
        "hc_sinkhorn_iters": 20,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "hidden_size": recipe.hidden,
        "index_head_dim": recipe.index_dim,
        "index_n_heads": recipe.index_heads,
        "index_topk": recipe.index_topk,
        "initializer_range": 0.02,
        "max_position_embeddings": recipe.max_positions,
        "moe_intermediate_size": recipe.moe_inter,
        "n_routed_experts": recipe.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": recipe.heads,
        "num_experts_per_tok": recipe.experts_per_token,
        "num_hash_layers": recipe.hash_layers,
        "num_hidden_layers": recipe.layers,
        "num_key_value_heads": 1,
        **_draft_config(recipe),
        "o_groups": recipe.o_groups,
        "o_lora_rank": recipe.o_lora,
        "q_lora_rank": recipe.q_lora,
        "qk_rope_head_dim": recipe.rope_dim,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": recipe.max_positions // 16,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": recipe.window,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "vocab_size": recipe.vocab,
    }
    if recipe.precision is Precision.FP8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    return config


BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
CONTROL = (BOS, EOS, PAD)  # never shown to a client
MARKERS = (  # kept in decoded text, where the parsers read them
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
    """Return the printable substitute of every byte, as byte-level BPE defines it (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in symbols]
    symbols.update({byte: chr(256 + number) for number, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]


def _merges() -> list[tuple[str, str]]:
    """Return the merges that build each word, space first, letter by letter; shared prefixes appear once."""
    space = _byte_symbols()[ord(" ")]
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        left = space
        for letter in word:
            merges[(left, letter)] = None
            left += letter
    return list(merges)


def vocabulary() -> dict[str, int]:
    """Return token text to id: control tokens, markers, 256 bytes, then one per merge."""
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
    """Return `tokenizer_config.json`; `max_positions` limits the length in tokens."""
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
