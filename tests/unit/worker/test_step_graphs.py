"""StepGraphs: which steps are captured, and that they give what the layers give."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint
from tiny_llama import load, write

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.plan import BatchEntry, BatchPlan, SequenceStart, TokenSampling
from labinfer.functions.cpu import step_memory
from labinfer.functions.cpu.graph import CpuCapture
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.functions.registry import Implementation
from labinfer.launch.providers import make_registry
from labinfer.models.layers import rope
from labinfer.models.registry import load_config, model_class
from labinfer.worker.index_buffer import IndexBuffer
from labinfer.worker.kv_cache import KVCacheManager
from labinfer.worker.model_runner import ModelRunner
from labinfer.worker.step_graphs import MAX_SEQUENCES, StepGraphs, capture_steps

CPU, BLOCK, DTYPE = torch.device("cpu"), 4, torch.bfloat16
BLOCKS_EACH = 6


class Captures:
    """Counts the graphs that are made and replayed."""

    def __init__(self, library):
        self.capture = CpuCapture(library)
        self.made = self.failed = 0

    def __call__(self, run, rehearse, batch):
        out, graph = self.capture(run, rehearse, batch)
        self.made, self.failed = self.made + (graph is not None), self.failed + (graph is None)
        return out, graph


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("graphs"), intermediate_size=96)[0]


def make_runner(directory, registry, captures, layers=None, dtype=DTYPE, *, num_blocks=32) -> ModelRunner:
    names = model_class(load_config(directory)).names
    model, _ = load(directory, dtype=dtype, registry=registry, layers=layers, names=names)
    specs = model.cache_specs()
    sizes = CacheSizes(num_blocks=num_blocks, max_model_len=64)
    cache = KVCacheManager(specs, sizes, block_size=BLOCK, dtype=dtype, device=CPU, rotary_table=model.rotary_table)
    model.make_rotary_tables(64, CPU)
    functions = registry.select(CPU, dtype)
    return ModelRunner(model, cache, device=CPU, dtype=dtype, functions=functions, around=capture_steps(captures))


def plan(lengths: dict[int, tuple[int, int]], new: bool) -> BatchPlan:
    """Tokens ``begin:end`` of sequences, each of which has ``BLOCKS_EACH`` blocks."""
    entries = [
        BatchEntry(
            seq_id=seq,
            num_tokens=end - begin,
            begin=begin,
            position=begin,
            first_block=0,
            new_blocks=[BLOCKS_EACH * seq + index for index in range(BLOCKS_EACH)],
            num_samples=0,
            new_tokens=[] if new else [(7 * seq + 3 * index) % 50 for index in range(begin, end)],
        )
        for seq, (begin, end) in lengths.items()
    ]
    starts = [
        SequenceStart(seq, [(5 * seq + i) % 50 for i in range(end)], TokenSampling(num_prompt_tokens=end))
        for seq, (_, end) in lengths.items()
        if new
    ]
    return BatchPlan(step_id=0, starts=starts, finished=[], moves=[], entries=entries)


def run(runner: ModelRunner, step: BatchPlan, hidden_TD: torch.Tensor | None = None) -> torch.Tensor:
    return runner.run(
        step, runner.prepare(step), None if hidden_TD is None else hidden_TD.clone()
    )  # it may be overwritten


@pytest.mark.parametrize("layers", [(0, 2), (1, 2)], ids=["whole model", "second stage"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_captured_steps_give_the_same_bits_while_contexts_grow(
    directory, compiled_functions, layers, dtype, monkeypatch
):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    plain = make_runner(directory, registry, None, layers, dtype)
    monkeypatch.setattr(rope, "COVERED_AT_ONCE", 4)  # so that rotary tables grow between replays
    captured = make_runner(directory, registry, captures, layers, dtype)
    torch.manual_seed(0)

    def hidden(rows: int) -> torch.Tensor | None:
        return torch.randn(rows, 48).to(dtype) if layers[0] else None

    prompts = {0: (0, 5), 1: (0, 2), 2: (0, 3)}
    lengths = {seq: end for seq, (_, end) in prompts.items()}
    inputs = hidden(10)
    assert torch.equal(run(captured, plan(prompts, True), inputs), run(plain, plan(prompts, True), inputs))
    before = captured._indices
    for turn in range(12):
        if turn == 6:
            captured._indices = IndexBuffer(CPU)  # as where their memory becomes too small
        chosen = [0] if turn % 3 == 0 else [0, 2] if turn % 3 == 1 else [0, 1, 2]
        step = plan({seq: (lengths[seq], lengths[seq] + 1) for seq in chosen if lengths[seq] < 16}, False)
        for entry in step.entries:
            lengths[entry.seq_id] += 1
        inputs = hidden(len(step.entries))
        assert torch.equal(run(captured, step, inputs), run(plain, step, inputs))
    assert captures.made == 6 and not captures.failed and captured._indices is not before


KINDS = {
    "deepseek-v2-lite": (None, {"kv_lora_rank": 48}),
    "deepseek-v3": ((2, 4), {"kv_lora_rank": 48}),
    "glm-4.7-flash": (None, {"kv_lora_rank": 48}),
    "minicpm3": (None, {"kv_lora_rank": 48}),
    "gemma4-layer-inputs": ((2, 4), {}),
}
"""Layers of a stage, None for all, and sizes: what is compiled takes latents of whole runs of 16 numbers."""


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_of_latents_and_of_layer_inputs_give_the_same_bits(kind, compiled_functions, tmp_path):
    layers, sizes = KINDS[kind]
    directory = make_checkpoint(tmp_path / "model", kind, **sizes)
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    plain, captured = (make_runner(directory, registry, each, layers) for each in (None, captures))
    width = load_config(directory).activation_size
    torch.manual_seed(0)
    prompts, lengths = {0: (0, 5), 1: (0, 2), 2: (0, 3)}, {0: 5, 1: 2, 2: 3}
    for turn in range(8):
        chosen = [0] if turn % 2 else [0, 2]
        step = plan({seq: (lengths[seq], lengths[seq] + 1) for seq in chosen}, False) if turn else plan(prompts, True)
        for entry in step.entries if turn else ():
            lengths[entry.seq_id] += 1
        rows = sum(entry.num_tokens for entry in step.entries)
        inputs = None if layers is None else torch.randn(rows, width).to(DTYPE)
        assert torch.equal(run(captured, step, inputs), run(plain, step, inputs))
    assert captures.made == 2 and not captures.failed


DRAFTS = (
    *((0, 2, 5), (0, 3, 6), (1, 2, 5), (0, 6, 8), (0, 8, 11), (1, 4, 7), (0, 11, 13), (0, 4, 14), (0, 5, 15)),
    *((0, 2, 20), (0, 3, 21)),
)
"""Sequence, first and last token of steps."""


def test_drafts_of_one_sequence_are_captured_when_they_come_again(directory, compiled_functions):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    plain, captured = (make_runner(directory, registry, each) for each in (None, captures))
    prompt = plan({0: (0, 2), 1: (0, 2)}, True)
    assert torch.equal(run(captured, prompt), run(plain, prompt))
    made = []
    for seq, begin, end in DRAFTS:
        step = plan({seq: (begin, end)}, False)
        assert torch.equal(run(captured, step), run(plain, step))
        made.append(captures.made)
    assert made == [0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3] and not captures.failed  # eighteen rows are too many


def bytes_up_to(graphs: StepGraphs, rows: float) -> int:
    """Memory of graphs of up to so many rows."""
    return int(rows * graphs._program_bytes + rows * (rows + 1) / 2 * graphs._row_bytes)


def test_graphs_keep_within_their_memory(directory, compiled_functions):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    plain, captured = (make_runner(directory, registry, each) for each in (None, captures))
    prompt, graphs = plan({0: (0, 2)}, True), captured._layers
    assert torch.equal(run(captured, prompt), run(plain, prompt))

    def captures_made(*counts: int) -> list[int]:
        made = []
        for count in counts:
            step = plan({0: (2, 2 + count)}, False)
            assert torch.equal(run(captured, step), run(plain, step))
            assert graphs.num_bytes <= graphs._kept_bytes
            made.append(captures.made)
        return made

    assert captures_made(3, 3) == [0, 1]
    assert graphs.num_bytes > sum(step.out.nbytes for step in graphs._steps.values())
    graphs._kept_bytes = bytes_up_to(graphs, 4) + 1
    assert captures_made(4, 4, 3, 5, 5) == [1, 2, 2, 2, 2]  # of steps up to five rows not all have room
    first = captured._indices
    captured._indices = IndexBuffer(CPU)  # as where their memory becomes too small: steps stand elsewhere
    assert captures_made(4, 4, 3, 3) == [2, 3, 3, 4] and len(graphs._steps) == 3
    captured._indices = first
    assert captures_made(3, 4) == [4, 4]  # the one that was not used for the longest time made room


def test_graphs_of_several_sequences_keep_within_their_memory(directory, compiled_functions):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    plain = make_runner(directory, registry, None)

    def captures_made(runner: ModelRunner, *counts: int) -> list[int]:
        made = []
        for count in counts:
            step = plan(dict.fromkeys(range(count), (2, 3)), False)
            assert torch.equal(run(runner, step), run(plain, step))
            assert runner._layers.num_bytes <= runner._layers._kept_bytes
            made.append(captures.made)
        return made

    def start(kept_bytes: int) -> ModelRunner:
        runner, prompts = make_runner(directory, registry, captures), plan(dict.fromkeys(range(4), (0, 2)), True)
        assert torch.equal(run(runner, prompts), run(plain, prompts))
        runner._layers._kept_bytes, captures.made = kept_bytes, 0
        return runner

    ample = start(1 << 30)
    assert captures_made(ample, 1, 2, 3, 4, 1) == [1, 2, 3, 4, 4]
    two, three = (start(bytes_up_to(ample._layers, rows)) for rows in (2.5, 3.5))
    assert captures_made(three, 1, 2, 3, 4, 1, 2, 3) == [1, 2, 3, 3, 3, 3, 3]
    captures.made = 0
    assert captures_made(two, 4, 4, 3, 2, 1, 2) == [1, 1, 1, 2, 3, 3]  # the first is not kept


def test_prompts_and_large_batches_are_not_captured(directory, compiled_functions):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    many = range(MAX_SEQUENCES + 1)
    runner = make_runner(directory, registry, captures, num_blocks=BLOCKS_EACH * len(many))
    run(runner, plan(dict.fromkeys(many, (0, 2)), True))
    for token in range(2, 5):
        run(runner, plan(dict.fromkeys(many, (token, token + 1)), False))
    run(runner, plan({0: (3, 5), 1: (3, 5)}, False))
    run(runner, plan({0: (5, 7), 1: (5, 7)}, False))
    assert captures.made == captures.failed == 0


def test_captured_batches_share_memory(directory, compiled_functions):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    plain, captured = (make_runner(directory, registry, each, num_blocks=BLOCKS_EACH * 40) for each in (None, captures))
    prompt = plan(dict.fromkeys(range(40), (0, 2)), True)
    assert torch.equal(run(captured, prompt), run(plain, prompt))
    made, sizes, lengths = [], [], [2] * 40
    for count in (40, 40, 5, 40, 5, 17, 17, 5, 40):
        step = plan({seq: (lengths[seq], lengths[seq] + 1) for seq in range(count)}, False)
        assert torch.equal(run(captured, step), run(plain, step))
        made.append(captures.made)
        sizes.append(captures.capture.memory.num_bytes)
        lengths[:count] = [length + 1 for length in lengths[:count]]
    assert made == [1, 1, 2, 2, 2, 3, 3, 3, 3] and not captures.failed
    assert 0 < sizes[-1] < 1.5 * sizes[0]


def test_layers_that_cannot_be_captured_are_tried_once(directory, compiled_functions):
    registry = make_registry([ReferenceProvider()])
    captures = Captures(compiled_functions)
    plain, runner = (make_runner(directory, registry, each) for each in (None, captures))
    for end in range(2, 6):
        step = plan({0: (end - 1 if end > 2 else 0, end)}, end == 2)
        assert torch.equal(run(runner, step), run(plain, step))
    assert (captures.made, captures.failed) == (0, 1)


def test_functions_of_plugins_are_not_captured(directory, compiled_functions):
    """They may read lists of the batch, which are other ones in the next step, and call libraries that nobody sees."""
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    registry.plugin = "ideas"
    captures = Captures(compiled_functions)
    plain = make_runner(directory, registry, None)
    *_, preferred = registry.candidates("paged_attention", CPU, DTYPE).values()
    attention = preferred.call  # can be captured by itself
    registry.add("paged_attention", Implementation(name="own", call=attention))
    runner = make_runner(directory, registry, captures)
    for end in range(2, 6):
        step = plan({0: (end - 1 if end > 2 else 0, end)}, end == 2)
        assert torch.equal(run(runner, step), run(plain, step))
    assert (captures.made, captures.failed) == (0, 1)


def test_runners_share_a_capture(directory, compiled_functions):
    """As a model and one that drafts for it do, on batches that end one after the other."""
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    plain, first, second = (make_runner(directory, registry, each) for each in (None, captures, captures))
    prompt = plan(dict.fromkeys(range(5), (0, 2)), True)
    for runner in (plain, first, second):
        run(runner, prompt)
    for token in range(2, 7):
        step = plan(dict.fromkeys(range(7 - token), (token, token + 1)), False)
        expected, out = run(plain, step).clone(), run(first, step)
        assert torch.equal(run(second, step), expected) and torch.equal(out, expected)
        again = run(second, step)
        assert torch.equal(again, expected) and torch.equal(out, expected)
    assert captures.made == 10 and not captures.failed


def test_half_as_many_sequences_are_tried_where_a_step_could_not_be_captured(directory, compiled_functions):
    captures = Captures(compiled_functions)
    runner = make_runner(directory, make_registry([ReferenceProvider()]), captures, num_blocks=BLOCKS_EACH * 11)
    run(runner, plan(dict.fromkeys(range(11), (0, 2)), True))
    failed = []
    for size in (11, 11, 10, 6, 5, 4, 3, 2, 2, 1, 1):
        run(runner, plan(dict.fromkeys(range(size), (2, 3)), False))
        failed.append(captures.failed)
    assert failed == [1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4] and not captures.made


def test_drafts_that_cannot_be_captured_do_not_count_for_other_steps(directory, compiled_functions, monkeypatch):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    captures = Captures(compiled_functions)
    runner = make_runner(directory, registry, captures, num_blocks=BLOCKS_EACH * 9)
    run(runner, plan(dict.fromkeys(range(9), (0, 2)), True))
    with monkeypatch.context() as patched:
        patched.setattr(step_memory, "SHARED_BYTES", 0)
        for end in (4, 4, 5, 5, 6, 6):
            run(runner, plan({0: (2, end)}, False))
        assert (captures.made, captures.failed) == (0, 3)
    run(runner, plan(dict.fromkeys(range(9), (2, 3)), False))
    assert (captures.made, captures.failed) == (1, 3)
