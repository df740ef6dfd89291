"""Answers of a server whose tokenizer spells most characters in bytes, as those of Llama 2, Mistral 7B and Gemma do."""

from __future__ import annotations

import json
import string

import pytest
from checkpoints import make_checkpoint
from serving import serving
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

TEXT = "ab 你好😀😁c"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), "llama-untied")
    names = ["<unk>", "<s>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.ascii_letters]
    library = FastTokenizer(
        models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    strip = decoders.Strip(content=" ", left=1, right=0)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    library.save(str(directory / "tokenizer.json"))
    with serving("--model", f"demo={directory}", "--dtype", "float32", "--num-kv-blocks", "64") as server:
        yield server


def answer(server, **fields) -> tuple[str, str, dict]:
    """Whole text, why it ended, and log-probabilities; the stream must come to the same."""
    body = {"model": "demo", "prompt": "a", "max_tokens": 60, "logprobs": 0}
    body |= {"structured_outputs": {"choice": [TEXT]}} | fields
    status, whole = server.post("/v1/completions", body)
    assert status == 200, whole
    choice = whole["choices"][0]
    _, response = server.open("POST", "/v1/completions", body | {"stream": True})
    lines = [line.removeprefix(b"data: ") for line in response.read().split(b"\n\n")]
    chunks = [json.loads(line)["choices"][0] for line in lines if line.startswith(b"{")]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    offsets = [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]
    return choice["text"], choice["finish_reason"], choice["logprobs"]


def test_characters_in_bytes_stream_whole(server):
    text, reason, logprobs = answer(server)
    assert (text, reason) == (TEXT, "stop")
    assert len(logprobs["tokens"]) >= len(TEXT.encode())
    begins = [index for index, character in enumerate(TEXT) for _ in character.encode()]
    assert logprobs["text_offset"][: len(begins)] == begins


@pytest.mark.parametrize("stop", ["你", "你好", "好", "😀", "😀😁", "😁", " 你"])
def test_stop_string_in_characters_in_bytes_ends_the_answer(server, stop):
    text, reason, _ = answer(server, stop=[stop])
    assert (text, reason) == (TEXT[: TEXT.index(stop)], "stop")


def test_cut_by_max_tokens_leaves_the_characters_before_it(server):
    _, _, logprobs = answer(server)
    count = len("ab 你好".encode()) + 2
    text, reason, _ = answer(server, max_tokens=count)
    assert (text, reason) == ("ab 你好\ufffd\ufffd", "length")
    token_ids = server.post("/tokenize", {"model": "demo", "prompt": TEXT, "add_special_tokens": False})[1]["tokens"]
    assert server.post("/detokenize", {"model": "demo", "tokens": token_ids})[1]["prompt"] == TEXT
    assert server.post("/detokenize", {"model": "demo", "tokens": token_ids[:-3]})[1]["prompt"].startswith("ab 你好😀")
