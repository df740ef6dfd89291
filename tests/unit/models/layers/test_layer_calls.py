"""Calls that layers name: those that a batch makes, at this rank's sizes."""

from __future__ import annotations

import pytest
from tiny_llama import model_of, write

from labinfer.functions.calls import (
    AddRMSNormCall,
    GatedActivationCall,
    LinearCall,
    PagedAttentionCall,
    RotateAndWriteCall,
    collect_calls,
)
from labinfer.models.registry import load_config


def product(target: str, outputs: int, inputs: int) -> LinearCall:
    return LinearCall(target=target, quantization="none", outputs=outputs, inputs=inputs)


@pytest.mark.parametrize("tied", [False, True])
def test_calls_of_a_whole_model(tmp_path, tied):
    config = load_config(write(tmp_path, tie_word_embeddings=tied)[0])
    assert collect_calls(model_of(config)) == {
        product("layer.linear", 80, 48): 2,  # 6 + 2 + 2 heads of 8
        product("layer.linear", 48, 48): 2,
        product("layer.linear", 128, 48): 2,
        product("layer.linear", 48, 64): 2,
        product("vocabulary.linear", 50, 48): 1,
        AddRMSNormCall(48): 5,
        GatedActivationCall(64): 2,
        RotateAndWriteCall(heads=6, kv_heads=2, head_size=8, rotary_size=8): 2,
        PagedAttentionCall(head_ptr=(0, 3, 6), head_size=8, window=0): 2,
    }


def test_calls_of_one_rank_of_a_first_stage(tmp_path):
    """More ranks than KV heads: the second one's two query heads read different ones. Only the last stage has a head."""
    config = load_config(write(tmp_path)[0])
    assert collect_calls(model_of(config, tp_rank=1, tp_size=4, layers=(0, 1))) == {
        product("layer.linear", 48, 48): 1,  # 2 + 2 + 2 heads of 8
        product("layer.linear", 48, 16): 2,  # 2 heads of 8, and 16 columns
        product("layer.linear", 32, 48): 1,
        AddRMSNormCall(48): 2,
        GatedActivationCall(16): 1,
        RotateAndWriteCall(heads=2, kv_heads=2, head_size=8, rotary_size=8): 1,
        PagedAttentionCall(head_ptr=(0, 1, 2), head_size=8, window=0): 1,
    }
