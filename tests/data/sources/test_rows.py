"""Locations of rows in error messages."""

import pytest

from recipes_lib.data.sources.rows import RawRow, Row


@pytest.mark.parametrize(("index_name", "where"), [("line", "train.jsonl:17"), ("row", "train.jsonl row 17")])
def test_row_location_names_line_or_row(index_name, where):
    assert Row(source="train.jsonl", index=17, index_name=index_name, text="x").where == where
    assert RawRow("train.jsonl", 17, index_name, {"text": "x"}).where == where
