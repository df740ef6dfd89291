"""examples/plugins/top_n_sigma.py: which tokens it leaves, on every layout, from Python, jobs and clients of a server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import openai
import pytest
import torch
from checkpoints import make_checkpoint
from launchers import LAUNCH, ROOT, command, pipe, run
from serving import serving

from labinfer import LLM, SamplingParams, UserError
from labinfer.base.plugins import PLUGINS
from labinfer.base.registry import REGISTRY

PLUGIN = str(ROOT / "examples/plugins/top_n_sigma.py")
PROMPT = [5, 17, 290, 33, 8]
SIGMA, TEMPERATURE, NUM_SEEDS = 1.5, 3.0, 200
LINES = [
    {"prompt_token_ids": PROMPT, "temperature": TEMPERATURE, "seed": seed, "max_tokens": 12, "ignore_eos": True}
    | ({"top_n_sigma": SIGMA} if seed % 2 else {"top_n_sigma": 0.2, "top_k": 40, "min_p": 0.001})
    for seed in range(6)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("sigma") / "model", "llama-untied"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    before = [*PLUGINS.loaded]
    with LLM(checkpoint, plugins=[PLUGIN], block_size=4, threads=1, num_kv_blocks=400) as llm:
        yield llm
    PLUGINS.loaded[:] = before
    del REGISTRY._entries["logits_processor"]["top_n_sigma"]  # the tests of others know nothing of it


@pytest.fixture(scope="module")
def answers(llm):
    """Tokens of ``LINES`` on one rank, asked for from Python."""
    params = [
        SamplingParams(**{name: value for name, value in line.items() if name != "prompt_token_ids"}) for line in LINES
    ]
    return [output.token_ids for output in llm.generate([PROMPT] * len(LINES), params)]


def test_only_tokens_within_n_deviations_are_drawn(llm, checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits_V = model(torch.tensor([PROMPT])).logits[0, -1]
    kept = set((logits_V >= logits_V.max() - SIGMA * logits_V.std(correction=0)).nonzero().flatten().tolist())
    assert 1 < len(kept) < len(logits_V) / 4

    def drawn(**fields) -> set[int]:
        params = [
            SamplingParams(max_tokens=1, temperature=TEMPERATURE, seed=seed, **fields) for seed in range(NUM_SEEDS)
        ]
        return {output.token_ids[0] for output in llm.generate([PROMPT] * NUM_SEEDS, params)}

    assert len(drawn(top_n_sigma=SIGMA)) > 1 and drawn(top_n_sigma=SIGMA) <= kept
    assert drawn() - kept and drawn(top_n_sigma=0) == drawn(), "without it, and with its default, any token may come"
    assert drawn(logits_processors={"top_n_sigma": SIGMA}) == drawn(top_n_sigma=SIGMA)


def test_draws_are_changed_and_greedy_answers_are_not(llm, answers):
    plain = [SamplingParams(seed=line["seed"], temperature=TEMPERATURE, max_tokens=12) for line in LINES]
    assert all(output.token_ids != own for output, own in zip(llm.generate([PROMPT] * 6, plain), answers, strict=True))
    greedy = [SamplingParams(max_tokens=12, ignore_eos=True, top_n_sigma=sigma) for sigma in (0, 0.01)]
    first, second = llm.generate([PROMPT] * 2, greedy)
    assert first.token_ids == second.token_ids


def test_it_keeps_tokens_that_other_constraints_allow(llm):
    """The allowed tokens are far below the largest logit."""
    fields = {"max_tokens": 8, "temperature": TEMPERATURE, "ignore_eos": True, "top_n_sigma": 0.01}
    (output,) = llm.generate([PROMPT], SamplingParams(allowed_token_ids=[3, 4], **fields))
    assert output.finish_reason == "length" and {*output.token_ids} <= {3, 4}
    form = {"structured_outputs": {"regex": "[0-9]{4}"}} | fields | {"ignore_eos": False}
    (output,) = llm.generate([PROMPT], SamplingParams(**form))
    assert output.finish_reason == "stop" and len(output.text) == 4 and output.text.isdecimal()


def test_params_made_before_the_plugin_was_loaded_are_checked(llm):
    sampling = SamplingParams()
    sampling.logits_processors["top_n_sigma"] = -1  # as if it had not been known
    with pytest.raises(UserError, match="top_n_sigma must be from 0 to 100, not -1"):
        llm.generate([PROMPT], sampling)


@pytest.mark.parametrize(
    ("launcher", "layout"),
    [
        pytest.param("single", (), marks=pytest.mark.slow),
        pytest.param("mpirun", ("-tp", "2"), marks=pytest.mark.slow),
        pytest.param("torchrun", ("-tp", "2"), marks=pytest.mark.slow),
        ("torchrun", ("-pp", "2")),
        pytest.param("mpirun", ("-pp", "2"), marks=pytest.mark.slow),
    ],
)
def test_lines_of_a_job_have_the_same_tokens_on_every_layout(launcher, layout, checkpoint, answers, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line | {"id": index} for index, line in enumerate(LINES)] + [{"prompt": "x", "top_n_sigma": 101}]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--plugin", PLUGIN, "--model", checkpoint, "--input", given, "--output", out, "--num-kv-blocks", "400")
    done = run(launcher, 2 if layout else 1, LAUNCH, *flags, "--dtype", "float32", *layout)
    assert done.returncode == 1 or launcher == "torchrun", done.text  # one line is refused
    records = [json.loads(line) for line in out.read_text().splitlines()]
    tokens = {record["id"]: record["token_ids"] for record in records if "token_ids" in record}
    assert [tokens[index] for index in range(len(LINES))] == answers
    (error,) = [record["error"] for record in records if "error" in record]
    assert "top_n_sigma must be from 0 to 100, not 101" in json.dumps(error)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with serving(
        "--plugin", PLUGIN, "--dtype", "float32", "--num-kv-blocks", "400", "--files-dir", str(folder)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(server, client, api: str, temperature: float, **fields) -> str:
    """A short answer of the demo model."""
    turns = [{"role": "user", "content": "What is LABInfer?"}]
    common = {"model": "demo", "temperature": temperature}
    if api == "completions":
        options = common | {"max_tokens": 12, "seed": 3, "extra_body": {"ignore_eos": True} | fields}
        return client.completions.create(prompt="red blue", **options).choices[0].text
    if api == "chat":
        options = common | {"max_tokens": 12, "seed": 3, "extra_body": fields}
        return client.chat.completions.create(messages=turns, **options).choices[0].message.content
    if api == "responses":
        options = common | {"max_output_tokens": 16, "extra_body": {"seed": 3} | fields}
        return client.responses.create(input=turns, **options).output_text
    status, answer = server.post("/v1/messages", common | {"messages": turns, "max_tokens": 12} | fields)
    assert status == 200, answer
    return answer["content"][0]["text"]


@pytest.mark.parametrize("api", ["completions", "chat", "responses", "messages"])
def test_field_of_every_api(server, client, api):
    """The smallest sigma leaves the largest logit alone, at any temperature."""
    greedy = ask(server, client, api, 0.0)
    assert greedy and ask(server, client, api, 30.0, top_n_sigma=1e-6) == greedy
    assert ask(server, client, api, 30.0, logits_processors={"top_n_sigma": 1e-6}) == greedy
    assert ask(server, client, api, 30.0, top_n_sigma=None) != greedy


def test_lines_of_a_batch_have_the_field(server, client):
    """One of two lines has a value that is out of bounds."""
    body = {"model": "demo", "prompt": "red blue", "max_tokens": 12, "ignore_eos": True, "temperature": 30}
    lines = [
        {"custom_id": str(value), "method": "POST", "url": "/v1/completions", "body": body | {"top_n_sigma": value}}
        for value in (1e-6, 101)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    end = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < end:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    (answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    assert answer["response"]["body"]["choices"][0]["text"] == ask(server, client, "completions", 0.0)
    assert "top_n_sigma must be from 0 to 100, not 101" in client.files.content(batch.error_file_id).text


@pytest.mark.parametrize("value", [-1, 100.5, "1", [1], True])
def test_wrong_value_is_a_400_that_names_the_field(client, value):
    with pytest.raises(openai.BadRequestError, match="top_n_sigma must be ") as caught:
        client.completions.create(model="demo", prompt="x", extra_body={"top_n_sigma": value})
    assert (caught.value.param, caught.value.status_code) == ("top_n_sigma", 400)


def test_document_has_the_field(server):
    schemas = server.get("/openapi.json")[1]["components"]["schemas"]
    for body in ("CompletionBody", "ChatBody", "ResponseBody", "MessageBody"):
        assert schemas[body]["properties"]["top_n_sigma"]["maximum"] == 100


def test_chat_with_a_server_has_the_flag_and_the_setting(server):
    text = "/set\n/set top_n_sigma 200\n/set top_n_sigma 0.000001\n/set\nWhat is LABInfer?\n/exit\n"
    flags = ("--plugin", PLUGIN, "--top-n-sigma", "1.5", "--temperature", "30", "--max-tokens", "12")
    done = pipe(command("single", 1, LAUNCH, "chat", "--url", server.url, *flags), text)
    shown = done.stdout + done.stderr
    assert "top_n_sigma 1.5" in shown and "top_n_sigma must be from 0 to 100, not 200" in shown, shown
    assert ask(server, None, "messages", 0.0) in shown, shown


@pytest.mark.slow
@pytest.mark.parametrize("supervised", [False, True])
def test_plugin_may_import_torch(supervised, tmp_path):
    """The gateway process, which has no torch, takes the parameter from rank 0, or from the supervisor that started it."""
    path = tmp_path / "with_torch.py"
    path.write_text(Path(PLUGIN).read_text(encoding="utf-8").replace("from labinfer", "import torch\nfrom labinfer", 1))
    flags, ranks = (
        ("--plugin", str(path), "--dtype", "float32", "--num-kv-blocks", "400"),
        {"launcher": "mpirun", "ranks": 1},
    )
    with serving(*flags, **(ranks | {"supervised": True} if supervised else {})) as server:
        body = {"model": "demo", "prompt": "red blue", "max_tokens": 4, "ignore_eos": True}
        (greedy, drawn) = (
            server.post("/v1/completions", body | fields)[1]
            for fields in ({"temperature": 0}, {"temperature": 30, "top_n_sigma": 1e-6})
        )
        assert greedy["choices"][0]["text"] == drawn["choices"][0]["text"]
