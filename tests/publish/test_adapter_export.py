"""Export of adapters: verification against the trained model, broken files and the card."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.models.adapter_models import compute_logits
from tests.training.adapter_runs import make_adapter_trainer
from tests.training.trajectories import make_packs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

from recipes_lib.commands.weights import _write_adapter
from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError, DivergedError
from recipes_lib.models.adapters.lora import add_adapter, read_adapter_state
from recipes_lib.models.saved_weights import BrokenSaveError, sample_weights
from recipes_lib.publish import final_model as export
from recipes_lib.publish.final_model import export_model
from recipes_lib.training.checkpoints.saver import CheckpointSaver
from recipes_lib.training.checkpoints.sharded import copy_model_shards, read_trained_state

WEIGHTS = "adapter_model.safetensors"
NAME = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


SLOW = (
    *(({"init_lora_weights": name}, bf16) for name, bf16 in (("pissa", False), ("olora", True), ("olora", False))),
    *(({}, True), ({"use_dora": True, "use_rslora": True}, True)),
)
"""The remaining pairs of initialisation and precision, which share their branches with the quick ones."""


@pytest.fixture
def make_run(tiny_model_dir, tmp_path):
    def make(adapter=None, **keys):
        config = AdapterConfig(use_peft=True, **{"lora_r": 4, **(adapter or {})})
        trainer, _, _ = make_adapter_trainer(tiny_model_dir, tmp_path, make_packs(), config, learning_rate=1e-2, **keys)
        trainer.train()
        record = {
            "stage": "lora",
            "config": {
                "model_name_or_path": str(tiny_model_dir),
                "dataset_name": "chats.jsonl",
                "output_dir": str(tmp_path),
                "use_peft": True,
            },
            "versions": {"peft": "0.21"},
        }
        (tmp_path / "run.json").write_text(json.dumps(record))
        return trainer, tmp_path

    return make


def test_shards_are_exported_with_trained_copy_of_tied_embeddings_under_both_names(tmp_path):
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=True))
    modules = ["embed_tokens", "norm"]
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_modules_to_save=modules), seed=0)
    checkpoint, folder = tmp_path / "checkpoint-1", tmp_path / "out"
    folder.mkdir()
    adapted.peft_config["default"].save_pretrained(checkpoint)
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), print)
    copy_model_shards(checkpoint, read_trained_state(adapted), saver)()
    _write_adapter(checkpoint, folder)
    torch.testing.assert_close(load_file(folder / WEIGHTS), read_adapter_state(adapted), atol=0, rtol=0)


def breaking(monkeypatch, change):
    """Apply ``change`` to the saved tensors before their verification."""
    whole = export.verify_adapter_export

    def verify(folder, *args, **options):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        whole(folder, *args, **options)

    monkeypatch.setattr(export, "verify_adapter_export", verify)


@pytest.mark.parametrize(
    ("adapter", "bf16"),
    [
        ({}, False),
        ({"use_dora": True, "use_rslora": True}, False),
        ({"init_lora_weights": "pissa"}, True),
        *(pytest.param(adapter, bf16, marks=pytest.mark.slow) for adapter, bf16 in SLOW),
    ],
    ids=str,
)
def test_exported_adapter_on_fresh_base_equals_trained_model(make_run, tiny_model_dir, adapter, bf16):
    trainer, folder = make_run(adapter | {"lora_modules_to_save": ["norm"]}, bf16=bf16)
    export_model(trainer, folder)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    fresh = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), folder)
    torch.testing.assert_close(compute_logits(fresh), compute_logits(model), rtol=1e-4, atol=1e-4)
    base = compute_logits(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    assert (base - compute_logits(model)).abs().max() > 0.1
    names = {path.name for path in folder.iterdir()}
    assert {WEIGHTS, "adapter_config.json", "tokenizer.json", "generation_config.json", "README.md"} <= names
    assert not names & {"_unverified", "training_args.bin", "model.safetensors"}


def test_broken_tensor_is_named_and_not_published(make_run, monkeypatch):
    trainer, folder = make_run()
    changes = [
        (lambda tensors: tensors.update({NAME: torch.empty(0)}), "up_proj.lora_B.weight is empty"),
        (lambda tensors: tensors[NAME].fill_(float("nan")), "up_proj.lora_B.weight is not finite"),
        (lambda tensors: tensors[NAME].zero_(), "a logit differs from the trained model's by"),
        (lambda tensors: tensors.pop(NAME), "up_proj.lora_B.weight is missing"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "cannot be opened again"),
        (lambda tensors: tensors.update({NAME: tensors[NAME][:, :2].clone()}), r"has the shape \(128, 2\)"),
        (lambda tensors: tensors[NAME].mul_(2), "a logit differs from the trained model's by"),
    ]
    for change, fault in changes:
        with monkeypatch.context() as patch:
            breaking(patch, change)
            with pytest.raises(BrokenSaveError, match=fault):
                export_model(trainer, folder)
        assert not (folder / WEIGHTS).exists()
        assert not (folder / "README.md").exists()
        assert (folder / "_unverified" / WEIGHTS).exists()


def test_difference_below_rounding_is_detected(make_run, monkeypatch):
    """The logits of a deep model in 16 bits do not show it."""
    trainer, folder = make_run()
    with monkeypatch.context() as patch:
        breaking(patch, lambda tensors: tensors[NAME][0, 0].add_(1e-6))
        with pytest.raises(BrokenSaveError, match=r"up_proj\.lora_B\.weight is not that of the trained model"):
            export_model(trainer, folder)
    trainer.model.peft_config["default"].lora_alpha *= 1 + 1e-6
    with pytest.raises(BrokenSaveError, match="lora_alpha is not that of the trained model"):
        export_model(trainer, folder)


def test_unchanged_adapter_is_reported_as_divergence(make_run):
    trainer, folder = make_run()
    for name, parameter in trainer.model.named_parameters():
        if ".lora_B." in name:
            parameter.data.zero_()
    with pytest.raises(DivergedError, match=r"14 of 14 parts of the adapter are unchanged by training"):
        export_model(trainer, folder)
    assert not (folder / WEIGHTS).exists()


def test_failed_export_can_be_repeated(make_run, monkeypatch):
    trainer, folder = make_run()
    with monkeypatch.context() as patch:
        breaking(patch, lambda tensors: tensors[NAME].zero_())
        with pytest.raises(BrokenSaveError):
            export_model(trainer, folder)
    (folder / "_unverified" / "left over").touch()
    export_model(trainer, folder)
    assert (folder / WEIGHTS).exists()
    assert not (folder / "left over").exists()
    assert not (folder / "_unverified").exists()


def test_changed_base_weights_are_detected(make_run):
    trainer, folder = make_run()
    trainer.model.get_base_model().model.layers[0].mlp.down_proj.base_layer.weight.data *= 1.1
    with pytest.raises(BrokenSaveError, match="a logit differs from the trained model's by"):
        export_model(trainer, folder)


def test_wrong_replaced_or_missing_base_model_is_detected(make_run, tmp_path):
    trainer, folder = make_run()
    other = AutoModelForCausalLM.from_config(trainer.model.get_base_model().config)
    other.save_pretrained(tmp_path / "other")
    trainer.model.peft_config["default"].base_model_name_or_path = str(tmp_path / "other")
    with pytest.raises(BrokenSaveError, match="a logit differs from the trained model's by"):
        export_model(trainer, folder)
    # The run began with other weights in the same folder.
    record = {"config": {"model_name_or_path": str(tmp_path / "other")}, "weights": {"fingerprint": "0"}}
    (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="other: its weights were replaced during the run"):
        export_model(trainer, folder)
    record["weights"] = sample_weights(tmp_path / "other")
    (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(BrokenSaveError, match="a logit differs from the trained model's by"):
        export_model(trainer, folder)
    (tmp_path / "other").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="other is neither a folder nor a Hub id"):
        export_model(trainer, folder)


def test_rounding_of_tf32_is_no_difference(make_run, monkeypatch):
    """The trained model may be on a GPU with TF32, and the fresh base on the CPU."""
    trainer, folder = make_run()
    logits = export.compute_probe_logits(trainer.model) * (1 + 2**-10)
    exported = (folder / "adapter", trainer.model, logits)
    trainer.model.save_pretrained(exported[0])
    with pytest.raises(BrokenSaveError, match="a logit differs from the trained model's by"):
        export.verify_adapter_export(*exported)
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    export.verify_adapter_export(*exported)
    with pytest.raises(DivergedError, match="after the last update, the model's logits are not finite"):
        export.verify_adapter_export(*exported[:2], logits * torch.inf)


def test_rounding_of_autocast_is_no_difference(make_run, monkeypatch):
    """The trained model may be on a GPU with bf16, and the fresh base on the CPU, for lack of memory."""
    trainer, folder = make_run()
    with torch.autocast("cpu", torch.bfloat16):
        logits = export.compute_probe_logits(trainer.model)
    exported = (folder / "adapter", trainer.model, logits)
    trainer.model.save_pretrained(exported[0])
    with pytest.raises(BrokenSaveError, match="a logit differs from the trained model's by"):
        export.verify_adapter_export(*exported)
    monkeypatch.setattr(export, "find_device", lambda _: torch.device("cuda"))
    # Without a GPU, the context of ``torch.autocast`` would not set it.
    torch.set_autocast_enabled("cuda", True)
    try:
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        export.verify_adapter_export(*exported)
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_card_names_base_model(make_run, tiny_model_dir):
    trainer, folder = make_run()
    trainer.model.peft_config["default"].revision = "c" * 40
    export_model(trainer, folder)
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "peft"
    assert f"| commit of the base | {'c' * 40} |" in card.text
    assert f"An adapter for {tiny_model_dir.name}, after lora on chats.jsonl" in card.text
    assert str(tiny_model_dir.parent) not in (folder / "README.md").read_text()


def test_code_of_card_runs(make_run, tiny_model_dir, capsys):
    trainer, folder = make_run()
    export_model(trainer, folder)
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace("path/to/this/folder", str(folder)).replace(f'"{tiny_model_dir.name}"', f'"{tiny_model_dir}"'))
    assert capsys.readouterr().out.strip()
