"""Policy, critic, reference and reward model: four models, or adapters on one shared base; sharded by FSDP2."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import ModelConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem, reported_at
from recipes_lib.models.activation_checkpointing import enable_checkpointing
from recipes_lib.models.adapters.roles import CRITIC, AdapterScorer, Role, add_critic, role
from recipes_lib.models.adapters.saved import find_adapter, find_shareable
from recipes_lib.models.architecture import find_other_vocabulary
from recipes_lib.models.attention.kernels import choose_attention
from recipes_lib.models.generation import set_stop_tokens
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
from recipes_lib.models.heads.score_head import add_score_head, load_reward_model
from recipes_lib.models.heads.scoring import (
    RewardModel,
    RewardStatistics,
    read_adapter_statistics,
    read_reward_statistics,
)
from recipes_lib.models.inference import disable_dropout, preserve_random_states, unwrap_adapter
from recipes_lib.models.loading import load_model_config
from recipes_lib.planning.compute import has_policy_reference
from recipes_lib.planning.memory import find_critic_start
from recipes_lib.training.guards.preemption import raise_if_stop_pending, stop_if_agreed
from recipes_lib.training.guards.start_checks import select_parameters
from recipes_lib.training.layouts.fsdp import gathered, is_sharded, reshard, set_precision, shard, shard_head
from recipes_lib.training.layouts.launch_environment import Launch, verify_engine
from recipes_lib.training.trainers.trained_model import load_policy


def choose_placement(args: TrainingArguments, launch: Launch) -> Callable[[Any], Any]:
    """Return the function that places a loaded model: replicated on this process's device, or sharded over all.

    Under FSDP, every process must place the same models in the same order.

    Args:
        args: Device and precision.
        launch: Launch layout of this process.

    Raises:
        ConfigError: FSDP was requested at launch, and accelerate runs without it.
    """
    if not launch.engine:
        return lambda model: model.to(args.device)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    verify_engine(launch, accelerator.distributed_type)
    set_precision(accelerator)
    return partial(shard, accelerator)


@contextmanager
def gathered_weights(model: Any, *, is_needed: bool = True) -> Iterator[None]:
    """Gather all weights of a model on every process inside the context, so that ranks need not wait for each other.

    Collective: all ranks must enter. A rank that leaves by ``StopPendingError`` must call ``stop_if_agreed`` next, to
    match the call at the end of this context on the other ranks.

    Args:
        model: A sharded model; any other is left as it is.
        is_needed: Whether weights are read inside; if not, only the collective at the end runs.

    Raises:
        PreemptedError: At the end, on all processes: any process has a stop request.
    """
    if not is_sharded(model):
        yield
        return
    with gathered(model) if is_needed else nullcontext():
        yield
    stop_if_agreed()


def beat_between(model: Any) -> None:
    """Report progress to the watchdog between forward passes, and leave on a stop request.

    Raises:
        StopPendingError: This process has a stop request, and the model is replicated.
        PreemptedError: Any process has a stop request, and the model is sharded: all ranks leave together.
    """
    if is_sharded(model):
        stop_if_agreed()
    else:
        raise_if_stop_pending()


@dataclass(frozen=True, slots=True)
class ActorCritic:
    """Policy, critic and reference.

    Attributes:
        policy: A causal language model with a loss head, or a PEFT model around it.
        critic: Value model, which returns ``ScoreOutput.scores`` at ``last_positions``; ``None`` in RLOO and GRPO.
        own_reference: Frozen copy of the initial policy; ``None`` if the reference is the policy with its adapters
            disabled, or if there is no reference.
        stop_ids: Ids of all tokens that end an answer, sorted.
        reward: Reward model that shares the policy's base model; ``None`` without one, or if it is a separate model.
        has_reference: Whether there is a reference model.
    """

    policy: Any
    critic: Any | None
    own_reference: Any | None
    stop_ids: list[int]
    reward: RewardModel | None = None
    has_reference: bool = True

    @property
    def is_shared(self) -> bool:
        """Whether policy, critic and reference share one base model."""
        return self.own_reference is None and hasattr(self.policy, "peft_config")

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a shard of each model, so that forward passes are collective."""
        return is_sharded(self.policy)

    @contextmanager
    def using(self, name: Role) -> Iterator[Any]:
        """Activate a role, yield its model, and reshard after it: FSDP2 leaves weights gathered after a forward pass.

        Args:
            name: ``policy``, ``critic`` or ``reference``, the initial policy.
        """
        reference = self.policy if self.is_shared else self.own_reference
        model = {"policy": self.policy, "critic": self.critic, "reference": reference}[name]
        with role(self.policy, name) if self.is_shared else nullcontext():
            try:
                yield model
            finally:
                # Inside the role: the gathered parameters are those of the adapter that is active now.
                reshard(self.policy if self.is_shared else model)

    def policy_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters of the policy's optimizer by name; of a sharded policy, its shards."""
        # After a forward pass, FSDP2 exposes some gathered weights; updates of those would be lost.
        trained = select_parameters(self.policy, trained=True)
        return {name: parameter for name, parameter in trained.items() if f".{CRITIC}." not in name}

    def critic_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters of the critic's optimizer by name, like ``policy_parameters``."""
        assert self.critic is not None
        parameters = select_parameters(self.critic, trained=True)
        if self.is_shared:
            shared = select_parameters(self.policy, trained=True)
            parameters |= {name: parameter for name, parameter in shared.items() if f".{CRITIC}." in name}
        return parameters

    def set_training(self, *, training: bool) -> None:
        """Switch policy and critic to training mode or evaluation mode; only the former recomputes activations."""
        self.policy.train(training)
        if self.critic is not None:
            self.critic.train(training)


