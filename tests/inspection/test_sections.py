"""Sections of ``recipes check``: facts, problems, and dependencies on earlier sections."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from tests.models.vision_models import build_gemma3
from tests.training.pretraining import build_config
from tests.training.students import save_student
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, OpenAIGPTConfig

from recipes_lib.errors import DataError, Problem
from recipes_lib.inspection.recipe_checks import PretrainInspection
from recipes_lib.inspection.sections import Report
from recipes_lib.models.structure import freeze_outside_text
from recipes_lib.training.layouts.launch_environment import plan_launch
from recipes_lib.training.optim import compilation


def test_section_prints_facts_or_problems_or_nothing(tmp_path, tiny_tokenizer_dir) -> None:
    output = io.StringIO()
    config = build_config(tmp_path, tiny_tokenizer_dir)
    inspection = PretrainInspection(config, plan_launch(None, 1), Console(file=output, width=200, highlight=False))
    problem = Problem("file:3", "wrong", "fix it")

    def fail(report: Report) -> None:
        report("another fact")
        raise DataError(problem)

    inspection.run_section("silent", lambda report: None)
    inspection.run_section("sound", lambda report: report("a fact"))
    inspection.run_section("broken", fail)
    text = output.getvalue()
    assert "silent" not in text
    assert "✓ sound\n    a fact" in text
    assert "✗ broken\n    another fact\n    file:3: wrong" in text
    assert inspection.problems == [problem]


CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]} for n in range(4)
]
PAIRS = [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(4)]
PROMPTS = [{"question": f"{n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(20)]
GROUPS = {"reward_funcs": "[recipes_lib.rl.verifiers:final_number]", "bf16": False, "num_generations": 4}


@pytest.mark.parametrize(
    ("recipe", "rows", "keys", "found"),
    [
        ("sft", CHATS, {"router_aux_loss_coef": 0.1}, "LlamaForCausalLM is no mixture of experts"),
        ("sft", CHATS, {"ewc_lambda": 1.0}, "has no Fisher information"),
        ("sft", CHATS, {"metrics": "[nothing:at_all]"}, "importing 'nothing:at_all' failed: ModuleNotFound"),
        ("sft", CHATS, {"sample_prompts": f'["{"word " * 600}"]'}, "more than the 512 positions of the model"),
        ("sft", CHATS, {"hardware": "fp8", "torch_compile": False}, "fp8 without torch.compile is slower"),
        ("dpo", PAIRS, {"ref_model_name_or_path": "OTHER"}, "a vocabulary of 600 tokens and the policy one of 512"),
        (
            "grpo",
            PROMPTS,
            {**GROUPS, "steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "not divisible into",
        ),
        (
            "grpo",
            PROMPTS,
            {
                **GROUPS,
                "use_transformers_continuous_batching": True,
                "transformers_continuous_batching_config": '{"typo": 1}',
            },
            "unexpected keyword argument 'typo'",
        ),
        (
            "distill",
            CHATS,
            {"teacher_model_name_or_path": "OTHER", "lmbda": 0.5, "response_length": 512},
            "no room for",
        ),
    ],
)
def test_fault_that_ends_a_run_at_its_start_is_reported(run_check, tmp_path, tiny_model_dir, recipe, rows, keys, found):
    other = save_student(tmp_path / "other", tiny_model_dir, vocab_size=600)
    keys = {name: other if value == "OTHER" else value for name, value in keys.items()}
    problems, output = run_check(recipe, rows, **keys)
    assert [found in problem.found for problem in problems] == [True], output


def test_wrong_target_module_is_found_beside_broken_rows(run_check) -> None:
    problems, output = run_check("lora", [{"messages": []}], lora_target_modules="[typo_proj]")
    assert [("typo_proj" in problem.found) for problem in problems] == [False, True]
    assert "✗ adapter\n" in output


def test_special_tokens_beyond_the_vocabulary_are_a_warning(run_check, tmp_path, tiny_model_dir) -> None:
    """As of a model whose vocabulary was trimmed."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    ids = {"eos_token_id": [[0], 512, "0"], "pad_token_id": 511, "bos_token_id": -1}
    (model / "generation_config.json").write_text(json.dumps(ids))
    problems, output = run_check("sft", CHATS, model_name_or_path=model)
    assert problems == []
    assert "warning: there are 512 token ids, and none is eos_token_id 512\n" in output
    assert "none is" not in run_check("sft", CHATS)[1]


