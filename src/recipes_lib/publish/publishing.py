"""``recipes publish``, and publishing while training from a side process."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from recipes_lib import processes
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.values import BOOLEANS
from recipes_lib.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_USER, ConfigError, Problem
from recipes_lib.files import try_lock
from recipes_lib.models.model_files import is_model
from recipes_lib.publish.access import DEFAULT_BRANCH, Target, open_target
from recipes_lib.publish.hub_session import RequestCount, describe
from recipes_lib.publish.journal import Journal, read_journal
from recipes_lib.publish.publication import SECONDS_BETWEEN_LOOKS, Publication, RunSummary, is_refusal
from recipes_lib.publish.push import Publisher
from recipes_lib.publish.snapshots import MODEL, Contents
from recipes_lib.report.run_files import read_run
from recipes_lib.training.checkpoints.manifest import COMPLETE, is_complete, list_checkpoints, read_complete

LOG: Final = "_published.log"
_LOCK: Final = "_published.lock"
_FINISH: Final = "finish"
_STATES: Final = {"checkpoint": "last-checkpoint", "all_checkpoints": "{name}"}
"""Where whole checkpoints go in the repository, by ``hub_strategy``; no other asks for them."""
_NICENESS: Final = 5


def publishing(train: Callable[[RecipeConfig], None]) -> Callable[[RecipeConfig], None]:
    """Have a recipe publish what it trains, where ``push_to_hub`` asks for it.

    That it may is proved before anything else; that the Hub fails later never fails the run.

    Args:
        train: Trains by a configuration; every process calls it, and the main one publishes.

    Raises:
        ConfigError: It may not (``open_target``).
    """

    @functools.wraps(train)
    def train_and_publish(config: RecipeConfig) -> None:
        if not config.training.get("push_to_hub") or processes.read_rank() != 0:
            train(config)
            return
        target = open_target(config.training)
        _tell(str(target))
        companion = PublisherProcess(Path(config.training["output_dir"]), target)
        try:
            if config.training["hub_strategy"] != "end":
                companion.start()
            train(config)
            companion.finish()
        finally:
            companion.stop()

    return train_and_publish


class PublisherProcess:
    """The process beside a run that publishes it; it ends when this one does, whatever the reason."""

    def __init__(self, output_dir: Path, target: Target) -> None:
        """Start nothing yet."""
        self._output_dir = output_dir
        self._target = target
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Let it publish what the run in the directory will leave."""
        self._output_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", __name__, str(self._output_dir)]
        command += [self._target.repository, self._target.branch, str(_read_time(self._output_dir))]
        with (self._output_dir / LOG).open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)

    def finish(self) -> None:
        """Wait until all is published that the run has left, or given up; say which."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        again = f"`recipes publish {self._output_dir}` goes on"
        _tell(f"publishing to {self._target.repository}; interrupted, {again}")
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{_FINISH}\n")
            self._process.stdin.close()
        code = self._process.wait()
        journal = read_journal(self._output_dir, self._target)
        if code == EXIT_DONE:
            _tell(describe_counts(journal))
        else:
            _tell(f"not all is published ({journal.error or f'see {self._output_dir / LOG}'}); {again}")

    def stop(self) -> None:
        """End it; what it has not done is done by the next one."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def main(argv: Sequence[str]) -> None:
    """Publish the finished model of a run, a merged model, or checkpoints, as far as that is not done.

    Raises:
        ConfigError: There is nothing to publish, this account may not, another process does it, or the Hub refuses or
            could not take it for too long.
        DataError: The model is not whole, or what would be published holds a secret.
    """
    options = _parse(argv)
    folder: Path = options.folder
    keys = _read_keys(folder) | {name: value for name, value in vars(options).items() if value is not None}
    found = find_contents(folder, keys)
    if not found:
        remedy = "let the run finish, or publish its checkpoints: `--hub_strategy every_save`"
        raise ConfigError(Problem(str(folder), "there is no finished model in it", remedy))
    target = open_target({**keys, "output_dir": str(folder)})
    sys.stdout.write(f"{target}\n")
    with _alone(folder):
        journal = read_journal(folder, target)
        is_over = threading.Event()
        is_over.set()
        publication = _build(folder, target, journal, keys | {"hub_always_push": True}, is_over)
        error = _publish(journal, publication.follow)
    sys.stdout.write(f"{describe_counts(journal)}\n")
    if error is not None:
        raise ConfigError(
            Problem(str(folder), f"not all is published: {describe(error)}", "run the same command again")
        )


def follow(folder: Path, target: Target, before: int, orders: IO[str]) -> int:
    """Publish what the run in a folder leaves, until the process that has started this one says that it is over.

    Args:
        folder: Output directory.
        target: That this account may write to.
        before: When ``run.json`` was written last before the run began: until the run has taken the directory over,
            what it holds may be another run's.
        orders: Ends without a word when that process is gone; then this one ends at once.

    Returns:
        Exit code.
    """
    is_finishing = threading.Event()
    threading.Thread(target=_obey, args=(orders, is_finishing), daemon=True).start()
    os.nice(_NICENESS)
    while _read_time(folder) == before and not is_finishing.wait(SECONDS_BETWEEN_LOOKS):
        pass
    with _alone(folder):
        journal = read_journal(folder, target)
        publication = _build(folder, target, journal, _read_keys(folder), is_finishing)
        error = _publish(journal, publication.follow)
    return EXIT_DONE if error is None else EXIT_USER


