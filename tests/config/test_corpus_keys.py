"""Keys of `recipes clean`."""

from contextlib import nullcontext

import pytest

from recipes_lib.config.corpus_keys import MAX_SAMPLES, label_entry
from recipes_lib.config.table import load_table
from recipes_lib.errors import ConfigError

MINIMAL = "sources: [{name: web.jsonl}]\noutput_dir: out\n"


def test_maximum_of_num_samples_is_number_of_collected_samples():
    assert load_table("corpus").keys["num_samples"].schema["maximum"] == MAX_SAMPLES


def test_unquoted_off_is_read_as_text(parse):
    assert parse("corpus", MINIMAL + "pii: off\n").pii == "off"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (MINIMAL + "language: apply", "lacks its input"),
        (MINIMAL + "language_threshold: 65", "write a number at most 1"),
        (MINIMAL + "language_thresholds: {de: high}", "has `de: high`"),
        (MINIMAL + "language: apply\nlanguages: [en]\nlanguage_thresholds: {de: 0.5}", "has `de`, and `languages` is"),
        (MINIMAL + "near_duplicates_seed: -1", "write a number at least 0"),
        (MINIMAL + "extract_seconds: 0", "write a number above 0"),
        ("sources: [{name: web.jsonl}]\noutput_dir: ' '\n", "`output_dir` is empty"),
        ("sources: []\noutput_dir: out\n", "`sources` is empty"),
        (MINIMAL + "toxicity: annotate", "toxic_words"),
        (MINIMAL + "classifier: apply", "classifier_path and classifier_label"),
        (MINIMAL + "classifier: apply\nclassifier_path: web.bin", "lacks its label"),
        (MINIMAL + "toxicity: apply\ntoxicity_classifier_path: web.bin", "lacks the label of its classifier"),
        (MINIMAL + "perplexity: apply\nperplexity_model_path: ./gone", "does not exist: './gone'"),
        (MINIMAL + "languages: [en]", '`languages` has no effect: `language` is "off"'),
        (MINIMAL + "pii: off\npii_action: drop", "`pii_action` has no effect"),
        (MINIMAL + "mixture_temperature: 3", "write `mixture: temperature`"),
        (MINIMAL + "pii: on", "one of off, annotate, apply"),
        (MINIMAL + "pii_kinds: [mail]", "`pii_kinds[0]` is 'mail'"),
        (MINIMAL + "near_duplicates_threshold: 0", "write a number at least 0.01"),
        (MINIMAL + "decontamination_ngram: 4", "write a number at least 5"),
        (MINIMAL + "workers: 0", "write a number at least 1"),
        (MINIMAL + "mixture: weights", "`web` has no weight above 0"),
        ("sources: [{name: a/x.jsonl}, {name: b/x.jsonl}]\noutput_dir: o", "two sources have the name `x`"),
        ("sources: [{name: a, kind: chat, html: true}]\noutput_dir: o", "`a` has both `kind: chat` and `html: true`"),
        ("sources: [{name: a, kind: page}]\noutput_dir: o", "kind"),
        ("sources: [{name: a, lang: de}]\noutput_dir: o", "is not a key of an entry"),
    ],
)
def test_invalid_config_is_refused_with_remedy(parse, text, found):
    with pytest.raises(ConfigError) as caught:
        parse("corpus", text)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("line", "is_valid"),
    [
        *((f"perplexity_bounds: {bounds}", bounds == [1.0, 1.4]) for bounds in ([1.0, 1.4], [1.4, 1.0], [0, 1], [1])),
        *((f"language_thresholds: {{de: {number}}}", 0 <= number <= 1) for number in (-0.1, 0, 1, 1.1)),
    ],
)
def test_bounds_ascend_and_thresholds_are_probabilities(parse, line, is_valid):
    steps = (f"{step}: annotate\n{step}_model_path: {__file__}\n" for step in ("language", "perplexity"))
    with nullcontext() if is_valid else pytest.raises(ConfigError, match=line.partition(":")[0]):
        parse("corpus", "".join([MINIMAL, *steps, "languages: [de]\n", line]))


def test_source_label_defaults_to_stem_of_name():
    names = [{"name": "a/b.jsonl.gz"}, {"name": "org/set"}, {"name": "x", "label": "y"}, {"name": "dir/"}]
    assert [label_entry(entry) for entry in names] == ["b", "set", "y", "dir"]
