"""draft_with: a loaded model whose drafts come from a proposer of a test."""

from __future__ import annotations

from labinfer import LLM
from labinfer.engine.assemble import make_drafts
from labinfer.engine.drafts import Drafts
from labinfer.engine.proposer import Proposer


def draft_with(llm: LLM, proposer: Proposer) -> None:
    """Draft with a proposer from now on, also in a model that was loaded without speculation; on rank 0."""
    scheduler = llm.engine.scheduler
    if not isinstance(scheduler.drafts, Drafts):
        scheduler.drafts = make_drafts(
            proposer,
            scheduler.tables,
            llm.spec,
            llm.options.scheduler,
            micro_batches=scheduler._micro_batches,
            clock=llm.clock,
        )
        scheduler.drafts.counts = scheduler.counts
    scheduler.drafts.proposer = proposer
