"""Rotary configs from the rope parameters of a ``config.json``, in Transformers' newer and older spelling."""

from __future__ import annotations

import sys
from typing import Any

from labinfer.models.config_file import FULL, SLIDING, ConfigFile, show_value
from labinfer.models.layers.rope import RopeConfig, check_rope


def read_rope(
    file: ConfigFile, layer_type: str = "", *, partial: bool = False, fixed_stretch: bool = False, **changes: Any
) -> RopeConfig:
    """A rotary config from ``rope_parameters`` (Transformers 5), or from ``rope_theta`` and ``rope_scaling``. If a config has both,
    ``rope_scaling`` takes precedence, as in Transformers.

    Args:
        layer_type: layer type whose entry of ``rope_parameters`` is read, if it has one per type.
        partial: whether the family supports rotating a part of each head.
        fixed_stretch: whether ``alpha`` makes ``dynamic`` rope scale the base by a constant; other families ignore ``alpha``.
        changes: fields of the result that the family overrides.

    Raises:
        UserError: the scaling type is not supported, or a parameter is invalid.
    """
    given = file.values.get("rope_scaling") or file.values.get("rope_parameters") or {}
    is_typed = isinstance(given, dict) and isinstance(given.get(layer_type), dict)
    if is_typed:
        given = given[layer_type]
        file.require(
            given.get("truncate", True) is True,
            f"truncate {show_value(given.get('truncate'))} of rope parameters by type of layers is not supported; Transformers ignores it",
        )
    file.require(isinstance(given, dict), f"rope parameters should be an object, not {given!r:.60}")
    nested = [key for key, value in given.items() if isinstance(value, dict)]
    file.require(not nested, f"rope parameters for {', '.join(nested)} are not known in this family")
    parameters = dict(given)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = parameters["rope_type"] = "longrope" if kind == "su" else kind  # name in early configs
    if not fixed_stretch:
        parameters.pop("alpha", None)
    if parameters.get("rope_theta") is None:
        theta = file.values.get("rope_theta")
        parameters["rope_theta"] = 10000.0 if theta is None else theta
    theta = parameters["rope_theta"]
    file.require(
        isinstance(theta, (int, float)) and 0 < theta <= sys.float_info.max,
        f"rope_theta should be above 0, not {show_value(theta)}",
    )
    if not is_typed and file.values.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = file.size("original_max_position_embeddings")
    needs_length = (
        kind == "longrope"
        or (kind == "dynamic" and not parameters.get("alpha"))
        or (kind == "yarn" and parameters.get("original_max_position_embeddings") is None)
    )
    file.require(
        not needs_length or file.values.get("max_position_embeddings") is not None,
        f"rope of type {kind} needs max_position_embeddings, which is missing",
    )
    fraction = parameters.get("partial_rotary_factor")
    if fraction is None:
        fraction = file.get("partial_rotary_factor", float, 1.0)
    file.require(
        isinstance(fraction, (int, float)) and 0 < fraction <= 1,
        f"partial_rotary_factor should be above 0 and at most 1, not {fraction!r:.60}",
    )
    file.require(
        partial or fraction == 1 or kind == "proportional",
        f"partial_rotary_factor {fraction} is not supported for this architecture; only 1 is",
    )
    dim = file.head_size
    if kind != "proportional":
        dim = int(dim * fraction)
    file.require(dim % 2 == 0, f"{dim} dimensions of a head are to be rotated, which is not an even number")
    rope = RopeConfig(**{"dim": dim, "parameters": parameters, "max_position": file.max_position} | changes)
    check_rope(rope)  # before anything is loaded
    return rope


def require_ropes_by_type(file: ConfigFile) -> None:
    """Require one entry of ``rope_parameters`` per layer type, and refuse ``rope_scaling`` beside them: which entry it scales is ambiguous.

    Raises:
        UserError: an entry is missing, the config has both, or ``rope_scaling`` names its type as ``type`` alone, which Transformers
            does not read in these families.
    """
    given, scaling = file.values.get("rope_parameters"), file.values.get("rope_scaling")
    file.require(
        given is None
        or (isinstance(given, dict) and all(isinstance(given.get(kind), dict) for kind in (FULL, SLIDING))),
        f"rope_parameters should have an entry for {FULL} and for {SLIDING}, not {given!r:.80}",
    )
    file.require(not (given and scaling), "has both rope_parameters and rope_scaling; leave rope_scaling out")
    file.require(
        not (isinstance(scaling, dict) and "type" in scaling and "rope_type" not in scaling),
        "rope_scaling has a type but no rope_type, and Transformers ignores it in this family; name it rope_type, or leave it out",
    )
