"""From a model's name to its directory, without a network."""

from __future__ import annotations

import errno
import inspect
import json
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from labinfer import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.weights.hubs import HUGGING_FACE, HuggingFaceHub
from labinfer.weights.resolve import BUNDLED, resolve_model


def test_bundled_model_is_the_default():
    assert EngineOptions().model.model == "demo"
    assert inspect.signature(LLM).parameters["model"].default == "demo"


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_names_mean_the_bundled_models_even_beside_a_directory_of_that_name(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    found = resolve_model(name, str(tmp_path), may_download=False)
    assert found.parts[-3:] == ("labinfer", "assets", name)
    assert json.loads((found / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert str(resolve_model(f"./{name}", "", may_download=False)) == name


def test_model_directory_variable_takes_names_and_aliases(tmp_path):
    for folder in ("mine", "Qwen2-0.5B-Instruct"):
        (tmp_path / folder).mkdir()
    assert resolve_model("mine", str(tmp_path), may_download=False) == tmp_path / "mine"
    assert resolve_model("qwen2", str(tmp_path), may_download=False) == tmp_path / "Qwen2-0.5B-Instruct"


def test_unknown_name_lists_what_was_tried_and_what_is_known(tmp_path):
    with pytest.raises(UserError, match=r"--model nonsense was not found; tried: directory nonsense.*demo, demo-draft"):
        resolve_model("nonsense", str(tmp_path), may_download=False)
    with pytest.raises(
        UserError, match=r"tried: file none\.gguf; file /.*none\.gguf; without a model at hand, leave --model out"
    ):
        resolve_model("none.gguf", str(tmp_path), may_download=False)


def test_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(UserError, match="is a file; give the directory"):
        resolve_model(str(path), "", may_download=False)


def test_gguf_file_is_a_model_by_its_path_and_by_its_name(tmp_path):
    for name in ("own.gguf", "split-00001-of-00002.gguf", "split-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"")
    for name in ("own.gguf", "split-00001-of-00002.gguf"):
        path = tmp_path / name
        assert resolve_model(str(path), "", may_download=False) == path
        assert resolve_model(name, str(tmp_path), may_download=False) == path
    with pytest.raises(UserError, match="give the first, split-00001-of-00002.gguf"):
        resolve_model(str(tmp_path / "split-00002-of-00002.gguf"), "", may_download=False)


def test_unknown_hub_is_refused_by_the_name_of_its_variable():
    with pytest.raises(UserError, match="LABINFER_HUB='hub' is not a hub: set it to one of huggingface, modelscope"):
        resolve_model("qwen3", "", may_download=False, hub="hub")


def test_hub_that_fails_without_a_word_is_named_by_its_error(monkeypatch):
    def fail(*args, **options):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(
        UserError,
        match=r"tried: .*cache of the Hugging Face hub for Qwen/Qwen3-0\.6B; Hugging Face hub for Qwen/Qwen3-0\.6B \(ConnectionError\)",
    ):
        resolve_model("qwen3", "", may_download=True)


def test_aliases_say_how_much_they_download(tmp_path):
    with pytest.raises(UserError, match=r"qwen2\.5 \(1\.0 GB\), .*llama3 \(16\.1 GB\).*tools/random_checkpoint\.py$"):
        resolve_model("nonsense", str(tmp_path), may_download=False)


@pytest.mark.parametrize(("name", "told"), [("qwen3-4b", "Qwen/Qwen3-4B (8.0 GB)"), ("some/model", "some/model")])
def test_download_is_announced(name, told, tmp_path, monkeypatch, capsys):
    """Before it begins, with the size if it is known."""
    said = []

    def snapshot(repository: str, local_files_only: bool, **options) -> str:
        if local_files_only:
            raise OSError("not in the cache")
        said.append(capsys.readouterr().err)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert resolve_model(name, "", may_download=True) == tmp_path
    assert said == [f"labinfer: {told} is not in the cache; asking the Hugging Face hub for it\n"]


class HttpError(Exception):
    """As HTTP libraries raise it."""

    def __init__(self, status: int):
        super().__init__(f"{status} Client Error")
        self.response = SimpleNamespace(status_code=status)


def caused_by(cause: BaseException) -> Exception:
    """An error of a client that names no reason itself."""
    error = RuntimeError("the download failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            HttpError(401),
            r"check the spelling of the id; if the model is private or gated, set \$HF_TOKEN to a valid token",
        ),
        (HttpError(403), r"if the model is private or gated, set \$HF_TOKEN to a token that may read it"),
        (OSError(errno.ENOSPC, "No space left on device"), r"the disk of the download cache is full: .* set \$HF_HOME"),
        (caused_by(OSError(errno.EDQUOT, "Disk quota exceeded")), "the disk of the download cache is full"),
        (RuntimeError("IO error: No space left on device (os error 28)"), "the disk of the download cache is full"),
        (HttpError(500), "if the Hugging Face hub cannot be reached"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_failed_download_says_what_to_do(error, advice, monkeypatch):
    def snapshot(repository: str, local_files_only: bool, **options) -> str:
        raise FileNotFoundError("not in the cache") if local_files_only else error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=advice) as caught:
        resolve_model("some/model", "", may_download=True)
    assert ("disk" in str(caught.value)) == ("disk" in advice) and ("reached" in str(caught.value)) == (
        "reached" in advice
    )


@pytest.mark.parametrize("may_download", [False, True])
def test_offline_client_is_not_asked_to_download(may_download, monkeypatch):
    calls = []

    def snapshot(repository: str, local_files_only: bool, **options) -> str:
        calls.append(local_files_only)
        raise FileNotFoundError("not in the cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"cache of the Hugging Face hub for some/model; \$HF_HUB_OFFLINE is set: unset it"
    ):
        resolve_model("some/model", "", may_download=may_download)
    assert calls == [True]


def test_hub_that_cannot_be_reached_is_a_mirror_if_one_is_set(monkeypatch):
    hub, error = HuggingFaceHub(), OSError("no route")
    monkeypatch.setattr(constants, "ENDPOINT", HUGGING_FACE)
    assert "the Hugging Face hub cannot be reached from here, set HF_ENDPOINT=https://hf-mirror.com" in hub.advice(
        error
    )
    monkeypatch.setattr(constants, "ENDPOINT", "https://hf-mirror.com")
    assert "https://hf-mirror.com (set by $HF_ENDPOINT) cannot be reached from here, set another mirror" in hub.advice(
        error
    )
