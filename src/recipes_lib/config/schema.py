"""Our own configuration keys, in sections of at most twelve fields; every other key is upstream's.

The string literal under a field is its help text, in ``--help`` and in the pages of ``docs/configs/``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Required, TypedDict, get_type_hints

from recipes_lib.config.table import load_table


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Knowledge distillation from a teacher; the spelling of TRL's ``DistillationConfig`` where it has the key."""

    teacher_model_name_or_path: str | None = None
    """Hub id or folder of the teacher, which must have the student's tokenizer; it is frozen and not saved."""
    teacher_model_revision: str | None = None
    """Commit, tag or branch of a Hub teacher."""
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the teacher's weights; ``auto`` is that of its checkpoint."""
    teacher_top_k: int | None = None
    """Train on the top-k log-probabilities of ``recipes distill-store``. Unset: the teacher runs during training."""
    distillation_alpha: float = 0.5
    """Weight of the cross-entropy; the divergence from the teacher has weight 1 - ``distillation_alpha``."""
    distillation_beta: float = 0.0
    """Divergence from the teacher: 0 is forward KL, 1 reverse KL, values between are generalised Jensen-Shannon."""
    distillation_temperature: float = 1.0
    """Temperature of both models' logits in the divergence, which is multiplied by the temperature squared."""
    lmbda: float = 0.0
    """Share of on-policy steps, in which the student samples answers and the teacher scores them; GKD's spelling."""
    sampling_temperature: float = 1.0
    """Sampling temperature of the student's answers in on-policy steps."""


RELATION_WEIGHTS: Final = ("attention_weight", "similarity_weight", "distance_weight", "angle_weight")
WEIGHTS: Final = ("feature_weight", *RELATION_WEIGHTS)
"""Keys whose value above 0 adds a term to the loss; each term is logged separately."""


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """Hidden-state and attention distillation, in addition to the divergence of the outputs."""

    feature_weight: float = 0.0
    """Weight of the hidden-state loss between mapped layers, each with a learned projection."""
    feature_loss: Literal["mse", "cosine"] = "mse"
    """Hidden-state loss: ``mse`` of states normalised to mean square 1, or 1 minus their ``cosine``."""
    feature_layers: list[int] | None = None
    """Student layers, from 1, of the hidden-state loss. Unset: all."""
    projection_learning_rate: float = 1e-3
    """Peak learning rate of the randomly initialised projections; their schedule is that of the student."""
    attention_weight: float = 0.0
    """Weight of the KL from the teacher's attention, averaged over heads; needs ``attn_implementation: eager``."""
    similarity_weight: float = 0.0
    """Weight of the loss on cosine similarities between the tokens of a document."""
    distance_weight: float = 0.0
    """Weight of the loss on distances between the tokens of a document, relative to their mean (RKD)."""
    angle_weight: float = 0.0
    """Weight of the loss on angles between the tokens of a document (RKD)."""
    relation_layers: list[int] | None = None
    """Student layers, from 1, of the attention, similarity, distance and angle losses. Unset: the last."""


DatasetFormat = Literal[
    "auto", "messages", "prompt_completion", "text", "sharegpt", "alpaca", "dolly", "question_answer", "preference"
]
LossOn = Literal["assistant", "last_assistant", "completion", "all"]
Overlong = Literal["error", "truncate", "drop", "split"]


class EvalEntry(TypedDict, total=False):
    """One dataset of ``eval_datasets``."""

    name: Required[str]
    """Hub id or path, like ``dataset_name``."""
    config: str
    """Like ``dataset_config``."""
    revision: str
    """Like ``dataset_revision``."""
    split: str
    """Like ``dataset_train_split``."""
    format: DatasetFormat
    """Like ``dataset_format``."""
    columns: dict[str, Any]
    """Like ``dataset_columns``."""


class MixtureEntry(EvalEntry, total=False):
    """One dataset of ``dataset_mixture``."""

    weight: float
    """Share of the mixture relative to the sum of weights: of rows in fine-tuning, of tokens in pretraining."""
    repeat: float
    """Passes over the rows, instead of ``weight``: 0.5 takes a random half, 2 takes each row twice. Default 1."""


