"""``recipes clean`` and ``recipes/corpus.py``: output, ``check`` and ``plan``, decontamination, invalid keys."""

import importlib.util
import json

import pytest
from tests.corpus.texts import write_rows
from tests.forked import ROOT, run_script

from recipes_lib.commands.clean import describe, main, main_classifier, plan
from recipes_lib.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    rows = [{"text": f"document {at} says hello to a@b.co"} for at in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]) + "broken\n")
    path = tmp_path / "c.yaml"
    path.write_text(f"sources: [{{name: {tmp_path}/a.jsonl}}]\noutput_dir: {tmp_path}/out\nworkers: 1\n")
    return path


def test_last_line_reports_documents_and_output_paths(config, recipes):
    lines = recipes("clean", "--config", config).splitlines()
    out = config.parent / "out"
    assert lines[-1].startswith("3 of 5 documents, ")
    assert lines[-1].endswith(f"dataset_name: {out}; removed documents and reasons: {out}/report.html")
    assert "exact_duplicates: 1 of 4 documents removed" in lines
    assert any(line.startswith("warning: not read: ") and "a.jsonl:5" in line for line in lines)


def test_check_and_plan_support_corpus_recipe(config, recipes):
    (config.parent / "bench.jsonl").write_text('{"q": "one two three four five six"}\n{"q": "seven"}\n')
    path = config.rename(config.with_name("corpus.yaml"))
    flags = ["--config", str(path), "--benchmarks", f"[{{name: {config.parent}/bench.jsonl}}]"]
    output = recipes("check", *flags)
    assert "a: text, 1 task; extract, fix_text, pii, decontamination" in output
    assert "bench: 1 protected text, 1 too short" in output
    assert output.endswith("ready to clean\n")
    assert not (config.parent / "out" / "data").exists()
    output = recipes("plan", *flags, "--workers", "4")
    assert "hours on 4 cores" in output
    assert "disk: at most" in output
    assert "gone.jsonl" in recipes("check", *flags, "--sources", "[{name: gone.jsonl}]", code=2)
    recipes("check", *flags, "--benchmarks", "[{name: gone.jsonl}]", code=2)
    (config.parent / "b.jsonl").write_text("broken\n")
    broken = ["--sources", f"[{{name: {config.parent}/b.jsonl}}]", "--broken_rows", "drop"]
    assert "the first task has no document: " in recipes("check", *flags, *broken, code=2)


