"""Captured steps on a card, where torch has one of NVIDIA's kind; and dry runs and waits, anywhere."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cuda_cases import DECODES, DEVICE, Case, needs_card, randn

from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.cuda.graph import CudaCapture
from labinfer.functions.graph import NotReplayable, for_dry_run
from labinfer.functions.reference import attention as reference_attention
from labinfer.functions.waits import watch_waits


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@needs_card
def test_captured_attention_goes_on_as_contexts_grow():
    from labinfer.functions.cuda.attention import paged_attention

    case = Case([(900, 1), (40, 1)], (2, 64), 16, torch.bfloat16)
    q, batch = randn(2, 14, 64, dtype=torch.bfloat16), case.batch
    heads = AttentionHeads(torch.arange(3) * 7, 0.125)
    lengths = batch.context_lens_B.clone()
    batch.context_lens_B.copy_(torch.tensor([3, 40]))

    def run(batch):
        return paged_attention(q, case.cache, batch, heads) * 2

    out, graph = CudaCapture(DEVICE)(lambda: run(batch), lambda: run(for_dry_run(batch)))
    for contexts in (torch.tensor([3, 40], device=DEVICE), lengths):
        batch.context_lens_B.copy_(contexts)
        q.normal_()
        graph.replay()
        assert torch.equal(out, run(batch))


@needs_card
def test_steps_that_read_lists_or_wait_are_not_captured():
    capture, x = CudaCapture(DEVICE), torch.ones(3, device=DEVICE)
    case = Case(DECODES, (2, 16), 4, torch.float32)
    q, heads = randn(3, 4, 16, dtype=torch.float32), AttentionHeads(torch.arange(3) * 2, 0.25)

    def attend(batch):
        return reference_attention.paged_attention(q, case.cache, batch, heads)

    out, graph = capture(lambda: attend(case.batch), lambda: attend(for_dry_run(case.batch)))
    assert graph is None and torch.equal(out, attend(case.batch))

    def wait():
        return x * x.sum().item()

    out, graph = capture(wait, wait)
    assert graph is None and out.tolist() == [3, 3, 3]
    out, graph = capture(lambda: x + 1, lambda: x + 1)
    x.add_(1)
    graph.replay()
    assert out.tolist() == [3, 3, 3]


@needs_card
def test_result_outlives_the_replay_of_a_graph_that_was_captured_before():
    """Whatever that computes in between."""
    capture, x = CudaCapture(DEVICE), torch.ones(1000, device=DEVICE)
    head, head_graph = capture(
        lambda: ((x + 1) * 2 + x).sum(0, keepdim=True), lambda: ((x + 1) * 2 + x).sum(0, keepdim=True)
    )
    layers, layers_graph = capture(lambda: x * 3, lambda: x * 3)
    x.add_(1)
    layers_graph.replay()
    head_graph.replay()
    assert head.item() == 8000 and bool((layers == 6).all())


def test_waits_of_this_thread_are_heard(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn("is young", stacklevel=2))

    def wait() -> int:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return 3

    def wait_elsewhere() -> int:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(wait).result()

    for run, waits in ((wait, True), (wait, True), (wait_elsewhere, False), (lambda: 3, False)):
        assert watch_waits(run, torch.cuda) == (3, waits)


def test_rehearsed_batch_has_no_lists():
    batch = for_dry_run(Case(DECODES, (1, 16), 4, torch.float32).batch)
    for read in (
        lambda: batch.context_lens[0],
        lambda: len(batch.row_ptr),
        lambda: list(batch.table_ptr),
        lambda: batch.part([0]),
    ):
        with pytest.raises(NotReplayable, match="is read in Python"):
            read()
