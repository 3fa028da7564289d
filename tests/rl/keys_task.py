"""The keys task, which a tiny policy learns in seconds: repeat one of the two keys at the end of the prompt.

As a script under a launcher, one rank of several: ``keys_task.py '[[RECIPE, FLAGS], ...]' [RANK]``. The last run is of
PPO; ``RANK`` alone receives a stop request in its second iteration, and the run is then resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tests import tiny
from tests.rows import write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed import barrier, destroy_process_group, is_initialized
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.prompts import load_prompt_data
from recipes_lib.errors import PreemptedError
from recipes_lib.models.generation import GenerateBackend
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.rl.models import ActorCritic, load_actor_critic
from recipes_lib.rl.rewards import load_rewards
from recipes_lib.rl.trainer import PolicyTrainer
from recipes_lib.stopping import STOP
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.run import start_run
from recipes_lib.training.trainers.arguments import build_training_arguments

PAD, EOS, FIRST_KEY, NUM_KEYS, FIRST_FILLER, VOCABULARY = 0, 1, 2, 8, 10, 32
WORDS = ["<pad>", "<eos>", *(f"k{n}" for n in range(NUM_KEYS)), *(f"w{n}" for n in range(FIRST_FILLER, VOCABULARY))]
MAX_ANSWER = 8


def draw_prompts(count: int, seed: int) -> list[list[int]]:
    """Draw prompts of one to four fillers and two different keys."""
    random = np.random.default_rng(seed)
    prompts = []
    for _ in range(count):
        keys = FIRST_KEY + random.permutation(NUM_KEYS)[:2]
        fillers = random.integers(FIRST_FILLER, VOCABULARY, random.integers(1, 5))
        prompts.append([*fillers.tolist(), *keys.tolist()])
    return prompts


def score_first_key(*, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of each answer's tokens that are the first of the two keys."""
    return [_share(prompt, ids, -2) for prompt, ids in zip(prompts, completion_ids, strict=True)]


