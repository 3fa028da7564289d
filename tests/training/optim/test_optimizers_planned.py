"""What ``recipes check`` says of the parameter groups is what the run will have."""

from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from recipes_lib.config.schema import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    PretrainingConfig,
    RecipeConfig,
    TokensConfig,
)
from recipes_lib.training.optim.optimizers import (
    build_muon,
    describe_groups,
    format_group,
    get_decay_names,
    plan_groups,
)


@pytest.mark.parametrize("decay_embeddings", [True, False])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon"])
def test_the_planned_groups_are_those_of_the_run(tiny_model_dir, tmp_path, optim, decay_embeddings):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    keys = {"optim": optim, "learning_rate": 1e-3, "weight_decay": 0.1, "output_dir": str(tmp_path), "use_cpu": True}
    config = RecipeConfig(
        stage="pretrain",
        path=None,
        data=DataConfig(),
        tokens=TokensConfig(),
        model=ModelConfig(),
        evaluation=EvaluationConfig(),
        pretraining=PretrainingConfig(decay_embeddings=decay_embeddings),
        training=keys,
    )
    planned = plan_groups(model.to("meta"), config)

    class Decaying(Trainer):
        def get_decay_parameter_names(self, model):
            return get_decay_names(model, decay_embeddings=decay_embeddings)

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    args = TrainingArguments(**keys | ({"optim": "adamw_torch"} if optim == "muon" else {}))
    if optim == "muon":
        optimizer = build_muon(model, args, decay_embeddings=decay_embeddings)
    else:
        optimizer = Decaying(model=model, args=args).create_optimizer()
    built = describe_groups(optimizer, model)
    names = [row.optimizer for row in built] if optim == "muon" else [optim] * len(built)
    assert planned == [replace(row, optimizer=name) for row, name in zip(built, names, strict=True)]
    line = format_group(planned[0])
    assert f"{planned[0].num_parameters:,} numbers in {planned[0].num_tensors} tensors" in line
    assert "rate 1.0e-03" in line
