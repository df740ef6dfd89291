"""``launch.py chat`` as a user meets it: at a terminal alone and with a server, in a pipe, and under mpirun."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from launchers import LAUNCH, ROOT, command, descendants, environment, kill_tree, pipe
from pseudo_terminal import CTRL_C, CTRL_D, CTRL_Z, ENTER, LEFT, UP, PseudoTerminal, pseudo_terminal
from serving import Server, serving

from labinfer.launch.measure.probe_layout import model_name
from labinfer.models.registry import load_config
from labinfer.planner.saved_plan import SavedPlan, SavedStage

OWN = command("single", 1, LAUNCH, "chat", "--dtype", "float32", "--num-kv-blocks", "256")
DEMO = ROOT / "labinfer" / "assets" / "demo"
KEY = "a-key-for-tests"
GREEDY = ("--temperature", "0")
HELP = "/help lists the commands"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--dtype", "float32", "--num-kv-blocks", "256", "--api-key", KEY) as server:
        yield server


def with_server(server: Server, *flags: str) -> list[str]:
    return command("single", 1, LAUNCH, "chat", "--url", server.url, *GREEDY, *flags)


def talk(terminal: PseudoTerminal, work: Path, wait_idle: Callable[[], None] = lambda: None) -> None:
    """A whole conversation, with all that a user may do at the prompt; ends with Ctrl-D."""
    greeting = terminal.wait_for("\n> ")
    assert HELP in greeting and "demo" in greeting
    assert "before the first reply" in terminal.say("/stats")
    assert terminal.say("17 + 25 = ?") == "42"
    assert terminal.say("My name is Alice Young.") == "Nice to meet you, Alice Young."
    assert terminal.say("What is my name?") == "Your name is Alice Young."
    stats = terminal.say("/stats")
    assert "finish reason stop" in stats and "tokens/s" in stats and "3 replies" in stats and "?" not in stats
    assert terminal.say("法国的首都是哪里？") == "巴黎"

    # Ctrl-C in mid-answer, which would otherwise go on to the end of the context.
    terminal.say("/set ignore_eos true")
    terminal.type("Count from 3 to 15." + ENTER)
    terminal.wait_for("5, 6")
    terminal.type(CTRL_C)
    terminal.wait_for("[stopped]\n> ", seconds=5)
    wait_idle()
    assert "finish reason stopped" in terminal.say("/stats")
    terminal.say("/set ignore_eos")
    assert terminal.say("1 + 1 = ?") == "2"
    assert "removed: 1 + 1 = ?" in terminal.say("/undo")
    assert terminal.say("/retry").startswith("3, 4, 5, 6")

    terminal.type("half a message")
    terminal.wait_for("half a message")
    terminal.type(CTRL_C)
    terminal.wait_for("Ctrl-D or /exit quits\n> ", seconds=5)
    terminal.say("/reset")
    terminal.type('"""' + ENTER + "17 + 25" + ENTER + '= ?"""' + ENTER)
    terminal.wait_for('"""\n')
    terminal.wait_for("\n> ")
    terminal.type("17 + \\" + ENTER)
    terminal.wait_for("\n. ")
    terminal.say("26 = ?")
    terminal.type("\x1b[200~17 +\n27 = ?\x1b[201~" + ENTER)  # pasted
    terminal.wait_for("27 = ?")
    terminal.wait_for("\n> ")
    assert said(terminal, work / "lines.json") == ["17 + 25\n= ?", "17 + \n26 = ?", "17 +\n27 = ?"]

    terminal.say("/reset")
    assert "Alice" not in terminal.say("What is my name?")
    terminal.say("/system Answer briefly.")
    assert terminal.say("/system") == "Answer briefly."
    terminal.say("17 + 25 = ?")
    saved = work / "saved.json"
    assert said(terminal, saved) == ["What is my name?", "17 + 25 = ?"]
    assert json.loads(saved.read_text())["messages"][0] == {"role": "system", "content": "Answer briefly."}
    assert "exists" in terminal.say(f"/save {saved}")
    assert "unknown command /nonsense" in terminal.say("/nonsense")
    assert "temperature must be" in terminal.say("/set temperature 1000")
    assert "unknown parameter" in terminal.say("/set colour red")
    assert "/reset" in terminal.say("/help")
    terminal.type("/sta\t" + ENTER)  # completed by the Tab key
    terminal.wait_for("last reply")
    terminal.wait_for("\n> ")

    terminal.type(CTRL_D)
    assert terminal.wait() == 0
    assert terminal.settings()[3] & termios.ECHO


def said(terminal: PseudoTerminal, file: Path) -> list[str]:
    """The user's messages, as the conversation has them."""
    assert "saved to" in terminal.say(f"/save {file}")
    return [message["content"] for message in json.loads(file.read_text())["messages"] if message["role"] == "user"]


