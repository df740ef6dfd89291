"""Activations from stage to stage, results back, and what the ranks of a stage exchange."""

from __future__ import annotations

import pytest
import torch

from labinfer.base.errors import WaitTimeout
from labinfer.base.plan import BatchResult, EntryResult
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.pipeline import HEADER, HEADER_BYTES, PipelineCommunicator, StepMismatch
from labinfer.comm.tensor_parallel import TensorParallelCommunicator

# Stage to stage.

LABELS = {0: "rank 0 (stage 0, tp 0)", 1: "rank 1 (stage 1, tp 0)"}
CPU = torch.device("cpu")


def two_stages(first, last, timeout=10.0):
    """Run ``first`` on stage 0 and ``last`` on stage 1; what ``last`` returned."""

    def work(comm):
        source, destinations = (None, [1]) if comm.rank == 0 else (0, [])
        pipeline = PipelineCommunicator(
            comm,
            comm.split([range(comm.size)]),
            source=source,
            destinations=destinations,
            sampling_rank=1,
            labels=LABELS,
        )
        result = (first if comm.rank == 0 else last)(pipeline)
        pipeline.drain()
        return result

    return LocalCommunicator.run(2, work, timeout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_arrive_as_they_were_sent(dtype):
    hidden_TD = torch.randn(3, 5).to(dtype)
    sent = two_stages(
        lambda pipeline: pipeline.send_activations(4, hidden_TD),
        lambda pipeline: pipeline.post_activations(4, 3, 5, dtype, CPU).wait(),
    )[1]
    assert sent.dtype == dtype and torch.equal(sent, hidden_TD)


class CardCommunicator(LocalCommunicator):
    """Claims to send from device memory, and counts the messages."""

    sent = 0

    def memory(self, peer: int) -> str:
        return "npu"

    def isend(self, tensor, dest):
        self.sent += 1
        return super().isend(tensor, dest)


def two_cards(first, last):
    """``two_stages`` whose activations are sent from device memory; also the number of messages there."""

    def work(host_comm):
        comm = CardCommunicator(host_comm.progress, host_comm.rank, 2, host_comm._queues, ("cards", (0, 1)))
        source, destinations = (None, [1]) if comm.rank == 0 else (0, [])
        pipeline = PipelineCommunicator(
            comm, host_comm, source=source, destinations=destinations, sampling_rank=1, labels=LABELS
        )
        result = (first if comm.rank == 0 else last)(pipeline)
        return result, comm.sent

    return LocalCommunicator.run(2, work, 10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_headers_of_activations_between_cards_go_through_host_memory(dtype):
    hidden_TD = torch.randn(3, 5).to(dtype)

    def first(pipeline):
        for step in range(3):
            pipeline.send_activations(step, hidden_TD + step)
        return pipeline.bytes_sent[1]

    def last(pipeline):
        arrivals = [pipeline.post_activations(step, 3, 5, dtype, CPU) for step in range(3)]
        return [arrival.wait() for arrival in arrivals]

    (num_bytes, on_cards), (arrived, _) = two_cards(first, last)
    assert on_cards == 3 and num_bytes == 3 * (HEADER_BYTES + hidden_TD.nbytes)
    for step, got_TD in enumerate(arrived):
        assert got_TD.dtype == dtype and torch.equal(got_TD, hidden_TD + step)


def test_activations_of_another_step_between_cards_are_refused():
    with pytest.raises(StepMismatch, match="expected 2 rows of step 5 .* but got 2 rows of step 4"):
        two_cards(
            lambda pipeline: pipeline.send_activations(4, torch.zeros(2, 4)),
            lambda pipeline: pipeline.post_activations(5, 2, 4, torch.float32, CPU).wait(),
        )


def test_several_steps_may_be_posted_early():
    def last(pipeline):
        arrivals = [pipeline.post_activations(step, step + 1, 2, torch.float32, CPU) for step in range(4)]
        return [int(arrival.wait()[0, 0]) for arrival in arrivals]

    def first(pipeline):
        for step in range(4):
            pipeline.send_activations(step, torch.full((step + 1, 2), float(step)))

    assert two_stages(first, last)[1] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("step_id", "shape", "says"),
    [
        (5, (2, 4), "expected 2 rows of step 5 .* but got 2 rows of step 4"),
        (4, (4, 2), "expected 4 rows of step 4 .* but got 2 rows of step 4"),
    ],
)
def test_activations_of_another_step_or_batch_are_refused(step_id, shape, says):
    with pytest.raises(StepMismatch, match=says) as caught:
        two_stages(
            lambda pipeline: pipeline.send_activations(4, torch.zeros(2, 4)),
            lambda pipeline: pipeline.post_activations(step_id, *shape, torch.float32, CPU).wait(),
        )
    assert LABELS[0] in str(caught.value)


def test_header_keeps_the_payload_aligned():
    assert HEADER_BYTES % 16 == 0


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(100))])
def test_results_go_back_to_rank_0(data):
    result = two_stages(
        lambda pipeline: bytes(pipeline.post_result(9, 100).wait()),
        lambda pipeline: pipeline.send_result(9, data, 100),
    )[0]
    assert result == data


