"""Our own configuration keys, in sections of at most twelve fields; every other key is upstream's.

A field's docstring (the string under it) is its help text, in ``--help`` and in the pages of ``docs/configs/``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Required, TypedDict, get_type_hints, overload

from recipes_lib.config.table import load_table


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Knowledge distillation from a teacher; the spelling of TRL's ``DistillationConfig`` where it has the key."""

    teacher_model_name_or_path: str | None = None
    """Hub id or folder of the teacher, which has the student's tokenizer; it is frozen, and not saved."""
    teacher_model_revision: str | None = None
    """Commit, tag or branch of a Hub teacher."""
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the teacher's weights; ``auto`` is that of its checkpoint."""
    teacher_top_k: int | None = None
    """Top-k tokens per position in the store of ``recipes distill-store``. Unset: the teacher runs during training."""
    distillation_alpha: float = 0.5
    """Weight of the cross entropy on the text; the rest is that of the divergence from the teacher."""
    distillation_beta: float = 0.0
    """Divergence to the teacher: 0 is forward KL, 1 reverse KL, between them generalised Jensen-Shannon."""
    distillation_temperature: float = 1.0
    """Divides the logits of both models before the divergence, which is multiplied by its square."""
    lmbda: float = 0.0
    """Share of on-policy steps: the student samples the answers and the teacher scores them; GKD's spelling."""
    sampling_temperature: float = 1.0
    """Temperature of the answers that the student samples."""


RELATION_WEIGHTS: Final = ("attention_weight", "similarity_weight", "distance_weight", "angle_weight")
WEIGHTS: Final = ("feature_weight", *RELATION_WEIGHTS)
"""The keys that turn a part of the loss on; each part is its own figure of a logged step."""


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """Hidden-state and attention distillation, in addition to the divergence of the outputs."""

    feature_weight: float = 0.0
    """Weight of the difference of hidden states, in mapped layers and through a learned projection for each."""
    feature_loss: Literal["mse", "cosine"] = "mse"
    """Difference of hidden states: ``mse`` of states of mean square 1, or one minus their ``cosine``."""
    feature_layers: list[int] | None = None
    """Layers of the student, from 1, whose hidden states are compared. Unset: all of them."""
    projection_learning_rate: float = 1e-3
    """Peak learning rate of the projections, which are initialised randomly; their schedule is that of the student."""
    attention_weight: float = 0.0
    """Weight of the KL from the teacher's attention, the mean of a layer's heads; ``attn_implementation: eager``."""
    similarity_weight: float = 0.0
    """Weight of the difference of the cosines between the tokens of a document."""
    distance_weight: float = 0.0
    """Weight of the difference of the distances between the tokens of a document, in units of their mean (RKD)."""
    angle_weight: float = 0.0
    """Weight of the difference of the angles between the tokens of a document (RKD)."""
    relation_layers: list[int] | None = None
    """Layers of the student, from 1, whose attention and relations between tokens are compared. Unset: the last."""


DatasetFormat = Literal[
    "auto", "messages", "prompt_completion", "text", "sharegpt", "alpaca", "dolly", "question_answer", "preference"
]
LossOn = Literal["assistant", "last_assistant", "completion", "all"]
Overlong = Literal["error", "truncate", "drop", "split"]


class MixtureEntry(TypedDict, total=False):
    """One dataset of ``dataset_mixture``."""

    name: Required[str]
    """Hub id or path, as ``dataset_name``."""
    weight: float
    """Its share of the mixture, of the rows in fine-tuning and of the tokens in pretraining, relative to the sum."""
    repeat: float
    """Passes over its rows, instead of a share: 0.5 takes a random half, 2 takes each twice. Default 1."""
    config: str
    """As ``dataset_config``."""
    revision: str
    """As ``dataset_revision``."""
    split: str
    """As ``dataset_train_split``."""
    format: DatasetFormat
    """As ``dataset_format``."""
    columns: dict[str, Any]
    """As ``dataset_columns``."""


