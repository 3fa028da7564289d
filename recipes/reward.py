"""Reward model: train a scalar score of answers on preference pairs (Bradley-Terry).

accelerate launch --config_file accelerate_configs/ddp.yaml recipes/reward.py --config F
python recipes/reward.py --config recipes/configs/llama3-8b/reward.yaml --learning_rate 3e-6   # on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run.
"""

import sys
from dataclasses import asdict

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("reward", sys.argv[1:])  # Before torch is imported: errors appear at once.

from recipes_lib.data.pairs.preference_sets import UnfinishedAnswers, load_pair_data
from recipes_lib.models.heads.scoring import RewardModel
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.publish.final_model import export_model, recipe
from recipes_lib.report.reward_report import store_score_statistics, write_reward_report
from recipes_lib.training.evaluation.build import build_observer
from recipes_lib.training.run import Run
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.pair_trainer import (
    PairTrainer,
    build_pair_collator,
    build_reward_score,
    choose_pair_attention,
    verify_pair_attention,
)
from recipes_lib.training.trainers.trained_model import load_scorer, load_verified_config


@recipe
def main(run: Run) -> None:
    """Train a score head on ``config.model`` with the pairs of ``config.data``; write model, run record and report."""
    config = run.config
    # Tokenise prompts and answers, once per machine, before the process group is initialised.
    tokenizer = load_tokenizer(config.model, config.tokens)
    data = load_pair_data(config, tokenizer, local_rank=run.launch.local_rank)
    args = build_training_arguments(config, run.launch, has_eval=bool(data.held_out))
    # Both answers of a pair share one copy of the prompt, if model and kernel isolate them.
    model_config = load_verified_config(config, tokenizer, data.longest)
    attention = choose_pair_attention(config, model_config, args, max_length=data.max_length)
    model = load_scorer(config, attention.implementation, args, run.launch, tokenizer, data.audit.terminators)
    attention = verify_pair_attention(config, attention, model)
    run.record(data=data.record, pairs=asdict(attention))

    # The score is read at the last token of an answer, in training and in inference.
    collate = build_pair_collator(tokenizer, attention)
    score = build_reward_score(args, config.preference)
    trainer = PairTrainer(
        model=model,
        args=args,
        score=score,
        adapter=config.adapter,
        train_dataset=UnfinishedAnswers(data.train, tokenizer, config.preference.unfinished_share, args.seed),
        eval_dataset=data.held_out or None,
        data_collator=collate,
        processing_class=tokenizer,
        observer=build_observer(config, data, args, model, tokenizer, collate, score),
    )
    trainer.train(resume_from_checkpoint=run.choose_checkpoint())
    # Save mean and standard deviation of scores with the model, and check its quality gates.
    reward_model = RewardModel(model, tokenizer)
    store_score_statistics(reward_model, data.train)
    export_model(trainer, run.output_dir)
    run.record(failed_gates=write_reward_report(reward_model, data.eval, run.output_dir, is_main=run.launch.is_main))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
