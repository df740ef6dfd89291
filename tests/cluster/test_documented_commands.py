"""The commands of the documentation run as they are written there, with files of tests for the names that it makes up."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from documents import all_blocks, code_blocks, documented_commands, python_block
from gguf_files import write_gguf
from launchers import LAUNCH, ROOT, command, pipe
from mtp_checkpoints import add_mtp
from published_formats import PUBLISHED, write_published
from serving import serving

ELSEWHERE = {
    r"make (run|test|lint)$": "what continuous integration and the first hour of a checkout run; the target is checked",
    r"make ": "takes minutes to hours, or a network; the target is checked",
    r"(pip install|git clone) ": "needs a network",
    r"(apptainer|docker|sh|tar) ": "a container engine or a bundle; tests/packages runs what they do",
    r".* --hub ": "needs a network; tests/cluster/test_hubs.py asks servers that stand in for the hubs",
    r"(cp|systemctl|kubectl|srun) |mpirun -+hostfile |.* mpirun -hostfile ": "needs other machines, or a service manager",
    r"export ANTHROPIC_": "variables of another program; tests/clients/agents runs it",
    r"(lm_eval|lighteval) ": "other programs; tests/clients runs them",
    r"python (benchmarks|tools)/": "measures for minutes; the flags are checked",
    r"python -m pytest ": "tests; the files are checked",
    r".* --device cuda": "needs a card",
    r".*--plugin longest_first": "needs the file of the block above it; tests/plugins/test_loading.py runs that",
    r".*=ascend ": "needs the provider of the block above it; tests/test_documents.py runs that",
}
"""Commands that are not run here, and why."""
QUICK = (
    'python launch.py --prompt "17 + 25 = ?"',
    "python launch.py plan -tp 2,1 --layers 4,2",
    "python launch.py --input examples/prompts.jsonl --output out.jsonl",
    'python launch.py --plugin last_token.py --speculative-config \'{"method": "last_token"}\' --prompt "Hello"',
)
"""Those that ``make test`` runs."""
DEEP = 24
"""Layers of a model whose commands name 24."""


def _cases() -> list:
    commands = [each for each in documented_commands() if not any(re.match(where, each) for where in ELSEWHERE)]
    return [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in commands]


class Names:
    """Files and directories for the names that the documentation makes up, each made when a command first names it."""

    def __init__(self, folder: Path, launches):
        self._folder, self._launches = folder, launches
        self._made: dict[str, str] = {}
        assets = ROOT / "labinfer" / "assets"
        self._makers: dict[str, Callable[[], object]] = {
            "DIR": lambda: assets / "demo",
            "SMALL-DIR": lambda: assets / "demo-draft",
            "qwen2.5-7b": lambda: assets / "demo",
            "qwen2.5": lambda: assets / "demo-draft",
            "Qwen/Qwen3-0.6B": lambda: assets / "demo",  # instead of a download
            "./qwen2-0.5b": lambda: assets / "demo",
            "Qwen/Qwen3-8B-AWQ": self._quantized,
            "Qwen3-4B-Q8_0.gguf": self._gguf,
            "FILE": lambda: ROOT / "README.md",
            "prompts.jsonl": lambda: ROOT / "examples" / "prompts.jsonl",
            "requests.jsonl": lambda: ROOT / "examples" / "prompts.jsonl",
            "last_token.py": self._drafter,
            "cluster.json": lambda: self._costs("cluster", assets / "demo"),
            "a.json": lambda: self._costs("a", self.deep),
            "b.json": lambda: self._costs("b", self.deep),
            "plan.json": self._plan,
            "run.json": self._trace,
        }

    @cached_property
    def deep(self) -> Path:
        """A model of ``DEEP`` layers."""
        layers = {"num_hidden_layers": DEEP, "layer_types": ["full_attention"] * DEEP}
        return make_checkpoint(self._folder / "deep", "qwen2-tied", **layers)

    def arguments(self, text: str) -> list[str]:
        """The words of a command line, with files in the place of names."""
        words = shlex.split(text)
        outputs = {words[index + 1] for index, word in enumerate(words) if word in ("--save", "--trace", "--output")}
        for output in outputs:  # of another command
            Path(self._folder_path(output)).unlink(missing_ok=True)
        return [self._folder_path(word) if word in outputs else self._replace(word) for word in words]

    def _folder_path(self, word: str) -> str:
        return str(self._folder / Path(word).name)

    def _replace(self, word: str) -> str:
        if word.endswith((".png", ".pdf", "figures.json", "latency.json")):
            return self._folder_path(word)
        names = "|".join(map(re.escape, sorted(self._makers, key=len, reverse=True)))
        return re.sub(rf"(?<![\w/.-])({names})(?![\w.-])", lambda match: self._path(match[1]), word)

    def _path(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = str(self._makers[name]())
        return self._made[name]

    def _quantized(self) -> Path:
        directory = make_checkpoint(self._folder / "quantized", "llama-untied")
        write_published(directory, self._folder / "twin", PUBLISHED["awq"])
        return directory

    def _gguf(self) -> Path:
        return write_gguf(make_checkpoint(self._folder / "for-gguf", "qwen3"), self._folder / "qwen3.gguf")

    def _drafter(self) -> Path:
        path = self._folder / "last_token.py"
        path.write_text(python_block("docs/speculation.md", "class LastToken"), encoding="utf-8")
        return path

    def _costs(self, host: str, model: Path) -> Path:
        path = self._folder / f"{host}.json"
        self._check_run("single", 1, "probe", "--model", model, "--save", path)
        text = path.read_text()
        (machine,) = json.loads(text)["machines"]
        path.write_text(text.replace(json.dumps(machine["name"]), json.dumps(host)))
        return path

    def _plan(self) -> Path:
        path = self._folder / "plan-of-four.json"
        self._check_run("mpirun", 4, "plan", "--auto", "--model", self._path("DIR"), "--save", path)
        return path

    def _trace(self) -> Path:
        path = self._folder / "run-of-two.json"
        flags = ["bench", "serve", "--model", self._path("DIR"), "--num-prompts", "32", "--trace", path]
        self._check_run("mpirun", 2, *flags)
        return path

    def _check_run(self, launcher: str, ranks: int, *arguments) -> None:
        done = self._launches.run(launcher, ranks, *arguments, timeout=240)
        assert done.returncode == 0, done.text


@pytest.fixture(scope="module")
def names(tmp_path_factory, launches) -> Names:
    return Names(tmp_path_factory.mktemp("documented"), launches)


@pytest.fixture(scope="module")
def mtp_model(tmp_path_factory) -> Path:
    directory = make_checkpoint(tmp_path_factory.mktemp("mtp") / "model", "qwen3.5")
    add_mtp(directory, "qwen3.5")
    return directory


@cache
def launch_of(words: tuple[str, ...]) -> tuple[str, int, list[str]]:
    """Launcher, number of ranks, and what follows ``launch.py``."""
    index = words.index("launch.py")
    counts = [int(words[place + 1]) for place in range(index) if words[place] in ("-n", "--nproc-per-node")]
    launcher = words[0] if words[0] in ("mpirun", "torchrun") else "single"
    default = 1 if launcher == "single" else 2  # "torchrun … launch.py"
    return launcher, *(counts or [default]), list(words[index + 1 :])


@pytest.mark.parametrize("text", _cases())
def test_command_runs(text, names, launches, request):
    if "curl" in text:
        return check_request(text, names)
    if text.startswith("echo"):
        message, _, rest = text.removeprefix("echo").partition("|")
        launcher, ranks, arguments = launch_of(tuple(names.arguments(rest)))
        done = pipe(command(launcher, ranks, LAUNCH, *arguments), shlex.split(message)[0] + "\n")
        assert done.returncode == 0 and "42" in done.stdout, done.stderr
        return None
    launcher, ranks, arguments = launch_of(tuple(names.arguments(text)))
    if '"mtp"' in text:
        arguments[arguments.index("--model") + 1] = str(request.getfixturevalue("mtp_model"))
    if arguments[0] == "serve":
        with serving(*arguments[1:], launcher=launcher, ranks=ranks) as server:
            assert server.complete().status == 200
        return None
    if arguments[0] == "chat":
        with serving() as server:
            here = [each.replace("http://127.0.0.1:8000", server.url) for each in arguments]
            done = pipe(command(launcher, ranks, LAUNCH, *here), "17 + 25 = ?\n")
            assert done.returncode == 0 and "42" in done.stdout, done.stderr
        return None
    done = launches.run(launcher, ranks, *arguments, timeout=300)
    assert done.returncode == 0, done.text
    return None


def check_request(text: str, names: Names) -> None:
    """Send a documented request to a server of two ranks with as many layers as it names."""
    layout = ("-pp", "2", "--layers", "8,16")
    with serving("--model", str(names.deep), *layout, launcher="mpirun", ranks=2) as server:
        server.complete()
        there = re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000", server.url, text)
        done = subprocess.run(
            ["bash", "-c", there.partition(" > ")[0].replace("curl", "curl -sS --fail-with-body", 1)],
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0 and json.loads(done.stdout.splitlines()[0]), done.stdout + done.stderr


@pytest.fixture(autouse=True)
def _curl(request):
    if "curl" in request.node.name and shutil.which("curl") is None:
        pytest.skip("curl is not installed")


def test_every_quick_command_is_documented():
    assert set(QUICK) <= set(documented_commands())


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), re.M))
    for text, place in documented_commands().items():
        if text.startswith("make "):
            assert set(re.findall(r"^make ([a-z-]+)", text)) <= targets, f"{place}: {text}"


def test_scripts_and_their_flags_exist():
    for text, place in documented_commands().items():
        words = shlex.split(text)
        for word in words:
            if re.match(r"(benchmarks|tools|tests|hostfiles|docs)/.*\.\w+$", word) and words[-1] != word:
                assert (ROOT / word).exists(), f"{place}: {word}"
        script = next((word for word in words if word.startswith(("benchmarks/", "tools/"))), None)
        if script is not None:
            source = (ROOT / script).read_text(encoding="utf-8")
            flags = [word for word in words if word.startswith("--")]
            assert all(f'"{flag}"' in source for flag in flags), f"{place}: {text}"


@pytest.mark.parametrize("place", ["README.md", "README.zh-CN.md", "docs/jobs.md", "docs/zh/jobs.md"])
def test_lines_of_a_job_are_answered(place, launches, tmp_path):
    blocks = [
        block.text for block in code_blocks(ROOT / place) if block.text.startswith('{"') and "…" not in block.text
    ]
    (lines,) = blocks
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8")
    done = launches.run("single", 1, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.text
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(answers) == len(lines.splitlines()) and not any(answer.get("error") for answer in answers), answers


def test_every_block_is_known():
    """A block that begins with a name of a program has only commands that ``PROGRAMS`` knows; others are data or Python."""
    data = ("{", "[", "model = ", "scrape_configs:", "from openai", "labinfer/", "stage 1 (rank 1")
    scripts = ("KEYS=keys.txt sbatch", "MODEL=DIR sbatch", "sbatch hostfiles/", "NODE_RANK=0 ")
    for block in all_blocks():
        known = block.commands or block.language or block.text.startswith((*data, *scripts))
        assert known, f"{block.name} is run by no test, and is no data:\n{block.text}"
