"""The operators for processors without AVX-512 BF16, compared with explicit arithmetic on single numbers."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from dsv4_runtime.vllm_cpu import operators
from dsv4_runtime.vllm_cpu.operators import HEAD, NOPE, ROPE, SIGNATURES, read_mla, rotate, write_mla
from dsv4_runtime.vllm_cpu.patches import linear

BLOCK = 4
EPS = 1e-6
ANGLES = torch.arange(300)[:, None] * 10000 ** (-torch.arange(ROPE // 2) / (ROPE // 2))
COS_SIN = torch.cat((ANGLES.cos(), ANGLES.sin()), 1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def mla_cache(blocks: int) -> torch.Tensor:
    """Return rows of a wider buffer, as shared by vLLM's layers: a row is longer than its block needs."""
    return torch.zeros(blocks, 2 * BLOCK * 600, dtype=torch.uint8)[:, : BLOCK * 584]


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """Return one rotated vector of 64, computed pair by pair."""
    found = x.clone()
    for pair in range(ROPE // 2):
        turn = complex(float(ANGLES[position, pair].cos()), float(ANGLES[position, pair].sin()))
        value = complex(float(x[2 * pair]), float(x[2 * pair + 1])) * turn
        found[2 * pair], found[2 * pair + 1] = value.real, value.imag
    return found


def test_each_has_the_parameters_of_its_signature():
    for name, signature in SIGNATURES.items():
        parsed = torch._C.parse_schema(f"_C::{name}{signature}")
        parameters = inspect.signature(getattr(operators, name)).parameters
        assert [argument.name for argument in parsed.arguments] == list(parameters), name


def test_a_rotation_and_its_inverse():
    x = torch.randn(ROPE)
    torch.testing.assert_close(rotate(x, COS_SIN[17]), rotated(x, 17))
    torch.testing.assert_close(rotate(rotate(x, COS_SIN[17]), COS_SIN[17], inverse=True), x)
    o = torch.randn(3, 2, HEAD).bfloat16()
    back = operators.inverse_gptj_rope_o_proj_cpu(o, torch.tensor([0, 5, 9]), COS_SIN, ROPE)
    assert back.dtype == torch.float32
    torch.testing.assert_close(back[..., :NOPE], o.float()[..., :NOPE])
    torch.testing.assert_close(rotated(back[2, 1, NOPE:], 9), o[2, 1, NOPE:].float())


def test_written_entries_are_read_back_within_fp8_precision():
    cache, slots = mla_cache(5), torch.tensor([0, 19, 7, 4])
    nope = (torch.randn(4, NOPE) * torch.logspace(-3, 3, NOPE)).bfloat16()
    rope = torch.randn(4, ROPE).bfloat16()
    write_mla(cache, BLOCK, slots, nope, rope)
    found = read_mla(cache, BLOCK, slots)
    assert torch.equal(found[:, NOPE:], rope.float())
    for token in range(4):
        for tile in range(NOPE // 64):
            part = slice(64 * tile, 64 * tile + 64)
            greatest = float(nope[token, part].abs().max())
            scale = 2.0 ** math.ceil(math.log2(max(greatest / 448, 1e-4)))
            # Half a step of three bits of mantissa, or of the smallest numbers.
            bound = (nope[token, part].float().abs() / 16).clamp_min(scale * 2**-10) * 1.01
            assert bool(((found[token, part] - nope[token, part].float()).abs() <= bound).all())
    # A block contains its tokens, followed by their scales.
    assert int(cache[4, BLOCK * 576 + 3 * 8]) == 127 + math.ceil(
        math.log2(max(float(nope[1, :64].abs().max()) / 448, 1e-4))
    )
    assert int((cache != 0).any(1).sum()) == 3


def test_queries_are_normalised_and_rotated_and_keys_inserted():
    q, kv, positions = torch.randn(3, 2, HEAD).bfloat16(), torch.randn(3, HEAD).bfloat16(), torch.tensor([4, 0, 250])
    cache, slots = mla_cache(3), torch.tensor([5, -1, 2])
    found = operators.fused_qnorm_rope_kv_insert_cpu(q, kv, positions, cache, slots, COS_SIN, 4, EPS, BLOCK)
    assert found.shape == (3, 4, HEAD)
    assert not found[:, 2:].any()
    for token in range(3):
        for head in range(2):
            x = q[token, head].float()
            x = x / math.sqrt(float(x.square().mean()) + EPS)
            expected = torch.cat((x[:NOPE], rotated(x[NOPE:], int(positions[token]))))
            torch.testing.assert_close(found[token, head].float(), expected, atol=2e-2, rtol=1e-2)
    inserted = read_mla(cache, BLOCK, torch.tensor([5, 2]))
    for row, token in ((0, 0), (1, 2)):
        expected = rotated(kv[token, NOPE:].float(), int(positions[token]))
        torch.testing.assert_close(inserted[row, NOPE:], expected, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(inserted[row, :NOPE], kv[token, :NOPE].float(), atol=0.3, rtol=0.07)


def test_attention_over_two_caches_with_a_sink():
    heads, scale = 3, 0.1
    caches = [mla_cache(4), mla_cache(4)]
    for cache in caches:
        keys = torch.randn(16, HEAD).bfloat16()
        write_mla(cache, BLOCK, torch.arange(16), keys[:, :NOPE], keys[:, NOPE:])
    q, sink = torch.randn(3, heads, HEAD).bfloat16(), torch.tensor([0.5, -20.0, 3.0])
    slots = [torch.tensor([[3, 9, -1], [9, 3, 15], [-1, -1, -1]]), torch.tensor([[-1, 1], [0, 7], [-1, -1]])]
    out = torch.full_like(q, 7.0)
    operators.flash_mla_with_kvcache_cpu(out, q, caches[0], slots[0], BLOCK, caches[1], slots[1], BLOCK, sink, scale)
    for token in range(3):
        keys = torch.cat(
            [
                read_mla(cache, BLOCK, chosen[token][chosen[token] >= 0])
                for cache, chosen in zip(caches, slots, strict=True)
            ]
        )
        for head in range(heads):
            weights = [math.exp(float(q[token, head].float() @ key) * scale) for key in keys]
            total = sum(weights) + math.exp(float(sink[head]))
            expected = sum((weight / total * key for weight, key in zip(weights, keys, strict=True)), torch.zeros(HEAD))
            torch.testing.assert_close(out[token, head].float(), expected, atol=1e-2, rtol=1e-2)
    assert not out[2].any()


@pytest.mark.parametrize("head", [HEAD, 128])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (8, False)])
def test_a_group_of_tokens_becomes_one_key(head, ratio, overlap):
    tokens, width = 2 * ratio, head * (1 + overlap)
    kv, score, bias = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(ratio, width)
    states, places = torch.zeros(8, BLOCK, 2 * width), torch.randperm(8 * BLOCK)[:tokens]
    positions = torch.arange(tokens)
    operators.save_partial_states_cpu(kv, score, bias, positions, states, places)
    window = ratio * (1 + overlap)
    local = positions[:, None] - window + 1 + torch.arange(window)
    gathered = torch.where(local >= 0, places[local.clamp_min(0)], -1)
    weight, slots = torch.rand(head) + 0.5, torch.full((tokens,), -1)
    slots[ratio - 1], slots[-1] = 2, 9
    mla = head == HEAD
    cache = mla_cache(3) if mla else torch.zeros(3, BLOCK * 140, dtype=torch.uint8)
    store = operators.compress_norm_rope_store_cpu if mla else operators.compress_norm_rope_store_indexer_cpu
    store(states, gathered, positions, slots, weight, EPS, COS_SIN, cache, BLOCK, ratio)
    for last, slot in ((ratio - 1, 2), (tokens - 1, 9)):
        pooled = torch.zeros(head)
        for column in range(head):
            members = []
            for place, position in enumerate(range(last - window + 1, last + 1)):
                if position >= 0:
                    # Of two overlapping groups, the earlier one has the first half of the columns.
                    at = column + head * (overlap and place >= ratio)
                    logit = float(score[position, at] + bias[position % ratio, at])
                    members.append((math.exp(logit), float(kv[position, at])))
            total = sum(share for share, _ in members)
            pooled[column] = sum(share * value for share, value in members) / total
        pooled = pooled / math.sqrt(float(pooled.square().mean()) + EPS) * weight
        pooled[-ROPE:] = rotated(pooled[-ROPE:], last // ratio * ratio)
        if mla:
            found = read_mla(cache, BLOCK, torch.tensor([slot]))[0]
        else:
            values = cache[slot // BLOCK, slot % BLOCK * 128 :][:128].contiguous().view(torch.float8_e4m3fn).float()
            scale = cache[slot // BLOCK, BLOCK * 128 + slot % BLOCK * 4 :][:4].contiguous().view(torch.float32)
            assert float(scale.log2()) == int(scale.log2())
            found = values * scale
        torch.testing.assert_close(found, pooled, atol=0.04, rtol=0.07)
    assert int((cache != 0).any(1).sum()) == 2


def test_the_indexer_finds_the_keys_with_the_highest_scores():
    heads, length, pages = 2, 30, 9
    keys = torch.randn(pages * BLOCK, 128)
    cache = torch.zeros(pages, BLOCK * 132, dtype=torch.uint8)
    scale = torch.full((pages * BLOCK, 1), 2.0**-3)
    cache[:, : BLOCK * 128] = (keys / scale).to(torch.float8_e4m3fn).view(torch.uint8).view(pages, -1)
    cache[:, BLOCK * 128 :] = scale.view(torch.uint8).view(pages, -1)
    keys = (keys / scale).to(torch.float8_e4m3fn).float() * scale
    index_q, weights = torch.randn(2, heads, 128), torch.rand(2, heads)
    q_fp8, scaled = torch.empty(2, heads, 128, dtype=torch.float8_e4m3fn), torch.empty(2, heads)
    positions = torch.tensor([3, 200])
    operators.fused_indexer_q_rope_quant_cpu(positions, index_q, COS_SIN, q_fp8, weights, 0.5, 0.25, scaled)
    factor = scaled / weights / 0.125
    assert bool((factor.log2() == factor.log2().round()).all())
    turned = torch.cat((index_q[1, 1, :64], rotated(index_q[1, 1, 64:], 200)))
    torch.testing.assert_close(q_fp8[1, 1].float() * factor[1, 1], turned, atol=0.05, rtol=0.07)

    table, lengths = torch.stack([torch.randperm(pages) for _ in range(2)]), torch.tensor([length, 7])
    found = operators.fp8_paged_mqa_logits_cpu(q_fp8, cache, scaled, lengths, table, BLOCK, length)
    assert found.shape == (2, length)
    for row in range(2):
        for token in range(int(lengths[row])):
            key = keys[int(table[row, token // BLOCK]) * BLOCK + token % BLOCK]
            expected = sum(
                max(float(q_fp8[row, head].float() @ key), 0.0) * float(scaled[row, head]) for head in range(heads)
            )
            assert float(found[row, token]) == pytest.approx(expected, rel=1e-4)


def test_the_512_best_and_fewer():
    scores, lengths = torch.randn(3, 600), torch.tensor([600, 512, 5], dtype=torch.int32)
    scores[2, 5:] = 100.0
    table = torch.randperm(450).view(3, 150).int()
    pages, raw = torch.empty(3, 512, dtype=torch.int32), torch.empty(3, 512, dtype=torch.int32)
    operators.topk_transform_512_cpu(scores, lengths, table, pages, 4, raw)
    assert sorted(raw[0].tolist()) == sorted(scores[0].topk(512).indices.tolist())
    assert raw[1].tolist() == list(range(512))
    assert raw[2].tolist() == [*range(5), *[-1] * 507]
    assert pages[0].tolist() == [int(table[0, at // 4]) * 4 + at % 4 for at in raw[0].tolist()]
    assert pages[2, 5:].unique().tolist() == [-1]


def test_experts_by_score_and_by_hash():
    logits, bias = torch.randn(5, 16) * 4, torch.randn(16)
    scores = torch.tensor([[math.sqrt(math.log1p(math.exp(x))) for x in row] for row in logits.tolist()])
    weights, experts = operators.biased_topk_cpu(logits, logits, bias, 3, True, "sqrtsoftplus", 0, 2.5, True)
    for row in range(5):
        wanted = sorted(range(16), key=lambda expert, row=row: -float(scores[row, expert] + bias[expert]))[:3]
        assert experts[row].tolist() == wanted
        total = sum(float(scores[row, expert]) for expert in wanted)
        assert weights[row].tolist() == pytest.approx([2.5 * float(scores[row, expert]) / total for expert in wanted])
    table = torch.tensor([[1, 5, 9]] * 5, dtype=torch.int32)
    weights, experts = operators.hash_topk_cpu(logits, table, 3, "sqrtsoftplus", 0, 16, 2.5)
    assert torch.equal(experts, table)
    torch.testing.assert_close(weights, 2.5 * scores[:, [1, 5, 9]] / scores[:, [1, 5, 9]].sum(1, keepdim=True))
    with pytest.raises(ValueError, match="num_fused_shared_experts is 1"):
        operators.hash_topk_cpu(logits, table, 4, "sqrtsoftplus", 1, 16, 2.5)
    with pytest.raises(ValueError, match="'tanh'"):
        operators.hash_topk_cpu(logits, table, 3, "tanh", 0, 16, 2.5)


def test_streams_are_mixed_and_carried_on():
    streams, size, count = 4, 8, 3
    x = torch.randn(count, streams, size)
    fn, base = 0.1 * torch.randn((2 + streams) * streams, streams * size), 0.3 * torch.randn((2 + streams) * streams)
    scale = torch.tensor([0.5, 1.5, 0.7])
    mixed, post, comb = operators.hc_pre_fused_cpu(x, fn, scale, base, streams, 20, EPS, EPS)
    torch.testing.assert_close(comb.sum(1), torch.ones(count, streams), atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(2), torch.ones(count, streams), atol=1e-3, rtol=0)
    flat = x.flatten(1)
    mixes = flat @ fn.T / (flat.square().mean(1, keepdim=True) + EPS).sqrt()
    gates = (mixes[:, :streams] * 0.5 + base[:streams]).sigmoid() + EPS
    torch.testing.assert_close(mixed, torch.einsum("th,thd->td", gates, x))
    torch.testing.assert_close(
        post, 2 * (mixes[:, streams : 2 * streams] * 1.5 + base[streams : 2 * streams]).sigmoid()
    )
    out = torch.randn(count, size)
    carried = operators.hc_post_fused_cpu(out, x, post, comb)
    torch.testing.assert_close(carried, post[..., None] * out[:, None] + torch.einsum("tih,tid->thd", comb, x))
    last = operators.hc_head_fused_cpu(x, fn[:streams], scale[:1], base[:streams], EPS, EPS)
    torch.testing.assert_close(last, mixed)


def test_products_with_a_weight_that_stays_as_it_is():
    a, b = torch.randn(2, 3, 5).bfloat16(), torch.randn(2, 4, 5).bfloat16()
    out = torch.empty(2, 3, 4, dtype=torch.bfloat16)
    operators.bmm_cpu(out, a, operators.convert_weight_packed(b), True, None)
    torch.testing.assert_close(out.float(), torch.einsum("bmk,bnk->bmn", a.float(), b.float()), atol=0.03, rtol=0.02)
    with pytest.raises(ValueError, match="FP8"):
        operators.bmm_cpu(out, a, b, True, torch.ones(1))


def test_a_token_has_the_same_result_alone_and_among_many():
    x, weight, bias = torch.randn(64, 256).bfloat16(), torch.randn(96, 256).bfloat16().float(), torch.randn(96)
    together = linear(x, weight, bias)
    assert together.dtype == torch.bfloat16
    torch.testing.assert_close(together.double(), x.double() @ weight.double().T + bias, atol=1e-2, rtol=2**-8)
    alone = torch.cat([linear(row[None], weight, bias) for row in x])
    # float32 sums in another order only differ if they are next to a rounding boundary.
    assert float((alone != together).double().mean()) < 1e-3
