"""Functions for loading: the compiled ones give the bits of those in plain torch, over sizes that fill no vector or block."""

from __future__ import annotations

import os

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.cpu.loading import CpuLoading
from labinfer.weights.loading import LoadFunctions

TORCH = LoadFunctions()


@pytest.fixture(scope="module")
def cpu(compiled_functions) -> CpuLoading:
    return CpuLoading(compiled_functions)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


@pytest.mark.parametrize(("words", "outputs"), [(1, 1), (5, 3), (16, 16), (20, 35), (48, 64)])
@pytest.mark.parametrize("name", ["transpose_words", "transpose_awq"])
def test_transposed_words_are_the_same(cpu, name, words, outputs):
    stored = random_words(words, outputs + 2)[:, 1:-1]  # rows apart
    shape = (outputs, words) if name == "transpose_words" else (8 * outputs, -(-words // 8))
    got, wanted = (random_words(shape[0], shape[1] + 3)[:, : shape[1]] for _ in range(2))
    getattr(cpu, name)(stored, got)
    getattr(TORCH, name)(stored, wanted)
    assert torch.equal(got, wanted)
    if name == "transpose_words":
        assert torch.equal(got, stored.T)


@pytest.mark.parametrize("inputs", [3, 8, 128, 200])
def test_codes_of_awq_stand_where_its_order_says(cpu, inputs):
    codes = torch.randint(0, 16, (inputs, 40))
    stored = torch.zeros(inputs, 5, dtype=torch.int64)
    for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        stored |= codes[:, output::8] << 4 * place
    got = torch.empty(40, -(-inputs // 8), dtype=torch.int32)
    cpu.transpose_awq((stored - (stored >> 31 << 32)).to(torch.int32), got)
    numbers = torch.stack([got >> 4 * i & 15 for i in range(8)], dim=2).flatten(1)
    assert torch.equal(numbers[:, :inputs], codes.T.int()) and not numbers[:, inputs:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("columns", "group", "lead", "skip"),
    [(1, 0, 0, 0), (40, 16, 5, 5), (300, 128, 100, 0), (77, 0, 0, 3), (64, 32, 0, 0)],
)
def test_decoded_numbers_are_the_same(cpu, dtype, kind, has_zeros, columns, group, lead, skip):
    if kind == "float8" and has_zeros:
        pytest.skip("floating-point numbers have no zero points")
    rows, bits, num_groups = 5, 4 if kind == "int4" else 8, -(-(lead + columns) // group) if group else 1
    stored = torch.randint(0, 256, (rows, -(-(skip + columns) * bits // 8) + 3), dtype=torch.uint8)[:, :-3]
    if kind == "float8":
        stored[stored % 128 == 127] = 1  # not a number
    scales = torch.randn(rows, num_groups)
    zeros = torch.randint(0, 2**bits, (rows, num_groups), dtype=torch.uint8) if has_zeros else None
    arguments = {"bits": bits, "group": group, "lead": lead, "skip": skip, "is_float": kind == "float8"}
    got, wanted = (torch.full((rows, columns + 1), 7.0, dtype=dtype) for _ in range(2))
    for functions, out in ((cpu, got), (TORCH, wanted)):
        functions.decode(stored, scales, zeros, out[:, :columns], **arguments)
    assert torch.equal(got, wanted) and (got[:, columns] == 7).all()


def test_numbers_in_an_order_of_their_own_are_the_same(cpu):
    stored, scales = torch.randint(0, 256, (7, 60), dtype=torch.uint8), torch.randn(7, 9)
    zeros, order = torch.randint(0, 16, (7, 9), dtype=torch.uint8), torch.randint(0, 9, (115,), dtype=torch.int32)
    got, wanted = torch.empty(7, 115), torch.empty(7, 115)
    for functions, out in ((cpu, got), (TORCH, wanted)):
        functions.decode(stored, scales, zeros, out, bits=4, group=0, lead=0, skip=4, order_I=order)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(("columns", "lead"), [(1, 0), (128, 0), (300, 100), (129, 127), (1000, 31)])
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1.0, 1e30])
def test_rounded_groups_are_the_same(cpu, columns, lead, magnitude):
    values = torch.randn(6, columns) * magnitude
    values[2] = 0
    groups = -(-(lead + columns) // 128)
    results = []
    for functions in (cpu, TORCH):
        codes, scales = torch.empty(6, groups * 128, dtype=torch.uint8), torch.empty(6, groups)
        functions.round_groups(values, codes, scales, group=128, lead=lead)
        results.append((codes, scales))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("place", [3, 130, 199])
def test_what_is_no_number_in_float8_stays_none_in_values_and_scales(cpu, is_compiled, place):
    functions, stored = cpu if is_compiled else TORCH, torch.full((2, 200), 0x7E, dtype=torch.uint8)
    stored[1, place] = 0xFF
    values, scales = torch.empty(2, 200), torch.ones(2, 1)
    functions.decode(stored, scales, None, values, bits=8, group=0, lead=0, is_float=True)
    assert torch.equal(values.isnan(), stored == 0xFF) and values[0].eq(448).all()
    codes, scales = torch.empty(2, 256, dtype=torch.uint8), torch.empty(2, 2)
    functions.round_groups(values, codes, scales, group=128, lead=0)
    assert scales.isfinite().tolist() == [[True, True], [place >= 128, place < 128]]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("bits", [0x7FC00000, -1])
def test_groups_with_what_is_no_number_have_no_scale_whatever_its_bits(cpu, is_compiled, bits):
    values = torch.ones(1, 256)
    values.view(torch.int32)[0, 3] = bits
    codes, scales = torch.empty(1, 256, dtype=torch.uint8), torch.empty(1, 2)
    (cpu if is_compiled else TORCH).round_groups(values, codes, scales, group=128, lead=0)
    assert scales.isfinite().tolist() == [[False, True]]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_rows_are_read_from_where_they_stand(tmp_path, cpu, threads, is_compiled):
    data = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(data.numpy().tobytes())
    file = os.open(tmp_path / "file", os.O_RDONLY)
    functions = cpu if is_compiled else TORCH
    with threads_of_torch(threads):
        for position, stride, size, rows in [
            (5, 3000, 2000, 900),
            (7, 500, 500, 6000),
            (0, 3 << 20, 3 << 20, 1),
            (9, 4, 4, 3),
        ]:
            memory = torch.zeros(rows, size + 8, dtype=torch.uint8)
            wanted = data[position:].as_strided((rows, size), (stride, 1), position)
            for out in (memory[:, :size], torch.empty(rows, size, dtype=torch.uint8)):
                assert functions.read_rows(file, position, stride, out)
                assert torch.equal(out, wanted)
            assert not memory[:, size:].any()
        assert not functions.read_rows(file, (3 << 20) - 10, 100, torch.empty(1, 11, dtype=torch.uint8))
        assert not functions.read_rows(file, 0, 1 << 20, torch.empty(4, 16, dtype=torch.uint8))
    os.close(file)