def test_results_arrive_to_the_bit():
    vector = torch.randn(100).tolist()
    sent = BatchResult(9, [EntryResult((7, 0, 2**32 - 1)), EntryResult(vector=tuple(vector))])
    result = two_stages(
        lambda pipeline: BatchResult.decode(pipeline.post_result(9, 2000).wait()),
        lambda pipeline: pipeline.send_result(9, sent.encode(), 2000),
    )[0]
    assert result == sent and list(result.entries[1].vector) == vector


def test_step_without_samples_still_says_that_it_is_done():
    sent = BatchResult(9, [EntryResult()])
    result = two_stages(
        lambda pipeline: BatchResult.decode(pipeline.post_result(9, 30).wait()),
        lambda pipeline: pipeline.send_result(9, sent.encode(), 30),
    )
    assert result[0] == sent


def test_results_of_another_step_are_refused():
    with pytest.raises(StepMismatch, match="step 8 .* step 9"):
        two_stages(
            lambda pipeline: pipeline.post_result(8, 4).wait(), lambda pipeline: pipeline.send_result(9, b"abcd", 4)
        )


def test_result_that_claims_more_than_its_buffer_is_refused():
    def last(pipeline):
        frame = torch.frombuffer(bytearray(HEADER.pack(8, 5) + b"abcd"), dtype=torch.uint8)
        pipeline._host_comm.isend(frame, 0).wait("rank 0")

    with pytest.raises(StepMismatch, match="step 8 in up to 4 bytes .* 5 bytes of step 8"):
        two_stages(lambda pipeline: pipeline.post_result(8, 4).wait(), last)


def test_result_that_is_longer_than_announced_is_not_sent():
    with pytest.raises(AssertionError, match="step 8 has a result of 5 bytes, but announced 4"):
        two_stages(lambda pipeline: None, lambda pipeline: pipeline.send_result(8, b"abcde", 4))


def test_activations_that_never_come_name_step_and_sender():
    def last(pipeline):
        pipeline._comm.progress.step_id = 3
        pipeline.post_activations(3, 1, 1, torch.float32, CPU).wait()

    with pytest.raises(WaitTimeout) as caught:
        two_stages(lambda pipeline: None, last, timeout=0.05)
    text = str(caught.value)
    assert text.startswith("rank 1 waited 0.05 s") and f"for the activations of step 3 from {LABELS[0]}" in text


def test_result_that_never_comes_names_step_and_sender():
    with pytest.raises(WaitTimeout, match=r"rank 0 waited .* for the result of step 6 from rank 1 \(stage 1, tp 0\)"):
        two_stages(lambda pipeline: pipeline.post_result(6, 1).wait(), lambda pipeline: None, timeout=0.05)


# Inside a stage.


def test_columns_of_unequal_widths_are_put_side_by_side():
    whole_BV, widths = torch.arange(3 * 7).view(3, 7).float(), [3, 3, 1]

    def work(comm):
        begin = sum(widths[: comm.rank])
        slice_BV = whole_BV[:, begin : begin + widths[comm.rank]]
        return TensorParallelCommunicator(comm).gather_columns(slice_BV, widths)

    first, *others = LocalCommunicator.run(3, work)
    assert torch.equal(first, whole_BV) and others == [None, None]


def test_stage_of_one_rank_gives_back_the_very_tensor():
    tp, tensor = TensorParallelCommunicator(LocalCommunicator()), torch.ones(2, 3)
    assert tp.all_reduce(tensor) is tensor
    assert tp.gather_columns(tensor, [3]) is tensor


def test_shared_numbers_travel_through_host_memory():
    def work(comm):
        between_accelerators = comm.split([range(comm.size)])
        between_accelerators.all_gather = None  # fails if it is called
        tp = TensorParallelCommunicator(between_accelerators, host_comm=comm)
        return tp.share([3, 5] if comm.rank == 0 else None, 2)

    assert LocalCommunicator.run(2, work) == [[3, 5], [3, 5]]
