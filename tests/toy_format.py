"""A format that no checkpoint has: rows of int8 with a scale each. It is registered as a plugin is."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from labinfer import register
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.slices import MatrixSlice

METHOD = "toy-int8"


class RowScaledInt8:
    """W[row] = codes[row] · scale[row]: see ``Format``."""

    def form(self, quantization: str) -> None:
        return None

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return f"{matrix}.codes", f"{matrix}.row_scale"

    def check(self, tensors, matrix: MatrixSlice) -> None:
        tensors.expect(f"{matrix.name}.codes", (matrix.outputs, matrix.inputs), torch.int8)
        tensors.expect(f"{matrix.name}.row_scale", (matrix.outputs,), torch.float32)

    def read(self, tensors, matrix: MatrixSlice) -> None:
        shape = (matrix.outputs, matrix.inputs)
        codes = tensors.read(f"{matrix.name}.codes", shape, (matrix.rows, matrix.columns), torch.int8)
        scales = tensors.read(f"{matrix.name}.row_scale", shape[:1], (matrix.rows,), torch.float32)
        matrix.destination.copy_(decode(codes, scales))


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes * scales[:, None]


@register("weight_format", METHOD)
def read_toy_config(settings):
    toy, plain, excluded = RowScaledInt8(), PlainFormat(), settings.names("modules_to_not_convert")
    return lambda matrix: plain if matrix in excluded else toy


def write_toy(directory: Path, twin: Path, excluded: list[str]) -> dict[str, torch.Tensor]:
    """Quantise the plain checkpoint in ``directory`` in place, and write the same values as a plain one into ``twin``.

    Returns:
        The quantised checkpoint's tensors.
    """
    files = list(directory.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    toy, plain = {}, {}
    for name, tensor in tensors.items():
        matrix = name.removesuffix(".weight")
        if tensor.ndim != 2 or matrix in excluded:
            toy[name] = plain[name] = tensor
            continue
        scales = tensor.float().abs().amax(dim=1) / 127
        codes = (tensor.float() / scales[:, None]).round().to(torch.int8)
        toy |= {f"{matrix}.codes": codes, f"{matrix}.row_scale": scales}
        plain[name] = decode(codes, scales)
    twin.mkdir()
    for path in directory.iterdir():
        if path not in files:
            (twin / path.name).write_bytes(path.read_bytes())
    for path in files:
        path.unlink()
    save_file(plain, twin / "model.safetensors")
    save_file(toy, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD, "modules_to_not_convert": excluded}
    (directory / "config.json").write_text(json.dumps(config))
    return toy
