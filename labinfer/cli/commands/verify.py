"""The ``verify`` command: recomputes random output lines of a job on this layout, and compares all bits."""

from __future__ import annotations

import dataclasses
import logging

from labinfer.api.batch.job import BatchJob
from labinfer.api.batch.options import VerifyOptions
from labinfer.api.batch.progress import JobProgress
from labinfer.api.batch.recorded_job import RecordedJob, RecordedLine
from labinfer.api.batch.verification import (
    HARMLESS_PARTS,
    Difference,
    RecomputedLines,
    check_complete,
    count_compared,
    describe_changes,
    find_difference,
)
from labinfer.api.llm import LLM
from labinfer.base.errors import ExitStatus, Interrupted
from labinfer.cli.commands.loading import announce, load
from labinfer.cli.commands.session import Session
from labinfer.observe.output_file import STANDARD, OutputFile

logger = logging.getLogger(__name__)


def run(session: Session, own: VerifyOptions, job: RecordedJob | None = None) -> int:
    """Verify a job on every rank. On rank 0, returns 0 if all recomputed lines agree, and 1 if a line differs.

    Args:
        job: the job's files, opened by rank 0; None on other ranks.

    Raises:
        CollectiveError: the job's files or the model are unsuitable; on every rank.
    """
    model = session.options.model
    if not model.is_reproducible:
        session.options = dataclasses.replace(session.options, model=dataclasses.replace(model, reproducible="on"))
    group, lines = session.join(), []
    with group.raise_on_all_ranks():
        if group.rank == 0:
            lines = job.choose(own.sample, own.seed)
            check_complete(lines, job.output)
    llm = load(session)
    changes: dict[str, str] = {}
    with group.raise_on_all_ranks():
        if group.rank == 0:
            now = llm.fingerprint.with_defaults(job.run.sampling)
            changes = describe_changes(job, now, llm.files.identity)
    must_differ = changes.keys() - {*HARMLESS_PARTS}
    recomputes = group.gather_bytes(b"no" if must_differ else b"yes")[0] == b"yes"
    status = ExitStatus.OK
    with group.raise_on_all_ranks():
        if group.rank == 0:
            show = OutputFile(STANDARD).write
            for part, text in changes.items():
                show(f"fingerprint differs in {part}: {text}\n")
    if recomputes:
        session.signals.running = True
        with group.raise_on_all_ranks():
            if group.rank == 0:
                status = _Verification(llm, session, job, lines).run()
            else:
                llm.follow()
        session.signals.running = False
    elif group.rank == 0:
        show(f"{job.output}: not recomputed, as its answers depend on what differs\n")
        status = ExitStatus.SOME_FAILED
    llm.close()
    return 128 + session.signals.signum if session.signals.signum else status


@dataclasses.dataclass(frozen=True)
class _Verification:
    """The part of a verification that runs on rank 0, while the other ranks take part in the steps."""

    llm: LLM
    session: Session
    job: RecordedJob
    lines: list[RecordedLine]

    def run(self) -> int:
        """Recompute the chosen lines, and print the number of lines that agree and the first difference. Returns the exit
        status."""
        announce({self.session.options.model.model: self.llm})
        try:
            records = self._recompute()
        except Interrupted:
            logger.info("interrupted; nothing is verified")
            return ExitStatus.OK
        differing = [
            (line, difference)
            for line in self.lines
            if (difference := find_difference(line.record, records[line.number])) is not None
        ]
        OutputFile(STANDARD).write(self._describe(differing))
        return ExitStatus.SOME_FAILED if differing else ExitStatus.OK

    def _recompute(self) -> dict[int, dict]:
        """Recomputed output lines, by the number of their input line."""
        output = RecomputedLines()
        progress = JobProgress("auto", self.llm.clock, len(self.lines), 0)
        job = BatchJob(
            [(line.number, line.text) for line in self.lines],
            output,
            progress,
            defaults=self.job.sampling(),
            model_name=self.session.options.model.model,
            fingerprint=self.llm.fingerprint,
        )
        job.run(self.llm, self.session.signals.check)
        return output.records

    def _describe(self, differing: list[tuple[RecordedLine, Difference]]) -> str:
        count, output = len(self.lines), self.job.output
        of_all = f"{count} of {sum(not entry.failed for entry in self.job.entries)} lines recomputed"
        if not differing:
            tokens, logprobs = map(sum, zip(*(count_compared(line.record) for line in self.lines), strict=True))
            return (
                f"{output}: {of_all}, all agree: {tokens} tokens, {logprobs} of them with log-probabilities; "
                f"{self.job.run.fingerprint.digest}\n"
            )
        line, difference = differing[0]
        return (
            f"{output}: {of_all}, {len(differing)} differ\n"
            f"first difference: line {line.output_number} of {output} (input line {line.number}), {difference.where}: "
            f"expected {difference.expected}, found {difference.recomputed}\n"
        )
