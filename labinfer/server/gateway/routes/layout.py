"""Route that changes the layout of a model while it is served."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from labinfer.base.errors import UserError
from labinfer.requests.openai import api_errors
from labinfer.server.gateway.cluster_answers import LayoutChanged
from labinfer.server.gateway.endpoint import BODY_ERRORS, endpoint
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.refusals import refused_field
from labinfer.server.link.frames import ModelInfo
from labinfer.server.link.layout_change import LayoutChange


@endpoint("POST", "/v1/cluster/layout", body=LayoutChange, answer=LayoutChanged, errors=(*BODY_ERRORS, 409))
async def change(context: HttpContext) -> Response:
    """Serve a model in another layout or precision; open requests pause, and then resume.

    Responds once the new layout runs or, after a failure, once the old layout runs again. Resumed requests continue with the tokens
    that they would have got in the old layout, as far as numerical precision allows.
    """
    body = await context.read(LayoutChange)
    name = context.service.model(body.model).info.name
    answer, info = await context.service.engine.change_layout(msgspec.structs.replace(body, model=name))
    if answer.is_refused:
        raise refused_field(UserError(answer.problem))
    if answer.problem:
        raise api_errors.conflict(
            f"{answer.problem}; serving with the previous layout, after a pause of {answer.seconds:.1f} s",
            final=True,
        )
    return context.json(
        LayoutChanged(
            model=name,
            changed=answer.seconds > 0,
            pause_seconds=answer.seconds,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            quantization=_name_quantizations(info),
            ranks=info.ranks,
        )
    )


def _name_quantizations(info: ModelInfo) -> str:
    """Quantization of a model's weights as one text; see ``LayoutChanged.quantization``."""
    by_stage = {rank.stage: rank.quantization for rank in info.ranks}
    names = set(by_stage.values())
    return names.pop() if len(names) == 1 else ",".join(by_stage[stage] for stage in sorted(by_stage))
