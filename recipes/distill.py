"""Distillation: train a student on texts and on the token probabilities of a teacher.

accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/distill.py --config F
python recipes/distill.py --config recipes/configs/llama3-1b/distill.yaml      # the same on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run.
"""

import sys

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("distill", sys.argv[1:])  # Before torch is imported: errors appear at once.

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.distillation.distill_trainer import DistillationTrainer, prepare_teacher
from recipes_lib.distillation.teacher_store import is_own_teacher, map_teacher_vocabulary
from recipes_lib.models.attention.kernels import choose_attention, verify_isolation
from recipes_lib.models.generation import set_stop_tokens
from recipes_lib.models.heads.loss_head import verify_loss_head
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.publish.final_model import export_model, recipe
from recipes_lib.training.evaluation.build import build_observer
from recipes_lib.training.run import Run
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.trained_model import load_policy, load_verified_config


@recipe
def main(run: Run) -> None:
    """Train ``config.model`` on rows and a teacher; write model, run record and report."""
    config = run.config
    # Student and teacher need compatible vocabularies, which are compared before weights are loaded.
    tokenizer = load_tokenizer(config.model, config.tokens)
    vocabulary = map_teacher_vocabulary(config, tokenizer)
    data = load_training_data(config, tokenizer, local_rank=run.launch.local_rank)
    run.record(data=data.record)
    args = build_training_arguments(config, run.launch, has_eval=bool(data.held_out))

    model_config = load_verified_config(config, tokenizer, data.longest, vocabulary)
    attention = choose_attention(config.model, model_config, args, packing=config.tokens.packing, flattens=True)
    model = load_policy(config, attention.implementation, args, run.launch)
    set_stop_tokens(model, tokenizer, data.audit.terminators)
    collate = PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout)
    trainer = DistillationTrainer(
        model=model,
        teaching=prepare_teacher(config, data, attention, args, vocabulary, collate),
        distillation=config.distillation,
        adapter=config.adapter,
        is_own_teacher=is_own_teacher(config),
        args=args,
        eval_dataset=data.held_out or None,
        processing_class=tokenizer,
        observer=build_observer(config, data, args, model, tokenizer, collate),
    )
    # Verify isolation with the loaded weights, and that the loss head returns the model's own loss.
    if config.tokens.packing or attention.layout == "flat":
        verify_isolation(model, attention.layout)
    verify_loss_head(model)
    trainer.train(resume_from_checkpoint=run.choose_checkpoint())
    export_model(trainer, run.output_dir)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
