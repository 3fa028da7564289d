"""Losses per row, against ``log_softmax`` of each row alone, for any batch and window."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from recipes_lib.config.loader import load_config
from recipes_lib.data.sources.rows import Row
from recipes_lib.errors import DataError
from recipes_lib.training.evaluation.row_scores import load_row_scorer
from recipes_lib.training.layouts.launch_environment import Launch

TEXTS = [
    "Rivers carry sand towards the sea.",
    "x",
    "Every morning the baker opens the shop, weighs flour and water, and waits until the bread has risen. " * 3,
    "naïve ümläut, 日本, 🙂",
]


@pytest.fixture(scope="module")
def build(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")

    def call(model=tiny_model_dir, **keys):
        # float32, because scores are compared to 1e-5; CPUs with bfloat16 in hardware would choose bfloat16.
        keys = {"model_name_or_path": model, "output_dir": folder, "dataset_name": "d", "bf16": False, **keys}
        config = load_config("sft", [f"--{name}={value}" for name, value in keys.items()])
        return load_row_scorer(config, Launch(0, 0, 1, ""))

    return call


def make_rows(texts):
    return [Row(where=f"d row {index}", text=text) for index, text in enumerate(texts)]


def compute_expected(model, tokenizer, text):
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    with torch.no_grad():
        logps = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    nll = -sum(logps[at, ids[at + 1]].item() for at in range(len(ids) - 1))
    first = len(tokenizer.decode(ids[:1]).encode())
    return nll, len(ids) - 1, len(text.encode()) - first


def test_scores_equal_log_softmax_of_each_row(build, tiny_model_dir, tiny_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    scores = build(per_device_eval_batch_size=3).score(make_rows(TEXTS))
    for score, text in zip(scores, TEXTS, strict=True):
        nll, num_targets, num_bytes = compute_expected(model, tiny_tokenizer, text)
        assert (score.num_targets, score.num_bytes) == (num_targets, num_bytes)
        assert score.nll == pytest.approx(nll, rel=1e-5)
        assert score.loss == pytest.approx(nll / num_targets, rel=1e-5)
    assert scores[0].bits_per_byte == pytest.approx(scores[0].nll / math.log(2) / scores[0].num_bytes)
    assert scores[1].num_bytes == 0
    assert scores[1].bits_per_byte is None


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_scores_do_not_depend_on_batch_layout_and_order(build, layout):
    alone = [score for text in TEXTS for score in build(per_device_eval_batch_size=1).score(make_rows([text]))]
    scorer = build(per_device_eval_batch_size=4)
    # Without boundaries: a CPU has no kernel for them. Only the bookkeeping of the flat layout is tested here.
    if layout == "flat":
        collate = dataclasses.replace(scorer.collate, layout="flat")
        scorer = dataclasses.replace(scorer, collate=lambda rows: drop_boundaries(collate(rows)))
    together = scorer.score(make_rows(TEXTS[::-1]))[::-1]
    for one, other in zip(alone, together, strict=True):
        assert one[1:] == other[1:]
        assert one.nll == pytest.approx(other.nll, rel=1e-5)


def drop_boundaries(batch):
    return {name: value for name, value in batch.items() if "seq_lens" not in name and "max_length" not in name}


def test_long_row_is_scored_in_windows(build, tiny_tokenizer, tiny_model_dir):
    text = TEXTS[2]
    ids = [*tiny_tokenizer(text).input_ids, tiny_tokenizer.eos_token_id]
    (score,) = build(max_length=16, per_device_eval_batch_size=2).score(make_rows([text]))
    assert score.num_targets == len(ids) - 1
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    nll = 0.0
    for start in range(0, len(ids) - 1, 15):
        window = torch.tensor([ids[start : start + 16]])
        with torch.no_grad():
            nll += float(model(window, labels=window).loss) * (window.shape[1] - 1)
    assert score.nll == pytest.approx(nll, rel=1e-5)


def test_adapter_is_scored_on_its_base(build, tiny_model_dir, tmp_path, tiny_tokenizer):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    adapted = get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (score,) = build(tmp_path).score(make_rows(TEXTS[:1]))
    (base,) = build().score(make_rows(TEXTS[:1]))
    nll, _, _ = compute_expected(adapted.eval(), tiny_tokenizer, TEXTS[0])
    assert score.nll == pytest.approx(nll, rel=1e-5)
    assert abs(score.nll - base.nll) > 1e-2


def test_non_finite_loss_names_row(build):
    scorer = build()
    with torch.no_grad():
        scorer.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(DataError, match=r"d row 0.*not finite"):
        scorer.score(make_rows(TEXTS[:1]))
