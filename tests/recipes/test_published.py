"""An adapter of a Hub model, published during training, and loaded from the Hub."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml
from tests.forked import ROOT
from tests.rows import write_rows

# Plain transformers and PEFT, by name and revision.
READ_BACK = """
import sys
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
name, *revisions = sys.argv[1:]
for revision in revisions:
    config = PeftConfig.from_pretrained(name, revision=revision)
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, revision=config.revision)
    model = PeftModel.from_pretrained(base, name, revision=revision)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    chat = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    print(round(model(**ids).logits.abs().sum().item(), 3))
"""


@pytest.mark.slow
def test_published_adapter_checkpoints_load_from_hub(hub, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    files = {path.name: path.read_bytes() for path in tiny_model_dir.iterdir()}
    base = hub.add("owner/base", private=False, files=files).find("main").oid
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(n)}]} for n in range(8)
    ]
    write_rows(tmp_path / "chats.jsonl", rows)
    keys = {
        "model_name_or_path": "owner/base",
        "dataset_name": str(tmp_path / "chats.jsonl"),
        "output_dir": str(tmp_path / "mine"),
        "prepared_dir": str(tmp_path / "prepared"),
        "max_length": 64,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "push_to_hub": "true",
        "hub_strategy": "checkpoint",
        "hub_always_push": "true",
    }
    flags = [word for name, value in keys.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(ROOT / "recipes" / "lora.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "publishes to me/mine, private, which will be created" in done.stderr
    assert f"published at {hub.endpoint}/me/mine: 3 commits\n" in done.stderr

    repository = hub.repositories["me/mine"]
    assert set(repository.tags) == {"step-2", "step-4"}
    last = repository.find("main").files
    settings = json.loads(last["adapter_config.json"])
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("owner/base", base)
    described = yaml.safe_load(last["README.md"].decode().split("---")[1])
    assert (described["base_model"], described["base_model_relation"]) == ("owner/base", "adapter")
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/COMPLETE.json"} <= set(last)
    assert not [name for name in last if "optimizer" in name and "/" not in name]
    assert str(tmp_path) not in (last["README.md"] + last["run.json"]).decode()

    command = [sys.executable, "-c", READ_BACK, "me/mine", "step-2", "step-4", "main"]
    read = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    assert len(set(read.stdout.split())) == 2
