"""Loading, initialisation and gradients of the score head, against transformers' own forward pass."""

from __future__ import annotations

import copy
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.heads.test_loss_head import train_by_two
from tests.parity.test_loss_head import CONFIGS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from recipes_lib.config.schema import AdapterConfig, ModelConfig, TokensConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.heads.score_head import add_score_head, load_reward_model, set_pad_token
from recipes_lib.models.loading import load_tokenizer

ARCHITECTURES = ["llama", "qwen3", "gpt2", "gemma2", "gemma3", "mixtral", "phi_with_bias"]
LENGTHS = (5, 1, 7, 4, 9, 3)
"""Lengths of the answers in a batch; the third and the fourth, and the last two, share a row."""


def make_model(name: str = "llama") -> PreTrainedModel:
    """A random reward model whose scores are far apart."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def make_answers(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (length,), generator=generator) for length in LENGTHS]


def pack(answers: list[Tensor]) -> dict[str, Tensor]:
    """Six answers in four rows of twelve, padded with a token that also occurs in them."""
    rows = [answers[:1], answers[1:2], answers[2:4], answers[4:]]
    input_ids, position_ids, last = torch.full((4, 12), 7), torch.zeros(4, 12, dtype=torch.int64), []
    for number, row in enumerate(rows):
        at = 0
        for answer in row:
            input_ids[number, at : at + len(answer)] = answer
            position_ids[number, at : at + len(answer)] = torch.arange(len(answer))
            at += len(answer)
            last.append(12 * number + at - 1)
    return {"input_ids": input_ids, "position_ids": position_ids, "last_positions": torch.tensor(last)}


def score_alone(model: nn.Module, answers: list[Tensor]) -> Tensor:
    """Scores by transformers' own forward pass, one answer at a time."""
    return torch.cat([model(input_ids=answer[None], use_cache=False).logits[0] for answer in answers])


def config_for(path: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(model_name_or_path=str(path), **changes)


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny causal language model that a test may change."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def test_only_score_head_is_initialised_on_causal_lm_checkpoint(tiny_model_dir: Path) -> None:
    model = load_reward_model(config_for(tiny_model_dir), "eager", seed=0)
    saved, state = load_file(tiny_model_dir / "model.safetensors"), model.state_dict()
    assert set(state) - set(saved) == {"score.weight"}
    assert set(saved) - set(state) == {"lm_head.weight"}
    assert all(torch.equal(state[name], saved[name]) for name in set(state) & set(saved))
    assert state["score.weight"].shape == (1, 64)
    assert model.training
    assert (model.config.num_labels, model.config.use_cache) == (1, False)
    assert model.config._attn_implementation == "eager"


def test_score_head_init_has_variance_of_width_and_follows_seed(tiny_model_dir: Path) -> None:
    heads = [load_reward_model(config_for(tiny_model_dir), "sdpa", seed=seed).score.weight for seed in range(15)]
    torch.manual_seed(10)  # Has no effect.
    assert torch.equal(load_reward_model(config_for(tiny_model_dir), "sdpa", seed=3).score.weight, heads[3])
    values = torch.cat(heads)
    assert len(values.unique()) == values.numel()
    # The relative standard error of the mean square of 960 normal values is 4.6 %; 0.13 is almost three of them.
    assert values.square().mean().item() == pytest.approx(1 / 65, rel=0.13)


@pytest.mark.parametrize("seed", [None, 1])
def test_score_head_of_checkpoint_is_loaded(seed: int | None, tiny_model_dir: Path, tmp_path: Path) -> None:
    trained = load_reward_model(config_for(tiny_model_dir), "sdpa", seed=0)
    with torch.no_grad():
        trained.score.weight.mul_(3)
    trained.save_pretrained(tmp_path)
    loaded = load_reward_model(config_for(tmp_path), "sdpa", seed=seed)
    assert loaded.state_dict().keys() == trained.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in trained.state_dict().items())


def test_missing_score_head_is_refused_if_required(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks score\.weight\n.*complete LlamaForSequenceClassification"):
        load_reward_model(config_for(tiny_model_dir), "sdpa", seed=None)


def test_other_missing_or_unexpected_weights_are_refused(model_dir: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    del weights["model.norm.weight"]
    weights |= {"score.weight": torch.ones(2, 64), "v_head.weight": torch.ones(1, 64)}
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        load_reward_model(config_for(model_dir), "sdpa", seed=0)
    for words in ("score.weight (2, 64) for (1, 64)", "has no weights called v_head.weight", "lacks model.norm.weight"):
        assert words in str(caught.value)


def test_architecture_without_sequence_classification_is_named(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["granite"])).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="without a score head in transformers"):
        load_reward_model(config_for(tmp_path), "sdpa", seed=0)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "phi_with_bias", "gpt_neox"])
