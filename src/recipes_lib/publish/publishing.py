"""``recipes publish``, and publishing while training: a background thread commits checkpoints and the final model."""

from __future__ import annotations

import fnmatch
import functools
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
from huggingface_hub.utils.sha import git_hash

from recipes_lib import processes
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.environment import limit_silence
from recipes_lib.errors import ConfigError, DataError, Problem, UserError
from recipes_lib.files import try_lock
from recipes_lib.models.model_files import MODEL_FILES, TEMPLATES
from recipes_lib.publish.access import DEFAULT_BRANCH, Target, describe, is_transient, open_target, read_status, retry
from recipes_lib.publish.card import CHART
from recipes_lib.publish.selection import MODEL, RECORDS, Contents, Files, collect_files, find_contents, read_facts
from recipes_lib.quantities import pluralize

SILENCE_SECONDS: Final = 120.0
"""Read timeout of requests during a push."""
WAIT_SECONDS: Final = 3600.0
"""Maximum wait for the last uploads at the end of a run."""
PAUSE_SECONDS: Final = 120.0
"""Pause between attempts during training after the Hub has failed."""
SECONDS_BETWEEN_LOOKS: Final = 0.5
"""Interval at which the background thread looks for new checkpoints."""
_LOCK: Final = "_published.lock"
_OF_ONE_MODEL: Final = ("*.safetensors*", *MODEL_FILES, f"{TEMPLATES}/*.jinja", *RECORDS[1:], CHART)
"""Patterns of files that are deleted with their model: transformers would load a merged model beside the
``adapter_config.json`` of its adapter as the base, and llama.cpp the ``tokenizer.model`` of an older one. Not the card,
which may be the user's."""


class DamagedError(Exception):
    """A file does not match the hash of its manifest, and must not be published."""


class StoppedError(Exception):
    """The run has ended early: this process makes no further commits."""


