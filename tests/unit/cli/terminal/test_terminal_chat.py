"""The parts of a chat in the terminal, each by itself; ``tests/test_chat.py`` has the whole."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labinfer.base.errors import ExitStatus, Interrupted, UserError
from labinfer.cli.terminal.backend import AnswerFailed, ChatReply, MessageRefused, ReasoningPiece
from labinfer.cli.terminal.chat import COMMANDS, Chat
from labinfer.cli.terminal.conversation import Conversation, settings
from labinfer.cli.terminal.line_editor import History
from labinfer.cli.terminal.line_reader import LineReader
from labinfer.cli.terminal.remote_server import RemoteServer
from labinfer.cli.terminal.terminal import read_message
from labinfer.requests.recommended_sampling import recommended_sampling


def message_of(*lines: str) -> str:
    """The first message of these lines."""
    left = list(lines)

    def read_line(is_first: bool) -> str:
        assert is_first == (len(left) == len(lines))
        if not left:
            raise EOFError
        return left.pop(0)

    return read_message(read_line)


class TestReadMessage:
    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (["hello", "next"], "hello"),
            (["one \\", "two\\", "", "next"], "one \ntwo\n"),
            (["one\\"], "one"),
            (['"""one', "", "  two", '"""', "next"], "one\n\n  two"),
            (['"""', "one\\", 'two"""'], "one\\\ntwo"),
            (['"""one"""', "next"], "one"),
            (['  """one', 'two"""  '], "one\ntwo"),
            (['"""', "one"], "one"),
            (['say """ twice'], 'say """ twice'),
            ([""], ""),
        ],
    )
    def test_lines_of_one_message(self, lines, message):
        assert message_of(*lines) == message

    def test_no_line_is_the_end(self):
        with pytest.raises(EOFError):
            message_of()


class TestLineReader:
    @given(st.lists(st.text(st.characters(exclude_characters="\n\r\x03", exclude_categories=["Cs"])), max_size=5))
    def test_all_lines_come_back(self, lines):
        read, write = os.pipe()
        os.write(write, "".join(line + "\n" for line in lines).encode())
        os.close(write)
        reader = LineReader(read, knows_ctrl_c=False)
        assert [reader.read() for _ in lines] == lines
        with pytest.raises(EOFError):
            reader.read()
        os.close(read)

    def test_ctrl_c_takes_away_what_was_typed_before_it_only(self):
        read, write = os.pipe()
        reader = LineReader(read, knows_ctrl_c=True)
        assert not reader.take_ctrl_c()
        os.write(write, b"one\nhalf\x03two\n")
        assert reader.take_ctrl_c() and not reader.take_ctrl_c()
        assert reader.read() == "two"
        os.write(write, b"half\x03three\n")
        assert (reader.read(), reader.read()) == ("\x03", "three")
        os.write(write, b"four")
        os.close(write)
        assert not reader.take_ctrl_c()
        assert reader.has_line and reader.read() == "four"
        os.close(read)


