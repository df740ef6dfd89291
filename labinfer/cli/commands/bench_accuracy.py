"""``launch.py bench accuracy``: loss of quality by dtypes, quantized weights and KV cache dtypes.

Texts are run through the model in float32 (the reference), and then through each variant of the model. Predictions are compared at
every token, over the whole vocabulary. The reference model stays loaded. Of its run, only the final hidden states are kept; for
each variant, its LM head computes the logits again, a few rows at a time.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from labinfer.base.config import QUANTIZATION_GROUP_SIZES, EngineOptions, ModelOptions
from labinfer.base.errors import ExitStatus, UserError
from labinfer.base.option_fields import join
from labinfer.base.standard_error import terminal_columns
from labinfer.cli.bench.divergence import Divergence, summarize
from labinfer.cli.bench.inspection import (
    ActivationSample,
    ErrorSums,
    input_peaks,
    layer_errors,
    product_errors,
    weight_errors,
)
from labinfer.cli.bench.options import AccuracyOptions
from labinfer.cli.bench.score_texts import TextBatches, compare_runs, run_texts
from labinfer.cli.commands.session import Session
from labinfer.comm.group.rank_group import RankGroup
from labinfer.launch.build import build_rank
from labinfer.launch.find_model import find_model
from labinfer.launch.rank_runtime import RankRuntime
from labinfer.observe.output_file import STANDARD, OutputFile, tell_written
from labinfer.observe.table import format_bytes, format_table
from labinfer.text.documents import Document, cut, read_documents
from labinfer.text.tokenizer import Tokenizer
from labinfer.weights.loader import weight_bytes
from labinfer.weights.resolve import BUNDLED

logger = logging.getLogger(__name__)

HELD_OUT = Path(__file__).parents[2] / "assets" / "held-out" / "conversations.jsonl"
"""Conversations that the bundled models were not trained on: ``tools/demo_model/held_out.py``."""
LONGEST_TEXT = 1024
"""Maximum number of tokens of a text, unless ``--max-model-len`` is given. Longer texts are cut into parts."""


class Inspected(msgspec.Struct):
    """Errors of one variant relative to the reference, by the name of the weight matrix or layer; see
    ``cli/bench/inspection.py``."""

    weights: dict[str, ErrorSums] = {}
    products: dict[str, ErrorSums] = {}
    layers: dict[str, ErrorSums] = {}
    input_peaks: dict[str, ErrorSums] = {}


class RankReport(msgspec.Struct):
    """Results for one variant, of one rank or merged over all ranks."""

    weight_bytes: int
    inspected: Inspected
    everything: Divergence | None = None
    """Divergence from the reference over all tokens; None on ranks without logits."""
    answers: Divergence | None = None
    """Divergence from the reference over the tokens of the conversations' answers only."""


@dataclass(frozen=True)
class Variant:
    """A combination of dtype, weight quantization and KV cache dtype to measure."""

    dtype: tuple[str, ...] = ("bfloat16",)
    quantization: tuple[str, ...] = ModelOptions.quantization
    group_size: int = ModelOptions.quantization_group_size
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        name = join(self.dtype)
        if not {*self.quantization} <= {"auto", "none"}:
            name += f" {join(self.quantization)}" + (f"/{self.group_size}" if "int4" in self.quantization else "")
        return name + (f", KV {self.kv_cache_dtype}" if self.kv_cache_dtype != "auto" else "")


VARIANTS = (
    Variant(),
    Variant(("float16",)),
    Variant(quantization=("int8",)),
    *(Variant(quantization=("int4",), group_size=size) for size in QUANTIZATION_GROUP_SIZES),
    Variant(kv_cache_dtype="int8"),
)


def choose_variants(options: EngineOptions, own_dtype: str) -> tuple[Variant, ...]:
    """The variant that the options select; all variants if they select none.

    Args:
        own_dtype: the checkpoint's dtype, that ``--dtype auto`` selects.
    """
    model = options.model
    given = Variant(model.dtype, model.quantization, model.quantization_group_size, options.cache.kv_cache_dtype)
    if given == Variant(ModelOptions().dtype):
        return VARIANTS
    dtypes = tuple(own_dtype if dtype == "auto" else dtype for dtype in given.dtype)
    return (dataclasses.replace(given, dtype=dtypes),)


