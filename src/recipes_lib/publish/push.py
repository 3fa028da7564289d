"""One push: files become one commit of a repository, whatever the Hub's failures in between."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from recipes_lib.publish.access import Target
from recipes_lib.publish.hub_session import persist, read_status

WEIGHT_FILES: Final = ("*.safetensors", "*.safetensors.index.json")


class DamagedError(Exception):
    """A file is not what was sealed: it must not be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What shall become one commit.

    Attributes:
        name: What it is, such as ``checkpoint-100`` or ``model``.
        files: Each file by its path in the repository.
        sealed: SHA-256 in hexadecimal that files must have, by their path in the repository; others are not held.
        folder: Folder in the repository that holds nothing else afterwards; empty for none. At the top only weights
            that are not of this push go.
        tag: Name that the commit gets; an older commit loses it.
    """

    name: str
    files: Mapping[str, Path]
    sealed: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    tag: str | None = None


class Publisher:
    """Makes pushes to one repository, one at a time."""

    def __init__(self, target: Target, say: Callable[[str], None]) -> None:
        """Send nothing yet.

        Args:
            target: Repository that this account may write to.
            say: Told of every failure.
        """
        self._api = HfApi()
        self._target = target
        self._say = say

    def publish(self, push: Push, may_wait: Callable[[float], bool]) -> str:
        """Return the commit that holds a push.

        Made again, it is found to be there: files that the branch already has are not committed, so that an answer
        that was lost on its way does not lead to a second commit.

        Args:
            push: Files that stay as they are.
            may_wait: As of ``persist``.

        Raises:
            DamagedError: A file is not as it was sealed.
            GivenUpError: The Hub could not take it, and there shall be no other attempt.
            HfHubHTTPError: The Hub refuses it.
        """
        hashes = {path: _hash(file, push.sealed.get(path)) for path, file in push.files.items()}
        say = self._say
        return persist(lambda: self._attempt(push, hashes), may_wait, lambda line: say(f"{push.name}: {line}"))

    def find_present(self, names: Mapping[str, str], current: str, may_wait: Callable[[float], bool]) -> set[str]:
        """Return which of some commits the branch still has.

        Args:
            names: Commit of each push by name.
            current: Name of the push whose weights the branch must moreover hold today, whoever committed after it.
            may_wait: As of ``persist``.

        Raises:
            GivenUpError: As of ``publish``.
            HfHubHTTPError: The Hub refuses to tell.
        """
        return persist(lambda: self._find_present(names, current), may_wait, self._say)

    def _find_present(self, names: Mapping[str, str], current: str) -> set[str]:
        history = self._api.list_repo_commits(self._target.repository, revision=self._target.branch)
        commits = [commit.commit_id for commit in history]
        present = {name for name, commit in names.items() if commit in commits}
        if current in present and self._read_weights(names[current]) != self._read_weights(commits[0]):
            present.remove(current)
        return present

    def _read_weights(self, revision: str) -> dict[str, str]:
        """Return what git calls the content of each file of weights."""
        tree = self._api.list_repo_tree(self._target.repository, revision=revision)
        return {entry.path: entry.blob_id for entry in tree if isinstance(entry, RepoFile) and _is_weight(entry.path)}

    def _attempt(self, push: Push, hashes: Mapping[str, bytes]) -> str:
        # ``create_commit``, because ``upload_folder`` makes several commits of what takes it longer than five minutes,
        # and whoever loads the branch between them gets shards of two models. What an attempt before has sent is not
        # sent again: the Hub knows it by its hash.
        commit = self._api.create_commit(
            self._target.repository,
            [*self._list_deletions(push), *_list_additions(push, hashes)],
            commit_message=f"Publish {push.name}",
            revision=self._target.branch,
        )
        if push.tag is not None:
            self._tag(push.tag, commit.oid)
        return str(commit.oid)

    def _list_deletions(self, push: Push) -> Iterator[CommitOperationDelete]:
        for path in self._api.list_repo_files(self._target.repository, revision=self._target.branch):
            is_stale = path.startswith(f"{push.folder}/") if push.folder else False
            if (is_stale or _is_weight(path)) and path not in push.files:
                yield CommitOperationDelete(path, is_folder=False)

    def _tag(self, tag: str, commit: str) -> None:
        repository = self._target.repository
        try:
            self._api.create_tag(repository, tag=tag, revision=commit)
        except HfHubHTTPError as error:
            if read_status(error) != 409:
                raise
            self._api.delete_tag(repository, tag=tag)
            self._api.create_tag(repository, tag=tag, revision=commit)


def _is_weight(path: str) -> bool:
    return "/" not in path and any(fnmatch.fnmatch(path, pattern) for pattern in WEIGHT_FILES)


def _list_additions(push: Push, hashes: Mapping[str, bytes]) -> Iterator[CommitOperationAdd]:
    """Yield operations that know the hashes of their files, which upstream would read for them at each attempt."""
    for path, file in push.files.items():
        operation = CommitOperationAdd(path, file)
        operation.upload_info.sha256 = hashes[path]
        yield operation


def _hash(file: Path, sealed: str | None) -> bytes:
    found = CommitOperationAdd(file.name, file).upload_info.sha256
    if sealed is not None and found.hex() != sealed:
        raise DamagedError(f"{file.name} holds other bytes than were written")
    return found
