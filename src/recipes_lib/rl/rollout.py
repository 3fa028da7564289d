"""The rollout of an iteration: answers with log-probabilities, values and scores, independent of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipes_lib.data.prompts import PromptRow
from recipes_lib.training.collectives import gather_objects


@dataclass(frozen=True, slots=True)
class Rollout:
    """``B`` answers of up to ``T`` tokens, on the CPU; tensors of tokens are ``(B, T)``, right-padded with 0.

    Attributes:
        prompts: Prompt of each answer; without its columns once the answer is scored.
        numbers: Number of each answer in the run, ``int64 (B,)``.
        response_ids: Tokens of the answers, ``int64 (B, T)``.
        mask: True at answer tokens, ``bool (B, T)``; at least one in each row.
        finished: True if the answer ended with a stop token, False if it reached the length limit, ``bool (B,)``.
        scored: True if the answer has a score, ``bool (B,)``; the others are excluded from the loss.
        scores: Weighted sum of rewards, before any penalty, ``float32 (B,)``; 0 without a score.
        rewards: Single rewards, ``float32 (B, R)``; NaN for ``None``.
        engine_logps: Log-probabilities by the engine that sampled, ``float32 (B, T)``, as all that follow.
        logps: Log-probabilities by the policy that sampled, from the training graph.
        ref_logps: Log-probabilities by the reference model.
        values: Critic's value of the state before each token.
        advantages: Advantages; ``None`` before they are computed.
        returns: Targets of the critic; ``None`` before they are computed, and without a critic.
    """

    prompts: list[PromptRow]
    numbers: Tensor
    response_ids: Tensor
    mask: Tensor
    finished: Tensor
    scored: Tensor
    scores: Tensor
    rewards: Tensor
    engine_logps: Tensor
    logps: Tensor
    ref_logps: Tensor
    values: Tensor
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers."""
        return int(self.mask.sum())

    @property
    def loss_mask(self) -> Tensor:
        """Mask of the tokens that count in the loss, those of answers with a score: True there, ``bool (B, T)``."""
        return self.mask & self.scored[:, None]

    @property
    def num_targets(self) -> int:
        """Number of tokens that count in the loss."""
        return int(self.loss_mask.sum())

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each answer, ``int64 (B,)``."""
        return self.mask.sum(dim=1)

    def list_ids(self) -> list[list[int]]:
        """Return the token ids of each answer."""
        return [ids[mask].tolist() for ids, mask in zip(self.response_ids, self.mask, strict=True)]

    def take(self, rows: Sequence[int]) -> Self:
        """Return the answers ``rows``, truncated to the longest of them."""
        # Not a view: the tensors of a part can be sent to the device or gathered without the rest.
        index = torch.tensor(rows)
        width = int(self.lengths[index].max())
        taken = {name: each[index, :width] if name in _BY_TOKEN else each[index] for name, each in self.tensors()}
        return dataclasses.replace(self, prompts=[self.prompts[row] for row in rows], **taken)

    def cut(self, size: int) -> Iterator[list[int]]:
        """Yield row indices in batches of ``size``, sorted by length with prompt, the longest first."""
        totals = [len(p.input_ids) + n for p, n in zip(self.prompts, self.lengths.tolist(), strict=True)]
        # The longest first, so that a batch that does not fit in memory fails at once. Ties are broken by row.
        order = sorted(range(len(self)), key=lambda row: (-totals[row], row))
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every tensor."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value


_BY_TOKEN = ("response_ids", "mask", "engine_logps", "logps", "ref_logps", "values", "advantages", "returns")


def share(rollout: Rollout, count: int) -> Rollout:
    """All-gather the first ``count`` answers of all processes: row ``i`` is from process ``i`` modulo their number.

    Every process must call, with the same number of answers.
    """

    # Field by field: each is serialised and sent through the device, which for all at once takes several times as much.
    def gather(name: str) -> list[Any]:
        # Answers were assigned to the processes in turn.
        return [row for rows in zip(*gather_objects(getattr(rollout, name)), strict=True) for row in rows][:count]

    return _build(rollout, gather)


def join(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate parts of a rollout, padded to the longest answer of all."""
    return _build(parts[0], lambda name: [row for part in parts for row in getattr(part, name)])