class CurriculumPhase(TypedDict):
    """One phase of ``dataset_curriculum``."""

    start_tokens: int
    """Tokens trained on when the phase begins; 0 for the first."""
    weights: list[float]
    """Share of each dataset of ``dataset_mixture``, in its order; they need not sum to 1."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets: training rows, held-out rows, mixtures and columns."""

    dataset_name: str | None = None
    """Hub id, or path of a file or folder (JSON, JSONL, CSV, Parquet, Arrow, text, ``save_to_disk``)."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset."""
    dataset_revision: str | None = None
    """Commit, tag or branch of a Hub dataset; a commit makes the run reproducible."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str | None = None
    """Held-out split, by name; or a path, which has a ``/`` or a suffix: ``./test``. Unset: see ``test_split_size``."""
    test_split_size: float | int | None = None
    """Hold out this share (below 1) or number (1 and above) of rows when no test split is named."""
    eval_datasets: dict[str, Any] | None = None
    """More held-out sets with figures of their own, ``eval_NAME_loss``: ``{web: path, chat: {name: x, split: test}}``,
    with the keys of a mixture's entry but ``weight`` and ``repeat``."""
    dataset_mixture: list[dict[str, Any]] | None = field(default=None, metadata={"items": MixtureEntry})
    """Several datasets for one: a list of names, or of ``{name, weight, repeat, config, revision, split, format,
    columns}``."""
    dataset_format: DatasetFormat = "auto"
    """Row layout; ``auto`` detects it from the columns and logs it."""
    dataset_columns: dict[str, Any] | None = None
    """Column mapping: ``{prompt: question, completion: answer}``; ``{label: null}`` hides one."""
    dataset_streaming: bool = False
    """Tokenise while training, for data larger than the disk; needs ``max_steps``."""
    allow_eval_overlap: bool = False
    """Accept training rows that are also held-out rows."""


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Tokenisation, loss mask, sequence length and packing."""

    loss_on: LossOn | None = None
    """Tokens trained on. Unset: ``assistant`` for chats, ``completion`` for prompt/completion, ``all`` for text."""
    max_length: int | None = None
    """Tokens in a row of the batch. Unset: the longest example, rounded up to 64; nothing is truncated."""
    overlong: Overlong = "error"
    """Handling of examples longer than ``max_length``."""
    max_truncated_fraction: float | None = None
    """Largest share of target tokens that ``overlong`` may lose before it is an error. Unset: any, with a warning."""
    broken_rows: Literal["error", "drop"] = "error"
    """Handling of rows that cannot be read, rendered or tokenised; dropped rows are counted."""
    max_broken_fraction: float = 0.01
    """Largest share of rows that ``broken_rows: drop`` may leave out before it is an error."""
    packing: bool = True
    """Pack several examples into each row of the batch, isolated in attention and positions."""
    chat_template_path: str | None = None
    """Jinja file that replaces the tokenizer's chat template, in training and in the exported model."""
    eos_token: str | None = None
    """Token that ends text and completions. Unset: the tokenizer's."""
    pad_token: str | None = None
    """Padding token. Unset: the tokenizer's; it is never trained on, whatever its id."""
    prepared_dir: str | None = None
    """Where prepared sets are kept. Unset: ``~/.cache/recipes_lib/prepared``."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model and tokenizer, and how they are loaded; TRL's ``ModelConfig`` spelling."""

    model_name_or_path: str | None = None
    """Hub id or folder of the model to start from."""
    model_config: dict[str, Any] | None = None
    """Architecture to start from random weights, as in a ``config.json``: ``{model_type: llama, hidden_size: 768}``."""
    model_revision: str | None = None
    """Commit, tag or branch of a Hub model."""
    tokenizer_name_or_path: str | None = None
    """Hub id or folder of the tokenizer. Unset: the model's."""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of a Hub tokenizer. Unset: ``model_revision`` when it is the model's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Precision of the master weights; the compute precision is ``bf16`` / ``fp16``."""
    attn_implementation: str | None = None
    """``sdpa``, ``eager``, ``varlen``, ``flash_attention_2``, ``flash_attention_3`` or, from the Hub,
    ``kernels-community/flash-attn3``. Unset: the fastest of those installed that isolates packed documents."""
    trust_remote_code: bool = False
    """Run code shipped with the model; needs ``model_revision`` to be a commit."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation: samples, metrics and cost; when it runs is upstream's ``eval_strategy`` and ``eval_steps``."""

    num_sample_prompts: int = 4
    """Held-out prompts answered at each evaluation; 0 turns samples off."""
    sample_prompts: list[str] | None = None
    """Prompts to answer instead of held-out ones."""
    sample_max_new_tokens: int = 128
    """Length limit of a sample; samples are greedy."""
    metrics: list[str] | None = None
    """Metrics on the samples: import paths of ``evaluate.Metric`` classes, as ``package.module:Class``."""
    eval_tasks: list[str] | None = None
    """Benchmark scores while training: suites or tasks of ``recipes eval``, on the model in memory."""
    eval_tasks_steps: int | None = None
    """Evaluate them at multiples of this step, and at the end. Unset: at every evaluation, and at the end."""
    eval_tasks_limit: int = 100
    """Questions of each task, the first ones."""
    eval_tasks_include_path: list[str] | None = None
    """Folders of task files of your own, which may read local data."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without an improvement of ``metric_for_best_model``, or of the loss."""
    early_stopping_threshold: float = 0.0
    """Smallest change that counts as an improvement."""
    device_hour_price: float | None = None
    """Price of one GPU for an hour, in any currency, for the cost in plan and card. Unset: no cost is given."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint retention, beyond upstream's ``save_`` keys."""

    save_keep_steps: int | None = None
    """Never delete the checkpoints at multiples of this many steps, whatever ``save_total_limit``."""


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """Pretraining: documents, mixture schedule, length of the run and weight decay."""

    cross_document_attention: bool = False
    """Let tokens attend to the documents before theirs in the row, as GPT-2 and GPT-3 did."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """Unit of a document in text and Markdown files: the file, a paragraph, or a line."""
    dataset_curriculum: list[dict[str, Any]] | None = field(default=None, metadata={"items": CurriculumPhase})
    """Mixture weights by phase: a list of ``{start_tokens, weights}``, weights in the mixture's order."""
    max_tokens: int | None = None
    """Tokens to train on, instead of ``max_steps`` or ``num_train_epochs``."""
    decay_embeddings: bool = True
    """Apply ``weight_decay`` to embeddings; biases and norms never decay."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and batch size over the run; ``lr_scheduler_type`` names the shape."""

    min_lr_ratio: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    warmup_tokens: int | None = None
    """Tokens over which the learning rate rises to its peak, instead of ``warmup_steps``."""
    decay_steps: float | int = 0.2
    """``warmup_stable_decay``: share (below 1) or number of steps over which the rate falls at the end."""
    decay_type: Literal["linear", "cosine", "1-sqrt", "exponential"] = "1-sqrt"
    """``warmup_stable_decay``: shape of the decay."""
    batch_ramp_tokens: int | None = None
    """Tokens over which the batch grows to its full size."""
    batch_ramp_start: float = 0.1
    """Batch at the start of the ramp, as a share of the full one; rounded up to whole micro-batches."""
    batch_ramp_lr: Literal["constant", "sqrt", "linear"] = "sqrt"
    """How the learning rate follows the batch on the ramp: not at all, by its square root (Adam), or in proportion."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters (LoRA); TRL's and PEFT's spelling."""

    use_peft: bool = False
    """Train an adapter and freeze the model."""
    adapter_name_or_path: str | None = None
    """Hub id or folder of an adapter to continue training, on the base that it names. Unset: a new one."""
    lora_r: int = 16
    """Rank of the adapter's matrices."""
    lora_alpha: int = 32
    """Scale of the adapter: its product is multiplied by ``lora_alpha / lora_r``."""
    lora_dropout: float = 0.0
    """Dropout before the adapter; preference recipes and PPO compare log-probabilities and need 0."""
    lora_target_modules: list[str] | None = None
    """Layers that get an adapter, by the end of their names. Unset: ``all-linear``, every linear layer but the head."""
    lora_modules_to_save: list[str] | None = None
    """Modules trained fully in addition to the adapter and saved with it, such as ``embed_tokens`` and ``lm_head``."""
    init_lora_weights: Literal["default", "gaussian", "pissa", "olora", "orthogonal"] = "default"
    """Initialisation of a new adapter; ``pissa`` moves the principal components of the weights into it."""
    use_rslora: bool = False
    """Scale by ``lora_alpha / sqrt(lora_r)`` instead, which keeps gradients stable at high ranks."""
    use_dora: bool = False
    """DoRA: learn magnitude and direction of the weight rows separately."""
    loraplus_lr_ratio: float | None = None
    """LoRA+: learning rate of the B matrices over that of the A matrices; 16 in the paper."""


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """The frozen model under an adapter, in 8 or 4 bits by bitsandbytes."""

    load_in_8bit: bool = False
    """LLM.int8(): one byte a weight."""
    load_in_4bit: bool = False
    """QLoRA: half a byte a weight."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """Levels of the 4-bit weights; NF4 suits weights, which are normally distributed."""
    use_bnb_nested_quant: bool = True
    """Quantise the quantisation's own constants too, which saves 0.4 bits a weight."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Preference pairs: layout, reference model and label noise."""

    shared_prompt: bool | None = None
    """Compute the prompt once for both answers. Unset: wherever the model and the kernel allow it."""
    ref_model_name_or_path: str | None = None
    """Reference model, if it is not the model that training starts from."""
    ref_model_revision: str | None = None
    """Commit, tag or branch of a Hub reference model."""
    simpo_gamma: float = 0.5
    """``loss_type: simpo``: margin by which the mean log-probability of the chosen answer, times ``beta``, must win."""
    label_smoothing: float = 0.0
    """Share of pairs that are expected to be labelled the wrong way round."""
    unfinished_share: float = 0.0
    """Share of pairs whose rejected answer is a truncated copy of the chosen one, to penalise unfinished answers."""


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """Guards: rollback after a loss spike and verification of the hardware; see ``docs/guards.md``."""

    max_rollbacks: int = 0
    """Rollbacks to a checkpoint after a loss spike, which skip the rows of the spike; at 0 spikes are only logged."""
    verify_steps: int | None = None
    """Compute every N-th step twice and compare the weights of all ranks, bit by bit. Unset: never."""


