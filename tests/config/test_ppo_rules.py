from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ("reward_weights: [1, 2]", 5, "2 numbers for 1 rewards"),
        ("reward_model_revision: main", 5, "without `reward_model_name_or_path`"),
        ("response_length: 64\nmax_length: 64", 6, "no room for a prompt"),
        ("max_length: 1024\noverlong: truncate", 6, "half a question"),
        ("kl_horizon: 100", 5, "`kl_coef` is fixed"),
        ("use_peft: true\nlora_dropout: 0.1", 6, "are compared"),
        ("use_peft: true\ninit_lora_weights: pissa", 6, "the reference"),
        ("use_peft: true\nlora_modules_to_save: [lm_head]", 6, "not done in this stage"),
        ("use_vllm: true\nuse_transformers_continuous_batching: true", 5, "both ask for an engine"),
        ("vllm_group_port: 5000", 5, "no effect without `use_vllm: true`"),
        ("transformers_continuous_batching_config: {page_size: 16}", 5, "no effect without"),
        ("use_transformers_continuous_batching: true\nattn_implementation: varlen", 6, "not known to transformers"),
        ("use_vllm: true\nuse_peft: true\nload_in_4bit: true", 5, "weights of few bits"),
        ("use_vllm: true\nvllm_mode: colocate", 6, "is `server` here"),
        ("kl_estimator: k3", 5, "k3 and k2 have not the gradient of KL"),
        ("reward_model_path: a/b", 5, "was renamed to `reward_model_name_or_path`"),
    ],
)
def test_what_contradicts_in_ppo_is_refused_at_its_line(problems_of, lines: str, line: int, words: str) -> None:
    (problem,) = problems_of(lines + "\n", stage="ppo")
    assert problem.where == f"recipe.yaml:{line}"
    assert words in problem.found
    assert problem.remedy


def test_ppo_needs_a_reward(problems_of) -> None:
    text = "model_name_or_path: owner/model\ndataset_name: owner/dataset\noutput_dir: out\n"
    (problem,) = problems_of(text=text, stage="ppo")
    assert "nothing scores the answers" in problem.found
    (problem,) = problems_of("reward_funcs: [length]\n", text=text, stage="ppo")
    assert "not an import path" in problem.found
    assert not problems_of("reward_model_name_or_path: owner/reward\n", text=text, stage="ppo")
    assert not problems_of("kl_target_per_sequence: 6\nkl_horizon: 100\nreward_weights: [2]\n", stage="ppo")
