"""Vectors, likenesses and token ids, through OpenAI's own client where it has routes for them."""

from __future__ import annotations

import base64
import struct

import openai
import pytest

MESSAGES = [{"role": "user", "content": "17 + 25 = ?"}]


class TestTokenization:
    def test_tokens_as_they_read(self, server):
        body = {"messages": MESSAGES, "return_token_strs": True, "add_generation_prompt": True, "tools": None}
        status, answer = server.post("/tokenize", body | {"add_special_tokens": None, "chat_template_kwargs": None})
        assert status == 200 and answer["count"] == len(answer["token_strs"])
        assert answer["token_strs"][0] == "<|im_start|>"

    def test_token_that_the_model_has_not_is_refused(self, server):
        status, answer = server.post("/detokenize", {"tokens": [5, 10**8]})
        assert (status, answer["error"]["param"]) == (400, "tokens")

    def test_conversation_may_end_in_three_ways(self, server):
        def count(*messages: dict, **fields) -> str:
            return server.post("/tokenize", {"messages": messages} | fields)[1]["tokens"]

        answered, begun = {"role": "assistant", "content": "42"}, {"role": "assistant", "content": "4"}
        asked = count(*MESSAGES)
        whole = count(*MESSAGES, answered, add_generation_prompt=False)
        open_end = count(*MESSAGES, begun, continue_final_message=True)
        assert whole[: len(asked)] == asked == open_end[: len(asked)]
        assert count(*MESSAGES, add_generation_prompt=False) == asked[: len(asked) - 3]
        assert len(open_end) == len(asked) + 1 and len(whole) > len(open_end)


class TestEmbeddings:
    def test_null_is_left_out(self, client):
        body = {"model": "demo", "input": "red", "encoding_format": None, "dimensions": None, "pooling": None}
        assert isinstance(client.post("/embeddings", cast_to=object, body=body)["data"][0]["embedding"], list)

    def test_floats_and_base64_are_the_same_unit_vectors(self, client, lenient):
        plain = client.embeddings.create(model="demo", input=["red", "blue"], encoding_format="float")
        coded = lenient.embeddings.create(model="demo", input=["red", "blue"], encoding_format="base64")
        assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0
        assert [one.index for one in plain.data] == [0, 1]
        for one, other in zip(plain.data, coded.data, strict=True):
            assert sum(number**2 for number in one.embedding) == pytest.approx(1, abs=1e-5)
            data = base64.b64decode(other.embedding)
            assert struct.unpack(f"<{len(data) // 4}f", data) == pytest.approx(one.embedding, abs=1e-6)
        default = lenient.embeddings.create(model="demo", input="red")
        assert default.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)

    def test_pooling(self, client):
        fields = {"model": "demo", "input": "red blue", "encoding_format": "float"}
        last = client.embeddings.create(**fields).data[0].embedding
        mean = client.embeddings.create(**fields, extra_body={"pooling": "mean"}).data[0].embedding
        assert last != pytest.approx(mean, abs=1e-3)

    def test_vectors_keep_their_length_where_that_is_asked_for(self, client):
        fields = {"model": "demo", "input": "red", "encoding_format": "float"}
        unit = client.embeddings.create(**fields).data[0].embedding
        for name in ("normalize", "use_activation"):
            plain = client.embeddings.create(**fields, extra_body={name: False}).data[0].embedding
            length = sum(number**2 for number in plain) ** 0.5
            assert length > 1.1 and [number / length for number in plain] == pytest.approx(unit, abs=1e-5)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": []}, "input"),
            ({"input": ["red", ""]}, "input"),
            ({"input": [[5], [10**6]]}, None),
            ({"input": "red", "dimensions": 100000}, "dimensions"),
            ({"input": "red", "extra_body": {"pooling": "max"}}, "pooling"),
        ],
        ids=str,
    )
    def test_what_cannot_be_embedded_is_refused(self, client, fields, param):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="demo", encoding_format="float", **fields)
        assert caught.value.param == param


class TestScores:
    def test_score_is_the_cosine_of_vectors(self, server, client):
        texts = ["red blue", "red green", "17 + 25"]
        data = client.embeddings.create(model="demo", input=texts, encoding_format="float").data
        first, *others = (item.embedding for item in data)
        cosines = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
        for body in ({"text_1": texts[0], "text_2": texts[1:]}, {"queries": [texts[0]], "documents": texts[1:]}):
            status, answer = server.post("/score", body | {"model": "demo", "pooling": "last"})
            assert (status, [item["score"] for item in answer["data"]]) == (200, pytest.approx(cosines, abs=1e-5))
        status, answer = server.post("/v1/score", {"text_1": texts, "text_2": texts, "pooling": "last"})
        assert [item["score"] for item in answer["data"]] == pytest.approx([1, 1, 1], abs=1e-5)
        status, answer = server.post("/rerank", {"query": texts[0], "documents": texts[1:], "pooling": "last"})
        assert [item["index"] for item in answer["results"]] == sorted((0, 1), key=lambda index: -cosines[index])
        assert answer["results"][0]["document"]["text"] in texts[1:] and answer["usage"]["total_tokens"] > 0
        body = {"query": texts[0], "documents": [{"text": text} for text in texts], "top_n": 1}
        status, answer = server.post("/v2/rerank", body | {"return_documents": False, "pooling": "last"})
        assert answer["results"] == [{"index": 0, "relevance_score": pytest.approx(1, abs=1e-5)}]
        status, answer = server.post("/pooling", {"input": texts[0], "model": "demo"})
        assert answer["data"][0]["data"] == pytest.approx(first, abs=1e-6)

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/score", {"text_1": "a"}, "text_1"),
            ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
            ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
            ("/score", {"text_1": "", "text_2": "b"}, "text_1"),
            ("/rerank", {"query": "a", "documents": []}, "documents"),
            ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
            ("/pooling", {"input": ""}, "input"),
            ("/score", {"text_1": "a", "text_2": "b"}, "pooling"),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}, "pooling"),
        ],
        ids=str,
    )
    def test_what_cannot_be_scored_is_refused(self, server, path, body, param):
        status, answer = server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)
