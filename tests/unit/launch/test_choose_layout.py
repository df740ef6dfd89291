"""``--layout`` on one rank: a plan for this machine is followed, with its KV tokens, ``auto`` does nothing, and other models' plans are refused."""

from __future__ import annotations

import re

import msgspec
import pytest
from golden import PROMPTS, golden

from labinfer import LLM, SamplingParams
from labinfer.base.config import EngineOptions
from labinfer.base.errors import CollectiveError, UserError
from labinfer.cli.main import main
from labinfer.comm.group.rank_group import join_group
from labinfer.comm.spmd.environment import detect
from labinfer.launch import cgroup_limits
from labinfer.launch.choose_layout import choose_layout
from labinfer.launch.layout import kv_capacity
from labinfer.launch.measure.probe_layout import model_name
from labinfer.models.registry import load_config
from labinfer.planner.saved_plan import SavedPlan, SavedStage

KIND = "qwen2-tied"


def write_plan(path, **changes) -> str:
    """A plan of one stage on this machine."""
    directory = golden(KIND).directory
    stage = {"machine": detect().node_name, "layers": 4, "tp_size": 1, "dtype": "float32", "quantization": "none"}
    model = changes.pop("model", model_name(load_config(directory)))
    path.write_bytes(msgspec.json.encode(SavedPlan(model=model, stages=[SavedStage(**(stage | changes))])))
    return str(path)


def join(**flat):
    options = EngineOptions.from_flat({"model": str(golden(KIND).directory)} | flat)
    return join_group(detect(), options), options


def test_a_rank_alone_has_nothing_to_choose():
    group, options = join(layout="auto")
    texts: list[str] = []
    assert choose_layout(group, options, texts.append) == join()[1] and not texts


def test_plan_for_this_machine_is_followed(tmp_path):
    path = write_plan(tmp_path / "plan.json")
    group, options = join(layout=path)
    chosen = choose_layout(group, options)
    assert chosen.parallel.layers == (4,) and chosen.parallel.layout == "" and chosen.model.dtype == ("float32",)
    with LLM(str(golden(KIND).directory), layout=path, autotune=False) as llm:
        (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0))
    assert output.token_ids == golden(KIND).tokens[0][:8]


def test_start_by_a_plan_has_its_kv_tokens(tmp_path, monkeypatch, capfd):
    """With as much memory as when it was made, with a little less, with much less, and with options of its own."""
    free = memory = 1 << 30
    model, path = str(golden(KIND).directory), str(tmp_path / "plan.json")
    options = {"block_size": 4, "max_num_seqs": 512, "memory_utilization": 0.01}
    for module in (cgroup_limits, kv_capacity):
        monkeypatch.setattr(module, "free_memory", lambda device, given=0: free)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["plan", "--auto", "--save", path, "--model", model, "--threads", "1", "--no-autotune", *flags]) == 0
    told = int(re.search(r"KV tokens: (\d+)", capfd.readouterr().out)[1])
    assert SavedPlan.read(path).num_tokens == told < 512 * load_config(golden(KIND).directory).max_position

    def start(**changes) -> tuple[int, str]:
        with LLM(model, layout=path, autotune=False, threads=1, **(options | changes)) as llm:
            return llm.capacity.sizes.num_blocks * 4, capfd.readouterr().err

    for left in (1.0, 0.99):
        free = int(left * memory)
        had, text = start()
        assert had == told and f"KV cache capacity {told} tokens\n" in text and "fewer than" not in text
    free = int(0.9 * memory)
    had, text = start()
    assert (
        had < told
        and f"KV cache: {had} tokens fit, fewer than the {told} of the plan: stage 0 has less free memory" in text
    )
    free = memory
    had, text = start(max_num_seqs=511)
    assert had > told and f"the plan's {told} KV cache tokens do not apply" in text
    assert ": --max-num-seqs 512 in the plan, 511 here\n" in text
    assert start(num_kv_blocks=100)[0] == 400


def test_plan_of_another_model_or_machine_is_refused(tmp_path):
    for changes, text in (({"model": "other"}, "another model"), ({"machine": "elsewhere"}, "a stage on elsewhere")):
        group, options = join(layout=write_plan(tmp_path / "plan.json", **changes))
        with pytest.raises(CollectiveError, match=rf"--layout \S+: the plan .*{text}"):
            choose_layout(group, options)


def test_errors_of_the_library_name_its_keywords():
    with pytest.raises(UserError, match="layout auto already sets layers; leave one of them out"):
        LLM(layout="auto", layers=[2, 2])
