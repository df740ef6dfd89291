"""Quantized weights of checkpoints stay as they are on a device whose description says that it multiplies them."""

from __future__ import annotations

import re

import pytest
from checkpoints import make_checkpoint
from launchers import LAUNCH, Finished, run
from published_formats import PUBLISHED, write_published

PLUGIN = '''"""A device that multiplies quantized weights of every form, by the reference."""

from labinfer import register
from labinfer.functions.device import Device
from labinfer.functions.provider import Provider


@register("function_provider", "multiplying")
class Multiplying(Provider):
    device = Device(type="musa", collectives="mccl", multiplies=lambda form: True)

    def register(self, registry, group_size):
        pass
'''
# Few tokens: the logits of random weights are close to each other, and rounding decides soon.
QUESTION = ("--prompt", "x", "--raw", "--max-tokens", "4", "--ignore-eos", "--dtype", "float32", "--threads", "1")


def weights(done: Finished) -> tuple[str, float]:
    """Dtype and KiB of the weights of rank 0 in the log's table."""
    assert done.returncode == 0, done.text
    lines = done.stderr.splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("rank  device"))
    names, values = (re.split(" {2,}", lines[index].strip()) for index in (header, header + 2))
    cells = dict(zip(names, values, strict=True))
    number, unit = cells["weights"].split()
    return cells["dtype"], float(number) * {"KiB": 1, "MiB": 1024}[unit]


@pytest.mark.parametrize(
    "kind", ["gptq-asym", *(pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "gptq-8", "w8a16-channel"))]
)
def test_they_are_held_as_they_are_and_give_the_tokens_of_the_cpu(kind, fake_device, tmp_path):
    directory, plugin = make_checkpoint(tmp_path / "model", "llama-untied"), tmp_path / "multiplying.py"
    write_published(directory, tmp_path / "twin", PUBLISHED[kind])
    plugin.write_text(PLUGIN)
    question = ("--model", directory, *QUESTION, "--log-level", "info")
    env = fake_device("musa", "no-float64", "late-copies")
    expected = run("single", 1, LAUNCH, *question, "--functions", "reference")
    held = run("single", 1, LAUNCH, *question, "--plugin", plugin, "--device", "musa", **env)
    decoded = run("single", 1, LAUNCH, *question, "--device", "musa", **env)
    assert held.stdout == expected.stdout and held.stdout.strip(), held.text
    (own, held_size), (_, decoded_size) = weights(held), weights(decoded)
    assert held_size < 0.9 * decoded_size and own == weights(expected)[0]
