"""The record of what is published already."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import DataError
from recipes_lib.files import read_record, replace_record
from recipes_lib.publish.access import Target

JOURNAL: Final = "_published.json"
_FIELDS: Final = {"repository": str, "branch": str, "commits": dict, "counts": dict, "error": str}


@dataclass(slots=True)
class Journal:
    """A record in the output directory; what begins with an underscore is never uploaded.

    Attributes:
        path: Of the record.
        repository: ``owner/name`` that it is about.
        branch: Of the repository.
        commits: Commit of each push by name, with the fingerprint of what was pushed.
        counts: What became of requests and pushes, over all processes that have published this run.
        error: Why publishing was given up last; empty when it was not.
    """

    path: Path
    repository: str
    branch: str
    commits: dict[str, dict[str, str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    error: str = ""

    def read_fingerprint(self, name: str) -> str:
        """Return the fingerprint of what is published under a name; empty where nothing is."""
        return self.commits.get(name, {}).get("fingerprint", "")

    def add(self, **counts: int) -> None:
        """Count."""
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def write(self) -> None:
        """Replace the record on the disk."""
        facts: dict[str, Any] = {name: value for name, value in asdict(self).items() if name != "path"}
        replace_record(self.path, facts)


def read_journal(output_dir: Path, target: Target) -> Journal:
    """Return what is published of a run at a target: nothing where no record of it could be read."""
    path = output_dir / JOURNAL
    try:
        journal = Journal(path, **read_record(path, _FIELDS))
    except (DataError, TypeError):
        return Journal(path, target.repository, target.branch)
    is_same = (journal.repository, journal.branch) == (target.repository, target.branch)
    return journal if is_same else Journal(path, target.repository, target.branch)