def load_actor_critic(
    config: RecipeConfig,
    args: TrainingArguments,
    launch: Launch,
    tokenizer: PreTrainedTokenizerBase,
    terminators: Sequence[int],
) -> ActorCritic:
    """Load the models of a run on this process's device, with dropout disabled in all of them.

    Args:
        config: Configuration of the run.
        args: Precision, device and seed.
        launch: Launch layout of this process.
        tokenizer: The policy's tokenizer.
        terminators: Ids of the tokens that end answers.

    Raises:
        ConfigError: As ``load_policy``, ``load_reward_model``, ``RewardModel.share``, ``add_loss_head``,
            ``choose_attention`` and ``verify_critic``.
    """
    policy_config, has_critic = load_model_config(config.model)[0], config.recipe == "ppo"
    if has_critic:
        verify_critic(config, policy_config)
    attention = choose_attention(config.model, policy_config, args, packing=False)
    policy = load_policy(config, attention.implementation, args, launch)
    stop_ids = set_stop_tokens(unwrap_adapter(policy), tokenizer, terminators)
    disable_dropout(policy)
    add_loss_head(unwrap_adapter(policy))
    # No objective here has a load-balancing loss: a mixture of experts would compute it for nothing.
    unwrap_adapter(policy).has_router_loss = False
    place = choose_placement(args, launch)
    critic = own_reference = reward = None
    has_reference = has_policy_reference(config)
    if config.adapter.use_peft:
        if has_critic:
            critic, reward = _add_scorers(config, args, policy)
        policy = _place_trunk(policy, [critic, reward and reward.model], place, args, launch)
    else:
        # Copied and placed before the policy is placed, so that the host holds at most two full models.
        if has_reference:
            own_reference = place(copy.deepcopy(policy).eval().requires_grad_(False))
        policy = place(policy)
    if has_critic and critic is None:
        critic = _load_critic(config, attention.implementation, args)
        disable_dropout(critic)
        critic = place(critic)
    verify_loss_head(policy)
    if args.activation_checkpointing:
        options: Any = args.activation_checkpointing_kwargs
        for model in (policy, critic):
            # An adapter as critic runs on the policy's layers, for which it is enabled already.
            if model is not None and not isinstance(model, AdapterScorer):
                enable_checkpointing(unwrap_adapter(model), options)
    return ActorCritic(policy, critic, own_reference, stop_ids, reward, has_reference)


