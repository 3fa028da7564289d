"""Quality filters against datatrove's defaults, and perplexity buckets."""

import inspect
import pickle
import random
import re
from collections import Counter

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from tests.corpus.texts import ENGLISH, apply, make_text

from recipes_lib.corpus.documents import Apply, Ledger
from recipes_lib.corpus.quality import (
    PRESETS,
    CodeQualityFilter,
    Perplexity,
    Quality,
    RegexTokenizer,
    choose_thresholds,
)
from recipes_lib.errors import ConfigError


def apply_quality(text, kind="web", changes=None):
    reason, document, _ = apply(Quality(choose_thresholds(kind, changes)), text)
    return reason, document.text


@pytest.mark.parametrize("later", ["code_quality", "fineweb_quality"])
def test_document_without_lines_after_the_c4_filter_ends_there(later):
    changes = {"text": {"c4_quality": {"min_num_sentences": 0}, later: {}}}
    assert apply_quality("Please turn JavaScript on", "text", changes) == (None, "")


@pytest.mark.parametrize(
    ("name", "upstream"),
    [
        ("gopher_quality", GopherQualityFilter),
        ("gopher_repetition", GopherRepetitionFilter),
        ("c4_quality", C4QualityFilter),
        ("fineweb_quality", FineWebQualityFilter),
    ],
)
def test_web_preset_lists_upstream_defaults_as_fineweb_does(name, upstream):
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(upstream).parameters.items()
        if key not in ("exclusion_writer", "language", "stop_chars")
    }
    listed = {
        key: [list(pair) for pair in value] if isinstance(value, tuple) else value for key, value in defaults.items()
    }
    if name == "c4_quality":  # The only argument that FineWeb's script changes.
        listed["filter_no_terminal_punct"] = False
    assert PRESETS["web"][name] == listed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("spam spam " * 100, "gopher_repetition"),
        (ENGLISH[:230], "gopher_quality gopher_short_doc"),
        (ENGLISH + " Lorem ipsum dolor.", "c4_quality lorem_ipsum"),
        (ENGLISH + " { }", "c4_quality curly_bracket"),
        (re.sub(r"(\S+ \S+ \S+) ", r"\1\n", ENGLISH), "fineweb_quality"),
        (make_text(random.Random(0), 80), "gopher_quality gopher_enough_stop_words"),
        ("... " * 80, "gopher"),
    ],
)
def test_low_quality_text_is_removed_by_its_rule(text, reason):
    found = apply_quality(text)[0]
    assert any(found.startswith(each) for each in reason.split("|")), found


def test_prose_is_unchanged():
    assert apply_quality(ENGLISH) == (None, ENGLISH)


def test_dashes_and_urls_of_one_site_are_no_repetition():
    """As by the words of spaCy, with which datatrove keeps this text."""
    lines = [f"{line.strip()} -- https://example.org/docs/{n}." for n, line in enumerate(ENGLISH.split(". "))]
    assert apply_quality("\n".join(lines))[0] is None


def test_thresholds_can_be_changed_and_filters_disabled():
    short = " ".join(ENGLISH.split()[:40]) + "."
    assert apply_quality(short)[0] == "gopher_quality gopher_short_doc"
    assert (
        apply_quality(short, changes={"web": {"gopher_quality": {"min_doc_words": 10}, "c4_quality": "off"}})[0] is None
    )


@pytest.mark.parametrize(
    "changes",
    [{"wep": {}}, {"web": 3}, {"web": {"gopher": {}}}, {"web": {"c4_quality": {"min": 1}}}, {"web": {"c4_quality": 3}}],
)
def test_invalid_threshold_is_refused(changes):
    with pytest.raises(ConfigError, match="quality_thresholds"):
        choose_thresholds("web", changes)


def test_filter_that_removes_lines_is_refused_for_chats():
    """Their text is that of all messages, of which a lost line would cut one or merge two."""
    with pytest.raises(ConfigError, match="chat: c4_quality removes lines"):
        choose_thresholds("chat", {"chat": {"c4_quality": {"min_num_sentences": 0}}})
    assert choose_thresholds("chat", {"chat": {"c4_quality": "off", "gopher_repetition": {}}})


