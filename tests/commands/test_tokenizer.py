"""``recipes tokenizer``: training, the held-out tail, and errors reported before training."""

import functools
import re

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tests.faults.moments import kill_at_call
from tests.rows import write_rows
from transformers import AutoTokenizer

from recipes_lib.commands.tokenizer import MAX_TAIL_BYTES, MAX_TAIL_SHARE, HeldOutTail, read_texts
from recipes_lib.data.chat.templates import ChatTemplate
from recipes_lib.data.sources.canonical import load_source
from recipes_lib.data.sources.mixtures import Mixture, Part
from recipes_lib.data.sources.rows import Row
from recipes_lib.models import vocabulary
from recipes_lib.models.vocabulary import CHATML_TEMPLATE, EOS_TOKEN, measure_usage, train_tokenizer

TEXTS = [f"the {n:03}th function returns the sum of its {n:03} arguments\n  and nothing else\n" for n in range(400)]
CHAT = [{"role": "user", "content": "How many days?"}, {"role": "assistant", "content": "Seven days."}]


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture
def run(recipes):
    return functools.partial(recipes, "tokenizer")


def open_data(path, **options):
    return Mixture(parts=[Part(source=load_source(str(path), **options))])


def test_tokenizer_is_trained_and_measured(run, data, tmp_path):
    output = run(data, "--vocab_size", 400, "--output_dir", tmp_path / "out", "--chat_template", "chatml")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == 400
    assert (tokenizer.eos_token, tokenizer.chat_template) == (EOS_TOKEN, CHATML_TEMPLATE)
    assert "400 tokens, 4 of them special" in output
    # Training text and tail are all of the data, in order.
    tail = TEXTS[-20:]
    for label, texts in (("training text", TEXTS[:-20]), ("held-out tail", tail)):
        usage = measure_usage(tokenizer, texts)
        (line,) = (line for line in output.splitlines() if line.startswith(label))
        assert f"{sum(map(len, texts)):,} bytes, {usage.counts.sum():,} tokens" in line
        assert f"{usage.bytes_per_token:.3f} bytes a token" in line
    for name in (["--dataset_name", data], [f"--dataset_name={data}"]):  # As recipes name it.
        flags = ["--vocab_size", 400, *name, "--chat_template", "chatml", "--output_dir", tmp_path / str(len(name))]
        assert run(*flags).partition("written to")[0] == output.partition("written to")[0]


def test_held_out_tail_is_not_trained_on(run, tmp_path):
    texts = [*TEXTS[:380], *["zqzq zqzq zqzq"] * 5]
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    run(data, "--vocab_size", 400, "--output_dir", tmp_path / "out")
    assert not any("zq" in token for token in AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab())


def test_command_killed_in_measurement_runs_again(run, data, tmp_path):
    command = functools.partial(run, data, "--vocab_size", 350, "--output_dir", tmp_path / "out")
    kill_at_call(command, vocabulary, "measure_usage", 2)
    assert "held-out tail" in command()


def test_folder_with_files_is_refused_before_reading(run, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    error = run(tmp_path / "gone.jsonl", "--vocab_size", 301, "--output_dir", tmp_path, code=2)
    assert "is not empty" in error
    assert "gone.jsonl" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_too_large_vocab_size_names_possible_size(run, data, tmp_path):
    error = run(data, "--vocab_size", 50_000, "--output_dir", tmp_path / "out", code=2)
    possible_size = int(error.split("--vocab_size ")[-1].split(":")[0])
    assert f"yields {possible_size:,} tokens" in error
    assert not (tmp_path / "out").exists()
    run(data, "--vocab_size", possible_size, "--output_dir", tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == possible_size


def test_invalid_flags_are_reported_together_before_reading(run, tmp_path):
    error = run(
        *("gone.jsonl", "--vocab_size", 200, "--output_dir", tmp_path / "out"),
        *("--special_token", "x", "<tool>", "--chat_template", tmp_path / "gone.jinja"),
        code=2,
    )
    assert "200 is too small for 256 bytes and 4 special tokens" in error
    assert "write 260 or more" in error
    assert "'x' cannot be a special token" in error
    assert "gone.jinja cannot be read" in error
    assert "gone.jsonl" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for message in messages %}", "does not compile"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ends in no special token"),
        ("{{ raise_exception('never') }}", "never"),
        ("hello", "message"),
    ],
)
def test_invalid_chat_template_is_rejected(run, data, tmp_path, template, message):
    (tmp_path / "mine.jinja").write_text(template)
    command = (data, "--vocab_size", 300, "--output_dir", tmp_path / "out", "--chat_template", tmp_path / "mine.jinja")
    error = run(*command, code=2)
    assert message in error
    assert "--chat_template" in error


def test_custom_template_with_custom_special_tokens(run, data, tmp_path):
    template = "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    flags = ("--special_token", "<turn>", "<end>", "--chat_template", tmp_path / "mine.jinja")
    run(data, "--vocab_size", 300, "--output_dir", tmp_path / "out", *flags)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == template
    assert tokenizer.convert_tokens_to_ids(["<turn>", "<end>"]) == [2, 3]


