"""Classifiers and rerankers: their scores are those of Transformers' own classes."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint, mixed_prompts
from classifiers import PAD, classifier_logits, make_classifier, make_reranker, token_shares, write_logit_score

from labinfer import LLM, AsyncLLM, SamplingParams
from labinfer.api.batch.job import BatchJob
from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.progress import JobProgress
from labinfer.api.batch.reader import JsonlReader
from labinfer.api.batch.recorded_job import RecordedRun
from labinfer.api.batch.verification import find_difference
from labinfer.base.errors import UserError
from labinfer.base.kinds import MODEL_FAMILIES
from labinfer.models.architectures import classifiers
from labinfer.models.registry import load_config
from labinfer.models.score_head import with_score_head
from labinfer.requests.score_bodies import PoolingBody
from labinfer.text.pair_text import PAIR_TEMPLATES

SMALL = {"block_size": 4, "num_kv_blocks": 200, "threads": 1, "autotune": "off"}
LONG = {**SMALL, "num_kv_blocks": 400}
TOLERANCE = 1e-5
PROMPTS = [*mixed_prompts(4), [7, 8, 9, PAD, PAD], [PAD, PAD], [3, PAD, 4]]
"""Some end in the padding token, which Transformers does not read."""
SLOW = pytest.mark.slow
KINDS = [
    ("qwen3", 3),
    ("llama-untied", 1),
    ("gemma3-pictures", 3),
    *(
        pytest.param(kind, 2, marks=SLOW)
        for kind in ("qwen2-tied", "mistral", "gemma3", "phi3", "qwen3-moe", "gpt-oss", "deepseek-v3", "olmo3", "glm4")
    ),
]
OPTIONS = [
    {"chunked_prefill_size": 3},
    {"max_num_seqs": 2, "enable_prefix_caching": False},
]


def worst(found: list[list[float]], expected: list[list[float]]) -> float:
    return float((torch.tensor(found) - torch.tensor(expected)).abs().max())


def softmax(logits: list[float]) -> list[float]:
    return torch.tensor(logits, dtype=torch.float64).softmax(dim=0).tolist()


@pytest.mark.parametrize(("kind", "num_labels"), KINDS)
def test_logits_are_those_of_transformers(kind, num_labels, tmp_path):
    directory = make_classifier(tmp_path, kind, num_labels)
    expected = classifier_logits(directory, PROMPTS)
    for options in OPTIONS:
        with LLM(str(directory), **SMALL | options) as llm:
            for _ in range(2):  # the second time from the prefix cache
                outputs = llm.classify(PROMPTS, use_activation=False)
                assert worst([output.probs for output in outputs], expected) < TOLERANCE, options
            assert [output.prompt_token_ids for output in outputs] == PROMPTS


def test_activation_and_labels_are_those_of_the_config(tmp_path):
    directory = make_classifier(tmp_path, "qwen3", 3, id2label={"0": "bad", "1": "so so", "2": "good"})
    logits = classifier_logits(directory, PROMPTS)
    expected = {
        None: list(map(softmax, logits)),
        "single_label_classification": list(map(softmax, logits)),
        "multi_label_classification": torch.tensor(logits, dtype=torch.float64).sigmoid().tolist(),
        "regression": logits,
    }
    config = json.loads((directory / "config.json").read_text())
    for problem, scores in expected.items():
        (directory / "config.json").write_text(json.dumps(config | {"problem_type": problem}))
        with LLM(str(directory), **SMALL) as llm:
            outputs = llm.classify(PROMPTS)
            assert worst([output.probs for output in outputs], scores) < TOLERANCE, problem
            names = ["bad", "so so", "good"]
            assert [output.label for output in outputs] == [names[row.index(max(row))] for row in logits]
    (directory / "config.json").write_text(json.dumps(config | {"problem_type": "ranking"}))
    with pytest.raises(UserError, match="problem_type 'ranking' is not supported; supported are single_label"):
        LLM(str(directory), **SMALL)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"problem_type": "single_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"problem_type": "regression", "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, "sigmoid"),
    ],
)
def test_activation_of_one_label_is_no_softmax(tmp_path, changes, activation):
    directory = make_classifier(tmp_path, "qwen3", 1, **changes)
    assert with_score_head(load_config(directory), directory).score_head.head.activation == activation


def test_unknown_activation_is_refused(tmp_path):
    directory = make_classifier(tmp_path, "qwen3", 1)
    (directory / "config_sentence_transformers.json").write_text('{"activation_fn": "torch.nn.Tanh"}')
    with pytest.raises(
        UserError, match="activation_fn 'torch.nn.Tanh' is not supported; supported are Sigmoid, Identity"
    ):
        with_score_head(load_config(directory), directory)


def test_classifier_does_only_what_it_can(tmp_path):
    directory = make_classifier(tmp_path, "qwen2-tied", 3)
    with LLM(str(directory), **SMALL) as llm:
        with pytest.raises(UserError, match=r"has no output head \(lm_head\) and cannot generate.*scores instead"):
            llm.generate(PROMPTS)
        for pooling in (None, "last", "mean"):
            with pytest.raises(UserError, match="gives no embeddings.*use /classify"):
                llm.embed(PROMPTS, pooling)
        with pytest.raises(UserError, match="this classifier has 3 labels"):
            llm.score("a", ["b"])
        for task in (None, "classify"):
            body = PoolingBody(input="fox", task=task, pooling="mean")
            with pytest.raises(UserError, match="pooling 'mean' is not supported: this model's score head"):
                body.work(llm.spec)


def test_cross_encoder_scores_pairs_by_a_sigmoid(tmp_path):
    directory = make_classifier(tmp_path, "qwen3", 1)
    with LLM(str(directory), **SMALL) as llm:
        outputs = llm.score(["the fox", "the dog"], ["a lazy dog", "a world"])
        prompts = [output.prompt_token_ids for output in outputs]
        assert prompts[0] == llm.tokenizer.encode("the fox") + llm.tokenizer.encode("a lazy dog")
        logits = [row[0] for row in classifier_logits(directory, prompts)]
        assert [output.score for output in outputs] == pytest.approx(
            [1 / (1 + math.exp(-logit)) for logit in logits], abs=TOLERANCE
        )
        raw = llm.score("the fox", "a lazy dog", use_activation=False)[0].score
        assert raw == pytest.approx(logits[0], abs=TOLERANCE)
        with pytest.raises(UserError, match="instruction: this model has no template"):
            llm.score("a", "b", instruction="c")
        query = llm.tokenizer.encode("the fox")
        for limit in range(1, len(query) + 1):  # a query without a document has no score
            with pytest.raises(UserError, match=f"leaves no room for the document.* has {len(query)} tokens"):
                llm.score("the fox", "a lazy dog", truncate_prompt_tokens=limit)
        (cut,) = llm.score("the fox", "a lazy dog", truncate_prompt_tokens=len(query) + 1)
        assert cut.prompt_token_ids == [*query, llm.tokenizer.encode("a lazy dog")[0]]
        for limit in (0, -2, 1 << 30, True, "4"):
            with pytest.raises(UserError, match="truncate_prompt_tokens must be -1, or from 1 to"):
                llm.score("the fox", "a lazy dog", truncate_prompt_tokens=limit)


def test_async_llm_scores_and_classifies(tmp_path):
    directory = make_classifier(tmp_path, "qwen3", 1)

    async def run() -> tuple[list, list]:
        llm = AsyncLLM(str(directory), **SMALL)
        try:
            scores = [output.score for output in await llm.score("the fox", ["a lazy dog", "a world"])]
            return scores, (await llm.classify(PROMPTS[0], use_activation=False)).probs
        finally:
            await llm.close()

    scores, probs = asyncio.run(run())
    with LLM(str(directory), **SMALL) as llm:
        expected = [output.score for output in llm.score("the fox", ["a lazy dog", "a world"])]
    assert scores == pytest.approx(expected, abs=TOLERANCE)
    assert probs == pytest.approx(classifier_logits(directory, PROMPTS[:1])[0], abs=TOLERANCE)


def test_qwen3_reranker_scores_by_yes_and_no(tmp_path):
    directory = make_reranker(tmp_path)
    documents = ["a lazy dog", "the fox jumps", "world " * 200]
    template = PAIR_TEMPLATES["qwen3"]
    with LLM(str(directory), **LONG, reranker="qwen3") as llm:
        ids = tuple(llm.tokenizer.encode(text)[0] for text in ("yes", "no"))
        outputs = llm.score("the fox", documents, truncate_prompt_tokens=330, instruction="Find foxes")
        prompts = [output.prompt_token_ids for output in outputs]
        shares = token_shares(directory, prompts, ids)
        assert [output.score for output in outputs] == pytest.approx(shares, abs=1e-6)
        encode = llm.tokenizer.encode
        middle = template.middle.format(instruction="Find foxes", query="the fox", document=documents[0])
        assert prompts[0] == encode(template.prefix) + encode(middle) + encode(template.suffix)
        suffix = encode(template.suffix)
        assert 320 < len(prompts[2]) <= 330 and prompts[2][-len(suffix) :] == suffix
        begin = encode(template.prefix) + encode(middle.removesuffix(documents[0]) + "world")
        assert prompts[2][: len(begin)] == begin
        with pytest.raises(UserError, match="maximum context length"):
            llm.score("the fox", documents[2] * 9)
        with pytest.raises(UserError, match="without its document, the prompt has"):
            llm.score("the fox", documents, truncate_prompt_tokens=20)
        assert llm.generate([[7, 8, 9]])[0].token_ids  # its head generates, too
    with LLM(str(directory), **SMALL) as llm, pytest.raises(UserError, match="start with --reranker qwen3"):
        llm.score("the fox", documents)  # cosines of its hidden states would be no scores


def test_reranker_by_the_files_of_sentence_transformers(tmp_path):
    directory = make_checkpoint(tmp_path, "llama-untied")
    write_logit_score(directory, 40, 30, prompts={"web": "Find it"}, default_prompt_name="web")
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'query' %}Q: {{ m.content }}{% elif m.role == 'document' %} D: "
        "{{ m.content }}{% else %}{{ m.content }}\n{% endif %}{% endfor %}!"
    )
    with LLM(str(directory), **SMALL) as llm:
        outputs = llm.score("fox", ["dog", "the world"])
        prompts = [output.prompt_token_ids for output in outputs]
        assert prompts[1] == llm.tokenizer.encode("Find it\nQ: fox D: the world!")
        assert [output.score for output in outputs] == pytest.approx(
            token_shares(directory, prompts, (40, 30)), abs=1e-6
        )
    path = directory / "1_LogitScore" / "config.json"
    path.write_text(json.dumps({"true_token_id": VOCAB}))
    with pytest.raises(UserError, match=rf"token ids \[{VOCAB}\] are not in the vocabulary"):
        LLM(str(directory), **SMALL)
    path.write_text(json.dumps({"true_token_id": "yes"}))
    with pytest.raises(UserError, match="true_token_id and false_token_id should be token ids"):
        LLM(str(directory), **SMALL)


def test_classifier_converted_from_a_reranker_has_its_template(tmp_path):
    directory = make_classifier(tmp_path, "qwen3", 1)
    with LLM(str(directory), **LONG, reranker="qwen3") as llm:
        (output,) = llm.score("fox", "dog")
        assert output.prompt_token_ids[-5:] == llm.tokenizer.encode(PAIR_TEMPLATES["qwen3"].suffix)[-5:]
        (logits,) = classifier_logits(directory, [output.prompt_token_ids])
        assert output.score == pytest.approx(1 / (1 + math.exp(-logits[0])), abs=TOLERANCE)


def test_job_answers_each_line_of_documents_with_one_line(tmp_path):
    directory = make_classifier(tmp_path / "model", "qwen3", 1)
    texts = ["a lazy dog", "the fox", "world"]
    bodies = {
        "/v1/rerank": {"query": "fox", "documents": texts, "top_n": 2},
        "/score": {"queries": "fox", "documents": texts},
        "/classify": {"input": [[7, 8], [9]]},
        "/v1/embeddings": {"input": "fox"},
    }
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with LLM(str(directory), **SMALL, max_num_seqs=2) as llm:
        output = JobOutput(JobOptions(input=str(source), output=str(out)), {}, {})
        output.begin({}, RecordedRun(llm.fingerprint, {}, str(source)))
        progress = JobProgress("none", llm.clock, None, 0)
        BatchJob(
            JsonlReader(str(source), 1 << 20),
            output,
            progress,
            defaults=SamplingParams(),
            model_name="name",
            fingerprint=llm.fingerprint,
        ).run(llm, lambda: None)
        scores = [output.score for output in llm.score("fox", texts)]
        classes = [output.probs for output in llm.classify([[7, 8], [9]])]
    records = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    assert len(records) == len(lines)
    found = {record["custom_id"]: record["response"]["body"] for record in records}
    assert [item["score"] for item in found["/score"]["data"]] == pytest.approx(scores, abs=TOLERANCE)
    assert [item["probs"] for item in found["/classify"]["data"]] == [
        pytest.approx(row, abs=TOLERANCE) for row in classes
    ]
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [item["index"] for item in found["/v1/rerank"]["results"]] == best
    assert "use /score, /rerank and /classify" in found["/v1/embeddings"]["error"]["message"]
    changed = json.loads(json.dumps(records))
    for record in changed:
        if record["custom_id"] == "/v1/rerank":
            record["response"]["body"]["results"][0]["relevance_score"] += 0.5
    pairs = [(old, new) for old, new in zip(records, changed, strict=True) if old["custom_id"] != "/v1/embeddings"]
    differences = {old["custom_id"]: find_difference(old, new) for old, new in pairs}
    assert [url for url, difference in differences.items() if difference] == ["/v1/rerank"]


def test_reranker_without_its_tokens_is_refused(tmp_path):
    directory = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(
        UserError, match="reads the logits of the tokens 'no' and 'yes', but .* has no tokenizer.json with both"
    ):
        LLM(str(directory), **SMALL, reranker="qwen3")


def test_classifiers_are_named_after_their_families():
    assert classifiers()["Qwen3ForSequenceClassification"] == "Qwen3ForCausalLM"
    assert classifiers()["Gemma3TextForSequenceClassification"] == "Gemma3ForCausalLM"
    assert set(classifiers().values()) <= set(MODEL_FAMILIES)
