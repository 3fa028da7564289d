"""Time and memory of a PPO iteration, compared with TRL's PPOTrainer, last released in TRL 1.12.0.

A Llama of ten million parameters as policy and reference, the same with a score head as critic and reward model. Both
trainers sample the same number of answers to the same prompts, and make the same number of optimizer steps with equal
micro-batches. TRL makes ``num_ppo_epochs`` steps per iteration whatever ``num_mini_batches`` is, so that is 1 here.
``full``: random weights, every answer has 64 tokens. ``ending``: the policy was briefly fine-tuned on the chats, so
that answers end by themselves, or at 192 tokens.

TRL 1.12.0 needs a separate environment; without it, only our loop is measured:

python3.11 -m venv build/trl && build/trl/bin/pip install torch==2.13.0 transformers==5.23.0 trl==1.12.0 pandas
python benchmarks/ppo.py --trl-python build/trl/bin/python [--rounds 3] [--iterations 3] [--output build/ppo.json]
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import build_parser, compare, run_interleaved, spread, write_results
from workload import add_workload, build_workload

SHAPES = {"full": ("model", 64, 64), "ending": ("fine-tuned", 128, 192)}
"""The policy, and the tokens of the longest prompt and of the longest answer."""
ANSWERS, MICRO_BATCH, STEPS = 32, 8, 4
"""Of an iteration, of a forward and backward pass, and optimizer steps of an iteration."""
NUM_PROMPTS, FINE_TUNING_STEPS = 512, 60
PHASES = ("generate", "score", "old_ref_value", "update_policy", "update_critic")


TRL: dict[str, Any] = {
    "stop_token": "eos",
    "per_device_train_batch_size": MICRO_BATCH,
    "gradient_accumulation_steps": ANSWERS // MICRO_BATCH,
    "local_rollout_forward_batch_size": ANSWERS,
    "num_mini_batches": 1,
    "num_ppo_epochs": STEPS,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "temperature": 1.0,
    "missing_eos_penalty": 1.0,
    "num_sample_generations": 0,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 42,
    "gradient_checkpointing": False,
}
"""What is not the default of TRL's ``PPOConfig``, so that both do the same."""