class CurriculumPhase(TypedDict):
    """One phase of ``dataset_curriculum``."""

    start_tokens: int
    """Number of tokens trained on before the phase; 0 for the first phase."""
    weights: list[float]
    """Weight of each dataset of ``dataset_mixture``, in its order, relative to their sum."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets: training rows, held-out rows, mixtures and columns."""

    dataset_name: str | None = None
    """Hub id, or path of a file or folder (JSON, JSONL, CSV, Parquet, Arrow, text, ``save_to_disk``)."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset, or of a folder with a dataset card."""
    dataset_revision: str | None = None
    """Commit, tag or branch of a Hub dataset; a commit makes the run reproducible."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str | None = None
    """Name of the held-out split, or a path with ``/`` or a suffix (``./test``). Unset: see ``test_split_size``."""
    test_split_size: float | int | None = None
    """Share (below 1) or number (from 1) of rows to hold out, instead of ``dataset_test_split``."""
    eval_datasets: dict[str, Any] | None = field(default=None, metadata={"items": EvalEntry})
    """Additional held-out sets, each with its own metrics, ``eval_NAME_loss``: ``{web: path, chat: {name: x, split:
    test}}``, with the keys of a mixture's entry except ``weight`` and ``repeat``."""
    dataset_mixture: list[dict[str, Any]] | None = field(default=None, metadata={"items": MixtureEntry})
    """Several datasets instead of ``dataset_name``: a list of names, or of ``{name, weight, repeat, config, revision,
    split, format, columns}``."""
    dataset_format: DatasetFormat = "auto"
    """Layout of the rows; ``auto`` detects it from the columns and logs it."""
    dataset_columns: dict[str, Any] | None = None
    """Column mapping, ours to theirs: ``{prompt: question, completion: answer}``; ``{label: null}`` hides a column."""
    dataset_streaming: bool = False
    """Stream and tokenise during training, for data larger than the disk; needs ``max_steps``, or ``max_tokens`` of
    pretraining. A resumed fine-tuning run tokenises again what it has trained on; the watchdog ends it after two hours
    without a step."""
    allow_eval_overlap: bool = False
    """Allow rows that are both in the training and the held-out data."""


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Tokenisation, loss mask, sequence length and packing."""

    loss_on: LossOn | None = None
    """Target tokens. Unset: ``assistant`` for chats, ``completion`` for prompt/completion, ``all`` for text."""
    max_length: int | None = None
    """Tokens of a row of the batch; in RL, of a prompt with its answer. Unset: of the longest example."""
    overlong: Overlong = "error"
    """Handling of examples longer than ``max_length``."""
    max_truncated_fraction: float | None = None
    """Maximum share of target tokens that ``overlong`` may remove. Unset: any, with a warning."""
    broken_rows: Literal["error", "drop"] = "error"
    """Handling of rows that cannot be read, rendered or tokenised; dropped rows are counted."""
    max_broken_fraction: float = 0.01
    """Maximum share of rows that ``broken_rows: drop`` may drop; above it is an error."""
    packing: bool = True
    """Pack several examples into each row of the batch, with isolated attention and positions."""
    chat_template_path: str | None = None
    """Jinja file that replaces the tokenizer's chat template, in training and in the saved model."""
    eos_token: str | None = None
    """Token that ends text and completions. Unset: the tokenizer's."""
    pad_token: str | None = None
    """Padding token. Unset: the tokenizer's. Padding is never trained on, whatever its id."""
    prepared_dir: str | None = None
    """Cache folder of prepared sets. Unset: ``recipes_lib/prepared`` in ``HF_HOME``."""
    dataset_num_proc: int | None = None
    """Processes that tokenise. Unset: one per core, at most 8, beyond which reading is the limit."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Messages that are added to chats."""

    system_prompt: str | None = None
    """System message of chats and prompts without one, in training and held-out rows; plain text is an error.
    ``eval_tasks``, ``recipes eval``, ``recipes synthesize`` and servers do not add it."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model and tokenizer, and how they are loaded; TRL's ``ModelConfig`` spelling."""

    model_name_or_path: str | None = None
    """Hub id or folder of the model to start from."""
    model_config: dict[str, Any] | None = None
    """Architecture for random weights, as in ``config.json``: ``{model_type: llama, hidden_size: 768}``."""
    model_revision: str | None = None
    """Commit, tag or branch of a Hub model."""
    tokenizer_name_or_path: str | None = None
    """Hub id or folder of the tokenizer. Unset: the model's."""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of a Hub tokenizer. Unset: ``model_revision`` for the model's tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of the master weights; ``bf16`` and ``fp16`` set that of computation."""
    attn_implementation: str | None = None
    """``sdpa``, ``eager``, ``varlen``, ``flash_attention_2``, ``flash_attention_3``, ``flash_attention_4`` or, from the
    Hub, ``kernels-community/flash-attn3``. Unset: the fastest one that isolates packed documents and is not a beta."""
    trust_remote_code: bool = False
    """Run code shipped with the model; needs ``model_revision`` to be a commit."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Samples, metrics, callbacks and cost; upstream's ``eval_strategy`` and ``eval_steps`` set when to evaluate."""

    num_sample_prompts: int = 4
    """Number of held-out prompts answered at each evaluation; 0 disables samples."""
    sample_prompts: list[str] | None = None
    """Prompts to answer instead of held-out prompts."""
    sample_max_new_tokens: int = 128
    """Maximum new tokens of a sample; decoding is greedy."""
    metrics: list[str] | None = None
    """Metrics of the samples: import paths of ``evaluate.Metric`` classes, ``package.module:Class``."""
    callbacks: list[str] | None = None
    """Callbacks of the trainer: import paths of ``TrainerCallback`` classes, ``package.module:Class(name=value)``."""
    eval_tasks: list[str] | None = None
    """Benchmarks during training: suites or tasks of ``recipes eval``, on the model in memory."""
    eval_tasks_steps: int | None = None
    """Run ``eval_tasks`` every N steps and at the end. Unset: at every evaluation and at the end."""
    eval_tasks_limit: int = 100
    """Number of questions per task, from the first one."""
    eval_tasks_include_path: list[str] | None = None
    """Folders of your own task files, which may read local data."""
    early_stopping_patience: int | None = None
    """Stop after N consecutive evaluations without improvement of ``metric_for_best_model`` (default: the loss)."""
    early_stopping_threshold: float = 0.0
    """Minimum change that counts as an improvement."""
    device_hour_price: float | None = None
    """Price of one GPU-hour in any currency, for the cost in plan and model card. Unset: no cost."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint retention, beyond upstream's ``save_`` keys."""

    save_keep_steps: int | None = None
    """Keep the checkpoints at multiples of N steps, regardless of ``save_total_limit``."""


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """Pretraining: documents, mixture schedule, length of the run and weight decay."""

    cross_document_attention: bool = False
    """Let tokens attend to earlier documents in the row, as in GPT-2 and GPT-3."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """Unit of a document in text and Markdown files; a file above 16 MiB is split at line ends."""
    dataset_curriculum: list[dict[str, Any]] | None = field(default=None, metadata={"items": CurriculumPhase})
    """Mixture weights by phase: a list of ``{start_tokens, weights}``, with weights in the mixture's order."""
    max_tokens: int | None = None
    """Length of the run in tokens, instead of ``max_steps`` or ``num_train_epochs``."""
    expected_curve: str | None = None
    """File of ``recipes scale predict --output``; the run warns when its loss leaves the band. Unset: no comparison."""
    decay_embeddings: bool = True
    """Apply ``weight_decay`` to embeddings; biases and norms never decay."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and batch size over the run; ``lr_scheduler_type`` sets the shape."""

    min_lr_ratio: float = 0.1
    """Final learning rate, as a share of the peak."""
    warmup_tokens: int | None = None
    """Length of the warm-up in tokens, instead of ``warmup_steps``."""
    decay_steps: float | int = 0.2
    """``warmup_stable_decay``: length of the final decay, as a share (below 1) or number of steps."""
    decay_type: Literal["linear", "cosine", "1-sqrt", "exponential"] = "1-sqrt"
    """``warmup_stable_decay``: shape of the decay."""
    batch_ramp_tokens: int | None = None
    """Length of the batch-size ramp in tokens. Unset: no ramp."""
    batch_ramp_start: float = 0.1
    """Initial batch size of the ramp, as a share of the full one, rounded up to whole micro-batches."""
    batch_ramp_lr: Literal["constant", "sqrt", "linear"] = "sqrt"
    """Scaling of the learning rate with the batch size during the ramp; ``sqrt`` suits Adam."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters (LoRA); TRL's and PEFT's spelling."""

    use_peft: bool = False
    """Train an adapter; the model is frozen."""
    adapter_name_or_path: str | None = None
    """Hub id or folder of an adapter to continue training, on its base model. Unset: a new adapter."""
    lora_r: int = 16
    """Rank of the adapter's matrices."""
    lora_alpha: int = 32
    """Scale of the adapter: its output is multiplied by ``lora_alpha / lora_r``."""
    lora_dropout: float = 0.0
    """Dropout of the adapter's input; must be 0 in preference and RL recipes, which compare log-probabilities."""
    lora_target_modules: list[str] | None = None
    """Layers with an adapter, by the suffix of their names. Unset: ``all-linear``, every linear layer but the head."""
    lora_modules_to_save: list[str] | None = None
    """Modules trained in full and saved with the adapter, such as ``embed_tokens`` and ``lm_head``."""
    init_lora_weights: Literal["default", "gaussian", "pissa", "olora", "orthogonal"] = "default"
    """Initialisation of a new adapter; ``pissa`` uses the principal components of the weights."""
    use_rslora: bool = False
    """Scale by ``lora_alpha / sqrt(lora_r)``, which keeps gradients stable at high ranks."""
    use_dora: bool = False
    """DoRA: learn magnitude and direction of weight rows separately."""
    loraplus_lr_ratio: float | None = None
    """LoRA+: ratio of the learning rates of the B and A matrices; 16 in the paper."""


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """8-bit or 4-bit quantisation of the frozen base model by bitsandbytes."""

    load_in_8bit: bool = False
    """LLM.int8(): one byte per weight."""
    load_in_4bit: bool = False
    """QLoRA: half a byte per weight."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type; NF4 assumes normally distributed weights."""
    use_bnb_nested_quant: bool = True
    """Double quantisation: also quantise the scales, which saves 0.4 bits per weight."""

    @property
    def is_quantized(self) -> bool:
        """Whether the base model is quantised."""
        return self.load_in_8bit or self.load_in_4bit


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Preference pairs: layout, reference model and label noise."""

    shared_prompt: bool | None = None
    """Compute the prompt once for both answers. Unset: if model and attention kernel support it."""
    ref_model_name_or_path: str | None = None
    """Reference model. Unset: the initial model."""
    ref_model_revision: str | None = None
    """Commit, tag or branch of a Hub reference model."""
    simpo_gamma: float = 0.5
    """``loss_type: simpo``: target margin of the length-normalised log-probabilities times ``beta``."""
    label_smoothing: float = 0.0
    """Assumed share of pairs with swapped labels."""
    unfinished_share: float = 0.0
    """Share of pairs whose rejected answer is a truncated copy of the chosen one, to penalise unfinished answers."""


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """Guards: rollback after a loss spike and verification of the hardware; see ``docs/guards.md``."""

    max_rollbacks: int = 0
    """Maximum rollbacks to a checkpoint after a loss spike, skipping its rows; at 0 spikes are only logged."""
    verify_steps: int | None = None
    """Every N steps, compute the step twice and compare the weights of all ranks bitwise. Unset: never."""


@dataclass(frozen=True, kw_only=True)
class ForgettingConfig:
    """Replay, elastic weight consolidation, and KL to the initial model; see ``docs/forgetting.md``."""

    replay_dataset: str | None = None
    """Hub id or path of earlier data to mix into the training data; the layout is detected."""
    replay_from: str | None = None
    """Output directory of an earlier run, whose training data (named in its ``run.json``) are replayed."""
    replay_share: float = 0.05
    """Share of replayed data in every step: of target tokens, in DPO of pairs; exact to one row."""
    ewc_lambda: float = 0.0
    """Elastic weight consolidation: adds ``ewc_lambda / 2`` times the sum of ``F (w - w*)^2`` to the loss."""
    ewc_fisher: Literal["diagonal", "identity"] = "diagonal"
    """``F``: the diagonal Fisher information from ``recipes fisher``, or the identity (L2-SP)."""
    ewc_reference: str | None = None
    """Folder with ``w*`` and its Fisher information. Unset: the initial model."""
    kl_to_base: float = 0.0
    """Coefficient of the KL divergence to the initial model, per target token."""


@dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """Sampled answers and their rewards."""

    response_length: int = 256
    """Maximum new tokens of an answer."""
    temperature: float = 1.0
    """Sampling temperature, also applied to all log-probabilities in the loss."""
    reward_funcs: list[str] | None = None
    """Reward functions: import paths ``package.module:function`` with the signature of TRL's GRPO, or
    ``"package.module:factory(name=value)"``, which returns such a function."""
    reward_model_name_or_path: str | None = None
    """Reward model, with its own tokenizer and chat template; normalised scores are clipped to ±10."""
    reward_model_revision: str | None = None
    """Commit, tag or branch of a Hub reward model."""
    reward_timeout: float | None = None
    """Timeout of a reward function's call in seconds; each function runs in its own process, and an answer on which it
    hangs or crashes is not scored. Unset: functions run in the training process, without a limit."""
    reward_weights: list[float] | None = None
    """Weight of each reward in the sum: functions in their order, then the reward model. Unset: 1 each."""
    missing_eos_penalty: float | None = 1.0
    """Penalty subtracted from the score of an answer that reached ``response_length``; null: none."""
    max_num_gen_batches: int = 1
    """Dynamic sampling of DAPO, in verl's spelling: maximum batches that an iteration samples to replace groups whose
    answers all have the same reward. 1: no group is replaced."""
    max_zero_std_rollouts: int | None = 20
    """End the run after N consecutive rollouts in which all answers to each prompt have the same reward, so there is
    nothing to learn; null: never. See ``docs/guards.md``."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Value function (critic) of PPO: initialisation, training and saving."""

    critic_model_name_or_path: str | None = None
    """Initial weights of the critic. Unset: the reward model, else the policy with a zero head. With ``use_peft`` the
    critic is a second adapter on the policy's base, initialised from a reward model saved as an adapter, else new."""
    critic_learning_rate: float = 1e-5
    """Peak learning rate of the critic, with the policy's schedule."""
    critic_warmup_iterations: int = 0
    """Iterations that update only the critic, before the first update of the policy."""
    save_critic: bool = False
    """Also save the trained critic in ``critic/``, as a reward model; not supported for an adapter."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Generation engine, instead of ``generate``; the spelling of TRL's ``GRPOConfig``."""

    use_transformers_continuous_batching: bool = False
    """Sample with transformers' continuous batching: the next prompt replaces a finished answer. For GPUs."""
    transformers_continuous_batching_config: dict[str, Any] | None = None
    """Settings of transformers' ``ContinuousBatchingConfig``, such as ``{max_memory_percent: 0.5}``."""
    use_vllm: bool = False
    """Sample with vLLM, which receives the policy's weights every iteration."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """``colocate``: an engine in each training process, on its device. ``server``: a running vLLM server."""
    vllm_gpu_memory_utilization: float = 0.3
    """Share of GPU memory of the colocated engine, weights and KV cache together."""
    vllm_enable_sleep_mode: bool = False
    """Release the colocated engine's memory between rollouts. For GPUs."""
    vllm_server_base_url: str = "http://localhost:8000"
    """URL of the vLLM server."""
    vllm_server_timeout: float = 240.0
    """Seconds to wait for the vLLM server at startup."""
    vllm_group_port: int = 51216
    """Port of the weight transfer."""
    max_staleness: int = 0
    """1: the server samples the next iteration during the updates, with weights that are one iteration old."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """PPO updates: KL penalty, clipping and advantage estimation; the spelling of TRL's old ``PPOConfig``."""

    num_ppo_epochs: int = 2
    """Epochs over the answers of an iteration."""
    num_mini_batches: int = 4
    """Optimizer steps per PPO epoch; together they use all answers of an iteration once."""
    kl_coef: float = 0.05
    """KL coefficient: reward subtracted per nat of KL to the reference model (the initial policy)."""
    kl_target_per_sequence: float | None = None
    """Target KL per answer in nats, for an adaptive ``kl_coef``. Unset: ``kl_coef`` is fixed."""
    kl_horizon: float = 10_000
    """Horizon of the adaptive ``kl_coef``, in answers."""
    target_kl: float | None = 0.03
    """Stop an iteration's updates at 1.5 times this KL per token to the sampling policy. Unset: never."""
    gamma: float = 1.0
    """Discount factor."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation (GAE); use 1 for answers above about 500 tokens."""
    cliprange: float = 0.2
    """Clip range of the probability ratio between new and old policy."""
    dual_clip: float | None = None
    """Dual clip: upper bound on the ratio at negative advantages, usually 3. Unset: none."""
    cliprange_value: float | None = 0.2
    """Clip range of the value update; null disables clipping."""
    whiten_rewards: bool = False
    """Divide rewards by their standard deviation; advantages are always whitened."""


