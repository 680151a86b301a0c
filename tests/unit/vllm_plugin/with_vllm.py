"""Child process of `test_with_vllm.py`: the import of vLLM takes seconds and emits warnings.

Prints one JSON object: the result of each patch, and whether the replaced functions give vLLM's own results.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
import json
import logging
import os
import tempfile
from types import SimpleNamespace

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from safetensors.torch import save_file
from torch._inductor import codecache
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import registry
from vllm.models.deepseek_v4 import DeepSeekV4MTP, DSparkDeepseekV4ForCausalLM
from vllm.models.deepseek_v4.common.ops import cache_utils, fused_mtp_input_rmsnorm
from vllm.models.deepseek_v4.cpu import cpu_sparse  # noqa: F401 -- registers what it computes with
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla import compressor_utils, sparse_swa
from vllm.v1.worker import utils
from vllm.v1.worker.gpu import block_table

from dsv4_kernels import interpreter
from dsv4_kernels.fp8.api import fp8_gemm, fp8_quant
from dsv4_kernels.indexer.reference import indexer_paged_logits
from dsv4_kernels.mla_prefill.api import mla_prefill_lists
from dsv4_kernels.registry import operation
from dsv4_runtime.contract.kernels import ALL_BUNDLED, VARIABLE
from dsv4_runtime.vllm_cpu import drafts, model_runner, operators
from dsv4_runtime.vllm_plugin import loading, retained
from dsv4_runtime.vllm_plugin.kernels import attention, choice, indexer, linear, plans, sublayers

WINDOW, BLOCK = 8, 4


def window_indices_agree() -> bool:
    """Three requests: one decodes, two prefill, the last token is padding."""
    query_start = torch.tensor([0, 1, 6, 30, 30], dtype=torch.int32)
    lengths = torch.tensor([21, 9, 24, 0], dtype=torch.int32)
    request = torch.tensor([0] + [1] * 5 + [2] * 24 + [0], dtype=torch.int32)
    valid = torch.arange(31) < 30
    table = torch.randperm(32, generator=torch.Generator().manual_seed(0)).to(torch.int32).reshape(4, 8)
    replay = torch.tensor([15, 0, 3, 0], dtype=torch.int32)
    results = []
    for own in (True, False):
        indices, lens = torch.full((31, 1, WINDOW), 7, dtype=torch.int32), torch.full((31,), 7, dtype=torch.int32)
        common = (query_start, lengths, request, valid, table)
        for offset, count in ((0, 1), (1, 30)):
            rows = (indices[offset:], lens[offset:])
            if own:
                model_runner.window_indices(
                    *rows, WINDOW, WINDOW, *common, BLOCK, replay, num_tokens=count, token_offset=offset
                )
            else:
                sparse_swa._compute_swa_indices_and_lens_kernel[(count,)](
                    rows[0], rows[0].stride(0), rows[1], WINDOW, WINDOW, rows[1], rows[1],
                    *common, table.stride(0), BLOCK, replay, offset, HAS_IMAGE=False, TRITON_BLOCK_SIZE=16,
                )  # fmt: skip
        results.append((indices, lens))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def block_tables_agree() -> bool:
    """Three groups of layers, one without slots; a request that decodes, one that prefills, one without blocks."""
    random = torch.Generator().manual_seed(0)
    sizes, widths, enabled = [4, 16, 8], [16, 5, 9], [True, True, False]
    tables = [torch.randint(1, 99, (6, width), generator=random, dtype=torch.int32) for width in widths]
    filled = torch.randint(1, 5, (3, 6), generator=random, dtype=torch.int32)
    rows, starts = torch.tensor([4, 1, -1], dtype=torch.int32), torch.tensor([0, 1, 31, 33], dtype=torch.int32)
    positions = torch.cat((torch.tensor([37]), torch.arange(3, 33), torch.tensor([0, 1])))
    found = []
    for own in (True, False):
        out = torch.full((3, 64), 7)
        targets = [torch.full((6, width), 7, dtype=torch.int32) for width in widths]
        if own:
            model_runner.slot_mappings(tables, sizes, enabled, rows, starts, positions, out)
            model_runner.gather_block_tables(tables, filled, rows[:2], 4, targets)
        else:
            pointers = [
                torch.tensor([one.data_ptr() for one in group], dtype=torch.uint64) for group in (tables, targets)
            ]
            strides, no = torch.tensor(widths), torch.zeros(3, dtype=torch.bool)
            block_table._compute_slot_mappings_kernel[(3, 4)](
                64, rows, starts, positions, pointers[0], strides, torch.tensor(sizes, dtype=torch.int32),
                torch.tensor(enabled), no, out, out.stride(0), 0,
                CP_SIZE=1, CP_INTERLEAVE=1, PAD_ID=-1, TRITON_BLOCK_SIZE=16,
            )  # fmt: skip
            block_table._gather_block_tables_kernel[(3, 4)](rows, *pointers, strides, filled, 6, 2, BLOCK_SIZE=16)
        found.append((out, *targets))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def compressed_slots_agree() -> bool:
    """A request that decodes at the end of a group, one that prefills, with a token without a slot of its own."""
    starts, lengths = torch.tensor([0, 1, 31], dtype=torch.int32), torch.tensor([24, 37], dtype=torch.int32)
    table = torch.randperm(32, generator=torch.Generator().manual_seed(0)).to(torch.int32).reshape(2, 16)
    slots = torch.arange(31)
    slots[4] = -1
    found = []
    for own in (True, False):
        out = torch.full((31,), 7)
        if own:
            model_runner.compressed_slots(out, slots, starts, lengths, table, 3, 4)
        else:
            compressor_utils.CompressedSlotMappingKernel.kernel[(2,)](
                out, slots, starts, lengths, table, table.stride(0), 3, 1, 1, COMPRESS_RATIO=4, PAD_ID=-1,
                TRITON_BLOCK_SIZE=16,
            )  # fmt: skip
        found.append(out)
    return torch.equal(*found)


def prefill_lists_agree() -> bool:
    """The cases of the registry, with windows that vLLM's kernel supports."""
    for case in operation("mla_prefill_lists").cases_with("cpu"):
        given = operation("mla_prefill_lists").make_inputs({**case.params, "window": 32}, torch.device("cpu"), 3)
        chosen = given["chosen"].clamp_min(0)  # vLLM moves an entry of -1 like any other
        lengths = (given["query_start_loc"], given["seq_lens"], given["gather_lens"])
        sizes = (given["window"], given["ratio"], given["topk"], given["rows"], given["first"])
        theirs = cache_utils.combine_topk_swa_indices(chosen, *lengths, *sizes)
        ours = mla_prefill_lists(**{**given, "chosen": chosen})
        if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            return False
    return True


