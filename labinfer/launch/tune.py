"""Functions of a rank: compiled, checked, and chosen by autotuning on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

import labinfer
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.plugins import PLUGINS
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.devices import torch_device
from labinfer.comm.spmd.topology import Place
from labinfer.functions.autotune import (
    Times,
    choose,
    describe,
    file_name,
    is_disturbed,
    is_tuned,
    merge,
    read_times,
    time_candidates,
    write_times,
)
from labinfer.functions.calls import CallSetting
from labinfer.functions.functions import Functions
from labinfer.functions.provider import Provider
from labinfer.functions.rank_calls import RankCalls
from labinfer.functions.registry import Choice, FunctionRegistry
from labinfer.launch.layout.layout import Layout
from labinfer.launch.portable import check_portable
from labinfer.launch.providers import make_providers, make_registry, origin, parse_overrides
from labinfer.native import compiler
from labinfer.native.cache_file import digest
from labinfer.observe.progress_line import compile_progress

logger = logging.getLogger(__name__)

LONG_VERSION = 64
"""Length in characters beyond which a provider's version is shortened in fingerprints."""


def prepare_providers(group: RankGroup, device: torch.device, *, reproducible: str = "off") -> list[Provider]:
    """Load the functions that this rank can use; one rank of each node compiles them first. Collective.

    Args:
        reproducible: value of ``--reproducible``; with ``any-cpu`` the processor must run portable kernels (see ``Provider.is_portable``).
    """
    providers, is_first = make_providers(), group.is_first_on_node
    is_portable = reproducible == "any-cpu"
    for provider in providers:
        provider.is_portable = is_portable
    for turn in (True, False):
        with group.raise_on_all_ranks():
            if turn == is_first:
                if is_portable:
                    check_portable()
                for provider in providers:
                    with compile_progress() as on_progress, PLUGINS.blame(origin(provider)):
                        provider.prepare(device, on_progress)
    return providers


def cache_folder() -> Path | None:
    """Folder of files cached between runs; None if the user has no home directory."""
    try:
        return compiler.default_cache()
    except compiler.NoCompiler:
        return None


def choose_functions(
    group: RankGroup, options: EngineOptions, layout: Layout, place: Place, providers: Sequence[Provider]
) -> tuple[Functions, list[str]]:
    """Choose the implementation of each function for this rank's layers; collective.

    Returns the functions, and the names of the chosen implementations with the versions of their providers, for fingerprints.

    Raises:
        CollectiveError: ``--functions`` names an unknown, incompatible or failing implementation on any rank.
    """
    overrides, choice = parse_overrides(options.model.functions), None
    with group.raise_on_all_ranks():
        registry = make_registry(providers, layout.quantization_group_size, layout.weights)
        registry.check(layout.devices[place.rank], layout.dtype(place), overrides, layout.rounding(place))
        is_anew = options.model.autotune == "again"
        try_functions(layout, place, registry, overrides, providers, anew=is_anew)
        calls = make_rank_calls(layout, place, registry, overrides)
        if options.model.is_reproducible:
            check_reproducible_kernels(registry, calls, overrides)
    if options.model.autotune != "off" and not options.model.is_reproducible:
        choice = tune(group, layout, place, calls, cache=cache_folder(), providers=providers, anew=is_anew)
    logger.debug("kernels are chosen")
    if group.rank == 0 and any(item.plugin for item in registry.implementations):
        logger.info("kernels of plugins: %s", describe(calls.chosen_plugins(choice or {})) or "none, others are faster")
    with group.raise_on_all_ranks():
        return layout.select_functions(place, registry, overrides, choice), _name_kernels(
            calls, choice or {}, providers
        )


def _name_kernels(calls: RankCalls, choice: Choice, providers: Sequence[Provider]) -> list[str]:
    """Names of the chosen implementations by target (see ``Choice``), and the version of each provider, without its number of threads."""
    names = {target: choice.get(target, [*known][-1:]) for target, known in calls.candidates.items()}
    chosen = [f"{target} {'/'.join(dict.fromkeys(of_target))}" for target, of_target in names.items()]
    for provider in providers:
        version = [_shorten(str(item)) for item in provider.fingerprint() if type(item) is not int]
        chosen += [" ".join([type(provider).__name__, *version])] if version else []
    return chosen


def _shorten(text: str) -> str:
    """Part of a provider's version for fingerprints: ``text``, or its first line and a digest if it is longer than ``LONG_VERSION``."""
    return text if len(text) <= LONG_VERSION else f"{' '.join(text.splitlines()[0].split())} {digest(text)}"


def make_rank_calls(
    layout: Layout, place: Place, registry: FunctionRegistry, overrides: Mapping[str, str]
) -> RankCalls:
    """Function calls of one rank's layers."""
    setting = _call_setting(layout, place, registry, overrides)
    return RankCalls(layout.meta(place).calls, registry, setting, overrides)


