"""The DPO recipe end to end: every loss, references and adapters."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests.forked import run_script
from tests.recipes.preferences import RECIPE, make_rows, read_record, run_here, write_config
from tests.rows import read_events, write_rows
from tests.training.pairs import load_weights, perturb_model, train_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.losses.preference import PREFERENCE_LOSSES
from recipes_lib.training.trainers.reference import ReferenceLogps


def score_in_plain_transformers(folder):
    """Return the log-probabilities of both answers of each row; an answer ends with its end-of-turn token."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()

    def score(prompt, answer):
        head = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        text = tokenizer.apply_chat_template(prompt + answer, tokenize=False).removesuffix("\n")
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            logps = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        return logps[len(head) - 1 :].sum().item()

    return [[score(row["prompt"], row[name]) for name in ("chosen", "rejected")] for row in make_rows()]


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "pairs, größer.jsonl", make_rows())


def test_trained_model_prefers_chosen_answers_in_plain_transformers(recipe, tmp_path, tiny_model_dir, data):
    write_rows(data, make_rows()[:9])
    held_out = write_rows(tmp_path / "held out.jsonl", make_rows()[9:])
    keys = {"max_steps": 30, "beta": 0.5, "dataset_test_split": str(held_out), "sample_max_new_tokens": 4}
    config = write_config(tmp_path, tiny_model_dir, data, save_strategy="steps", num_sample_prompts=1, **keys)
    done = run_script(RECIPE, "--config", config)
    assert "step 0: loss 0.693147" in done.stderr
    output = tmp_path / "a run"
    names = {path.name for path in output.iterdir()}
    assert {"run.json", "metrics.jsonl", "samples.jsonl", "model.safetensors", "config.json", "README.md"} <= names
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "report.html", "reference"} <= names
    assert (output / "checkpoint-30" / "COMPLETE.json").exists()
    assert not {path.suffix for path in output.iterdir() if path.is_file()} & {".bin", ".pt", ".pkl"}
    record = read_record(output)
    assert record["status"] == "done"
    assert record["pairs"] == {"implementation": "sdpa", "layout": "shared", "packing": True, "reason": ""}
    assert record["data"]["train"]["num_pairs"] == 9

    train, evaluations = read_events(output), read_events(output, "eval")
    assert [event["step"] for event in train] == list(range(1, 31))
    figures = {"loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    figures |= {"logps/chosen", "logps/rejected_per_token", "logps/chosen_shift", "num_target_tokens"}
    assert figures <= train[0].keys()
    assert abs(train[0]["loss"] - math.log(2)) < 1e-5
    assert train[-1]["loss"] < 0.3
    assert (evaluations[0]["step"], evaluations[-1]["step"]) == (0, 30)
    assert {"eval_loss", "eval_rewards/margins", "eval_rewards/accuracies_stderr"} <= evaluations[0].keys()

    trained, before = (torch.tensor(score_in_plain_transformers(folder)) for folder in (output, tiny_model_dir))
    log_ratios = trained - before
    assert (log_ratios[:, 0] - log_ratios[:, 1] > 2).sum() >= 9
    # The last logged margins of the held-out pairs match plain transformers.
    margins = 0.5 * (log_ratios[:, 0] - log_ratios[:, 1])
    assert evaluations[-1]["eval_rewards/margins"] == pytest.approx(margins[9:].mean().item(), rel=1e-4)
    assert set(json.loads((output / "generation_config.json").read_text())["eos_token_id"]) == {0, 3}


# Losses without reference, with smoothing, and over unpaired answers; tests/losses covers the values of all.
QUICK_LOSSES = ("simpo", "orpo", "exo_pair", "aot_unpaired")


@pytest.mark.parametrize(
    "name", [name if name in QUICK_LOSSES else pytest.param(name, marks=pytest.mark.slow) for name in PREFERENCE_LOSSES]
)
def test_every_loss_trains(recipe, tmp_path, tiny_model_dir, data, monkeypatch, name):
    needs_none = name in ("simpo", "orpo", "sft")
    if needs_none:
        monkeypatch.setattr(ReferenceLogps, "compute", lambda *_, **__: pytest.fail("a reference was computed"))
    keys = {"label_smoothing": 0.1} if name in ("exo_pair", "robust", "aot", "aot_unpaired") else {}
    config = write_config(tmp_path, tiny_model_dir, data, loss_type=name, **keys)
    assert run_here(recipe, config) == 0
    events = read_events(tmp_path / "a run")
    assert len(events) == 2
    assert all(math.isfinite(event["loss"]) and 0 < event["grad_norm"] < math.inf for event in events)
    assert (tmp_path / "a run" / "reference").exists() == (not needs_none)


def test_separate_reference_model_is_used(recipe, tmp_path, tiny_model_dir, data):
    other = perturb_model(tiny_model_dir, tmp_path / "another model")
    losses = []
    for is_stored in (True, False):
        keys = {"ref_model_name_or_path": str(other), "precompute_ref_log_probs": is_stored, "max_steps": 1}
        config = write_config(tmp_path, tiny_model_dir, data, output=str(is_stored), **keys)
        assert run_here(recipe, config) == 0
        losses.append(read_events(tmp_path / str(is_stored))[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[0] - math.log(2)) > 1e-4


@pytest.mark.parametrize("is_fresh", [True, False])
def test_adapter_is_trained_and_saved_without_base(recipe, tmp_path, tiny_model_dir, data, is_fresh):
    keys = {"lora_r": 4} if is_fresh else {"adapter_name_or_path": str(train_adapter(tiny_model_dir, tmp_path / "sft"))}
    config = write_config(tmp_path, tiny_model_dir, data, use_peft=True, test_split_size=2, **keys)
    assert run_here(recipe, config) == 0
    output = tmp_path / "a run"
    names = {path.name for path in output.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names
    assert all(tensor.isfinite().all() for tensor in load_weights(output).values())
    events = read_events(output)
    assert abs(events[0]["loss"] - math.log(2)) < 1e-5
    assert events[1]["loss"] < events[0]["loss"]
