"""Model of a checkpoint from `config.json` and the headers of its safetensors files. Pure: callers read the files."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from dsv4_operator.planning.catalog.records import Division, Model, Part, Source, Speculative, WeightComponent
from dsv4_operator.planning.catalog.tables import models

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_TABLE = re.compile(r"layers\.\d+\.engram\.embed\..+")
_DRAFT = re.compile(r"mtp\.(\d+)\.(.+)")
_FORMATS = {"BF16": "bf16", "F32": "fp32", "I64": "int64", "F8_E4M3": "fp8", "F8_E8M0": "scales", "I8": "fp4"}
# Kind and division of a tensor by the first pattern that matches its name (without `layers.N.`).
_KINDS: tuple[tuple[re.Pattern[str], Part, Division], ...] = (
    (re.compile(r"ffn\.experts\."), Part.EXPERTS, Division.EXPERT),
    (re.compile(r"ffn\.shared_experts\."), Part.SHARED_EXPERT, Division.TENSOR),
    (re.compile(r"ffn\.gate\."), Part.ROUTER, Division.REPLICATED),
    (re.compile(r"attn\.indexer\."), Part.INDEXER, Division.REPLICATED),
    (re.compile(r"attn\.compressor\."), Part.COMPRESSOR, Division.REPLICATED),
    (re.compile(r"attn\.(wq_b|wo_a|wo_b|attn_sink)"), Part.ATTENTION, Division.TENSOR),
    (re.compile(r"attn\.(wq_a|wkv)\."), Part.ATTENTION, Division.REPLICATED),
    (re.compile(r"hc_"), Part.HYPER_CONNECTION, Division.REPLICATED),
    (re.compile(r"(attn\.[qk]v?_|attn_|ffn_)?norm\."), Part.ROUTER, Division.REPLICATED),
    (re.compile(r"(embed|head)\."), Part.EMBEDDING, Division.TENSOR),
    (re.compile(r"engram\.embed\."), Part.ENGRAM, Division.TENSOR),
    (re.compile(r"engram\.wkv\."), Part.OTHER, Division.TENSOR),
)
_FIELDS = {
    "hidden": "hidden_size",
    "moe_inter": "moe_intermediate_size",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora": "o_lora_rank",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "hash_layers": "num_hash_layers",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_topk": "index_topk",
    "window": "sliding_window",
    "hc_mult": "hc_mult",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
}
_OPTIONAL = ("n_shared_experts", "num_hash_layers")
"""Fields that may be 0."""
_V41 = "DeepseekV41ForCausalLM"
_SOURCES = "kv_source_layer_ids"
"""Field of V4.1 with the layers that have a compressed cache."""


def model_config(model: Model) -> dict[str, Any]:
    """Return the fields of `config.json` that describe the dimensions of `model`."""
    known = {name: getattr(model, field) for field, name in _FIELDS.items() if hasattr(model, field)}
    return known | {"compress_ratios": list(model.compress_ratios), "num_hidden_layers": len(model.compress_ratios)}


class BadCheckpoint(Exception):
    """The files are not a DeepSeek-V4 checkpoint, or damaged; the text names the file and the remedy."""


R = TypeVar("R")
P = ParamSpec("P")


def _reader(read: Callable[Concatenate[str, P], R]) -> Callable[Concatenate[str, P], R]:
    """Decorate a reader of files in the directory of its first argument: JSON of another form is `BadCheckpoint`."""

    @wraps(read)
    def reader(path: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(path, *args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise BadCheckpoint(
                f"{path}: config.json or a safetensors file has values of a wrong kind ({reason}); download them again"
            ) from None

    return reader


@_reader
def model_from_files(
    path: str, variant: str, config: Mapping[str, Any], headers: Mapping[str, Mapping[str, Any]]
) -> Model:
    """Return the model of the checkpoint with these files; its bytes are counted tensor by tensor.

    Args:
        path: directory of the checkpoint, for messages and its name.
        variant: `spec.model.variant` of the deployment.
        config: `config.json`; in V4.1 the part of the language model is under `text_config`.
        headers: headers of every safetensors file, by file name.

    Raises:
        BadCheckpoint: it is not a DeepSeek-V4 checkpoint, or its configuration is incomplete.
    """
    architecture, config = _language_model(path, config)
    count = int(config["num_hidden_layers"])
    sizes = _Sizes()
    for header in headers.values():
        for name, tensor in header.items():
            if name != "__metadata__":
                sizes.add(name, tensor)
    if len(sizes.layers) != count:
        raise BadCheckpoint(
            f"{path}: the files contain {len(sizes.layers)} layers, and config.json {count}; download them again"
        )
    shape: dict[str, Any] = {name: int(config[key]) for name, key in _FIELDS.items()}
    ratios = tuple(int(ratio) for ratio in config["compress_ratios"][:count])
    # The same body, for properties that the files lack, such as parsers.
    like = next((one for one in models() if (one.hidden, one.compress_ratios) == (shape["hidden"], ratios)), None)
    relative = like or next(found for found in models() if found.architecture == architecture)
    drafts = sizes.speculative(like)
    seen = Source(f"read from the files in {path}", "")
    return Model(
        name=path.rstrip("/").rsplit("/", 1)[-1],
        variant=variant,
        repo="",
        architecture=architecture,
        compress_ratios=ratios,
        kv_format="fp8_ds_mla",
        embedding=_components(sizes.first),
        layers=tuple(_components(sizes.layers[number]) for number in range(count)),
        head=_components(sizes.last),
        speculative=drafts,
        checkpoint_bytes=sizes.total,
        shards=len(headers),
        tokenizer_mode=relative.tokenizer_mode,
        reasoning_parser=relative.reasoning_parser,
        tool_call_parser=relative.tool_call_parser,
        host_components=_components(sizes.tables),
        kv_sources=tuple(map(int, config[_SOURCES])) if architecture == _V41 else (),
        block_tokens=relative.block_tokens,
        sources={"*": seen},
        **shape,
    )


def _language_model(path: str, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the architecture and the configuration of the language model.

    Raises:
        BadCheckpoint: the catalog has no model of that architecture, or the configuration is incomplete.
    """
    architecture = (config.get("architectures") or ["none"])[0]
    known = sorted({found.architecture for found in models()})
    if architecture not in known:
        raise BadCheckpoint(f"{path}/config.json: the architecture is {architecture}; dsv4 reads {' and '.join(known)}")
    needed = [*_FIELDS.values(), "num_hidden_layers", "compress_ratios"]
    if architecture == _V41:
        # The language model has its own part beside that of the vision tower, and no hash layers.
        config = {"num_hash_layers": 0, **config, **(config.get("text_config") or {})}
        needed.append(_SOURCES)
    missing = [key for key in needed if key not in config]
    if missing:
        raise BadCheckpoint(f"{path}/config.json lacks {', '.join(missing)}; download the file again")
    for key in (*_FIELDS.values(), "num_hidden_layers"):
        least = 0 if key in _OPTIONAL else 1
        if type(config[key]) is not int or config[key] < least:
            raise BadCheckpoint(
                f"{path}/config.json: {key}: {config[key]!r} is not a whole number from {least} on; "
                "download the file again"
            )
    return architecture, config