def scores_of_drafts() -> dict[str, object]:
    """Two requests verify three tokens each; then a step has shorter drafts, which vLLM's warm-up never contains."""
    os.environ[VARIABLE] = str(ALL_BUNDLED)
    interpreter.install()
    choice._ROWS[0] = 4
    scores, agree = indexer.paged_logits(unreached), True
    for rows in (3, 1, 2, 4):
        params = {"batch": 2, "next_n": rows, "keys": 77, "heads": 16, "page": 64}
        given = operation("indexer_paged_logits").make_inputs(params, torch.device("cpu"), 5)
        q = given["q"].view(torch.float8_e4m3fn)
        common = (given["weights"], given["context_lens"], given["block_tables"], torch.empty(0))
        found = scores((q, None), given["kv_cache"], *common, 80)
        wanted = indexer_paged_logits(**given)
        inside = torch.arange(77) < given["context_lens"].flatten()[:, None]
        agree &= torch.allclose(found[:, :77][inside], wanted[:, :77][inside], rtol=1e-2, atol=1e-2)
    made = [plan for plan in plans._PLANS.values() if isinstance(plan, indexer._PagedPlans)]
    return {"agree": agree, "made": [sorted(plans.plans) for plans in made]}


def unreached(*_: object, **__: object) -> None:
    raise AssertionError("vLLM's own scores were asked for")


