"""``build_observer``: evaluation, samples and metrics of a recipe, without effect on training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.rows import read_events, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.config.schema import ChatConfig, DataConfig, EvaluationConfig, ModelConfig, RecipeConfig, TokensConfig
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.errors import ConfigError
from recipes_lib.training.evaluation.build import build_observer
from recipes_lib.training.evaluation.samples import GenerateSamples
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.monitoring.callbacks import Observer
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.next_token_trainer import SFTTrainer


@pytest.fixture
def config(tmp_path, tiny_model_dir):
    chats = tmp_path / "chats.jsonl"
    rows = (
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}, yes."}]}
        for n in range(20)
    )
    write_rows(chats, rows)
    return RecipeConfig(
        recipe="sft",
        path=None,
        data=DataConfig(dataset_name=str(chats), test_split_size=4),
        tokens=TokensConfig(max_length=64, prepared_dir=str(tmp_path / "prepared")),
        model=ModelConfig(model_name_or_path=str(tiny_model_dir)),
        evaluation=EvaluationConfig(
            num_sample_prompts=2,
            sample_max_new_tokens=4,
            metrics=["recipes_lib.training.evaluation.user_metrics:AnswerMatch"],
        ),
        training={
            "output_dir": str(tmp_path / "out"),
            "bf16": False,
            "activation_checkpointing": False,
            "max_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_on_start": True,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "save_strategy": "no",
        },
    )


def train(config, *, evaluates):
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_name_or_path)
    data = load_training_data(config, tokenizer)
    args = build_training_arguments(config, read_launch(), has_eval=evaluates)
    model = AutoModelForCausalLM.from_pretrained(config.model.model_name_or_path)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    collate = PackedCollator(pad_token_id=tokenizer.pad_token_id)
    observer = build_observer(config, data, args, model, tokenizer, collate)
    if not evaluates:
        observer = Observer(observer.counter, [], [], observer.progress)
    return SFTTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval if evaluates else None,
        data_collator=collate,
        processing_class=tokenizer,
        observer=observer,
    )


def test_evaluation_does_not_change_training(config, tmp_path):
    (tmp_path / "out").mkdir()
    weights = []
    for evaluates in (True, False):
        trainer = train(config, evaluates=evaluates)
        trainer.train()
        weights.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    evaluations = read_events(tmp_path / "out", "eval")
    assert [event["step"] for event in evaluations] == [0, 1, 2, 3]
    assert {"eval_loss", "eval_bits_per_byte", "eval_stop_rate", "eval_exact_match"} <= evaluations[0].keys()
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 8


def test_prompts_without_room_for_an_answer_are_not_scored(config, capsys):
    """``sample_max_new_tokens`` of 510 in 512 positions leaves no room for any of the prompts."""
    config = replace(config, evaluation=replace(config.evaluation, sample_max_new_tokens=510))
    with pytest.raises(ConfigError, match="leave room for sample_max_new_tokens"):
        train(config, evaluates=True)
    train(replace(config, evaluation=replace(config.evaluation, metrics=None)), evaluates=True)
    assert "4 held-out prompts leave no room for sample_max_new_tokens 510 in the 512 pos" in capsys.readouterr().err


def test_system_prompt_is_in_data_and_samples(config):
    keys = replace(config.evaluation, sample_prompts=["Hello?"], metrics=None)
    config = replace(config, chat=ChatConfig(system_prompt="Be brief."), evaluation=keys)
    trainer = train(config, evaluates=True)
    (sampling,) = (hook for hook in trainer.observer.hooks if isinstance(hook, GenerateSamples))
    for ids in (
        sampling.prompts[0].input_ids,
        trainer.eval_dataset[0]["input_ids"],
        trainer.train_dataset[0]["input_ids"],
    ):
        assert "Be brief." in trainer.processing_class.decode(ids)


def test_metric_without_references_is_rejected(config):
    config = replace(config, evaluation=replace(config.evaluation, sample_prompts=["Hello?"]))
    with pytest.raises(ConfigError, match="no sample prompt has a reference"):
        train(config, evaluates=True)


def test_audit_warnings_are_logged_before_training(config, caplog):
    path = Path(config.data.dataset_name)
    path.write_text(path.read_text() + '{"messages": []}\n')
    tokens = replace(config.tokens, broken_rows="drop", max_broken_fraction=0.1)
    train(replace(config, tokens=tokens), evaluates=True)
    (message,) = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert message.startswith(f"train: 1 of 21 rows (4.76%) are broken and left out; the first is {path}:21: ")


def test_architecture_whose_flops_cannot_be_counted_trains_without_mfu(config, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("recipes_lib.planning.compute.count_attended", lambda *_: 1 / 0)
    train(config, evaluates=True).train()
    assert {event["num_flops"] for event in read_events(tmp_path / "out", "train")} == {None}
