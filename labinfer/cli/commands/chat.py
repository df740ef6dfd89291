"""``launch.py chat``: a conversation with a model that the ranks of this launch hold; rank 0 has the terminal."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from labinfer.api.llm import LLM
from labinfer.base.errors import ExitStatus, Interrupted, UserError
from labinfer.cli.commands.loading import load
from labinfer.cli.commands.session import Session
from labinfer.cli.terminal.chat import COMMANDS, Chat
from labinfer.cli.terminal.conversation import Conversation
from labinfer.cli.terminal.launchers_terminal import LaunchersTerminal
from labinfer.cli.terminal.options import ChatOptions
from labinfer.cli.terminal.own_ranks import OwnRanks
from labinfer.cli.terminal.terminal import Terminal


def run(session: Session, own: ChatOptions, sampling: dict[str, Any]) -> int:
    """Chat on rank 0 until the user leaves, while the other ranks follow; returns the exit status.

    Args:
        sampling: sampling parameters that the user has set.

    Raises:
        CollectiveError: the model cannot chat, an option is invalid, or the terminal is gone; on every rank.
    """
    group, signals, status = session.join(), session.signals, int(ExitStatus.OK)
    conversation = Conversation(own.system, sampling)
    llm = load(session)
    with group.raise_on_all_ranks():
        if group.rank == 0 and not (llm.tokenizer and llm.tokenizer.has_chat_template):
            raise UserError(
                f"--model {session.options.model.model} has no chat template; choose a chat model, or give --chat-template FILE"
            )
    signals.running, signals.interrupt_ends = True, False
    with group.raise_on_all_ranks():
        if group.rank == 0:
            try:
                status = _talk(llm, session, conversation)
            except Interrupted as error:
                status = 128 + error.signum
            except UserError:
                llm.engine.end_run()  # makes the other ranks return from ``LLM.follow``
                raise
            llm.engine.end_run()
        else:
            llm.follow()
    llm.close()
    return 128 + signals.signum if signals.signum == signal.SIGTERM else status


def _talk(llm: LLM, session: Session, conversation: Conversation) -> ExitStatus:
    """Chat with the user on rank 0, until the user leaves."""
    launchers = LaunchersTerminal.find() if session.environment.launcher != "single" else None
    terminal = Terminal(session.signals, list(COMMANDS), launchers)
    chat = Chat(terminal, OwnRanks(llm, terminal.check), conversation, session.signals)
    with launchers.held() if launchers else contextlib.nullcontext():
        return chat.run()
