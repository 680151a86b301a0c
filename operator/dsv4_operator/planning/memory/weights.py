"""Weights of every rank: how the components of a model are divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache, lru_cache

from dsv4_operator.planning.catalog.records import Component, Division, Model, Part
from dsv4_operator.planning.memory.records import Parallel

_ROWS = 128
"""Rows that the MoE kernels round an expert's share up to, where its format has blocks."""


@cache
def stages(layers: int, pipeline: int) -> tuple[range, ...]:
    """The decoder layers of each stage, as vLLM divides them: what is left over goes to the stages before the last."""
    sizes = [layers // pipeline] * pipeline
    for extra in range(layers % pipeline):
        sizes[-(extra + 2) % pipeline] += 1
    edges = [sum(sizes[:stage]) for stage in range(pipeline + 1)]
    return tuple(range(edges[stage], edges[stage + 1]) for stage in range(pipeline))


def check(model: Model, parallel: Parallel) -> None:
    """Raise unless the model can be divided so.

    Raises:
        ValueError: naming what does not divide, and by what it would.
    """
    legal = [size for size in (1, 2, 4, 8, 16) if not (model.heads % size or model.o_groups % size)]
    if parallel.tensor < 1 or model.heads % parallel.tensor or model.o_groups % parallel.tensor:
        raise ValueError(
            f"tensorParallelSize {parallel.tensor} does not divide {model.name}: it has {model.heads} heads in "
            f"{model.o_groups} output groups; use one of {', '.join(map(str, legal))}"
        )
    if not 1 <= parallel.pipeline <= len(model.layers):
        raise ValueError(
            f"pipelineParallelSize {parallel.pipeline} does not divide {model.name}: it has {len(model.layers)} "
            f"layers; use 1 to {len(model.layers)}"
        )
    for stage in stages(len(model.layers), parallel.pipeline)[1:]:
        if not _begins_well(model, stage.start):
            raise ValueError(
                f"pipelineParallelSize {parallel.pipeline} does not divide {model.name}: layer {stage.start} would "
                f"begin a stage, and reads the KV cache of an earlier layer; use one of {_legal_stages(model)}"
            )


def _begins_well(model: Model, layer: int) -> bool:
    """Whether a stage may begin with `layer`: none reads the cache of another stage's (vLLM, models/deepseek_v41)."""
    return not model.kv_sources or layer <= model.kv_sources[0] or layer in model.kv_sources


@cache
def _legal_stages(model: Model) -> str:
    layers = len(model.layers)
    legal = (n for n in range(1, 17) if all(_begins_well(model, part.start) for part in stages(layers, n)))
    return ", ".join(map(str, legal))


@lru_cache(maxsize=1024)
def rank_weights(model: Model, parallel: Parallel, stage: int, *, drafts: bool) -> tuple[tuple[Part, int], ...]:
    """Bytes of each part on a rank of `stage`, the greatest first."""
    last = parallel.pipeline - 1
    found: Counter[Part] = Counter()
    for layer in stages(len(model.layers), parallel.pipeline)[stage]:
        _add(found, model.layers[layer], model, parallel)
    if stage == 0:
        _add(found, model.embedding, model, parallel)
    if stage == last:
        _add(found, model.head, model, parallel)
        if drafts and model.speculative is not None:
            found[Part.DRAFTS] += sum(share(part, model, parallel) for part in model.speculative.components)
    _add(found, model.host_components, model, parallel)
    return tuple(found.most_common())


def share(component: Component, model: Model, parallel: Parallel) -> int:
    """Bytes of `component` on one rank."""
    match component.division:
        case Division.REPLICATED:
            return component.bytes
        case Division.TENSOR:
            return -(-component.bytes // parallel.tensor)
    if parallel.expert:
        return -(-component.bytes * -(-model.experts // parallel.tensor) // model.experts)
    rows = -(-model.moe_inter // parallel.tensor)
    if component.format != "bf16":
        rows = -(-rows // _ROWS) * _ROWS
    return -(-component.bytes * rows // model.moe_inter)


def _add(found: Counter[Part], components: Iterable[Component], model: Model, parallel: Parallel) -> None:
    for component in components:
        found[component.part] += share(component, model, parallel)
