"""Chat: reads messages and commands from a terminal, and writes answers to the terminal."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing

from labinfer.base.errors import ExitStatus, Interrupted, UserError
from labinfer.cli.terminal.backend import AnswerFailed, Backend, ChatReply, MessageRefused, ReasoningPiece
from labinfer.cli.terminal.conversation import Conversation, settings
from labinfer.cli.terminal.terminal import Terminal
from labinfer.comm.group.signals import SignalGuard

COMMANDS = {
    "/system": "[TEXT|off]: show, set or remove the system prompt",
    "/set": "[NAME [VALUE]]: show or change sampling parameters, as in /set temperature 0.7; without VALUE, reset to the default",
    "/undo": ": remove the last message and its reply",
    "/retry": ": regenerate the last reply",
    "/reset": ": start a new conversation with the same system prompt and sampling parameters",
    "/reasoning": ": show the reasoning of the last reply",
    "/stats": ": statistics of the last reply and of this chat",
    "/save": "FILE: save the conversation as JSON",
    "/help": ": list the commands",
    "/exit": ": quit (also Ctrl-D)",
}
FORMER_NAMES = {"/thoughts": "/reasoning"}
"""Names that commands had in earlier versions, and still have → current names."""
HELP = f"""{chr(10).join(f"{name} {text}".replace(" :", ":") for name, text in COMMANDS.items())}
Ctrl-C stops a reply. A line that ends with \\ continues on the next; lines between two \"\"\" are one message."""


