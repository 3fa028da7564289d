"""Shipped pretraining configurations against published runs: parameters, batch, learning rates, tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.forked import ROOT
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.models.architecture import build_model_config
from recipes_lib.planning.schedule import Schedule, plan_pretraining

CONFIGS = ROOT / "recipes" / "configs"
BATCH = re.compile(
    r"# Batch: (\d+) data-parallel processes x (\d+) rows x (\d+) accumulated x (\d+) tokens = (\d+) tokens\."
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Facts of a run in a paper, model card or training script.

    Attributes:
        parameters: Number of model parameters.
        batch: Tokens per step, and the relative rounding error of the published number.
        first_batch: Tokens of the first step, if the batch size grows.
        peak: Peak learning rate.
        floor: Final learning rate as a fraction of the peak.
        warmup: Warm-up in steps, or in tokens from 1,000,000.
        epsilon: Adam epsilon.
        decay: Weight decay.
        tokens: Training tokens.
        kind: ``lr_scheduler_type``.
    """

    parameters: int
    batch: tuple[float, float]
    first_batch: float | None = None
    peak: float
    floor: float
    warmup: int
    epsilon: float = 1e-8
    decay: float = 0.1
    tokens: float
    kind: str = "cosine"


PUBLISHED = {
    # nanoGPT, config/train_gpt2.py and train.py.
    "gpt2-124m/pretrain": Published(
        parameters=124_439_808, batch=(491_520, 0), peak=6e-4, floor=0.1, warmup=2000, tokens=600_000 * 491_520
    ),
    # build-nanogpt, train_gpt2.py; its embedding has 47 spare rows.
    "gpt2-124m/pretrain_h200": Published(
        parameters=124_439_808 + 47 * 768, batch=(2**19, 0), peak=6e-4, floor=0.1, warmup=715, tokens=19_073 * 2**19
    ),
    # Brown et al. 2020, tables 2.1 and D.1 (174,600M) and appendix B.
    "gpt3-175b/pretrain": Published(
        parameters=174_604_259_328,
        batch=(3.2e6, 0.03),
        first_batch=32_768,
        peak=0.6e-4,
        floor=0.1,
        warmup=375_000_000,
        tokens=300e9,
    ),
    # Touvron et al. 2023, section 2.2 and table 1.
    "llama2-7b/pretrain": Published(
        parameters=6_738_415_616, batch=(4e6, 0.05), peak=3e-4, floor=0.1, warmup=2000, epsilon=1e-5, tokens=2e12
    ),
    "llama2-70b/pretrain": Published(
        parameters=68_976_648_192, batch=(4e6, 0.05), peak=1.5e-4, floor=0.1, warmup=2000, epsilon=1e-5, tokens=2e12
    ),
    # Hoffmann et al. 2022, table 4; Rae et al. 2021, section 3.2. 80 matrices of 8,192 x 8,192 for relative positions
    # are not in this model.
    "chinchilla-70b/pretrain": Published(
        parameters=64_950_116_352,
        batch=(3e6, 0.05),
        first_batch=1.5e6,
        peak=1e-4,
        floor=0.1,
        warmup=1500,
        tokens=1.4e12,
    ),
    # Jiang et al. 2023, table 1, for the shape; the rest is no published figure.
    "mistral-7b/pretrain": Published(
        parameters=7_241_732_096, batch=(4e6, 0.05), peak=3e-4, floor=0.1, warmup=1000, tokens=8e12
    ),
    # Grattafiori et al. 2024, table 3 and section 3.4.1.
    "llama3-8b/pretrain": Published(
        parameters=8_030_261_248, batch=(4e6, 0.05), peak=3e-4, floor=0.01, warmup=8000, epsilon=1e-5, tokens=15e12
    ),
    # huggingface/smollm, config_smollm2_135M.yaml; Allal et al. 2025, section 6.
    "smollm2-135m/pretrain": Published(
        parameters=134_515_008,
        batch=(2**20, 0),
        peak=3e-3,
        floor=0.0,
        warmup=2000,
        decay=0.01,
        tokens=2_000_000 * 2**20,
        kind="warmup_stable_decay",
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A shipped configuration, its header, and its schedule at the world size of the header."""

    head: str
    config: RecipeConfig
    schedule: Schedule
    published: Published


@pytest.fixture(scope="module", params=PUBLISHED)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    path = CONFIGS / f"{request.param}.yaml"
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    config = load_config("pretrain", ["--config", str(path)])
    found = BATCH.search(head)
    assert found, "the header says how the batch is made up"
    return Recipe(head, config, plan_pretraining(config, int(found[1])).schedule, PUBLISHED[request.param])


def test_every_pretraining_config_is_compared() -> None:
    paths = [path for path in CONFIGS.rglob("pretrain*.yaml") if "\nmodel_config:" in path.read_text(encoding="utf-8")]
    shipped = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in paths}
    assert {name for name in shipped if not name.startswith("demo/")} == set(PUBLISHED)


def test_parameter_count_matches_publication(recipe: Recipe, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    architecture = recipe.config.model.model_config
    assert architecture is not None
    model_config = build_model_config(architecture, tiny_tokenizer, recipe.config.tokens.max_length)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    assert model.num_parameters() == recipe.published.parameters
    assert not any(getattr(model_config, name, 0) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"))
    assert recipe.config.tokens.max_length is not None
    assert model_config.max_position_embeddings >= recipe.config.tokens.max_length


def test_global_batch_size_matches_publication_and_header(recipe: Recipe) -> None:
    found = BATCH.search(recipe.head)
    assert found
    processes, rows, accumulated, tokens, product = map(int, found.groups())
    training = recipe.config.training
    assert rows == training["per_device_train_batch_size"]
    assert accumulated == training["gradient_accumulation_steps"]
    assert tokens == recipe.config.tokens.max_length
    assert product == processes * rows * accumulated * tokens
    batches = np.diff(recipe.schedule.token_starts)
    full, tolerance = recipe.published.batch
    assert batches.max() == batches[-1] == product == pytest.approx(full, rel=tolerance)
    first = recipe.published.first_batch or product
    assert batches[0] == pytest.approx(first, rel=tolerance if recipe.published.first_batch else 0)
    assert (np.diff(batches) >= 0).all()


def test_token_count_matches_publication(recipe: Recipe) -> None:
    end, wanted = recipe.schedule.token_starts[-1], recipe.published.tokens
    assert recipe.config.pretraining.max_tokens == wanted
    assert wanted <= end < wanted + recipe.schedule.full_tokens


def test_learning_rate_schedule_matches_publication(recipe: Recipe) -> None:
    schedule, published = recipe.schedule, recipe.published
    assert recipe.config.training["learning_rate"] == published.peak
    assert recipe.config.training["lr_scheduler_type"] == schedule.kind == published.kind
    steps = np.unique(np.linspace(0, schedule.num_steps - 1, 5000).astype(int))
    factors = schedule.factors(np.concatenate([steps, [schedule.num_warmup_steps]]))
    assert factors.max() == pytest.approx(1, abs=1e-4)
    assert schedule(schedule.num_steps) == pytest.approx(published.floor, abs=1e-12)
    assert schedule(schedule.num_steps - 1) == pytest.approx(published.floor, abs=1e-4)
    if published.warmup < 1_000_000:
        assert schedule.num_warmup_steps == published.warmup
    else:
        assert schedule.warmup_tokens == published.warmup
    rising = schedule.factors(np.arange(schedule.num_warmup_steps))
    assert 0 < rising[0] < 0.01
    assert (np.diff(rising) >= 0).all()


def test_smollm2_decays_over_last_fifth() -> None:
    config = load_config("pretrain", ["--config", str(CONFIGS / "smollm2-135m" / "pretrain.yaml")])
    schedule = plan_pretraining(config, 64).schedule
    assert (schedule.num_steps, schedule.first_decay_step) == (2_000_000, 1_600_000)
    assert schedule.factors([2000, 1_599_999, 1_700_000, 1_800_000, 2_000_000]) == pytest.approx([1, 1, 0.75, 0.5, 0])


def test_chinchilla_batch_doubles_with_published_mean() -> None:
    config = load_config("pretrain", ["--config", str(CONFIGS / "chinchilla-70b" / "pretrain.yaml")])
    batches = np.diff(plan_pretraining(config, 128).schedule.token_starts)
    assert batches[-1] == 2 * batches[0]
    assert (batches * batches).sum() / batches.sum() == pytest.approx(0.75 * batches[-1], rel=0.01)


def test_optimizer_matches_publication(recipe: Recipe) -> None:
    training, published = recipe.config.training, recipe.published
    assert training.get("optim", "adamw_torch_fused").startswith("adamw")
    assert (training["adam_beta1"], training["adam_beta2"]) == (0.9, 0.95)
    assert training["adam_epsilon"] == published.epsilon
    assert training["weight_decay"] == published.decay
    assert training["max_grad_norm"] == 1.0
    assert training["bf16"] is True


def test_header_names_sources_and_gated_tokenizer(recipe: Recipe) -> None:
    assert re.search(r"^# Sources: ", recipe.head, re.MULTILINE)
    is_gated = str(recipe.config.model.tokenizer_name_or_path).startswith("meta-llama/")
    assert is_gated == ("gated" in recipe.head)


def test_gpt_has_cross_document_attention_and_fused_gelu(recipe: Recipe) -> None:
    """``gelu_new``, transformers' default for GPT-2, computes the same function in eight kernels."""
    architecture = recipe.config.model.model_config or {}
    is_gpt = architecture["model_type"] == "gpt2"
    assert recipe.config.pretraining.cross_document_attention == is_gpt
    assert not is_gpt or architecture["activation_function"] == "gelu_pytorch_tanh"
