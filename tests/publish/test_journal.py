"""What is published is remembered for one repository, and lost rather than believed when it is torn."""

from __future__ import annotations

import pytest

from recipes_lib.publish.access import Target
from recipes_lib.publish.journal import JOURNAL, read_journal

TARGET = Target("me/mine", "main", is_private=True, exists=True)


def test_what_was_written_is_read_again(tmp_path):
    journal = read_journal(tmp_path, TARGET)
    assert journal.read_fingerprint("model") == ""
    journal.commits["model"] = {"commit": "c" * 40, "fingerprint": "f"}
    journal.add(num_pushed=1, num_requests=3)
    journal.add(num_requests=4)
    journal.write()
    again = read_journal(tmp_path, TARGET)
    assert again == journal
    assert again.read_fingerprint("model") == "f"
    assert again.counts == {"num_pushed": 1, "num_requests": 7}


def test_another_repository_or_branch_knows_nothing_of_it(tmp_path):
    journal = read_journal(tmp_path, TARGET)
    journal.commits["model"] = {"commit": "c" * 40, "fingerprint": "f"}
    journal.write()
    for other in (Target("me/other", "main", True, True), Target("me/mine", "trial", True, True)):
        assert read_journal(tmp_path, other).commits == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"repository": "me/mine"}', '{"unknown": 1}'])
def test_a_torn_record_is_as_none(tmp_path, text):
    (tmp_path / JOURNAL).write_text(text)
    assert read_journal(tmp_path, TARGET).commits == {}
