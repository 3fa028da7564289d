"""Without dropout a model in training says what it says in evaluation."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from recipes_lib.models.inference import disable_dropout

TINY = {
    "llama": {"attention_dropout": 0.5, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16},
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", TINY)
def test_training_mode_no_longer_changes_what_the_model_says(kind, implementation):
    config = AutoConfig.for_model(kind, vocab_size=32, num_hidden_layers=2, **TINY[kind])
    if kind == "opt":
        config.num_attention_heads = 2
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()
    ids = torch.arange(12)[None] + 4

    def is_random():
        return not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)

    assert is_random()
    assert disable_dropout(model) > 0
    assert not is_random()
    assert torch.equal(model(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert disable_dropout(model) == 0


def test_other_numbers_stay():
    layer = nn.Linear(2, 2)
    layer.scale, layer.drop_rate = 0.5, 0.5
    assert disable_dropout(layer) == 1
    assert (layer.scale, layer.drop_rate) == (0.5, 0.0)
