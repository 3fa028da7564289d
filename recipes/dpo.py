"""DPO: direct preference optimisation on pairs of chosen and rejected answers.

accelerate launch --config_file accelerate_configs/ddp.yaml recipes/dpo.py --config F
python recipes/dpo.py --config recipes/configs/llama3-8b/dpo.yaml --beta 0.05      # the same on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run.
"""

import sys
from dataclasses import asdict

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("dpo", sys.argv[1:])  # Before torch is imported: errors appear at once.

from recipes_lib.data.pairs.preference_sets import load_pair_data
from recipes_lib.models.generation import set_stop_tokens
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.publish.final_model import export_model, recipe
from recipes_lib.training.evaluation.build import build_observer
from recipes_lib.training.forgetting.weight_penalty import load_penalty
from recipes_lib.training.run import Run
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.dpo_trainer import DPOTrainer, build_objective, prepare_reference
from recipes_lib.training.trainers.pair_trainer import build_pair_collator, choose_pair_attention, verify_pair_attention
from recipes_lib.training.trainers.trained_model import load_policy, load_verified_config


@recipe
def main(run: Run) -> None:
    """Train ``config.model`` on the pairs of ``config.data``; write model, run record and report."""
    config = run.config
    # Tokenise prompts and answers, once per machine, before the process group is initialised.
    tokenizer = load_tokenizer(config.model, config.tokens)
    data = load_pair_data(config, tokenizer, local_rank=run.launch.local_rank)
    args = build_training_arguments(config, run.launch, has_eval=bool(data.held_out))
    objective = build_objective(args, config.preference, data.record)
    # Both answers of a pair share one copy of the prompt, if model and kernel isolate them.
    model_config = load_verified_config(config, tokenizer, data.longest)
    attention = choose_pair_attention(config, model_config, args, max_length=data.max_length)
    model = load_policy(config, attention.implementation, args, run.launch)
    set_stop_tokens(model, tokenizer, data.audit.terminators)
    attention = verify_pair_attention(config, attention, model)
    run.record(data=data.record, pairs=asdict(attention))

    # The reference is the policy at its start, or `ref_model_name_or_path`.
    stored, data = prepare_reference(config, objective, data, model, attention, args)
    collate = build_pair_collator(tokenizer, attention)
    trainer = DPOTrainer(
        model=model,
        args=args,
        objective=objective,
        stored=stored,
        is_own_reference=config.preference.ref_model_name_or_path is None,
        adapter=config.adapter,
        train_dataset=data.train,
        order=data.order,
        penalty=load_penalty(config),
        eval_dataset=data.held_out or None,
        data_collator=collate,
        processing_class=tokenizer,
        observer=build_observer(config, data, args, model, tokenizer, collate, objective.score),
    )
    trainer.train(resume_from_checkpoint=run.choose_checkpoint())
    export_model(trainer, run.output_dir)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
