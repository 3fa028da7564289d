"""The loss head on a model: unchanged default forward, refusals, and gradients under wrappers."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.forked import limit_forked
from tests.parity import test_loss_head as architectures
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoModelForCausalLM,
    BertGenerationConfig,
    DogeConfig,
    Gemma3TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LongcatFlashConfig,
    PretrainedConfig,
)

from recipes_lib.errors import ConfigError
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head


def make_model(with_head: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**architectures.SHAPE, initializer_range=0.3)).eval()
    if with_head:
        add_loss_head(model)
    return model


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 61, (2, 12), generator=generator)
    labels = input_ids.clone()
    labels[:, :4] = -100
    position_ids = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def make_targets(input_ids: Tensor) -> dict[str, Tensor]:
    """Unordered targets, two of them at one position."""
    return {
        "input_ids": input_ids,
        "predictors": torch.tensor([17, 3, 3, 0, 22, 11, 8]),
        "targets": torch.tensor([5, 60, 7, 11, 11, 0, 33]),
    }


def read_logps(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    chosen = logits.flatten(0, 1)[batch["predictors"]]
    return chosen.log_softmax(dim=-1).gather(1, batch["targets"][:, None]).squeeze(1)


def compare(logps: Tensor) -> Tensor:
    """A non-additive objective: the log-sigmoid of the difference of two sequences."""
    return -nn.functional.logsigmoid(logps[:4].sum() - logps[4:].sum())


def test_model_without_loss_head_flag_is_unchanged() -> None:
    plain, headed, batch = make_model(with_head=False), make_model(), make_batch()
    ours, expected = headed(**batch), plain(**batch)
    assert torch.equal(ours.logits, expected.logits)
    assert torch.equal(ours.loss, expected.loss)
    assert inspect.signature(headed.forward) == inspect.signature(plain.forward)
    prompt = batch["input_ids"][:1, :3]
    limits = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(headed.generate(prompt, **limits), plain.generate(prompt, **limits))
    assert headed.state_dict().keys() == plain.state_dict().keys()


def test_loss_head_never_calls_output_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(nn.Linear, "forward", _refuse_vocabulary(nn.Linear.forward))
    model(**make_batch(), loss_head=True)
    model(**make_targets(make_batch()["input_ids"]), token_logps=True)


def _refuse_vocabulary(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(self: nn.Linear, hidden: Tensor) -> Tensor:
        assert self.out_features != 61
        return forward(self, hidden)

    return checked


def test_backbone_receives_position_ids_without_mask_and_cache() -> None:
    model, batch, seen = make_model(), make_batch(), {}
    model.config.use_cache = True
    model.model.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    model(**batch, use_cache=True, loss_head=True)
    assert seen["use_cache"] is False
    assert "attention_mask" not in seen
    assert torch.equal(seen["position_ids"], batch["position_ids"])


@pytest.mark.parametrize(
    ("length", "boundaries", "num_read"),
    [(17, False, 16), (16, False, 16), (18, False, 18), (1, False, 1), (17, True, 17)],
)
def test_last_token_is_dropped_if_length_is_one_above_multiple_of_16(length, boundaries, num_read) -> None:
    model, seen, ids = make_model(), {}, torch.arange(length)[None]
    model.model.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    flat = {"cu_seq_lens_q": torch.tensor([0, length])} if boundaries else {}
    model(input_ids=ids, position_ids=ids, labels=ids, loss_head=True, **flat)
    assert (seen["input_ids"].shape[1], seen["position_ids"].shape[1]) == (num_read, num_read)


def test_attention_mask_is_refused() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="takes no attention_mask"):
        make_model()(**batch, attention_mask=torch.ones_like(batch["input_ids"]), loss_head=True)


def test_packed_loss_is_sum_of_losses_of_documents() -> None:
    model, batch = make_model(), make_batch()
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:, 5] = -100
    alone = [
        model(input_ids=batch["input_ids"][:, part], labels=batch["labels"][:, part], loss_head=True).nll_sum
        for part in (slice(0, 5), slice(5, 12))
    ]
    torch.testing.assert_close(model(**batch, loss_head=True).nll_sum, sum(alone))


def test_deepcopy_uses_its_own_weights() -> None:
    model, batch = make_model(), make_batch()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    for flag in (True, False):
        before, after = model(**batch, loss_head=flag), twin(**batch, loss_head=flag)
        assert before[0].item() != after[0].item()


@pytest.mark.parametrize("order", ["head_first", "adapter_first"])
def test_token_logps_and_gradients_under_lora(order: str) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    wrapped = peft.get_peft_model(make_model(with_head=order == "head_first"), config)
    if order == "adapter_first":
        add_loss_head(wrapped)
    batch = make_targets(make_batch()["input_ids"])
    expected = read_logps(wrapped(input_ids=batch["input_ids"], use_cache=False).logits, batch)
    compare(expected).backward()
    gradients = {name: parameter.grad for name, parameter in wrapped.named_parameters() if "lora_" in name}
    wrapped.zero_grad()
    ours = wrapped(**batch, token_logps=True).logps
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    compare(ours).backward()
    trained = {name: parameter.grad for name, parameter in wrapped.named_parameters() if parameter.grad is not None}
    torch.testing.assert_close(trained, gradients, rtol=1e-5, atol=1e-5)
    with wrapped.disable_adapter(), torch.no_grad():
        reference = wrapped(**batch, token_logps=True).logps
    plain = read_logps(make_model(with_head=False)(input_ids=batch["input_ids"]).logits, batch)
    torch.testing.assert_close(reference, plain, rtol=1e-5, atol=1e-5)


def test_output_projection_with_lora_is_refused() -> None:
    wrapped = peft.get_peft_model(make_model(with_head=False), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match=r"by peft\.Linear, not by nn\.Linear"):
        add_loss_head(wrapped)


def test_output_projection_of_its_own_forward_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * self.scale

    model = make_model(with_head=False)
    model.lm_head.__class__ = Scaled
    # As in a new model, whose logits show no difference.
    model.lm_head.scale = nn.Parameter(torch.ones(61))
    with pytest.raises(ConfigError, match=r"by tests\.Scaled, not by nn\.Linear"):
        add_loss_head(model)


def test_model_without_output_projection_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NoneType, not by nn\.Linear"):
        add_loss_head(make_model(with_head=False).model)


def test_verify_loss_head_refuses_rescaled_logits() -> None:
    class Scaled(LlamaForCausalLM):
        def forward(self, *args: object, labels: Tensor | None = None, **kwargs: object) -> object:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits * 1.01
            if labels is not None:
                outputs.loss = self.loss_function(outputs.logits, labels, self.config.vocab_size)
            return outputs

    model = Scaled(make_model(with_head=False).config)
    add_loss_head(model)
    with pytest.raises(ConfigError, match="own loss is"):
        verify_loss_head(model)


@pytest.mark.parametrize(
    "config",
    [
        BertGenerationConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        ),
        Gemma3TextConfig(**architectures.SHAPE, use_bidirectional_attention=True),
        # Its experts are routed by all tokens, and their load-balancing loss has another form.
        DogeConfig(
            **architectures.SHAPE, is_moe=True, num_experts=16, num_experts_per_tok=2, output_router_logits=True
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_verify_loss_head_refuses_non_causal_model(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    add_loss_head(model)
    with pytest.raises(ConfigError, match="is not causal"):
        verify_loss_head(model)


ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    "config",
    [
        Glm4MoeConfig(**architectures.SHAPE, **ROUTED, moe_intermediate_size=16, output_router_logits=True),
        # Two further experts return their input.
        LongcatFlashConfig(
            **{**architectures.SHAPE, "num_key_value_heads": 4, "head_dim": 4},
            **{**ROUTED, **LATENT, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
            output_router_logits=True,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_router_loss_that_the_model_does_not_add_is_that_of_all_experts(config: PretrainedConfig) -> None:
    """As trained with ``router_aux_loss_coef``, and saved."""
    config.router_aux_loss_coef = 0.5
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    add_loss_head(model)
    verify_loss_head(model)
    batch = make_batch()
    assert model(**batch).get("aux_loss") is None
    inputs = {name: part for name, part in batch.items() if name != "labels"}
    routers = model.base_model(**inputs, use_cache=False, output_router_logits=True).router_logits
    logits = torch.cat([part.flatten(0, -2) for part in routers]).detach().double()
    # Number of experts times the sum over experts of frequency and mean probability (arXiv 2101.03961, equation 4).
    frequencies = torch.nn.functional.one_hot(logits.topk(2).indices, logits.shape[-1]).sum(1).double().mean(0)
    expected = logits.shape[-1] * (frequencies * logits.softmax(-1).mean(0)).sum()
    aux_loss = model(**batch, loss_head=True).aux_loss
    torch.testing.assert_close(aux_loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_verify_loss_head_accepts_another_coefficient_of_router_loss_than_that_of_checkpoint() -> None:
    model = architectures.make_model("mixtral")
    add_loss_head(model)
    model.config.router_aux_loss_coef = 0.7
    verify_loss_head(model)


def test_verify_loss_head_names_non_finite_weights() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"weights are NaN or infinite: model\.layers\.0\.mlp\.up_proj\.weight"):
        verify_loss_head(model)
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight *= 3e38
    with pytest.raises(ConfigError, match=r"though its weights are finite|weights are NaN or infinite: lm_head"):
        verify_loss_head(model)


def test_verify_loss_head_keeps_rng_state_and_mode() -> None:
    model = make_model().train()
    state = torch.get_rng_state()
    verify_loss_head(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def _train_wrapped(
    rank: int, folder: Path, wrapper: str, model: Any, head: nn.Module, compute: Callable[[nn.Module, int], Tensor]
) -> None:
    limit_forked()
    os.environ |= {"MASTER_ADDR": "localhost", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    wrapped: nn.Module = model
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(output_dtype=torch.float32)
        for unit in [*model.model.layers, *([head] if wrapper == "fsdp2_head_alone" else []), model]:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
    compute(wrapped, rank).backward()
    gradients = {
        name.removeprefix("module."): gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        for name, parameter in wrapped.named_parameters()
        if (gradient := parameter.grad) is not None
    }
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")
    # The process group is not destroyed: DDP's reducer may deadlock with a gloo thread over the GIL.
    distributed.barrier()
    os._exit(0)


def train_by_two(folder: Path, *given: Any) -> dict[str, Tensor]:
    """Gradients of a wrapped model on two processes, each with its own batch (``_train_wrapped``)."""
    # Forked: importing torch and transformers in a new interpreter takes half a minute.
    torch.multiprocessing.start_processes(_train_wrapped, (folder, *given), nprocs=2, start_method="fork")
    return torch.load(folder / "gradients.pt")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("wrapper", "objective"), [("ddp", "logps"), ("fsdp2", "loss"), ("fsdp2", "logps"), ("fsdp2_head_alone", "loss")]
)
def test_gradients_on_two_processes_are_mean_of_each(wrapper: str, objective: str, tmp_path: Path) -> None:
    def compute(wrapped: nn.Module, seed: int) -> Tensor:
        verify_loss_head(getattr(wrapped, "module", wrapped))
        if objective == "loss":
            return wrapped(**make_batch(seed), loss_head=True).nll_sum
        return compare(wrapped(**make_targets(make_batch(seed)["input_ids"]), token_logps=True).logps)

    headed, model = make_model(), make_model(with_head=False)
    gradients = train_by_two(tmp_path, wrapper, headed, headed.lm_head, compute)
    for seed in (0, 1):
        batch = make_batch(seed)
        if objective == "loss":
            loss = model(**batch, use_cache=False).loss * (batch["labels"][:, 1:] >= 0).sum()
        else:
            targets = make_targets(batch["input_ids"])
            loss = compare(read_logps(model(input_ids=batch["input_ids"], use_cache=False).logits, targets))
        (loss / 2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "gpt2", "gemma2", "mixtral", "phi_with_bias"])
def test_token_logps_and_gradients_equal_log_softmax_of_logits(name: str) -> None:
    model = architectures.make_model(name)
    batch = make_targets(architectures.make_batch()["input_ids"])
    own = model(input_ids=batch["input_ids"], use_cache=False)
    expected = read_logps(own.logits, batch)
    has_experts = name == "mixtral"
    expected_gradients = architectures.gradients_of(
        compare(expected) + (0.3 * own.aux_loss if has_experts else 0), model
    )

    add_loss_head(model)
    ours = model(**batch, token_logps=True, with_statistics=True)
    torch.testing.assert_close(ours.logps, expected, rtol=1e-5, atol=1e-5)
    logits = own.logits.flatten(0, 1)[batch["predictors"]]
    assert torch.equal(ours.is_top, logits.argmax(dim=-1) == batch["targets"])
    torch.testing.assert_close(ours.entropy, torch.distributions.Categorical(logits=logits).entropy().detach())
    torch.testing.assert_close(ours.log_sum_sq_probs, (2 * logits.log_softmax(dim=-1)).logsumexp(dim=-1).detach())
    assert (ours.aux_loss is not None) == has_experts
    gradients = architectures.gradients_of(compare(ours.logps) + (0.3 * ours.aux_loss if has_experts else 0), model)
    assert gradients.keys() == expected_gradients.keys()
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)


def test_token_statistics_are_returned_on_request_only() -> None:
    scored = make_model()(**make_targets(make_batch()["input_ids"]), token_logps=True)
    assert scored.entropy is None
    assert scored.log_sum_sq_probs is None


def make_shared_prompt() -> tuple[dict[str, Tensor], list[Tensor]]:
    """One row that holds a prompt of 4 tokens and answers of 3 and 5 to it, and the same as two conversations."""
    prompt, first, second = torch.randint(3, 61, (12,), generator=torch.Generator().manual_seed(1)).split((4, 3, 5))
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    visible[7:, 4:7] = False
    packed = {
        "input_ids": torch.cat([prompt, first, second])[None],
        "position_ids": torch.cat([torch.arange(7), torch.arange(4, 9)])[None],
        "attention_mask": visible[None, None],
        "predictors": torch.tensor([3, 4, 5, 3, 7, 8, 9, 10]),
        "targets": torch.cat([first, second]),
    }
    return packed, [torch.cat([prompt, answer])[None] for answer in (first, second)]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("qwen3", "sdpa"),
        ("gpt2", "sdpa"),
        ("gpt2", "eager"),
        ("gemma2", "eager"),
    ],
)
def test_shared_prompt_logps_equal_separate_answers(name: str, implementation: str) -> None:
    model = architectures.make_model(name)
    model.set_attn_implementation(implementation)
    if name == "gemma2":
        # That of the longer answer with its prompt; the row of both answers has 12 tokens.
        model.config.sliding_window = 9
    add_loss_head(model)
    packed, alone = make_shared_prompt()
    expected = [
        model(input_ids=ids, predictors=torch.arange(3, ids.shape[1] - 1), targets=ids[0, 4:], token_logps=True).logps
        for ids in alone
    ]
    ours = model(**packed, token_logps=True).logps
    torch.testing.assert_close(ours, torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [torch.ones(1, 12, dtype=torch.bool), torch.zeros(1, 1, 12, 12)])
def test_mask_of_wrong_form_is_refused(mask: Tensor) -> None:
    packed, _ = make_shared_prompt()
    with pytest.raises(ValueError, match=r"attention_mask must be bool \(B, 1, L, L\)"):
        make_model()(**(packed | {"attention_mask": mask}), token_logps=True)


def test_mask_is_refused_by_kernel_without_masks() -> None:
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2 takes no attention_mask"):
        model(**make_shared_prompt()[0], token_logps=True)