def read_training(training: Mapping[str, Any], key: str) -> Any:
    """Return the value of an upstream key, or upstream's default if it is not set.

    Use ``RecipeConfig.read`` for the default of a recipe, which may differ from upstream's.

    Args:
        training: Upstream keys with values: ``RecipeConfig.training``, or those recorded in a checkpoint.
        key: Key of transformers' ``TrainingArguments``.

    Raises:
        KeyError: ``TrainingArguments`` has no such key.
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
        path: The YAML file; ``None`` if every key is from flags.
        training: Upstream keys with user values, and with our defaults if they differ from upstream's.
        provenance: Key -> origin of its value: ``default``, ``file:line``, a flag, or ``derived: why``.
    """

    recipe: str
    path: Path | None
    data: DataConfig
    tokens: TokensConfig
    model: ModelConfig
    evaluation: EvaluationConfig
    chat: ChatConfig = ChatConfig()
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

    def read(self, key: str) -> Any:
        """Return the effective value of an upstream key: the user's, or the default of this recipe.

        Raises:
            KeyError: The recipe does not have the key.
        """
        return self.training[key] if key in self.training else load_table(self.recipe).keys[key].default

    def locate(self, key: str) -> str:
        """Return where the user set a key, ``file:line`` or a flag, for errors; else the key itself."""
        origin = self.provenance.get(key, "default")
        return key if origin == "default" or origin.startswith("derived: ") else origin

    def with_training(self, keys: Mapping[str, Any]) -> RecipeConfig:
        """Return a copy with new values of some upstream keys."""
        return dataclasses.replace(self, training={**self.training, **keys})


SECTIONS: Final[Mapping[str, type]] = {
    name: section
    for name, section in get_type_hints(RecipeConfig).items()
    if isinstance(section, type) and dataclasses.is_dataclass(section)
}
"""Field of ``RecipeConfig`` -> our section; ``recipes.yaml`` lists the keys that a recipe rejects."""


def flatten_config(config: RecipeConfig) -> dict[str, Any]:
    """Return every effective key of a recipe as in a flat YAML file: our sections and upstream keys, sorted."""
    keys = load_table(config.recipe).keys
    flat = {name: value for name, value in list_sections(config).items() if name in keys} | dict(config.training)
    return {name: flat[name] for name in sorted(flat)}


def list_sections(config: RecipeConfig) -> dict[str, Any]:
    """Return the keys of all our sections, including those that the recipe does not have."""
    return {name: value for section in SECTIONS for name, value in dataclasses.asdict(getattr(config, section)).items()}
