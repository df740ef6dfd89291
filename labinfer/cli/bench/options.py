"""Options of the benchmarks; see ``labinfer.base.config`` for how these become flags."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from labinfer.base.config import DTYPE_SPELLINGS, FLOAT_DTYPES
from labinfer.base.errors import UserError
from labinfer.base.option_fields import option

GOALS = ("ttft", "tpot", "e2el")
"""Names that ``--goodput`` takes."""


@dataclass(frozen=True)
class BenchOptions:
    """Requests of a benchmark: prompts of random token ids, and answers that ignore end-of-sequence tokens."""

    input_len: int = option(128, "tokens of a prompt", metavar="N", least=1)
    output_len: int = option(128, "tokens of an answer", metavar="N", least=1)
    seed: int = option(0, "of the random prompts and arrivals", metavar="N")
    output_json: str = option("", "also write the figures to this file", metavar="FILE")
    plot: str = option(
        "",
        "also draw some of the steps as a Gantt chart, with a row for each rank: .png, .pdf or .svg (needs matplotlib)",
        metavar="FILE.png",
    )


@dataclass(frozen=True)
class LatencyOptions:
    """A fixed batch, repeated."""

    batch_size: int = option(8, "requests in the batch", metavar="N", least=1)
    num_iters_warmup: int = option(2, "batches at the beginning that do not count", metavar="N")
    num_iters: int = option(10, "batches that count", metavar="N", least=1)


@dataclass(frozen=True)
class LoadOptions:
    """Number and source of the requests."""

    num_prompts: int = option(100, "requests that count", metavar="N", least=1)
    num_warmups: int = option(1, "random requests at the beginning that do not count", metavar="N")
    dataset: str = option(
        "",
        "JSONL file of requests, as --input of a job takes it, instead of random ones; --output-len is for lines without "
        "max_tokens",
        metavar="FILE",
    )
    workload: str = option(
        "",
        "file of lengths, whose prompts are made of random tokens: a trace of Azure, BurstGPT or Mooncake (with the prefixes that its "
        "requests share), or JSONL with prompt_tokens and output_tokens; bench serve and simulate keep its arrivals",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if self.dataset and self.workload:
            raise UserError(f"--dataset {self.dataset} and --workload {self.workload} both say what is asked; give one")

    def check_files(self) -> None:
        """Check that the file of requests exists, before the slow loading of the model. Does not open it, as a pipe can be read only
        once.

        Raises:
            UserError: the file does not exist.
        """
        for flag, path in (("--dataset", self.dataset), ("--workload", self.workload)):
            if path:
                try:
                    os.stat(path)
                except OSError as error:
                    raise UserError(f"cannot read {flag} {path}: {error.strerror}") from None


@dataclass(frozen=True)
class ServeOptions:
    """Arrivals of requests, and goals for their times."""

    request_rate: float = option(
        float("inf"),
        "requests a second, by a Poisson process; inf for all at once; the arrivals of a --workload are stretched to it, or kept with inf",
        metavar="R",
    )
    burstiness: float = option(
        1.0,
        "shape of the gaps between requests (gamma distribution): 1 for a Poisson process, less for bursts, more for even gaps",
        metavar="B",
    )
    max_concurrency: int = option(
        0, "requests open at once; later ones are sent when one is done (default: any number)", metavar="N"
    )
    goodput: tuple[str, ...] = option(
        (),
        "milliseconds that a good request keeps, of ttft, tpot and e2el, such as ttft:500,tpot:50",
        metavar="NAME:MS[,…]",
    )

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise UserError(f"--request-rate must be above 0, not {self.request_rate:g}")
        if not self.burstiness > 0:
            raise UserError(f"--burstiness must be above 0, not {self.burstiness:g}")
        _ = self.goals  # checks the goals before anything is loaded

    @property
    def goals(self) -> dict[str, float]:
        """``--goodput`` in seconds, by name: ``{"ttft": 0.5}`` for ``ttft:500``.

        Raises:
            UserError: a name is unknown, or milliseconds are not above 0.
        """
        goals = {}
        for text in self.goodput:
            name, _, milliseconds = text.partition(":")
            try:
                goals[name] = float(milliseconds) / 1000
            except ValueError:
                goals[name] = math.nan
            if name not in GOALS or not goals[name] > 0:
                raise UserError(
                    f"--goodput {text!r}: write a name of {', '.join(GOALS)} and milliseconds, such as ttft:500"
                )
        return goals


@dataclass(frozen=True)
class AccuracyOptions:
    """Evaluation text and reference model."""

    text: str = option(
        "",
        "the text: JSONL lines with text or messages, or plain text (default: for the models that come with LABInfer, "
        "conversations that they were not trained on)",
        metavar="FILE",
    )
    reference_dtype: str = option(
        "float32",
        "dtype of the model that all are compared with; bfloat16 takes half the memory",
        choices=FLOAT_DTYPES,
        spellings=DTYPE_SPELLINGS,
    )
    per_layer: bool = option(False, "also the error of every matrix, and of the hidden states after each layer")
    output_json: str = option("", "also write all figures to this JSON file", metavar="FILE")

    def __post_init__(self) -> None:
        if self.reference_dtype not in FLOAT_DTYPES:
            raise UserError(f"--reference-dtype {self.reference_dtype}: choose one of {', '.join(FLOAT_DTYPES)}")


@dataclass(frozen=True)
class FunctionBenchOptions:
    """Files for the figures, beside the table on standard output."""

    output_json: str = option("", "also write them to this JSON file", metavar="FILE")
    plot: str = option(
        "", "also draw them under the machine's ceilings: .png, .pdf or .svg (needs matplotlib)", metavar="FILE.png"
    )
