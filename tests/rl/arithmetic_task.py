"""Synthetic word problems in the format of GSM8K, and a tiny policy that solves about half of them.

Rows have GSM8K's columns ``question`` and ``answer``; an answer is a calculation followed by ``#### 7``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.rl import keys_task
from tests.rows import write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes_lib.rl.verifiers import final_number

LARGEST = 5
PEOPLE = ("Tom", "Mia", "Ben", "Eva", "Sam", "Zoe")
THINGS = ("clips", "books", "apples", "coins", "pens", "cards")
STORIES = (
    ("{0} has {1} {3} and buys {2} more . How many {3} are there ?", "+"),
    ("{0} has {1} {3} and sells {2} of them . How many {3} are left ?", "-"),
)
MARKS = ("<pad>", "<eos>", "<user>", "<assistant>")
WORDS = (
    *MARKS,
    *map(str, range(2 * LARGEST + 1)),
    *("+", "-", "####"),
    *PEOPLE,
    *THINGS,
    "a",  # The library renders it to find the end-of-turn token.
    *sorted({word for text, _ in STORIES for word in text.split() if "{" not in word}),
)
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} "
    "{% if message['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MAX_ANSWER = 8


def write_problems(folder: Path, seed: int) -> list[dict[str, str]]:
    """Write 1200 training and 200 held-out problems, all different; return the training rows."""
    stories = itertools.product(PEOPLE, range(1, LARGEST + 1), range(1, LARGEST + 1), THINGS, STORIES)
    facts = [(who, a, b, what, story) for who, a, b, what, story in stories if story[1] == "+" or a >= b]
    rows = [_build_row(*facts[at]) for at in np.random.default_rng(seed).permutation(len(facts))[:1400]]
    for name, part in (("train", rows[:1200]), ("held_out", rows[1200:])):
        write_rows(folder / f"{name}.jsonl", part)
    return rows[:1200]


def _build_row(person: str, a: int, b: int, thing: str, story: tuple[str, str]) -> dict[str, str]:
    text, sign = story
    result = a + b if sign == "+" else a - b
    return {"question": text.format(person, a, b, thing), "answer": f"{a} {sign} {b} #### {result}"}


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def write_policy(folder: Path, rows: Sequence[dict[str, str]], seed: int, num_steps: int = 250) -> Path:
    """Fine-tune a tiny Llama on solutions of which half are wrong by one or two, and save it."""
    tokenizer, random = build_tokenizer(), np.random.default_rng(seed)

    def draw(row: dict[str, str]) -> tuple[list[int], list[int]]:
        prompt, answer = f"<user> {row['question']} <assistant>", f"{_perturb(row['answer'], random)} <eos>"
        return tokenizer(prompt)["input_ids"], tokenizer(answer)["input_ids"]

    batches = ([draw(rows[at]) for at in random.integers(0, len(rows), 64)] for _ in range(num_steps))
    return keys_task.fine_tune(folder, tokenizer, batches, seed)


def _perturb(answer: str, random: np.random.Generator) -> str:
    calculation, _, result = answer.partition(" #### ")
    value = int(result)
    if random.random() < 0.5:
        near = [value + by for by in (-2, -1, 1, 2) if 0 <= value + by <= 2 * LARGEST]
        value = int(random.choice(near))
    return f"{calculation} #### {value}"


def score_shuffled(*, completions: Any, completion_ids: Sequence[list[int]], answer: Any, **_: Any) -> list[float]:
    """Return the scores of ``final_number``, permuted over the answers, so that they carry no signal."""
    scores = final_number(completions=completions, answer=answer)
    return np.random.default_rng(sum(map(sum, completion_ids))).permutation(scores).tolist()


def build_flags(policy: Path, output_dir: Path, problems: Path, **keys: Any) -> list[str]:
    """Return flags of PPO: 64 answers per iteration, two epochs of two minibatches, evaluation at both ends."""
    return keys_task.build_flags(policy, output_dir, problems / "train.jsonl", **_complete(problems, keys))


def build_group_flags(policy: Path, output_dir: Path, problems: Path, **keys: Any) -> list[str]:
    """Return the equivalent flags of RLOO and GRPO."""
    return keys_task.build_group_flags(policy, output_dir, problems / "train.jsonl", **_complete(problems, keys))


def _complete(problems: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "dataset_test_split": problems / "held_out.jsonl",
        "reward_funcs": "[recipes_lib.rl.verifiers:final_number]",
        "response_length": MAX_ANSWER,
        "num_sample_prompts": 200,
        "eval_steps": 1_000_000,
        **keys,
    }
