"""Publishing of a run: snapshots, pushed in order and recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from huggingface_hub.errors import HfHubHTTPError

from recipes_lib.errors import DataError
from recipes_lib.publish.hub_session import GivenUpError
from recipes_lib.publish.journal import Journal
from recipes_lib.publish.push import DamagedError, Publisher
from recipes_lib.publish.snapshots import (
    MODEL,
    SNAPSHOTS,
    Contents,
    drop_snapshots,
    fingerprint,
    list_snapshots,
    read_fingerprint,
    read_push,
    take_snapshot,
)

SECONDS_BETWEEN_LOOKS: Final = 0.5
PATIENCE_SECONDS: Final = 1800.0
"""For so long a push is tried again when the run is over, before it is left to a later `recipes publish`."""


RunSummary = tuple[Mapping[str, Any], Mapping[str, float]]
"""Record of a run, what ``run.json`` holds or empty, and its last evaluation by name."""


class Publication:
    """A run on its way to the Hub; one process at a time."""

    def __init__(
        self,
        output_dir: Path,
        publisher: Publisher,
        journal: Journal,
        find_contents: Callable[[], Mapping[str, Contents]],
        tell: Callable[[str], RunSummary],
        *,
        pushes_all: bool,
        is_finishing: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        """Do nothing yet.

        Args:
            output_dir: Of the run.
            publisher: Of the repository.
            journal: What is published already.
            find_contents: What could be published now, by name: checkpoints ``checkpoint-N`` by step, and last,
                where the run has finished, the ``MODEL``.
            tell: What there is to tell of one of them.
            pushes_all: Whether a checkpoint is pushed even when there is a newer one.
            is_finishing: Set when the run will leave nothing more.
            say: Tells what happens, a line each.
        """
        self._is_finishing = is_finishing
        self._place = output_dir / SNAPSHOTS
        self._publisher = publisher
        self._journal = journal
        self._find_contents = find_contents
        self._tell = tell
        self._pushes_all = pushes_all
        self._say = say
        self._damaged: set[str] = set()

    def look(self) -> None:
        """Keep what could be published and is neither published nor kept yet.

        Raises:
            DataError: It must not be published (``take_snapshot``).
        """
        found = self._find_contents()
        checkpoints = [name for name in found if name != MODEL and self._is_newer(name, is_over=MODEL in found)]
        for name in [*(checkpoints if self._pushes_all else checkpoints[-1:]), *([MODEL] if MODEL in found else [])]:
            contents = found[name]
            try:
                now = fingerprint(contents)
                known = {self._journal.read_fingerprint(name), read_fingerprint(self._place, name), *self._damaged}
                if now not in known:
                    take_snapshot(self._place, name, contents, *self._tell(name))
            except FileNotFoundError:  # Training has deleted it meanwhile.
                continue

    def push_all(self) -> None:
        """Push what is kept, the oldest first; as long as the run goes on, until the Hub takes it.

        Raises:
            GivenUpError: The Hub could not take something for too long after the run had ended; it is kept.
            HfHubHTTPError: The Hub refuses.
        """
        while names := self._choose():
            name = names[0]
            what = read_fingerprint(self._place, name)
            try:
                commit = self._publisher.publish(read_push(self._place, name), partial(self._may_wait, name))
            except GivenUpError:
                if name in self._choose():
                    raise
                continue  # There is a newer one.
            except DamagedError as error:
                self._say(f"{name} is not published: {error}")
                self._journal.add(num_damaged=1)
                self._damaged.add(what)
            else:
                self._journal.add(num_pushed=1)
                self._journal.commits[name] = {"commit": commit, "fingerprint": what}
                self._say(f"published {name} as {commit[:12]}")
            self._journal.write()
            drop_snapshots(self._place, [name])

    def recall(self) -> None:
        """Forget what is remembered as published and is not there: with its branch deleted, or pushed over.

        Raises:
            GivenUpError: The Hub could not tell for too long after the run had ended.
            HfHubHTTPError: The Hub refuses to tell.
        """
        commits = self._journal.commits
        if not commits:
            return
        pushed = {name: entry["commit"] for name, entry in commits.items()}
        present = self._publisher.find_present(pushed, MODEL, self._may_ask)
        for name in sorted(commits.keys() - present):
            self._say(f"{name} was published, and is no longer there")
        # Another mapping, because the looks beside this read the one that is there.
        self._journal.commits = {name: entry for name, entry in commits.items() if name in present}
        self._journal.write()

    def follow(self) -> None:
        """Push what a run leaves for as long as it goes on, and then the rest.

        Raises:
            DataError: As ``look``.
            GivenUpError: As ``push_all``.
            HfHubHTTPError: The Hub refuses.
        """
        watcher = threading.Thread(target=self._keep_looking, name="looking", daemon=True)
        watcher.start()
        # Beside the looks, which may find published what is not: after this, they are made again.
        self.recall()
        while not self._is_finishing.wait(SECONDS_BETWEEN_LOOKS):
            self.push_all()
        watcher.join()
        self.look()
        self.push_all()

    def _may_wait(self, name: str, seconds: float) -> bool:
        return name in self._choose() and self._may_ask(seconds)

    def _may_ask(self, seconds: float) -> bool:
        return seconds <= PATIENCE_SECONDS or not self._is_finishing.is_set()

    def _keep_looking(self) -> None:
        # Beside the pushes: what is deleted while one takes long must have been kept before.
        while not self._is_finishing.wait(SECONDS_BETWEEN_LOOKS):
            try:
                self.look()
            except DataError as error:  # The last look ends with it.
                self._say(str(error))
                return

    def _choose(self) -> list[str]:
        """Return which snapshots to push, in order; drop those that a newer one has overtaken."""
        names = list_snapshots(self._place)
        checkpoints = [name for name in names if name != MODEL]
        if self._pushes_all or len(checkpoints) < 2:
            return names
        overtaken = checkpoints[:-1]
        drop_snapshots(self._place, overtaken)
        self._journal.add(num_overtaken=len(overtaken))
        return [name for name in names if name not in overtaken]

    def _is_newer(self, name: str, *, is_over: bool) -> bool:
        """Whether a checkpoint comes after all that is published: a branch never goes back."""
        published = self._journal.commits
        if is_over and MODEL in published:
            return False
        return _read_step(name) >= max((_read_step(other) for other in published if other != MODEL), default=0)


def is_refusal(error: BaseException) -> bool:
    """Return whether the Hub, and not a mistake of ours, has ended the publishing."""
    return isinstance(error, GivenUpError | HfHubHTTPError)


def _read_step(name: str) -> int:
    return int(name.rpartition("-")[2])