def _add_scorers(config: RecipeConfig, args: TrainingArguments, policy: Any) -> tuple[Any, RewardModel | None]:
    """Add the critic to the policy's base model, and the reward model if it is an adapter of the same base.

    Raises:
        ConfigError: As ``RewardModel.share``.
    """
    rewards, base = config.rewards, unwrap_adapter(policy)

    def find(name: str, revision: str | None) -> tuple[Path | None, str]:
        return find_shareable(name, revision, base.config, is_quantized=getattr(base, "is_quantized", False))

    reward = start = None
    if rewards.reward_model_name_or_path is not None:
        start, _ = find(rewards.reward_model_name_or_path, rewards.reward_model_revision)
        reward = None if start is None else RewardModel.share(policy, start)
    if config.critic.critic_model_name_or_path is not None:
        start, _ = find(*find_critic_start(config))
    # Equal initial weights on every process, without advancing the run's own generator.
    with preserve_random_states():
        torch.manual_seed(args.seed)
        critic = add_critic(policy, start)
    if start is not None:
        critic.head = _rescale(critic.head, read_adapter_statistics(start))
    return critic, reward


def _place_trunk(
    policy: Any, scorers: Sequence[Any], place: Callable[[Any], Any], args: TrainingArguments, launch: Launch
) -> Any:
    """Place a policy and the heads of its other roles; FSDP2 shards all adapters together with the base."""
    # Quantised weights are on the device since they were loaded, and must not be moved; FSDP2 shards them in place.
    if launch.engine or not getattr(unwrap_adapter(policy), "is_quantized", False):
        policy = place(policy)
    for scorer in scorers:
        if scorer is not None:
            scorer.head.to(args.device)
            if is_sharded(policy) and scorer.head.weight.requires_grad:
                shard_head(scorer.head, policy)
    return policy


def verify_critic(config: RecipeConfig, policy_config: PreTrainedConfig) -> None:
    """Verify that the critic can be initialised from its model, before any weight is loaded.

    Raises:
        ConfigError: A critic on the policy's weights would start from another model than an adapter of them; one of its
            own from an adapter, or from a model with another vocabulary; or its model cannot be found.
    """
    source, is_shared = _find_critic_model(config), config.adapter.use_peft
    name = source.model_name_or_path
    # A reward model that is no adapter of the policy's weights is a model of its own, and the shared critic new.
    is_new = is_shared and config.critic.critic_model_name_or_path is None
    if name == config.model.model_name_or_path or is_new:
        return
    found, remedy = "", "`recipes merge` it, or write `critic_model_name_or_path`: a reward model, or the policy"
    if is_shared:
        is_quantized = config.quantization.is_quantized
        start, reason = find_shareable(str(name), source.model_revision, policy_config, is_quantized=is_quantized)
        if start is None:
            found = f"the critic shares the policy's weights, and cannot start from another model: {reason}"
            remedy = "name a reward model that is an adapter on the policy's model, or that model itself"
    elif find_adapter(str(name), source.model_revision) is not None:
        found = f"the critic would start from {name}, which is an adapter, and all of its weights are trained"
    else:
        key = "critic_model_name_or_path" if config.critic.critic_model_name_or_path else "reward_model_name_or_path"
        with reported_at(config.locate(key)):
            found = find_other_vocabulary(source, policy_config)
        remedy = "name a critic of the policy's own family, or `critic_model_name_or_path` as the policy's model"
    if found:
        raise ConfigError(Problem("critic_model_name_or_path", found, remedy))


def _find_critic_model(config: RecipeConfig) -> ModelConfig:
    name, revision = find_critic_start(config)
    return dataclasses.replace(config.model, model_name_or_path=name, model_revision=revision)


def _load_critic(config: RecipeConfig, implementation: str, args: TrainingArguments) -> Any:
    """Load a separate critic, initialised from a reward model, or from the policy with a zero head.

    Raises:
        ConfigError: As ``load_reward_model``.
    """
    source = _find_critic_model(config)
    critic: Any = load_reward_model(source, implementation, seed=args.seed)
    architectures = load_model_config(source)[0].architectures or []
    head = critic.score
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        nn.init.zeros_(head.weight)
    elif (scale := read_reward_statistics(critic)) is not None:
        critic.score = _rescale(head, scale)
    critic.has_router_loss = False
    add_score_head(critic)
    return critic


def _rescale(head: nn.Linear, scale: RewardStatistics) -> nn.Linear:
    """Return the head of a reward model with its normalisation folded in, because returns are normalised rewards."""
    # (w h - mean) / std as one linear layer with a bias.
    rescaled = nn.Linear(head.in_features, 1, dtype=head.weight.dtype, device=head.weight.device)
    with torch.no_grad():
        rescaled.weight.copy_(head.weight / scale.std)
        rescaled.bias.fill_(-scale.mean / scale.std)
    return rescaled
