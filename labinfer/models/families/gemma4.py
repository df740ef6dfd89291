"""Gemma 4, text part (model cards of google/gemma-4-E2B-it, -12B-it and -26B-A4B-it)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_model, read_windows
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.families.gemma3 import ROOTS, SANDWICH_NORMS, read_cap, read_gelu_mlp
from labinfer.models.families.layers.parallel_dense_moe import ParallelDenseMoEConfig
from labinfer.models.families.layers.per_layer_embedding import PerLayerEmbeddingConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.families.per_layer_embedding_decoder import PerLayerEmbeddingDecoder
from labinfer.models.layers.attention import AttentionConfig
from labinfer.models.layers.mixer import MLPConfig
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames

ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


class Gemma4ForCausalLM(PerLayerEmbeddingDecoder):
    """QKV norms; another head size in full-attention layers. The last layers may use the KV cache of earlier ones (KV sharing), experts may
    run in parallel with the MLP, and layers may have per-layer embeddings."""

    norm_placement = "sandwich"
    names = CheckpointNames(
        renamed=SANDWICH_NORMS
        | {
            "layer_inputs.table": "embed_tokens_per_layer",
            "layer_inputs.projection": "per_layer_model_projection",
            "layer_inputs.norm": "per_layer_projection_norm",
            "layer_input.gate": "per_layer_input_gate",
            "layer_input.projection": "per_layer_projection",
            "layer_input.norm": "post_per_layer_input_norm",
            "mlp.dense": "mlp",
            "mlp.experts": "experts",
            "mlp.gate": "router.proj",
            "mlp.gate.expert_scale": "router.per_expert_scale",
            "mlp.gate_norm.weight": "router.scale",
            "mlp.dense_output_norm": "post_feedforward_layernorm_1",
            "mlp.experts_input_norm": "pre_feedforward_layernorm_2",
            "mlp.experts_output_norm": "post_feedforward_layernorm_2",
        },
        roots=ROOTS,
        ignored=(
            *("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
            "model.vision_embedder.",
        ),
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.text_part().with_defaults(
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            vocab_size_per_layer_input=262144,
        )
        file.require(
            file.values.get("use_bidirectional_attention") in (None, False, "vision"),
            "use_bidirectional_attention of all tokens is not supported",
        )
        file.require(
            not file.values.get("rope_scaling"), "rope_scaling is not supported in Gemma 4; it has rope_parameters only"
        )
        eps, num_layers = file.get("rms_norm_eps", float, 1e-6), file.size("num_hidden_layers")
        windows = read_windows(
            file,
            file.size("sliding_window", 512),
            lambda n: SLIDING if (n + 1) % 6 and n + 1 < num_layers else FULL,
        )
        num_shared = file.get("num_kv_shared_layers", int, 0)
        file.require(
            windows[-1] == 0,
            f"layer_types ends in {SLIDING}, which is not supported; Transformers makes the last layer {FULL}",
        )
        sources = _sources(file, windows, num_shared)
        columns = file.size("intermediate_size")
        mlp = _read_mlp(file, columns, eps)
        is_wide = file.get("use_double_wide_mlp", bool, False)
        shared_mlp = _read_mlp(file, 2 * columns, eps) if is_wide else mlp
        layers = [
            LayerConfig(
                mixer=_read_attention(file, number, window, eps=eps, reads_earlier=source is not None),
                mlp=mlp if source is None else shared_mlp,
                cache_layer=source,
            )
            for number, (window, source) in enumerate(zip(windows, sources, strict=True))
        ]
        for number, source in enumerate(sources):
            own = layers[number].mixer
            other = own if source is None else layers[source].mixer
            file.require(
                (own.num_kv_heads, own.head_size) == (other.num_kv_heads, other.head_size),
                f"layer {number} reads the cache of layer {source}, which has {other.num_kv_heads} heads of {other.head_size}, "
                f"not {own.num_kv_heads} of {own.head_size}",
            )
        return read_model(
            file.without("per_layer_config"),  # already read into the layers
            layers,
            embedding_scale=file.size("hidden_size") ** 0.5,
            logits_cap=read_cap(file, "final_logit_softcapping"),
            layer_inputs=_read_layer_inputs(file),
        )


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Text part of the multimodal model, without its vision and audio parts."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        return super().read_config(file.with_defaults(vocab_size=262144, num_attention_heads=8))


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Gemma 4 without experts and per-layer embeddings."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.text_part().with_defaults(max_position_embeddings=262144, sliding_window=1024)
        values = file.values | {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
        return super().read_config(file.with_values(values))


class Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedForCausalLM):
    """Text part of the multimodal model, without its vision and audio parts."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        return super().read_config(file.with_defaults(vocab_size=262144, num_attention_heads=8))


