"""Costs of a unit of ranks: seconds and bytes of its layers, embedding, LM head and steps, by a ``LayerProfiler``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import msgspec

from labinfer.functions.calls import PagedAttentionCall
from labinfer.launch.layout.layout import Layout
from labinfer.launch.measure.layer_fit import (
    CHUNK_ROWS,
    DECODE_ROWS,
    FEW_TOKENS,
    HEAD_ROWS,
    fit_layer,
    make_points,
)
from labinfer.launch.measure.layer_profiler import LayerProfiler
from labinfer.launch.measure.probe_layout import (
    kind_name,
    measured_places,
    model_name,
)
from labinfer.models.config import ModelConfig
from labinfer.models.layers.mixer import Mixer
from labinfer.planner.costs import MIXER_SUMS, HostCosts, LayerCosts, Points
from labinfer.planner.merge_costs import merge_points
from labinfer.planner.overheads import Overheads
from labinfer.planner.step_shape import StepShape
from labinfer.weights.loader import weight_bytes

FILL_TOKENS = 128
"""Length of the prompt whose keys and values fill the cache."""
FEW_SEQUENCES = 16
"""Batch size of the second step whose inputs are timed; the first one has a batch size of 1."""


def measure_costs(
    timer: LayerProfiler,
    layout: Layout,
    config: ModelConfig,
    on_progress: Callable[[str], None],
    least: Callable[[object, float], float],
) -> HostCosts:
    """Measure the costs of this rank's unit.

    Args:
        least: takes a step and its seconds; returns the minimum of the seconds over all measurements of this step so
            far.
    """
    decoder, place, length = timer.runner.model, layout.topology.places[0], timer.sizes.max_model_len
    few = min(FEW_TOKENS, length)
    timer.fill_cache(min(FILL_TOKENS, length))
    most = min(max(DECODE_ROWS), timer.sizes.num_states or max(DECODE_ROWS))
    decode_rows = [rows for rows in DECODE_ROWS if rows <= most]
    chunk_rows = [rows for rows in CHUNK_ROWS if rows <= length]
    on_progress("embedding and head")
    embed_rows = (1, *chunk_rows[-1:])
    embed = make_points(
        {rows: least(("embed", rows), timer.time_embedding(timer.chunk(rows, 0))) for rows in embed_rows}
    )
    inputs = make_points(
        {rows: least(("inputs", rows), timer.time_layer_inputs(timer.chunk(rows, 0))) for rows in embed_rows}
    )
    before = merge_points([embed, inputs], sum)
    head_rows = [rows for rows in HEAD_ROWS if rows <= most]
    head = make_points({rows: least(("head", rows), timer.time_head(timer.decodes(rows, few))) for rows in head_rows})
    places = measured_places(layout)
    layers = {kind: decoder.model.layers[str(numbers[0])] for kind, numbers in places.items()}
    fixed, overheads = _measure_inputs(timer, few, min(FEW_SEQUENCES, most))
    width, dtype = config.hidden_size, layout.dtype(place)
    sums = Points([], [])
    if place.tp_size > 1:
        sizes = (1, decode_rows[-1], *chunk_rows[-1:])
        sums = make_points({rows * width * dtype.itemsize: timer.time_sum(rows, width, dtype) for rows in sizes})
    kinds: dict[str, LayerCosts] = {}
    skipped = Points([], [])
    for kind, numbers in places.items():
        on_progress(f"layers of kind {len(kinds) + 1} of {len(places)}")
        seconds = _layer_timer(timer, numbers, before, least)

        num_sums = MIXER_SUMS + config.layers[numbers[0]].mlp.num_sums

        def own_seconds(
            shape: StepShape, seconds: Callable[[StepShape], float] = seconds, num_sums: int = num_sums
        ) -> float:
            share = inputs.at(shape.rows) / len(decoder.model.layers)
            return seconds(shape) + share - num_sums * sums.at(shape.rows * width * dtype.itemsize)

        window = _window(layers[kind].self_attn)
        fitted = fit_layer(own_seconds, most_decodes=decode_rows[-1], length=length, window=window)
        kinds[kind] = msgspec.structs.replace(fitted, num_sums=num_sums)
        if kind == kind_name(config.layers[-1]):
            skipped = _measure_skipped(timer, numbers, chunk_rows[:1] + chunk_rows[1:][-1:], seconds, before)
    specs = {kind: layer.self_attn.cache_spec() for kind, layer in layers.items()}
    input_bytes = 0
    if (layer_inputs := getattr(decoder.model, "layer_inputs", None)) is not None:
        input_bytes = weight_bytes(layer_inputs) // len(decoder.model.layers)
    kv_dtype = layout.kv_dtype(place)
    return HostCosts(
        name="",
        model=model_name(config),
        dtype=str(dtype).removeprefix("torch."),
        quantization=layout.quantization_name(place),
        tp_size=place.tp_size,
        memory=0,
        layers=[kind_name(layer) for layer in config.layers],
        last_cut=config.last_cut,
        layer_kinds=kinds,
        head=head,
        embed=embed,
        fixed=fixed,
        all_reduce=sums,
        skipped=skipped,
        overheads=overheads,
        hidden_bytes=width * dtype.itemsize,
        embedded_bytes=(config.activation_size - width) * dtype.itemsize,
        layer_bytes={kind: weight_bytes(layer) + input_bytes for kind, layer in layers.items()},
        embedding_bytes=weight_bytes(decoder.model.embed_tokens),
        head_bytes=weight_bytes(decoder.lm_head),
        shared_bytes=weight_bytes(decoder.lm_head) if decoder.lm_head is decoder.model.embed_tokens else 0,
        kv_bytes={kind: spec.bytes_per_token(kv_dtype) for kind, spec in specs.items()},
        state_bytes={kind: spec.bytes_per_sequence for kind, spec in specs.items()},
    )


def _measure_inputs(timer: LayerProfiler, few: int, most: int) -> tuple[float, Overheads]:
    """Seconds to prepare the inputs of a step of one sequence, and overheads of the plan and of each further sequence.

    Args:
        few: context length of each sequence.
        most: batch size of the second step.
    """
    single = timer.decodes(1, few)
    fixed, (encode, decode) = timer.time_inputs(single), timer.time_plan(single)
    sequence = 0.0
    if most > 1:
        sequence = max(0.0, timer.time_inputs(timer.decodes(most, few)) - fixed) / (most - 1)
    return fixed, Overheads(broadcast=encode, decode=decode, prepare_sequence=sequence)


def _layer_timer(
    timer: LayerProfiler, numbers: Sequence[int], before: Points, least: Callable[[object, float], float]
) -> Callable[[StepShape], float]:
    """Cached function that returns a layer's seconds in a step, all-reduces included. The constant time of a step counts as layer time:
    divided among the layers for decodes, added to one layer for chunks, which take much longer.

    Args:
        numbers: indices of the measured layers, all of one kind.
        before: seconds before the first layer (embedding and per-layer embeddings), by rows.
        least: see ``measure_costs``.
    """
    runners = {False: timer.runner.with_layers(numbers), True: timer.runner.with_layers(numbers[:1])}
    counts = {False: len(numbers), True: 1}

    @cache
    def seconds(shape: StepShape) -> float:
        is_chunk = bool(shape.chunks)
        total = least((tuple(numbers), shape), timer.time_layers(timer.plan(shape), runners[is_chunk]))
        return (total - before.at(shape.rows)) / counts[is_chunk]

    return seconds


def _measure_skipped(
    timer: LayerProfiler,
    numbers: Sequence[int],
    rows: Sequence[int],
    seconds: Callable[[StepShape], float],
    before: Points,
) -> Points:
    """Measure ``HostCosts.skipped`` with prompt chunks in which one row is sampled.

    Args:
        numbers: indices of the measured layers, all of the kind of the model's last layer.
        rows: chunk sizes in tokens.
        seconds: seconds of a layer of that kind when it computes all rows.
        before: see ``_layer_timer``.
    """
    runner, saved = timer.runner.with_layers(numbers[:1]), {0: 0.0}
    for size in rows:
        shape = StepShape(chunks=((size, 0),))
        less = timer.time_layers(timer.plan(shape), runner, all_rows=False) - before.at(size)
        saved[size - 1] = seconds(shape) - max(0.0, less)  # a layer saves no more than its own time
    return make_points(saved) if len(saved) > 1 else Points([], [])


def _window(mixer: Mixer) -> int:
    """Sliding window of a layer in tokens; 0 for full attention, or without attention."""
    return max((call.window for call in mixer.calls() if isinstance(call, PagedAttentionCall)), default=0)
