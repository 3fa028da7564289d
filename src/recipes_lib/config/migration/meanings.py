"""Keys that are spelled as in TRL and alignment-handbook and mean something else here; migration says so."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Meaning:
    """A difference that a file does not show.

    Attributes:
        where: What of the file it concerns.
        there: What it meant.
        here: What it means.
        advice: What to write for what it was, as a clause; ``None`` where there is nothing to decide.
        keys: It concerns files with one of these keys; none: all files.
        unless: It is settled where one of these is set.
        decisive: A key of the stages that it concerns.
    """

    where: str
    there: str
    here: str
    advice: str | None = None
    keys: AbstractSet[str] = frozenset()
    unless: AbstractSet[str] = frozenset()
    decisive: str = "output_dir"

    def concerns(self, present: AbstractSet[str], known: AbstractSet[str]) -> bool:
        """Return whether a file with the keys ``present``, for a stage with the keys ``known``, leaves it to decide."""
        is_there = not self.keys or bool(self.keys & present)
        return self.advice is not None and self.decisive in known and is_there and not self.unless & present

    def __str__(self) -> str:
        return f"{self.where}: {self.here} here, {self.there}; {self.advice}"


_LENGTH: Final = frozenset({"max_length", "max_seq_length"})

MEANINGS: Final = (
    Meaning(
        "chats without `assistant_only_loss`",
        there="older TRL trained on all tokens",
        here="only the assistant's turns are trained on",
        advice="`loss_on: all` does that",
        unless=frozenset({"loss_on"}),
        decisive="loss_on",
    ),
    Meaning(
        "`max_length`, `max_seq_length`",
        there="TRL cut longer examples",
        here="a longer example is an error",
        advice="`overlong: truncate` does that",
        keys=_LENGTH,
        unless=frozenset({"overlong"}),
        decisive="loss_on",
    ),
    Meaning(
        "`max_length`, `max_prompt_length` of pairs",
        there="TRL cut prompts and answers, each to a length of its own",
        here="a prompt with its longer answer has to fit, and is an error if it does not",
        advice="`overlong: drop` leaves such pairs out and counts them",
        keys=_LENGTH | {"max_prompt_length"},
        unless=frozenset({"overlong"}),
        decisive="simpo_gamma",
    ),
    Meaning(
        "`packing: true`",
        there="documents in a row could see each other, by kernel and version",
        here="they never do",
        keys=frozenset({"packing"}),
        decisive="loss_on",
    ),
    Meaning(
        "`gradient_accumulation_steps`",
        there="some versions averaged the losses of micro-batches of unequal length",
        here="a step's loss is the mean over its targets, however it is cut",
        keys=frozenset({"gradient_accumulation_steps"}),
        decisive="loss_on",
    ),
)
"""All of them."""