@dataclass(frozen=True, kw_only=True)
class ForgettingConfig:
    """Training that remembers: replay, elastic weight consolidation, KL to the start; see ``docs/forgetting.md``."""

    replay_dataset: str | None = None
    """Hub id or path of earlier data that are trained on among the new; their layout is detected."""
    replay_from: str | None = None
    """Output directory of an earlier run, whose own training rows are replayed: those that its ``run.json`` names."""
    replay_share: float = 0.05
    """Share of the replayed data in the loss: in trained tokens, of DPO in pairs. At every step exact to a row."""
    ewc_lambda: float = 0.0
    """Elastic weight consolidation: half of this times the sum of ``F (w - w*)^2`` over all weights, in the loss."""
    ewc_fisher: Literal["diagonal", "identity"] = "diagonal"
    """``F``: the diagonal Fisher information that ``recipes fisher`` computes, or 1 everywhere, which is L2-SP."""
    ewc_reference: str | None = None
    """Folder with ``w*`` and its Fisher information. Unset: the model that training starts from."""
    kl_to_base: float = 0.0
    """Coefficient of the KL divergence of the model to the one it starts from, in the loss of each trained token."""


@dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """Sampled answers and their rewards."""

    response_length: int = 256
    """Longest answer, in tokens."""
    temperature: float = 1.0
    """Sampling temperature, also applied to all compared log-probabilities."""
    reward_funcs: list[str] | None = None
    """Functions that score answers: import paths ``package.module:function``, called as TRL's GRPO calls them, or
    ``"package.module:factory(name=value)"``, which returns such a function."""
    reward_model_name_or_path: str | None = None
    """Reward model that scores answers, with its own tokenizer and template; its scores are cut off at ±10."""
    reward_model_revision: str | None = None
    """Commit, tag or branch of a Hub reward model."""
    reward_timeout: float | None = None
    """Seconds that a call of a function may take, each function in a process of its own: an answer on which it hangs or
    crashes is not scored. Unset: they run in the training process, without a limit."""
    reward_weights: list[float] | None = None
    """Factor of each reward in their sum: the functions in their order, then the model. Unset: 1 each."""
    missing_eos_penalty: float | None = 1.0
    """Subtracted from the score of an answer that reached ``response_length``; null subtracts nothing."""
    max_num_gen_batches: int = 1
    """Batches of answers that an iteration samples at most: groups whose answers all earn the same are left out, and
    other prompts asked in their place, as in DAPO; verl's spelling. 1: none is left out."""
    max_zero_std_rollouts: int | None = 20
    """End the run after so many rollouts in a row in which no answer to a prompt earns more than another, so that
    nothing can be learnt; null never ends it. See ``docs/guards.md``."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Value function of PPO: where it starts, how it is trained and kept."""

    critic_model_name_or_path: str | None = None
    """Initial weights of the critic. Unset: the reward model, else the policy with a head of 0. With ``use_peft`` it is
    an adapter beside the policy's, and starts from a reward model saved as such an adapter, else from nothing."""
    critic_learning_rate: float = 1e-5
    """Peak learning rate of the critic; its schedule is that of the policy."""
    critic_warmup_iterations: int = 0
    """Iterations in which the critic alone is updated, before the first update of the policy."""
    save_critic: bool = False
    """Also save the trained critic in ``critic/``, as a reward model; not supported for an adapter."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Generation engine of answers, instead of ``generate``; the spelling of TRL's ``GRPOConfig``."""

    use_transformers_continuous_batching: bool = False
    """Sample by transformers' continuous batching: a finished answer is replaced by the next prompt. For GPUs."""
    transformers_continuous_batching_config: dict[str, Any] | None = None
    """Settings of transformers' ``ContinuousBatchingConfig``, such as ``{max_memory_percent: 0.5}``."""
    use_vllm: bool = False
    """Sample by vLLM, which gets the policy's weights every iteration."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """``colocate``: an engine in each training process, on its device. ``server``: a separately started one."""
    vllm_gpu_memory_utilization: float = 0.3
    """Share of a device's memory that the colocated engine takes, weights and KV cache together."""
    vllm_enable_sleep_mode: bool = False
    """Release that memory between rollouts; for GPUs, where waking up takes a fraction of a second."""
    vllm_server_base_url: str = "http://localhost:8000"
    """URL of the vLLM server."""
    vllm_server_timeout: float = 240.0
    """Seconds to wait for it at the start."""
    vllm_group_port: int = 51216
    """Port of the weight transfer."""
    max_staleness: int = 0
    """1: the server samples the next iteration's answers, with the previous weights, during the updates."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """PPO updates: KL penalty, clipping and advantage estimation; the spelling of TRL's old ``PPOConfig``."""

    num_ppo_epochs: int = 2
    """Passes over the answers of an iteration."""
    num_mini_batches: int = 4
    """Optimizer steps in a pass; an iteration samples as many answers as they take together."""
    kl_coef: float = 0.05
    """KL coefficient: reward subtracted per nat of KL to the reference model, a copy of the initial policy."""
    kl_target_per_sequence: float | None = None
    """KL divergence of a whole answer, in nats, that ``kl_coef`` is adapted to. Unset: ``kl_coef`` is fixed."""
    kl_horizon: float = 10_000
    """Answers over which ``kl_coef`` follows ``kl_target_per_sequence``."""
    target_kl: float | None = 0.03
    """Nats a token off the policy that answered; at 1.5 times as many an iteration's updates end. Unset: never."""
    gamma: float = 1.0
    """Discount of the rewards of later tokens."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation; 1 for answers above some 500 tokens."""
    cliprange: float = 0.2
    """Clip range of the probability ratio between new and old policy."""
    dual_clip: float | None = None
    """Dual clip: largest loss of a token with negative advantage, in units of it; 3 is usual. Unset: none."""
    cliprange_value: float | None = 0.2
    """Clip range of the value update; null disables clipping."""
    whiten_rewards: bool = False
    """Divide rewards by their standard deviation; advantages are whitened always."""


