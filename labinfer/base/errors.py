"""Exceptions, by who can act on them, and the exit statuses, which are part of the interface."""

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
    """A prompt that cannot fit in the model's context."""

    @classmethod
    def for_context(cls, num_tokens: int, problem: str) -> PromptTooLong:
        """The error in OpenAI's sentence and in Anthropic's words, by which clients know it.

        Args:
            num_tokens: size of the context.
            problem: what is too long, in words.
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
    """The other end of a connection is gone. The rank that failed first has printed why."""


class BrokenConnection(RuntimeError):
    """The connection between the gateway and rank 0 has broken."""


class FilesChanged(RuntimeError):
    """A file of the model was written to while it was loaded. The next start reads it anew."""


class Interrupted(Exception):
    """SIGINT or SIGTERM, whichever ``signum`` is, asked this run to end."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by signal {signum}")
        self.signum = signum


def first_line(error: BaseException) -> str:
    """The first line of an exception's text; its class where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def is_failure(error: BaseException) -> bool:
    """Whether an exception is the failure of some work, and not the end of this process. A panic of a library in Rust is a
    failure, too, though its class, which cannot be imported, says otherwise."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
