"""A trained answer ends once, and spells no token that ends answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from recipes_lib.errors import DataError, Problem

_EXCERPT: Final = 20


def refuse_inner_ends(where: str, who: str, said: Iterable[str], turn: str, ends: Collection[str]) -> None:
    """Refuse an answer that would teach the model to stop and go on.

    A text may bring the one end that its turn has, where no one else writes it.

    Args:
        where: The row's place.
        who: The answer, as the error names it.
        said: The texts of the answer.
        turn: What is trained on of it, its end included.
        ends: Tokens that end answers.

    Raises:
        DataError: A text spells one of ``ends`` elsewhere than at the end of the turn, or a second time; or the turn
            ends twice without that.
    """
    for text in said:
        for end in ends:
            if end in text and not (turn.count(end) == 1 and turn.rstrip().endswith(end)):
                at = text.index(end)
                excerpt = text[max(0, at - _EXCERPT) : at + len(end) + _EXCERPT]
                found = f"{who} is trained on and spells the end token {end!r}, where the model would stop: {excerpt!r}"
                raise DataError(Problem(where, found, "take it out of the text; what ends the answer is added to it"))
    for end in ends:
        if turn.rstrip().endswith(end + end):
            raise DataError(Problem(where, f"{who} ends twice, with {end + end!r}", "let the template write it once"))
