"""HTML page of a corpus: removals, samples and escaping."""

import recipes_lib.files
from recipes_lib.report.html_pages import list_removals, write_corpus_report


def make_tally(**changes):
    tally = {"documents_in": 10, "documents_out": 10, "bytes_in": 100, "bytes_out": 100, "changed": 0}
    return tally | {"removed": {}, "removed_bytes": {}, "found": {}} | changes


MANIFEST = {
    "documents": 7,
    "bytes": 70,
    "tokens": None,
    "notes": ["a.jsonl:5: <script>"],
    "shards": [{}],
    "sources": [
        {"label": "web", "name": "w", "kind": "web", "license": None, "documents": 7, "bytes": 70}
        | {"epochs": 5.0, "too_often": True}
    ],
    "mixture": [{"name": "data/web", "weight": 1.0}],
    "steps": {
        "read": make_tally(),
        "pii": make_tally(
            documents_out=7, removed={"b": 1, "a": 2}, removed_bytes={"a": 20, "b": 10}, found={"email": 12_345}
        ),
    },
}


def test_corpus_page_shows_removals_and_escapes_samples(tmp_path):
    samples = {"pii: a": [{"id": "<b>1</b>", "text": "<img src=x>", "after": "masked", "original": "the first"}]}
    page = write_corpus_report(tmp_path, MANIFEST, samples).read_text()
    for shown in ("12,345", "20.0%", "5.0 epochs, above max_epochs", "masked", "the first", "licence not given"):
        assert shown in page, shown
    for hostile in ("<script", "<img", "<b>1"):
        assert hostile not in page
    assert "Tokens" not in page


def test_removals_are_sorted_by_step_and_count():
    assert list_removals(MANIFEST) == [("pii", "a", 2, 20), ("pii", "b", 1, 10)]


def test_empty_corpus_makes_a_page(tmp_path):
    empty = {"read": make_tally(documents_in=0, documents_out=0)}
    assert write_corpus_report(tmp_path, {**MANIFEST, "steps": empty, "tokens": 3}, {}).is_file()


def test_processes_that_write_the_same_page_do_not_fail(tmp_path, monkeypatch):
    flush = recipes_lib.files.fsync

    def write_meanwhile(path):
        monkeypatch.setattr(recipes_lib.files, "fsync", flush)
        write_corpus_report(tmp_path, MANIFEST, {})
        flush(path)

    monkeypatch.setattr(recipes_lib.files, "fsync", write_meanwhile)
    assert write_corpus_report(tmp_path, MANIFEST, {}).read_text().endswith("</html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
