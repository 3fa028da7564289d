"""The inspection of a fine-tuning run; its findings are read from end to end in ``tests/test_check.py``."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from recipes_lib.config.loader import load_config
from recipes_lib.inspection.sft import SFTInspection


@pytest.mark.parametrize(("template", "caution"), [("", False), ("{{ strftime_now('%Y') }}", True)])
def test_what_is_odd_about_a_template_is_told(tmp_path, tiny_model_dir, template, caution) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(4)))
    jinja = tmp_path / "template.jinja"
    jinja.write_text(template + (tiny_model_dir / "chat_template.jinja").read_text())
    keys = {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": chats,
        "output_dir": tmp_path / "out",
        "prepared_dir": tmp_path / "prepared",
        "chat_template_path": jinja,
    }
    config = load_config("sft", [f"--{name}={value}" for name, value in keys.items()])
    output = io.StringIO()
    inspection = SFTInspection(config, 1, Console(file=output, width=200, highlight=False))
    inspection.look_at_everything()
    assert not inspection.problems
    assert ("warning: the chat template writes today's date" in output.getvalue()) == caution
    assert "exact duplicates of earlier rows: 3" in output.getvalue()
