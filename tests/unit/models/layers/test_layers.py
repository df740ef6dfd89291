"""The functions and layers against straightforward dense mathematics, and tensor parallelism against one rank."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_llama import model_of, plain_slices

from labinfer.base.errors import UserError
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.functions import Functions
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference.attention import paged_attention, write_kv
from labinfer.functions.reference.elementwise import rms_norm, rotary, silu_and_mul
from labinfer.functions.reference.linear import embedding, pack_weight
from labinfer.launch.providers import reference_registry
from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.models.decoder import DecoderLayer
from labinfer.models.layers.attention import AttentionConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.embedding import VocabParallelEmbedding
from labinfer.models.layers.input_batch import ModelInputBatch
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.models.layers.rope import RopeConfig, RotaryTable
from labinfer.weights.codes import QuantLayout
from labinfer.weights.loader import pack_weights

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_rms_norm_divides_by_the_root_mean_square():
    x, weight = torch.randn(5, 16) * 3, torch.randn(16)
    expected = torch.stack([row / math.sqrt(float((row**2).mean()) + 1e-5) * weight for row in x])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_takes_the_mean_in_float32():
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # squares overflow float16
    assert torch.equal(rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_silu_and_mul_gates_the_second_half_by_the_first():
    gate, up = torch.randn(3, 6), torch.randn(3, 6)
    torch.testing.assert_close(silu_and_mul(torch.cat([gate, up], -1)), gate * torch.sigmoid(gate) * up)


def test_rotary_turns_pairs_as_complex_numbers():
    x, angles = torch.randn(4, 3, 8), torch.randn(4, 4)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(4, 1, 4), angles.unsqueeze(1))
    torch.testing.assert_close(rotary(x, cos, sin), torch.cat([turned.real, turned.imag], -1))


def test_scores_after_rotary_depend_on_distance_only():
    table, q, k = RotaryTable(rope(100.0), 64, torch.float32, CPU), torch.randn(8), torch.randn(8)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = [rotary(x.view(1, 1, 8), *table.at(torch.tensor([at]))) for x, at in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(54, 50), rtol=1e-4, atol=1e-4)
    assert abs(score(7, 3) - score(7, 5)) > 1e-3


def test_embedding_gives_zeros_outside_its_slice():
    table = torch.randn(10, 4)
    ids = torch.tensor([0, 3, 5, 9])
    parts = [embedding(ids, pack_weight(table[:4]), 0), embedding(ids, pack_weight(table[4:]), 4)]
    assert torch.equal(parts[0][2:], torch.zeros(2, 4)) and torch.equal(parts[1][:2], torch.zeros(2, 4))
    assert torch.equal(sum(parts), table[ids])


# Attention.

BLOCK = 4


def paged(sequences, num_blocks=32):
    """Block tables in random order, and the cache that holds each sequence's keys and values."""
    order, tables = torch.randperm(num_blocks), []
    num_kv, head_size = sequences[0]["k"].shape[1:]
    # What is not written must not be read.
    cache = LayerCache(*(torch.full((num_blocks, BLOCK, num_kv, head_size), float("nan")) for _ in range(2)))
    for sequence in sequences:
        length = len(sequence["k"])
        table, order = order[: -(-length // BLOCK)], order[-(-length // BLOCK) :]
        positions = torch.arange(length)
        slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
        write_kv(sequence["k"], sequence["v"], cache, slots)
        tables.append(table.tolist())
    return tables, cache


def head_ptr_of(kv_of_query) -> torch.Tensor:
    """Where each KV head's query heads begin."""
    return torch.searchsorted(torch.tensor(kv_of_query), torch.arange(max(kv_of_query) + 2))


def dense_attention(q_THP, k_SKP, v_SKP, kv_of_query, scale, window=10**9):
    """One head and one row at a time."""
    num_new, context = len(q_THP), len(k_SKP)
    out = torch.empty_like(q_THP)
    for t in range(num_new):
        end = context - num_new + t + 1
        seen = slice(max(0, end - window), end)
        for head, kv in enumerate(kv_of_query):
            weights = (k_SKP[seen, kv] @ q_THP[t, head] * scale).softmax(0)
            out[t, head] = weights @ v_SKP[seen, kv]
    return out


@pytest.mark.parametrize(
    ("num_kv", "kv_of_query"),
    [
        (2, (0, 0, 0, 1, 1, 1)),
        (3, (0, 1, 2)),
        (1, (0, 0, 0, 0)),
        (2, (0, 0, 1, 1, 1)),
        (2, (0, 1, 1, 1)),
        (3, (0, 1, 1, 1, 2, 2)),
    ],
)
def test_paged_attention_is_dense_attention(num_kv, kv_of_query):
    num_heads, head_size = len(kv_of_query), 8
    sequences = [
        {"k": torch.randn(context, num_kv, head_size), "v": torch.randn(context, num_kv, head_size), "new": new}
        for context, new in ((7, 7), (9, 1), (1, 1), (13, 5), (8, 4))
    ]
    tables, cache = paged(sequences)
    queries = [torch.randn(sequence["new"], num_heads, head_size) for sequence in sequences]
    row_ptr = [0, *torch.tensor([s["new"] for s in sequences]).cumsum(0).tolist()]
    lengths = [len(s["k"]) for s in sequences]
    batch = AttentionBatch.build(row_ptr, lengths, tables, CPU)
    out = paged_attention(torch.cat(queries), cache, batch, AttentionHeads(head_ptr_of(kv_of_query), head_size**-0.5))
    expected = [
        dense_attention(q, s["k"], s["v"], kv_of_query, head_size**-0.5)
        for q, s in zip(queries, sequences, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 100])
@pytest.mark.parametrize("chunks", [(13,), (5, 8), (4, 4, 5), (12, 1), (1,) * 13], ids=str)
def test_a_window_shows_the_last_tokens_only(window, chunks):
    """Prompts whole and in chunks, and decodes; what no query of a chunk sees is not even read."""
    kv_of_query, head_size = (0, 0, 1, 1), 8
    k, v, q = torch.randn(3, sum(chunks), 4, head_size).unbind()
    k, v = k[:, :2], v[:, :2]
    expected = dense_attention(q, k, v, kv_of_query, head_size**-0.5, window=window)
    heads, end = AttentionHeads(head_ptr_of(kv_of_query), head_size**-0.5, window), 0
    for num_new in chunks:
        begin, end = end, end + num_new
        visible_k, visible_v = k[:end].clone(), v[:end].clone()
        visible_k[: max(0, begin - window + 1)] = visible_v[: max(0, begin - window + 1)] = float("nan")
        tables, cache = paged([{"k": visible_k, "v": visible_v}])
        batch = AttentionBatch.build([0, num_new], [end], tables, CPU)
        out = paged_attention(q[begin:end], cache, batch, heads)
        torch.testing.assert_close(out, expected[begin:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("kv_of_query", [(0, 0, 1, 1), (0, 1, 1, 1)])
def test_sinks_are_one_more_column_of_the_softmax(kv_of_query, window):
    k, v, q, sinks = (
        torch.randn(9, 2, 8),
        torch.randn(9, 2, 8),
        torch.randn(5, 4, 8),
        torch.tensor([0.5, -3.0, 2.0, 9.0]),
    )
    tables, cache = paged([{"k": k, "v": v}])
    batch = AttentionBatch.build([0, 5], [9], tables, CPU)
    out = paged_attention(q, cache, batch, AttentionHeads(head_ptr_of(kv_of_query), 0.3, window, sinks))
    for t in range(5):
        seen = slice(max(0, 5 + t - window) if window else 0, 5 + t)
        for head, kv in enumerate(kv_of_query):
            weights = torch.cat((k[seen, kv] @ q[t, head] * 0.3, sinks[head : head + 1])).softmax(0)[:-1]
            torch.testing.assert_close(out[t, head], weights @ v[seen, kv], rtol=1e-5, atol=1e-5)


def test_sequences_of_a_batch_have_windows_of_their_own():
    lengths, new, window = (7, 1, 13), (1, 1, 6), 4
    sequences = [{"k": torch.randn(n, 2, 8), "v": torch.randn(n, 2, 8)} for n in lengths]
    queries = [torch.randn(n, 4, 8) for n in new]
    tables, cache = paged(sequences)
    batch = AttentionBatch.build([0, 1, 2, 8], list(lengths), tables, CPU)
    out = paged_attention(torch.cat(queries), cache, batch, AttentionHeads(head_ptr_of((0, 0, 1, 1)), 0.3, window))
    expected = [
        dense_attention(q, s["k"], s["v"], (0, 0, 1, 1), 0.3, window=window)
        for q, s in zip(queries, sequences, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_a_later_owner_overwrites_a_block():
    cache = LayerCache(torch.zeros(2, BLOCK, 1, 2), torch.zeros(2, BLOCK, 1, 2))
    slots = torch.tensor([6, 1])
    k, v = torch.ones(2, 1, 2), torch.full((2, 1, 2), 2.0)
    write_kv(k * 9, v * 9, cache, slots)
    write_kv(k, v, cache, slots)
    assert cache.k.flatten(0, 1)[:, 0, 0].tolist() == [0, 1, 0, 0, 0, 0, 1, 0]
    assert cache.v.flatten(0, 1)[:, 0, 1].tolist() == [0, 2, 0, 0, 0, 0, 2, 0]


# Tensor parallelism.


def rope(theta: float = 10000.0) -> RopeConfig:
    return RopeConfig(dim=8, parameters={"rope_theta": theta}, max_position=64)


def config_of(num_heads: int, num_kv: int, intermediate: int, biased: bool, vocab: int = 50) -> ModelConfig:
    attention = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv, head_size=8, rope=rope(), qkv_bias=biased, out_bias=biased
    )
    layer = LayerConfig(mixer=attention, mlp=GatedMLPConfig(intermediate_size=intermediate, bias=biased))
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=num_heads * 8,
        norm_eps=1e-5,
        max_position=64,
        tied_embeddings=False,
        layers=(layer,),
        dtype="float32",
        eos_token_ids=(),
    )


def context_of(tp: TensorParallelCommunicator, functions: Functions) -> StageContext:
    """A stage of one layer that is the whole model."""
    return StageContext(
        tp=tp,
        functions=functions,
        dtype=torch.float32,
        first_layer=0,
        last_layer=1,
        is_first=True,
        is_last=True,
    )


def fill(model, tensors: dict[str, torch.Tensor]) -> None:
    """Copy each parameter's slice; tensors that are not there yet are made up."""
    for part in plain_slices(model):
        tensor = tensors.setdefault(part.name, torch.randn(part.shape) * 0.3)
        part.destination.copy_(tensor[tuple(slice(*cut) for cut in part.ranges)])
    pack_weights(model)


def batch_of(lengths: list[int], tables: list[torch.Tensor]) -> ModelInputBatch:
    positions = torch.cat([torch.arange(n) for n in lengths])
    slots = [
        t[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for n, t in zip(lengths, tables, strict=True)
    ]
    row_ptr = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return ModelInputBatch(
        token_ids_T=positions,
        positions_T=positions,
        attention=AttentionBatch.build(row_ptr, lengths, [table.tolist() for table in tables], CPU),
        slots_T=torch.cat(slots),
        sample_rows_B=torch.tensor([row_ptr[-1] - 1]),
        prompt_rows=[],
        pooled=[],
    )


def run_layer(config: ModelConfig, comm: LocalCommunicator, tensors: dict, x_TD: torch.Tensor, lengths: list[int]):
    """One decoder layer's attention, MLP and whole output on one rank."""
    tp = TensorParallelCommunicator(comm)
    functions = reference_registry().select(CPU, torch.float32)
    layer = DecoderLayer(config.layers[0], config, "pre", context_of(tp, functions))
    fill(layer, tensors)
    num_kv = layer.self_attn.qkv_proj.packed.outputs // 8 - layer.self_attn.o_proj.packed.inputs // 8
    cache = LayerCache(*(torch.full((16, BLOCK, num_kv // 2, 8), float("nan")) for _ in range(2)))
    blocks = [-(-n // BLOCK) for n in lengths]
    tables = list(torch.arange(sum(blocks)).flip(0).split(blocks))
    batch = batch_of(lengths, tables)
    angles = RotaryTable(layer.self_attn.rope, 64, torch.float32, CPU).at(batch.positions_T)
    with torch.inference_mode():
        return (
            layer.self_attn(x_TD, batch, cache, angles),
            layer.mlp(x_TD),
            sum(layer(x_TD, None, batch, cache, angles)),
        )


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv", "intermediate", "tp_size"),
    [(14, 2, 160, 3), (12, 3, 170, 3), (8, 8, 64, 3), (6, 2, 33, 2), (7, 1, 40, 3), (9, 3, 48, 4)],
)
def test_a_layer_over_several_ranks_is_the_layer_of_one(num_heads, num_kv, intermediate, tp_size, biased):
    config, lengths, tensors = config_of(num_heads, num_kv, intermediate, biased), [5, 1, 9], {}
    x_TD = torch.randn(sum(lengths), config.hidden_size)
    single = run_layer(config, LocalCommunicator(), tensors, x_TD, lengths)
    ranks = LocalCommunicator.run(tp_size, lambda comm: run_layer(config, comm, tensors, x_TD, lengths))
    for rank in ranks:
        for parallel, alone, first in zip(rank, single, ranks[0], strict=True):
            torch.testing.assert_close(parallel, alone, rtol=1e-4, atol=1e-5)
            assert torch.equal(parallel, first)  # the same bits on every rank
    if biased:
        assert {"self_attn.o_proj.bias", "mlp.down_proj.bias", "self_attn.q_proj.bias"} <= set(tensors)


@pytest.mark.parametrize(("vocab", "tp_size"), [(50, 3), (5, 4), (64, 2)])
def test_the_vocabulary_over_several_ranks_is_that_of_one(vocab, tp_size):
    config, tensors = config_of(6, 2, 64, False, vocab), {}
    ids, hidden = torch.arange(vocab), torch.randn(4, config.hidden_size)

    def run(comm: LocalCommunicator):
        model = model_of(config)
        if comm.size > 1:
            ctx = context_of(TensorParallelCommunicator(comm), model._ctx.functions)
            model = type(model)(config, ctx)
        fill(model, tensors)
        with torch.inference_mode():
            return model.model.embed_tokens(ids), model.logits(hidden)

    embedded, logits = run(LocalCommunicator())
    ranks = LocalCommunicator.run(tp_size, run)
    assert all(torch.equal(rank[0], embedded) for rank in ranks)
    torch.testing.assert_close(ranks[0][1], logits)
    assert [rank[1] for rank in ranks[1:]] == [None] * (tp_size - 1)


def test_quantized_weights_need_a_layout_with_pack_codes():
    registry = reference_registry()
    calls = {"pack_weight": print, "linear": print, "embedding": print}
    registry.add_all(calls, name="own", quantization="int8", layout="rows")
    ctx = StageContext(
        tp=TensorParallelCommunicator(LocalCommunicator()),
        functions=registry.select(CPU, torch.float32),
        dtype=torch.float32,
        first_layer=0,
        last_layer=1,
        is_first=True,
        is_last=True,
    )
    VocabParallelEmbedding(40, 64, ctx).choose_forms("lm_head", lambda name: QuantLayout(4, 32))
    with pytest.raises(UserError, match="the layout of 'own rows int8' has no pack_codes, .* --functions linear=ref"):
        VocabParallelEmbedding(40, 64, ctx).choose_forms("lm_head", lambda name: QuantLayout(8, 32))
