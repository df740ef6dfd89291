"""Memory traffic of a decode's delta rule: its time beside that of reading and writing the states once.

    python benchmarks/delta_rule.py --threads 2

Every state is read once and written once for a token, which an addition in place does as well; ``traffic`` is the time of the
delta rule over that of the addition to as many states, from memory that was not used since longer than the caches hold. Figures
are medians over rounds in which both take turns; sizes are by default those of a layer of Qwen3.5-0.8B.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from experts import CACHE, SETTING, compiled_function, seconds

from labinfer.functions.delta_calls import DeltaRuleCall
from labinfer.observe.table import format_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=128, help="of a head's keys and values")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    function, _ = compiled_function("delta_rule", args.threads, "cpu")
    call = DeltaRuleCall(key_heads=tuple(range(args.heads)), key_size=args.size, value_size=args.size)
    rows = []
    with torch.inference_mode():
        for sequences in args.sequences:
            state_bytes = sequences * args.heads * args.size**2 * torch.float32.itemsize
            layers = -(-CACHE // state_bytes)
            decodes = [call.bind(function, sequences, SETTING) for _ in range(layers)]
            states = [torch.zeros(state_bytes // torch.float32.itemsize) for _ in range(layers)]
            rates, traffic = [], []
            for number in range(args.rounds + 1):
                added = seconds(lambda states=states: [state.add_(1.0) for state in states])
                decoded = seconds(lambda decodes=decodes: [decode() for decode in decodes])
                if number > 0:  # the first round warms up
                    rates.append(2 * layers * state_bytes / decoded / 1e9)
                    traffic.append(decoded / added)
            rows.append((sequences, f"{statistics.median(rates):.1f}", f"{statistics.median(traffic):.2f}"))
    print(format_table(("sequences", "GB/s of states", "traffic"), rows))


if __name__ == "__main__":
    main()