def products() -> dict[str, object]:
    """A layer's product of six tokens of two requests, and the fallback for more tokens or other scales."""
    params = {"tokens": 6, "n": 80, "k": 256}
    given = operation("fp8_gemm").make_inputs(params, torch.device("cpu"), 5)
    layer, odd = torch.nn.Module(), torch.nn.Module()
    for one, scale in ((layer, given["w_scale"]), (odd, None)):
        one.weight = torch.nn.Parameter(given["w"].view(torch.float8_e4m3fn), requires_grad=False)
        one.register_buffer(linear.SCALE, scale)
    kernel = linear.BundledFp8BlockScaledMMKernel.__new__(linear.BundledFp8BlockScaledMMKernel)
    kernel.tokens, kernel.stock = 6, SimpleNamespace(apply_weights=lambda layer, x, bias: "stock")
    for one in (layer, odd):
        one.dsv4_product = None if one is odd else kernel._product(one)
    x = torch.randn((2, 3, 256), generator=torch.Generator().manual_seed(0)).bfloat16()
    found = kernel.apply_weights(layer, x, torch.ones(80, dtype=torch.bfloat16))
    code, scale = fp8_quant(x=x.view(6, 256))
    # Codes of values other than x: the result shows which codes were used.
    doubled = plans.give_codes(x.view(6, 256).clone(), (code, scale + 1))
    wanted = fp8_gemm(a=code, a_scale=scale, w=given["w"], w_scale=given["w_scale"]).float() + 1.0
    return {
        "shape": list(found.shape),
        "agree": torch.allclose(found.view(6, 80).float(), wanted, rtol=2e-2, atol=2e-2),
        "given": torch.allclose(kernel.apply_weights(layer, doubled).float(), 2 * (wanted - 1.0), rtol=2e-2, atol=4e-2),
        "others": [kernel.apply_weights(layer, x.repeat(1, 2, 1)), kernel.apply_weights(odd, x)],
    }


def inputs_with_codes() -> dict[str, bool]:
    """Return whether each kernel that makes a product's input provides the same codes as the quantiser."""
    plans.want_codes(256, 4)
    cpu = torch.device("cpu")
    norm = operation("front_norm").make_inputs({"tokens": 4, "rank": 256}, cpu, 1)
    seam = operation("mhc_post_pre").make_inputs({"tokens": 4, "hidden": 256, "norm": True}, cpu, 2)
    gate_up = operation("silu_mul_quant").make_inputs({"tokens": 4, "k": 256, "limit": 10.0}, cpu, 3)["x"]
    groups, rank = 2, 128
    output = operation("wo_a_einsum").make_inputs({"tokens": 4, "groups": groups, "n": rank, "k": 512}, cpu, 4)
    layer = attention.BundledAttention.__new__(attention.BundledAttention)
    wo_a = SimpleNamespace(weight=output["w"].view(groups * rank, 512))
    setattr(wo_a, linear.SCALE, output["w_scale"].view(groups, 4))
    vars(layer).update(
        n_local_heads=groups, n_local_groups=groups, o_lora_rank=rank, _most_tokens=4, _z_quantised=4, wo_a=wo_a,
        wo_b=lambda z: z,
    )  # fmt: skip
    made = {
        "output": layer._o_proj(attention.Fp8Output(output["a"], output["a_scale"]), torch.arange(4)),
        "query": sublayers.norm(lambda *_: None)(*norm.values())[0],
        "sublayer": sublayers.mhc_fused_post_pre(**seam)[-1],
        "shared experts": sublayers.activation(SimpleNamespace(dsv4_limit=10.0), gate_up),
    }
    return {
        name: all(torch.equal(*pair) for pair in zip(plans.given_codes(x) or (), fp8_quant(x), strict=True))
        for name, x in made.items()
    }


