"""Models by id from the Hugging Face hub and from ModelScope: the real clients against a local server that has the API of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_servers import HubServer
from launchers import LAUNCH, ROOT, free_port, run

from labinfer.weights.hubs import MODELSCOPE_IDS
from labinfer.weights.resolve import ALIASES

DEMO = ROOT / "labinfer" / "assets" / "demo"
QUESTION = ("--prompt", "17 + 25 = ?", "--temperature", "0", "--autotune", "off")
CLIENTS = {"huggingface": "huggingface_hub", "modelscope": "modelscope_hub"}


@pytest.fixture(params=CLIENTS)
def hub(request):
    pytest.importorskip(CLIENTS[request.param])
    return request.param


@pytest.fixture
def server():
    with HubServer.running({"Qwen/Qwen3-0.6B": DEMO, "LLM-Research/Llama-3.2-1B-Instruct": DEMO}) as server:
        yield server


def variables(folder: Path, url: str) -> dict[str, str]:
    """Environment of a user who has downloaded nothing, and whose hubs are at ``url``. The client of ModelScope retries a file for half a
    minute unless it is told not to."""
    retries = {"MODELSCOPE_DOWNLOAD_MAX_RETRIES": "0", "MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS": "1"}
    endpoints = {"HF_ENDPOINT": url, "MODELSCOPE_ENDPOINT": url, "HF_HUB_OFFLINE": "0"}
    caches = {"HF_HOME": "hf", "MODELSCOPE_CACHE": "ms", "MODELSCOPE_HOME": "ms-home"}
    return {name: str(folder / cache) for name, cache in caches.items()} | endpoints | retries


def downloads(server: HubServer, file: str) -> int:
    return sum(line.startswith("GET ") and line.endswith(("/" + file, "FilePath=" + file)) for line in server.requests)


def test_two_ranks_download_once_and_the_next_start_needs_no_network(hub, server, tmp_path):
    flags = ("--hub", hub, "--model", "qwen3", "-pp", "2", *QUESTION)
    first = run("torchrun", 2, LAUNCH, *flags, **variables(tmp_path, server.url))
    assert first.returncode == 0 and first.stdout.startswith("42"), first.text
    assert downloads(server, "model.safetensors") == 1
    assert not [line for line in server.requests if "README" in line]
    del server.requests[:]
    second = run("mpirun", 2, LAUNCH, *flags, **variables(tmp_path, server.url))
    assert second.returncode == 0 and second.stdout.startswith("42"), second.text
    assert not server.requests


def test_variable_chooses_the_hub_whose_ids_are_mapped(server, tmp_path):
    pytest.importorskip("modelscope_hub")
    env = variables(tmp_path, server.url) | {"LABINFER_HUB": "modelscope"}
    done = run("single", 1, LAUNCH, "--model", "llama3.2", *QUESTION, **env)
    assert done.returncode == 0 and done.stdout.startswith("42"), done.text
    assert any("/models/LLM-Research/Llama-3.2-1B-Instruct/" in line for line in server.requests)
    chosen = run("single", 1, LAUNCH, "--model", "llama3.2", "--hub", "huggingface", *QUESTION, **env)
    assert chosen.returncode == 2
    (error,) = chosen.our_errors
    assert "Hugging Face hub for meta-llama/Llama-3.2-1B-Instruct (404" in error and "cannot be reached" not in error


def test_download_that_was_interrupted_goes_on(hub, server, tmp_path):
    server.broken.add("model.safetensors")
    flags, env = ("--hub", hub, "--model", "qwen3", *QUESTION), variables(tmp_path, server.url)
    failed = run("single", 1, LAUNCH, *flags, **env)
    assert failed.returncode == 2 and "hub for Qwen/Qwen3-0.6B (" in failed.text, failed.text
    assert downloads(server, "config.json") == 1
    server.broken.clear()
    done = run("single", 1, LAUNCH, *flags, **env)
    assert done.returncode == 0 and done.stdout.startswith("42"), done.text
    assert downloads(server, "config.json") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_hub_that_cannot_be_reached_is_named_with_the_other_one(hub, ranks, tmp_path):
    env = variables(tmp_path, f"http://127.0.0.1:{free_port()}")
    launcher = "torchrun" if ranks > 1 else "single"
    done = run(launcher, ranks, LAUNCH, "--hub", hub, "--model", "qwen3", *QUESTION, **env)
    assert done.returncode != 0
    (error,) = done.our_errors
    advice = {"huggingface": "--hub modelscope", "modelscope": "--hub huggingface"}
    mirror = {
        "huggingface": f"{env['HF_ENDPOINT']} (set by $HF_ENDPOINT)",
        "modelscope": "HF_ENDPOINT=https://hf-mirror.com",
    }
    for words in ("cannot be reached", advice[hub], mirror[hub], "a local directory"):
        assert words in error
    assert "Qwen/Qwen3-0.6B" in error and len(error) < 600


def test_model_that_a_hub_does_not_have_is_refused_without_advice_on_networks(hub, server, tmp_path):
    done = run(
        "single", 1, LAUNCH, "--hub", hub, "--model", "nobody/none", *QUESTION, **variables(tmp_path, server.url)
    )
    (error,) = done.our_errors
    assert done.returncode == 2 and "hub for nobody/none (" in error and "cannot be reached" not in error


def test_gated_model_asks_for_a_token(hub, server, tmp_path):
    server.gated.add("Qwen/Qwen3-0.6B")
    done = run("single", 1, LAUNCH, "--hub", hub, "--model", "qwen3", *QUESTION, **variables(tmp_path, server.url))
    (error,) = done.our_errors
    variable = {"huggingface": "$HF_TOKEN", "modelscope": "$MODELSCOPE_API_TOKEN"}[hub]
    assert done.returncode == 2 and f"if the model is private or gated, set {variable}" in error


def test_offline_mode_is_named(server, tmp_path):
    env = variables(tmp_path, server.url) | {"HF_HUB_OFFLINE": "1"}
    done = run("single", 1, LAUNCH, "--model", "qwen3", *QUESTION, **env)
    assert done.returncode == 2 and "$HF_HUB_OFFLINE is set: unset it" in done.text
    assert not server.requests


def test_missing_client_is_named_with_its_extra(server, tmp_path):
    blocked = tmp_path / "path" / "modelscope_hub"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('blocked')\n")
    env = variables(tmp_path, server.url) | {"PYTHONPATH": str(blocked.parent)}
    done = run("single", 1, LAUNCH, "--hub", "modelscope", "--model", "qwen3", *QUESTION, **env)
    (error,) = done.our_errors
    assert done.returncode == 2 and 'pip install "labinfer[modelscope]"' in error


def test_unknown_hubs_are_refused_by_name():
    for flags, env, said in (
        (("--hub", "github"), {}, "--hub"),
        (
            ("--model", "qwen3"),
            {"LABINFER_HUB": "github"},
            "LABINFER_HUB='github' is not a hub: set it to one of huggingface, modelscope",
        ),
    ):
        done = run("single", 1, LAUNCH, *flags, *QUESTION, **env)
        assert done.returncode == 2 and said in done.text, done.text


def test_draft_model_comes_from_the_chosen_hub(server, tmp_path):
    pytest.importorskip("modelscope_hub")
    server.models["Qwen/Qwen3-0.6B"] = DEMO.with_name("demo-draft")
    config = '{"method": "draft_model", "model": "qwen3", "num_speculative_tokens": 2}'
    flags = ("--hub", "modelscope", "--speculative-config", config, *QUESTION)
    done = run("single", 1, LAUNCH, *flags, **variables(tmp_path, server.url))
    assert done.returncode == 0 and done.stdout.startswith("42"), done.text
    assert downloads(server, "model.safetensors") == 1


def test_every_mapped_id_is_that_of_an_alias():
    assert set(MODELSCOPE_IDS) <= {model.id for model in ALIASES.values()}
