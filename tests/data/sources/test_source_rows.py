"""A raw row is named as the row it becomes."""

from __future__ import annotations

import pytest

from recipes_lib.data.sources.formats import canonicalize, detect_format
from recipes_lib.data.sources.rows import RawRow


@pytest.mark.parametrize("index_name", ["line", "row"])
def test_a_raw_row_has_the_place_of_its_row(index_name: str) -> None:
    raw = RawRow("d.jsonl", 17, index_name, {"text": "a"})
    row_format = detect_format(raw.columns, where=raw.where)
    assert raw.where == canonicalize(raw.columns, row_format, raw.source, raw.index, raw.index_name).where
