"""``/v1/models``: the served models."""

from __future__ import annotations

from collections import Counter

from starlette.responses import Response

from labinfer.requests.anthropic.models import AnthropicModel, AnthropicModelList, anthropic_model, anthropic_model_list
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.models import ModelEntry, ModelList, ModelStage
from labinfer.requests.recommended_sampling import FIELDS
from labinfer.server.gateway.endpoint import INTEGER, STORED_ERRORS, STRING, endpoint
from labinfer.server.gateway.error_form import ANTHROPIC_ERRORS
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.service import Service
from labinfer.server.link.frames import ModelInfo

MAX_PAGE = 1000
"""Maximum models per page, as in Anthropic's API."""
MAX_DIGITS = 9
"""Maximum number of digits of the query parameter ``limit``: Python raises an error for numbers of thousands of digits."""
SHOWN_DEFAULTS = (*FIELDS, "presence_penalty", "frequency_penalty")
"""Sampling parameters whose defaults are listed with each model."""


@endpoint(
    "GET",
    "/v1/models",
    logged=False,
    answer=ModelList | AnthropicModelList,
    query=(
        ("limit", INTEGER | {"minimum": 1, "maximum": MAX_PAGE}),
        ("after_id", STRING),
        ("before_id", STRING),
    ),
    is_anthropics_too=True,
)
async def list_models(context: HttpContext) -> Response:
    """List the models; in Anthropic's format with the header anthropic-version.

    The server also answers while it loads models. OpenAI's format lists all models and ignores ``limit``.
    """
    entries = [_describe(context.service, name) for name in context.service.model_names]
    query = context.known_query()
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= MAX_DIGITS and 1 <= int(limit) <= MAX_PAGE):
        raise api_errors.bad_request(f"limit must be from 1 to {MAX_PAGE}, not {limit!r:.40}", "limit")
    if context.error_form is not ANTHROPIC_ERRORS:
        return context.json(ModelList("list", entries))
    models = list(map(anthropic_model, entries))
    return context.json(anthropic_model_list(models, int(limit), query.get("after_id"), query.get("before_id")))


@endpoint(
    "GET",
    "/v1/models/{model:path}",
    logged=False,
    answer=ModelEntry | AnthropicModel,
    is_anthropics_too=True,
    errors=STORED_ERRORS,
)
async def show_model(context: HttpContext) -> Response:
    """Show one of the served models."""
    name = context.http.path_params["model"]
    if name not in context.service.model_names:
        raise api_errors.not_found_model(name)
    entry = _describe(context.service, name)
    return context.json(anthropic_model(entry) if context.error_form is ANTHROPIC_ERRORS else entry)


def _describe(service: Service, name: str) -> ModelEntry:
    model = service.models.get(name)
    if model is None:
        return ModelEntry(id=name, created=service.started)
    defaults = model.chat_defaults()
    return ModelEntry(
        id=name,
        created=service.started,
        max_model_len=model.info.max_model_len,
        num_parameters=model.info.num_parameters,
        stages=_describe_stages(model.info),
        fingerprint=model.info.fingerprint,
        reproducible=model.info.reproducible,
        default_sampling={field: getattr(defaults, field) for field in SHOWN_DEFAULTS} | defaults.logits_processors,
    )


def _describe_stages(info: ModelInfo) -> list[ModelStage]:
    """Pipeline stages of a model, in order. All ranks of a stage have one dtype and quantization."""
    first_ranks = {rank.stage: rank for rank in reversed(info.ranks)}
    sizes = Counter(rank.stage for rank in info.ranks)
    return [ModelStage(sizes[stage], rank.dtype, rank.quantization) for stage, rank in sorted(first_ranks.items())]
