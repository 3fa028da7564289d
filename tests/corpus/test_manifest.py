"""Folders of sources, links, and what is left of earlier work."""

import errno
import os
from types import SimpleNamespace

import pytest

from recipes_lib.corpus.manifest import link_or_copy, name_folders, remove_old_work, sum_counts
from recipes_lib.data.sources.local_files import load_files


@pytest.mark.parametrize(
    "labels", [["web", "gsm8k_train"], ["train", "test"], ["dev-set", "eval2", "a b/c"], ["contest", "training"]]
)
def test_folders_never_name_a_split(tmp_path, labels):
    names = name_folders([SimpleNamespace(label=label) for label in labels])
    assert len(set(names)) == len(names)
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000-of-00001.jsonl").write_text('{"text": "x"}\n')
    assert len(load_files(tmp_path, "corpus", "train").files) == len(names)


def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("x")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")

    def refuse(*_):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "x"
    assert not (tmp_path / "a").samefile(tmp_path / "c")


def test_only_the_stages_of_this_corpus_are_kept(tmp_path):
    for name in ("clean-1", "clean-2", "compare-1", "shards-0", "finish-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "lock").write_text("")
    remove_old_work(
        tmp_path, {"clean": ["clean-2"], "compare": "compare-1", "shards": "shards-1", "finish": "finish-1"}
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean-2", "compare-1", "finish-1", "lock"]


def test_tokens_that_were_not_counted_have_no_sum():
    shards = [{"documents": 1, "bytes": 2, "tokens": None}, {"documents": 3, "bytes": 4, "tokens": None}]
    assert sum_counts(shards) == {"documents": 4, "bytes": 6, "tokens": None}
    assert sum_counts([{**shards[0], "tokens": 5}]) == {"documents": 1, "bytes": 2, "tokens": 5}
