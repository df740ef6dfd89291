"""What many tests need and takes long to make: the compiled functions, and tokenizers of both kinds."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

NARROWER = "-mavx2 -mfma -fexpensive-optimizations"
"""Flags of the compiler for a processor with vectors of 8 floats, and 16 of them. The last one fuses products and sums, as -O3 does:
rows are rounded to 8 bits with one rounding then, as the reference does it."""


@pytest.fixture(scope="session")
def load_functions():
    """Gives the library of compiled functions, where every run on this machine keeps it, by flags for a narrower processor."""
    from labinfer.functions.cpu import library
    from labinfer.native import compiler

    def load(flags: str = ""):
        if not any(map(shutil.which, compiler.COMPILERS)):
            pytest.skip("no C++ compiler, so the functions are not used either")
        cpuinfo = Path("/proc/cpuinfo")
        if flags and not (cpuinfo.exists() and re.search(r"\bavx2\b", cpuinfo.read_text())):
            pytest.skip("not such a processor")
        with pytest.MonkeyPatch.context() as patch:
            if flags:  # -O3 takes six times as long
                without = [flag for flag in compiler.FLAGS if flag not in ("-march=native", "-O3")]
                patch.setattr(compiler, "FLAGS", (*without, "-O1", *flags.split()))
            return library.load(library.build(compiler.default_cache()))

    return load


@pytest.fixture(scope="session", params=["", pytest.param(NARROWER, marks=pytest.mark.slow)], ids=["own", "narrower"])
def compiled_functions(load_functions, request):
    """The library for this processor, and for a narrower one."""
    return load_functions(request.param)


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
