"""Errors: exceptions, grouped by who can act on them, and exit statuses, which are part of the interface."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit status of ``launch.py``; signals add 128 as shells do (Ctrl-C: 130, SIGTERM: 143)."""

    OK = 0
    SOME_FAILED = 1
    """The job ran to its end, but some of its requests failed."""
    USAGE = 2
    """A flag, a file, the model or the layout is wrong, or the output could not be written."""
    INTERNAL = 70
    """A rank failed (sysexits' EX_SOFTWARE)."""


class UserError(ValueError):
    """A mistake that the user can correct. The text is one line: what was wrong, its value, what to do."""


class PromptTooLong(UserError):
    """A prompt that is longer than the model's context."""

    @classmethod
    def for_context(cls, num_tokens: int, problem: str) -> PromptTooLong:
        """Make the error in the wording of OpenAI's and Anthropic's APIs, which clients recognize.

        Args:
            num_tokens: context length.
            problem: clause that says which text or list is too long.
        """
        return cls(
            f"This model's maximum context length is {num_tokens} tokens. However, {problem}: the prompt is too long. "
            "Please reduce its length."
        )


class CollectiveError(UserError):
    """A ``UserError`` that every rank of the group raises; only rank 0 prints it."""


class WaitTimeout(RuntimeError):
    """A wait passed its limit; the text names the waiting rank, its stage and step, and the peer."""


class PeerLost(RuntimeError):
    """The other end of a connection is gone. The rank that failed first has printed the cause."""


class BrokenConnection(RuntimeError):
    """The connection between the gateway and rank 0 has broken."""


class FilesChanged(RuntimeError):
    """A model file changed while it was loaded. The next start reads the file again."""


class Interrupted(Exception):
    """SIGINT or SIGTERM (``signum``) has requested the end of this run."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by signal {signum}")
        self.signum = signum


def first_line(error: BaseException) -> str:
    """First line of an exception's text; the name of its class if the text is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def is_failure(error: BaseException) -> bool:
    """Whether an exception means that some work has failed, rather than that this process is to end. A panic in a Rust
    library is such a failure. Its class is not an ``Exception``; it is recognized by its name, as it cannot be
    imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
