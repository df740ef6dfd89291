"""PromptLengths: counts the prompt tokens of a job's lines, for a plan that takes prompt lengths into account."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.input_processor import InputProcessor
from labinfer.requests.jsonl import parse_line


class PromptLengths:
    """Counts prompt tokens with a model's tokenizer, which is loaded at the first call.

    Args:
        directory: model directory.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    @cached_property
    def _processor(self) -> InputProcessor:
        return InputProcessor(self._directory, required=True)

    def __call__(self, line: str) -> int:
        """Number of prompt tokens of a JSONL line.

        Raises:
            UserError: the line is not a request for generation, or there is no tokenizer.
        """
        parsed = parse_line(line.strip().encode(), SamplingParams())
        if parsed.embedding is not None or parsed.scoring is not None:
            raise UserError("embedding and score requests generate no tokens to plan for; remove this line")
        return len(self._processor.encode(parsed.prompt))