_IntKey = Literal[
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_steps"
]
_FloatKey = Literal["learning_rate", "num_train_epochs", "save_steps", "warmup_steps", "weight_decay"]


@overload
def read_training(training: Mapping[str, Any], key: _IntKey) -> int: ...
@overload
def read_training(training: Mapping[str, Any], key: _FloatKey) -> float: ...
@overload
def read_training(training: Mapping[str, Any], key: str) -> Any: ...
def read_training(training: Mapping[str, Any], key: str) -> Any:
    """Return the value of an upstream key from a mapping without keys at upstream's default.

    ``RecipeConfig.read`` is for a whole configuration, whose recipe may have another default.

    Args:
        training: Such as ``RecipeConfig.training``, or the keys that a checkpoint records.
        key: A key of transformers' ``TrainingArguments``.

    Raises:
        KeyError: Upstream has no such key.
    """
    if key in training:
        return training[key]
    known = load_table("sft").keys[key]
    return known.upstream_default if known.reason else known.default


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Configuration of a run: our sections, upstream's training keys, and the provenance of each value.

    Attributes:
        recipe: Name of the recipe, one of ``table.RECIPE_NAMES``.
        path: The YAML file; ``None`` when everything came from flags.
        training: Upstream's keys: the user's values, and our defaults where they differ from upstream's.
        provenance: For every effective key, ``default``, ``file:line``, a flag, or ``derived: why``.
    """

    recipe: str
    path: Path | None
    data: DataConfig
    tokens: TokensConfig
    model: ModelConfig
    evaluation: EvaluationConfig
    checkpoints: CheckpointConfig = CheckpointConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    adapter: AdapterConfig = AdapterConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    preference: PreferenceConfig = PreferenceConfig()
    guards: GuardsConfig = GuardsConfig()
    forgetting: ForgettingConfig = ForgettingConfig()
    rewards: RewardsConfig = RewardsConfig()
    critic: CriticConfig = CriticConfig()
    engine: EngineConfig = EngineConfig()
    ppo: PPOConfig = PPOConfig()
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    layers: LayersConfig = field(default_factory=LayersConfig)
    training: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    @overload
    def read(self, key: _IntKey) -> int: ...
    @overload
    def read(self, key: _FloatKey) -> float: ...
    @overload
    def read(self, key: str) -> Any: ...
    def read(self, key: str) -> Any:
        """Return the effective value of one of upstream's keys: the user's, or the default of this recipe.

        Raises:
            KeyError: The recipe has no such key.
        """
        return self.training[key] if key in self.training else load_table(self.recipe).keys[key].default

    def with_training(self, keys: Mapping[str, Any]) -> RecipeConfig:
        """Return the same configuration with other values of some of upstream's keys."""
        return dataclasses.replace(self, training={**self.training, **keys})


SECTIONS: Final[Mapping[str, type]] = {
    name: section
    for name, section in get_type_hints(RecipeConfig).items()
    if isinstance(section, type) and dataclasses.is_dataclass(section)
}
"""Our sections by the name of their field in ``RecipeConfig``; ``recipes.py`` lists the keys that a recipe refuses."""


def flatten_config(config: RecipeConfig) -> dict[str, Any]:
    """Return every effective key of a recipe, sections and upstream keys together, as in the YAML file."""
    keys = load_table(config.recipe).keys
    flat = {name: value for name, value in list_sections(config).items() if name in keys} | dict(config.training)
    return {name: flat[name] for name in sorted(flat)}


def list_sections(config: RecipeConfig) -> dict[str, Any]:
    """Return the keys of all our sections, including those that the recipe does not have."""
    return {name: value for section in SECTIONS for name, value in dataclasses.asdict(getattr(config, section)).items()}