def test_code_quality_filter():
    code = "def f(x):\n    return x + 1\n" * 20
    assert apply_quality(code, "code")[0] is None
    assert apply_quality(code)[0] is not None
    rule = CodeQualityFilter(max_line_length=100, max_avg_line_length=30, min_alnum_ratio=0.25)
    at_limits = "\n".join(["x" * 54 + "-" * 46, *["-" * 20] * 5, "-" * 10])
    assert rule.filter(Document(text=at_limits, id="")) is True
    assert rule.filter(Document(text="x" * 101, id="")) == (False, "line_too_long")
    assert rule.filter(Document(text="\n".join(["x" * 40] * 3), id="")) == (False, "lines_too_long")
    assert rule.filter(Document(text="+-" * 10, id="")) == (False, "few_letters")


def test_preset_of_every_kind_can_be_built():
    for kind in PRESETS:
        Quality(choose_thresholds(kind, None)).apply(Document(text=ENGLISH, id=""), Counter())


def test_regex_tokenizer():
    tokenizer = RegexTokenizer()
    assert tokenizer.word_tokenize("It's a well-read cat, no?") == ["It's", "a", "well-read", "cat", ",", "no", "?"]
    links = "See https://a.org/b?c=1 -- or ... it's -5"
    assert tokenizer.word_tokenize(links) == ["See", "https://a.org/b?c=1", "--", "or", "...", "it's", "-", "5"]
    assert tokenizer.word_tokenize("见 https://a.org/b。你好 吗") == ["见", "https://a.org/b", "。", "你好", "吗"]
    assert tokenizer.sent_tokenize('One. "Two!" Three?') == ["One.", '"Two!', "Three?"]
    assert tokenizer.sent_tokenize("一。「二！」三？！四") == ["一。", "「二！", "三？！", "四"]
    assert tokenizer.sent_tokenize("One. \n") == ["One."]
    text = "One. Two."
    assert [text[start:stop] for start, stop in tokenizer.span_tokenize(text)] == ["One. ", "Two."]


def load_lengths(path: str):
    """Return a scorer whose bits per byte are the number of words."""
    assert path == "model"
    return lambda text: float(text) if text[0].isdigit() else None


def sort_into_buckets(texts, bounds, kept=("head", "middle"), mode="apply"):
    step, ledger = Perplexity(load_lengths, "model", bounds, kept), Ledger(["perplexity"], 3)
    documents = [Document(text=text, id=str(at)) for at, text in enumerate(texts)]
    left = [*Apply(step, mode, ledger).run(iter(documents))]
    return left, ledger.tallies["perplexity"]


def test_bucket_bounds_are_half_open() -> None:
    left, tally = sort_into_buckets(["0.5", "1.0", "1.49", "1.5", "3"], [1.0, 1.5])
    assert [document.metadata["perplexity_bucket"] for document in left] == ["head", "middle", "middle"]
    assert tally.found == {"head": 1, "middle": 2, "tail": 2}
    assert tally.removed == {"bucket tail": 2}


@pytest.mark.parametrize(("kept", "words"), [(["tail"], ["3"]), (["head", "tail"], ["0.5", "3"]), (["middle"], [])])
def test_perplexity_keep_selects_buckets(kept, words) -> None:
    assert [document.text for document in sort_into_buckets(["0.5", "3"], [1.0, 1.5], kept)[0]] == words


def test_annotate_mode_records_bits_per_byte_and_bucket() -> None:
    left, tally = sort_into_buckets(["0.5", "3.14159"], [1.0, 1.5], mode="annotate")
    assert left[1].metadata == {
        "bits_per_byte": 3.1416,
        "perplexity_bucket": "tail",
        "flags": ["perplexity: bucket tail"],
    }
    assert not tally.removed


def test_documents_are_counted_by_tenths_without_bounds() -> None:
    """Users choose the bounds from these counts."""
    left, tally = sort_into_buckets(["0.96", "0.98", "1.2", "x"], [], mode="annotate")
    assert tally.found == {"from 0.9 bits per byte": 2, "from 1.2 bits per byte": 1, "too short": 1}
    assert len(left) == 4


def test_perplexity_step_is_pickled_without_model() -> None:
    step = Perplexity(load_lengths, "model", [1.0, 1.5], ["head"])
    step.apply(Document(text="2", id=""), Counter())
    again = pickle.loads(pickle.dumps(step))
    assert again.apply(Document(text="2", id=""), Counter()) == "bucket tail"
