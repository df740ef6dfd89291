"""Plan entries of sequences. Plans are deltas: what a plan has sent to the workers is not sent again."""

from __future__ import annotations

import msgspec

from labinfer.base.plan import NO_SLOT, BatchEntry, SequenceStart
from labinfer.engine.sequence import Sequence


def make_start(sequence: Sequence) -> SequenceStart:
    """Make the start entry of a sequence, which sends all its tokens to the workers."""
    sampling = sequence.token_sampling
    if not sequence.needs_all_prompt_outputs:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    sequence.started, sequence.num_tokens_sent = True, len(sequence.token_ids)
    slot = sequence.cache.state_slot
    return SequenceStart(sequence.seq_id, list(sequence.token_ids), sampling, NO_SLOT if slot is None else slot)


def make_entry(sequence: Sequence, count: int) -> BatchEntry:
    """Make the entry for the last ``count`` scheduled tokens of a sequence, and mark these tokens and its blocks as sent."""
    cache, begin = sequence.cache, sequence.num_scheduled - count
    num_tokens = len(sequence.token_ids)
    num_tokens_sent = max(sequence.num_tokens_sent, min(num_tokens, sequence.num_scheduled))
    windowed = cache.windowed
    num_samples = 0
    if sequence.num_unscheduled == 0 and not sequence.request.pooling:
        num_samples = min(count, 1 + len(sequence.draft))
    entry = BatchEntry(
        seq_id=sequence.seq_id,
        num_tokens=count,
        begin=begin,
        position=cache.num_tokens - count,
        first_block=cache.num_known,
        new_blocks=cache.blocks[cache.num_known :],
        first_window_block=windowed.num_known,
        new_window_blocks=windowed.blocks[windowed.num_known :] if windowed.blocks else [],
        new_tokens=(
            *sequence.token_ids[sequence.num_tokens_sent : num_tokens_sent],
            *sequence.draft[max(0, begin - num_tokens) :],
        ),
        num_samples=num_samples,
        masks=sequence.masks[-num_samples:] if num_samples and sequence.guide is not None else (),
        is_decode=num_samples == count and begin >= sequence.num_prompt_tokens,
        num_drafts=sequence.num_mtp_drafts,
    )
    sequence.num_in_flight += 1
    sequence.num_mtp_drafts = 0
    sequence.num_tokens_sent, cache.num_known = num_tokens_sent, len(cache.blocks)
    windowed.num_known = len(windowed.blocks)
    return entry


def max_result_bytes(sequence: Sequence, entry: BatchEntry) -> int:
    """Maximum size of the entry's serialized result, in bytes."""
    if entry.is_decode and entry.num_tokens == 1 and not entry.num_drafts:
        return sequence.decode_bytes
    return sequence.result_bytes(entry.begin, entry.num_samples, entry.num_drafts)
