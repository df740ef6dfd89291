"""Shortest remaining prefill first: the prompt with the fewest tokens left to run gets the next chunk.

A long prompt makes short ones wait for many micro-batches. If short prompts overtake it, the mean time to first token (TTFT) falls:
shortest remaining processing time first minimises the mean (Schrage 1968). The long prompt itself gets its first token later, and
never while shorter prompts keep arriving.

    python launch.py bench serve --model DIR --plugin examples/plugins/shortest_prefill.py --scheduling-policy shortest_prefill

Two orders are needed. ``fewest_tokens_left`` changes with every chunk, so it decides only who is next. ``by_arrival`` never changes
and decides who is preempted when KV blocks run out. ``labinfer/engine/policies.py`` has the contract and says why.
"""

from labinfer import register


def fewest_tokens_left(sequence, running_of_user):
    return (sequence.num_unscheduled, sequence.order)


@register("scheduling_policy", "shortest_prefill", prefill_key=fewest_tokens_left)
def by_arrival(sequence, running_of_user):
    return (sequence.order,)
