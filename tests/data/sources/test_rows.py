"""A row says where it stands, as a person would look it up."""

from recipes_lib.data.sources.rows import Row


def test_a_line_of_a_file_and_a_row_of_a_table_are_named_differently():
    assert Row(source="train.jsonl", index=17, index_name="line", text="x").where == "train.jsonl:17"
    assert Row(source="hub/set", index=3, text="x").where == "hub/set row 3"