def write_models(folder: Path) -> None:
    """Write a reward model with a random head, and a policy that is fine-tuned until its answers end."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

    from recipes_lib.data.packed.collators import IGNORE_INDEX

    if (folder / "fine-tuned").exists():
        return
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    policy = AutoModelForCausalLM.from_pretrained(folder / "model")
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text("utf-8").splitlines()]
    rows = [tokenizer.apply_chat_template(chat)["input_ids"][:256] for chat in chats[: 16 * FINE_TUNING_STEPS]]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for start in range(0, len(rows), 16):
        batch = [torch.tensor(row) for row in rows[start : start + 16]]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=IGNORE_INDEX)
        policy(input_ids=ids.clamp(min=0), labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, model in (("reward", reward), ("fine-tuned", policy)):
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)


def write_prompts(folder: Path, shape: str) -> None:
    """Write the first questions that are short enough as prompts."""
    from transformers import AutoTokenizer

    _, longest, _ = SHAPES[shape]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["messages"][:1] for line in lines]
    fitting = [prompt for prompt in prompts if len(render(tokenizer, prompt)) <= longest][:NUM_PROMPTS]
    rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in fitting]
    (folder / f"prompts_{shape}.jsonl").write_text("".join(rows), encoding="utf-8")


def render(tokenizer: Any, prompt: Any) -> list[int]:
    """Return the token ids of a prompt, generation prompt included."""
    ids: list[int] = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    return ids


def measure_ours(folder: Path, output_dir: str, shape: str, iterations: int, *, is_bf16: bool) -> dict[str, Any]:
    """Train with this library's loop; read end and phases of each iteration from its log."""
    from recipes_lib.config.loader import load_config
    from recipes_lib.data.prompts import load_prompt_data
    from recipes_lib.models.loading import load_tokenizer
    from recipes_lib.rl.models import load_actor_critic
    from recipes_lib.rl.rewards import load_rewards
    from recipes_lib.rl.trainer import PolicyTrainer
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.trainers.arguments import build_training_arguments

    policy, _, response_length = SHAPES[shape]
    keys = {
        "model_name_or_path": folder / policy,
        "dataset_name": folder / f"prompts_{shape}.jsonl",
        "output_dir": output_dir,
        "reward_model_name_or_path": folder / "reward",
        "response_length": response_length,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ANSWERS // MICRO_BATCH,
        "per_device_eval_batch_size": ANSWERS,
        "num_mini_batches": 1,
        "num_ppo_epochs": STEPS,
        "max_steps": STEPS * iterations,
        "lr_scheduler_type": "constant",
        "target_kl": "null",
        "num_sample_prompts": 0,
        "save_strategy": "no",
        "logging_steps": 1,
        "activation_checkpointing": False,
        "bf16": is_bf16,
        "use_cpu": True,
    }
    config, launch = load_config("ppo", [f"--{name}={value}" for name, value in keys.items()]), read_launch()
    tokenizer = load_tokenizer(config.model, config.tokens)
    prompts = load_prompt_data(config, tokenizer)
    args = build_training_arguments(config, launch, has_eval=True)
    rewards = load_rewards(config.rewards, device="cpu")
    models = load_actor_critic(config, args, launch, tokenizer, prompts.terminators)
    PolicyTrainer(config, args, models, rewards, prompts, tokenizer).train(None)
    lines = (Path(output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "train"]
    ends = [event["seconds"] for event in events]
    phases = {name: sum(event[f"time/{name}"] for event in events[1:]) / (len(events) - 1) for name in PHASES}
    lengths = [event["objective/length"] for event in events]
    return {"ends": ends, "length": sum(lengths) / len(lengths), **phases}


def measure_trl(folder: Path, output_dir: str, shape: str, iterations: int, *, is_bf16: bool) -> dict[str, Any]:
    """Train with TRL's ``PPOTrainer``, in an environment that has it."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    name, _, response_length = SHAPES[shape]
    tokenizer = AutoTokenizer.from_pretrained(folder / name, padding_side="left")
    lines = (folder / f"prompts_{shape}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = Dataset.from_dict({"input_ids": [render(tokenizer, json.loads(line)["prompt"]) for line in lines]})
    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def truncate_and_count(stop_id: int, pad_id: int, responses: Any) -> Any:
        truncated = truncate(stop_id, pad_id, responses)
        lengths.append(float((truncated != pad_id).sum(dim=1).float().mean()))
        return truncated

    truncate, ppo_trainer.truncate_response = ppo_trainer.truncate_response, truncate_and_count

    args = PPOConfig(
        output_dir, response_length=response_length, total_episodes=ANSWERS * iterations, bf16=is_bf16, **TRL
    )
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(folder / "reward", num_labels=1) for _ in range(2)
    )
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / name) for _ in range(2))
    PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=rows,
        eval_dataset=rows.select(range(1)),
        callbacks=[Clock()],
    ).train()
    return {"ends": ends, "length": sum(lengths) / len(lengths)}


VARIANTS: dict[str, tuple[Any, bool]] = {
    "ours, fp32": (measure_ours, False),
    "TRL 1.12.0, fp32": (measure_trl, False),
    "ours, bf16": (measure_ours, True),
    "TRL 1.12.0, bf16": (measure_trl, True),
}


def measure(name: str, shape: str, folder: Path, iterations: int) -> dict[str, Any]:
    """Train one variant in this process; the first iteration is not timed."""
    run, is_bf16 = VARIANTS[name]
    with tempfile.TemporaryDirectory() as output_dir:
        found = run(folder, output_dir, shape, iterations, is_bf16=is_bf16)
    ends = found.pop("ends")
    assert len(ends) == iterations
    found["seconds"] = (ends[-1] - ends[0]) / (iterations - 1)
    found["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


def main() -> None:
    """Measure each variant in its own process."""
    parser = build_parser(__doc__, rounds=3)
    add_workload(parser)
    parser.add_argument("--trl-python", type=Path)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--measure", choices=VARIANTS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.shapes[0], options.workload, options.iterations)))
        return
    build_workload(options.data, options.workload)
    write_models(options.workload)
    table = [["answers", "variant", "s / iteration", "ours / this", "peak GB", "ours / this", "tokens", "our seconds"]]
    everything: dict[str, Any] = {}
    for shape in options.shapes:
        write_prompts(options.workload, shape)
        settings = ["--workload", str(options.workload), "--iterations", str(options.iterations), "--shapes", shape]
        variants = {
            name: [str(options.trl_python if run is measure_trl else sys.executable), __file__, *settings]
            for name, (run, _) in VARIANTS.items()
            if name in options.variants and (options.trl_python or run is measure_ours)
        }
        variants = {name: [*command, "--measure", name] for name, command in variants.items()}
        results = everything[shape] = run_interleaved(variants, options.rounds)
        for name, rounds in results.items():
            ours = f"ours, {name.rpartition(' ')[2]}"
            figures = [
                part
                for figure in ("seconds", "peak_gb")
                for part in (spread(rounds, figure), compare(results, figure, name, ours))
            ]
            middle = sorted(rounds, key=lambda one: one["seconds"])[len(rounds) // 2]
            phases = ", ".join(f"{phase} {middle[phase]:.2f}" for phase in PHASES if phase in middle)
            table.append([shape, name, *figures, spread(rounds, "length", 1), phases])
    title = f"PPO, {options.iterations} iterations of {ANSWERS} answers and {STEPS} steps"
    write_results(options.output, title, table, everything)


if __name__ == "__main__":
    main()
