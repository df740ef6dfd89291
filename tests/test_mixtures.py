"""Mixtures of experts through ``LLM`` in one process, against Transformers in fp32: tokens, logits and every choice of experts."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
import torch.nn.functional as F
from checkpoints import CONFIGS, FAMILIES, make_checkpoint, mixed_prompts, transformers_greedy, transformers_logprobs
from safetensors.torch import load_file, save_file
from toy_format import METHOD, read_toy_config, write_toy
from transformers import AutoModelForCausalLM

from labinfer import LLM, SamplingParams
from labinfer.errors import UserError
from labinfer.layers.mixture import Mixture
from labinfer.layers.router import Router
from labinfer.weights.formats.registry import METHODS

KINDS = [kind for kind in FAMILIES if "moe" in kind or kind == "minimax-m2"]
NUM_TOKENS = 64
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = mixed_prompts(4)[1:]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(kind)``: a checkpoint and Transformers' greedy tokens of ``PROMPTS``, made once."""
    known = {}

    def make(kind: str):
        if kind not in known:
            directory = make_checkpoint(tmp_path_factory.mktemp("mixtures") / kind, kind)
            known[kind] = directory, [item["token_ids"] for item in transformers_greedy(directory, PROMPTS, NUM_TOKENS)]
        return known[kind]

    return make


