"""Runs on every rank of a real launch: digests of the logits and tokens of reproducible runs, in one JSON file.

``python bits_driver.py JOB_FILE OUT_FILE``. The job has ``prompts`` (token ids), ``checkpoints`` (name → directory), ``options`` of all runs, and
``runs``: (checkpoint, options) by name. The results are, for each run by its name, a digest of every row of logits by "seed/position", and the
tokens drawn.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.group.failure import end_group_on_uncaught
from labinfer.comm.group.rank_group import RankGroup, join_group
from labinfer.comm.spmd.environment import detect

NUM_TOKENS = 12


class RowDigests:
    """Stands before the sampler and keeps a digest of each row's logits by "seed/position"; seeds number the prompts."""

    def __init__(self, sampler):
        self._sampler, self.process_beams = sampler, sampler.process_beams
        self.digests: dict[str, str] = {}

    def __call__(self, logits_BV, rows):
        for logits_V, row in zip(logits_BV, rows, strict=True):
            data = logits_V.float().contiguous().numpy().tobytes()
            key = f"{row.sampling.seed}/{len(row.token_ids)}"
            self.digests[key] = hashlib.blake2b(data, digest_size=8).hexdigest()
        return self._sampler(logits_BV, rows)


def run(group: RankGroup, options: dict, prompts: list[list[int]]) -> dict:
    """What this rank knows of one run; the error of options that are refused."""
    try:
        llm = LLM.from_options(group, EngineOptions.from_flat(options))
    except UserError as error:
        return {"refused": str(error)}
    runner = llm._parts.worker.runner
    recorder = runner.sampler = RowDigests(runner.sampler)
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i, temperature=0.9 * (i % 2), top_p=0.95)
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params)
    result = {"rows": recorder.digests} if group.rank == llm.layout.topology.sampling_rank else {}
    if llm.is_rank0:
        result["tokens"] = [output.token_ids for output in outputs]
    llm.unload()
    group.end_splits()
    return result


def main() -> None:
    job, out_file = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    group = join_group(detect(), EngineOptions())
    end_group_on_uncaught(group)
    results = {}
    for name, (checkpoint, own) in job["runs"].items():
        options = {"model": job["checkpoints"][checkpoint]} | job["options"] | own
        results[name] = run(group, options, job["prompts"])
    gathered = group.comm.all_gather_bytes(json.dumps(results).encode())
    if group.rank == 0:
        for other in map(json.loads, gathered):
            for name, result in other.items():
                results[name] |= result
        out_file.write_text(json.dumps(results))
    group.close()


if __name__ == "__main__":
    main()
