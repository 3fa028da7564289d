"""Non-finite losses and gradients of a step: search, description and dump."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes_lib.errors import DivergedError
from recipes_lib.training.guards.step_facts import StepInputs, describe_faults, dump_and_raise, find_faults, write_dump


def build_chain(*, bad=()):
    """Return the weights of three layers with gradient norms 1, 2 and 3, or NaN for the ``bad`` layers."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
    for at, layer in enumerate(model):
        layer.weight.grad = torch.zeros(2, 2)
        layer.weight.grad[0, 1] = float("nan") if at in bad else at + 1.0
    return dict(model.named_parameters())


def test_faults_are_ordered_from_output_to_input():
    faults = find_faults(build_chain(bad=(0, 1)), [1.0, float("inf")])
    assert list(faults["non_finite_gradients"]) == ["1.weight", "0.weight"]
    assert faults["largest_gradient_norms"] == {"2.weight": 3.0}
    assert faults["bad_micro_batches"] == [1]
    assert list(find_faults(build_chain(), [1.0])["largest_gradient_norms"].values()) == [3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([((), [1.0]), ((0,), [float("nan")])], "the loss of micro-batch 1 of rank 1 is nan"),
        ([((), [1.0]), ((0, 2), [1.0])], "on rank 1 the gradient of 2.weight is not finite and of 1 more parameter"),
        ([((), [1.0])], "too large for float32"),
    ],
)
def test_describe_faults_names_loss_before_gradient(processes, message):
    assert message in describe_faults([find_faults(build_chain(bad=bad), losses) for bad, losses in processes])


def test_freed_gradients_are_not_said_to_be_finite():
    """As DeepSpeed frees them: the norm may be that of a NaN."""
    reason = describe_faults([find_faults({"weight": torch.ones(2)}, [1.0])])
    assert "is not finite, though every loss is; DeepSpeed keeps no gradients" in reason


def test_dump_holds_rows_tensors_and_strict_json(tmp_path):
    batches = [{"input_ids": torch.arange(6).view(2, 3), "max_length_q": 3}, {"labels": torch.ones(2, 2).t()}]
    inputs = StepInputs(batches, [np.array([4, 9]), None], None)
    write_dump(tmp_path / "step-3", 1, inputs, {"loss": float("nan"), "norms": {"w": float("-inf")}, "scale": None})
    tensors = load_file(tmp_path / "step-3" / "rank-1.safetensors")
    assert torch.equal(tensors["micro_batch_1.input_ids"], batches[0]["input_ids"])
    assert set(tensors) == {"micro_batch_1.input_ids", "micro_batch_2.labels"}

    def refuse(constant):
        raise AssertionError(constant)

    facts = json.loads((tmp_path / "step-3" / "rank-1.json").read_text(), parse_constant=refuse)
    assert facts == {"loss": "nan", "norms": {"w": "-inf"}, "scale": None, "row_ids": [[4, 9], None]}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "before its update: the loss of micro-batch 1 of rank 0 is inf. The weights are those of step 6, and the"),
        ({"learner": "critic"}, "before its update of the critic: the loss of micro-batch 1"),
        ({"is_updated": True}, "after its update, which DeepSpeed makes first: the loss"),
        ({"is_updated": True}, ". The last checkpoint is intact, and from before it. Look at the rows, batches and"),
        ({"why": "a spike, after 2 rollbacks"}, "before its update: a spike, after 2 rollbacks. The weights are those"),
    ],
)
def test_error_names_moment_learner_and_reason(tmp_path, facts, message):
    inputs = StepInputs([], [], None, [torch.tensor(float("inf"))])
    with pytest.raises(DivergedError, match="step 7 was stopped ") as caught:
        dump_and_raise(build_chain(), inputs, step=7, output_dir=tmp_path, facts={}, **facts)
    assert message in str(caught.value)
    assert json.loads((tmp_path / "diverged" / "step-7" / "rank-0.json").read_text())["bad_micro_batches"] == [0]
