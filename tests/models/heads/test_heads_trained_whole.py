"""The loss head on an output projection that is in ``modules_to_save``: the adapter's copy is scored and trained."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("is_tied", "modules", "head_comes"),
    [
        (False, ["lm_head"], "before"),
        (False, ["lm_head"], "after"),
        (False, ["embed_tokens", "lm_head"], "before"),
        (False, ["embed_tokens", "lm_head"], "after"),
        (True, ["embed_tokens"], "after"),
        (True, ["lm_head"], "after"),
    ],
)
def test_loss_head_scores_and_trains_copy_in_modules_to_save(is_tied, modules, head_comes):
    config = LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=is_tied)
    model = LlamaForCausalLM(config)
    if head_comes == "before":
        add_loss_head(model)
    settings = LoraConfig(target_modules=["q_proj"], modules_to_save=list(modules), ensure_weight_tying=is_tied)
    adapted = get_peft_model(model, settings)
    if head_comes == "after":
        add_loss_head(adapted)
    projection = adapted.get_base_model().get_output_embeddings()
    copy = projection.modules_to_save["default"]
    with torch.no_grad():
        copy.weight.add_(0.5 * torch.randn_like(copy.weight))
    verify_loss_head(adapted)
    ids = torch.randint(0, 64, (2, 9))

    def compute():
        """The loss by the head, and from the model's logits."""
        inputs = {"input_ids": ids, "position_ids": torch.arange(9).expand(2, -1)}
        logits = adapted(**inputs, use_cache=False).logits
        expected = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        nll_sum = adapted(**inputs, labels=ids, loss_head=True).nll_sum
        assert nll_sum.item() == pytest.approx(expected.item(), rel=1e-5)
        return nll_sum, expected

    nll_sum, expected = compute()
    nll_sum.backward()
    ours = copy.weight.grad.clone()
    copy.weight.grad = None
    expected.backward()
    assert torch.allclose(ours, copy.weight.grad, atol=1e-4)
    with adapted.disable_adapter(), torch.no_grad():
        off, _ = compute()
    assert off.item() != pytest.approx(nll_sum.item(), rel=1e-2)