def test_plan_says_that_sources_of_unknown_size_need_more(config, monkeypatch, capsys):
    plan(["--config", str(config)])
    assert "more" not in capsys.readouterr().out
    # As of a Hub dataset whose card has no sizes.
    monkeypatch.setattr("recipes_lib.corpus.inputs.count_input_bytes", lambda source: None)
    plan(["--config", str(config)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a: unknown size"
    assert all(line.endswith(", and more for sources of unknown size") for line in lines[1:])


def test_source_repeated_too_often_is_a_warning():
    manifest = {
        "steps": {"read": {"documents_in": 1, "documents_out": 1}},
        "notes": [],
        "sources": [{"label": "a", "kind": "text", "documents": 1, "epochs": 5.5, "too_often": True}],
        "tokens": 7,
        "documents": 1,
        "bytes": 10,
    }
    lines = [*describe(manifest, "out")]
    assert lines[0] == "warning: 5.5 epochs of a; above 4, repeated tokens help little"
    assert "7 tokens" in lines[-1]


def test_benchmarks_of_eval_config_are_decontaminated(tmp_path, recipes):
    question = " ".join(f"item{at}" for at in range(20))
    (tmp_path / "exam.jsonl").write_text(json.dumps({"q": question}) + "\n")
    (tmp_path / "exam.yaml").write_text(
        f"task: exam\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/exam.jsonl}}}}\n"
        "output_type: generate_until\ntest_split: test\ndoc_to_text: '{{q}}'\ndoc_to_target: a\n"
    )
    (tmp_path / "eval.yaml").write_text(
        f"model_name_or_path: {tmp_path}/not-yet\ntasks: [exam]\ninclude_path: [{tmp_path}]\noutput_dir: x\n"
    )
    write_rows(tmp_path / "leak.jsonl", [f"see {question}", "another text"])
    flags = ["--sources", f"[{{name: {tmp_path}/leak.jsonl}}]", "--benchmarks_of", f"[{tmp_path}/eval.yaml]"]
    recipes("clean", *flags, "--output_dir", tmp_path / "out", "--workers", "1")
    assert json.loads((tmp_path / "out" / "corpus.json").read_text())["decontamination"] == {"exam": 1}
    assert "gone.yaml" in recipes("clean", *flags[:2], "--output_dir", "x", "--benchmarks_of", "[gone.yaml]", code=2)


@pytest.mark.parametrize(
    ("function", "flags"),
    [(main, ["--sources", "[{name: a}]", "--output_dir", "out"]), (main_classifier, ["eval", "x", "good=a"])],
)
def test_missing_extra_is_named(function, flags, monkeypatch):
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datatrove" else original(name))
    with pytest.raises(ConfigError, match=r"pip install 'recipes-lib\[corpus\]'"):
        function(flags)


@pytest.mark.multiprocess
def test_recipe_script_matches_command(config):
    done = run_script(ROOT / "recipes" / "corpus.py", "--config", config)
    assert done.stdout.splitlines()[-1].startswith("3 of 5 documents")
    assert "cleaning a: 1 of 1 tasks" in done.stderr


def test_perplexity_buckets_match_scored_bits_per_byte(tmp_path, tiny_model_dir, recipes):
    rows = write_rows(tmp_path / "rows.jsonl", [f"{'a b c ' * at} and some words {at}" for at in range(1, 9)])
    scored = tmp_path / "scored.jsonl"
    recipes("score", tiny_model_dir, "--dataset_name", rows, "--output", scored)
    expected = {row["text"].strip(): row["bits_per_byte"] for row in map(json.loads, scored.open())}
    middle, tail = sorted(expected.values())[2], sorted(expected.values())[5]
    keys = {"sources": f"[{{name: '{rows}'}}]", "output_dir": tmp_path / "out", "output_format": "jsonl", "workers": 2}
    keys |= {"perplexity": "apply", "perplexity_model_path": tiny_model_dir, "perplexity_bounds": f"[{middle}, {tail}]"}
    flags = [f"--{name}={value}" for name, value in (keys | {"near_duplicates": "off"}).items()]
    recipes("check", "--recipe", "corpus", *flags)
    recipes("clean", *flags)
    (shard,) = (tmp_path / "out" / "data").rglob("*.jsonl")
    kept = {row["text"].strip(): row["metadata"]["bits_per_byte"] for row in map(json.loads, shard.open())}
    assert kept == {text: pytest.approx(bits, abs=1e-4) for text, bits in expected.items() if bits < tail}
    manifest = json.loads((tmp_path / "out" / "corpus.json").read_text())
    assert manifest["steps"]["perplexity"]["found"] == {"head": 2, "middle": 3, "tail": 3}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"perplexity": "apply"}, "write perplexity_model_path"),
        ({"perplexity": "apply", "perplexity_model_path": "{tmp}"}, "`perplexity: apply` has no bounds"),
        ({"perplexity_bounds": "[1.5, 1.0]"}, "two ascending numbers above 0"),
        ({"perplexity_bounds": "[a]"}, "perplexity_bounds"),
        ({"perplexity_keep": "[front]"}, "perplexity_keep"),
        ({"toxicity": "apply"}, "or path and label"),
        ({"classifier_path": "no/such"}, "`classifier_path` does not exist"),
    ],
)
def test_step_without_required_keys_is_rejected(tmp_path, recipes, keys, message):
    defaults = {
        "sources": f"[{{name: '{write_rows(tmp_path / 'rows.jsonl', ['one'])}'}}]",
        "output_dir": tmp_path / "out",
    }
    flags = [f"--{name}={value}".replace("{tmp}", str(tmp_path)) for name, value in (defaults | keys).items()]
    assert message in recipes("clean", *flags, code=2)
