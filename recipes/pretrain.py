"""Pretraining: train a language model on raw text, from random weights or a pretrained model.

accelerate launch --config_file accelerate_configs/ddp.yaml recipes/pretrain.py --config F
python recipes/pretrain.py --config recipes/configs/gpt2-124m/pretrain.yaml --learning_rate 1e-3   # on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run; with more steps it extends the run from the last checkpoint that both schedules share.
"""

import sys

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("pretrain", sys.argv[1:])  # Before torch is imported: errors appear at once.

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.data.tokens.token_data import prepare_tokens
from recipes_lib.models.attention.kernels import choose_attention, verify_isolation
from recipes_lib.models.heads.loss_head import verify_loss_head
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.planning.schedule import count_run_tokens
from recipes_lib.publish.final_model import export_model, recipe
from recipes_lib.training.evaluation.build import build_observer
from recipes_lib.training.forgetting.weight_penalty import load_penalty
from recipes_lib.training.layouts.context_rows import join_context
from recipes_lib.training.layouts.pipeline_schedule import choose_trainer
from recipes_lib.training.run import Run
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.pretraining_rows import build_rows
from recipes_lib.training.trainers.trained_model import load_language_model, load_verified_config


@recipe
def main(run: Run) -> None:
    """Pretrain ``config.model`` on the tokens of ``config.data``; write model, run record and report."""
    config = run.config
    # Tokenise documents to disk, once; the rows of every step are then known in advance.
    tokenizer = load_tokenizer(config.model, config.tokens)
    num_tokens = count_run_tokens(config, run.launch.data_size)
    tokens = prepare_tokens(config, lambda: tokenizer, local_rank=run.launch.local_rank, num_tokens=num_tokens)
    rows = build_rows(config, tokens, run.launch.data_size)
    run.record(data=rows.record)
    args = build_training_arguments(config, run.launch, has_eval=bool(rows.held_out), num_steps=rows.plan.num_steps)

    # Documents of a row must not attend to each other (unless `cross_document_attention`).
    isolated = not config.pretraining.cross_document_attention
    model_config = load_verified_config(config, tokenizer, rows.plan.max_length)
    context = join_context(run.launch, args)
    attention = choose_attention(config.model, model_config, args, packing=isolated, flattens=True, context=context)
    model = load_language_model(config, model_config, attention.implementation, args, run.launch)
    collate = PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout)
    trainer = choose_trainer(run.launch)(
        config=config,
        schedule=rows.plan.schedule,
        model=model,
        args=args,
        train_dataset=rows.train,
        penalty=load_penalty(config),
        eval_dataset=rows.held_out or None,
        data_collator=collate,
        processing_class=tokenizer,
        observer=build_observer(config, rows, args, model, tokenizer, collate, context=context),
    )
    # Verify isolation with the loaded weights, and that the loss head returns the model's own loss.
    if isolated or attention.layout == "flat":
        verify_isolation(trainer.model_wrapped, attention.layout)
    verify_loss_head(trainer.model_wrapped)
    trainer.train(resume_from_checkpoint=run.choose_checkpoint())
    export_model(trainer, run.output_dir)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
