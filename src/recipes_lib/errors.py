"""Exit codes and the errors that carry them. Imports nothing of ours and nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_DIVERGED = 3
EXIT_STALLED = 4
EXIT_PREEMPTED = 75


def escape_controls(text: object) -> str:
    """Return a text as one printable line: a stranger's may move the cursor, or pretend to be several lines."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it stands, what was found, what to do about it.

    Attributes:
        where: ``file:line``, ``file row N`` or a flag, as the user would look it up.
        found: What is wrong, in one clause.
        remedy: What to do, in one clause; empty when ``found`` says it all.
    """

    where: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.found}" + (f"\n    {self.remedy}" if self.remedy else "")


class UserError(Exception):
    """The user's configuration, data or environment is wrong; exit code 2. Carries every problem found."""

    exit_code = EXIT_USER

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems: Sequence[Problem] = problems


class ConfigError(UserError):
    """The configuration file, a flag, or a combination of them is wrong."""


class DataError(UserError):
    """The data are wrong: a missing file, a broken row, an example that cannot be masked."""


class DivergedError(Exception):
    """A guard stopped training before a bad update reached the weights; exit code 3."""

    exit_code = EXIT_DIVERGED


class PreemptedError(SystemExit):
    """The run was asked to stop and has stopped; exit code 75. The same command goes on.

    No ``Exception``: whoever handles errors must not take it for one and carry on.
    """

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.message = message

    def __str__(self) -> str:
        return self.message


class LostPeerError(SystemExit):
    """Another process of the run has ended, and this one cannot go on without it; exit code 1. No ``Exception`` too."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_BUG)
        self.message = message

    def __str__(self) -> str:
        return self.message