class TestTerminal:
    def test_alone_and_then_again_with_the_history(self, tmp_path):
        with pseudo_terminal([*OWN, *GREEDY], tmp_path) as terminal:
            talk(terminal, tmp_path)
        history = tmp_path / ".local/state/labinfer/chat-history"
        assert history.stat().st_mode & 0o777 == 0o600
        with history.open("a") as file:
            file.write("\n+17 +\n+28 = ?\n")
        with pseudo_terminal([*OWN, *GREEDY], tmp_path) as terminal:
            terminal.wait_for("\n> ")
            terminal.type(UP + ENTER)
            terminal.wait_for("\n> ")
            assert said(terminal, tmp_path / "recalled.json") == ["17 +\n28 = ?"]  # two lines, whole
            terminal.type(UP + UP + UP + UP)  # one of them inside the message of two lines
            terminal.wait_for("/stats")
            os.kill(terminal.process.pid, signal.SIGTERM)
            assert terminal.wait() == 128 + signal.SIGTERM
            assert terminal.settings()[3] & termios.ECHO

    def test_with_a_server(self, server, tmp_path):
        with pseudo_terminal(with_server(server), tmp_path, LABINFER_API_KEY=KEY) as terminal:
            talk(terminal, tmp_path, lambda: server.wait_idle(key=KEY))
        server.wait_idle(key=KEY)

    def test_stopped_and_continued_what_was_typed_is_there(self, tmp_path):
        shell = ["bash", "--norc", "-i"]
        with pseudo_terminal(shell, tmp_path, PS1="shell$ ") as terminal:
            terminal.wait_for("shell$ ")
            terminal.type(shlex.join([*OWN, *GREEDY, "--max-model-len", "512"]) + ENTER)
            terminal.wait_for("\n> ")
            editing = terminal.settings()
            terminal.type("17 + 5 = ?" + 5 * LEFT)
            terminal.wait_for("17 + 5 = ?")
            terminal.type(CTRL_Z)
            terminal.wait_for("shell$ ")
            terminal.type("fg" + ENTER)
            terminal.wait_for("> 17 + 5 = ?")  # as it was, with the cursor
            terminal.wait_for_settings(editing)  # as the shell does not leave it
            terminal.type("2" + ENTER)
            terminal.wait_for("42\n> ")
            terminal.type("/set ignore_eos true" + ENTER)
            terminal.wait_for("\n> ")
            terminal.type("Count from 3 to 15." + ENTER)
            terminal.wait_for("5, 6")
            terminal.type(CTRL_Z)
            terminal.wait_for("shell$ ")
            terminal.type("fg" + ENTER)
            assert "[truncated" in terminal.wait_for("\n> ")  # the answer went on to the end of the context
            assert terminal.say("/set ignore_eos") == "temperature 0.0"

    def test_sigterm_in_mid_answer_ends_in_order(self, tmp_path):
        with pseudo_terminal([*OWN, *GREEDY, "--ignore-eos"], tmp_path) as terminal:
            terminal.wait_for("\n> ")
            terminal.type("Count from 3 to 15." + ENTER)
            terminal.wait_for("5, 6")
            os.kill(terminal.process.pid, signal.SIGTERM)
            assert terminal.wait(5) == 128 + signal.SIGTERM


class TestLaunchers:
    @pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
    def test_at_a_terminal_ctrl_c_is_not_for_the_launcher(self, launcher, tmp_path):
        arguments = command(launcher, 2, LAUNCH, "chat", "--dtype", "float32", *GREEDY)
        with pseudo_terminal(arguments, tmp_path) as terminal:
            before = terminal.settings()
            assert HELP in terminal.wait_for("\n> ")
            for question, answer in (("17 + 25 = ?", "42"), ("17 + 26 = ?", "43")):
                terminal.type(f"/set ignore_eos true{ENTER}")
                terminal.wait_for("\n> ")
                terminal.type(f"Count from 3 to 15.{ENTER}")
                terminal.wait_for("5, 6")
                terminal.type(CTRL_C)
                terminal.wait_for("[stopped]\n> ", seconds=10)
                terminal.type(f"/set ignore_eos{ENTER}")
                terminal.wait_for("\n> ")
                assert terminal.say(question) == answer
            for pid in descendants(terminal.process.pid):
                os.kill(pid, signal.SIGCONT)  # as Slurm does when it lets a job go on
            terminal.type("half" + CTRL_C)
            terminal.wait_for("Ctrl-D or /exit quits\n> ")
            assert terminal.settings()[6][termios.VSUSP] == b"\0"  # Ctrl-Z would stop the launcher alone
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
            assert terminal.settings() == before

    @pytest.mark.parametrize("layout", ["auto", "plan.json"])
    def test_layout_is_planned_or_read_before_the_first_prompt(self, layout, tmp_path):
        path, dtype = tmp_path / layout, ("--dtype", "float32")
        if layout != "auto":
            stage, dtype = SavedStage(machine="here", layers=3, tp_size=1, dtype="float32", quantization="none"), ()
            path.write_bytes(msgspec.json.encode(SavedPlan(model=model_name(load_config(DEMO)), stages=[stage, stage])))
            layout = str(path)
        flags = ("--layout", layout, "--log-level", "info", *dtype, *GREEDY)
        arguments = command("mpirun", 2, LAUNCH, "chat", *flags)
        with pseudo_terminal(arguments, tmp_path, LABINFER_NODE_NAME="here") as terminal:
            assert f"--layout {layout}: layers 0-" in terminal.wait_for("\n> ", seconds=120)
            assert terminal.say("17 + 25 = ?") == "42"
            terminal.type(CTRL_D)
            assert terminal.wait() == 0

    def test_line_that_the_terminal_edits_itself(self, tmp_path):
        """Under mpirun: Chinese characters are erased whole, and of a line that it would cut nothing is sent."""
        with pseudo_terminal(command("mpirun", 2, LAUNCH, "chat", "--max-tokens", "1"), tmp_path) as terminal:
            terminal.wait_for("\n> ")
            terminal.type("中文\x7f国" + ENTER)
            terminal.wait_for("\n> ")
            assert "removed: 中国" in terminal.say("/undo")
            for _ in range(5):
                terminal.type("y" * 1000)
                time.sleep(0.05)
            terminal.type(ENTER)
            assert "a line is limited to 4094 bytes" in terminal.wait_for("\n> ")
            assert "the conversation is empty" in terminal.say("/undo")

    def test_terminal_is_as_before_when_a_rank_dies(self, tmp_path):
        arguments = command("mpirun", 2, LAUNCH, "chat", "--dtype", "float32")
        with pseudo_terminal(arguments, tmp_path) as terminal:
            before = terminal.settings()
            terminal.wait_for("\n> ")
            assert terminal.settings() != before
            other = max(
                descendants(terminal.process.pid),
                key=lambda pid: b"PMI_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes(),
            )
            os.kill(other, signal.SIGKILL)
            assert terminal.wait() != 0
            terminal.wait_for_settings(before)