def test_output_projection_is_dropped_if_tied_or_biased(name: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).save_pretrained(tmp_path)
    assert load_reward_model(config_for(tmp_path), "sdpa", seed=0).score.weight.shape == (1, 32)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_equal_transformers_at_any_position(name: str) -> None:
    model, answers = make_model(name), make_answers()
    expected = score_alone(model, answers)
    assert expected.std() > 0.1
    add_score_head(model)
    scored = model(**pack(answers))
    torch.testing.assert_close(scored.scores, expected.flatten(), rtol=1e-5, atol=1e-5)
    assert scored.scores.dtype == torch.float32
    assert (scored.aux_loss is not None) == (name == "mixtral")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_score_gradients_equal_transformers(name: str) -> None:
    model, answers = make_model(name), make_answers()
    nn.functional.logsigmoid(score_alone(model, answers)).sum().backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    add_score_head(model)
    nn.functional.logsigmoid(model(**pack(answers)).scores).sum().backward()
    torch.testing.assert_close({key: p.grad for key, p in model.named_parameters()}, expected, rtol=1e-4, atol=1e-5)


def test_model_without_score_positions_is_unchanged() -> None:
    plain, headed, answers = make_model(), make_model(), make_answers()
    add_score_head(headed)
    assert torch.equal(score_alone(headed, answers), score_alone(plain, answers))
    assert inspect.signature(headed.forward) == inspect.signature(plain.forward)
    assert headed.state_dict().keys() == plain.state_dict().keys()


def test_score_head_reads_requested_positions_only() -> None:
    model, shapes = make_model(), []
    add_score_head(model)
    model.score.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    model(**pack(make_answers()))
    assert shapes == [(6, 32)]


@pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "eager")])
def test_shared_prompt_scores_equal_separate_answers(name: str, implementation: str) -> None:
    model = make_model(name)
    model.set_attn_implementation(implementation)
    prompt, first, second = make_answers()[2:5]
    expected = score_alone(model, [torch.cat([prompt, first]), torch.cat([prompt, second])])
    visible = torch.ones(20, 20, dtype=torch.bool).tril()
    visible[11:, 7:11] = False
    add_score_head(model)
    scored = model(
        input_ids=torch.cat([prompt, first, second])[None],
        position_ids=torch.cat([torch.arange(11), torch.arange(7, 16)])[None],
        attention_mask=visible[None, None],
        last_positions=torch.tensor([10, 19]),
    )
    torch.testing.assert_close(scored.scores, expected.flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["weights", "autocast"])
def test_score_head_computes_in_float32_on_half_backbone(precision: str) -> None:
    model, batch = make_model(), pack(make_answers())
    add_score_head(model)
    if precision == "weights":
        model.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        scores = model(**batch).scores
    expected = hidden.flatten(0, 1)[batch["last_positions"]].float() @ model.score.weight[0].float()
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(scores, scores.bfloat16().float())


@pytest.mark.parametrize("bad", ["no head", "two outputs", "adapter first"])
def test_model_without_score_head_is_refused(bad: str) -> None:
    model: Any = make_model()
    if bad == "no head":
        model = model.model
    elif bad == "two outputs":
        model.score = nn.Linear(32, 2)
    else:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    with pytest.raises(ConfigError, match=r"no head `score` that is an nn\.Linear with one output"):
        add_score_head(model)


@pytest.mark.parametrize(("name", "target"), [("llama", "q_proj"), ("gpt2", "c_attn")])
def test_score_head_in_modules_to_save_scores_and_learns(name: str, target: str) -> None:
    model, answers = make_model(name), make_answers()
    plain = score_alone(model, answers).flatten()
    add_score_head(model)
    config = peft.LoraConfig(
        target_modules=[target], modules_to_save=["score"], task_type="SEQ_CLS", init_lora_weights=False
    )
    wrapped = peft.get_peft_model(model, config).eval()
    head = wrapped.base_model.model.score.modules_to_save["default"].weight
    with torch.no_grad():
        head.mul_(1.5)
    expected = score_alone(wrapped, answers).flatten()
    scores = wrapped(**pack(answers)).scores
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    nn.functional.logsigmoid(scores).sum().backward()
    trained = {key for key, parameter in wrapped.named_parameters() if parameter.grad is not None}
    assert all("lora_" in key or "score.modules_to_save" in key for key in trained)
    assert head.grad.abs().sum() > 0
    with wrapped.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(wrapped(**pack(answers)).scores, plain, rtol=1e-5, atol=1e-5)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(**pack(answers)).scores, expected, rtol=1e-4, atol=1e-5)