def decode_plans() -> dict[str, int]:
    """Return the number of decode plans for each kind of layer: one is made ahead, and a step needs no other."""
    made = {}
    # DSpark's layers have no compressed cache, and list their block of drafts after the window.
    for name, ratio, columns in (("1", 1, 128), ("4", 4, 128), ("128", 128, 128), ("dspark", 1, 192)):
        layer = attention.BundledAttention.__new__(attention.BundledAttention)
        page = 256 // ratio
        caches = [torch.zeros((2, size, 584), dtype=torch.uint8) for size in (64, page)]
        vars(layer).update(
            n_local_heads=8, padded_heads=64, window_size=128, compress_ratio=ratio, max_model_len=9216,
            topk_indices_buffer=torch.empty((1, 512)), swa_cache_layer=SimpleNamespace(kv_cache=caches[0]),
            kv_cache=caches[1], _decode_here=True, _o_proj_here=True, _most_decodes=2, _window_columns=columns,
        )  # fmt: skip
        before = len(plans._PLANS)
        layer.plan_decode_ahead()
        # As in `_forward_decode`: rows of the full width, and pages of 64 if there is no compressed cache.
        topk = {1: 0, 4: 512, 128: 128}[ratio]
        used = [plans.pages(cache) for cache in (caches[0], caches[0] if ratio == 1 else caches[1])]
        layer._decode_plan(columns, topk, (64, 64 if ratio == 1 else page), tuple(used), o8=True)
        made[name] = len(plans._PLANS) - before
    return made


def columns_of_window() -> list[int]:
    """Return the columns of the window's rows without drafts, with MTP, for DSpark's target and for the draft model."""

    def columns(speculative: object, non_causal: bool) -> int:
        causal = SimpleNamespace(use_non_causal=non_causal)
        return attention.window_columns(
            SimpleNamespace(speculative_config=speculative, attention_config=causal), window=128
        )

    mtp, dspark = (SimpleNamespace(use_dspark=lambda is_it=is_it: is_it, num_speculative_tokens=5) for is_it in (0, 1))
    return [columns(None, False), columns(mtp, False), columns(dspark, False), columns(dspark, True)]


def zeroed_words() -> list[int]:
    """Two segments share blocks of 8 words: words 0-2 and 4-5 of a block. Blocks 1 and 3 of four are zeroed."""
    cache = torch.ones(32, dtype=torch.int32)
    zeroer = utils.KVBlockZeroer.__new__(utils.KVBlockZeroer)
    base = cache.data_ptr()
    columns = (torch.tensor([base, base + 16], dtype=torch.uint64), torch.tensor([8, 8]), torch.tensor([3, 2]))
    zeroer._meta = (*columns, 1, 4, 2)
    zeroer.zero_block_ids([1, 3])
    return (cache == 0).nonzero().flatten().tolist()


def restored(files: bool) -> str:
    """Load the weights of an unquantized model: from files that have none of them, or in place of retained ones."""
    loader = retained.retaining(DefaultModelLoader)(LoadConfig())
    loader.dsv4_restores = not files
    if files:
        loader.get_all_weights = lambda *_: iter(())
        loader.counter_before_loading_weights = 0.0
    model = torch.nn.LayerNorm(4)
    model.load_weights = lambda weights: {name for name, _ in weights}
    config = SimpleNamespace(quantization=None, is_moe=False, multimodal_config=None)
    try:
        with set_current_vllm_config(VllmConfig()):
            loader.load_weights(model, config)
    except ValueError as error:
        return str(error)
    return "loaded"


def loaded(form: str) -> dict[str, object]:
    """Read two files of a checkpoint with vLLM's loader for `form`."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            save_file({f"w{number}": torch.ones(1_000_000)}, f"{folder}/model-{number}.safetensors")
        loading.LOGGER.addHandler(handler := Kept())
        loading.LOGGER.setLevel(logging.INFO)
        loader = get_model_loader(LoadConfig(load_format=form, use_tqdm_on_load=False))
        names = [name for name, _ in loader.get_all_weights(SimpleNamespace(model=folder, revision=None), None)]
        loading.LOGGER.removeHandler(handler)
    return {"loader": type(loader).__name__, "names": names, "lines": lines}


def draft_norms_agree() -> bool:
    """Three tokens, the first at position 0; the results of vLLM's kernels are rounded to bfloat16."""
    random = torch.Generator().manual_seed(0)
    embeds, state = torch.randn((3, 96), generator=random), torch.randn((3, 4, 96), generator=random)
    weights = [1 + torch.randn(96, generator=random).bfloat16() / 10 for _ in range(2)]
    args = (embeds.bfloat16(), torch.tensor([0, 5, 6]), state.bfloat16(), *weights, 1e-6, 4)
    own, theirs = drafts.input_norms(*args), fused_mtp_input_rmsnorm._FUSED_MTP_INPUT_RMSNORM_KERNEL(*args)
    last = (args[2][:, 0].contiguous(), weights[0], 1e-6)
    own += (drafts.rms_norm(*last),)
    theirs = (*theirs, fused_mtp_input_rmsnorm._MTP_SHARED_HEAD_RMSNORM_KERNEL(*last))
    # A sum in another order may round to the neighbouring value.
    return all(torch.allclose(a.float(), b.float(), rtol=1 / 128, atol=0) for a, b in zip(own, theirs, strict=True))


