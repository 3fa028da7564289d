from __future__ import annotations

import pytest

AHEAD = "use_vllm: true\nvllm_mode: server\nmax_staleness: 1"


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ("reward_weights: [1, 2]", 5, "2 numbers for 1 rewards"),
        ("reward_model_revision: main", 5, "no effect: `reward_model_name_or_path` is null"),
        ("response_length: 64\nmax_length: 64", 6, "no room for a prompt"),
        ("max_length: 1024\noverlong: truncate", 6, "truncate the prompts"),
        ("kl_horizon: 100", 5, "no effect: `kl_target_per_sequence` is null"),
        ("use_peft: true\nlora_dropout: 0.1", 6, "are compared"),
        ("use_peft: true\ninit_lora_weights: pissa", 6, "the reference"),
        ("use_peft: true\nlora_modules_to_save: [lm_head]", 6, "not supported in this recipe"),
        ("use_vllm: true\nuse_transformers_continuous_batching: true", 5, "one engine samples"),
        ("vllm_enable_sleep_mode: true", 5, "no effect: `use_vllm` is false"),
        ("use_vllm: true\nvllm_group_port: 5000", 6, "write `vllm_mode: server`"),
        ("use_vllm: true\nvllm_mode: server\nvllm_gpu_memory_utilization: 0.5", 7, "write `vllm_mode: colocate`"),
        ("use_vllm: true\nvllm_gpu_memory_utilization: 0", 6, "vllm_gpu_memory_utilization"),
        (
            "transformers_continuous_batching_config: {page_size: 16}",
            5,
            "no effect: `use_transformers_continuous_batching`",
        ),
        ("use_transformers_continuous_batching: true\nattn_implementation: varlen", 6, "not known to transformers"),
        ("use_vllm: true\nuse_peft: true\nload_in_4bit: true", 5, "weights of few bits"),
        ("use_vllm: true\nvllm_mode: colocated", 6, "colocate"),
        ("use_vllm: true\nvllm_tensor_parallel_size: 2", 6, "--tensor-parallel-size"),
        ("use_vllm: true\nmax_staleness: 1", 6, "server"),
        ("use_vllm: true\nvllm_mode: server\nmax_staleness: 2", 7, "max_staleness"),
        ("use_peft: true\nsave_critic: true", 6, "the critic is an adapter"),
        ("push_to_hub: true\nhub_strategy: every_save", 6, "are no model folders"),
        ("kl_estimator: k3", 5, "k3 and k2 have not the gradient of KL"),
        ("reward_model_path: a/b", 5, "was renamed to `reward_model_name_or_path`"),
    ],
)
def test_what_contradicts_in_ppo_is_refused_at_its_line(problems_of, lines: str, line: int, words: str) -> None:
    (problem,) = problems_of(lines + "\n", recipe="ppo")
    assert problem.where == f"recipe.yaml:{line}"
    assert words in problem.found + problem.remedy
    assert problem.remedy


def test_ppo_needs_a_reward(problems_of) -> None:
    text = "model_name_or_path: owner/model\ndataset_name: owner/dataset\noutput_dir: out\n"
    (problem,) = problems_of(text=text, recipe="ppo")
    assert "no reward: neither" in problem.found
    (problem,) = problems_of("reward_funcs: [length]\n", text=text, recipe="ppo")
    assert "not an import path" in problem.found
    assert not problems_of("reward_model_name_or_path: owner/reward\n", text=text, recipe="ppo")
    assert not problems_of("kl_target_per_sequence: 6\nkl_horizon: 100\nreward_weights: [2]\n", recipe="ppo")


@pytest.mark.parametrize(
    ("recipe", "lines", "line", "words"),
    [
        ("grpo", "delta: 4\nloss_type: cispo", 5, "write `loss_type: grpo or dr_grpo"),
        ("grpo", "vespo_k_pos: 3", 5, "write `loss_type: vespo`"),
        ("grpo", "entropy_target: 0.3", 5, "the loss has no entropy term"),
        ("grpo", "num_generations: 1", 5, "num_generations"),
        ("grpo", "top_p: 0.9", 5, "another distribution"),
        ("rloo", "use_vllm: true\nvllm_structured_outputs_regex: a+", 6, "another distribution"),
        ("rloo", "max_completion_length: 64", 5, "is `response_length` here"),
        ("rloo", "kl_coef: 0.1", 5, "is a key of PPO"),
        ("rloo", "critic_learning_rate: 1e-5", 5, "there is no critic"),
        ("rloo", "use_peft: true\nlora_dropout: 0.1", 6, "are compared"),
        ("rloo", "loss_type: dapo", 5, "another loss"),
        ("grpo", "vllm_importance_sampling_cap: 3", 5, "vllm_importance_sampling_clip_max"),
        ("grpo", "vllm_importance_sampling_clip_min: 2", 5, "write less than 2"),
        ("grpo", "vllm_importance_sampling_correction: false\nvllm_importance_sampling_mode: token_mask", 6, "effect"),
        ("grpo", "loss_type: vespo\nvllm_importance_sampling_mode: sequence_mask", 6, "weighs whole answers"),
        ("grpo", f"{AHEAD}\nmax_num_gen_batches: 3", 7, "which prompts come next"),
        ("grpo", f"{AHEAD}\nvllm_importance_sampling_correction: false", 7, "pass for those of the policy"),
        ("ppo", "num_generations: 4", 5, "not a key of this recipe"),
        ("dpo", "beta: 0", 5, "makes the loss constant"),
    ],
)
def test_what_does_not_belong_to_a_recipe_is_refused_at_its_line(
    problems_of, recipe: str, lines: str, line: int, words: str
) -> None:
    (problem,) = problems_of(lines + "\n", recipe=recipe)
    assert problem.where == f"recipe.yaml:{line}"
    assert words in problem.found + problem.remedy
    assert problem.remedy


def test_sound_recipes_of_groups_have_no_problem(problems_of) -> None:
    assert not problems_of("beta: 0\nloss_type: dr_grpo\ndelta: 2\nscale_rewards: none\n", recipe="grpo")
    assert not problems_of("scale_rewards: true\n", recipe="grpo") + problems_of(
        "scale_rewards: false\n", recipe="grpo"
    )
    (problem,) = problems_of("scale_rewards: groups\n", recipe="grpo")
    assert problem.remedy == "write one of group, batch, none or true or false"
    assert not problems_of("sapo_temperature_pos: 1.1\nloss_type: sapo\nnum_generations: 4\n", recipe="grpo")
    assert not problems_of("beta: 0.1\nnum_iterations: 2\nsteps_per_generation: 4\nuse_peft: true\n", recipe="rloo")
