"""``recipes sample-pairs`` and ``RowFile``: choice of pairs, determinism and resumption."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.rl import keys_task
from tests.rows import read_rows
from transformers import LlamaForCausalLM

from recipes_lib.commands import sampling
from recipes_lib.commands.sampling import Answered, Counts, PairCounts, RowFile, choose_pair, sample_pairs
from recipes_lib.data.prompts import PromptRow
from recipes_lib.data.sources.formats import canonicalize, detect_format
from recipes_lib.data.sources.rows import RawRow
from recipes_lib.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return keys_task.write_policy(tmp_path_factory.mktemp("policy"), 0, num_steps=60)


@pytest.fixture
def run(policy, tmp_path):
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 24, seed=5)

    def call(name="pairs.jsonl", num_answers=4, **keys):
        values = {"learning_rate": 1e-3, "per_device_eval_batch_size": 16, "policy": policy, **keys}
        flags = keys_task.build_flags(values.pop("policy"), tmp_path / "out", prompts, **values)
        sampling.main_pairs([f"--output={tmp_path / name}", f"--num_answers={num_answers}", *flags])
        return read_rows(tmp_path / name)

    return call


def share(prompt, answer):
    words = answer.split()
    return words.count(prompt.split()[-2]) / max(len(words), 1)


def test_chosen_answer_has_higher_reward(run, capsys):
    rows = run()
    assert len(rows) > 12
    for row in rows:
        assert row["score_chosen"] == pytest.approx(share(row["prompt"], row["chosen"]))
        assert row["score_rejected"] == pytest.approx(share(row["prompt"], row["rejected"]))
        assert row["score_chosen"] > row["score_rejected"]
    output = capsys.readouterr().out
    assert f"24 prompts, {len(rows)} pairs" in output


def test_pairs_do_not_depend_on_batch_size(run):
    rows = run()
    assert run() == rows
    assert run("others.jsonl", per_device_eval_batch_size=64) == rows


def test_changed_policy_or_parameters_are_rejected(run, policy, tmp_path):
    run()
    other = tmp_path / "other"
    shutil.copytree(policy, other)
    assert run(policy=other), "equal weights in another folder are the same policy"
    model = LlamaForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1e-3
    model.save_pretrained(other)
    changes = {"policy": other, "seed": 1, "temperature": 0.5, "num_answers": 3, "response_length": 6}
    for key, value in {**changes, "reward_funcs": "[tests.rl.keys_task:score_second_key]"}.items():
        with pytest.raises(ConfigError, match="of another policy"):
            run(**{key: value})
    with pytest.raises(ConfigError, match="--num_answers: is 1"):
        run(num_answers=1)


@pytest.mark.parametrize("timeout", ["null", 60.0])
def test_changed_code_or_arguments_of_rewards_are_rejected(run, tmp_path, monkeypatch, timeout):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = "def build(low, file):\n    return lambda *, completions, **_: [low + {} * len(a) for a in completions]\n"

    def call(factor, low, prompt):
        (tmp_path / "graded.py").write_text(code.format(factor))
        (tmp_path / "prompt.yaml").write_text(prompt)
        monkeypatch.delitem(sys.modules, "graded", raising=False)
        run(reward_funcs=json.dumps([f"graded:build(low={low}, file='prompt.yaml')"]), reward_timeout=timeout)

    call(1, 1, "a")
    for changed in ((22, 1, "a"), (1, 2, "a"), (1, 1, "b")):
        with pytest.raises(ConfigError, match="prompts, rewards or settings"):
            call(*changed)


def answers(*scores):
    return [Answered(f"answer {at}", score, is_usable=True) for at, score in enumerate(scores)]


CUT = Answered("cut", 9.0, is_usable=False)


@pytest.mark.parametrize(
    ("candidates", "pair"),
    [
        (answers(1.0, 3.0, -1.0, 2.0), ["answer 1", "answer 2"]),
        (answers(1.0, 2.0, 2.0, 1.0), ["answer 1", "answer 0"]),
        (answers(2.0, 2.0, 2.0), None),
        ([Answered("same", 1.0, is_usable=True), Answered("same", 2.0, is_usable=True)], None),
        ([CUT, *answers(0.0, 1.0)], ["answer 1", "answer 0"]),
        ([CUT, *answers(0.0)], None),
    ],
)
def test_pair_is_best_and_worst_usable_answer(candidates, pair):
    chosen = choose_pair(candidates)
    assert (chosen and [answer.text for answer in chosen]) == pair


class Collector:
    """Answer with the number of the answer, which is also its score; answers to prompt 2 have equal scores."""

    args = SimpleNamespace(per_device_eval_batch_size=5)

    def __init__(self, unscored=(), first=" 0"):
        self.calls, self.unscored, self.first = [], unscored, first

    def answer(self, prompts, numbers):
        self.calls.append(list(numbers))
        scores = [
            0.0 if prompt.content == "prompt 2" or n in self.unscored else float(n)
            for prompt, n in zip(prompts, numbers, strict=True)
        ]
        finished = [prompt.content != "prompt 3" for prompt in prompts]
        return SimpleNamespace(
            texts=[f" {n}" if n else self.first for n in numbers],
            scores=torch.tensor(scores),
            finished=torch.tensor(finished),
            scored=torch.tensor([n not in self.unscored for n in numbers]),
        )

    def read(self, answers):
        return answers.texts


PROMPTS = [PromptRow("here", [1], f"prompt {n}", {}) for n in range(5)]


def test_answers_are_numbered_and_counted():
    collector, counts = Collector(), PairCounts()
    rows = [row for batch in sample_pairs(collector, PROMPTS, 2, counts) for row in batch]
    assert collector.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [
        ("prompt 0", " 1", " 0"),
        ("prompt 1", " 3", " 2"),
        ("prompt 4", " 9", " 8"),
    ]
    assert (rows[-1]["score_chosen"], rows[-1]["score_rejected"]) == (9.0, 8.0)
    assert (counts.num_prompts, counts.num_pairs, counts.num_alike, counts.num_unfinished) == (5, 3, 1, 1)
    assert (counts.num_answers, counts.score_sum) == (10, 45.0 - 9.0)


@pytest.mark.parametrize("content", ["Why?", [{"role": "user", "content": "Why?"}]])
def test_row_has_preference_layout(content):
    prompt = PromptRow("here", [1], content, {})
    (row,) = next(iter(sample_pairs(Collector(), [prompt], 2, PairCounts())))
    entry = RawRow("here", 0, row)
    layout = detect_format(entry)
    assert layout.name == "preference"
    canonical = canonicalize(entry, layout)
    assert canonical.rejected


@pytest.mark.parametrize("first", ["", " \n", "a\0b", "\ud83d"])
def test_empty_or_invalid_answer_is_in_no_pair(first):
    collector = Collector(first=first)
    rows = [row for batch in sample_pairs(collector, PROMPTS[:2], 3, PairCounts()) for row in batch]
    assert [(row["chosen"], row["rejected"]) for row in rows] == [(" 2", " 1"), (" 5", " 3")]


def test_unscored_answer_is_excluded_from_pairs_and_mean():
    collector, counts = Collector(unscored=(0, 3, 4)), PairCounts()
    rows = [row for batch in sample_pairs(collector, PROMPTS[:2], 3, counts) for row in batch]
    assert [(row["chosen"], row["rejected"]) for row in rows] == [(" 2", " 1")]
    assert (counts.num_unfinished, counts.num_answers, counts.score_sum) == (1, 3, 1.0 + 2.0 + 5.0)


class Killed(Exception):
    """Stand-in for a kill of the process."""


def killed_after(batches, number):
    for at, batch in enumerate(batches):
        if at == number:
            raise Killed
        yield batch


@dataclass(kw_only=True)
class Numbers(Counts):
    """Number of rows."""

    num_rows: int = 0


def open_file(path, key="key", **options):
    return RowFile(path, {"key": key}, Numbers(), what="rows of something else", **options)


def count_to(counts, stop):
    for number in range(counts.num_rows, stop, 2):
        rows = [{"number": each, "text": "é"} for each in range(number, min(number + 2, stop))]
        counts.num_rows += len(rows)
        yield rows


def test_row_file_resumes_after_last_complete_batch(tmp_path):
    whole, path = open_file(tmp_path / "whole.jsonl"), tmp_path / "rows.jsonl"
    whole.write(count_to(whole.counts, 5))
    first = open_file(path)
    with pytest.raises(Killed):
        first.write(killed_after(count_to(first.counts, 5), 2))
    with path.open("a") as file:
        file.write('{"half a row')
    again = open_file(path)
    assert again.counts.num_rows == 4
    again.write(count_to(again.counts, 5))
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert again.counts == whole.counts
    done = open_file(path)
    done.write(count_to(done.counts, 5))
    assert read_numbers(path) == list(range(5))


def read_numbers(path):
    return [row["number"] for row in read_rows(path)]


def test_error_of_a_failed_write_names_the_file(tmp_path):
    file, limits = open_file(tmp_path / "rows.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            file.write(iter([[{"text": "x" * 8192}]]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / "rows.jsonl")


def test_error_of_a_failed_truncation_names_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    open_file(path).write(iter([]))
    path.unlink()
    path.symlink_to("/dev/full")  # It can be opened for writing, and not truncated.
    with pytest.raises(OSError, match="Invalid argument") as caught:
        open_file(path).write(iter([]))
    assert caught.value.filename == str(path)


def test_row_file_rejects_other_key_and_foreign_file(tmp_path):
    file = open_file(tmp_path / "rows.jsonl", facts={"seed": 7})
    file.write(count_to(file.counts, 3))
    record = json.loads((tmp_path / "rows.jsonl.record.json").read_text())
    size = (tmp_path / "rows.jsonl").stat().st_size
    assert record == {"key": record["key"], "seed": 7, "num_rows": 3, "num_bytes": size}
    with pytest.raises(ConfigError, match="of something else"):
        open_file(tmp_path / "rows.jsonl", "another key")
    (tmp_path / "mine.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="not written by this command"):
        open_file(tmp_path / "mine.jsonl")
    with pytest.raises(ConfigError, match="not written by this command"):
        open_file(Path("/dev/null"))


def test_row_file_without_batches_restarts_with_any_key(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = open_file(path)
    with pytest.raises(Killed):
        first.write(killed_after(count_to(first.counts, 5), 0))
    with path.open("a") as file:
        file.write('{"half a row')
    for key in ("key", "mended"):
        again = open_file(path, key)
        assert again.counts == Numbers()
    again.write(count_to(again.counts, 5))
    assert read_numbers(path) == list(range(5))


def test_row_file_rejects_concurrent_writer(tmp_path):
    first, second = open_file(tmp_path / "rows.jsonl"), open_file(tmp_path / "rows.jsonl")

    def interrupted():
        for number, batch in enumerate(count_to(first.counts, 4)):
            if number == 1:
                with pytest.raises(ConfigError, match="is being written by another process"):
                    second.write(count_to(second.counts, 4))
            yield batch

    first.write(interrupted())
    # Its counts, read before the rows, would remove them.
    with pytest.raises(ConfigError, match="has just written it"):
        second.write(count_to(second.counts, 4))
    assert read_numbers(tmp_path / "rows.jsonl") == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:7])])
def test_row_file_with_missing_rows_is_rejected(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    first = open_file(path)
    first.write(count_to(first.counts, 4))
    damage(path)
    with pytest.raises(DataError, match=r"rows\.jsonl\.record\.json counts .*\n.*delete both"):
        open_file(path)
