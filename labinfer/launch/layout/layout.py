"""``Layout``: topology, devices and dtypes of a run, from which each rank's part follows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY
from labinfer.base.speculative_options import FLAG
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.spmd.devices import DeviceName, carrier, device_memory, num_sharing, resolve_devices
from labinfer.comm.spmd.machine import RankInfo
from labinfer.comm.spmd.topology import Place, Topology, make_topology, per_stage
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.engine.cache_capacity import CacheRoom, SlidingWindow, WindowNeeds
from labinfer.functions.functions import Functions
from labinfer.functions.registry import Choice, FunctionRegistry, WeightChoice
from labinfer.launch.layout.stage_shapes import StageShapes
from labinfer.launch.providers import describe_device, reference_registry
from labinfer.models.config import ModelConfig
from labinfer.models.layers.context import ExpertCut, StageContext
from labinfer.models.layers.segmented_linear import SegmentedLinear
from labinfer.models.layers.segments import DEGREES
from labinfer.models.registry import model_class
from labinfer.weights.codes import QuantLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 1 << 30
KV_DTYPES = TORCH_DTYPES | {"int8": torch.int8}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Assignment of the model's parts to ranks; equal on every rank."""

    config: ModelConfig
    topology: Topology
    devices: Mapping[int, DeviceName]
    """Device of each placed rank."""
    draft_devices: Mapping[int, DeviceName] = field(default_factory=dict)
    """Rank and device of the spare rank with the draft model; empty without one."""
    dtypes: tuple[torch.dtype, ...]
    """Dtype of each stage's activations and weights."""
    kv_dtypes: tuple[torch.dtype, ...]
    """Dtype of each stage's KV cache."""
    experts: tuple[ExpertCut, ...]
    """Distribution of experts over the ranks of each stage (TP or expert parallel)."""
    max_model_len: int
    block_size: int
    """Tokens of a KV block."""
    quantizations: tuple[str, ...]
    """``--quantization`` of each stage. ``int8`` and ``int4`` quantize the checkpoint's floating-point weights; ``none``, unlike ``auto``,
    dequantizes a quantized checkpoint."""
    quantization_group_size: int = 0
    """Group size of int4: inputs that share a scale."""
    weights: WeightChoice = "auto"
    """Storage of bfloat16 matrices that are not quantized, from ``--weights``."""
    loaded_bytes: tuple[int, ...] = ()
    """Weight bytes of each rank, by rank, once loaded: the size of weights compressed to 12 bits is not known before."""
    expert_memory: int = 0
    """Bytes of each rank's expert cache, with all experts in a file; 0 if all experts are in memory."""
    is_one_cpu_host: bool = False
    """Whether all stages compute on CPUs of one machine."""
    reproducible: bool = False
    """Whether sums over tensor-parallel ranks have bits that do not depend on the number of ranks."""
    _meta: dict[Place, StageShapes] = field(default_factory=dict, repr=False, compare=False)

    def dtype(self, place: Place) -> torch.dtype:
        return self.dtypes[place.stage]

    def kv_dtype(self, place: Place) -> torch.dtype:
        return self.kv_dtypes[place.stage]

    def num_layers(self, place: Place) -> int:
        begin, end = self.topology.layers[place.stage]
        return end - begin

    def block_bytes(self, place: Place) -> int:
        """Bytes of one KV block on one rank, over all its layers."""
        return self.block_size * self.meta(place).bytes_per_token

    def window_block_bytes(self, place: Place) -> int:
        """Bytes of one KV block on one rank, over its sliding-window layers."""
        return self.block_size * self.meta(place).window_bytes_per_token

    def cache_room(self, place: Place, num_bytes: int, draft_block_bytes: int) -> CacheRoom:
        """Memory of a rank for its cache, with the bytes of a block and of a state.

        Args:
            num_bytes: bytes for blocks and states; negative if the weights alone are too large.
            draft_block_bytes: bytes of a draft model's block on this rank; 0 without one.
        """
        windowed = self.window_block_bytes(place)
        return CacheRoom(
            num_bytes=num_bytes,
            block_bytes=self.block_bytes(place) - windowed + draft_block_bytes,
            window_block_bytes=windowed,
            state_bytes=self.meta(place).bytes_per_sequence,
        )

    def cache_bytes(self, place: Place, num_blocks: int, num_window_blocks: int) -> int:
        """Bytes of the KV blocks on one rank.

        Args:
            num_window_blocks: blocks of sliding-window layers; 0 if they share the block count of the other layers.
        """
        windowed = self.window_block_bytes(place)
        others = self.block_bytes(place) - windowed
        return num_blocks * others + (num_window_blocks or num_blocks) * windowed

    def weight_bytes(self, place: Place) -> int:
        """Bytes of a rank's weights in memory, without the experts that are only in a file.

        Before loading, weights count as uncompressed if ``weights`` is "auto".
        """
        meta = self.meta(place)
        in_file = max(0, meta.expert_bytes - self.expert_memory) if self.expert_memory else 0
        if (
            self.loaded_bytes and not self.expert_memory
        ):  # with expert offload, ``loaded_bytes`` also counts experts in the file
            return self.loaded_bytes[place.rank]
        return meta.weight_bytes - in_file

    @property
    def least_blocks(self) -> int:
        """Minimum number of KV blocks: for one prompt token and one new token."""
        return self.blocks_for(2)

    def useful_blocks(self, max_num_seqs: int) -> int:
        """Upper bound of the KV blocks that can be filled: ``max_num_seqs`` sequences of ``max_model_len`` tokens."""
        return max_num_seqs * self.blocks_for(self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks for ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens that ``num_blocks`` KV blocks hold."""
        return num_blocks * self.block_size

    def window_needs(self, options: EngineOptions, window: int) -> WindowNeeds | None:
        """Blocks that sliding-window layers need; None if they keep all tokens, as the other layers do.

        Args:
            window: largest sliding window of any layer, 0 if none has one.
        """
        scheduler = options.scheduler
        return SlidingWindow(window, self.block_size).needs(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            chunked_prefill_size=scheduler.chunked_prefill_size,
            max_model_len=self.max_model_len,
            kept=scheduler.keep if scheduler.context_shift else None,
        )

    @property
    def all_devices(self) -> dict[int, DeviceName]:
        """Devices of the placed ranks and of the draft rank."""
        return {**self.devices, **self.draft_devices}

    def memory(self, rank: int, everyone: Sequence[RankInfo]) -> Hashable:
        """Identifier of the memory of a rank's device; equal for ranks that share the memory."""
        return device_memory(everyone[rank], self.all_devices[rank])

    def sharing_device(self, rank: int, everyone: Sequence[RankInfo]) -> int:
        """Number of ranks that share the memory of ``rank``'s device, including ``rank``."""
        return num_sharing(rank, self.all_devices, everyone)

    def carrier(self, ranks: Sequence[int], everyone: Sequence[RankInfo]) -> str:
        """Device type whose communication library can connect ``ranks``; ``cpu`` if tensors must go through host
        memory."""
        return carrier({rank: self.devices[rank] for rank in ranks}, everyone)

    def select_functions(
        self,
        place: Place,
        registry: FunctionRegistry,
        overrides: Mapping[str, str] | None = None,
        choice: Choice | None = None,
    ) -> Functions:
        """Implementation of each function for a rank's device, dtype and quantization; see ``FunctionRegistry.select``."""
        return registry.select(self.devices[place.rank], self.dtype(place), overrides, self.rounding(place), choice)

    def stage_context(self, place: Place, tp: TensorParallelCommunicator, functions: Functions) -> StageContext:
        """Constructor arguments of the rank's layers."""
        begin, end = self.topology.layers[place.stage]
        described, quantization = describe_device(self.devices[place.rank].type), self.quantizations[place.stage]

        def form(matrix: str) -> QuantLayout | None:
            """Quantized form in which the device holds a matrix of the checkpoint; None to dequantize it."""
            stored = self.config.formats(matrix).form(quantization)
            return stored if stored is not None and described.multiplies(stored) else None

        return StageContext(
            tp=tp,
            functions=functions,
            dtype=self.dtype(place),
            first_layer=begin,
            last_layer=end,
            is_first=self.topology.is_first(place.stage),
            is_last=self.topology.is_last(place.stage),
            form=form,
            experts=self.experts[place.stage],
            names=model_class(self.config).names,
            row_parallel=SegmentedLinear if self.reproducible else None,
        )

    def rounding(self, place: Place) -> str:
        """Quantization of a rank's matrices that are floating point in the checkpoint."""
        quantization = self.quantizations[place.stage]
        return "none" if quantization == "auto" else quantization

    def quantization_name(self, place: Place) -> str:
        """User-visible name of a rank's quantization: the checkpoint's method plus the quantization of its floating-point matrices."""
        method = self.config.formats.method if self.quantizations[place.stage] != "none" else ""
        return " + ".join(name for name in (method, self.rounding(place)) if name not in ("", "none")) or "none"

    def meta(self, place: Place) -> StageShapes:
        """Shapes of a rank's part of the model, on the meta device; cached."""
        if place not in self._meta:
            tp = TensorParallelCommunicator(LocalCommunicator(rank=place.tp_rank, size=place.tp_size))
            registry = reference_registry(self.quantization_group_size, self.weights)
            context = self.stage_context(place, tp, self.select_functions(place, registry))
            self._meta[place] = StageShapes(self.config, context, self.kv_dtype(place))
        return self._meta[place]

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the model, before quantization."""
        plain = replace(self.whole(), quantizations=("none",), loaded_bytes=(), _meta={})
        return plain.meta(plain.topology.place(0)).num_parameters

    def whole(self) -> Layout:
        """Layout of this model on a single rank (``self`` if this layout already has only one)."""
        if self.topology.num_places == 1:
            return self
        return replace(
            self,
            topology=Topology((1,), ((0, self.config.num_layers),)),
            devices={0: self.devices[self.topology.placed_ranks[0]]},
            draft_devices={},
            dtypes=self.dtypes[:1],
            kv_dtypes=self.kv_dtypes[:1],
            experts=self.experts[:1],
            quantizations=self.quantizations[:1],
            loaded_bytes=(),
            is_one_cpu_host=False,
            _meta={},
        )


def make_layout(options: EngineOptions, config: ModelConfig, everyone: Sequence[RankInfo]) -> Layout:
    """Build and check the layout. Pure: every rank computes an equal one.

    Args:
        everyone: all started ranks.

    Raises:
        UserError: the flags do not match the model or the machines.
    """
    parallel = options.parallel
    topology = make_topology(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.layers,
        config.num_layers,
        len(everyone),
        ranks=parallel.ranks,
        last_cut=config.last_cut,
    )
    for stage, tp_size in enumerate(topology.tp_sizes):
        for layer in config.layers[slice(*topology.layers[stage])]:
            layer.mixer.check(tp_size)
    if (gib := options.cache.expert_offload) and not any(layer.mlp.has_experts for layer in config.layers):
        raise UserError(f"--expert-offload {gib:g}: {config.architecture} has no MoE experts; leave it out")
    topology.check_nodes([info.node for info in everyone])
    device_names = per_stage("--device", parallel.device, topology.num_stages)
    flags, draft_devices = {place.rank: device_names[place.stage] for place in topology.places}, {}
    if (speculation := options.scheduler.speculative_config) and (rank := speculation.draft_rank):
        _check_draft_rank(rank, topology, len(everyone))
        flags[rank] = device_names[0] if len(set(device_names)) == 1 else "auto"
    devices = resolve_devices(flags, everyone)
    if len(devices) > topology.num_places:
        draft_devices[rank] = devices.pop(rank)
    if options.model.is_reproducible:
        check_reproducible(config, topology, devices)
        if options.cache.expert_offload:
            raise UserError(
                "--reproducible cuts experts into segments, which cannot be offloaded; leave out --expert-offload"
            )
    dtype_names = per_stage("--dtype", options.model.dtype, topology.num_stages)
    dtypes = tuple(_resolve_dtype(name, config) for name in dtype_names)
    quantizations = per_stage("--quantization", options.model.quantization, topology.num_stages)
    kv_name = options.cache.kv_cache_dtype
    kv_dtypes = tuple(dtype if kv_name == "auto" else KV_DTYPES[kv_name] for dtype in dtypes)
    length = _resolve_length(options.model.max_model_len, config)
    if not config.is_causal:  # a prompt runs in one step
        length = min(length, options.scheduler.max_num_batched_tokens)
    hosts = {(everyone[rank].node, device.type) for rank, device in devices.items()}
    return Layout(
        config=config,
        topology=topology,
        devices=devices,
        draft_devices=draft_devices,
        dtypes=dtypes,
        kv_dtypes=kv_dtypes,
        experts=tuple(per_stage("--experts", parallel.experts, topology.num_stages)),
        max_model_len=length,
        block_size=options.cache.tokens_per_block,
        quantizations=quantizations,
        quantization_group_size=options.model.quantization_group_size,
        weights=options.model.weights,
        expert_memory=int(options.cache.expert_offload * GIB),
        reproducible=options.model.is_reproducible,
        is_one_cpu_host=len(hosts) == 1 and hosts.pop()[1] == "cpu",
    )


def check_reproducible(config: ModelConfig, topology: Topology, devices: Mapping[int, DeviceName]) -> None:
    """Refuse models and layouts whose bits are not reproducible.

    Args:
        devices: device by rank, of the ranks with layers.

    Raises:
        UserError: a plugin computes the layers, a stage has more tensor-parallel ranks than reproducible sums allow,
            or a rank is not on a CPU.
    """
    if origin := REGISTRY.entry("model_family", config.architecture).origin:
        raise UserError(
            f"--reproducible: the bits of {config.architecture}, a model family from {origin}, may depend on the batch; "
            "give a checkpoint of a shipped family"
        )
    for rank, device in devices.items():
        if device.type != "cpu":
            raise UserError(
                f"--reproducible: the bits of kernels on {device.type} (rank {rank}) may depend on the batch; give --device cpu"
            )
    if max(topology.tp_sizes) > max(DEGREES):
        raise UserError(
            f"--reproducible: sums over {max(topology.tp_sizes)} tensor-parallel ranks have other bits than one rank's; give at most "
            f"-tp {max(DEGREES)}, and -pp for more ranks"
        )


def check_context_shift(options: EngineOptions, layout: Layout, place: Place) -> None:
    """Check that the layers of a rank support ``--context-shift``.

    Raises:
        UserError: a layer has a recurrent state, or its keys cannot be re-rotated.
    """
    if options.scheduler.context_shift and not layout.meta(place).can_shift:
        raise UserError(
            "--context-shift is not supported for this model (recurrent states, or keys that cannot be "
            "re-rotated); leave it out"
        )


def _check_draft_rank(rank: int, topology: Topology, num_ranks: int) -> None:
    if rank >= num_ranks:
        raise UserError(f"{FLAG}: draft_rank {rank} does not exist among {num_ranks} ranks; give another one")
    if rank in topology.placed_ranks:
        raise UserError(
            f"{FLAG}: draft_rank {rank} is in use by {topology.place(rank)}; give a spare rank (one that --ranks "
            "leaves out), or 0 to share rank 0"
        )


def _resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    name = config.dtype if name == "auto" else name
    if name not in TORCH_DTYPES:
        raise UserError(f"the checkpoint's dtype {name!r} is not supported; give --dtype {'|'.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


def _resolve_length(length: int, config: ModelConfig) -> int:
    if length > config.max_position:
        raise UserError(f"--max-model-len {length} exceeds the model's maximum of {config.max_position} positions")
    if length == 1:
        raise UserError("--max-model-len 1 is too small for a prompt token and an output token; give at least 2")
    return length or config.exact_context or config.max_position
