"""Agreement of two models, against torch's own divergence and closed forms."""

import math

import pytest
import torch
from tests.models.adapter_models import build_model

from recipes_lib.publish.merging import compare, compute_next_token_logps

TEXTS = [[5, 6, 7, 8], [9, 10], list(range(20, 40))]


def test_a_model_agrees_with_itself_and_every_position_counts():
    model = build_model("llama").eval()
    logps = compute_next_token_logps(model, TEXTS)
    assert [tuple(each.shape) for each in logps] == [(4, 64), (2, 64), (20, 64)]
    agreement = compare(logps, logps)
    assert agreement.mean_kl == 0
    assert agreement.same_choice == 1
    assert agreement.num_tokens == 26


def test_the_divergence_is_torchs_and_not_symmetric():
    one, other = (compute_next_token_logps(build_model(kind).eval(), TEXTS) for kind in ("llama", "tied"))
    p, q = torch.cat(one), torch.cat(other)
    for (first, second), (a, b) in {((p, q)): (one, other), ((q, p)): (other, one)}.items():
        expected = torch.nn.functional.kl_div(second, first, reduction="batchmean", log_target=True)
        agreement = compare(a, b)
        assert agreement.mean_kl == pytest.approx(expected.item(), rel=1e-5)
        assert agreement.same_choice == (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    assert compare(one, other).mean_kl != pytest.approx(compare(other, one).mean_kl, rel=1e-3)


def test_two_coins_have_the_divergence_of_the_textbook():
    fair, biased = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    agreement = compare([fair], [biased])
    assert agreement.mean_kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-6)


def test_texts_of_other_numbers_are_not_compared():
    logps = compute_next_token_logps(build_model("llama").eval(), TEXTS)
    with pytest.raises(ValueError, match="shorter"):
        compare(logps, logps[:2])