def score_and_report(*, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the scores of ``score_first_key``, and print how many answers this process scores."""
    sys.stdout.write(f"process {os.environ.get('RANK', 0)} scores {len(prompts)} answers\n")
    return score_first_key(prompts=prompts, completion_ids=completion_ids)


def score_second_key(*, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of each answer's tokens that are the second key."""
    return [_share(prompt, ids, -1) for prompt, ids in zip(prompts, completion_ids, strict=True)]


def score_shuffled(*, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the scores of ``score_first_key``, permuted over the answers, so that they carry no signal."""
    scores = score_first_key(prompts=prompts, completion_ids=completion_ids)
    return np.random.default_rng(sum(map(sum, completion_ids))).permutation(scores).tolist()


def _share(prompt: str, ids: list[int], position: int) -> float:
    body = [index for index in ids if index != EOS]
    return body.count(WORDS.index(prompt.split()[position])) / max(len(body), 1)


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


Examples = list[tuple[list[int], list[int]]]
"""Token ids of prompts and answers."""


def fine_tune(
    folder: Path, tokenizer: PreTrainedTokenizerFast, batches: Iterable[Examples], seed: int, **sizes: int
) -> Path:
    """Train a tiny Llama from random weights on the answers, one step per batch, and save it."""
    torch.manual_seed(seed)
    shape = tiny.sizes(64, 2, 4, vocab_size=len(tokenizer), max_position_embeddings=64)
    config = LlamaConfig(**shape | sizes, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)  # type: ignore[arg-type]
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for batch in batches:
        width = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids = torch.tensor([[*p, *a, *[PAD] * (width - len(p) - len(a))] for p, a in batch])
        labels = torch.tensor([[*[-1] * len(p), *a, *[-1] * (width - len(p) - len(a))] for p, a in batch])
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_policy(folder: Path, seed: int, num_steps: int = 300, **sizes: int) -> Path:
    """Fine-tune a policy to answer with three to seven keys, drawn uniformly from the prompt's two, and save it."""
    random = np.random.default_rng(seed)
    batches = (
        [
            (prompt, [*random.choice(prompt[-2:], random.integers(3, MAX_ANSWER)).tolist(), EOS])
            for prompt in draw_prompts(64, 1000 * seed + step)
        ]
        for step in range(num_steps)
    )
    return fine_tune(folder, build_tokenizer(), batches, seed, **sizes)


def write_prompts(path: Path, count: int, seed: int) -> Path:
    texts = [" ".join(WORDS[index] for index in prompt) for prompt in draw_prompts(count, seed)]
    write_rows(path, ({"prompt": text} for text in texts))
    return path


def build_flags(policy: Path, output_dir: Path, prompts: Path, **keys: Any) -> list[str]:
    """Return flags of PPO: 64 answers per iteration, two epochs of two minibatches."""
    flags = {
        "model_name_or_path": policy,
        "dataset_name": prompts,
        "output_dir": output_dir,
        "reward_funcs": "[tests.rl.keys_task:score_first_key]",
        "response_length": MAX_ANSWER,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "num_mini_batches": 2,
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "kl_coef": 0.02,
        "target_kl": "null",
        "num_sample_prompts": 0,
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        **keys,
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def build_group_flags(policy: Path, output_dir: Path, prompts: Path, **keys: Any) -> list[str]:
    """Return flags of RLOO and GRPO: 64 answers per generation in groups of four, two epochs of two steps."""
    of_ppo = ("num_mini_batches", "critic_learning_rate", "kl_coef", "target_kl")
    groups = {"num_generations": 4, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.02}
    flags = build_flags(policy, output_dir, prompts, **groups | keys)
    return [flag for flag in flags if not flag.startswith(tuple(f"--{name}=" for name in of_ppo))]


class Loaded(NamedTuple):
    """Configuration, arguments, tokenizer and models of a run."""

    config: RecipeConfig
    args: TrainingArguments
    tokenizer: Any
    models: ActorCritic


def load(config: RecipeConfig, terminators: Sequence[int] = ()) -> Loaded:
    """Load the models of a run, like the recipe."""
    launch = read_launch()
    args, tokenizer = (
        build_training_arguments(config, launch, has_eval=True),
        load_tokenizer(config.model, config.tokens),
    )
    return Loaded(config, args, tokenizer, load_actor_critic(config, args, launch, tokenizer, terminators))


def train(flags: list[str], recipe: str = "ppo") -> ActorCritic:
    """Train, like the recipe, and return the models."""
    run = start_run(load_config(recipe, flags), read_launch())
    prompts = load_prompt_data(run.config, load_tokenizer(run.config.model, run.config.tokens))
    config, args, tokenizer, loaded = load(run.config, prompts.terminators)
    rewards = load_rewards(config.rewards, "cpu", loaded.reward)
    PolicyTrainer(config, args, loaded, rewards, prompts, tokenizer).train(run.resume_from)
    return loaded


def train_with_a_stop(flags: list[str], *, is_stopped: bool) -> None:
    """Train until a stop request of one rank during sampling stops all ranks, then resume to the end."""
    generate, num_calls = GenerateBackend.generate, [0]

    def generate_and_stop(self: Any, *given: Any) -> Any:
        num_calls[0] += 1
        if is_stopped and num_calls[0] == 5:  # Of three in an iteration.
            STOP.request("SIGTERM")
        return generate(self, *given)

    GenerateBackend.generate = generate_and_stop  # type: ignore[method-assign]
    with contextlib.suppress(PreemptedError):
        train(flags)
    GenerateBackend.generate = generate  # type: ignore[method-assign]
    STOP.reset()
    train(flags)


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = json.loads(sys.argv[1])
    for recipe, flags in jobs[:-1]:
        train(flags, recipe)
    train_with_a_stop(jobs[-1][1], is_stopped=len(sys.argv) > 2 and sys.argv[2] == os.environ["RANK"])
    if is_initialized():
        barrier()
        destroy_process_group()
