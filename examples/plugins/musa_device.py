"""A device in one file: what ranks of other devices must know about Moore Threads cards (``musa``), and one function for them.

    python launch.py --plugin examples/plugins/musa_device.py --device musa --prompt "17 + 25 = ?"

The vendor's plugin for torch, torch_musa, must be installed. All other functions run as torch's operations. ``launch.py check-device --device musa
--plugin …`` tries the function beside the reference; at the start of a run, one that fails is dropped by name.
"""

import torch

from labinfer import register
from labinfer.functions.device import Device
from labinfer.functions.provider import Provider


def silu_and_mul(gate_up_TF):
    """``functions.protocols.SiluAndMul``; a vendor's fused operator would stand here."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
    return torch.nn.functional.silu(gate_TF).mul_(up_TF)


@register("function_provider", "musa_device")
class MusaDevice(Provider):
    """Describes the device to all ranks, and registers its functions on ranks that have it."""

    device = Device(type="musa", collectives="mccl")

    def register(self, registry, group_size):
        registry.add_all({"silu_and_mul": silu_and_mul}, name="musa", devices=("musa",))