def test_scores_of_float32_head_on_half_model_are_not_rounded() -> None:
    model, batch = make_model().bfloat16(), pack(make_answers())
    add_score_head(model)
    wrapped = add_adapter(
        model, AdapterConfig(use_peft=True, lora_modules_to_save=["score"]), seed=0, task_type="SEQ_CLS"
    )
    scores = wrapped(**batch).scores
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())


def _score_with_transformers(folder: Path, answers: list[Tensor], side: str) -> Tensor:
    """Scores of a padded batch by transformers' own mask and pooling."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    padded = tokenizer.pad({"input_ids": [answer.tolist() for answer in answers]}, return_tensors="pt")
    positions = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return model(**padded, position_ids=positions).logits.flatten()


@pytest.mark.parametrize(("side", "pad_in_config"), [("left", 0), ("right", None)])
def test_saved_model_has_equal_scores_in_plain_transformers(side, pad_in_config, tiny_model_dir, tmp_path) -> None:
    model = load_reward_model(config_for(tiny_model_dir), "sdpa", seed=0).eval()
    model.config.pad_token_id = pad_in_config  # 0 is the end of text.
    tokenizer = load_tokenizer(config_for(tiny_model_dir), TokensConfig())
    end = tokenizer.eos_token_id
    set_pad_token(model, tokenizer, [end])
    answers = [torch.cat([answer + 10, torch.tensor([end])]) for answer in make_answers()]
    add_score_head(model)
    expected = torch.cat([model(**_one(answer)).scores for answer in answers])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    torch.testing.assert_close(_score_with_transformers(tmp_path, answers, side), expected, rtol=1e-5, atol=1e-5)


def _one(answer: Tensor) -> dict[str, Tensor]:
    last = torch.tensor([len(answer) - 1])
    return {"input_ids": answer[None], "position_ids": torch.arange(len(answer))[None], "last_positions": last}


@pytest.mark.parametrize(
    ("pad_token", "terminators"), [("<|endoftext|>", []), ("<|im_end|>", ["<|im_end|>"]), (None, [])]
)
def test_pad_token_that_ends_answers_is_refused(pad_token: str | None, terminators: list[str], model_dir: Path) -> None:
    path = model_dir / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": pad_token}))
    tokenizer = load_tokenizer(config_for(model_dir), TokensConfig())
    model = load_reward_model(config_for(model_dir), "sdpa", seed=0)
    with pytest.raises(ConfigError) as caught:
        set_pad_token(model, tokenizer, tokenizer.convert_tokens_to_ids(terminators))
    (problem,) = caught.value.problems
    assert problem.where == "pad_token"
    assert repr(pad_token or "<|endoftext|>") in problem.found
    # The remedy proposes neither the end of text nor tokens of the template.
    assert problem.remedy == "set pad_token to a special token that occurs in no text, such as <|pad|>"


def test_remedy_adds_pad_token_if_none_is_free(tiny_model_dir: Path) -> None:
    tokenizer = load_tokenizer(config_for(tiny_model_dir), TokensConfig(pad_token="<|endoftext|>"))
    tokenizer.chat_template += "{# <|pad|> #}"
    with pytest.raises(ConfigError, match=r"add one: tokenizer\.add_special_tokens"):
        set_pad_token(make_model(), tokenizer, [])


@pytest.mark.multiprocess
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp2_head_alone"])
def test_score_gradients_on_two_processes_are_mean_of_each(wrapper: str, tmp_path: Path) -> None:
    headed, model = make_model(), make_model()
    add_score_head(headed)

    def compute(wrapped: nn.Module, seed: int) -> Tensor:
        return nn.functional.logsigmoid(wrapped(**pack(make_answers(seed))).scores).sum()

    gradients = train_by_two(tmp_path, wrapper, headed, headed.score, compute)
    for seed in (0, 1):
        (nn.functional.logsigmoid(score_alone(model, make_answers(seed))).sum() / 2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
