"""Every rank chooses the same experts from the same bits: mixtures over real ranks, on every transport."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts
from layouts import GREEDY, layouts_for

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.comm.listening import free_port
from labinfer.comm.shared_memory import share_memory
from labinfer.comm.spmd.environment import detect
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.comm.torch_dist import TorchCommunicator
from labinfer.launch.providers import make_registry
from labinfer.launch.tune import prepare_providers
from labinfer.models.families.layers.mixture import Mixture, MixtureConfig
from labinfer.models.families.layers.router import RouterConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.weights.slices import MatrixSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule

CPU = torch.device("cpu")
HIDDEN, NUM_LAYERS = 96, 12
RUNS = ((NUM_LAYERS, 40), (2, 400))
"""Layers and tokens: a sum of many tokens may take another way than that of few."""
MIXTURE = MixtureConfig(
    router=RouterConfig(num_experts=16, num_chosen=4, scores="sigmoid", bias_dims=1),
    intermediate_size=88,
    shared=GatedMLPConfig(intermediate_size=50),
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def gloo(group):
    """The ranks over gloo, whatever the launcher."""
    if group.size == 1:
        pytest.skip("needs two ranks")
    address = group.comm.all_gather_bytes(f"tcp://127.0.0.1:{free_port()}".encode())[0].decode()
    return TorchCommunicator.join(group.progress, address, group.comm.rank, group.size)


@pytest.fixture(params=["all ranks", "two ranks"])
def members(request, group) -> list[range]:
    """Groups into which the ranks are split."""
    if request.param == "all ranks":
        return [range(group.size)]
    if group.size < 3:
        pytest.skip("two ranks are all")
    return [range(2), *(range(rank, rank + 1) for rank in range(2, group.size))]


@pytest.fixture(params=["launcher's transport", "gloo", "shared memory"])
def comm(request, group, members):
    if request.param == "gloo" == group.comm.name:
        pytest.skip("the launcher's transport is gloo")
    transport = request.getfixturevalue("gloo") if request.param == "gloo" else group.comm
    comm = transport.split(members)
    return share_memory(comm) if request.param == "shared memory" else comm


def read_random(part: WeightSlice) -> None:
    """The slice of a tensor whose numbers follow from its name."""
    is_matrix = isinstance(part, MatrixSlice)
    shape = (part.outputs, part.inputs) if is_matrix else part.shape
    ranges = (part.rows, part.columns) if is_matrix else part.ranges
    generator = torch.Generator().manual_seed(sum(map(ord, part.name)))
    whole = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    part.destination.copy_(whole[tuple(slice(*cut) for cut in ranges)])


@pytest.mark.pairwise
@pytest.mark.parametrize("experts", ["columns", "whole"])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "int8")]
)
def test_hidden_states_and_choices_have_equal_bits_on_all_ranks(group, comm, experts, dtype, quantization):
    functions = make_registry(prepare_providers(group, CPU)).select(CPU, dtype, quantization=quantization)
    ctx = StageContext(
        tp=TensorParallelCommunicator(comm),
        functions=functions,
        dtype=dtype,
        first_layer=0,
        last_layer=NUM_LAYERS,
        is_first=True,
        is_last=True,
        experts=experts,
    )
    layers = torch.nn.ModuleList(Mixture(MIXTURE, HIDDEN, ctx) for _ in range(NUM_LAYERS))
    for name, module in layers.named_modules():
        if isinstance(module, WeightedModule):
            module.load(name, read_random)
    for num_layers, num_tokens in RUNS:
        hidden_TD = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
        with torch.inference_mode():
            for layer in layers[:num_layers]:
                x_TD = torch.nn.functional.rms_norm(hidden_TD, (HIDDEN,))
                ids_TA, weights_TA = layer.gate(x_TD)
                hidden_TD = hidden_TD + layer(x_TD)
                for tensor in (ids_TA, weights_TA, hidden_TD):
                    mine = bits(tensor)
                    assert all(torch.equal(mine, other) for other in comm.all_gather(mine))
        assert hidden_TD.isfinite().all()


@pytest.fixture(scope="module")
def checkpoint(group):
    """A checkpoint with experts, made on rank 0 and seen by all ranks of this machine."""
    path = tempfile.mkdtemp(prefix="labinfer-mixture-") if group.rank == 0 else ""
    directory = Path(group.comm.all_gather_bytes(path.encode())[0].decode())
    if group.rank == 0:
        make_checkpoint(directory, "glm4-moe")
    group.comm.barrier()
    yield directory
    group.comm.barrier()
    if group.rank == 0:
        shutil.rmtree(directory)


def test_cuts_of_experts_give_the_tokens_of_one_another(group, checkpoint):
    prompts = mixed_prompts(4)
    greedy, found = SamplingParams(max_tokens=12, ignore_eos=True), []
    for experts in ("columns", "whole"):
        flat = {
            "model": str(checkpoint),
            "tensor_parallel_size": group.size,
            "experts": experts,
            "num_kv_blocks": 64,
            "chunked_prefill_size": 16,
        }
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        outputs = llm.generate(prompts, greedy)
        if llm.is_rank0:
            found.append([output.token_ids for output in outputs])
    assert not found or found[0] == found[1]


@pytest.mark.each_value
@pytest.mark.parametrize("layout", layouts_for(detect().world_size), ids=str)
@pytest.mark.parametrize("experts", ["columns", "whole"])
def test_offloaded_experts_give_the_same_tokens_on_every_layout(group, checkpoint, experts, layout):
    """With memory for half of what the rank with the most experts has."""
    prompts = mixed_prompts(4)
    flat = {"model": str(checkpoint), "quantization": "int8", "num_kv_blocks": 64, "experts": experts} | layout
    resident = LLM.from_options(group, EngineOptions.from_flat(flat))
    expected = resident.generate(prompts, GREEDY)
    most = max(resident.layout.meta(place).expert_bytes for place in resident.layout.topology.places)
    offloaded = LLM.from_options(group, EngineOptions.from_flat(flat | {"expert_offload": most / 2 / 2**30}))
    outputs = offloaded.generate(prompts, GREEDY)
    if offloaded.is_rank0:
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert sum(worker.expert_reads.misses for worker in offloaded.report.workers) > 0
