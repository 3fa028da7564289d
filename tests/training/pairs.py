"""Preference pairs of unequal length, and short runs of preference training, for tests that compare trajectories."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.config.generate import read_defaults
from tests.training.configurations import build_recipe
from tests.training.trajectories import Narrator, Recorder
from torch import distributed, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import RewardConfig

from recipes_lib.config.schema import AdapterConfig, ModelConfig, PreferenceConfig, RecipeConfig, TokensConfig
from recipes_lib.data.pairs.collator import PairCollator, PairLayout
from recipes_lib.data.pairs.preference_sets import PairAudit, PairData
from recipes_lib.models.heads.score_head import add_score_head, load_reward_model
from recipes_lib.training.evaluation.held_out import EvaluatePairs
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.monitoring.callbacks import Observer
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.dpo_trainer import DPOTrainer, build_objective, prepare_reference
from recipes_lib.training.trainers.pair_batches import PairScores
from recipes_lib.training.trainers.pair_trainer import PairAttention, PairTrainer, build_pair_collator, score_rewards
from recipes_lib.training.trainers.trained_model import load_policy

# Every run collects garbage, which would spend most of its time traversing imported modules.
gc.freeze()


def make_pairs(num_pairs: int = 16, *, seed: int = 0) -> Dataset:
    """Return pairs with prompts and answers of very unequal lengths; either answer may be the longer one."""
    generator = np.random.default_rng(seed)
    columns = {"prompt_ids": (1, 20), "chosen_ids": (1, 24), "rejected_ids": (1, 24)}
    rows = {
        name: [generator.integers(4, 512, size=generator.integers(*bounds)) for _ in range(num_pairs)]
        for name, bounds in columns.items()
    }
    return Dataset.from_dict(rows).with_format("numpy")


def describe_pairs(pairs: Dataset, *, key: str = "pairs", eval_pairs: Dataset | None = None) -> PairData:
    """Return the pairs as prepared data of a recipe."""
    audit = PairAudit(**dict.fromkeys(PairAudit.__dataclass_fields__, 1) | {"length_p50": 32, "terminators": [0]})
    record: dict[str, Any] = {"key": key}
    if eval_pairs is not None:
        num_tokens = sum(len(pair["chosen_ids"]) for pair in eval_pairs)
        record["eval"] = {"num_pairs": len(eval_pairs), "num_chosen_tokens": num_tokens}
    return PairData(train=pairs, eval=eval_pairs, max_length=64, audit=audit, findings=[], record=record)


def train_adapter(model_dir: Path, folder: Path) -> Path:
    """Save an adapter with nonzero B matrices, as after fine-tuning, and return its folder."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(folder)
    return folder


def perturb_model(model_dir: Path, folder: Path, *, std: float = 0.01) -> Path:
    """Save a model of the same architecture with perturbed weights, and return its folder."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    for parameter in model.parameters():
        parameter.data += std * nn.init.normal_(parameter.data.clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a run that tests vary besides upstream's keys."""

    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    layout: str = "shared"
    attention: str = "sdpa"
    key: str = "pairs"
    cache: str = "cache"
    dtype: str = "float32"


def build_config(model_dir: Path, output_dir: Path, setting: Setting, **training: Any) -> RecipeConfig:
    """Return a recipe in float32 that logs every step; the cache is beside ``output_dir``."""
    defaults = {name: value for name, (value, _) in read_defaults("dpo").items()}
    keys = {
        "output_dir": str(output_dir),
        "bf16": False,
        "use_cpu": True,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "save_strategy": "no",
        "eval_strategy": "no",
        "eval_on_start": False,
        "max_steps": 4,
        "precompute_ref_log_probs": False,
    }
    return build_recipe(
        defaults | keys | training,
        "dpo",
        tokens=TokensConfig(prepared_dir=str(output_dir.parent / setting.cache)),
        model=ModelConfig(model_name_or_path=str(model_dir), dtype=setting.dtype),
        adapter=setting.adapter,
        preference=setting.preference,
    )


