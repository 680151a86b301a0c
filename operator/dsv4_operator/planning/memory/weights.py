"""Weights of every rank: how the components of a model are divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache

from dsv4_operator.planning.catalog.records import Build, Division, Model, Part, WeightComponent
from dsv4_operator.planning.memory.records import Item, MemoryPool, Parallel


@cache
def stages(layers: int, pipeline: int) -> tuple[range, ...]:
    """Return the decoder layers of each stage, as vLLM divides them.

    What is left over goes to the stages before the last.
    """
    sizes = [layers // pipeline] * pipeline
    for extra in range(layers % pipeline):
        sizes[-(extra + 2) % pipeline] += 1
    edges = [sum(sizes[:stage]) for stage in range(pipeline + 1)]
    return tuple(range(edges[stage], edges[stage + 1]) for stage in range(pipeline))


def check_parallel(model: Model, parallel: Parallel) -> None:
    """Raise unless the model can be divided so.

    Raises:
        ValueError: naming what does not divide, and by what it would.
    """
    legal = [size for size in (1, 2, 4, 8, 16) if not (model.heads % size or model.o_groups % size)]
    if parallel.tensor < 1 or model.heads % parallel.tensor or model.o_groups % parallel.tensor:
        stages_instead = _divided(model, legal, parallel.world_size)
        raise ValueError(
            f"tensorParallelSize {parallel.tensor} does not divide {model.name}: it has {model.heads} heads in "
            f"{model.o_groups} output groups; use {stages_instead or 'one of ' + ', '.join(map(str, legal))}"
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


def _divided(model: Model, legal: Sequence[int], devices: int) -> str:
    """Return how so many devices could share the model, the most ranks to a layer first; empty if not at all."""
    for tensor in reversed(legal):
        count = devices // tensor
        if devices % tensor or not 1 < count <= len(model.layers):
            continue
        if all(_begins_well(model, part.start) for part in stages(len(model.layers), count)[1:]):
            return f"tensorParallelSize {tensor} with pipelineParallelSize {count}"
    return ""


def _begins_well(model: Model, layer: int) -> bool:
    """Tell whether a stage may begin with `layer`.

    No stage reads the cache of another one (vLLM, models/deepseek_v41).
    """
    return not model.kv_sources or layer <= model.kv_sources[0] or layer in model.kv_sources


@cache
def _legal_stages(model: Model) -> str:
    layers = len(model.layers)
    legal = (n for n in range(1, 17) if all(_begins_well(model, part.start) for part in stages(layers, n)))
    return ", ".join(map(str, legal))


_DRAFT_EXPERTS = 0.95
"""Share of a draft layer that is its experts."""


def weights_item(parts: Iterable[tuple[Part, int]], build: Build) -> Item:
    """Return what loading `parts` takes: their tensors, and the experts in the format that the build keeps them in."""
    sizes = dict(parts)
    whole = sum(sizes.values())
    experts = sizes.get(Part.EXPERTS, 0) + int(_DRAFT_EXPERTS * sizes.get(Part.DRAFTS, 0))
    least, expected, most = (
        int(tensors * whole + (kept - 1) * experts)
        for tensors, kept in (
            (build.tensors.least, build.experts.least),
            (build.tensors.expected, build.experts.expected),
            (build.tensors.most, build.experts.most),
        )
    )
    return Item("weights", expected, MemoryPool.BUDGET, "", least, most)


@lru_cache(maxsize=1024)
def rank_weights(
    model: Model, parallel: Parallel, stage: int, *, drafts: bool, expert_rows: int = 128
) -> tuple[tuple[Part, int], ...]:
    """Return the bytes of each part on a rank of `stage`, the greatest first."""
    last, rows = parallel.pipeline - 1, expert_rows
    found: Counter[Part] = Counter()
    for layer in stages(len(model.layers), parallel.pipeline)[stage]:
        _add(found, model.layers[layer], model, parallel, rows)
    if stage == 0:
        _add(found, model.embedding, model, parallel, rows)
    if stage == last:
        _add(found, model.head, model, parallel, rows)
        if drafts and model.speculative is not None:
            found[Part.DRAFTS] += sum(share(part, model, parallel, rows) for part in model.speculative.components)
    _add(found, model.host_components, model, parallel, rows)
    return tuple(found.most_common())


def share(component: WeightComponent, model: Model, parallel: Parallel, expert_rows: int = 128) -> int:
    """Return the bytes of `component` on one rank; `expert_rows`: what the kernels round an expert's rows up to."""
    match component.division:
        case Division.REPLICATED:
            return component.bytes
        case Division.TENSOR:
            return -(-component.bytes // parallel.tensor)
    if parallel.expert:
        return -(-component.bytes * -(-model.experts // parallel.tensor) // model.experts)
    rows = -(-model.moe_inter // parallel.tensor)
    if component.format != "bf16":
        rows = -(-rows // expert_rows) * expert_rows
    return -(-component.bytes * rows // model.moe_inter)


def _add(
    found: Counter[Part], components: Iterable[WeightComponent], model: Model, parallel: Parallel, expert_rows: int
) -> None:
    for component in components:
        found[component.part] += share(component, model, parallel, expert_rows)
