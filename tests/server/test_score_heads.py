"""A classifier behind a server: ``/score``, ``/rerank``, ``/classify`` and ``/pooling`` give the scores of Transformers' own class."""

from __future__ import annotations

import math

import pytest
from classifiers import classifier_logits, make_classifier
from serving import serving


def test_scores_ranks_and_classes(tmp_path):
    directory = make_classifier(tmp_path, "qwen3", 1, id2label={"0": "relevant"})
    prompts = [[7, 8, 9], [40, 41]]
    logits = [row[0] for row in classifier_logits(directory, prompts)]
    scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    with serving("--model", str(directory), "--num-kv-blocks", "64", "--autotune", "off") as server:
        status, answer = server.post("/classify", {"input": prompts})
        assert (status, [item["label"] for item in answer["data"]]) == (200, ["relevant"] * 2)
        assert [item["probs"][0] for item in answer["data"]] == pytest.approx(scores, abs=1e-5)
        for body in ({}, {"task": "classify"}):
            status, answer = server.post("/pooling", body | {"input": prompts, "use_activation": False})
            assert [item["data"][0] for item in answer["data"]] == pytest.approx(logits, abs=1e-5)
        texts = ["red", "blue green", "17"]
        status, answer = server.post("/score", {"queries": "red", "documents": texts})
        found = [item["score"] for item in answer["data"]]
        status, answer = server.post("/rerank", {"query": "red", "documents": texts, "top_n": 2})
        order = sorted(range(3), key=lambda index: -found[index])[:2]
        assert [item["index"] for item in answer["results"]] == order
        assert [item["relevance_score"] for item in answer["results"]] == pytest.approx(
            [found[index] for index in order], abs=1e-5
        )
        for path, body in (("/v1/embeddings", {}), ("/pooling", {"task": "embed"})):
            status, answer = server.post(path, body | {"input": "red"})
            assert status == 400 and "use /score, /rerank and /classify" in answer["error"]["message"]
        status, answer = server.post("/v1/completions", {"prompt": "red"})
        assert status == 400 and "cannot generate text; request scores instead" in answer["error"]["message"]
