"""``--reproducible any-cpu``: a processor with AVX-512 computes the bits of one with AVX2, and torch runs no operation
whose bits depend on the processor nevertheless."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import FAMILIES, KINDS, make_checkpoint, mixed_prompts
from torch.utils._python_dispatch import TorchDispatchMode
from weight_forms import WEIGHT_FORMS

from labinfer import LLM, SamplingParams
from labinfer.native import compiler
from labinfer.native.targets import PORTABLE, processor_features

DRIVER = Path(__file__).with_name("any_cpu_driver.py")
PROMPTS = [*mixed_prompts(5), [(index * 7) % 500 + 3 for index in range(70)]]
COMPARED = ("qwen2-tied", "qwen3-next-moe", "deepseek-v3", "gpt-oss", "olmo3", "gemma3", "ministral3")
UNPORTABLE = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "addmv",
    "mv",
    "dot",
    "matmul",
    "linear",
    "einsum",
    "sqrt",
    "sqrt_",
)
"""Names of torch's operations whose bits depend on the processor also with ``PORTABLE_TORCH``, beside convolutions: products of MKL and oneDNN,
and MKL's square root, which begins with the processor's approximation."""
SAMPLE = ("qwen3-next-moe", "olmo3", "gpt-oss")


class OperationNames(TorchDispatchMode):
    """Collects the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **kwargs or {})


def compute(folder: Path, runs: dict, *, is_narrow: bool) -> dict:
    """Results of a process of its own, on this processor or as on one with AVX2 only; see ``any_cpu_driver``."""
    cpuinfo, variables = "", {"ATEN_CPU_CAPABILITY": "avx2"} if is_narrow else {}
    if is_narrow:
        (folder / "cpuinfo").write_text(f"flags : {' '.join(sorted(PORTABLE.features))}\n")
        cpuinfo = str(folder / "cpuinfo")
    job, out = folder / "job.json", folder / "out.json"
    job.write_text(json.dumps({"prompts": PROMPTS, "cpuinfo": cpuinfo, "runs": runs}))
    own = {name: value for name, value in os.environ.items() if name not in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")}
    command = [sys.executable, str(DRIVER), str(job), str(out)]
    done = subprocess.run(command, env=own | variables, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.skipif(
    not {"avx512vl", "avx512bw"} | PORTABLE.features <= processor_features(), reason="this processor has no AVX-512"
)
def test_bits_are_those_of_a_processor_with_avx2(tmp_path):
    runs, controls = {}, {}
    for kind in COMPARED:
        directory = str(make_checkpoint(tmp_path / kind, kind))
        for form, options in WEIGHT_FORMS.items():
            runs[f"{kind} {form}"] = (directory, options | {"reproducible": "any-cpu"})
            controls[f"{kind} {form}"] = (directory, options | {"reproducible": "on"})
    narrow, wide = (compute(tmp_path, runs, is_narrow=is_narrow) for is_narrow in (True, False))
    assert all(len(result["rows"]) > 40 for result in wide.values())
    assert [name for name in runs if narrow[name] != wide[name]] == []
    assert compiler.processor().splitlines()[0] not in wide["qwen2-tied bfloat16"]["kernels"]
    narrow, wide = (compute(tmp_path, controls, is_narrow=is_narrow) for is_narrow in (True, False))
    assert all(narrow[name]["fingerprint"] != wide[name]["fingerprint"] for name in controls)
    assert any(narrow[name]["rows"] != wide[name]["rows"] for name in controls)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.slow) for kind in (*KINDS, *FAMILIES)]
)
def test_torch_runs_only_portable_operations(tmp_path, kind, form):
    directory = make_checkpoint(tmp_path / "model", kind)
    options = WEIGHT_FORMS[form] | {"reproducible": True, "block_size": 4, "num_kv_blocks": 400, "threads": 1}
    params = [
        SamplingParams(max_tokens=4, temperature=0.9 * (i % 2), seed=i, logprobs=1, prompt_logprobs=0)
        for i in range(len(PROMPTS))
    ]
    with OperationNames() as seen, LLM(str(directory), **options) as llm:
        llm.generate(PROMPTS, params)
    assert "log_softmax" in seen.names, "the operations of steps are seen"
    assert [name for name in seen.names if name in UNPORTABLE or name.startswith("conv")] == []
