"""Fingerprint: which part of it a change is in, and that the layout is in none if bits are promised."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from labinfer.base.config import EngineOptions
from labinfer.comm.local import LocalCommunicator
from labinfer.launch.fingerprint import Fingerprint, file_part, take_fingerprint
from labinfer.weights.identity import FileIdentity

LABELS = (
    "config.json",
    "tokenizer.json",
    "model-00001-of-2.safetensors",
    "draft model config.json",
    "chat_template.jinja",
)
STAGES = {1: ((0, 4),), 2: ((0, 3), (3, 4))}


def files(**digests: str) -> dict[str, FileIdentity]:
    return {
        label: FileIdentity(f"/{label}", digests.get(file_part(label).replace(" ", "_"), "0"), False, ["1"])
        for label in LABELS
    }


def layout(num_stages: int = 1, dtypes=(torch.bfloat16,) * 2, experts: str = ""):
    """As much of a layout as a fingerprint reads."""
    topology = SimpleNamespace(
        layers=STAGES[num_stages],
        tp_sizes=(1,) * num_stages,
        num_stages=num_stages,
        stage_ranks=lambda stage: (stage,),
        place=lambda rank: rank,
    )
    return SimpleNamespace(
        topology=topology,
        dtype=dtypes.__getitem__,
        kv_dtype=dtypes.__getitem__,
        quantization_name=lambda place: "none",
        config=SimpleNamespace(layers=[SimpleNamespace(mlp=SimpleNamespace(has_experts=bool(experts)))]),
        experts=(experts,) * num_stages,
    )


def fingerprint(identity=None, at=None, kernels=("linear cpu",), **options) -> Fingerprint:
    flags = {"reproducible": True} | options
    return LocalCommunicator.run(1, lambda comm: take(comm, flags, identity, at, kernels))[0]


def take(comm, flags, identity, at, kernels) -> Fingerprint:
    group = SimpleNamespace(gather_bytes=lambda data: dict(enumerate(comm.all_gather_bytes(data))))
    return take_fingerprint(group, EngineOptions.from_flat(flags), identity or files(), at or layout(), kernels)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"identity": files(model_weights="1")}, "model weights"),
        ({"identity": files(tokenizer="1")}, "tokenizer"),
        ({"identity": files(chat_template="1")}, "chat template"),
        ({"identity": files(model_config="1")}, "model config"),
        ({"at": layout(dtypes=(torch.float16,))}, "dtype"),
        ({"kernels": ("linear reference",)}, "kernels"),
        ({"context_shift": True}, "settings"),
        ({"reranker": "qwen3"}, "settings"),
    ],
)
def test_change_is_named_by_its_part(changed, part):
    before, now = fingerprint(), fingerprint(**changed)
    assert part in before.differences(now) and before.digest != now.digest
    assert before.differences(fingerprint()) == {} and before.digest == fingerprint().digest


def test_layout_batches_and_drafts_are_in_it_only_without_the_promise():
    others = {"at": layout(2), "identity": files(draft_model="1"), "max_num_seqs": 3, "block_size": 32}
    assert fingerprint(**others) == fingerprint()
    free = fingerprint(reproducible=False)
    assert free.digest != fingerprint().digest
    assert set(free.differences(fingerprint(**others, reproducible=False))) == {"layout", "draft model"}


def test_dtypes_are_those_of_layers():
    mixed = fingerprint(at=layout(2, (torch.float32, torch.bfloat16)))
    assert mixed.parts["dtype"] == "layers 0-2 float32, layers 3-3 bfloat16"


def test_ranks_have_one_fingerprint_of_all_their_kernels():
    own = [("norm cpu", "linear cpu"), ("linear cpu", "head cpu")]
    found = LocalCommunicator.run(2, lambda comm: take(comm, {}, None, None, own[comm.rank]))
    assert found[0] == found[1] and found[0].parts["kernels"] == "head cpu; linear cpu; norm cpu"


def test_sampling_defaults_are_those_that_differ_from_labinfers():
    plain = fingerprint().with_defaults({"temperature": 0.0, "speculate": False, "stop": ()})
    assert plain.parts["sampling defaults"] == "LABInfer's"
    assert fingerprint().with_defaults({"temperature": 0.5}).parts["sampling defaults"] == "temperature 0.5"


def test_cut_of_experts_is_named():
    """Segments of columns and whole experts are added in different orders."""
    columns, whole = (fingerprint(at=layout(experts=cut)) for cut in ("columns", "whole"))
    assert columns.differences(whole) == {"experts": ("columns", "whole")}
    assert "experts" not in fingerprint().parts


def test_digest_is_computed_once_for_a_fingerprint_and_anew_for_a_changed_copy():
    first = fingerprint()
    assert first.digest is first.digest
    assert first.with_defaults({"temperature": 0.5}).digest != first.digest