def check_reproducible_kernels(registry: FunctionRegistry, calls: RankCalls, overrides: Mapping[str, str]) -> None:
    """Refuse implementations whose bits may depend on the batch: those of torch and of plugins.

    Args:
        registry: all implementations for the device of this rank.
        calls: function calls of this rank's layers.
        overrides: names of implementations by function (``--functions``).

    Raises:
        UserError: such an implementation would run a function of this rank's layers.
    """
    for item in registry.implementations:
        if item.plugin and (not item.devices or calls.setting.device.type in item.devices):
            raise UserError(
                f"--reproducible: the bits of the implementation {item.name} from {item.plugin} may depend on the batch; leave that plugin out"
            )
    for target, candidates in calls.candidates.items():
        item = candidates[next(reversed(candidates))]
        if not item.devices:  # a provider without devices is torch's, for any device
            raise UserError(
                f"--reproducible: the bits of {target}={item.name}, of torch, may depend on the batch; use the compiled functions: "
                "no --functions, and a C++ compiler (g++ or clang++)"
            )
    for function, name in overrides.items():  # also of functions that are not timed, which ``calls`` lacks
        if name == "reference":
            raise UserError(
                f"--reproducible: the bits of {function}=reference, of torch, may depend on the batch; leave it out"
            )


def try_functions(
    layout: Layout,
    place: Place,
    registry: FunctionRegistry,
    overrides: Mapping[str, str],
    providers: Sequence[Provider],
    *,
    anew: bool = False,
) -> None:
    """Remove implementations that fail at one rank's sizes; see ``drop_failing``."""
    setting = _call_setting(layout, place, registry, overrides)
    if setting.device.type == "cpu" and not any(item.plugin for item in registry.implementations):
        return  # without the time of the import
    from labinfer.launch.trial import drop_failing

    drop_failing(
        registry,
        setting,
        layout.meta(place).calls,
        providers=providers,
        group_size=layout.quantization_group_size,
        weights=layout.weights,
        overrides=overrides,
        cache=cache_folder(),
        anew=anew,
    )


def _call_setting(
    layout: Layout, place: Place, registry: FunctionRegistry, overrides: Mapping[str, str]
) -> CallSetting:
    return CallSetting(
        device=torch_device(layout.devices[place.rank]),
        dtype=layout.dtype(place),
        kv_dtype=layout.kv_dtype(place),
        block_size=layout.block_size,
        tiled_cache=registry.tiled_cache(layout.devices[place.rank], layout.dtype(place), overrides),
    )


def tune(
    group: RankGroup,
    layout: Layout,
    place: Place,
    calls: RankCalls,
    *,
    cache: Path | None,
    providers: Sequence[Provider],
    anew: bool = False,
) -> Choice:
    """Choose the fastest implementations for all ranks of this stage together; collective over the group.

    All ranks measure at the same time, as they share memory bandwidth in a run. All ranks measure if any rank has no cached times, or
    measured them on a busy machine.

    Args:
        cache: folder of cached times; None disables the cache.
        providers: providers of the timed implementations.
        anew: whether to ignore cached times.
    """
    begin = time.perf_counter()
    contested = calls.contested() if is_tuned(layout.dtype(place)) else {}
    times: Times | None = {}
    path = cache / _file_name(group, layout, calls, providers) if cache and contested else None
    if contested:
        times = read_times(path, calls) if path and not anew else None
    states = group.comm.all_gather_bytes(b"new" if times is None else b"busy" if is_disturbed(times) else b"known")
    remembered = set(states) == {b"known"}
    if contested and not remembered:
        with torch.inference_mode():
            measured = time_candidates(calls, contested)
        times = measured if b"new" in states else merge(times, measured)
        if path:
            _keep(path, times)
    gathered = group.gather_bytes(msgspec.msgpack.encode(times))
    stage = [gathered[rank] for rank in layout.topology.stage_ranks(place.stage)]
    choice = choose([msgspec.msgpack.decode(data, type=Times) for data in stage])
    if group.rank == 0 and choice:
        again = "" if b"new" in states else " again (the machine was busy before)"
        measured_in = f"measured{again} in {time.perf_counter() - begin:.1f} s"
        how = "cached timings" if remembered else measured_in
        logger.info("kernels (%s): %s", how, describe(choice))
    return choice


def _keep(path: Path, times: Times) -> None:
    try:
        write_times(path, times)
    except OSError as error:
        logger.info("the timings could not be saved: %s", error)


def _file_name(group: RankGroup, layout: Layout, calls: RankCalls, providers: Sequence[Provider]) -> str:
    """File name that encodes everything that the times depend on."""
    here = group.everyone[group.rank]
    return file_name(
        labinfer.__version__,
        [provider.fingerprint() for provider in providers],
        PLUGINS.computing_code(),
        calls.setting,
        calls.counts,
        layout.quantization_group_size,
        {target: list(candidates) for target, candidates in calls.contested().items()},
        sum(info.node == here.node for info in group.everyone),  # ranks of a node share its memory bandwidth
    )
