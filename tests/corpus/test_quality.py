"""Quality rules: datatrove's with their thresholds in sight."""

import inspect
import random
from collections import Counter

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from tests.corpus.texts import ENGLISH, make_text

from recipes_lib.corpus.quality import PRESETS, CodeQualityFilter, Quality, RegexTokenizer, choose_thresholds
from recipes_lib.errors import ConfigError


def judge(text, kind="web", changes=None):
    document = Document(text=text, id="1")
    return Quality(choose_thresholds(kind, changes)).apply(document, Counter()), document.text


@pytest.mark.parametrize(
    ("name", "upstream"),
    [
        ("gopher_quality", GopherQualityFilter),
        ("gopher_repetition", GopherRepetitionFilter),
        ("fineweb_quality", FineWebQualityFilter),
    ],
)
def test_the_web_preset_spells_out_upstreams_defaults(name, upstream):
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(upstream).parameters.items()
        if key not in ("exclusion_writer", "language", "stop_chars")
    }
    listed = {
        key: [list(pair) for pair in value] if isinstance(value, tuple) else value for key, value in defaults.items()
    }
    assert PRESETS["web"][name] == listed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("spam spam " * 100, "gopher_repetition"),
        (ENGLISH[:230], "gopher_quality gopher_short_doc"),
        (ENGLISH + " Lorem ipsum dolor.", "c4_quality lorem_ipsum"),
        (ENGLISH + " { }", "c4_quality curly_bracket"),
        ("\n".join(ENGLISH.split()), "gopher_repetition|fineweb_quality"),
        (make_text(random.Random(0), 80), "gopher_quality gopher_enough_stop_words"),
        ("... " * 80, "gopher"),
    ],
)
def test_bad_text_is_removed_by_the_rule_that_it_breaks(text, reason):
    found = judge(text)[0]
    assert any(found.startswith(each) for each in reason.split("|")), found


def test_prose_stays_as_it_is():
    assert judge(ENGLISH) == (None, ENGLISH)


def test_thresholds_may_be_changed_and_filters_left_out():
    short = " ".join(ENGLISH.split()[:40]) + "."
    assert judge(short)[0] == "gopher_quality gopher_short_doc"
    assert judge(short, changes={"web": {"gopher_quality": {"min_doc_words": 10}, "c4_quality": "off"}})[0] is None


@pytest.mark.parametrize(
    "changes",
    [{"wep": {}}, {"web": 3}, {"web": {"gopher": {}}}, {"web": {"c4_quality": {"min": 1}}}, {"web": {"c4_quality": 3}}],
)
def test_a_wrong_threshold_is_refused(changes):
    with pytest.raises(ConfigError, match="quality_thresholds"):
        choose_thresholds("web", changes)


def test_code_is_judged_by_its_lines():
    code = "def f(x):\n    return x + 1\n" * 20
    assert judge(code, "code")[0] is None
    assert judge(code)[0] is not None
    rule = CodeQualityFilter(max_line_length=100, max_avg_line_length=30, min_alnum_ratio=0.25)
    assert rule.filter(Document(text="x" * 101, id="")) == (False, "line_too_long")
    assert rule.filter(Document(text="\n".join(["x" * 40] * 3), id="")) == (False, "lines_too_long")
    assert rule.filter(Document(text="+-" * 10, id="")) == (False, "few_letters")


def test_every_kind_has_a_preset_that_can_be_built():
    for kind in PRESETS:
        Quality(choose_thresholds(kind, None)).apply(Document(text=ENGLISH, id=""), Counter())


def test_words_and_sentences_need_no_model():
    tokenizer = RegexTokenizer()
    assert tokenizer.word_tokenize("It's a well-read cat, no?") == ["It's", "a", "well-read", "cat", ",", "no", "?"]
    assert tokenizer.sent_tokenize('One. "Two!" Three?') == ["One.", '"Two!', "Three?"]
    text = "One. Two."
    assert [text[start:stop] for start, stop in tokenizer.span_tokenize(text)] == ["One. ", "Two."]
