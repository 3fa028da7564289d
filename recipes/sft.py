"""Supervised fine-tuning: train on the assistant turns of chats, on completions, or on plain text.

accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/sft.py --config recipes/configs/llama3-8b/sft.yaml
python recipes/sft.py --config recipes/configs/llama3-8b/sft.yaml --learning_rate 1e-5      # the same on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run. recipes/lora.py is the same under an adapter.
"""

import sys

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("sft", sys.argv[1:])  # Before torch is imported: errors appear at once.

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.models.adapters.lora import describe_adapter
from recipes_lib.models.attention.kernels import choose_attention, verify_isolation
from recipes_lib.models.generation import set_stop_tokens
from recipes_lib.models.heads.loss_head import verify_loss_head
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.publish.final_model import export_model, recipe
from recipes_lib.training.evaluation.build import build_observer
from recipes_lib.training.forgetting.weight_penalty import load_penalty
from recipes_lib.training.layouts.context_rows import join_context
from recipes_lib.training.run import Run
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.next_token_trainer import SFTTrainer, load_base
from recipes_lib.training.trainers.trained_model import load_language_model, load_policy, load_verified_config


@recipe
def main(run: Run) -> None:
    """Fine-tune ``config.model``, or an adapter of it, on ``config.data``; write it, run record and report."""
    config = run.config
    # Tokenise and pack rows with their loss mask, once per machine, before the process group is initialised.
    tokenizer = load_tokenizer(config.model, config.tokens)
    data = load_training_data(config, tokenizer, local_rank=run.launch.local_rank)
    run.record(data=data.record)
    args = build_training_arguments(config, run.launch, has_eval=bool(data.held_out))
    # Packed documents must not attend to each other.
    model_config = load_verified_config(config, tokenizer, data.longest)
    context, packing = join_context(run.launch, args), config.tokens.packing
    attention = choose_attention(config.model, model_config, args, packing=packing, flattens=True, context=context)
    if config.adapter.use_peft:  # The base model is frozen, and quantised if configured.
        model = load_policy(config, attention.implementation, args, run.launch)
        run.record(adapter=describe_adapter(model))
    else:
        model = load_language_model(config, model_config, attention.implementation, args, run.launch)
    set_stop_tokens(model, tokenizer, data.audit.terminators)
    collate = PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        order=data.order,
        base=load_base(config, attention.implementation),
        penalty=load_penalty(config),
        eval_dataset=data.held_out or None,
        data_collator=collate,
        processing_class=tokenizer,
        observer=build_observer(config, data, args, model, tokenizer, collate, context=context),
        adapter=config.adapter,
    )
    # Verify isolation with the loaded weights, and that the loss head returns the model's own loss.
    if packing or attention.layout == "flat":
        verify_isolation(model, attention.layout)
    verify_loss_head(model)
    trainer.train(resume_from_checkpoint=run.choose_checkpoint())
    export_model(trainer, run.output_dir)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
