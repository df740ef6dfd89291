"""examples/plugins/musa_device.py: a device in a file of at most 40 lines, on the make-believe accelerator."""

from __future__ import annotations

import pytest
from launchers import LAUNCH, ROOT, run

from labinfer.launch.providers import describe_device

PLUGIN = ROOT / "examples/plugins/musa_device.py"
QUESTION = ("--dtype", "float32", "--log-level", "info", "--prompt", "17 + 25 = ?")


def test_it_is_a_short_file_that_describes_the_device(load_example):
    assert len(PLUGIN.read_text().splitlines()) <= 40
    assert not describe_device("musa").collectives
    load_example("musa_device")
    assert describe_device("musa").collectives == "mccl"


@pytest.mark.parametrize(
    ("launcher", "devices", "flags"),
    [
        pytest.param("single", "musa", (), id="alone"),
        pytest.param("mpirun", "musa,cpu", ("-pp", "2"), id="beside a CPU", marks=pytest.mark.slow),
        pytest.param("torchrun", "musa", ("-tp", "2"), id="tp 2", marks=pytest.mark.slow),
    ],
)
def test_its_function_is_tried_and_used(fake_device, launcher, devices, flags):
    ranks, env = 2 if flags else 1, fake_device("musa", "no-float64", "late-copies")
    done = run(launcher, ranks, LAUNCH, "--plugin", PLUGIN, "--device", devices, *flags, *QUESTION, **env)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.text
    assert "kernels of plugins: silu_and_mul musa\n" in done.stderr and "kernel dropped" not in done.stderr, done.text
