"""What many tests need and takes long to make: the compiled functions, and tokenizers of both kinds."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

QUICKLY = ("-O1", "-fexpensive-optimizations")
"""Flags that compile faster. The last one fuses products and sums, as -O3 does: rows are rounded to 8 bits with one
rounding then, as the reference does it."""


@pytest.fixture(scope="session")
def load_functions():
    """Gives the library of compiled functions, where every run on this machine keeps it: its own, or that for another target."""
    from labinfer.functions.cpu import library
    from labinfer.native import compiler
    from labinfer.native.targets import processor_features

    def load(target=None):
        if not any(map(shutil.which, compiler.COMPILERS)):
            pytest.skip("no C++ compiler, so the functions are not used either")
        if target is None:
            return library.load(library.build())
        if not target.runs_here():
            pytest.skip(f"this machine does not run what is compiled for {target.name}")
        if target.name == "x86-64-v3" and not processor_features() & {"avx512f", "avx_vnni"}:
            pytest.skip("this machine's own library is one for that")
        return library.load(library.build(target=replace(target, flags=(*target.flags, *QUICKLY))))

    return load


@pytest.fixture(scope="session", params=["own", pytest.param("x86-64-v3", marks=pytest.mark.slow)])
def compiled_functions(load_functions, request):
    """The library for this processor, and for one with vectors of 8 floats, of which it has 16."""
    from labinfer.native.targets import TARGETS

    return load_functions({target.name: target for target in TARGETS}.get(request.param))


@pytest.fixture(scope="session", params=["", "amx", "dot"])
def kernel(compiled_functions, request) -> str:
    """How products are calculated, see ``labinfer.functions.cpu.library.KERNELS``."""
    if request.param not in compiled_functions.kernels:
        pytest.skip(f"this processor has not what {request.param} takes")
    return request.param


@pytest.fixture(scope="session")
def bpe_directory(tmp_path_factory):
    from checkpoints import write_tokenizer  # imports Transformers, which few tests need

    directory = tmp_path_factory.mktemp("bpe")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def bpe(bpe_directory):
    from labinfer.text.tokenizer import Tokenizer

    return Tokenizer(bpe_directory)


@pytest.fixture(scope="session")
def sp_directory(tmp_path_factory):
    import sentencepiece
    from checkpoints import CORPUS

    directory = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return directory


@pytest.fixture(scope="session")
def sp(sp_directory):
    from labinfer.text.tokenizer import Tokenizer

    return Tokenizer(sp_directory)
