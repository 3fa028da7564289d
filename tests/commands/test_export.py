"""``recipes export``: folders for ``from_pretrained``, adapters, GGUF files, and rejected checkpoints."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import sizes
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from recipes_lib.commands.weights import export_checkpoint, main_export
from recipes_lib.errors import ConfigError
from recipes_lib.models.model_files import MODEL_SHARDS
from recipes_lib.training.checkpoints.manifest import write_complete
from recipes_lib.training.checkpoints.sharded import read_trained_state, write_shards

SIZES = sizes(32, 2, 2, vocab_size=512, num_key_value_heads=1, pad_token_id=1)


def build(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    if kind == "reward":
        return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).to(dtype)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")).to(dtype)


def write_model_checkpoint(folder: Path, model: nn.Module, tokenizer_dir: Path, *, is_sharded: bool = True) -> Path:
    """Write a complete checkpoint as the trainer does."""
    folder.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    tokenizer.save_pretrained(folder)
    if is_sharded:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        write_shards(folder / MODEL_SHARDS, read_trained_state(model))
    else:
        model.save_pretrained(folder)
    (folder / "trainer_state.json").write_text("{}")
    write_complete(folder, step=2)
    return folder


@pytest.mark.parametrize("is_sharded", [True, False], ids=["shards", "whole"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("tied", torch.float32), ("untied", torch.bfloat16), ("reward", torch.float32)]
)
def test_exported_model_equals_checkpoint(kind, dtype, is_sharded, tiny_tokenizer_dir, tmp_path):
    model = build(kind, dtype)
    checkpoint = write_model_checkpoint(tmp_path / "checkpoint-2", model, tiny_tokenizer_dir, is_sharded=is_sharded)
    num_parameters = export_checkpoint(checkpoint, tmp_path / "runs" / "out")
    out = tmp_path / "runs" / "out"
    loader = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    again = loader.from_pretrained(out, dtype="auto")
    assert type(again) is type(model)
    assert num_parameters == sum(tensor.numel() for tensor in model.parameters())
    assert again.dtype == dtype
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (out, checkpoint)]
    assert len(tokenizers[0]) == len(tokenizers[1])
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert tokenizers[0].chat_template.keys() == {"default", "tool_use"}
    # No training state is exported, and no temporary folder remains.
    assert not {"trainer_state.json", "COMPLETE.json", "model_shards"} & {file.name for file in out.iterdir()}
    assert [file.name for file in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"modules_to_save": ["embed_tokens"]}], ids=str)
@pytest.mark.parametrize("is_sharded", [True, False], ids=["shards", "whole"])
def test_exported_adapter_equals_peft_file(more, is_sharded, tiny_tokenizer_dir, tmp_path):
    build("untied").save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    for tensor in model.parameters():
        if tensor.requires_grad:
            tensor.data.normal_()
    model.save_pretrained(tmp_path / "expected", save_embedding_layers=False)
    checkpoint = tmp_path / "checkpoint-2"
    model.peft_config["default"].save_pretrained(checkpoint)
    if is_sharded:
        write_shards(checkpoint / MODEL_SHARDS, read_trained_state(model))
    else:
        model.save_pretrained(checkpoint, save_embedding_layers=False)
    write_complete(checkpoint, step=2)
    export_checkpoint(checkpoint, tmp_path / "out")
    expected, got = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("expected", "out"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")


def test_export_needs_no_file_modes(tiny_tokenizer_dir, tmp_path, monkeypatch):
    def refuse(*_, **options):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    checkpoint = write_model_checkpoint(tmp_path / "checkpoint-2", build("tied"), tiny_tokenizer_dir)
    monkeypatch.setattr(os, "chmod", refuse)  # As FAT does.
    export_checkpoint(checkpoint, tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out").chat_template) == 2


def test_generation_config_is_exported(tiny_tokenizer_dir, tmp_path, capsys):
    model = build("untied")
    checkpoint = write_model_checkpoint(tmp_path / "checkpoint-2", model, tiny_tokenizer_dir)
    model.generation_config.eos_token_id = [3, 7]
    model.generation_config.save_pretrained(checkpoint)
    write_complete(checkpoint, step=2)
    main_export([str(checkpoint), str(tmp_path / "out")])
    assert capsys.readouterr().out.endswith(f"parameters written to {tmp_path / 'out'}\n")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [3, 7]


def test_sentencepiece_model_is_exported(tiny_tokenizer_dir, tmp_path):
    """Without it, llama.cpp converts no Gemma; checkpoints do not have it."""
    checkpoint = write_model_checkpoint(tmp_path / "run" / "checkpoint-2", build("tied"), tiny_tokenizer_dir)
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    record = {"stage": "sft", "config": {"model_name_or_path": str(tmp_path)}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    export_checkpoint(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"pieces"


CHANGED = {
    "other": ({"num_hidden_layers": 1}, r"layers\.1"),
    "larger": ({"vocab_size": 4096}, "its weights and its config.json differ: "),
    "unknown": ({"architectures": ["Unknown"]}, "transformers has no Unknown"),
    "pissa": ({"peft_type": "LORA", "init_lora_weights": "pissa"}, "does not hold that base"),
}
"""Settings of a checkpoint that do not fit its weights, and the error."""


@pytest.mark.parametrize("fault", ["cut", "incomplete", "full", "bare", *CHANGED])
def test_failed_export_leaves_no_files(fault, tiny_tokenizer_dir, tmp_path):
    checkpoint, out = (
        write_model_checkpoint(tmp_path / "checkpoint-2", build("tied"), tiny_tokenizer_dir),
        tmp_path / "out",
    )
    words = {"full": "is not empty", "bare": "has no config.json"}.get(fault, "checkpoint-2")
    if fault == "cut":
        (file,) = (checkpoint / "model_shards").iterdir()
        file.write_bytes(file.read_bytes()[:-4])
    elif fault == "incomplete":
        (checkpoint / "COMPLETE.json").unlink()
    elif fault == "full":
        out.mkdir()
        (out / "mine").touch()
    else:
        settings = checkpoint / ("adapter_config.json" if fault == "pissa" else "config.json")
        before = json.loads(settings.read_text()) if settings.exists() else {}
        settings.unlink(missing_ok=True)
        if fault in CHANGED:
            changes, words = CHANGED[fault]
            settings.write_text(json.dumps(before | changes))
        write_complete(checkpoint, step=2)
    with pytest.raises(ConfigError, match=words):
        export_checkpoint(checkpoint, out)
    assert [file.name for file in out.parent.iterdir() if "out" in file.name] == ["out"] * (fault == "full")


CONVERTER_STUB = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("model", type=pathlib.Path)
parser.add_argument("--outfile", type=pathlib.Path)
parser.add_argument("--outtype")
options = parser.parse_args()
size = json.loads((options.model / "config.json").read_text())["hidden_size"]
assert (options.model / "model.safetensors").is_file()
if options.outtype == "fails":
    options.outfile.write_bytes(b"GGUF")
    sys.exit(3)
if options.outtype != "nothing":
    options.outfile.write_text(f"GGUF {size} {options.outtype}")
"""