def _read_attention(file: ConfigFile, number: int, window: int, *, eps: float, reads_earlier: bool) -> AttentionConfig:
    """Attention of layer ``number``; ``window`` is its sliding-window size, 0 for full attention."""
    kind = SLIDING if window else FULL
    is_tied = not window and file.get("attention_k_eq_v", bool, False)
    values = file.values | _read_heads(file, number, window, is_tied)
    ropes = values.get("rope_parameters") or ROPES
    file.require(
        isinstance(ropes, dict) and isinstance(ropes.get(kind), dict),
        f"rope_parameters should have an entry for {kind}, not {ropes!r:.80}",
    )
    own = file.with_values(values | {"rope_parameters": ropes})
    return read_attention(
        own,
        rope=read_rope(own, kind),
        window=window,
        scale=1.0,
        qk_norm="head",
        qk_norm_eps=eps,
        value_norm=True,
        tied_values=is_tied,
        reads_earlier=reads_earlier,
    )


def _read_heads(file: ConfigFile, number: int, window: int, is_tied: bool) -> dict[str, int]:
    """``head_dim`` and ``num_key_value_heads`` of a layer, if they differ from the model's: from ``per_layer_config``, as Transformers 5
    writes it, or from the keys for all full-attention layers."""
    if file.values.get("per_layer_config") is not None:
        own = file.get("per_layer_config", dict).get(str(number), {})
        file.require(
            isinstance(own, dict) and set(own) <= {"head_dim", "num_key_value_heads"},
            f"per_layer_config of layer {number} should have head_dim and num_key_value_heads, not {own!r:.80}",
        )
        values = file.with_values(own)
        return {key: values.size(key) for key in own}
    heads = {} if window else {"head_dim": file.size("global_head_dim", 512)}
    if is_tied and file.values.get("num_global_key_value_heads") is not None:
        heads["num_key_value_heads"] = file.size("num_global_key_value_heads")
    return heads


def _sources(file: ConfigFile, windows: tuple[int, ...], num_shared: int) -> list[int | None]:
    """Index of the layer whose KV cache each layer reads; None if it reads its own. Each of the last ``num_shared`` layers reads the cache
    of the last layer before them that has the same window."""
    first = len(windows) - num_shared
    file.require(
        0 < first <= len(windows) and set(windows[first:]) <= set(windows[:first]),
        f"num_kv_shared_layers {num_shared} of {len(windows)} layers leaves no cache to share for some of them",
    )
    last = {window: number for number, window in enumerate(windows[:first])}
    return [None] * first + [last[window] for window in windows[first:]]


def _read_mlp(file: ConfigFile, columns: int, eps: float) -> MLPConfig:
    dense = read_gelu_mlp(file, columns)
    if not file.get("enable_moe_block", bool, False):
        return dense
    router = read_router(file, file.size("num_experts"), file.size("top_k_experts"), expert_scale=True)
    return ParallelDenseMoEConfig(
        dense=dense, router=router, intermediate_size=file.size("moe_intermediate_size"), norm_eps=eps
    )


def _read_layer_inputs(file: ConfigFile) -> PerLayerEmbeddingConfig | None:
    if not file.get("hidden_size_per_layer_input", int, 256):
        return None
    vocab_size = file.size("vocab_size_per_layer_input")
    file.require(
        vocab_size >= file.size("vocab_size"),
        f"vocab_size_per_layer_input {vocab_size} is less than vocab_size {file.size('vocab_size')}",
    )
    return PerLayerEmbeddingConfig(
        size=file.size("hidden_size_per_layer_input", 256),
        vocab_size=vocab_size,
        num_layers=file.size("num_hidden_layers"),
    )