def _build(example: Rollout, collect: Callable[[str], list[Any]]) -> Rollout:
    """Return the rollout with the rows of ``collect`` in each field that ``example`` has."""
    fields: dict[str, Any] = {"prompts": collect("prompts")}
    for name, _ in example.tensors():
        rows = collect(name)
        fields[name] = pad_sequence(rows, batch_first=True) if name in _BY_TOKEN else torch.stack(rows)
    return dataclasses.replace(example, **fields)


class Sequences:
    """Prompts with their answers as model input, right-padded, so that causal attention needs no mask.

    Attributes:
        inputs: ``input_ids`` and ``position_ids``, ``int64 (B, L)``.
        predictors: Indices of the positions that predict the ``N`` answer tokens, into the flattened ``(B * L)`` input,
            ``int64 (N,)``.
        targets: Answer tokens, ``int64 (N,)``.
        places: Indices of the answer tokens into the flattened ``(B * T)`` answers, ``int64 (N,)``.
        shape: Shape of the answers, ``(B, T)``.
    """

    def __init__(self, rollout: Rollout, device: torch.device) -> None:
        """Lay out the prompts and answers of a rollout on a device."""
        prompts = [prompt.input_ids for prompt in rollout.prompts]
        answers = zip(prompts, rollout.response_ids, rollout.mask, strict=True)
        rows = [torch.cat([torch.tensor(prompt), ids[mask]]) for prompt, ids, mask in answers]
        input_ids = pad_sequence(rows, batch_first=True)
        width = input_ids.shape[1]
        # The flattened position of each prompt's last token, which predicts the first token of its answer, (B,).
        first = torch.tensor([row * width + len(prompt) - 1 for row, prompt in enumerate(prompts)])
        # (B, 1) + (T,) -> (B, T), masked to (N,) row by row: the order of targets and places.
        predictors = (first[:, None] + torch.arange(rollout.mask.shape[1]))[rollout.mask]
        # ``repeat`` rather than ``expand``: memory that elements share cannot be pinned.
        inputs = {"input_ids": input_ids, "position_ids": torch.arange(width).repeat(len(prompts), 1)}
        self.inputs = {name: send(tensor, device) for name, tensor in inputs.items()}
        self.predictors = send(predictors, device)
        self.targets = send(rollout.response_ids[rollout.mask], device)
        self.places = send(rollout.mask.flatten().nonzero().squeeze(1), device)
        self.shape = rollout.mask.shape

    def spread(self, values: Tensor) -> Tensor:
        """Scatter values of the ``N`` tokens, ``(N,)``, to ``(B, T)``, with 0 elsewhere."""
        # By indices, not by a mask: the backward pass of a boolean mask synchronises host and device to count its
        # elements.
        flat = torch.zeros(self.shape.numel(), dtype=values.dtype, device=values.device)
        return flat.index_copy(0, self.places, values).view(self.shape)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to the device, without waiting for the kernels that are queued there."""
    # On MPS, copies that are not awaited can read memory that has been freed (pytorch/pytorch#189690). On CUDA, copies
    # from pageable memory would synchronise with the stream, despite non_blocking.
    return tensor.to(device) if device.type in ("cpu", "mps") else tensor.pin_memory().to(device, non_blocking=True)


def compute_response_logps(
    policy: Any, sequences: Sequences, *, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the answer tokens, ``(B, T)`` in nats, and the entropy of the sampling distribution.

    Args:
        policy: A model with a loss head.
        sequences: Model input.
        temperature: Sampling temperature, which divides the logits.
        with_entropy: Whether to compute the entropy, ``(B, T)`` in nats, without gradient; otherwise it is ``None``.
    """
    output = policy(
        **sequences.inputs,
        predictors=sequences.predictors,
        targets=sequences.targets,
        temperature=temperature,
        with_statistics=with_entropy,
        token_logps=True,
        one_document_a_row=True,
    )
    entropy = sequences.spread(output.entropy) if with_entropy else None
    return sequences.spread(output.logps), entropy


def compute_response_values(critic: Any, sequences: Sequences) -> Tensor:
    """Critic's value of the state before each answer token, ``float32 (B, T)``."""
    output = critic(**sequences.inputs, last_positions=sequences.predictors, one_document_a_row=True)
    return sequences.spread(output.scores)
