"""``recipes merge`` and ``recipes student``: the written folders, comparison flags, and what is rejected."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.adapter_models import compute_logits, load_model, train
from tests.rows import write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from recipes_lib.commands.weights import PROMPTS, refuse_another_model
from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.loading import load_causal_lm


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model_dir):
    """Output directory of a LoRA run, with the files that a merge reads."""
    folder = tmp_path_factory.mktemp("trained")
    adapted = add_adapter(load_model(tiny_model_dir), AdapterConfig(use_peft=True, lora_r=4), seed=0)
    train(adapted)
    adapted.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[0, 3], pad_token_id=1).save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps({"config": {"load_in_4bit": False}}))
    return folder


@pytest.fixture
def adapter(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "a run")


@pytest.fixture
def merge(recipes, adapter):
    """Merge the adapter, and return the output of the command."""
    return functools.partial(recipes, "merge", "--adapter", adapter, "--output")


def test_merged_model_is_complete_and_records_provenance(merge, adapter, tmp_path, tiny_model_dir):
    output = tmp_path / "runs of mine" / "a merged model"
    (adapter / "tokenizer.model").touch()
    printed = merge(output)
    messages = ("merged in float32", f"of {len(PROMPTS)} texts", "mean KL", "same top token  100.0%")
    assert all(words in printed for words in (*messages, f"written to {output}")), printed
    adapted = add_adapter(
        load_model(tiny_model_dir), AdapterConfig(use_peft=True, adapter_name_or_path=str(adapter)), seed=0
    )
    merged = load_model(output)
    torch.testing.assert_close(compute_logits(merged), compute_logits(adapted), rtol=1e-4, atol=1e-4)
    assert merged.generation_config.eos_token_id == [0, 3]
    assert AutoTokenizer.from_pretrained(output).chat_template == AutoTokenizer.from_pretrained(adapter).chat_template
    record = json.loads((output / "merge.json").read_text())
    assert (output / "tokenizer.model").is_file()
    assert record["base"] == str(tiny_model_dir)
    assert record["adapter"] == str(adapter)
    assert record["max_kl"] == 0.01
    assert record["mean_kl"] < 1e-6 < record["mean_kl_of_the_base"]
    card = (output / "README.md").read_text()
    assert "\n# a merged model\n" in card
    assert "with the adapter a run merged into its weights" in card
    assert "None" not in card
    assert str(tmp_path) not in card
    assert not [path for path in output.rglob("*") if "adapter" in path.name]
    assert [path.name for path in output.parent.iterdir()] == ["a merged model"]


def test_comparison_uses_samples_and_prompts(merge, adapter, tmp_path):
    rows = [{"step": n, "prompt": "user\nHi", "completion": f" {n}"} for n in (0, 2)]
    write_rows(adapter / "samples.jsonl", rows)
    merge(tmp_path / "one")
    assert json.loads((tmp_path / "one" / "merge.json").read_text())["num_texts"] == len(PROMPTS) + 1
    (tmp_path / "mine.txt").write_text("What is it?\n\nWhy?\n")
    merge(tmp_path / "two", "--prompts", tmp_path / "mine.txt")
    assert json.loads((tmp_path / "two" / "merge.json").read_text())["num_texts"] == 2
    (tmp_path / "mine.txt").write_text("\n\n")
    for none in ("mine.txt", "absent.txt"):
        assert "--prompts" in merge(tmp_path / "three", "--prompts", tmp_path / none, code=2)


def test_dtype_and_base_flags(merge, tmp_path, tiny_model_dir):
    moved = shutil.copytree(tiny_model_dir, tmp_path / "moved base")
    merge(tmp_path / "out", "--dtype", "bfloat16", "--base", moved)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "merge.json").read_text())["base"] == str(moved)


@pytest.mark.parametrize("flags", [["--dtype", "bfloat16", "--max_kl", "1e-9"], ["--max_kl", "-1"]])
def test_merge_above_max_kl_leaves_no_files(merge, tmp_path, flags):
    error = merge(tmp_path / "out", *flags, code=2)
    assert "differs from base and adapter by" in error
    assert "--max_kl" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a run"]


def test_merge_without_effect_is_rejected(merge, tmp_path, monkeypatch):
    monkeypatch.setattr("peft.tuners.lora.layer.Linear.merge", lambda *args, **options: None)
    assert "merging has no effect" in merge(tmp_path / "out", "--max_kl", 100, code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("mean_kl", "max_kl", "bare", "compared_on", "remedy"),
    [
        (0.02, 0.01, 1.0, "full precision", "write --dtype float32"),
        (0.3, 0.2, 1.0, "4 bits", "serve the adapter on the quantised base"),
        (float("nan"), 0.2, 1.0, "4 bits", "--max_kl"),
        (0.005, 0.01, 0.004, "full precision", "write --dtype float32"),
    ],
)
def test_rejection_names_remedy(mean_kl, max_kl, bare, compared_on, remedy):
    record = {"mean_kl": mean_kl, "max_kl": max_kl, "mean_kl_of_the_base": bare, "compared_on": compared_on}
    with pytest.raises(ConfigError) as caught:
        refuse_another_model(record)
    assert remedy in str(caught.value)
    refuse_another_model(record | {"mean_kl": 0.001})


def test_output_folder_must_be_empty(merge, tmp_path):
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    (full / "mine.txt").write_text("x")
    empty.mkdir()
    assert "is not empty" in merge(full, code=2)
    assert [path.name for path in full.iterdir()] == ["mine.txt"]
    merge(empty)
    assert (empty / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "`hf download ID --local-dir DIR`"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda folder: edit(folder, task_type="SEQ_CLS"), "only causal language models are merged"),
        (lambda folder: edit(folder, base_model_name_or_path="nobody/nothing"), "nobody/nothing"),
        (lambda folder: edit(folder, base_model_name_or_path=None), "names no base model"),
        (lambda folder: edit(folder, init_lora_weights="pissa"), "not a checkpoint"),
        (lambda folder: empty(folder), "the adapter does not change the base"),
        (lambda folder: enlarge(folder), "if its vocabulary is larger, merge it with PEFT first"),
    ],
)
def test_invalid_adapter_is_rejected_and_leaves_no_files(merge, adapter, tmp_path, break_it, message):
    break_it(adapter)
    assert message in merge(tmp_path / "out", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a run"]


def test_adapter_without_task_and_base_is_merged_into_base_flag(merge, adapter, tmp_path, tiny_model_dir):
    edit(adapter, task_type=None, base_model_name_or_path=None)
    merge(tmp_path / "out", "--base", tiny_model_dir)


def empty(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    emptied = {name: torch.zeros_like(tensor) if "lora_B" in name else tensor for name, tensor in tensors.items()}
    save_file(emptied, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def enlarge(folder):
    """Add embeddings of two more tokens, as PEFT saves those of a base that was resized for training."""
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] = torch.zeros(514, 64)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


LAYER = "model.layers.{}.self_attn.q_proj.weight"


@pytest.fixture
def cut(recipes, tiny_model_dir: Path):
    """Write a student of the tiny model, and return the output of the command."""
    return functools.partial(recipes, "student", "--teacher", tiny_model_dir, "--output")


def test_student_has_selected_layers_and_all_other_weights(cut, tiny_model_dir, tmp_path) -> None:
    assert "layers       2 of 2" in cut(tmp_path / "a student", "--num_layers", "1")
    teacher, student = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_model_dir, tmp_path / "a student"))
    own, others = student.state_dict(), teacher.state_dict()
    assert torch.equal(own[LAYER.format(0)], others[LAYER.format(1)]), "the last layer is the last of the teacher"
    assert student.config.num_hidden_layers == 1
    assert student.dtype == teacher.dtype
    assert AutoTokenizer.from_pretrained(tmp_path / "a student").get_vocab() == (
        AutoTokenizer.from_pretrained(tiny_model_dir).get_vocab()
    )
    record = json.loads((tmp_path / "a student" / "student.json").read_text())
    assert record == {"teacher": str(tiny_model_dir), "teacher_revision": None, "layers": [2], "of": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"a student"}


def test_student_that_does_not_load_as_it_was_saved_is_not_written(cut, tmp_path, monkeypatch) -> None:
    def load(config, *options):
        model = load_causal_lm(config, *options)
        if str(config.model_name_or_path).endswith(".partial"):
            model.model.norm.weight.data[0] += 1
        return model

    monkeypatch.setattr("recipes_lib.models.loading.load_causal_lm", load)
    output = cut(tmp_path / "student", "--num_layers", "1", code=2)
    assert "LlamaForCausalLM cannot be pruned: the tensor model.norm.weight changed" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num_layers", "3"), "3 layers are requested, and the teacher has 2"),
        (("--num_layers", "0"), "write a number from 1 to 2"),
        (("--layers", "1", "3"), "has layers 1 to 2"),
    ],
)
def test_invalid_layers_leave_no_files(cut, tmp_path, flags, words) -> None:
    assert words in cut(tmp_path / "student", *flags, code=2)
    assert not any(tmp_path.iterdir())
    assert "--teacher: absent" in cut(tmp_path / "student", "--num_layers", "1", "--teacher", "absent", code=2)
    (tmp_path / "file").touch()
    assert "is not empty" in cut(tmp_path, "--num_layers", "1", code=2)