def greedy(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_experts_are_those_of_transformers_at_every_layer_and_token(made, kind):
    directory, wanted = made(kind)
    prompt, answer = PROMPTS[1], wanted[1]
    ours: dict[int, list[torch.Tensor]] = {}
    with LLM(str(directory), num_kv_blocks=64, enable_prefix_caching=False) as llm:
        for number, layer in llm._parts.worker.runner.model.model.layers.items():
            if isinstance(layer.mlp, Mixture):
                record(layer.mlp.gate, ours.setdefault(int(number), []))
        (output,) = llm.generate([prompt], GREEDY)
    assert output.token_ids == answer
    theirs = transformers_choices(directory, prompt + answer[:-1])
    assert theirs.keys() == ours.keys() and ours
    for number, wanted_TA in theirs.items():
        assert torch.equal(torch.cat(ours[number]), wanted_TA), f"layer {number}"


def record(gate: Router, ids: list[torch.Tensor]) -> None:
    gate.register_forward_hook(lambda module, given, output: ids.append(output[0].sort(dim=1).values))


@torch.no_grad()
def transformers_choices(directory, token_ids: list[int]) -> dict[int, torch.Tensor]:
    """Each token's experts in ascending order, by layer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    chosen: dict[int, torch.Tensor] = {}

    def keep(number: int, given: tuple) -> None:
        chosen[number] = given[1].sort(dim=-1).values

    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.experts.register_forward_pre_hook(lambda module, given, number=number: keep(number, given))
    model(torch.tensor([token_ids]))
    return chosen


def test_counted_loads_are_those_of_the_tokens_that_ran(made):
    directory, _ = made("qwen3-moe")
    with LLM(str(directory), num_kv_blocks=64, enable_prefix_caching=False) as llm:
        greedy(llm)
        loads, report = llm.report.expert_tokens(), llm.report.as_dict()
    ran = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_TOKENS - 1)
    assert set(loads) == {0, 2, 3}  # layer 1 is dense
    assert all(sum(tokens) == 3 * ran and len(tokens) == 11 for tokens in loads.values())
    assert report["expert_tokens"]["2"] == loads[2]
    assert "expert load" in llm.report.format()


# Fused tensors and both spellings.


def stack_experts(directory, target) -> None:
    """The same checkpoint with the experts of a layer in two tensors, as newer ones have them, and the older key."""
    target.mkdir()
    tensors = load_file(directory / "model.safetensors")
    stacks: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in [name for name in tensors if ".mlp.experts." in name]:
        prefix, _, rest = name.partition(".mlp.experts.")
        expert, kind, _ = rest.split(".")
        stacks.setdefault(prefix, {})[int(expert), kind] = tensors.pop(name)
    for prefix, parts in stacks.items():
        experts = range(1 + max(expert for expert, _ in parts))
        both = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in experts]
        tensors[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{prefix}.mlp.experts.down_proj"] = torch.stack([parts[e, "down_proj"] for e in experts])
    save_file(tensors, target / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    if "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    (target / "config.json").write_text(json.dumps(values))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((directory / name).read_bytes())


@pytest.mark.parametrize("kind", ["qwen3-moe", "glm4-moe", "qwen3.5-moe"])
def test_stacked_experts_give_the_same_tokens(made, tmp_path, kind):
    directory, wanted = made(kind)
    stack_experts(directory, tmp_path / "stacked")
    with LLM(str(tmp_path / "stacked"), num_kv_blocks=64) as llm:
        assert greedy(llm) == wanted


def test_quantised_experts_are_decoded_one_by_one(tmp_path, monkeypatch):
    """Those of a format that has a tensor of codes for each: the tokens of the same values stored plainly."""
    monkeypatch.setitem(METHODS, METHOD, read_toy_config)
    make_checkpoint(tmp_path / "toy", "qwen2-moe")
    routers = [f"model.layers.{layer}.mlp.{name}" for layer in (1, 3) for name in ("gate", "shared_expert_gate")]
    write_toy(tmp_path / "toy", tmp_path / "plain", ["lm_head", "model.embed_tokens", *routers])
    answers = []
    for name in ("toy", "plain"):
        with LLM(str(tmp_path / name), num_kv_blocks=64) as llm:
            answers.append(greedy(llm))
    assert answers[0] == answers[1]


# The engine's ways.


@pytest.mark.parametrize(
    ("kind", "chunk", "mode"),
    [("qwen2-moe", 1, "recompute"), ("minimax-m2", 16, "swap"), ("glm4-moe-groups", 512, "recompute")],
)
def test_chunks_hits_and_preemption_change_no_token(made, kind, chunk, mode):
    directory, wanted = made(kind)
    options = {"block_size": 4, "chunked_prefill_size": chunk, "preemption_mode": mode}
    with LLM(str(directory), num_kv_blocks=48, **options) as llm:
        assert greedy(llm) == wanted
        assert llm.report.counts["preemptions"] > 0
    with LLM(str(directory), num_kv_blocks=300, **options) as llm:
        assert greedy(llm) == wanted and greedy(llm) == wanted
        assert llm.report.counts["found"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 16, 512])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_every_family_in_every_chunk_and_preempted(made, kind, chunk, mode):
    test_chunks_hits_and_preemption_change_no_token(made, kind, chunk, mode)


def test_beams_are_those_of_transformers(made):
    directory, _ = made("ernie4.5-moe")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with LLM(str(directory), num_kv_blocks=200, block_size=4) as llm:
        (output,) = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=12, num_beams=3, n=3, ignore_eos=True))
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor([PROMPTS[1]]),
            attention_mask=torch.ones(1, len(PROMPTS[1]), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            num_beams=3,
            num_return_sequences=3,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert [item.token_ids for item in output.completions] == wanted[:, len(PROMPTS[1]) :].tolist()


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
def test_rounded_experts_differ_from_their_values_by_activations_alone(made, tmp_path, quantization, rounded):
    def round_matrices(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                tensors[name] = rounded_to_int8(tensor)
            elif name.endswith("_proj.weight"):
                tensors[name] = rounded(tensor)

    directory, _ = made("hunyuan-moe")
    exact = transformers_logprobs(broken(directory, tmp_path / "twin", round_matrices), PROMPTS)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(directory), num_kv_blocks=64, quantization=quantization) as llm:
        outputs = llm.generate(PROMPTS, params)
    got = [one.logprob for output in outputs for one in output.prompt_logprobs]
    errors = [abs(a - b) for a, b in zip(got, exact, strict=True)]
    assert statistics.fmean(errors) < 0.07 * statistics.stdev(exact)  # rounding to 4 bits alone makes half of it


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
def test_layers_that_draft_tokens_are_left_out(made, tmp_path, caplog, kind):
    directory, wanted = made(kind)
    extra = {
        "model.layers.4.eh_proj.weight": torch.ones(2, 2),
        "model.layers.4.mlp.experts.0.up_proj.weight": torch.ones(3),
    }
    with (
        caplog.at_level("INFO"),
        LLM(broken(directory, tmp_path / "mtp", lambda t: t.update(extra)), num_kv_blocks=64) as llm,
    ):
        assert greedy(llm) == wanted
    assert "2 tensors of model.layers.4 are left out" in caplog.text


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
            r"down_proj.weight has shape \[72, 43\], but the config asks for \[72, 44\]",
        ),
        (
            lambda tensors: None,
            {"num_local_experts": 10},
            r"mlp.gate.weight has shape \[11, 72\], but the config asks for \[10, 72\]",
        ),
        (lambda tensors: None, {"num_experts_per_tok": 12}, "12 experts are to be chosen for each token, of 11"),
        (lambda tensors: None, {"architectures": ["Qwen9MoeForCausalLM"]}, "architecture 'Qwen9MoeForCausalLM' is not"),
    ],
)
def test_broken_checkpoints_are_refused_before_weights_are_loaded(made, tmp_path, monkeypatch, change, values, message):
    directory, _ = made("qwen3-moe")

    def never(*args):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("labinfer.executor.build.load_weights", never)
    with pytest.raises(UserError, match=message):
        LLM(broken(directory, tmp_path / "broken", change, **values), num_kv_blocks=64)


def test_every_router_bias_of_the_golden_checkpoints_is_random(made):
    """Transformers starts them at zero, where a forgotten one would not show."""
    biased = {kind for kind in KINDS if kind.startswith(("glm", "ernie", "minimax"))}
    for kind in biased:
        tensors = load_file(made(kind)[0] / "model.safetensors")
        biases = [tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")]
        assert biases and all(bias.std() > 0.05 for bias in biases), kind
    assert biased <= set(CONFIGS)
