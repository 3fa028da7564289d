"""Decontamination against n-gram sets: removal, excision and benchmark items."""

import copy
import itertools
import json
import random
import unicodedata
from collections import Counter

import pytest
from datatrove.data import Document
from tests.corpus.texts import apply, make_text, word_ngrams

from recipes_lib.corpus.decontamination import Decontamination, Index, read_items
from recipes_lib.errors import DataError

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May?"
)
SHORT = "The capital of Burkina Faso is Ouagadougou"
ACCENTS = "Où était le bébé d'Hélène à Málaga"


@pytest.fixture
def benchmark(tmp_path):
    path = tmp_path / "gsm.jsonl"
    rows = [{"question": QUESTION, "answer": "72"}, {"question": SHORT, "answer": "yes"}]
    rows.append({"question": unicodedata.normalize("NFD", ACCENTS), "answer": "ici"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": str(path), "label": "gsm"}


def decontaminate(benchmark, text, size=13, excises=False):
    reason, document, found = apply(Decontamination([benchmark], size, excises=excises), text)
    return reason, document.text, found


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        QUESTION.upper(),
        f"before {QUESTION} after",
        QUESTION.replace(",", " -").replace(".", " ...\n"),
        " ".join(QUESTION.split()[3:16]),
        f"They say: {SHORT.lower()}!",
        ACCENTS,
        unicodedata.normalize("NFD", ACCENTS),
    ],
)
def test_contaminated_text_is_removed(benchmark, text):
    reason, _, found = decontaminate(benchmark, text)
    assert reason == "gsm"
    assert found == {"gsm": 1}


@pytest.mark.parametrize(
    "text",
    [
        "In April Natalia sold clips to 48 friends. In May she sold half as many of them. What is her total?",
        QUESTION.replace("48", "49").replace("half", "twice").replace("altogether", "in total"),
        " ".join(QUESTION.split()[3:15]),
        "The capital of Burkina Faso is not Ouagadougou",
        "72 yes",
    ],
)
def test_paraphrase_and_short_overlap_are_kept(benchmark, text):
    assert decontaminate(benchmark, text)[0] is None


@pytest.mark.parametrize("item", ["中华人民共和国", "以上都不对", "กรุงเทพ"])
def test_phrase_in_a_script_without_spaces_is_no_item(item):
    """As in the choices of C-Eval: each of its characters counts as a word elsewhere."""
    index = Index(13)
    index.add("ceval", item)
    assert index.find(f"一九四九年，{item}成立。") == []
    assert index.num_short == {"ceval": 1}


def test_item_in_a_script_without_spaces_is_found():
    index, question = Index(13), "下列关于税法基本原则的表述中，不正确的是，税收法定原则是税法基本原则的核心"
    index.add("ceval", question)
    assert index.find(f"问：{question}？")
    assert index.find("下列关于税法基本原则的表述中，请选择一项") == []


def test_index_finds_intersection_of_ngrams():
    random_ = random.Random(0)
    vocabulary = make_text(random_, 25).split()
    items, texts = ([" ".join(random_.choices(vocabulary, k=30)) for _ in range(60)] for _ in range(2))
    index = Index(3)
    for item in items:
        index.add("t", item)
    expected = set().union(*(word_ngrams(item, 3) for item in items))
    for text in texts:
        places = [text[start:end] for _, start, end in index.find(text)]
        words = text.split()
        runs = [tuple(words[at : at + 3]) for at in range(len(words) - 2)]
        assert places == [" ".join(run) for run in runs if run in expected]


def test_excision_keeps_distant_text(benchmark):
    before, after = ("word " * 200).strip(), ("other " * 200).strip()
    reason, text, _ = decontaminate(benchmark, f"{before} {QUESTION} {after}", excises=True)
    assert reason is None
    assert "Natalia" not in text
    kept_before, kept_after = text.split("\n")
    assert before.startswith(kept_before)
    assert after.endswith(kept_after)
    assert len(before) - 201 <= len(kept_before) <= len(before) - 199


def test_overlapping_and_nested_excisions_are_merged(tmp_path):
    long, short = QUESTION, "five little words of another benchmark"
    items = tmp_path / "b.jsonl"
    items.write_text("".join(json.dumps({"q": item}) + "\n" for item in (f"{long} {short} {long}", short)))
    step = Decontamination([{"name": str(items)}], 13, excises=True)
    random_ = random.Random(0)
    nested = f"{long} {short} {long}"
    for pieces in (
        [nested],
        [short, nested],
        [nested, "x " * 60, short],
        [short, "x " * 150, short, "x " * 250, nested],
    ):
        text = " ".join([make_text(random_, 300), *pieces, make_text(random_, 300)])
        removed = [False] * len(text)
        for _, start, end in step.index.find(text):
            removed[max(0, start - 200) : end + 200] = [True] * len(removed[max(0, start - 200) : end + 200])
        runs = itertools.groupby(zip(text, removed, strict=True), key=lambda pair: pair[1])
        document = Document(text=text, id="d")
        step.apply(document, Counter())
        assert document.text == "\n".join(
            "".join(char for char, _ in run) for is_removed, run in runs if not is_removed
        )


def test_short_benchmark_items_are_counted(benchmark):
    step = Decontamination([benchmark], 13, excises=False)
    assert step.index.num_short == {"gsm": 3}
    assert step.index.num_items == {"gsm": 6}
    index = Index(13)
    index.add("t", "one two three four five")
    index.add("t", "one two three four")
    assert (index.num_items, index.num_short) == ({"t": 1}, {"t": 1})


def test_contaminated_document_names_its_benchmarks(benchmark):
    document = Document(text=QUESTION, id="")
    Decontamination([benchmark], 13, excises=True).apply(document, Counter())
    assert document.metadata["contaminated_by"] == ["gsm"]


def test_benchmark_columns_and_nested_texts_are_read(tmp_path):
    path = tmp_path / "mmlu.jsonl"
    path.write_text(json.dumps({"q": "one", "choices": ["two", {"text": "three"}], "n": 4}) + "\n")
    assert list(read_items({"name": str(path)})) == ["one", "two three", "one two three"]
    assert list(read_items({"name": str(path), "columns": ["choices"]})) == ["two three"]
    with pytest.raises(DataError, match="no column `question`"):
        list(read_items({"name": str(path), "columns": ["question"]}))
    with pytest.raises(DataError, match="no text"):
        list(read_items({"name": str(path), "columns": ["n"]}))
    path.write_text('{"q": "one"}\n{"q": ""}\n')
    assert list(read_items({"name": str(path)})) == ["one"]
    path.write_text('{"q": "one"}\n{\n')
    with pytest.raises(DataError, match=r"mmlu\.jsonl:2: invalid JSON"):
        list(read_items({"name": str(path)}))


def test_copied_step_rebuilds_its_index(benchmark):
    step = Decontamination([benchmark], 13, excises=False)
    assert step.index.find(QUESTION)
    other = copy.deepcopy(step)
    assert "index" not in vars(other)
    assert other.index.find(QUESTION) == step.index.find(QUESTION)
