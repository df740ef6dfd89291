"""Files that ranks read: which ones, who reads their contents, and when they count as changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from labinfer import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import CollectiveError, FilesChanged, UserError
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.spmd.environment import detect
from labinfer.comm.spmd.machine import describe_rank
from labinfer.comm.spmd.threads import ThreadChoice
from labinfer.launch import answer_files, load_stage
from labinfer.launch.answer_files import AnswerFiles, identify_answer_files, setting_stamps
from labinfer.weights.resolve import resolve_model


@pytest.fixture
def directory(tmp_path) -> Path:
    return Path(shutil.copytree(resolve_model("demo", "", may_download=False), tmp_path / "model"))


def identify(directories: list[Path], nodes: list[str], placed: tuple[int, ...] = (), **options) -> list[AnswerFiles]:
    """What each rank gets, each with a directory and a machine of its own."""

    def work(comm: LocalCommunicator) -> AnswerFiles:
        group = RankGroup(
            environment=detect({}),
            comm=comm,
            ranks=tuple(range(comm.size)),
            progress=comm.progress,
            health_channel=None,
            everyone=[describe_rank(rank, rank, node) for rank, node in enumerate(nodes)],
            threads=ThreadChoice(1, "test"),
        )
        layout = SimpleNamespace(topology=SimpleNamespace(placed_ranks=placed or group.ranks))
        return identify_answer_files(group, EngineOptions.from_flat(options), directories[comm.rank], layout)

    return LocalCommunicator.run(len(nodes), work)


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\n")


def test_ranks_of_a_machine_have_one_reader_unless_they_see_other_files(directory, tmp_path, monkeypatch):
    read: list[str] = []
    digest = answer_files.identify
    monkeypatch.setattr(
        answer_files, "identify", lambda paths, whole: read.extend(map(str, paths.values())) or digest(paths)
    )
    one, *others = identify([directory] * 3, ["a", "a", "b"])
    weights = str(directory / "model.safetensors")
    assert read.count(weights) == 2 and read.count(str(directory / "tokenizer.json")) == 1
    assert all(files.identity == one.identity for files in others)
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    assert (
        identify([directory, other], ["a", "a"])[0].identity["model.safetensors"].stamps
        != one.identity["model.safetensors"].stamps
    )
    change(other / "model.safetensors")
    for nodes in (["a", "a"], ["a", "b"]):
        message = f"rank 1 on {nodes[1]}: {other}/model.safetensors on {nodes[1]} and {weights} on a differ"
        with pytest.raises(CollectiveError) as caught:
            identify([directory, other], nodes)
        assert str(caught.value).startswith(message)


def test_spare_ranks_need_no_weights_and_only_rank_0_other_files(directory, tmp_path):
    bare = Path(shutil.copytree(directory, tmp_path / "bare"))
    for name in ("tokenizer.json", "generation_config.json"):
        (bare / name).unlink()
    both = identify([directory, bare], ["a", "b"])
    assert both[1].stamps.keys() == {"config.json", "model.safetensors"}
    (bare / "model.safetensors").unlink()
    assert identify([directory, bare], ["a", "b"], placed=(0,))[1].stamps == {}


def test_all_files_that_options_name_are_among_them(directory, tmp_path):
    own = Path(shutil.copytree(directory, tmp_path / "own"))
    (template := tmp_path / "template.jinja").write_text("{{ messages }}")
    (files,) = identify(
        [directory],
        ["a"],
        tokenizer=str(own),
        chat_template=str(template),
        speculative_config={"method": "draft_model", "model": "demo-draft"},
    )
    wanted = {"model.safetensors", "config.json", "tokenizer.json", "--tokenizer tokenizer.json", "--chat-template"}
    assert wanted | {"draft model model.safetensors", "draft model config.json"} <= files.identity.keys()
    for path in (own / "tokenizer.json", template):
        change(path)
        with pytest.raises(UserError, match=f"^{path} has changed since the model was loaded"):
            files.check_unchanged()
        (files,) = identify([directory], ["a"], tokenizer=str(own), chat_template=str(template))


def test_config_that_is_replaced_before_it_is_identified_ends_the_start(directory):
    before = setting_stamps(directory)
    (files,) = identify([directory], ["a"])
    files.check_read(before)
    files.check_read({"config.json": before["config.json"], "of another rank": "1"})
    os.utime(directory / "config.json")
    (files,) = identify([directory], ["a"])
    with pytest.raises(FilesChanged, match="config.json was modified while it was read"):
        files.check_read(before)


def test_start_whose_weights_are_replaced_while_they_are_loaded_ends(directory, monkeypatch):
    load = load_stage.load_weights

    def load_and_replace(*args, **kwargs):
        load(*args, **kwargs)
        change(directory / "model.safetensors")

    monkeypatch.setattr(load_stage, "load_weights", load_and_replace)
    with pytest.raises(FilesChanged, match="model.safetensors was modified while the model was loaded"):
        LLM(str(directory), weight_cache_size=0, autotune="off")


def test_files_that_are_touched_replaced_added_or_removed(directory):
    (files,) = identify([directory], ["a"])
    files.check_loaded()
    os.utime(directory / "model.safetensors")
    files.check_unchanged()
    with pytest.raises(FilesChanged, match="model.safetensors was modified while the model was loaded"):
        files.check_loaded()
    (files,) = identify([directory], ["a"])
    content = (directory / "model.safetensors").read_bytes()
    change(directory / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model.safetensors has changed since the model was loaded; restore the old files"
    ):
        files.check_unchanged()
    (directory / "model.safetensors").write_bytes(content)
    files.check_unchanged()
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match="chat_template.jinja has changed"):
        files.check_unchanged()
    (directory / "chat_template.jinja").unlink()
    (directory / "generation_config.json").unlink()
    with pytest.raises(UserError, match="generation_config.json has changed"):
        files.check_unchanged()
    (directory / "model.safetensors").unlink()
    with pytest.raises(FilesChanged, match="it was deleted during this start"):
        files.check_loaded()