def test_unreadable_data_are_reported_together(run, tmp_path):
    broken = write_rows(tmp_path / "rows.jsonl", [{"text": "good"}, {"text": 7}, {"text": "\ud800"}], ensure_ascii=True)
    flags = ("--vocab_size", 300, "--output_dir", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    error = run("./gone.jsonl", tmp_path / "empty", *flags, code=2)
    assert "./gone.jsonl: no such file" in error
    assert "the folder has no data file" in error
    assert "`text` is a number" in run(broken, *flags, code=2)
    assert "no rows" in run(write_rows(tmp_path / "none.jsonl", []), *flags, code=2)
    assert not (tmp_path / "out").exists()


def test_broken_rows_are_dropped_and_counted_if_asked_for(run, data, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [*({"text": text} for text in TEXTS), {"text": ""}])
    for name, path, flags in (("clean", data, ()), ("dropped", rows, ("--broken_rows", "drop"))):
        run(path, "--vocab_size", 300, "--output_dir", tmp_path / name, *flags)
    assert (tmp_path / "dropped/tokenizer.json").read_text() == (tmp_path / "clean/tokenizer.json").read_text()
    few = ("--broken_rows", "drop", "--max_broken_fraction", 0.001)
    assert "1 of 401 rows (0.25%) are broken" in run(
        rows, "--vocab_size", 300, "--output_dir", tmp_path / "o", *few, code=2
    )


def test_all_layouts_and_sources_are_read(run, tmp_path):
    write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 60)
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": "Capital? ", "completion": "Paris."}] * 60)
    Dataset.from_list([{"text": "saved to disk"}] * 60).save_to_disk(tmp_path / "saved")
    (tmp_path / "notes.txt").write_text("first line\n\nsecond line\n")
    sources = [tmp_path / name for name in ("chats.jsonl", "pairs.jsonl", "saved", "notes.txt")]
    run(*sources, "--vocab_size", 291, "--output_dir", tmp_path / "out")
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert {"Seven", "Capital", "ĠParis", "saved"} <= set(vocabulary)


def test_chats_are_rendered_with_template(tmp_path):
    rows = list(open_data(write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}])).rows())
    assert list(read_texts(rows, None)) == ["How many days?\nSeven days."]
    assert list(read_texts(rows, ChatTemplate(CHATML_TEMPLATE, {}))) == [
        "<|im_start|>user\nHow many days?<|im_end|>\n<|im_start|>assistant\nSeven days.<|im_end|>\n"
    ]


def test_chat_rejected_by_template_is_named(run, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    data = write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": [system, *CHAT]}])
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "{{ m.content }}<|endoftext|>{% endfor %}"
    )
    flags = ("--vocab_size", 300, "--output_dir", tmp_path / "out", "--chat_template", tmp_path / "mine.jinja")
    assert "chats.jsonl:2: the chat template refused the chat: no system turn" in run(data, *flags, code=2)


@given(text=st.text(st.sampled_from("ab \n\t\r."), max_size=60), repeats=st.integers(1, 300))
def test_sections_of_long_texts_preserve_pre_tokens(text, repeats):
    whole = text * repeats
    sections = list(read_texts([Row(where="here row 0", text=whole)], None))
    assert "".join(sections) == whole
    assert all(re.match(r"\S", section) for section in sections[1:])
    cut = train_tokenizer([], vocab_size=0).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    assert [piece for section in sections for piece, _ in cut(section)] == [piece for piece, _ in cut(whole)]


def test_long_text_file_has_held_out_tail(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("".join(TEXTS))
    tail = HeldOutTail()
    training = list(tail.split(read_texts(open_data(path, text_documents="file").rows(), None)))
    assert "".join([*training, *tail.texts]) == "".join(TEXTS)
    assert 0 < sum(map(len, tail.texts)) <= MAX_TAIL_SHARE * len("".join(TEXTS))


@given(st.lists(st.text(max_size=40), max_size=80))
def test_tail_is_at_most_five_percent(texts):
    tail = HeldOutTail()
    training = list(tail.split(iter(texts)))
    assert [*training, *tail.texts] == texts
    num_bytes = [len(text.encode()) for text in texts]
    held = sum(num_bytes[len(training) :])
    assert held <= MAX_TAIL_SHARE * sum(num_bytes)
    # One more text would exceed the share.
    assert not training or held + num_bytes[len(training) - 1] > MAX_TAIL_SHARE * sum(num_bytes)


def test_tail_size_is_bounded():
    tail, largest = HeldOutTail(), 0
    for _ in tail.split("x" * 100_000 for _ in range(400)):
        largest = max(largest, sum(map(len, tail.texts)))
    assert largest <= MAX_TAIL_BYTES + 100_000
    assert MAX_TAIL_BYTES - 100_000 < sum(map(len, tail.texts)) <= MAX_TAIL_BYTES
