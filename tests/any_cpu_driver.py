"""Runs jobs with ``--reproducible`` in one process, on this processor or as if it had AVX2 only.

``python any_cpu_driver.py JOB_FILE OUT_FILE``. The job has ``prompts``, ``runs``: (checkpoint directory, options of ``LLM``) by name, and ``cpuinfo``:
a file to read instead of /proc/cpuinfo, or "". With such a file, compiled functions are those of x86-64-v3, as a processor with AVX2 would compile
them. The results are, by name of the run, a digest of every row of logits, the bits of the log-probabilities, and the fingerprint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cluster"))

from bits_driver import RowDigests

from labinfer import LLM, SamplingParams
from labinfer.functions.cpu import library
from labinfer.native import targets
from labinfer.native.targets import PORTABLE


def narrow(cpuinfo: Path) -> None:
    """Let this process find the processor of ``cpuinfo``, and compile for x86-64-v3 instead of the processor that it has."""
    build, targets.CPUINFO = library.build, cpuinfo
    library.build = lambda *args, target=None, **named: build(*args, target=target or PORTABLE, **named)


def run(directory: str, options: dict, prompts: list[list[int]]) -> dict:
    params = [
        SamplingParams(
            max_tokens=8,
            ignore_eos=True,
            seed=index,
            temperature=0.9 * (index % 2),
            typical_p=0.8 if index % 4 == 1 else 1.0,
            logprobs=1,
            prompt_logprobs=0,
        )
        for index in range(len(prompts))
    ]
    with LLM(directory, block_size=4, num_kv_blocks=400, threads=1, chunked_prefill_size=16, **options) as llm:
        runner = llm._parts.worker.runner
        recorder = runner.sampler = RowDigests(runner.sampler)
        outputs = llm.generate(prompts, params)
        measured = [[*filter(None, out.prompt_logprobs), *out.completions[0].logprobs] for out in outputs]
        return {
            "rows": recorder.digests,
            "tokens": [out.token_ids for out in outputs],
            "logprobs": [[each.logprob.hex() for each in of_prompt] for of_prompt in measured],
            "fingerprint": llm.fingerprint.digest,
            "kernels": llm.fingerprint.parts["kernels"],
        }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["cpuinfo"]:
        narrow(Path(job["cpuinfo"]))
    results = {name: run(directory, options, job["prompts"]) for name, (directory, options) in job["runs"].items()}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