@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_gguf_is_written_by_converter(kind, tiny_tokenizer_dir, tmp_path, capsys):
    (tmp_path / "a llama" / "convert_hf_to_gguf.py").parent.mkdir()
    (tmp_path / "a llama" / "convert_hf_to_gguf.py").write_text(CONVERTER_STUB)
    source = write_model_checkpoint(tmp_path / "checkpoint-2", build("tied"), tiny_tokenizer_dir)
    if kind == "model":
        export_checkpoint(source, source := tmp_path / "model")
    out = tmp_path / "files" / "mine.gguf"
    (out.parent / ".mine.gguf.partial" / "of-a-killed-process").mkdir(parents=True)
    flags = [str(source), str(out), "--llama_cpp", str(tmp_path / "a llama"), "--gguf"]
    main_export([*flags, "q8_0"])
    assert out.read_bytes() == b"GGUF 32 q8_0"
    assert capsys.readouterr().out.endswith(f"12 bytes written to {out}\n")
    assert [file.name for file in out.parent.iterdir()] == ["mine.gguf"]
    with pytest.raises(ConfigError, match="already exists"):
        main_export([*flags, "q8_0"])
    out.unlink()
    for wrong, words in (("fails", "exit code 3"), ("nothing", "has not written a file")):
        with pytest.raises(ConfigError, match=words):
            main_export([*flags, wrong])
        assert list(out.parent.iterdir()) == []


def test_name_of_a_gguf_file_without_its_type_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"--gguf is missing\n.*--gguf f16"):
        main_export([str(tmp_path), str(tmp_path / "a.gguf")])
    assert list(tmp_path.iterdir()) == []


def test_gguf_without_converter_or_model_is_rejected(tmp_path, monkeypatch):
    def fails(message: str, name: str = "a.gguf", *flags: str) -> None:
        with pytest.raises(ConfigError, match=message):
            main_export([str(tmp_path), str(tmp_path / name), "--gguf", "f16", *flags])

    monkeypatch.setenv("PATH", str(tmp_path))
    fails("no convert_hf_to_gguf.py on the PATH\n.*name its folder by --llama_cpp")
    fails("no convert_hf_to_gguf.py in nowhere\n", "a.gguf", "--llama_cpp", "nowhere")
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("#!/bin/sh\n")
    converter.chmod(0o755)
    fails("holds no model")
    fails(r"is not the name of a GGUF file\n.*ends with \.gguf", "a")
    (tmp_path / "adapter_config.json").write_text("{}")
    fails("recipes merge")