@_reader
def model_of_config(path: str, config: Mapping[str, Any]) -> Model:
    """Return the checkpoint of the catalog with the body in `config`, of several the greatest.

    Not every configuration lists the draft heads; a plan for the greatest checkpoint fits all.

    Raises:
        BadCheckpoint: the catalog has no such checkpoint.
    """
    merged = {**config, **(config.get("text_config") or {})}
    hidden, ratios = merged.get("hidden_size"), tuple(merged.get("compress_ratios") or ())
    body = [
        found
        for found in models()
        if found.repo and found.hidden == hidden and ratios[: len(found.compress_ratios)] == found.compress_ratios
    ]
    if not body:
        raise BadCheckpoint(
            f"{path}/config.json describes no supported checkpoint "
            f"({'hidden_size is missing' if hidden is None else f'hidden_size {hidden}'}); "
            "use one of DeepSeek-V4 or V4.1, or put all its files there"
        )
    return max(body, key=lambda found: found.weight_bytes)


_Counts = Counter[tuple[Part, Division, str]]


class _Sizes:
    """Bytes of a checkpoint by place and kind."""

    def __init__(self) -> None:
        self.first: _Counts = Counter()
        self.last: _Counts = Counter()
        self.layers: dict[int, _Counts] = defaultdict(Counter)
        self.drafts: dict[int, _Counts] = defaultdict(Counter)
        self.tables: _Counts = Counter()
        self.total = 0

    def add(self, name: str, tensor: Mapping[str, Any]) -> None:
        begin, end = tensor["data_offsets"]
        place, rest = self._place(name)
        part, division = next(
            ((part, division) for pattern, part, division in _KINDS if pattern.match(rest)),
            (Part.OTHER, Division.REPLICATED),
        )
        place[part, division, _FORMATS.get(tensor["dtype"], str(tensor["dtype"]).lower())] += end - begin
        self.total += end - begin

    def _place(self, name: str) -> tuple[_Counts, str]:
        if _TABLE.fullmatch(name):
            return self.tables, name.split(".", 2)[2]
        if found := _LAYER.fullmatch(name):
            return self.layers[int(found[1])], found[2]
        if found := _DRAFT.fullmatch(name):
            return self.drafts[int(found[1])], found[2]
        return (self.first if name.startswith("embed.") else self.last), name

    def speculative(self, like: Model | None) -> Speculative | None:
        if not self.drafts:
            return None
        known = like.speculative if like and like.speculative else None
        together: _Counts = Counter()
        for counts in self.drafts.values():
            together.update(counts)
        stages = len(self.drafts)
        method = "mtp" if stages == 1 else "dspark"
        tokens = known.tokens if known and known.method == method else 1 if stages == 1 else 5
        return Speculative(method, stages, tokens, _components(together))


def _components(counts: _Counts) -> tuple[WeightComponent, ...]:
    return tuple(WeightComponent(part, division, size, form) for (part, division, form), size in counts.items())