def make_pair_trainer(
    model_dir: Path,
    output_dir: Path,
    pairs: Dataset,
    *,
    setting: Setting | None = None,
    eval_pairs: Dataset | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **training: Any,
) -> tuple[DPOTrainer, Recorder]:
    """Return a trainer built as by the recipe, without verification and reports, and its recorder."""
    setting = setting or Setting()
    output_dir.mkdir(parents=True, exist_ok=True)
    config = build_config(model_dir, output_dir, setting, **training)
    launch = read_launch()
    data = describe_pairs(pairs, key=setting.key, eval_pairs=eval_pairs)
    args = build_training_arguments(config, launch, has_eval=eval_pairs is not None)
    model = load_policy(config, setting.attention, args, launch)
    attention = PairAttention(setting.attention, setting.layout, packing=True)
    objective = build_objective(args, config.preference, data.record)
    stored, data = prepare_reference(config, objective, data, model, attention, args)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    collate, recorder = build_pair_collator(tokenizer, attention), Recorder()
    progress = Narrator(recorder.lines)
    hooks = [
        EvaluatePairs(
            held_out=data.held_out,
            batch_size=args.per_device_eval_batch_size,
            collate=collate,
            score=objective.score,
            progress=progress,
        )
    ] * bool(data.held_out)
    trainer = DPOTrainer(
        model=model,
        args=args,
        objective=objective,
        stored=stored,
        is_own_reference=setting.preference.ref_model_name_or_path is None,
        adapter=setting.adapter,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=collate,
        processing_class=tokenizer,
        observer=Observer(StepCounter(), hooks, [recorder, *callbacks], progress),
    )
    return trainer, recorder


def train_pairs(model_dir: Path, output_dir: Path, pairs: Dataset, **options: Any) -> list[dict[str, float]]:
    """Train and return the metrics of each step."""
    trainer, recorder = make_pair_trainer(model_dir, output_dir, pairs, **options)
    trainer.train()
    return recorder.steps


def make_reward_trainer(
    model_dir: Path,
    output_dir: Path,
    pairs: Dataset,
    *,
    layout: PairLayout = "shared",
    score: Callable[..., PairScores] = score_rewards,
    **training: Any,
) -> tuple[PairTrainer, Recorder]:
    """Return a trainer of a reward model in float32 that logs every step, and its recorder."""
    model: Any = load_reward_model(ModelConfig(model_name_or_path=str(model_dir)), "sdpa", seed=0)
    tokenizer, recorder = AutoTokenizer.from_pretrained(model_dir), Recorder()
    model.config.pad_token_id = tokenizer.pad_token_id
    add_score_head(model)
    keys = {"bf16": False, "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "report_to": "none"}
    trainer = PairTrainer(
        model=model,
        args=RewardConfig(str(output_dir), remove_unused_columns=False, disable_tqdm=True, **keys | training),
        score=score,
        train_dataset=pairs,
        data_collator=PairCollator(pad_token_id=tokenizer.pad_token_id, layout=layout),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [recorder], TrainingProgress()),
    )
    return trainer, recorder


def with_preference(setting: Setting | None = None, **keys: Any) -> Setting:
    """Return a setting with changed preference keys."""
    setting = setting or Setting()
    return replace(setting, preference=replace(setting.preference, **keys))


def load_weights(folder: Path) -> dict[str, Any]:
    """Return all tensors of an exported folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def run_and_describe(model_dir: Path, output_dir: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Train with the keys of ``run`` and return its logs and progress lines as JSON values.

    Args:
        model_dir: The model.
        output_dir: Output directory of the run; the cache is beside it.
        run: ``num_pairs``, ``num_eval_pairs``, ``resume_from`` (a folder under ``output_dir``) and upstream's keys.
    """
    keys = dict(run)
    num_pairs, num_eval_pairs = keys.pop("num_pairs"), keys.pop("num_eval_pairs", 0)
    resume_from = keys.pop("resume_from", None)
    trainer, recorder = make_pair_trainer(
        model_dir,
        output_dir,
        make_pairs(num_pairs),
        eval_pairs=make_pairs(num_eval_pairs, seed=8) if num_eval_pairs else None,
        setting=Setting(key=f"{num_pairs} and {num_eval_pairs} pairs"),
        **keys,
    )
    trainer.train(resume_from_checkpoint=resume_from and str(output_dir / resume_from))
    logs = [{name: value for name, value in log.items() if isinstance(value, int | float)} for log in recorder.logs]
    return {"logs": logs, "lines": recorder.lines}


def main() -> None:
    """Train several runs in this rank and write their reports: ``MODEL OUTPUT JSON_RUNS``."""
    model_dir, output_dir, runs = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    reports = [run_and_describe(model_dir, output_dir / run.pop("name"), run) for run in runs]
    if distributed.get_rank() == 0:
        (output_dir / "reports.json").write_text(json.dumps(reports))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
