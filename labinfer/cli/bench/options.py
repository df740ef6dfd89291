"""Options of the benchmarks. Fields of the classes become command-line flags, like the options in ``labinfer.base.config``."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from labinfer.base.config import DTYPE_SPELLINGS, FLOAT_DTYPES
from labinfer.base.errors import UserError
from labinfer.base.option_fields import option

GOALS = ("ttft", "tpot", "e2el")
"""Latencies for which ``--goodput`` takes a limit."""


@dataclass(frozen=True)
class BenchOptions:
    """Requests of a benchmark: prompts of random token ids, and outputs that ignore end-of-sequence tokens."""

    input_len: int = option(128, "prompt tokens per request", metavar="N", least=1)
    output_len: int = option(128, "output tokens per request", metavar="N", least=1)
    seed: int = option(0, "random seed of prompts and arrival times", metavar="N")
    output_json: str = option("", "also write the results to this JSON file", metavar="FILE")
    plot: str = option(
        "",
        "also draw some of the steps as a Gantt chart with a row per rank: .png, .pdf or .svg (needs matplotlib)",
        metavar="FILE.png",
    )


@dataclass(frozen=True)
class LatencyOptions:
    """Size of the batch that ``bench latency`` runs again and again, and number of repetitions."""

    batch_size: int = option(8, "requests in the batch", metavar="N", least=1)
    num_iters_warmup: int = option(2, "warm-up batches, which are not measured", metavar="N")
    num_iters: int = option(10, "measured batches", metavar="N", least=1)


@dataclass(frozen=True)
class LoadOptions:
    """Number of the requests of a benchmark, and the file that they come from."""

    num_prompts: int = option(100, "measured requests", metavar="N", least=1)
    num_warmups: int = option(1, "random warm-up requests, which are not measured", metavar="N")
    dataset: str = option(
        "",
        "JSONL file of requests in the format of a job's --input, instead of random prompts; --output-len applies "
        "to lines without max_tokens",
        metavar="FILE",
    )
    workload: str = option(
        "",
        "trace of request lengths, with random tokens as prompts: Azure, BurstGPT, Mooncake (shared prefixes are "
        "kept), or JSONL with prompt_tokens and output_tokens; bench serve and simulate also use its arrival times",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if self.dataset and self.workload:
            raise UserError(
                f"--dataset {self.dataset} and --workload {self.workload} both choose the requests; give one"
            )

    def check_files(self) -> None:
        """Check that the file of ``--dataset`` or ``--workload`` exists, before the model is loaded, which takes long.
        The file is not opened, as a pipe can be read only once.

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
    """Arrival times of the requests of a benchmark, and limits of their latencies."""

    request_rate: float = option(
        float("inf"),
        "requests per second (Poisson process); inf sends all at once; a --workload's arrival times are scaled to "
        "this rate, and kept as they are with inf",
        metavar="R",
    )
    burstiness: float = option(
        1.0,
        "shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, below 1 is burstier, "
        "above 1 more regular",
        metavar="B",
    )
    max_concurrency: int = option(
        0, "maximum number of open requests; the next is sent when one finishes (default: no limit)", metavar="N"
    )
    goodput: tuple[str, ...] = option(
        (),
        "targets in milliseconds for ttft, tpot and e2el, such as ttft:500,tpot:50; goodput counts the requests "
        "that meet all of them",
        metavar="NAME:MS[,…]",
    )

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise UserError(f"--request-rate must be above 0, not {self.request_rate:g}")
        if not self.burstiness > 0:
            raise UserError(f"--burstiness must be above 0, not {self.burstiness:g}")
        _ = self.goals  # checks --goodput before a model is loaded

    @property
    def goals(self) -> dict[str, float]:
        """Latency limits of ``--goodput`` in seconds, by name: ``{"ttft": 0.5}`` for ``ttft:500``.

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
                    f"--goodput {text!r}: write NAME:MILLISECONDS with a name from {', '.join(GOALS)}, such as ttft:500"
                )
        return goals


@dataclass(frozen=True)
class AccuracyOptions:
    """Evaluation texts and reference dtype of ``bench accuracy``."""

    text: str = option(
        "",
        "evaluation text: JSONL lines with text or messages, or plain text (default: for the models that come with "
        "LABInfer, held-out conversations)",
        metavar="FILE",
    )
    reference_dtype: str = option(
        "float32",
        "dtype of the reference model; bfloat16 takes half the memory",
        choices=FLOAT_DTYPES,
        spellings=DTYPE_SPELLINGS,
    )
    per_layer: bool = option(False, "also report the error of each matrix, and of the hidden states after each layer")
    output_json: str = option("", "also write all results to this JSON file", metavar="FILE")

    def __post_init__(self) -> None:
        if self.reference_dtype not in FLOAT_DTYPES:
            raise UserError(f"--reference-dtype {self.reference_dtype}: choose one of {', '.join(FLOAT_DTYPES)}")


@dataclass(frozen=True)
class CheckDeviceOptions:
    """Output file of ``check-device``."""

    json: str = option("", "also write the results to this JSON file, for a report", metavar="FILE")


@dataclass(frozen=True)
class FunctionBenchOptions:
    """Output files of ``bench functions``."""

    output_json: str = option("", "also write the results to this JSON file", metavar="FILE")
    plot: str = option(
        "", "also draw them as a roofline plot: .png, .pdf or .svg (needs matplotlib)", metavar="FILE.png"
    )
