"""The reward recipe end to end; scores of the saved model and adapter, compared with plain transformers and PEFT."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.forked import run_script
from tests.recipes.preferences import make_rows
from tests.rows import read_events, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.adapters.saved import find_shareable
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.heads.scoring import RewardModel, encode_answers

RECIPE = Path(__file__).parents[2] / "recipes" / "reward.py"


def run(model_dir: Path, folder: Path, **keys: object) -> subprocess.CompletedProcess[str]:
    given = {
        "model_name_or_path": model_dir,
        "dataset_name": folder / "pairs.jsonl",
        "output_dir": folder / "out put",
        "prepared_dir": folder / "prepared",
        "test_split_size": 8,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "bf16": False,
        "eval_steps": 2,
        "save_steps": 2,
        **keys,
    }
    return run_script(RECIPE, given)


@pytest.fixture(scope="module")
def folder(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    write_rows(folder / "pairs.jsonl", make_rows(24))
    run(tiny_model_dir, folder)
    return folder


def test_run_writes_model_verdict_and_report(folder):
    out = folder / "out put"
    record = json.loads((out / "run.json").read_text())
    verdict = json.loads((out / "reward_report.json").read_text())
    assert record["status"] == "done"
    assert record["failed_gates"] == verdict["failed_gates"]
    assert record["pairs"]["layout"] == "shared"
    assert verdict["num_pairs"] == 8
    assert "Ready for RL" in (out / "report.html").read_text()
    assert not (out / "training_args.bin").exists()
    evaluations = read_events(out, "eval")
    assert [event["step"] for event in evaluations] == [0, 2, 4]
    assert all("eval_rewards/accuracies" in event for event in evaluations)


def test_scores_match_plain_transformers(folder):
    out = folder / "out put"
    reward_model = RewardModel.load(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    plain = AutoModelForSequenceClassification.from_pretrained(out)
    chats = [
        [{"role": "user", "content": "What is 2 plus 2?"}, {"role": "assistant", "content": answer}]
        for answer in ("It is 4.", "Who knows, perhaps it is 2 or more.")
    ]
    rows = encode_answers(reward_model.tokenizer, chats)
    # As docs/reward.md says: the line feed after the end token is removed.
    texts = [tokenizer.apply_chat_template(chat, tokenize=False).removesuffix("\n") for chat in chats]
    assert tokenizer(texts, add_special_tokens=False)["input_ids"] == rows
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        raw = plain(**batch).logits[:, 0]
    config = plain.config
    expected = (raw - config.reward_mean) / config.reward_std
    assert reward_model.score(chats) == pytest.approx(expected.tolist(), abs=1e-4)


def test_adapter_scores_match_plain_peft(tiny_model_dir, tmp_path):
    write_rows(tmp_path / "pairs.jsonl", make_rows(24))
    done = run(tiny_model_dir, tmp_path, use_peft=True, lora_r=4, shared_prompt=False)
    assert "LOAD REPORT" not in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    out = tmp_path / "out put"
    # Answers are packed although prompts are not shared.
    pairs = json.loads((out / "run.json").read_text())["pairs"]
    assert pairs == {"implementation": "sdpa", "layout": "separate", "packing": True, "reason": ""}
    reward_model = RewardModel.load(out)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    plain = PeftModel.from_pretrained(base, out).eval()
    chats = [[{"role": "user", "content": "Add."}, {"role": "assistant", "content": f"It is {n}."}] for n in range(4)]
    raw = [plain(input_ids=torch.tensor([row])).logits.item() for row in encode_answers(reward_model.tokenizer, chats)]
    scale = json.loads((out / "reward_scale.json").read_text())
    assert scale == json.loads((out / "reward_report.json").read_text())["scale"]
    expected = [(score - scale["mean"]) / scale["std"] for score in raw]
    assert reward_model.score(chats) == pytest.approx(expected, abs=1e-4)

    policy: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    folder, _ = find_shareable(str(out), None, policy.config, is_quantized=False)
    add_loss_head(policy)
    trunk = add_adapter(policy, AdapterConfig(use_peft=True), seed=0)
    assert RewardModel.share(trunk, folder).score(chats) == pytest.approx(expected, abs=1e-5)
    wrong = [
        '{"mean": 0, "std": 0}',
        '{"mean": NaN, "std": 1}',
        '{"mean": 0, "std": -1}',
        '{"mean": "a", "std": 1}',
        "[]",
    ]
    for text in wrong:
        (out / "reward_scale.json").write_text(text)
        with pytest.raises(ConfigError, match=r"has no valid reward_scale\.json"):
            RewardModel.load(out)
    (out / "reward_scale.json").unlink()
    with pytest.raises(ConfigError, match=r"has no valid reward_scale\.json"):
        RewardModel.load(out)