def find_contents(folder: Path, keys: Mapping[str, Any]) -> dict[str, Contents]:
    """Return what could be published of a folder now, by name: checkpoints by step, then the finished model.

    Args:
        folder: Output directory of a run, or any model.
        keys: Configuration of the run; ``hub_strategy`` says what is published of it, and ``tag`` names the model.
    """
    strategy, found = keys.get("hub_strategy", "end"), {}
    for step, path in reversed(list_checkpoints(folder)) if strategy != "end" else ():
        record = read_complete(path)
        if record is not None and is_complete(path) and is_model(path):
            sealed = {name: file["sha256"] for name, file in record["files"].items()}
            state = _STATES.get(strategy, "").format(name=path.name)
            whole = (*sealed, COMPLETE) if state else ()
            found[path.name] = Contents(source=path, sealed=sealed, state=state, state_files=whole, tag=f"step-{step}")
    if _read_record(folder).get("status", "done") == "done" and is_model(folder):
        found[MODEL] = Contents(source=folder, sealed={}, tag=keys.get("tag"))
    return found


def describe_counts(journal: Journal) -> str:
    """Return in one line what was published, and what became of the requests."""
    counts = journal.counts
    link = f"https://huggingface.co/{journal.repository}"
    branch = "" if journal.branch == DEFAULT_BRANCH else f"/tree/{journal.branch}"
    return (
        f"published at {link}{branch}: {counts.get('num_pushed', 0)} commits; "
        f"{counts.get('num_requests', 0)} requests, {counts.get('num_failed_requests', 0)} failed and made again, "
        f"{counts.get('num_lost', 0)} pushes lost"
    )


def _build(
    folder: Path, target: Target, journal: Journal, keys: Mapping[str, Any], is_finishing: threading.Event
) -> Publication:
    return Publication(
        folder,
        Publisher(target, _print),
        journal,
        lambda: find_contents(folder, keys),
        lambda name: _inspect(folder, name),
        pushes_all=bool(keys.get("hub_always_push")),
        is_finishing=is_finishing,
        say=_print,
    )


def _publish(journal: Journal, publish: Callable[[], object]) -> BaseException | None:
    """Publish, count, and return what has ended it before all was done.

    Raises:
        Exception: It was not the Hub.
    """
    requests, error = RequestCount(), None
    requests.install()
    disable_progress_bars()
    try:
        publish()
    except Exception as raised:
        error = raised
        if not is_refusal(raised):
            raise
    finally:
        journal.add(num_requests=requests.num_sent, num_failed_requests=requests.num_failed)
        journal.add(num_lost=int(error is not None))
        journal.error = "" if error is None else describe(error)
        journal.write()
    return error


def _inspect(folder: Path, name: str) -> RunSummary:
    """Return the record of a run and its last evaluation, that before a checkpoint."""
    record = _read_record(folder)
    if not record:
        return {}, {}
    last = float("inf") if name == MODEL else int(name.rpartition("-")[2])
    evaluations = [event for event in read_run(folder).evaluations if event["step"] <= last]
    figures = {key: value for key, value in (evaluations or [{}])[-1].items() if key.startswith("eval_")}
    return record, figures


def _read_record(folder: Path) -> Mapping[str, Any]:
    """What ``run.json`` says of a run; nothing of a folder that no run has made."""
    return read_run(folder).facts if (folder / "run.json").is_file() else {}


def _read_keys(folder: Path) -> dict[str, Any]:
    return dict(_read_record(folder).get("config", {}))


def _read_time(folder: Path) -> int:
    """When ``run.json`` was written last, in nanoseconds; 0 before it is there."""
    file = folder / "run.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def _obey(orders: IO[str], is_finishing: threading.Event) -> None:
    for order in orders:
        if order.strip() == _FINISH:
            is_finishing.set()
            return
    os._exit(EXIT_PREEMPTED)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let no other process publish this folder meanwhile; without locks on the file system any may.

    Raises:
        ConfigError: One does already.
    """
    with (folder / _LOCK).open("a", encoding="utf-8") as file:
        if try_lock(file, of_process=True) is False:
            raise ConfigError(Problem(str(folder), "another process publishes it", "wait until it has ended"))
        yield


def _print(line: str) -> None:
    sys.stdout.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line}\n")
    sys.stdout.flush()


def _tell(line: str) -> None:
    """Tell something beside the progress of a run."""
    sys.stderr.write(f"{line}\n")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes publish", description=__doc__)
    parser.add_argument("folder", type=Path, help="output directory of a run, or the folder of a merged model")
    parser.add_argument("--hub_model_id", metavar="ID", help="repository (default: the run's, or the folder's name)")
    parser.add_argument("--hub_private_repo", type=_read_flag, metavar="true|false", help="(default: true)")
    parser.add_argument("--hub_revision", metavar="BRANCH", help="branch to commit to (default: main)")
    strategies = ("end", "every_save", *_STATES)
    parser.add_argument("--hub_strategy", choices=strategies, help="which checkpoints go with it (default: the run's)")
    parser.add_argument("--tag", help="name of the commit of the finished model, such as v1.0")
    return parser.parse_args(argv)


def _read_flag(text: str) -> bool:
    """Return a flag as a recipe writes it.

    Raises:
        ArgumentTypeError: It is neither true nor false.
    """
    if text.lower() not in BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither true nor false")
    return BOOLEANS[text.lower()]


if __name__ == "__main__":
    place, repository, branch, before = sys.argv[1:]
    sys.exit(follow(Path(place), Target(repository, branch, is_private=True, exists=True), int(before), sys.stdin))
