"""``recipes prepare``, ``recipes preview`` and ``recipes report``."""

import json
import re
import subprocess
import sys

import pytest
from tests.rows import write_rows

from recipes_lib.cli import main


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


def test_prepare_reports_data_and_reuses_it(argv, capsys):
    assert main(["prepare", *argv]) == 0
    first = capsys.readouterr().out
    assert "prepared in" in first
    assert main(["prepare", *argv]) == 0
    second = capsys.readouterr().out
    assert "already prepared" in second
    assert first.split("key")[1] == second.split("key")[1]


def test_prepare_includes_eval_datasets(argv, tmp_path, capsys):
    assert main(["prepare", *argv]) == 0
    alone = capsys.readouterr().out
    more = tmp_path / "more.jsonl"
    more.write_text((tmp_path / "chats.jsonl").read_text().replace("<b>", ""))
    assert main(["prepare", *argv, f"--eval_datasets={{more: '{more}'}}"]) == 0
    output = capsys.readouterr().out
    assert "prepared in" in output
    # The training rows are unchanged.
    assert re.search(r"key .*", output).group() == re.search(r"key .*", alone).group()
    assert len(re.findall(r"^more: /", output, re.MULTILINE)) == 1
    assert main(["prepare", *argv, f"--eval_datasets={{more: '{more}'}}"]) == 0
    assert "already prepared" in capsys.readouterr().out


def test_second_prepare_imports_no_torch(argv, capsys):
    assert main(["prepare", *argv]) == 0
    code = (
        "import sys; from recipes_lib.cli import main; code = main(sys.argv[1:]); "
        "loaded = {'torch', 'transformers', 'datasets', 'tokenizers'} & set(sys.modules); sys.exit(code or len(loaded))"
    )
    assert subprocess.run([sys.executable, "-c", code, "prepare", *argv], check=False, timeout=120).returncode == 0


def test_preview_shows_rows_and_writes_escaped_html(argv, tmp_path, capsys):
    page = tmp_path / "rows.html"
    assert main(["preview", *argv, "--rows", "2", "--html", str(page)]) == 0
    assert "chats.jsonl:2" in capsys.readouterr().out
    assert "<b>" not in page.read_text().split("<body>")[1].replace("<br>", "")


def test_ppo_prepares_nothing_and_previews_prompts(argv, capsys):
    keys = [flag for flag in argv if not flag.startswith("--prepared_dir")]
    keys += ["--reward_funcs=[a.b:c]", "--recipe=ppo"]
    assert main(["prepare", *keys]) == 2
    assert "nothing to prepare" in capsys.readouterr().err
    assert main(["preview", *keys, "--rows", "1"]) == 0
    output = capsys.readouterr().out
    assert "<b>0</b>?" in output
    assert "assistant" in output
    assert "0." not in output.partition("assistant")[2]


def test_report_prints_path_and_rejects_folder_without_run(tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps({"stage": "sft", "status": "running", "config": {}}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 2.0}) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("command", "own"), [("prepare", []), ("preview", ["--rows", "--html"])])
def test_help_shows_only_own_options(command, own, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "-h"])
    assert caught.value.code == 0
    output = set(re.findall(r"--[a-z_]+", capsys.readouterr().out))
    assert output == {"--help", "--recipe", "--stage", "--config", "--key", *own}