class Chat:
    """A conversation with a model.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        terminal: Terminal,
        backend: Backend,
        conversation: Conversation,
        signals: SignalGuard,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._terminal, self._backend, self._conversation, self._signals = terminal, backend, conversation, signals
        self._clock = clock
        self._answers: list[ChatReply] = []
        self._unanswered = ""
        """The user's last message if it got no answer; such a message is not in the conversation."""
        self._num_failed = 0
        self._is_over = False

    def run(self) -> ExitStatus:
        """Chat until the user leaves. Returns ``SOME_FAILED`` if standard input is not a terminal and a message got no answer.

        Raises:
            Interrupted: a signal other than SIGINT arrived, or standard output was closed (SIGPIPE).
            UserError: the terminal is gone.
        """
        if self._terminal.is_interactive:
            self._greet()
        while not self._is_over:
            try:
                self._take(self._terminal.read())
            except EOFError:
                if self._terminal.is_interactive:
                    self._terminal.write("\n")
                break
            except Interrupted as error:
                self._forgive(error)
                self._terminal.write("\n" if self._terminal.is_interactive else "")
                self._terminal.say("Ctrl-D or /exit quits")
        failed = self._num_failed and not self._terminal.is_interactive
        return ExitStatus.SOME_FAILED if failed else ExitStatus.OK

    def _greet(self) -> None:
        try:
            self._terminal.say(f"{self._backend.describe()}; /help lists the commands, Ctrl-D quits")
        except AnswerFailed as error:
            self._fail(error)

    def _take(self, text: str) -> None:
        """Handle one input of the user: a message, or a command that begins with a slash."""
        word, _, rest = text.strip().partition(" ")
        word = FORMER_NAMES.get(word, word)
        if not word:
            return
        if not text.startswith("/"):
            self._ask(text)
            return
        try:
            commands: dict[str, Callable[[str], None]] = {
                name: getattr(self, "_" + name.removeprefix("/")) for name in COMMANDS
            }
            if word not in commands:
                raise UserError(
                    f"unknown command {word}; /help lists the commands. Begin with a space to send it as a message"
                )
            commands[word](rest.strip())
        except UserError as error:
            self._fail(error)

    def _ask(self, text: str) -> None:
        answer, begin = ChatReply(), self._clock()
        self._unanswered, thinks_since = text, None
        try:
            messages = self._conversation.messages(text)
            with closing(self._backend.stream(messages, self._conversation.settings, answer)) as pieces:
                for piece in pieces:
                    if answer.seconds_to_first is None:
                        answer.seconds_to_first = self._clock() - begin
                    if isinstance(piece, ReasoningPiece):
                        if thinks_since is None:
                            thinks_since = self._clock()
                            self._terminal.say("[thinking …]")
                        answer.reasoning += piece
                        continue
                    self._end_reasoning(answer, thinks_since)
                    thinks_since = None
                    answer.text += piece
                    self._terminal.write(piece)
        except AnswerFailed as error:
            self._fail(error)
            if answer.text:
                self._terminal.say(
                    "the reply is incomplete and not part of the conversation; /retry sends the message again"
                )
            if isinstance(error, MessageRefused) and self._conversation.exchanges:
                self._terminal.say("/undo removes the last exchange, /reset starts a new conversation")
            return
        except Interrupted as error:
            self._forgive(error)
            self._terminal.write("\n" if self._terminal.is_interactive else "")  # in the line after the terminal's ^C
            answer.finish_reason = "stopped"
        self._end_reasoning(answer, thinks_since)
        answer.seconds = self._clock() - begin
        self._terminal.end_line()
        if answer.finish_reason == "stopped":
            self._terminal.say("[stopped]")
        elif answer.finish_reason == "length":
            self._terminal.say("[truncated: max_tokens or the context length is reached]")
        elif answer.finish_reason not in ("stop", ""):
            self._terminal.say(f"[finish reason: {answer.finish_reason}]")
        elif not answer.text:
            self._terminal.say("[empty reply]")
        if answer.text or answer.finish_reason != "stopped":
            self._conversation.exchanges.append((text, answer.text))
            self._unanswered = ""
        self._answers.append(answer)

    def _end_reasoning(self, answer: ChatReply, since: float | None) -> None:
        """Write a line with the duration of the reasoning, which began at ``since``. Does nothing if ``since`` is None."""
        if since is not None:
            seconds = self._clock() - since
            answer.reasoning_seconds += seconds
            self._terminal.say(f"[{seconds:.1f} s of reasoning; /reasoning shows it]")

    def _forgive(self, error: Interrupted) -> None:
        """Ignore ``error`` if Ctrl-C caused it; otherwise raise it again."""
        if error.signum != signal.SIGINT:
            raise error
        self._signals.dismiss_interrupt()

    def _fail(self, error: UserError) -> None:
        self._num_failed += 1
        self._terminal.say(f"labinfer: error: {error}")

    # Handlers of commands; the argument is the text after the command's name.

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "off" else text
        else:
            self._terminal.say(self._conversation.system or "no system prompt")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self._conversation.set(name, value.strip())
        self._terminal.say(self._conversation.describe_settings())
        if not name:
            self._terminal.say(f"parameters: {', '.join(settings())}")

    def _undo(self, text: str) -> None:
        self._terminal.say(f"removed: {self._take_back()}")

    def _retry(self, text: str) -> None:
        self._ask(self._unanswered or self._take_back())

    def _take_back(self) -> str:
        self._unanswered = ""
        if not self._conversation.exchanges:
            raise UserError("the conversation is empty")
        return self._conversation.exchanges.pop()[0]

    def _reset(self, text: str) -> None:
        self._conversation.exchanges.clear()
        self._unanswered = ""
        self._terminal.say("new conversation")

    def _reasoning(self, text: str) -> None:
        reasoning = self._answers[-1].reasoning.strip() if self._answers else ""
        self._terminal.say(reasoning or "the last reply has no reasoning")

    def _stats(self, text: str) -> None:
        if not self._answers:
            raise UserError("no statistics before the first reply")
        self._terminal.say("last reply: " + self._answers[-1].describe())
        prompts, tokens = (
            sum(getattr(answer, name) or 0 for answer in self._answers) for name in ("prompt_tokens", "num_tokens")
        )
        count, is_known = len(self._answers), all(answer.num_tokens is not None for answer in self._answers)
        self._terminal.say(
            f"this chat: {count} repl{'ies' if count > 1 else 'y'}, {prompts} prompt tokens, {tokens} output tokens"
            + ("" if is_known else " (incomplete: the server did not report all counts)")
        )

    def _save(self, text: str) -> None:
        if not text:
            raise UserError("/save needs a file name")
        self._conversation.save(text, self._backend.model)
        self._terminal.say(f"saved to {text}")

    def _help(self, text: str) -> None:
        self._terminal.say(HELP)

    def _exit(self, text: str) -> None:
        self._is_over = True