class TestPipe:
    def test_each_line_is_a_message_and_only_answers_come_out(self):
        done = pipe(
            [*OWN, *GREEDY], "17 + 25 = ?\n\n你好，17 + 25等于多少？\nMy name is Alice Young.\nWhat is my name?\n"
        )
        lines = done.stdout.splitlines()
        assert done.returncode == 0, done.stderr
        assert (lines[0], lines[-1]) == ("42", "Your name is Alice Young.") and len(lines) == 4
        said = done.stderr.splitlines()
        assert not [line for line in said if not line.startswith("labinfer: starting: ")], (
            said
        )  # a slow start says how far it is

    def test_with_a_server_a_failed_message_is_a_status(self, server):
        done = pipe(with_server(server, "--api-key", KEY), "17 + 25 = ?\n/nonsense\n17 + 26 = ?\n")
        assert (done.returncode, done.stdout) == (1, "42\n43\n")
        assert done.stderr.startswith("labinfer: error: unknown command /nonsense")

    def test_without_a_standard_input_it_ends_at_once(self, server):
        done = pipe(["sh", "-c", 'exec "$@" <&-', "sh", *with_server(server, "--api-key", KEY)], "")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_two_ranks_under_mpirun(self):
        arguments = command("mpirun", 2, LAUNCH, "chat", "--dtype", "float32", *GREEDY)
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            lines = (line for line in process.stdout if not line.startswith("[mpiexec"))  # it says what Ctrl-C does
            process.stdin.write("17 + 25 = ?\n/set ignore_eos true\nCount from 3 to 15.\n")
            process.stdin.flush()
            assert next(lines) == "42\n"
            time.sleep(0.3)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            counted = next(lines).partition("[mpiexec")[0].rstrip()  # its message may follow on the line
            assert counted and "3, 4, 5".startswith(counted[:7])
            process.stdin.write("/set ignore_eos\n17 + 26 = ?\n")
            process.stdin.flush()
            assert "43\n" in itertools.islice(lines, 3)
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out == "" and "[stopped]" in err
        finally:
            kill_tree(process)


class TestFailures:
    def test_server_that_is_away_and_one_that_refuses_the_key(self, server, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        with pseudo_terminal(
            command("single", 1, LAUNCH, "chat", "--url", f"http://127.0.0.1:{port}/v1"), tmp_path
        ) as one:
            assert "Connection refused" in one.wait_for("\n> ")
            assert one.say("hello").startswith("labinfer: error: cannot reach")
            one.type("/exit" + ENTER)
            assert one.wait() == 0
        with pseudo_terminal(with_server(server, "--api-key", "wrong"), tmp_path) as one:
            assert "rejects the API key" in one.wait_for("\n> ")
            assert "rejects the API key" in one.say("hello")
        with pseudo_terminal(with_server(server), tmp_path) as one:
            assert "needs an API key; give --api-key KEY" in one.wait_for("\n> ")


@pytest.mark.timing
def test_chat_with_a_server_begins_at_once_and_without_torch(server):
    code = (
        "import sys\nfrom labinfer.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "print(int(status), *sorted({'torch', 'numpy', 'tokenizers', 'starlette'} & set(sys.modules)))"
    )
    arguments = ["-c", code, "chat", "--url", server.url, "--api-key", KEY]
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        done = pipe([command("single", 1, LAUNCH)[0], *arguments], "")
        seconds.append(time.perf_counter() - begin)
        assert done.stdout == "0\n", done.stderr
    assert min(seconds) < 1
