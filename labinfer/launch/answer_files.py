"""AnswerFiles: the files that determine a model's output, identified before they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from labinfer.base.config import EngineOptions
from labinfer.base.errors import FilesChanged, UserError
from labinfer.base.speculative_options import FLAG
from labinfer.comm.group.rank_group import RankGroup
from labinfer.launch.layout.layout import Layout
from labinfer.weights.identity import (
    Identity,
    changed_path,
    identify,
    merge,
    model_files,
    setting_files,
    stamp,
    template_files,
)
from labinfer.weights.resolve import resolve_model


@dataclass(frozen=True)
class AnswerFiles:
    """Files that this rank reads, and the paths and digests (``Identity``) of the files that any rank reads."""

    find: Callable[[], dict[str, Path]]
    """Returns the paths of the files that this rank reads, by label."""
    stamps: dict[str, str]
    """``identity.stamp`` (size, times and inode) of each file, by label, taken before the model was loaded."""
    identity: Identity
    """Path and digest of each file that any rank reads, by label."""

    def check_read(self, stamps: Mapping[str, str]) -> None:
        """Check files that were read before ``identify_answer_files``: their stamps must not have changed since.

        Args:
            stamps: ``stamp`` of each file, by label, taken before it was read; labels that this rank does not read are ignored.

        Raises:
            FilesChanged: a file was written to after ``stamps`` were taken.
        """
        for label in stamps.keys() & self.stamps.keys():
            if stamps[label] != self.stamps[label]:
                raise FilesChanged(f"{self.identity[label].path} was modified while it was read; restart")

    def check_loaded(self) -> None:
        """Check that no file changed since ``identify_answer_files``, so that the digests in ``identity`` are those of the loaded weights.

        Raises:
            FilesChanged: a file was written to, is new or is gone.
        """
        try:
            written = self._written()
        except UserError as error:
            raise FilesChanged(f"{error}; it was deleted during this start") from None
        if written:
            raise FilesChanged(f"{min(written.values())} was modified while the model was loaded; restart")

    def check_unchanged(self) -> None:
        """Check that the files have the contents that were loaded.

        Raises:
            UserError: a file has other contents, is new, or is gone.
        """
        if path := changed_path({label: self.identity[label] for label in self.stamps}, self.find()):
            raise UserError(f"{path} has changed since the model was loaded; restore the old files, or restart")

    def _written(self) -> dict[str, Path]:
        """Files that were written to, are new or are gone since they were identified, by label.

        Raises:
            UserError: a required file is gone.
        """
        paths = self.find()
        written = {label: path for label, path in paths.items() if stamp(path) != self.stamps.get(label)}
        gone = self.stamps.keys() - paths.keys()
        return written | {label: Path(self.identity[label].path) for label in gone}


def identify_answer_files(group: RankGroup, options: EngineOptions, directory: Path, layout: Layout) -> AnswerFiles:
    """Identify the files that this rank is about to read, and check that all machines have the same checkpoint; collective.

    Among ranks of a machine that see equal files, only one reads the contents.

    Raises:
        CollectiveError: a file cannot be read, or differs between machines.
    """
    has_place, speculative = group.rank in layout.topology.placed_ranks, options.scheduler.speculative_config
    drafts = speculative is not None and bool(speculative.model) and group.rank == speculative.draft_rank

    def find_own() -> dict[str, Path]:
        own = _setting_files(options, directory) if group.rank == 0 else {}
        if drafts:
            own |= _draft_files(
                speculative.model, group.environment.model_dir, options.model.hub_or(group.environment.hub)
            )
        return own

    def find() -> dict[str, Path]:
        return find_own() | (model_files(directory) if has_place else {})

    stamps: dict[str, str] = {}
    shared: dict[str, str] = {}
    with group.raise_on_all_ranks():
        stamps = {label: stamp(path) for label, path in find().items()}
        shared = {label: stamps[label] for label in model_files(directory)} if has_place else {}
    seen = {
        rank: (group.everyone[rank].node, data)
        for rank, data in group.gather_bytes(msgspec.json.encode(sorted(shared.items()))).items()
    }
    reads = min(rank for rank in seen if seen[rank] == seen[group.rank]) == group.rank
    mine: Identity = {}
    with group.raise_on_all_ranks():
        whole = options.model.is_reproducible  # a changed bit of any weight changes the fingerprint
        mine = identify(find() if reads else find_own(), whole=whole)
    parts = {
        rank: msgspec.msgpack.decode(data, type=Identity)
        for rank, data in group.gather_bytes(msgspec.msgpack.encode(mine)).items()
    }
    first = min(layout.topology.placed_ranks)
    with group.raise_on_all_ranks():
        if shared and reads:
            _check_same(parts[first], mine, shared, group.everyone[first].node, group.everyone[group.rank].node)
    return AnswerFiles(find, stamps, merge(parts.values()))


def setting_stamps(directory: Path) -> dict[str, str]:
    """``identity.stamp`` of each file that a model's config may be read from, by label.

    Raises:
        UserError: ``directory`` does not exist.
    """
    return {label: stamp(path) for label, path in setting_files(directory).items()}


def _setting_files(options: EngineOptions, directory: Path) -> dict[str, Path]:
    """Tokenizer, template and other settings files of rank 0."""
    model = options.model
    files = setting_files(directory)
    if model.tokenizer:
        own = setting_files(Path(model.tokenizer))
        files |= {f"--tokenizer {label}": path for label, path in own.items()}
    return files | template_files(model.chat_template, model.response_template)


def _draft_files(name: str, model_dir: str, hub: str) -> dict[str, Path]:
    try:
        directory = resolve_model(name, model_dir, may_download=True, hub=hub)
    except UserError as error:
        raise UserError(f"the draft model of {FLAG}: {error}") from None
    return {f"draft model {label}": path for label, path in model_files(directory).items()}


def _check_same(theirs: Identity, mine: Identity, labels: dict[str, str], their_node: str, my_node: str) -> None:
    """Refuse checkpoint files whose contents differ between two machines.

    Raises:
        UserError: a file is missing on the other machine, or differs.
    """
    for label in labels:
        if label not in theirs:
            raise UserError(
                f"{mine[label].path} on {my_node} is not on {their_node}; put the same checkpoint on every node"
            )
        if theirs[label].digest != mine[label].digest:
            raise UserError(
                f"{mine[label].path} on {my_node} and {theirs[label].path} on {their_node} differ; put the same checkpoint on "
                "every node"
            )