class Publication:
    """Commits the contents of a folder that are missing on the branch.

    Attributes:
        num_commits: Number of commits made.
        is_stopped: Set to True to prevent further commits.
    """

    def __init__(self, folder: Path, target: Target, keys: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Initialise without sending anything.

        Args:
            folder: Output directory of a run, or folder of a model.
            target: Repository with verified write access.
            keys: Configuration with ``hub_strategy`` and ``tag``; ``hub_always_push`` also publishes checkpoints that
                are no longer the newest.
            say: Logger for one line per event.
        """
        self.num_commits, self.is_stopped = 0, False
        self._api = HfApi()
        self._folder, self._target, self._keys, self._say = folder, target, keys, say
        self._is_done: dict[tuple[str, str], bool] = {}

    def publish_missing(self, *, with_model: bool = True) -> None:
        """Commit missing contents, the oldest first.

        Args:
            with_model: Whether to publish the final model too, once the run has ended.

        Raises:
            ConfigError: Another process publishes the folder.
            DataError: The model is damaged, or a file may not be published (``collect_files``).
            Exception: The Hub refuses, or has failed several times in a row.
        """
        with _locked(self._folder):
            while pending := self._find_pending(with_model=with_model):
                contents = pending[0]
                try:
                    commit = retry(functools.partial(self._publish, contents))
                except DamagedError as error:
                    self._say(f"{contents.name} is not published: {error}")
                except Exception as error:
                    self._skip_deleted(contents, error)
                else:
                    self.num_commits += 1
                    self._say(f"published {contents.name} as {commit[:12]}")
                self._is_done[_identify(contents)] = True

    def _skip_deleted(self, contents: Contents, error: Exception) -> None:
        """Report contents that were deleted while they were read; raise ``error`` if they are still there."""
        # The type of the error for a deleted file depends on what upstream was doing at the time.
        if contents.source.exists():
            raise error
        self._say(f"{contents.name} is not published: it was deleted in the meantime (save_total_limit)")

    def _find_pending(self, *, with_model: bool) -> list[Contents]:
        """Return the contents newer than the newest published ones: a branch never returns to an older checkpoint."""
        found = find_contents(self._folder, self._keys)
        pending: list[Contents] = []
        for contents in reversed(found.values()):
            if contents.name == MODEL and not with_model:
                continue
            key = _identify(contents)
            if key not in self._is_done:
                try:
                    self._is_done[key] = retry(functools.partial(self._is_published, contents))
                except Exception as error:
                    self._skip_deleted(contents, error)
                    continue
            # Iteration is newest first, so everything from here on is older than a published checkpoint.
            if self._is_done[key]:
                break
            pending.insert(0, contents)
        checkpoints = [contents for contents in pending if contents.name != MODEL]
        outdated = [] if self._keys.get("hub_always_push") else checkpoints[:-1]
        return [contents for contents in pending if contents not in outdated]

    def _is_published(self, contents: Contents) -> bool:
        """Return whether the Hub has every file, also with other records, which users may edit there."""
        files = collect_files(contents, self._folder)
        # Checkpoints are compared with their tag, since the branch has moved on; a model with the branch as well.
        revisions = [contents.tag, self._target.branch] if contents.name == MODEL else [contents.tag]
        for revision in filter(None, revisions):
            try:
                tree = self._list_files(revision)
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return False
            for path, file in files.items():
                is_editable = path in (*RECORDS, CHART)
                if path not in tree or not (is_editable or _is_same(tree[path], file, contents.find_hash(path, file))):
                    return False
            card = files.get("README.md")
            if revision == self._target.branch and card and not _is_same(tree["README.md"], card, None):
                self._say(
                    "the card on the Hub differs, and is kept: delete its README.md to publish the one of the run"
                )
        return True

    def _list_files(self, revision: str | None) -> dict[str, RepoFile]:
        tree = self._api.list_repo_tree(self._target.repository, revision=revision, recursive=True)
        return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def _publish(self, contents: Contents) -> str:
        """Commit the contents, and return the id of the commit.

        A repeated attempt after a lost response makes no second commit, because the Hub drops unchanged files.
        """
        if self.is_stopped:  # In a retry after the end of the run: the next process may already be publishing.
            raise StoppedError
        files = collect_files(contents, self._folder)
        additions = [CommitOperationAdd(path, file) for path, file in files.items()]
        for addition in additions:
            digest = contents.find_hash(addition.path_in_repo, files[addition.path_in_repo])
            if digest is not None and addition.upload_info.sha256.hex() != digest:
                raise DamagedError(f"{addition.path_in_repo} does not match its SHA-256")
        repository, branch = self._target.repository, self._target.branch
        # If another process commits meanwhile, the Hub refuses (412), and the attempt is repeated: a mixture of two
        # models would load as neither.
        parent = self._api.model_info(repository, revision=branch).sha
        # One at a time: for several files upstream starts a thread pool, which delays the exit of the interpreter.
        for addition in additions:
            self._api.preupload_lfs_files(repository, [addition], revision=branch)
        # ``create_commit`` instead of ``upload_folder``, which splits uploads of over five minutes into several
        # commits: a model loaded between two of them would have shards of two models.
        commit = self._api.create_commit(
            repository,
            [*self._list_deletions(contents, files, parent), *additions],
            commit_message=f"Publish {contents.name}",
            revision=branch,
            parent_commit=parent,
        )
        if contents.tag is not None:
            self._tag(contents.tag, commit.oid)
        return str(commit.oid)

    def _list_deletions(self, contents: Contents, files: Files, parent: str | None) -> Iterator[CommitOperationDelete]:
        for path in self._list_files(parent):
            # Deleted: files of an older checkpoint in the state folder, and of an older model at the top.
            is_state = bool(contents.state) and path.startswith(f"{contents.state}/")
            is_model = any(
                path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern) for pattern in _OF_ONE_MODEL
            )
            if (is_state or is_model) and path not in files:
                yield CommitOperationDelete(path, is_folder=False)

    def _tag(self, tag: str, commit: str) -> None:
        try:
            self._api.create_tag(self._target.repository, tag=tag, revision=commit)
        except HfHubHTTPError as error:
            if read_status(error) != 409:
                raise
            # The tag exists, from a run of the same name or an earlier attempt. The Hub cannot move tags.
            self._api.delete_tag(self._target.repository, tag=tag)
            self._api.create_tag(self._target.repository, tag=tag, revision=commit)


def _identify(contents: Contents) -> tuple[str, str]:
    """Return the identity of a checkpoint, to distinguish it from a later one of the same name."""
    return contents.name, str(sorted(contents.hashes.items()))


def _is_same(remote: RepoFile, file: Path | bytes, digest: str | None) -> bool:
    if remote.lfs is not None:
        if digest is None:
            digest = CommitOperationAdd(remote.path, file).upload_info.sha256.hex()
        return bool(remote.lfs.sha256 == digest)
    # Files outside of large-file storage have git's blob id.
    return bool(remote.blob_id == git_hash(file.read_bytes() if isinstance(file, Path) else file))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against publishing by other processes; no effect on read-only folders and without file locks.

    Raises:
        ConfigError: Another process has the lock.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # A folder may be read-only.
            file = stack.enter_context((folder / _LOCK).open("a", encoding="utf-8"))
            if try_lock(file, of_process=True) is False:
                raise ConfigError(Problem(str(folder), "another process publishes it", "wait until it has ended"))
        yield


@contextmanager
def publishing(config: RecipeConfig) -> Iterator[None]:
    """Publish checkpoints and model of the run in the block, if ``push_to_hub`` is set.

    Write access is verified before the block; later failures of the Hub never fail the run.

    Args:
        config: Configuration of the run; every process may call, only the main one publishes.

    Raises:
        ConfigError: The account may not write to the repository, or the Hub cannot be reached (``open_target``).
    """
    if not config.training.get("push_to_hub") or processes.read_rank() != 0:
        yield
        return
    target = open_target(config.training)
    _log(str(target))
    publisher = BackgroundPublisher(Path(config.training["output_dir"]), target, config.training)
    try:
        if config.training["hub_strategy"] != "end":
            publisher.start()
        yield
        publisher.finish()
    finally:
        publisher.stop()


class BackgroundPublisher:
    """Publishes a run in a daemon thread, so that neither training nor process exit waits for a stalled Hub."""

    def __init__(self, folder: Path, target: Target, keys: Mapping[str, Any]) -> None:
        """Initialise without starting the thread; arguments as for ``Publication``."""
        self._folder, self._target = folder, target
        self._publication = Publication(folder, target, keys, _log)
        self._error: Exception | None = None
        self._is_over = threading.Event()
        # Until this run writes its record, the folder may hold another run's checkpoints.
        self._before = _read_time(folder)
        # Not ``HfApi.run_as_future``: the interpreter joins executor threads at exit.
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)

    def start(self) -> None:
        """Publish checkpoints as the run saves them."""
        limit_silence(SILENCE_SECONDS)
        disable_progress_bars()
        self._thread.start()

    def finish(self) -> None:
        """Wait up to ``WAIT_SECONDS`` until everything is published, and log the result."""
        remedy = f"`recipes publish {shlex.quote(str(self._folder))}` publishes the rest"
        _log(f"publishing to {self._target.repository}; if interrupted, {remedy}")
        self._is_over.set()
        # With `hub_strategy: end` the thread is not started before.
        if not self._thread.ident:
            self.start()
        self._thread.join(WAIT_SECONDS)
        if self._thread.is_alive():
            _log(f"not everything is published (the upload has taken more than {WAIT_SECONDS:.0f} s); {remedy}")
        elif self._error is not None:
            _log(f"not everything is published ({describe(self._error)}); {remedy}")
        else:
            _log(describe_commits(self._target, self._publication.num_commits))

    def stop(self) -> None:
        """Start no further push; a running one is not interrupted, and ends with the process."""
        self._publication.is_stopped = True
        self._is_over.set()

    def _run(self) -> None:
        pause = SECONDS_BETWEEN_LOOKS
        while True:
            # Read before publishing, so that a last iteration follows the end of the run.
            is_over = self._is_over.wait(pause)
            if self._publication.is_stopped:
                return
            try:
                if is_over or _read_time(self._folder) != self._before:
                    self._publication.publish_missing(with_model=is_over)
                pause, self._error = SECONDS_BETWEEN_LOOKS, None
            except StoppedError:
                return
            except DataError as error:
                # Not retried, unlike a lock of another process: the next attempt would find the same damage or secret.
                _log(str(error))
                self._error = error
                return
            except Exception as error:
                if self._error is None or describe(error) != describe(self._error):
                    _log(f"publishing failed, and is retried: {describe(error)}")
                pause, self._error = PAUSE_SECONDS, error
            if is_over:
                return


def main(argv: Sequence[str]) -> None:
    """Publish the finished model of a run, a merged model, or checkpoints, if they are not yet published.

    Raises:
        ConfigError: There is nothing to publish, the account has no write access, another process publishes the
            folder, or the Hub refuses or fails several times in a row.
        DataError: The model is damaged, or a file to publish contains a secret.
    """
    options = CommandParser("publish").parse_args(argv)
    folder: Path = options.folder
    keys = dict(read_facts(folder).get("config", {}))
    keys |= {name: value for name, value in vars(options).items() if value is not None}
    if not find_contents(folder, keys):
        found = "there is no finished model in it" if folder.is_dir() else "is not a folder"
        remedy = "give the output_dir of a finished run, or publish its checkpoints: `--hub_strategy every_save`"
        raise ConfigError(Problem(str(folder), found, remedy))
    target = open_target({**keys, "output_dir": str(folder)})
    _print(str(target))
    limit_silence(SILENCE_SECONDS)
    disable_progress_bars()
    publication = Publication(folder, target, keys | {"hub_always_push": True}, _print)
    try:
        publication.publish_missing()
    except Exception as error:
        # huggingface_hub raises `ValueError` if the Hub rejects single large files, for example at a storage quota.
        is_rejected = read_status(error) is not None or (isinstance(error, ValueError) and "LFS" in str(error))
        if isinstance(error, UserError) or not (is_transient(error) or is_rejected):
            raise
        found = f"not everything is published: {describe(error)}"
        remedy = "run the same command again" if is_transient(error) else "correct that, and run the same command again"
        raise ConfigError(Problem(str(folder), found, remedy)) from error
    _print(describe_commits(target, publication.num_commits))


def describe_commits(target: Target, num_commits: int) -> str:
    """Return a line with the URL of the model and the number of commits."""
    branch = "" if target.branch == DEFAULT_BRANCH else f"/tree/{target.branch}"
    return f"published at {constants.ENDPOINT}/{target.repository}{branch}: {pluralize(num_commits, 'commit')}"


def _read_time(folder: Path) -> int:
    """Return the modification time of ``run.json`` in nanoseconds; 0 if it does not exist."""
    file = folder / "run.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _log(line: str) -> None:
    with suppress(OSError):  # The pipe or terminal of stderr may be gone.
        sys.stderr.write(f"{line}\n")
