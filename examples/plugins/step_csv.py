"""Write the tokens and times of every step to CSV files, one for each rank.

    torchrun --nproc-per-node 2 launch.py -pp 2 --plugin examples/plugins/step_csv.py --step-sink csv=steps \
        --input examples/prompts.jsonl --output answers.jsonl

makes steps-0.csv and steps-1.csv. ``serve`` takes the same flags. Rows of one step have the same ``step_id`` on all ranks, so that
the files can be joined to see which stage the others wait for.
"""

import csv
from pathlib import Path

from labinfer import UserError, register
from labinfer.worker.step_sink import StepRecord, StepSink

COLUMNS = ("step_id", "stage", "tp_rank", "time", "num_sequences", "num_tokens", "num_decodes", "busy_ms", "waited_ms")


@register("step_sink", "csv")
class CsvSink(StepSink):
    """Appends a row for each step to ``ARGUMENT-RANK.csv``."""

    def __init__(self, argument, place):
        super().__init__(argument, place)
        path = Path(f"{argument or 'steps'}-{place.rank}.csv")
        try:
            self.file = path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--step-sink csv={argument}: {path} cannot be written: {error.strerror}") from None
        self.rows = csv.writer(self.file)
        if not self.file.tell():  # else an earlier run or another model has written the heading
            self.rows.writerow(COLUMNS)

    def write(self, step: StepRecord):
        self.rows.writerow(
            [
                step.step_id,
                self.place.stage,
                self.place.tp_rank,
                f"{step.time:.6f}",
                step.num_sequences,
                step.num_tokens,
                step.num_decodes,
                f"{1e3 * step.busy:.3f}",
                f"{1e3 * step.waited:.3f}",
            ]
        )
        self.file.flush()  # a server may be killed

    def close(self):
        self.file.close()
