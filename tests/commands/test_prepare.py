"""``recipes prepare`` and ``recipes preview``."""

import re

import pytest
from tests.forked import run_python
from tests.rows import write_rows


@pytest.fixture
def argv(tmp_path, tiny_model_dir):
    chats = tmp_path / "chats.jsonl"
    rows = (
        {"messages": [{"role": "user", "content": f"<b>{n}</b>?"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(6)
    )
    write_rows(chats, rows)
    keys = {"model_name_or_path": tiny_model_dir, "dataset_name": chats, "output_dir": tmp_path / "out"}
    return [f"--{name}={value}" for name, value in (keys | {"prepared_dir": tmp_path / "prepared"}).items()]


def test_prepare_includes_eval_datasets(argv, tmp_path, recipes):
    alone = recipes("prepare", *argv)
    more = tmp_path / "more.jsonl"
    more.write_text((tmp_path / "chats.jsonl").read_text().replace("<b>", ""))
    output = recipes("prepare", *argv, f"--eval_datasets={{more: '{more}'}}")
    assert "prepared in" in output
    # The training rows are unchanged.
    assert re.search(r"key .*", output).group() == re.search(r"key .*", alone).group()
    assert len(re.findall(r"^more: /", output, re.MULTILINE)) == 1
    assert "already prepared" in recipes("prepare", *argv, f"--eval_datasets={{more: '{more}'}}")


def test_second_prepare_imports_no_torch(argv, recipes):
    recipes("prepare", *argv)
    code = (
        "import sys; from recipes_lib.cli import main; assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'transformers', 'datasets', 'tokenizers'} & sys.modules.keys()"
    )
    run_python(code, "prepare", *argv)


def test_preview_shows_rows_and_writes_escaped_html(argv, tmp_path, recipes):
    page = tmp_path / "rows.html"
    output = recipes("preview", *argv, "--rows", "2", "--html", page)
    assert re.findall(r"chats.jsonl:\d", output) == ["chats.jsonl:1", "chats.jsonl:2"]
    assert output.endswith(f"written to {page}\n")
    assert "<b>" not in page.read_text().split("<body>")[1].replace("<br>", "")


def test_preview_without_a_row_says_why(argv, recipes):
    output = recipes("preview", *argv, "--loss_on=completion", "--broken_rows=drop", code=2)
    assert "6 of 6 rows (100.00%) are broken" in output
    assert "loss_on: completion does not fit a chat" in output
    # An error at once, not after the rows that follow.
    output = recipes("preview", *argv, "--loss_on=completion", code=2)
    assert re.findall(r"chats.jsonl:\d", output) == ["chats.jsonl:1"]


def test_ppo_previews_prompts(argv, recipes):
    keys = [*argv, "--reward_funcs=[a.b:c]", "--recipe=ppo"]
    output = recipes("preview", *keys, "--rows", "1")
    assert "<b>0</b>?" in output
    assert "assistant" in output
    assert "0." not in output.partition("assistant")[2]


@pytest.mark.parametrize(("command", "own"), [("prepare", []), ("preview", ["--rows", "--html"])])
def test_help_shows_only_own_options(command, own, recipes):
    options = set(re.findall(r"--[a-z_]+", recipes(command, "-h")))
    assert options == {"--help", "--recipe", "--config", "--key", *own}