def run(session: Session, own: AccuracyOptions) -> int:
    """Measure the variants, and print the tables on rank 0."""
    group, options = session.join(), session.options
    output = None
    with group.raise_on_all_ranks():
        group.refuse_spares(options.parallel.ranks)
        if group.rank == 0 and own.output_json:
            output = OutputFile(own.output_json, "--output-json", {"--text": own.text})
    directory, config = find_model(group, options)
    documents: list[Document] = []
    with group.raise_on_all_ranks():
        if config.no_generation:
            raise UserError(f"--model {options.model.model} {config.no_generation} and predicts nothing")
        if group.rank == 0:
            length = min(options.model.max_model_len or LONGEST_TEXT, config.max_position)
            documents = _read(options.model, directory, own.text, length)
    data = group.comm.all_gather_bytes(msgspec.msgpack.encode(documents))[0]
    documents = msgspec.msgpack.decode(data, type=list[Document])
    bench = AccuracyBench(group, options, own, documents)
    reports = bench.measure(choose_variants(options, config.dtype))
    if group.rank == 0:
        OutputFile(STANDARD).write(format_report(own.reference_dtype, reports, terminal_columns(sys.stdout)) + "\n")
    if output is not None:
        output.begin()
        record = as_dict(options.model.model, own, reports)
        output.write(msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n")
        tell_written(own.output_json)
    group.close()
    return ExitStatus.OK


def _read(model: ModelOptions, directory: Path, text: str, length: int) -> list[Document]:
    """Read the evaluation texts, cut to ``length`` tokens.

    Raises:
        UserError: there is no text, or no tokenizer for it.
    """
    if not text and model.model not in BUNDLED:
        raise UserError(f"--model {model.model} needs --text FILE with an evaluation text that it was not trained on")
    if length < 2:
        raise UserError(f"--max-model-len {length} leaves no token to predict; give at least 2")
    tokenizer = Tokenizer(Path(model.tokenizer) if model.tokenizer else directory)
    return cut(read_documents(Path(text) if text else HELD_OUT, "--text", tokenizer), length)


class AccuracyBench:
    """Loads the reference model, and then one variant after another while the reference stays loaded. Every method is
    collective.

    Args:
        documents: evaluation texts, equal on all ranks.
    """

    def __init__(self, group: RankGroup, options: EngineOptions, accuracy: AccuracyOptions, documents: list[Document]):
        self._group, self._inspects = group, accuracy.per_layer
        self._steps = TextBatches.split([document.token_ids for document in documents], options.cache.tokens_per_block)
        longest = max(len(document.token_ids) for document in documents)
        self._options = dataclasses.replace(
            options,
            model=dataclasses.replace(options.model, max_model_len=longest),
            cache=dataclasses.replace(options.cache, num_kv_blocks=self._steps.num_blocks),
            # No scheduler runs, so step times need not be measured, nor host memory reserved for swapping.
            # A text is one step, so that every layer has all its tokens.
            scheduler=dataclasses.replace(
                options.scheduler,
                max_inflight=1,
                preemption_mode="recompute",
                max_num_batched_tokens=longest,
                chunked_prefill_size=longest,
            ),
        )
        self._in_answer = torch.tensor(
            [place >= document.answer for document in documents for place in range(1, len(document.token_ids))]
        )
        self._reference = self._build(Variant((accuracy.reference_dtype,), ("none",)), functions=("auto",))
        self._say("reference %s: %d tokens of text", accuracy.reference_dtype, len(self._in_answer))
        self._reference_states, self._reference_sample = self._run(self._reference)

    def measure(self, variants: Sequence[Variant]) -> dict[Variant, RankReport]:
        """Measure every variant. Returns the report of each variant, merged over all ranks."""
        reports = {}
        for number, variant in enumerate(variants, start=1):
            self._say("variant %d of %d: %s", number, len(variants), variant.name)
            reports[variant] = self._merge(self._measure(variant))
        return reports

    def _measure(self, variant: Variant) -> RankReport:
        parts = self._build(variant, self._options.model.functions)
        model, reference = parts.worker.runner.model, self._reference.worker.runner.model
        states, sample = self._run(parts)
        inspected = Inspected()
        if self._inspects:
            inspected.weights = weight_errors(model, reference)
            inspected.products = product_errors(model, reference, self._reference_sample)
            inspected.input_peaks = input_peaks(self._reference_sample)
            if parts.place.tp_rank == 0:  # hidden states are equal on all ranks of a stage
                inspected.layers = layer_errors(sample, self._reference_sample)
        report = RankReport(weight_bytes(model), inspected)
        compared = compare_runs(self._steps, self._reference, self._reference_states, parts, states)
        if compared is not None:
            report.everything = summarize(compared)
            if self._in_answer.any():
                report.answers = summarize(compared[self._in_answer])
        return report

    def _run(self, parts: RankRuntime) -> tuple[list[torch.Tensor], ActivationSample]:
        if not self._inspects:
            return run_texts(self._group, parts, self._steps), ActivationSample()
        with ActivationSample.taken(parts.worker.runner.model) as sample:
            return run_texts(self._group, parts, self._steps), sample

    def _build(self, variant: Variant, functions: tuple[str, ...]) -> RankRuntime:
        model = dataclasses.replace(
            self._options.model,
            dtype=variant.dtype,
            quantization=variant.quantization,
            quantization_group_size=variant.group_size,
            functions=functions,
        )
        cache = dataclasses.replace(self._options.cache, kv_cache_dtype=variant.kv_cache_dtype)
        options = dataclasses.replace(self._options, model=model, cache=cache)
        return build_rank(self._group, options, lambda done, total: None)[0]

    def _merge(self, mine: RankReport) -> RankReport:
        """Merge this rank's report with those of all other ranks."""
        with self._group.progress.without_limit():  # no timeout: ranks of the last stage may still compute logits
            parts = self._group.comm.all_gather_bytes(msgspec.msgpack.encode(mine))
        whole = RankReport(0, Inspected())
        for data in parts:
            part = msgspec.msgpack.decode(data, type=RankReport)
            whole.weight_bytes += part.weight_bytes
            whole.everything, whole.answers = part.everything or whole.everything, part.answers or whole.answers
            for field in Inspected.__struct_fields__:
                sums = getattr(whole.inspected, field)
                for name, squares in getattr(part.inspected, field).items():
                    sums[name] = sums[name] + squares if name in sums else squares
        return whole

    def _say(self, text: str, *values: object) -> None:
        if self._group.rank == 0:
            logger.info(text, *values)


def format_report(reference_dtype: str, reports: dict[Variant, RankReport], max_width: int = 0) -> str:
    """Tables of all variants, as text. For ``max_width`` see ``format_table``."""
    tables = [_format_figures(reference_dtype, "all tokens", reports, "everything")]
    if any(report.answers for report in reports.values()):
        tables.append(_format_figures(reference_dtype, "output tokens", reports, "answers"))
    names = {variant.name: report.inspected for variant, report in reports.items()}
    if not any(inspected.weights for inspected in names.values()):
        return "\n\n".join(tables)
    titles = {
        "weights": "error of each matrix",
        "products": "error of its outputs (reference inputs)",
        "layers": "error of the hidden states after each layer",
    }
    for field, title in titles.items():
        columns = [getattr(inspected, field) for inspected in names.values()]
        peaks = next(iter(names.values())).input_peaks if field == "products" else {}
        rows = [
            (
                key.removeprefix("model."),
                *([f"{peaks[key].relative:.1f}"] if peaks else []),
                *(f"{100 * column[key].relative:.3g} %" for column in columns),
            )
            for key in columns[0]
        ]
        header = ("layer" if field == "layers" else "matrix", *(["largest input"] if peaks else []), *names)
        tables.append(f"{title}\n{format_table(header, rows, max_width)}")
    return "\n\n".join(tables)


def _format_figures(reference_dtype: str, title: str, reports: dict[Variant, RankReport], field: str) -> str:
    figures = [getattr(report, field) for report in reports.values()]
    rows = [(reference_dtype, "", f"{figures[0].reference_perplexity:.4f}", "", "", "")]
    for (variant, report), divergence in zip(reports.items(), figures, strict=True):
        rows.append(
            (
                variant.name,
                format_bytes(report.weight_bytes),
                f"{divergence.perplexity:.4f}",
                f"{divergence.kl_divergence:.3g}",
                f"{divergence.largest_kl_divergence:.3g}",
                f"{100 * divergence.same_likeliest:.2f} %",
            )
        )
    header = (f"{figures[0].tokens} {title}", "weights", "perplexity", "KL", "max KL", "top-1 agreement")
    return format_table(header, rows)


def as_dict(model: str, accuracy: AccuracyOptions, reports: dict[Variant, RankReport]) -> dict:
    """Record of the measurement for ``--output-json``."""

    def relative(inspected: Inspected) -> dict:
        fields = {field: getattr(inspected, field) for field in Inspected.__struct_fields__}
        return {
            field: {name: squares.relative for name, squares in matrices.items()}
            for field, matrices in fields.items()
            if matrices
        }

    return {
        "model": model,
        "text": accuracy.text or "held-out conversations",
        "reference_dtype": accuracy.reference_dtype,
        "variants": [
            {
                "name": variant.name,
                **dataclasses.asdict(variant),
                "weight_bytes": report.weight_bytes,
                "all": report.everything,
                "answers": report.answers,
                **relative(report.inspected),
            }
            for variant, report in reports.items()
        ],
    }
