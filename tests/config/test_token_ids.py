"""Every id of a tokenizer has a place in what is sized by their number, whether or not ids are left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from recipes_lib.config.token_ids import count_ids


@pytest.mark.parametrize(("ids", "expected"), [([], 0), ([0, 1, 2], 3), ([7, 0, 2], 8)])
def test_there_is_room_for_every_id_and_for_no_more(ids: list[int], expected: int) -> None:
    assert count_ids(SimpleNamespace(get_vocab=lambda: {str(at): at for at in ids})) == expected


def test_added_tokens_count(tiny_tokenizer) -> None:
    ids = [*tiny_tokenizer.get_vocab().values(), *tiny_tokenizer.added_tokens_decoder]
    assert count_ids(tiny_tokenizer) == max(ids) + 1