class TestConversation:
    def test_messages_are_in_order(self):
        conversation = Conversation("be brief", exchanges=[("a", "b")])
        assert [m["role"] for m in conversation.messages("c")] == ["system", "user", "assistant", "user"]
        assert Conversation().messages("c") == [{"role": "user", "content": "c"}]

    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("temperature", "0.7", 0.7),
            ("--top-k", "5", 5),
            ("max_tokens", "9", 9),
            ("ignore_eos", "true", True),
            ("stop", "the end", ("the end",)),
        ],
    )
    def test_settings_are_read_and_taken_back(self, name, text, value):
        conversation = Conversation()
        conversation.set(name, text)
        (key,) = conversation.settings
        assert conversation.settings == {key: value} and type(conversation.settings[key]) is type(value)
        conversation.set(name, "")
        assert conversation.settings == {}

    @pytest.mark.parametrize(
        ("name", "text", "complaint"),
        [
            ("temperature", "hot", "temperature must be a number, not 'hot'"),
            ("temperature", "-1", "temperature must be from 0 to 100, not -1.0"),
            ("top_k", "1.5", "top_k must be a whole number, not '1.5'"),
            ("ignore_eos", "maybe", "ignore_eos must be true or false, not 'maybe'"),
            ("n", "2", "unknown parameter 'n'"),
            ("num_beams", "2", "unknown parameter"),
            ("length_penalty", "1", "unknown parameter"),
            ("colour", "red", "unknown parameter"),
            ("min_tokens", "9", "min_tokens 9 is more than max_tokens 5"),
        ],
    )
    def test_setting_that_cannot_be_changes_nothing(self, name, text, complaint):
        conversation = Conversation(settings={"max_tokens": 5})
        with pytest.raises(UserError, match=f"^{complaint}"):
            conversation.set(name, text)
        assert conversation.settings == {"max_tokens": 5}

    def test_every_setting_can_be_none_of_these(self):
        for name in settings():
            if name != "stop":
                with pytest.raises(UserError, match=f"^{name} must be"):
                    Conversation().set(name, "nonsense")

    def test_settings_are_shown_as_they_are_typed(self):
        conversation = Conversation()
        assert conversation.describe_settings() == "all at the model's defaults"
        for name, text in (("temperature", "0.5"), ("ignore_eos", "true"), ("stop", "结束")):
            conversation.set(name, text)
        assert conversation.describe_settings() == 'temperature 0.5, ignore_eos true, stop ["结束"]'

    @pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/a", "/nonexistent/a", "/"])
    def test_file_that_cannot_be_is_an_error(self, path):
        with pytest.raises(UserError, match="/save|cannot write|exists"):
            Conversation().save(path, "demo")

    def test_what_is_saved_is_a_chat_request(self, tmp_path):
        from labinfer.requests.json_decode import decode_json
        from labinfer.requests.protocol import ChatBody

        conversation = Conversation("s", {"temperature": 0.5, "stop": ("x",)}, [("你好", "b")])
        conversation.save(str(tmp_path / "a.json"), "demo")
        body = decode_json((tmp_path / "a.json").read_bytes(), ChatBody)
        assert [message.content for message in body.messages] == ["s", "你好", "b"]
        assert (body.model, body.temperature, body.stop) == ("demo", 0.5, ["x"])
        for path in (tmp_path / "a.json", tmp_path / "no" / "b.json", tmp_path):
            with pytest.raises(UserError, match=str(path)):
                conversation.save(str(path), "demo")


class TestHistory:
    def test_it_comes_back_whole(self, tmp_path):
        path = tmp_path / "deep" / "history"
        history, messages = History.open(path), [f"message {number}\nin two lines 你好" for number in range(5)]
        for message in messages:
            history.append_string("in two lines")  # a line of the message
            history.add(message)
            history.add(message)
        with path.open("ab") as file:
            file.write(b"half a li\xff")
        assert [*History.open(path).load_history_strings()] == messages[::-1] and history.get_strings() == messages
        assert [file.name for file in path.parent.iterdir()] == [path.name]
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("block", [os.mkfifo, lambda path: path.parent.joinpath("file").write_text("")])
    def test_without_a_place_nothing_is_kept_and_nothing_fails(self, block, tmp_path):
        """As in a FIFO, which would be waited for, or below a file."""
        block(tmp_path / "history")
        path = tmp_path / "file" / "history" if (tmp_path / "file").exists() else tmp_path / "history"
        history = History.open(path)
        history.add("one")
        assert history.get_strings() == ["one"] and history.filename == os.devnull

    def test_place_that_is_lost_fails_nothing(self, tmp_path):
        history = History.open(tmp_path / "deep" / "history")
        (tmp_path / "deep" / "history").unlink()
        (tmp_path / "deep").rmdir()
        history.add("one")
        assert history.get_strings() == ["one"]


class TestRemoteServer:
    @pytest.mark.parametrize(
        "url", ["127.0.0.1:8000", "localhost", "ftp://a", "http://", "http://a:port", "http://a?b=1", "http://me@a", ""]
    )
    def test_what_is_no_address_is_refused(self, url):
        with pytest.raises(UserError, match="--url"):
            RemoteServer(url, "", "", signals=None)

    def test_key_that_no_header_can_have_is_refused(self):
        with pytest.raises(UserError, match="key"):
            RemoteServer("http://a", "a\nb", "", signals=None)


