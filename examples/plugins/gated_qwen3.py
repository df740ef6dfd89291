"""A model family that nobody has published: Qwen3 with a learned gate on each attention head (as in Qiu et al. 2025, arXiv:2505.06708).

    python launch.py --model DIR --plugin examples/plugins/gated_qwen3.py --prompt "17 + 25 = ?"

runs a checkpoint whose config.json is Qwen3's with ``"architectures": ["GatedQwen3ForCausalLM"]``, on any layout. In addition to Qwen3's tensors,
each layer has ``self_attn.gate_proj.weight``, (heads, hidden size): the output of a head is multiplied with the sigmoid of its gate.
A family is a config (what is built) and a module (what is computed); the engine handles ranks, caches and batches.
"""

from dataclasses import dataclass, replace

from labinfer import register
from labinfer.models.layers.attention import Attention, AttentionConfig
from labinfer.models.layers.linear import MergedColumnParallelLinear
from labinfer.models.qwen3 import Qwen3ForCausalLM


class GatedAttention(Attention):
    """Qwen3's attention, each head of which has a gate: a function of the layer's input."""

    def __init__(self, config, hidden_size, ctx):
        super().__init__(config, hidden_size, ctx)
        gates = ("gate_proj", config.num_heads, self.shard.query)  # its name, its outputs, and those of this rank
        self.gate_proj = MergedColumnParallelLinear(hidden_size, [gates], False, ctx)

    def attend(self, x_TD, batch, cache, angles, output_rows=None):
        heads_TI = super().attend(x_TD, batch, cache, angles, output_rows)
        if output_rows is not None:  # the last layer computes only the rows whose logits are needed
            x_TD = x_TD[output_rows.rows_R]
        gate_TH = self.gate_proj(x_TD).sigmoid()
        return (heads_TI.unflatten(1, (gate_TH.shape[1], -1)) * gate_TH.unsqueeze(-1)).flatten(1)


@dataclass(frozen=True, kw_only=True)
class GatedAttentionConfig(AttentionConfig):
    """Shape of the layer; ``launch.py plan`` and the cache of packed weights work from it, too."""

    def build(self, hidden_size, ctx):
        return GatedAttention(self, hidden_size, ctx)


@register("model_family", "GatedQwen3ForCausalLM")
class GatedQwen3ForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with gated attention."""

    @classmethod
    def read_config(cls, file):
        config = super().read_config(file)
        layers = (replace(layer, mixer=GatedAttentionConfig(**vars(layer.mixer))) for layer in config.layers)
        return replace(config, layers=tuple(layers))