def block_attention_agrees() -> bool:
    """Two requests with blocks of three tokens, which attend to their whole block and the window before it."""
    random = torch.Generator().manual_seed(0)
    width, block, heads = 8, 32, 2
    keys = torch.randn((64, 512), generator=random).bfloat16()
    cache = torch.zeros((2, block, 584), dtype=torch.uint8)
    operators.write_mla(cache.view(2, -1), block, torch.arange(64), keys[:, :448], keys[:, 448:])
    seen = [[*range(5, 5 + WINDOW), 20, 21, 22], [40, 41, 50, 51, 52]]
    listed = torch.full((6, 1, WINDOW + width), -1)
    for token in range(6):
        listed[token, 0, : len(seen[token // 3])] = torch.tensor(seen[token // 3])
    window = SimpleNamespace(
        decode_swa_indices=listed.int(), decode_swa_width=WINDOW + width, num_decode_tokens=6, block_size=block
    )
    attention = drafts.DraftAttention.__new__(drafts.DraftAttention)
    torch.nn.Module.__init__(attention)
    attention.window_size, attention.scale, attention.attn_sink = (
        WINDOW,
        512**-0.5,
        torch.randn(heads, generator=random),
    )
    attention.swa_cache_layer = SimpleNamespace(prefix="swa", kv_cache=cache)
    drafts.get_forward_context = lambda: SimpleNamespace(attn_metadata={"swa": window})
    q = torch.randn((6, heads, 512), generator=random).bfloat16()
    out = torch.empty_like(q)
    attention.forward_mqa(q, q, torch.zeros(6, dtype=torch.int64), out)
    stored = operators.read_mla(cache.view(2, -1), block, torch.arange(64))
    for token in range(6):
        mine = stored[seen[token // 3]]
        logits = q[token].float() @ mine.T * attention.scale
        shares = torch.cat((logits, attention.attn_sink[:, None]), 1).softmax(1)[:, :-1]
        if not torch.allclose(out[token].float(), shares @ mine, atol=2e-2):
            return False
    return True


print(
    json.dumps(
        {
            "platform": type(current_platform).__name__,
            "ray device": current_platform.ray_device_key,
            "layer types": sorted(DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler(None, 0)),
            "window indices": window_indices_agree(),
            "block tables": block_tables_agree(),
            "compressed slots": compressed_slots_agree(),
            "zeroed words": zeroed_words(),
            "drafting models": [module.__name__ for module in (DeepSeekV4MTP, DSparkDeepseekV4ForCausalLM)],
            "scores of drafts": scores_of_drafts(),
            "products": products(),
            "inputs with codes": inputs_with_codes(),
            "decode plans": decode_plans(),
            "columns of the window": columns_of_window(),
            "prefill lists": prefill_lists_agree(),
            "draft norms": draft_norms_agree(),
            "block attention": block_attention_agrees(),
            "inspected in a fork": registry._run_in_subprocess(os.getppid) == os.getpid(),
            "queue pauses": repr(shm_broadcast.sched_yield),
            "header": codecache._HEADER_DIR,
            "inductor cache": os.environ["TORCHINDUCTOR_CACHE_DIR"],
            "loads": {form: loaded(form) for form in ("auto", "safetensors")},
            "restored": [restored(files) for files in (True, False)],
            "other loader": get_model_loader(LoadConfig(load_format="dummy")).__class__.__name__,
            "operators missing": [n for n in operators.SIGNATURES if not hasattr(torch.ops._C, n)],
        }
    )
)
