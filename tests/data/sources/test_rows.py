"""A row says where it stands, as a person would look it up."""

import pytest

from recipes_lib.data.sources.rows import RawRow, Row


@pytest.mark.parametrize(("index_name", "where"), [("line", "train.jsonl:17"), ("row", "train.jsonl row 17")])
def test_a_line_of_a_file_and_a_row_of_a_table_are_named_differently(index_name, where):
    assert Row(source="train.jsonl", index=17, index_name=index_name, text="x").where == where
    assert RawRow("train.jsonl", 17, index_name, {"text": "x"}).where == where
