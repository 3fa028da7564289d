"""Driver of the demo: files that it writes, configurations of its stages, and its printed results."""

import io
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.forked import run_script
from tests.rows import read_rows as read_lines
from tests.rows import read_source, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.commands.clean import main as clean
from recipes_lib.config.loader import load_config
from recipes_lib.corpus.decontamination import Index
from recipes_lib.data.sources.canonical import load_source
from recipes_lib.data.sources.formats import canonicalize, detect_format
from recipes_lib.data.sources.rows import RawRow
from recipes_lib.demo import stdlib_texts
from recipes_lib.demo import walkthrough as run
from recipes_lib.demo.stdlib_texts import QUESTIONS, Chat, build_chats, parse_module
from recipes_lib.demo.walkthrough import VOCAB_SIZE, ask, build_pairs, build_tokenizer, save_student, shorten
from recipes_lib.errors import ConfigError
from recipes_lib.models.vocabulary import CHATML_TOKENS, EOS_TOKEN, PAD_TOKEN
from recipes_lib.pipelines.pipeline import load_pipeline
from recipes_lib.rl.verifiers import exact_match

PIPELINE = Path(__file__).parents[2] / "recipes" / "pipelines" / "demo.yaml"


@pytest.fixture(scope="module")
def small(library):
    """Limit the demo to a part of the standard library and to fewer chats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib_texts, "MIN_CHARACTERS", 1)
        patch.setattr(run, "LIBRARY", library)
        patch.setattr(run, "MAX_CHATS", 600)
        yield


@pytest.fixture(scope="module")
def started(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("a demo")
    run.open_folder(folder)
    return folder, list(run.write_start(folder))


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200, markup=False, soft_wrap=True)


@pytest.fixture
def configs(started, monkeypatch):
    """Configuration of each stage, parsed in the folder of the demo with the outputs of earlier stages."""
    folder, _ = started
    monkeypatch.chdir(folder)
    for name in ("corpus", "pretrain", "sft", "reward"):
        (folder / name).mkdir(exist_ok=True)
    return {
        stage.name: load_config(stage.recipe, stage.argv)
        for stage in load_pipeline(PIPELINE).stages
        if stage.recipe not in ("corpus", "eval", "")
    }


def test_shipped_configs_find_demo_files(configs):
    for output_dir, parsed in configs.items():
        assert parsed.training["output_dir"] == output_dir
        assert Path(parsed.data.dataset_name).exists()
        assert Path(parsed.data.dataset_test_split).is_file()
        assert Path(parsed.model.model_name_or_path or parsed.model.tokenizer_name_or_path).is_dir()


def test_first_stage_cleans_corpus(started, monkeypatch, capsys):
    folder, _ = started
    monkeypatch.chdir(folder)
    stage = load_pipeline(PIPELINE).stages[0]
    clean([*stage.argv, "--workers", "1"])
    manifest = json.loads((folder / "corpus" / "corpus.json").read_text())
    held_out = [row["text"] for row in read_lines(Path("data/pretrain_held_out.jsonl"))]
    kept = [row.text for row in read_source(load_source("corpus"))]
    assert manifest["documents"] == len(kept)
    index = Index(13)
    for text in held_out:
        index.add("held out", text)
    assert not any(index.find(text) for text in kept)
    assert manifest["steps"]["near_duplicates"]["removed"]
    assert manifest["steps"]["pii"]["found"]["email"]
    assert capsys.readouterr().out.rstrip().endswith("corpus/report.html")


def test_both_students_have_equal_training(configs):
    labels, distill = (
        (parsed.model, parsed.data, parsed.tokens, {**parsed.training, "output_dir": None})
        for parsed in (configs["labels"], configs["distill"])
    )
    assert labels == distill
    assert configs["distill"].distillation.teacher_model_name_or_path == "pretrain"
    assert configs["labels"].model.model_name_or_path == "student"


def test_written_files_are_deterministic(started, tmp_path):
    folder, messages = started
    run.open_folder(tmp_path)
    assert len(list(run.write_start(tmp_path))) == len(messages)
    written = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    written = [path for path in written if path.parts[0] != "corpus"]
    assert len(written) > 6
    assert [(tmp_path / path).read_bytes() for path in written] == [(folder / path).read_bytes() for path in written]


def test_pipeline_keys_match_config_files(configs):
    """Each configuration can also be run alone in the folder of the demo."""
    files = {stage.name: stage.files[0] for stage in load_pipeline(PIPELINE).stages if stage.files}
    for name, parsed in configs.items():
        alone = load_config(parsed.recipe, ["--config", str(files[name])])
        assert (alone.training, alone.model, alone.rewards) == (parsed.training, parsed.model, parsed.rewards)
        assert alone.distillation == parsed.distillation


def test_failing_stage_ends_demo_with_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "write_start", lambda _: [])
    (tmp_path / "recipes" / "pipelines").mkdir(parents=True)
    (tmp_path / "recipes" / "pipelines" / "demo.yaml").write_text("output_dir: .\nstages: {corpus: {recipe: corpus}}")
    (tmp_path / "recipes" / "corpus.py").write_text("import sys; sys.exit(3)")
    monkeypatch.chdir(tmp_path)
    assert run.run_demo(tmp_path / "recipes" / "pipelines" / "demo.yaml", tmp_path / "out") == 3


def write_run(folder, figures, samples=(), keys=("eval_loss", "eval_exact_match", "eval_rewards/accuracies")):
    folder.mkdir()
    lines = [{"kind": "eval", **dict(zip(keys, values, strict=True))} for values in figures]
    write_rows(folder / "metrics.jsonl", [*lines[:1], {"kind": "train"}, *lines[1:]])
    write_rows(folder / "samples.jsonl", samples)


def test_output_shows_results_of_stages(tmp_path, console):
    def samples(prompt, *completions):
        return [
            {"step": step, "prompt": prompt.format(i), "completion": text, "reference": f"truth {i}"}
            for step, text in enumerate(completions)
            for i in range(20)
        ]

    keys = ("eval_loss", "eval_exact_match", "eval_bits_per_byte")
    write_run(
        tmp_path / "pretrain",
        [(7.5, 0, 3.6), (6, 0, 3), (4.25, 0, 2.15)],
        samples("text {}", "babble", "middle", "python"),
        keys,
    )
    chat = "<|im_start|>user\nquestion {}<|im_end|>\n<|im_start|>assistant\n"
    write_run(tmp_path / "sft", [(5, 0.1, 0), (2, 0.5, 0)], samples(chat, "", "an [answer]"))
    write_run(tmp_path / "lora", [(5, 0, 0), (2, 0.61, 0)], samples(chat, "a long answer", "Brief."))
    write_run(tmp_path / "reward", [(0.7, 0, 0.53), (0.4, 0, 0.82)])
    write_run(tmp_path / "dpo", [(0.69, 0.5, 0), (0.31, 0.56, 0.91)])
    answered = [
        {**sample, "reference": None, "reward": sample["step"] - 0.5} for sample in samples(chat, "maybe", "sure")
    ]
    keys = ("eval_reward", "eval_reward/exact_match", "eval_reward/reward_model", "objective/kl_seq")
    write_run(tmp_path / "ppo", [(0.65, 0.66, -0.25, 0.0), (0.77, 0.74, 0.13, 1.75)], answered, keys)
    write_run(tmp_path / "grpo", [(0.51,), (0.63,)], answered, keys[:1])
    for name, before, after in (("labels", 3.6, 2.4), ("distill", 3.6, 2.35)):
        write_run(tmp_path / name, [(before,), (after,)], keys=("eval_bits_per_byte",))
    (tmp_path / "reward" / "reward_report.json").write_text('{"failed_gates": ["accuracy is low"]}')
    (tmp_path / "sft" / "report.html").touch()
    run.show_answers(tmp_path, console)
    run.show_figures(tmp_path, console)
    run.show_students(tmp_path, console)
    run.show_verdict(tmp_path, console)
    run.show_places(tmp_path, ["sft", "comparison"], console)
    output = console.file.getvalue()
    assert "comparison/report.html" not in output
    words = "babble python (nothing) 7.50 4.25 10% 50% Brief. 61% 53% 82% 0.31 56% 91% -0.25 74% 1.75 51% 63%"
    excerpts = ("an [answer]", "truth 1", "accuracy is low", "maybe  (reward -0.50)", "sure  (reward 0.50)")
    for text in (
        *words.split(),
        "2.150",
        "2.400",
        "2.350",
        *excerpts,
        "gains 0.050 bits, 20% of the way",
        "report.html",
    ):
        assert text in output
    assert "middle" not in output
    assert "<|im" not in output
    assert "\nquestion 3\n" in output
    (tmp_path / "reward" / "reward_report.json").write_text('{"failed_gates": []}')
    run.show_verdict(tmp_path, console)
    assert console.file.getvalue().endswith("\nIs the reward model good enough for PPO? Yes, it passes every gate.\n")


def test_printed_snippet_runs(tiny_model_dir, tmp_path, console):
    write_run(tmp_path / "sft", [], [{"prompt": '<|im_start|>user\nIt\'s "so"?<|im_end|>\n'}])
    shutil.copytree(tiny_model_dir, tmp_path / "sft", dirs_exist_ok=True)
    run.show_places(tmp_path, ["sft"], console)
    snippet = console.file.getvalue().partition("Ask it yourself")[2].partition("\n")[2]
    script = tmp_path / "snippet.py"
    script.write_text("\n".join(line.strip() for line in snippet.splitlines()))
    assert run_script(script).returncode == 0


def test_invalid_folder_is_rejected(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        run.open_folder(tmp_path / "file")


TEXTS = [f"def function_{number}(argument):\n    return argument + {number}\n" * 3 for number in range(300)]
TOKENIZER = build_tokenizer(TEXTS)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trip(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_are_first_and_end_turns():
    assert TOKENIZER.convert_tokens_to_ids([EOS_TOKEN, PAD_TOKEN, *CHATML_TOKENS]) == [0, 1, 2, 3]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    prompt = TOKENIZER.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.apply_chat_template(chat, tokenize=False) == prompt + "Ho<|im_end|>\n"


def test_saved_student_and_tokenizer_load(tmp_path):
    sizes = [save_student(tmp_path / str(seed), TOKENIZER, seed) for seed in (0, 1)]
    first, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "01")
    assert first != other
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    assert sizes == [student.num_parameters()] * 2
    assert (
        len(TOKENIZER) == len(AutoTokenizer.from_pretrained(tmp_path / "0")) == student.config.vocab_size <= VOCAB_SIZE
    )


def make_chats(*answers, question=QUESTIONS[0]):
    return [Chat(question, f"prompt {number}", answer) for number, answer in enumerate(answers)]


def texts_of(pair):
    return tuple(message["content"] for column in ("prompt", "chosen", "rejected") for message in pair[column])


def test_brief_answers():
    line = "def _get(self, a, b=1)"
    chats = build_chats([parse_module("heapq", f'{line}:\n    """Copy it."""\n'.encode())], seed=0).train
    brief = {chat.prompt: chat.answer for chat in shorten(chats)}
    assert brief == {
        f"Briefly: What is `{line}`?": "A private method.",
        f"Briefly: How many parameters does `{line}` have?": "Two.",
        f"Briefly: Can `{line}` be called without arguments?": "No.",
        'Briefly: What does it do? Its documentation says: "Copy it."': "Copies.",
    }


def test_brief_form_is_contained_in_answer(chats):
    short = [chat for chat in chats.held_out if chat.question.brief]
    assert {chat.question for chat in chats.held_out} - {chat.question for chat in short} == {QUESTIONS[3]}
    for long, brief in zip(short, shorten(chats.held_out), strict=True):
        assert brief.prompt == f"Briefly: {long.prompt}"
        assert brief.answer.rstrip(".").lower() in long.answer.lower()
        assert len(brief.answer) < len(long.answer)


def test_rejected_answer_is_answer_to_same_question_kind(chats):
    right = {chat.prompt: chat for chat in chats.held_out}
    answers = {(chat.question, chat.answer) for chat in chats.held_out}
    rows = list(build_pairs(chats.held_out))
    entries = [RawRow("demo", number, row) for number, row in enumerate(rows)]
    row_format = detect_format(entries[0])
    assert row_format.name == "preference"
    assert all(canonicalize(entry, row_format).rejected for entry in entries)
    pairs = [texts_of(row) for row in rows]
    assert len({prompt for prompt, _, _ in pairs}) == len(pairs) > 0.8 * len(chats.held_out)
    for prompt, chosen, rejected in pairs:
        assert chosen == right[prompt].answer != rejected
        assert (right[prompt].question, rejected) in answers


def test_answers_are_chosen_and_rejected_equally_often(chats):
    pairs = [texts_of(pair) for pair in build_pairs(chats.train[:1000])]
    assert Counter((chosen, rejected) for _, chosen, rejected in pairs) == Counter(
        (rejected, chosen) for _, chosen, rejected in pairs
    )


def test_pairs_keep_order_of_chats():
    pairs = [texts_of(pair) for pair in build_pairs(make_chats("a", "a", "b", "a", "c", "a"))]
    places = {"prompt 0": ("a", "b"), "prompt 1": ("a", "c"), "prompt 2": ("b", "a"), "prompt 4": ("c", "a")}
    assert pairs == [(prompt, *answers) for prompt, answers in places.items()]
    assert not list(build_pairs([*make_chats("a"), *make_chats("b", question=QUESTIONS[1])])), (
        "questions of other kinds"
    )


def test_prompt_row_is_verifiable(chats):
    for chat in chats.held_out[:20]:
        row = ask(chat)
        assert row["prompt"] == chat.row["messages"][:1]
        assert exact_match(completions=[chat.row["messages"][1:]], solution=[row["solution"]]) == [1.0]