class FakeTerminal:
    """Reads from a list, and remembers what it was told."""

    def __init__(self, lines: list[Any], is_interactive: bool = True):
        self.lines, self.is_interactive = list(lines), is_interactive
        self.answers, self.said = "", []

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        return line

    def write(self, text: str) -> None:
        self.answers += text

    def end_line(self) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)


class FakeSignals:
    def dismiss_interrupt(self) -> None:
        pass


class Echo:
    """Answers with the last message; see ``Backend``."""

    model = "echo"

    def __init__(self):
        self.asked: list[list[dict[str, str]]] = []

    def describe(self) -> str:
        return self.model

    def stream(self, messages, settings, answer: ChatReply) -> Iterator[str]:
        self.asked.append(messages)
        text = messages[-1]["content"]
        if "fail" in text:
            yield "half"
            raise AnswerFailed("it failed")
        if "stop" in text:
            yield "half"
            raise Interrupted(signal.SIGINT)
        if "end" in text:
            raise Interrupted(signal.SIGTERM)
        if "refuse" in text:
            raise MessageRefused("it is too long")
        if "filter" in text:
            answer.finish_reason = "content_filter"
            return
        if "think" in text:
            yield from map(ReasoningPiece, ("Hm", ", so"))
        if "nothing" not in text:
            yield from text
        answer.finish_reason = "length" if "long" in text else "stop"


def chat_over(*lines: Any, is_interactive: bool = True) -> tuple[ExitStatus, FakeTerminal, Echo, Conversation]:
    terminal, echo, conversation = FakeTerminal(list(lines), is_interactive), Echo(), Conversation()
    status = Chat(terminal, echo, conversation, FakeSignals()).run()
    return status, terminal, echo, conversation