def test_saved_adapter_is_counted_without_its_values(run_check, tmp_path, tiny_model_dir) -> None:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
    )
    model.save_pretrained(tmp_path / "adapter")
    problems, output = run_check("lora", CHATS, adapter_name_or_path=tmp_path / "adapter")
    assert not problems, output


def test_architecture_without_activation_checkpointing_is_reported(run_check, tmp_path, tiny_tokenizer_dir) -> None:
    """As at the start of a run."""
    folder = shutil.copytree(tiny_tokenizer_dir, tmp_path / "gpt")
    OpenAIGPTConfig(vocab_size=512, n_embd=16, n_layer=1, n_head=2).save_pretrained(folder)
    problems, output = run_check("sft", CHATS, model_name_or_path=folder, activation_checkpointing=True)
    assert [problem.where for problem in problems] == ["activation_checkpointing"], output


@pytest.mark.parametrize("has_gpu", [False, True])
def test_missing_compiler_is_a_problem_of_a_machine_with_a_gpu(run_check, monkeypatch, has_gpu) -> None:
    """Without a GPU, the run is for another machine."""
    monkeypatch.setattr(compilation, "find_compiler_obstacle", lambda: "no C++ compiler")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    problems, output = run_check("sft", CHATS, torch_compile=True, use_cpu=True)
    assert [problem.where for problem in problems] == ["torch_compile"] * has_gpu, output
    assert ("warning: torch_compile: its kernels cannot be compiled" in output) is not has_gpu


def test_router_loss_is_refused_before_context_parallelism(run_check, tmp_path, tiny_tokenizer_dir) -> None:
    """As at the start of a run, where SFT trains the experts of a model with its own coefficient."""
    experts = shutil.copytree(tiny_tokenizer_dir, tmp_path / "experts")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 2}
    config = MixtralConfig(vocab_size=512, num_attention_heads=2, num_key_value_heads=2, **sizes, bos_token_id=None)
    MixtralForCausalLM(config).save_pretrained(experts)
    keys = {"model_name_or_path": experts, "hardware": "fsdp2_cp", "num_processes": 2}
    problems, output = run_check("sft", CHATS, **keys)
    assert "router_aux_loss_coef" in [problem.where for problem in problems], output
    problems, output = run_check("sft", CHATS, **keys, router_aux_loss_coef=0.0)
    assert "router_aux_loss_coef" not in [problem.where for problem in problems], output


def test_section_after_failed_requirement_is_silent(tmp_path, tiny_tokenizer_dir) -> None:
    output = io.StringIO()
    config = build_config(tmp_path, tiny_tokenizer_dir, tokenizer_name_or_path=tmp_path)
    inspection = PretrainInspection(config, plan_launch(None, 1), Console(file=output, width=200, highlight=False))
    inspection.run()
    assert [problem.where for problem in inspection.problems] == ["tokenizer_name_or_path"]
    assert "data\n" not in output.getvalue()


def test_frozen_vision_tower_is_saved_without_optimizer_states(tmp_path, tiny_tokenizer_dir) -> None:
    config, model = build_config(tmp_path, tiny_tokenizer_dir), build_gemma3()
    inspection = PretrainInspection(config, plan_launch(None, 1), Console())
    inspection.model_config, inspection.num_parameters = model.config, model.num_parameters()
    inspection.check_adapter([].append)
    freeze_outside_text(model)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert num_trained < model.num_parameters()
    assert inspection.count_saved() == (4 * model.num_parameters() + 8 * num_trained, 4 * model.num_parameters())


def test_key_of_file_named_derived_counts_as_given(tmp_path, tiny_tokenizer_dir) -> None:
    config = build_config(tmp_path, tiny_tokenizer_dir)
    places = {"seed": "derived/sft.yaml:3", "bf16": "--bf16", "eval_steps": "derived: why", "optim": "default"}
    inspection = PretrainInspection(replace(config, provenance=places), plan_launch(None, 1), Console())
    lines: list[str] = []
    inspection.check_keys(lines.append)
    assert "2 keys given, 4 in effect" in lines[0]
