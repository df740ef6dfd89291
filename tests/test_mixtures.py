"""Mixtures of experts through ``LLM`` in one process, against Transformers in fp32: tokens and logits in every way of the engine."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
import torch.nn.functional as F
from checkpoints import CONFIGS, MIXTURES, make_checkpoint, transformers_logprobs
from golden import BEAM_PROMPTS, BEAMS, NUM_TOKENS, PROMPTS, check_answers, golden, greedy, recorded
from safetensors.torch import load_file, save_file
from toy_format import write_toy

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError

SOME = PROMPTS[1:4]


def tokens(outputs: list) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_counted_loads_are_those_of_the_tokens_that_ran():
    with recorded(golden("qwen3-moe").directory, enable_prefix_caching=False) as (llm, _):
        greedy(llm, SOME)
        loads, report = llm.report.expert_tokens(), llm.report.as_dict()
    ran = sum(map(len, SOME)) + len(SOME) * (NUM_TOKENS - 1)
    assert set(loads) == {0, 2, 3}  # layer 1 is dense
    asked = len(SOME) * NUM_TOKENS  # the last layer runs the rows that are sampled, and no others
    assert {layer: sum(counts) for layer, counts in loads.items()} == {0: 3 * ran, 2: 3 * ran, 3: 3 * asked}
    assert all(len(counts) == 11 for counts in loads.values())
    assert report["expert_tokens"]["2"] == loads[2]
    assert "expert load" in llm.report.format()


def test_quantised_experts_are_decoded_one_by_one(tmp_path):
    """Those of a format that has a tensor of codes for each: the tokens of the same values stored plainly."""
    make_checkpoint(tmp_path / "toy", "qwen2-moe")
    routers = [f"model.layers.{layer}.mlp.{name}" for layer in (1, 3) for name in ("gate", "shared_expert_gate")]
    write_toy(tmp_path / "toy", tmp_path / "plain", ["lm_head", "model.embed_tokens", *routers])
    answers = []
    for name in ("toy", "plain"):
        with LLM(str(tmp_path / name), num_kv_blocks=64) as llm:
            answers.append(tokens(greedy(llm, SOME)))
    assert answers[0] == answers[1]


# The engine's ways.


@pytest.mark.parametrize(
    ("kind", "chunk", "mode"),
    [("qwen2-moe", 1, "recompute"), ("minimax-m2", 16, "swap"), ("glm4-moe-groups", 512, "recompute")],
)
def test_chunks_hits_and_preemption_change_no_token(kind, chunk, mode):
    reference = golden(kind)
    expected = reference.tokens[1:4], reference.logits[1:4]
    options = {"chunked_prefill_size": chunk, "preemption_mode": mode, "swap_space": 0.01 if mode == "swap" else 0.0}
    with recorded(reference.directory, num_kv_blocks=48, **options) as (llm, rows):
        check_answers(greedy(llm, SOME), rows, *expected)
        counts = llm.report.counts
        assert counts["preemptions"] > 0 and (counts["swaps"] > 0) == (mode == "swap")
    with recorded(reference.directory, **options) as (llm, rows):
        for _ in range(2):
            rows.clear()
            check_answers(greedy(llm, SOME), rows, *expected)
        assert llm.report.counts["found"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("chunk", [1, 16, 512])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_every_family_in_every_chunk_and_preempted(kind, chunk, mode):
    test_chunks_hits_and_preemption_change_no_token(kind, chunk, mode)


@pytest.mark.parametrize("kind", ["ernie4.5-moe", "glm4-moe-groups"])
def test_beams_are_those_of_transformers(kind):
    reference = golden(kind)
    with recorded(reference.directory) as (llm, _):
        outputs = llm.generate(BEAM_PROMPTS, SamplingParams(ignore_eos=True, n=BEAMS["num_beams"], **BEAMS))
    assert [[item.token_ids for item in output.completions] for output in outputs] == reference.beams


def rounded_to_int8(weight_OI: torch.Tensor) -> torch.Tensor:
    """A scale for each output, whose largest weight is 127 or -127 of it."""
    scales = weight_OI.abs().amax(dim=1, keepdim=True) / 127
    return (weight_OI / scales).round() * scales


def rounded_to_int4(weight_OI: torch.Tensor, group: int = 64) -> torch.Tensor:
    """A scale in float16 for each group of inputs, so that its largest weight is -8 to -6 of it: that with the least squares."""
    wide = F.pad(weight_OI, (0, -weight_OI.shape[1] % group)).view(len(weight_OI), -1, group)
    extreme = wide.gather(2, wide.abs().argmax(dim=2, keepdim=True))
    tries = []
    for quarters in range(-32, -23):
        scales = (extreme / (quarters / 4)).half().float()  # these are large enough for float16
        tries.append((wide / torch.where(scales == 0, 1, scales)).round().clamp(-8, 7) * scales)
    errors = torch.stack([(rounded - wide).square().sum(dim=2, keepdim=True) for rounded in tries])
    best = torch.stack(tries).gather(0, errors.argmin(dim=0, keepdim=True).expand(1, *wide.shape))[0]
    return best.flatten(1)[:, : weight_OI.shape[1]].contiguous()


@pytest.mark.parametrize(("quantization", "rounded"), [("int8", rounded_to_int8), ("int4", rounded_to_int4)])
def test_rounded_experts_are_those_of_rounded_weights_and_activations(tmp_path, monkeypatch, quantization, rounded):
    """The reference is Transformers with weights rounded before, and the inputs of all products but the routers' rounded row
    by row. A sum that is one bit different may round an input to another value, or send a token to another expert: how
    much that makes is told by the reference beside itself, with products in float64.
    """
    multiply, num_experts = F.linear, 7

    def round_matrices(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                tensors[name] = rounded_to_int8(tensor) if quantization == "int8" else rounded_to_int4(tensor, 32)
            elif name.endswith("_proj.weight"):
                tensors[name] = rounded(tensor)

    directory = golden("hunyuan-moe").directory
    twin = broken(directory, tmp_path / "twin", round_matrices)

    def reference(dtype: torch.dtype) -> list[float]:
        def multiply_rounded(x, weight, bias=None):
            if len(weight) == num_experts:
                return multiply(x, weight, bias)
            scale = x.abs().amax(dim=-1, keepdim=True) / 127
            rounded_x = (x / torch.where(scale == 0, 1, scale)).round() * scale
            return multiply(rounded_x.to(dtype), weight.to(dtype), bias).float()

        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", multiply_rounded)
            return transformers_logprobs(twin, SOME, experts_implementation="eager")

    def differences(logprobs: list[float]) -> list[float]:
        """Differences from the reference, sorted, in its standard deviations, less the one that another expert makes."""
        return sorted(abs(a - b) / statistics.stdev(exact) for a, b in zip(logprobs, exact, strict=True))[:-1]

    exact = reference(torch.float32)
    noise = differences(reference(torch.float64))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(directory), num_kv_blocks=64, quantization=quantization) as llm:
        outputs = llm.generate(SOME, params)
    errors = differences([entry.logprob for output in outputs for entry in output.prompt_logprobs])
    # Rounding weights to 4 bits alone makes half of a standard deviation.
    assert statistics.median(errors) < 2 * statistics.median(noise) + 0.001
    assert statistics.fmean(errors) < 2 * statistics.fmean(noise) + 0.01


# Bad input.


def broken(directory, target, change, **values) -> str:
    """A copy of a checkpoint whose tensors or config are changed."""
    target.mkdir()
    for path in directory.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    return str(target)


@pytest.mark.parametrize("kind", ["glm4-moe", "minimax-m2"])
def test_layers_that_draft_tokens_are_left_out(tmp_path, caplog, kind):
    reference = golden(kind)
    extra = {
        "model.layers.4.eh_proj.weight": torch.ones(2, 2),
        "model.layers.4.mlp.experts.0.up_proj.weight": torch.ones(3),
    }
    with (
        caplog.at_level("INFO"),
        LLM(broken(reference.directory, tmp_path / "mtp", lambda t: t.update(extra)), num_kv_blocks=64) as llm,
    ):
        assert tokens(greedy(llm, SOME)) == reference.tokens[1:4]
    assert "2 tensors of model.layers.4 are not loaded" in caplog.text


@pytest.mark.parametrize("kind", ["glm4-moe", "minimax-m2", "deepseek-v2", "deepseek-v3", "glm-4.7-flash", "kimi-k2"])
def test_layers_behind_the_last_that_draft_nothing_are_refused(tmp_path, kind):
    """``num_hidden_layers`` is 3 in a checkpoint of four layers, with and without an MTP layer."""
    layers = {
        key: values[:3] for key in ("mlp_layer_types", "layer_types") if (values := getattr(CONFIGS[kind](), key, None))
    }
    for name, extra in (("own", {}), ("mtp", {"model.layers.4.eh_proj.weight": torch.ones(2, 2)})):
        directory = broken(
            golden(kind).directory,
            tmp_path / name,
            lambda t, extra=extra: t.update(extra),
            num_hidden_layers=3,
            **layers,
        )
        with pytest.raises(
            UserError, match=r"has tensor model\.layers\.3\.[^\n]* and \d+ more, which the model [^\n]*$"
        ):
            LLM(directory, num_kv_blocks=64)


def stack_experts(tensors: dict[str, torch.Tensor], count: int) -> None:
    """Put that many experts of layer 2 into two tensors."""
    prefix = "model.layers.2.mlp.experts"
    experts = [[tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up", "down")] for e in range(11)]
    tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(expert[:2]) for expert in experts[:count]])
    tensors[f"{prefix}.down_proj"] = torch.stack([expert[2] for expert in experts[:count]])


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.2.mlp.experts.5.up_proj.weight"),
            {},
            r"has no tensor model.layers.2.mlp.experts.5.up_proj.weight of shape \[44, 72\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.2.mlp.experts.5.down_proj.weight": torch.zeros(72, 43)}),
            {},
            r"down_proj.weight has shape \[72, 43\], but the config implies \[72, 44\]",
        ),
        (
            lambda tensors: None,
            {"num_local_experts": 10},
            r"mlp.gate.weight has shape \[11, 72\], but the config implies \[10, 72\]",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.3.mlp.experts.10." in name],
            {},
            r"has no tensor model.layers.3.mlp.experts.10.gate_proj.weight of shape \[44, 72\]",
        ),
        (
            lambda tensors: stack_experts(tensors, 10),
            {},
            r"experts.gate_up_proj has shape \[10, 88, 72\], but the config implies \[11, 88, 72\]",
        ),
        (lambda tensors: None, {"num_experts_per_tok": 12}, "12 experts are to be chosen for each token, of 11"),
        (lambda tensors: None, {"architectures": ["Qwen9MoeForCausalLM"]}, "architecture 'Qwen9MoeForCausalLM' is not"),
    ],
)
def test_broken_checkpoints_are_refused_before_weights_are_loaded(tmp_path, monkeypatch, change, values, message):
    directory = golden("qwen3-moe").directory

    def never(*args):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("labinfer.launch.load_stage.load_weights", never)
    with pytest.raises(UserError, match=message):
        LLM(broken(directory, tmp_path / "broken", change, **values), num_kv_blocks=64)


def test_every_router_bias_of_the_golden_checkpoints_is_random():
    """Transformers starts them at zero, where a forgotten one would not show."""
    for kind in ("ernie4.5-moe", "glm4-moe", "glm4-moe-groups", "minimax-m2"):
        tensors = load_file(golden(kind).directory / "model.safetensors")
        biases = [tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")]
        assert biases and all(bias.std() > 0.05 for bias in biases), kind