class TestChat:
    def test_what_is_stopped_stays_and_what_failed_does_not(self):
        status, terminal, _, conversation = chat_over("one", "stop", "fail", "long")
        assert conversation.exchanges == [("one", "one"), ("stop", "half"), ("long", "long")]
        assert "[stopped]" in terminal.said and any("truncated" in text for text in terminal.said)
        assert "labinfer: error: it failed" in terminal.said and any(
            "not part of the conversation" in text for text in terminal.said
        )
        assert status == ExitStatus.OK

    def test_answer_without_text_is_told_of(self):
        _, terminal, _, _ = chat_over("nothing", "filter")
        assert terminal.said[-2:] == ["[empty reply]", "[finish reason: content_filter]"]

    def test_reasoning_is_folded_away_and_no_part_of_the_conversation(self):
        _, terminal, echo, conversation = chat_over("/reasoning", "think", "/reasoning", "/stats", "one", "/thoughts")
        _, nothing, thinking, folded, shown, stats, *_, last = terminal.said
        assert nothing == last == "the last reply has no reasoning" and thinking == "[thinking …]" and shown == "Hm, so"
        assert folded.startswith("[0.0 s of reasoning") and "0.0 s of reasoning" in stats
        assert terminal.answers.split() == ["thinkone"] and conversation.exchanges == [
            ("think", "think"),
            ("one", "one"),
        ]
        assert [message["content"] for message in echo.asked[1]] == ["think", "think", "one"]

    def test_thought_without_an_answer_is_told_of(self):
        _, terminal, _, _ = chat_over("think nothing")
        assert terminal.said[-2].startswith("[0.0 s of reasoning") and terminal.said[-1] == "[empty reply]"

    def test_what_to_do_about_a_conversation_that_is_too_long(self):
        _, terminal, _, _ = chat_over("refuse")
        assert terminal.said[-1] == "labinfer: error: it is too long"  # there is nothing to take back
        _, terminal, _, _ = chat_over("one", "refuse")
        assert terminal.said[-2] == "labinfer: error: it is too long" and "/undo removes" in terminal.said[-1]

    def test_where_nobody_sits_a_failure_is_a_status(self):
        assert chat_over("one", "fail", is_interactive=False)[0] == ExitStatus.SOME_FAILED
        assert chat_over("one", is_interactive=False)[0] == ExitStatus.OK

    def test_sigterm_ends_it(self):
        with pytest.raises(Interrupted):
            chat_over("end")
        with pytest.raises(Interrupted):
            chat_over(Interrupted(signal.SIGTERM))

    def test_ctrl_c_at_the_prompt_says_how_to_leave(self):
        _, terminal, echo, _ = chat_over(Interrupted(signal.SIGINT), "one", "/exit", "two")
        assert "Ctrl-D or /exit quits" in terminal.said
        assert len(echo.asked) == 1

    def test_undo_retry_and_reset(self):
        _, _, echo, conversation = chat_over("one", "two", "/retry", "/undo", "three", "/reset", "four")
        asked = [[message["content"] for message in messages] for messages in echo.asked]
        assert asked == [["one"], ["one", "one", "two"], ["one", "one", "two"], ["one", "one", "three"], ["four"]]
        assert conversation.exchanges == [("four", "four")]

    def test_retry_asks_again_what_was_not_answered(self):
        _, _, echo, conversation = chat_over("one", "fail", "/retry", "/retry", "/undo", "/retry")
        asked = [[message["content"] for message in messages] for messages in echo.asked]
        assert asked == [["one"]] + [["one", "one", "fail"]] * 3
        assert conversation.exchanges == []
        _, terminal, echo, _ = chat_over("fail", "/reset", "/retry")
        assert len(echo.asked) == 1 and "the conversation is empty" in terminal.said[-1]

    def test_system_is_set_shown_and_removed(self):
        _, terminal, echo, conversation = chat_over("/system Be  brief.", "/system", "one", "/system off", "/system")
        assert "Be  brief." in terminal.said and terminal.said[-1] == "no system prompt"
        assert echo.asked[0][0] == {"role": "system", "content": "Be  brief."}
        assert conversation.system == ""

    @pytest.mark.parametrize("line", ["/undo", "/retry", "/stats", "/save", "/set n 2", "/nonsense", "/", "/exits"])
    def test_what_cannot_be_done_is_one_line(self, line):
        _, terminal, echo, _ = chat_over(line)
        assert len([text for text in terminal.said if text.startswith("labinfer: error: ")]) == 1
        assert echo.asked == []

    def test_help_has_every_command(self):
        _, terminal, _, _ = chat_over("/help", "   ", "")
        assert all(name in terminal.said[-1] for name in COMMANDS)

    def test_space_makes_a_message_of_a_command(self):
        assert chat_over(" /help")[2].asked == [[{"role": "user", "content": " /help"}]]


def test_answers_figures():
    answer = ChatReply(
        text="x",
        prompt_tokens=10,
        cached_tokens=4,
        num_tokens=11,
        finish_reason="stop",
        seconds=1.5,
        seconds_to_first=0.5,
    )
    assert answer.describe() == (
        "11 tokens in 1.50 s; 10.0 tokens/s; TTFT 0.500 s; 10 prompt tokens (4 cached); finish reason stop"
    )
    answer = ChatReply(
        text="x",
        prompt_tokens=10,
        cached_tokens=4,
        num_tokens=3,
        finish_reason="stop",
        seconds=0.0301,
        seconds_to_first=0.03,
    )
    assert "; 99.7 tokens/s;" in answer.describe()  # and not twenty thousand
    assert (
        ChatReply(text="x", prompt_tokens=1, num_tokens=1, seconds=0.5).describe()
        == "1 token in 0.50 s; 1 prompt token"
    )
    assert ChatReply(finish_reason="stopped", seconds=1.0).describe() == "1.00 s; finish reason stopped"


def test_what_a_checkpoint_recommends(tmp_path):
    path = tmp_path / "generation_config.json"
    assert recommended_sampling(tmp_path) == {}
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": None, "eos_token_id": 2}))
    assert recommended_sampling(tmp_path) == {"temperature": 0.6}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert recommended_sampling(tmp_path) is None
    path.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(UserError, match="generation_config.json: temperature"):
        recommended_sampling(tmp_path)
