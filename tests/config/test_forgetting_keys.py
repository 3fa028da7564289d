"""Keys against forgetting that contradict each other, or that a recipe has not, are refused at their line."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("recipe", "lines", "line", "words"),
    [
        ("sft", "replay_dataset: me/old\nreplay_from: .", 6, "rows of one source"),
        ("sft", "replay_share: 0.1", 5, "has no effect"),
        ("sft", "replay_dataset: me/old\nreplay_share: 1.0", 6, "below 1"),
        ("sft", "replay_from: ./nowhere", 5, "does not exist"),
        (
            "sft",
            "max_length: 64\nmax_steps: 9\nwarmup_steps: 0\ndataset_streaming: true\nreplay_dataset: me/old",
            9,
            "no rows to count",
        ),
        ("sft", "ewc_fisher: identity", 5, "has no effect"),
        ("sft", "ewc_lambda: -1", 5, "at least 0"),
        ("sft", "ewc_lambda: 1\nverify_steps: 5", 5, "without the penalty"),
        ("dpo", "ewc_lambda: 1\nuse_peft: true", 5, "do not change"),
        ("dpo", "kl_to_base: 1", 5, "raise `beta`"),
        ("lora", "ewc_lambda: 1", 5, "full fine-tuning"),
        ("lora", "kl_to_base: 0.1\nlora_modules_to_save: [lm_head]", 5, "must be the base's"),
        ("lora", "kl_to_base: 0.1\nadapter_name_or_path: me/adapter", 5, "not where it starts"),
        ("lora", "kl_to_base: 0.1\ninit_lora_weights: pissa", 6, "changes the base"),
        ("reward", "replay_dataset: me/old", 5, "pretraining, fine-tuning and DPO"),
    ],
)
def test_what_cannot_be_is_refused_at_its_line(problems_of, recipe: str, lines: str, line: int, words: str) -> None:
    (problem,) = problems_of(lines + "\n", recipe=recipe)
    assert problem.where == f"recipe.yaml:{line}"
    assert words in problem.found + problem.remedy
    assert problem.remedy


@pytest.mark.parametrize(
    ("recipe", "lines"),
    [
        ("sft", "replay_dataset: me/old\newc_lambda: 1\nkl_to_base: 0.1"),
        ("sft", "ewc_lambda: 0.01\newc_fisher: identity\newc_reference: me/model"),
        ("dpo", "ewc_lambda: 1\nreplay_dataset: me/old\nreplay_share: 0.2"),
        ("lora", "kl_to_base: 0.1\nreplay_dataset: me/old"),
    ],
)
def test_what_agrees_passes(problems_of, recipe: str, lines: str) -> None:
    assert not problems_of(lines + "\n", recipe=recipe)
