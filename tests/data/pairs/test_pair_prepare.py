"""``recipes prepare`` for pairs says what it made, makes it once, and explains itself."""

import pytest
from tests.rows import write_rows
from transformers import AutoTokenizer

from recipes_lib.commands.prepare import prepare


@pytest.mark.parametrize("recipe", ["reward", "dpo"])
def test_pairs_are_prepared_once_and_told(tmp_path, tiny_tokenizer_dir, capsys, recipe):
    rows = [{"prompt": f"{n} and {n}?", "chosen": f" {2 * n}", "rejected": f" {n} " * 3} for n in range(6)]
    data = tmp_path / "pairs.jsonl"
    write_rows(data, rows)
    argv = [
        f"--model_name_or_path={tiny_tokenizer_dir}",
        f"--dataset_name={data}",
        f"--output_dir={tmp_path / 'out'}",
        f"--prepared_dir={tmp_path / 'prepared'}",
        "--test_split_size=2",
    ]
    prepare(["--recipe", recipe, *argv], lambda _: AutoTokenizer.from_pretrained(tiny_tokenizer_dir))
    told = capsys.readouterr().out
    assert "prepared in" in told
    assert "4" in told.split("prompts")[0]
    prepare(["--recipe", recipe, *argv], lambda _: pytest.fail("tokenised again"))
    assert "nothing to do: already prepared" in capsys.readouterr().out


def test_help_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        prepare(["--recipe", "dpo", "--help"], lambda _: pytest.fail("asked for a tokenizer"))
    assert "--config" in capsys.readouterr().out
