"""Keywords of other engines, and messages about flags in Python."""

from __future__ import annotations

import pytest

from labinfer.base.errors import UserError
from labinfer.base.other_engines import as_keywords, read_keywords


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu_memory_utilization": 0.9}, "unknown option 'gpu_memory_utilization' (did you mean memory_utilization?)"),
        ({"model ": "demo"}, "unknown option 'model ' (did you mean model?)"),
        ({"max_seqs": 3}, "unknown option 'max_seqs' (did you mean max_num_seqs?)"),
        ({"n_ctx": 4096}, "unknown option 'n_ctx' (did you mean max_model_len?)"),
        ({"trust_remote_code": True}, "unknown option 'trust_remote_code'; leave it out: the code of a checkpoint is never run"),
        ({"enable_lora": True}, "unknown option 'enable_lora': LoRA adapters are not supported; merge the adapter into"),
        ({"cpu_offload_gb": 4}, "unknown option 'cpu_offload_gb' (did you mean device cuda,cpu on two ranks, or expert_offload for"),
        ({"data_parallel_size": 2}, "unknown option 'data_parallel_size': a server runs one replica of the model; start one"),
        ({"revision": "v2"}, "unknown option 'revision': the hub's default revision is loaded; download another one, and give its directory as model"),
        ({"temperature": 0.8}, "'temperature' is no option of the engine; give it to SamplingParams"),
        ({"tensor_parallel_size": 2, "tp": 2}, "tp is tensor_parallel_size, which is given too"),
    ],
)  # fmt: skip
def test_keywords_of_other_engines_lead_to_ours(values, message):
    with pytest.raises(UserError) as caught:
        read_keywords(values)
    assert str(caught.value).startswith(message)


def test_keywords_with_the_same_meaning_are_taken():
    assert read_keywords({"tp": 2, "pp_size": 3, "model": "demo"}) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "model": "demo",
    }


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("--max-num-seqs 0", "max_num_seqs 0"),
        ("needs 4 ranks; change -tp and -pp", "needs 4 ranks; change tensor_parallel_size and pipeline_parallel_size"),
        ("choose with -q, such as -q none,int8", "choose with quantization, such as quantization none,int8"),
        ("a --plugin registers them", "a plugins registers them"),
        ("write --trace x.json", "write trace x.json"),
        ("mpirun -n 2, or model qwen-tp", "mpirun -n 2, or model qwen-tp"),
    ],
)
def test_python_errors_name_keywords(message, expected):
    assert as_keywords(message) == expected
