"""The Python and the data in the code blocks of the documentation do what the text beside them says."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint, mixed_prompts
from documents import ROOT, all_blocks, code_blocks, python_block
from safetensors.torch import load_file, save_file
from serving import serving

from labinfer import LLM, SamplingParams
from labinfer.functions.provider import Provider
from labinfer.functions.reference import elementwise, linear
from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.text.reply_format import choose_format
from labinfer.weights.checkpoint_names import CheckpointNames

NUM_LAYERS = CONFIGS["qwen3"]().num_hidden_layers
DEMO = str(ROOT / "labinfer" / "assets" / "demo")
FIRST_LINES = {
    "class AscendProvider": "test_provider_of_a_device",
    "exact = ": "test_comparison_with_the_reference",
    "class ExampleForCausalLM": "test_model_family",
    "with LLM(": "test_offline_python",
    "async with AsyncLLM": "test_async_python",
    "import gradio": "test_gradio_chat",
    "def longest_first": "tests/plugins/test_loading.py",
    "class LastToken": "tests/cluster/test_documented_commands.py",
}
"""By a text in it, the test that runs a block of Python."""


def run_block(text: str, **names: object) -> dict[str, object]:
    """Execute a block in a module's namespace of its own, with the bundled model in place of ``DIR`` and of the model that would be
    downloaded. Returns the namespace."""
    names = {"__name__": "example", **names}
    exec(compile(re.sub(r'"(DIR|Qwen/Qwen3-0.6B)"', repr(DEMO), text), "example.py", "exec"), names)
    return names


def test_every_python_block_has_its_test():
    for block in all_blocks():
        if block.language == "python":
            assert any(text in block.text for text in FIRST_LINES), f"{block.name} is run by no test"


@pytest.mark.parametrize(
    "path", ["README.md", "README.zh-CN.md", "docs/python-api.md", "docs/first-hour.md", "docs/zh/first-hour.md"]
)
def test_offline_python(path, capsys):
    run_block(python_block(path, "with LLM("))
    assert capsys.readouterr().out.strip()


def test_async_python(capsys):
    run_block(python_block("docs/python-api.md", "async with AsyncLLM"))
    assert capsys.readouterr().out.strip()


def test_gradio_chat(monkeypatch):
    """With a stand-in for Gradio that asks once; the engine is a real one."""
    answers: list[str] = []

    async def ask(answer) -> None:
        answers.extend([text async for text in answer("17 + 25 = ?", [])])
        await answer.__globals__["llm"].close()

    gradio = ModuleType("gradio")
    gradio.ChatInterface = lambda answer: SimpleNamespace(launch=lambda: asyncio.run(ask(answer)))
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    run_block(python_block("docs/python-api.md", "import gradio"))
    assert answers[-1] == "42"


@pytest.mark.parametrize("device", ["npu", "cpu"])
def test_provider_of_a_device(device, monkeypatch, register_for_test):
    """As it stands it brings nothing for this device, and a start goes on; for CPUs, it is used by its name."""
    text = python_block("docs/add-a-function.md", "class AscendProvider").replace('"npu"', f'"{device}"')
    calls = {name: getattr(elementwise, name) for name in ("add_rms_norm", "silu_and_mul")}
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    run_block(text, Provider=Provider, torch=torch, register=register_for_test, **calls)
    functions = {"functions": "silu_and_mul=ascend"} if device == "cpu" else {}
    with LLM(autotune=False, threads=1, **functions) as llm:
        (output,) = llm.generate([[{"role": "user", "content": "17 + 25 = ?"}]], SamplingParams(max_tokens=8))
    assert output.text == "42"


def test_comparison_with_the_reference():
    def assert_near(got: torch.Tensor, exact: torch.Tensor) -> None:
        torch.testing.assert_close(got.float(), exact, rtol=2**-8, atol=2**-8 * float(exact.abs().mean()))

    x, weight = torch.randn(5, 64, dtype=torch.bfloat16), torch.randn(96, 64, dtype=torch.bfloat16)
    packed = linear.pack_weight(weight.clone())
    run_block(
        python_block("docs/add-a-function.md", "exact = "),
        torch=torch, x=x, weight=weight, panels=linear, packed=packed, assert_near=assert_near,
    )  # fmt: skip


@pytest.fixture
def register_for_test(add_part):
    """``register`` as documents have it, of parts that are there for one test."""

    def register(kind: str, name: str):
        return lambda part: add_part(kind, name, part) or part

    return register


def test_model_family(register_for_test, tmp_path):
    """A Qwen3 under the names of the example says what it says under its own."""
    full = {"use_sliding_window": False, "layer_types": ["full_attention"] * NUM_LAYERS, "rms_norm_eps": 1e-5}
    directory = make_checkpoint(tmp_path / "qwen3", "qwen3", **full)
    expected = greedy(directory)
    run_block(
        python_block("docs/add-a-model.md", "class ExampleForCausalLM"),
        register=register_for_test,
        Decoder=Decoder, CheckpointNames=CheckpointNames, ConfigFile=ConfigFile, ModelConfig=ModelConfig,
        LayerConfig=LayerConfig, read_attention=read_attention, read_gated_mlp=read_gated_mlp, read_model=read_model,
    )  # fmt: skip
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    for short, long in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
        for name in [name for name in tensors if f".{short}." in name]:
            tensors[name.replace(short, long)] = tensors.pop(name)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"architectures": ["ExampleForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    assert greedy(directory) == expected


def greedy(directory) -> list[list[int]]:
    with LLM(str(directory), dtype="float32", num_kv_blocks=200, threads=1) as llm:
        outputs = llm.generate(mixed_prompts(3), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    return [output.token_ids for output in outputs]


def test_response_template(tmp_path):
    (block,) = (block for block in code_blocks(ROOT / "docs/response-templates.md") if block.language == "json")
    (tmp_path / "own.json").write_text(block.text, encoding="utf-8")
    chosen = choose_format(str(tmp_path / "own.json"), None, "")
    assert chosen is not None and chosen.call is not None


def test_codex_config_is_toml():
    (block,) = (block for block in code_blocks(ROOT / "docs/api.md") if block.text.startswith("model = "))
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    assert tomllib.loads(block.text)["model_providers"]["labinfer"]["wire_api"] == "responses"


def test_batch_of_openais_client(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    (block,) = (block for block in code_blocks(ROOT / "docs/api.md") if block.text.startswith("from openai"))
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"messages": [{"role": "user", "content": "17 + 25 = ?"}]}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.chdir(tmp_path)
    with serving("--files-dir", str(tmp_path / "files")) as server:
        names = run_block(block.text.replace("http://127.0.0.1:8000", server.url))
    assert names["batch"].endpoint == "/v1/chat/completions"
