"""Published embedding models on several ranks, as jobs and behind a server: vectors are sentence-transformers', the rest is refused."""

from __future__ import annotations

import json

import pytest
from checkpoints import mixed_prompts
from embedders import make_base_model, reference_vectors, worst_error, write_modules
from launchers import matrix
from serving import serving

from labinfer.base.errors import ExitStatus

PROMPTS = mixed_prompts(5)
LAYOUTS = {"pp 2": ("-pp", "2"), "tp 2": ("-tp", "2")}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """In the form of Qwen3-Embedding 8B, with the mean of its hidden states, which are not normalized."""
    changes = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    directory = make_base_model(tmp_path_factory.mktemp("embedder"), "qwen3", **changes)
    return write_modules(directory, "mean", normalize=False)


@pytest.fixture(scope="module")
def bidirectional(tmp_path_factory):
    return make_base_model(tmp_path_factory.mktemp("bidirectional"), "qwen2-tied", is_causal=False)


@pytest.mark.parametrize(
    ("launcher", "layout"),
    matrix(("mpirun", "tp 2"), ("torchrun", "pp 2"), over=[(name,) for name in LAYOUTS]),
)
def test_bidirectional_vectors_on_several_ranks(bidirectional, launches, tmp_path, launcher, layout):
    body = {"input": PROMPTS, "model": "any", "pooling": "mean", "normalize": False}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"custom_id": "own", "method": "POST", "url": "/v1/embeddings", "body": body}))
    options = ("--chunked-prefill-size", "4", *LAYOUTS[layout])
    done = launches.run(launcher, 2, "--model", bidirectional, "--input", source, "--output", out, *options)
    assert done.returncode == ExitStatus.OK, done.text
    (record,) = map(json.loads, out.read_text().splitlines())
    vectors = [item["embedding"] for item in record["response"]["body"]["data"]]
    assert worst_error(vectors, reference_vectors(bidirectional, PROMPTS, "mean", normalize=False)) < TOLERANCE


@pytest.mark.parametrize(
    ("launcher", "layout"),
    matrix(("mpirun", "pp 2"), ("torchrun", "tp 2"), over=[(name,) for name in LAYOUTS]),
)
def test_vectors_on_several_ranks_are_those_of_the_files(embedder, launches, tmp_path, launcher, layout):
    body = {"input": PROMPTS, "model": "any"}
    lines = [
        {"custom_id": "own", "method": "POST", "url": "/v1/embeddings", "body": body},
        {
            "custom_id": "last",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": body | {"pooling": "last", "normalize": True},
        },
        {
            "custom_id": "text",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": PROMPTS[0], "max_tokens": 3},
        },
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = launches.run(launcher, 2, "--model", embedder, "--input", source, "--output", out, *LAYOUTS[layout])
    assert done.returncode == ExitStatus.SOME_FAILED, done.text
    records = {record["custom_id"]: record for record in map(json.loads, out.read_text().splitlines())}
    for name, mode, normalize in (("own", "mean", False), ("last", "lasttoken", True)):
        vectors = [item["embedding"] for item in records[name]["response"]["body"]["data"]]
        assert worst_error(vectors, reference_vectors(embedder, PROMPTS, mode, normalize)) < TOLERANCE
    assert "no output head (lm_head)" in json.dumps(records["text"]["response"]["body"])


def test_server_of_an_embedder_scores_and_refuses_to_generate(embedder):
    expected = reference_vectors(embedder, PROMPTS, "mean", normalize=False)
    with serving("--model", str(embedder), "--dtype", "float32", "--num-kv-blocks", "100") as server:
        _, answer = server.post("/v1/embeddings", {"input": PROMPTS})
        assert worst_error([item["embedding"] for item in answer["data"]], expected) < TOLERANCE
        status, answer = server.post("/rerank", {"query": "the dog", "documents": ["a fox", "the dog"]})
        assert status == 200 and answer["results"][0] == {
            "index": 1,
            "relevance_score": pytest.approx(1.0, abs=1e-5),
            "document": {"text": "the dog"},
        }
        chat = {"messages": [{"role": "user", "content": "the dog"}], "max_tokens": 3}
        for path, body in (
            ("/v1/completions", {"prompt": "the dog"}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | {"stream": True}),
            ("/v1/responses", {"input": "the dog"}),
        ):
            status, answer = server.post(path, body)
            assert (status, "no output head (lm_head)" in answer["error"]["message"]) == (400, True), (path, answer)
        status, answer = server.post("/v1/messages", chat)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
