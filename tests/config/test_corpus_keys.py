"""The keys of a corpus: every problem at once, with its place and the way out."""

import dataclasses

import pytest

from recipes_lib.config.corpus_keys import (
    CORPUS_SECTIONS,
    MAX_SAMPLES,
    CorpusConfig,
    label_entry,
    list_values,
    parse_corpus_command,
)
from recipes_lib.config.table import load_table
from recipes_lib.errors import ConfigError

SOUND = "sources: [{name: web.jsonl}]\noutput_dir: out\n"


def parse(tmp_path, text, *flags):
    path = tmp_path / "corpus.yaml"
    path.write_text(text)
    return parse_corpus_command(["--config", str(path), *flags])


def test_every_key_is_in_the_table_with_its_default():
    keys = load_table("corpus").keys
    fields = {field.name: field for section in CORPUS_SECTIONS.values() for field in dataclasses.fields(section)}
    assert list(keys) == list(fields)
    for name, field in fields.items():
        if name not in ("sources", "output_dir"):
            assert keys[name].default == field.default, name
    assert list_values(CorpusConfig()).keys() == fields.keys()
    assert keys["num_samples"].schema["maximum"] == MAX_SAMPLES


def test_file_and_flags(tmp_path):
    config = parse(tmp_path, SOUND, "--near_duplicates_threshold", "0.7", "--output_dir", "~/x")
    assert config.sources == [{"name": "web.jsonl"}]
    assert config.near_duplicates_threshold == 0.7
    assert not config.output_dir.startswith("~")


def test_off_is_a_word(tmp_path):
    assert parse(tmp_path, SOUND + "pii: off\n").pii == "off"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("output_dir: x", "`sources` is missing"),
        ("sources: [{name: a}]", "`output_dir` is missing"),
        (SOUND + "languages_: [en]", "did you mean `languages`"),
        (SOUND + "language: apply", "does not say by what"),
        (SOUND + "toxicity: annotate", "toxic_words"),
        (SOUND + "classifier: apply", "its path and label"),
        (SOUND + "pii: on", "one of off, annotate, apply"),
        (SOUND + "pii_kinds: [mail]", "`pii_kinds[0]` is 'mail'"),
        (SOUND + "near_duplicates_threshold: 0", "write a number at least 0.01"),
        (SOUND + "decontamination_ngram: 4", "write a number at least 5"),
        (SOUND + "workers: 0", "write a number at least 1"),
        (SOUND + "mixture: weights", "`web` has no weight above 0"),
        ("sources: [{name: a/x.jsonl}, {name: b/x.jsonl}]\noutput_dir: o", "two sources are called `x`"),
        ("sources: [{name: a, kind: page}]\noutput_dir: o", "kind"),
        ("sources: [{name: a, lang: de}]\noutput_dir: o", "is not a key of an entry"),
        (SOUND + "tokenizer_name_or_path: hf_" + "a" * 30, "looks like an access token"),
    ],
)
def test_a_mistake_is_refused_with_the_way_out(tmp_path, text, found):
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, text)
    assert found in str(caught.value)


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, "pii: maybe\nworkers: 0\n")
    assert len(caught.value.problems) == 4


def test_help_and_print_config(tmp_path):
    assert "--near_duplicates_verify" in parse_corpus_command(["--help"])
    shown = parse(tmp_path, SOUND, "--print-config")
    again = tmp_path / "again"
    again.mkdir()
    assert list_values(parse(again, shown)) == list_values(parse(tmp_path, SOUND))


def test_a_source_is_called_by_its_label_or_its_name():
    names = [{"name": "a/b.jsonl.gz"}, {"name": "org/set"}, {"name": "x", "label": "y"}, {"name": "dir/"}]
    assert [label_entry(entry) for entry in names] == ["b", "set", "y", "dir"]
