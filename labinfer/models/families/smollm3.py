"""SmolLM3 (model card of HuggingFaceTB/SmolLM3-3B)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model, read_windows
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.rope_parameters import read_rope


class SmolLM3ForCausalLM(Decoder):
    """Llama without position encoding in every fourth layer (Kazemnejad et al. 2023, arXiv:2305.19466)."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(tie_word_embeddings=True, rope_theta=2e6, num_key_value_heads=4)
        num_layers, interval = file.size("num_hidden_layers"), file.size("no_rope_layer_interval", 4)
        has_rope = file.values.get("no_rope_layers") or [(n + 1) % interval != 0 for n in range(num_layers)]
        file.require(
            isinstance(has_rope, list) and len(has_rope) >= num_layers,
            f"no_rope_layers should be a list of {num_layers} times 0 or 1, not {has_rope!r:.80}",
        )
        window = 0
        if file.get("use_sliding_window", bool, False) and file.values.get("sliding_window") is not None:
            window = file.size("sliding_window")
        windows = read_windows(file, window, lambda n: SLIDING if window and not has_rope[n] else FULL)
        mlp, rope = read_gated_mlp(file), read_rope(file)
        layers = [
            LayerConfig(mixer=read_attention(file, rope=rope if has_rope[n] else None, window=windows[n]), mlp=mlp)
            for n in range(num_layers)
        ]
        return read_model(file, layers)
