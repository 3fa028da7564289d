"""Two answers that share one prompt in a row: states, scores and gradients equal those of separate conversations."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.adapter_models import build_deep_model
from tests.parity import test_loss_head as architectures
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from recipes_lib.data.pairs.collator import PairCollator
from recipes_lib.models.attention import shared_prompt
from recipes_lib.models.attention.shared_prompt import (
    build_shared_prompt_bounds,
    build_shared_prompt_mask,
    prove_shared_prompt,
    supports_shared_prompt,
)
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.loss_head import spell_mask

SHAPE = architectures.SHAPE | {"max_position_embeddings": 32}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1}
WIDE, NARROW = {"sliding_window": 32}, {"sliding_window": 4}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "gpt2": GPT2Config(**GPT2, eos_token_id=2),
    "mistral": MistralConfig(**SHAPE, **WIDE),
    "gemma2": Gemma2Config(**SHAPE, **WIDE),
    "gemma3": Gemma3TextConfig(**SHAPE, **WIDE),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
}
NARROW_CONFIGS: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**SHAPE, **NARROW),
    "gemma2": Gemma2Config(**SHAPE, **NARROW),
    "gemma3": Gemma3TextConfig(**SHAPE, **NARROW),
}
CAPS_LOGITS = {("gemma2", "sdpa"), ("gemma2", "varlen")}
CASES = [
    *(
        (CONFIGS[name], kernel)
        for name, kernel in itertools.product(CONFIGS, ("eager", "sdpa", "varlen"))
        if (name, kernel) not in CAPS_LOGITS
    ),
    *((NARROW_CONFIGS[name], "varlen") for name in ("mistral", "gemma3")),
    # Its own mask, which the given one replaces, ignores position_ids.
    (OPTConfig(**architectures.WITHOUT_HEAD_DIM, ffn_dim=64, word_embed_proj_dim=32), "sdpa"),
]
MAX_LENGTH = 25

sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)


def make_model(config: PreTrainedConfig, kernel: str, model_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    register_varlen()
    torch.manual_seed(0)
    model = model_class.from_config(copy.deepcopy(config), attn_implementation=kernel).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name and "wte" not in name:
            torch.nn.init.normal_(weight, std=0.2)  # Large weights, so that attention influences the logits.
    return model


def make_rows() -> list[dict[str, np.ndarray]]:
    """Pairs that fill three rows, one with more tokens than the models have positions; one of a single token each."""
    rng = np.random.default_rng(0)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    lengths = [(13, 12, 9), (3, 2, 5), (1, 1, 1), (11, 3, 6), (2, 4, 1)]
    return [{name: rng.integers(3, 61, length) for name, length in zip(names, row, strict=True)} for row in lengths]


def build_inputs(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Any]:
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    inputs |= {name: value for name, value in batch.items() if name.startswith(("cu_seq", "max_length"))}
    if "pair_ids" in batch:
        mask = build_shared_prompt_mask(batch["pair_ids"], batch["branch_ids"])
        inputs["attention_mask"] = spell_mask(model, mask)
    if "part_lengths" in batch:
        inputs |= build_shared_prompt_bounds(batch["part_lengths"])
    return inputs


def collate(rows: list[dict[str, np.ndarray]], kernel: str) -> dict[str, Any]:
    return PairCollator(pad_token_id=0, layout="shared_flat" if kernel == "varlen" else "shared")(rows)


def compute_scores(model: PreTrainedModel, batch: dict[str, Any], **changes: Any) -> Tensor:
    """Log-probability of each answer, ``(2P,)``, from a batch."""
    logits = model(**build_inputs(model, batch) | changes, use_cache=False).logits.flatten(0, 1)
    logps = logits[batch["predictors"]].log_softmax(-1).gather(-1, batch["targets"][:, None])[:, 0]
    return torch.zeros(len(batch["last_positions"])).index_add(0, batch["sequence_ids"], logps)


def iterate_alone(rows: list[dict[str, np.ndarray]]) -> Any:
    for row, name in itertools.product(rows, ("chosen_ids", "rejected_ids")):
        yield torch.from_numpy(np.concatenate([row["prompt_ids"], row[name]])), len(row["prompt_ids"])


def compute_scores_alone(model: PreTrainedModel, rows: list[dict[str, np.ndarray]]) -> Tensor:
    """The same scores, from one unmasked call per answer."""
    scores = []
    for ids, start in iterate_alone(rows):
        logps = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
        scores.append(logps.gather(-1, ids[start:, None]).sum())
    return torch.stack(scores)


def compute_gradients(model: PreTrainedModel, scores: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (-functional.logsigmoid(0.1 * (scores[::2] - scores[1::2])).mean()).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@settings(max_examples=20)
@given(sizes)
def test_mask_equals_rule_for_every_pair_of_positions(sizes: list[tuple[int, int, int]]) -> None:
    rows = [
        {name: np.ones(length) for name, length in zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)}
        for row in sizes
    ]
    batch = PairCollator(pad_token_id=0)(rows)
    pair, branch = batch["pair_ids"], batch["branch_ids"]
    mask = build_shared_prompt_mask(pair, branch)
    num_rows, length = pair.shape
    assert mask.shape == (num_rows, 1, length, length)
    assert mask.dtype == torch.bool
    for row, query, key in itertools.product(range(num_rows), range(length), range(length)):
        sees = key <= query and pair[row, query] == pair[row, key] and branch[row, key] in (0, branch[row, query])
        if pair[row, query] == -1:
            sees = key <= query and pair[row, key] == -1
        assert mask[row, 0, query, key] == sees
    assert mask.diagonal(dim1=-2, dim2=-1).all()


@settings(max_examples=20)
@given(sizes)
def test_rejected_answer_attends_to_prompt_and_itself(sizes: list[tuple[int, int, int]]) -> None:
    bounds = build_shared_prompt_bounds(torch.tensor(sizes))
    starts, keys = bounds["cu_seq_lens_q"].tolist(), bounds["cu_seq_lens_k"].tolist()
    found = [bounds["shared_prompt_index"][slice(*ends)].tolist() for ends in itertools.pairwise(keys)]
    places, expected = itertools.count(), []
    for lengths in sizes:
        prompt, chosen, rejected = (list(itertools.islice(places, length)) for length in lengths)
        expected += [prompt + chosen, prompt + rejected]
    assert found == expected
    assert np.diff(starts).tolist() == [length for prompt, *own in sizes for length in (prompt + own[0], own[1])]
    assert bounds["max_length_q"] == max(np.diff(starts))
    assert bounds["max_length_k"] == max(map(len, found))
    assert bounds["cu_seq_lens_q"].dtype == bounds["cu_seq_lens_k"].dtype == torch.int32


@pytest.mark.parametrize(("config", "kernel"), CASES)
def test_states_scores_and_gradients_equal_separate_answers(config: PreTrainedConfig, kernel: str) -> None:
    model, rows = make_model(config, kernel), make_rows()
    batch = collate(rows, kernel)
    num_rows, width = batch["input_ids"].shape
    assert num_rows * width > 32 or num_rows > 1
    with torch.no_grad():
        outputs = model(**build_inputs(model, batch), use_cache=False, output_hidden_states=True)
        states, logits = outputs.hidden_states[-1].flatten(0, 1), outputs.logits.flatten(0, 1)
        for sequence, (ids, start) in enumerate(iterate_alone(rows)):
            alone = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
            own = batch["predictors"][batch["sequence_ids"] == sequence]
            torch.testing.assert_close(states[own], alone.hidden_states[-1][0, start - 1 : -1], rtol=1e-5, atol=1e-5)
            last = batch["last_positions"][sequence]
            torch.testing.assert_close(states[last], alone.hidden_states[-1][0, -1], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(logits[own], alone.logits[0, start - 1 : -1], rtol=1e-5, atol=1e-5)
    together, apart = compute_scores(model, batch), compute_scores_alone(model, rows)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    expected = compute_gradients(model, apart)
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    torch.testing.assert_close(compute_gradients(model, together), expected, rtol=1e-5, atol=1e-5)
    state = torch.get_rng_state()
    assert supports_shared_prompt(config, kernel, max_length=MAX_LENGTH) is None
    assert prove_shared_prompt(model.train()) is None
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("layout", "kernel"), [("separate", "sdpa"), ("separate", "eager"), ("flat", "varlen"), ("flat", "sdpa")]
)
@pytest.mark.parametrize("packing", [True, False])
def test_layouts_of_pairs_have_equal_scores(layout: Any, kernel: str, packing: bool) -> None:
    model, rows = make_model(CONFIGS["llama"], kernel), make_rows()
    batch = PairCollator(pad_token_id=0, layout=layout, packing=packing)(rows)
    apart = compute_scores_alone(model, rows)
    together = compute_scores(model, batch)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    expected = compute_gradients(model, apart)
    torch.testing.assert_close(compute_gradients(model, together), expected, rtol=1e-5, atol=1e-5)


def test_shared_prompt_is_proved_for_reward_model_and_half_precision() -> None:
    assert prove_shared_prompt(make_model(CONFIGS["llama"], "sdpa", AutoModelForSequenceClassification)) is None
    for kernel in ("sdpa", "eager", "varlen"):
        assert prove_shared_prompt(make_model(CONFIGS["llama"], kernel).bfloat16()) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_a_deep_model_is_no_leak(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    model = build_deep_model(dtype)
    for kernel in ("sdpa", "eager", "varlen"):
        register_varlen()
        model.set_attn_implementation(kernel)
        assert prove_shared_prompt(model) is None
    assert not any(module._forward_hooks for module in model.modules()), "they would break graphs of compiled layers"
    hide_prompt = build_mask_with(lambda pair, branch: (3 * pair + branch, branch * 0))
    monkeypatch.setattr(shared_prompt, "build_shared_prompt_mask", hide_prompt)
    model.set_attn_implementation("sdpa")
    assert "one moves by" in str(prove_shared_prompt(model))


@pytest.mark.parametrize("name", NARROW_CONFIGS)
def test_sliding_window_is_refused_by_config_and_by_proof(name: str) -> None:
    config = NARROW_CONFIGS[name]
    assert supports_shared_prompt(config, "eager", max_length=4) is None
    reason = supports_shared_prompt(config, "eager", max_length=5)
    assert reason is not None
    assert "sees 4 tokens in some layers, and max_length is 5" in reason
    assert "keep its hidden states" in str(prove_shared_prompt(make_model(config, "eager")))


def test_unused_sliding_window_is_accepted() -> None:
    config = Qwen3Config(**SHAPE, sliding_window=4, use_sliding_window=True, max_window_layers=2)
    assert supports_shared_prompt(config, "sdpa", max_length=MAX_LENGTH) is None
    assert prove_shared_prompt(make_model(config, "sdpa")) is None


@pytest.mark.parametrize(
    ("config", "kernel", "reason"),
    [
        (CONFIGS["llama"], "flash_attention_2", "attn_implementation: flash_attention_2 takes no mask"),
        (BloomConfig(), "eager", "a bloom model takes no position_ids"),
        (MambaConfig(), "eager", "a mamba model has linear_attention layers"),
        (JambaConfig(), "eager", "a jamba model has linear_attention layers"),
        (GPTNeoConfig(), "eager", "a gpt_neo model masks by index in the row"),
        (Llama4TextConfig(), "sdpa", "a llama4_text model has chunked_attention layers"),
    ],
)
def test_unsupported_model_is_refused_with_reason(config: PreTrainedConfig, kernel: str, reason: str) -> None:
    assert reason in str(supports_shared_prompt(config, kernel, max_length=MAX_LENGTH))


@pytest.mark.parametrize("name", ["mamba", "bloom"])
def test_proof_detects_model_that_ignores_position_ids(name: str) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32}
    config = MambaConfig(**sizes, num_hidden_layers=2) if name == "mamba" else BloomConfig(**sizes, n_layer=2, n_head=4)
    assert prove_shared_prompt(make_model(config, "eager")) is not None


def build_mask_with(change: Any) -> Any:
    def build(pair_ids: Tensor, branch_ids: Tensor) -> Tensor:
        return build_shared_prompt_mask(*change(pair_ids, branch_ids))

    return build


@pytest.mark.parametrize(
    "change",
    [
        lambda pair, branch: (pair, branch.clamp(max=0)),
        lambda pair, branch: (pair, (branch > 1).long()),
        lambda pair, branch: (pair * 0, branch),
    ],
    ids=["answers attend to each other", "rejected attends to chosen", "pairs attend to each other"],
)
def test_proof_detects_leaking_mask(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(shared_prompt, "build_shared_prompt_mask", build_mask_with(change))
    assert "one moves by" in str(prove_shared_prompt(make_model(CONFIGS["llama"], "sdpa")))


@pytest.mark.parametrize(
    "change",
    [
        lambda bounds: bounds | {"cu_seq_lens_k": bounds["cu_seq_lens_q"], "shared_prompt_index": None},
        lambda bounds: (
            bounds
            | dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds["cu_seq_lens_q"][::2])
            | {"shared_prompt_index": None}
        ),
    ],
    ids=["answer without prompt", "pair as one document"],
)
def test_proof_detects_ignored_key_bounds(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(
        shared_prompt, "build_shared_prompt_bounds", lambda lengths: change(build_shared_prompt_bounds(lengths))
    )
    assert "one moves by" in str(prove_shared_prompt(make_model(CONFIGS["llama"], "varlen")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [CONFIGS["llama"], NARROW_CONFIGS["mistral"]])
def test_key_bounds_equal_mask_on_cuda(config: PreTrainedConfig) -> None:
    model, rows = make_model(config, "varlen").cuda(), make_rows()
    batch = collate(rows, "varlen")
    inputs = build_inputs(model, batch)
    inputs = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
        for sequence, (ids, start) in enumerate(iterate_alone(rows)):
            alone = model(input_ids=ids[None].cuda(), use_cache=False).logits[0, start - 1 : -1].float()
            own = batch["predictors"][batch["sequence_ids"] == sequence]
            torch.testing.assert_close(logits[own], alone, rtol=5e-2, atol=5e-2)
    assert prove_shared_prompt(model.bfloat16()) is None


def change_inputs(model: PreTrainedModel, change: Any) -> PreTrainedModel:
    plain = model.model.forward
    model.model.forward = lambda **inputs: plain(**change(inputs) if "attention_mask" in inputs else inputs)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]},
        lambda inputs: inputs | {"attention_mask": None},
        lambda inputs: inputs | {"attention_mask": inputs["attention_mask"] == 0},
    ],
    ids=["positions do not restart", "mask ignored", "bool mask added to scores"],
)
def test_proof_detects_ignored_inputs(change: Any) -> None:
    assert "one moves by" in str(prove_shared_prompt(change_inputs(make_model(CONFIGS["llama"], "eager"), change)))


def test_proof_detects_leak_below_rounding_error() -> None:
    model = make_model(CONFIGS["llama"], "sdpa")
    plain = model.model.forward

    def leak(**inputs: Any) -> Any:
        outputs = plain(**inputs)
        outputs.last_hidden_state = outputs.last_hidden_state + 1e-7 * inputs["input_ids"].sum()
        return outputs

    model.model.forward = leak
    assert "one moves by" in str(prove_shared_prompt(model))
