"""Checks of reinforcement learning: prompts, rewards, generation engine, memory and schedule."""

from __future__ import annotations

from recipes_lib.inspection.sections import Inspection, Say


class PPOInspection(Inspection):
    """Prompts as the policy will be asked, every reward imported, and the critic's start."""

    keeps_documents_apart = False
    num_learners = 2  # Policy and critic.

    def look_at_data(self, say: Say) -> None:
        """How many prompts there are and how long they are."""
        from recipes_lib.data.prompts import load_prompt_data

        if self.tokenizer is None:
            return
        self._data = load_prompt_data(self.config, self.tokenizer)
        record = self._data.record
        say(
            f"{record['num_prompts']:,} prompts of {record['prompt_tokens_mean']:,.0f} tokens on average, "
            f"{record['prompt_tokens_max']:,} at most; answers of up to {self.config.rewards.response_length:,}"
        )
        if record["num_overlong"]:
            say(f"left out, too long: {record['num_overlong']:,}")
        if self._data.eval:
            say(f"held out: {len(self._data.eval):,} prompts")

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens, length and what ends answers; then whether every reward can be loaded."""
        if self.tokenizer is None or self.model_config is None:
            return
        terminators = self._data.terminators if self._data else ()
        max_length = self._data.max_length if self._data else self.config.tokens.max_length
        self.say_agreement(say, max_length, terminators)
        self._look_at_rewards(say)
        self._look_at_engine(say)

    def _look_at_engine(self, say: Say) -> None:
        if self.config.engine.use_vllm:
            from recipes_lib.rl.engines.vllm_server import check_vllm

            check_vllm()
            say(f"answers are sampled by vLLM at {self.config.engine.vllm_server_base_url}, not from the seed")
        elif self.config.engine.use_transformers_continuous_batching:
            say("answers are sampled by transformers' continuous batching, not from the seed")

    def _look_at_rewards(self, say: Say) -> None:
        from recipes_lib.rl.rewards import MODEL, load_reward_functions

        rewards = self.config.rewards
        names = list(load_reward_functions(rewards.reward_funcs or []))
        if rewards.reward_model_name_or_path is not None:
            self._look_at_reward_model(rewards.reward_model_name_or_path, say)
            names.append(MODEL)
        weights = rewards.reward_weights or [1.0] * len(names)
        told = " + ".join(f"{weight:g} {name}" for weight, name in zip(weights, names, strict=True))
        say(f"reward: {told}")

    def _look_at_reward_model(self, name: str, say: Say) -> None:
        """Whether it is there, and has positions for what it will score."""
        from recipes_lib.config.schema import TokensConfig
        from recipes_lib.models.heads.scoring import find_saved
        from recipes_lib.models.loading import load_model_config, load_tokenizer
        from recipes_lib.rl.rewards import verify_positions

        named, weights, _ = find_saved(name, self.config.rewards.reward_model_revision)
        model_config, own = load_model_config(weights)[0], load_tokenizer(named, TokensConfig())
        if self._data and (warning := verify_positions(model_config, own, self.tokenizer, self._data.max_length)):
            say(warning)

    def look_at_kernels(self, say: Say) -> None:
        """As in every stage; and whether the models fit into this machine's accelerator, if it has one."""
        from recipes_lib.hardware import read_device_memory
        from recipes_lib.rl.memory import count_memory
        from recipes_lib.training.trainers.arguments import resolve_precision

        super().look_at_kernels(say)
        if self.model_config is None:
            return
        counted = count_memory(self.config, self.model_config, is_half=bool(resolve_precision(self.config)["bf16"]))
        alone, size = counted.plan(1), read_device_memory()
        say(f"{alone.layout}: {alone.peak / 1e9:.1f} GB at most; `recipes plan` tells its terms")
        if size is not None and not alone.fits(size):
            remedy = "adapters (`use_peft: true`), fewer rows at once"
            if self.launch.world_size > 1 and not self.config.adapter.use_peft:
                shared = counted.plan(self.launch.world_size).peak / 1e9
                remedy += f", or accelerate_configs/fsdp2.yaml: {shared:.1f} GB on each of {self.launch.world_size}"
            say(f"warning: this is more than the {size / 1e9:.1f} GB of the device at hand can hold; {remedy}")

    def look_at_steps(self, say: Say) -> None:
        """Iterations, answers and optimizer steps, and the policy's rates.

        Raises:
            ConfigError: The critic warms up for the whole run.
        """
        from recipes_lib.rl.rollout_schedule import compute_schedule, verify_warmup

        if self._data is None:
            return
        training = self.config.training
        plan = compute_schedule(len(self._data.train), self.config.ppo, training, self.launch.world_size)
        verify_warmup(plan, self.config.rewards.critic_warmup_iterations)
        self.num_steps = plan.num_steps
        say(
            f"{plan.num_iterations:,} iterations of {plan.answers_per_iteration:,} answers and "
            f"{plan.steps_per_iteration:,} steps of {plan.answers_per_step:,} answers: {plan.num_steps:,} steps, every "
            f"prompt answered {plan.num_epochs:.3g} times"
        )
        self.say_rates(say, plan.num_warmup_steps)


class GroupInspection(PPOInspection):
    """Prompts as the policy will be asked, every reward imported, and answers in groups."""

    num_learners = 1  # There is no critic.

    def look_at_kernels(self, say: Say) -> None:
        """The device, the precision and the attention kernel; what PPO's models take is another sum."""
        Inspection.look_at_kernels(self, say)

    def look_at_steps(self, say: Say) -> None:
        """Answers at a time, optimizer steps, and the rates.

        Raises:
            ConfigError: As ``plan_groups``.
        """
        from recipes_lib.planning.steps import plan_groups

        if self._data is None:
            return
        plan = plan_groups(len(self._data.train), self.config, self.launch.world_size)
        steps = plan.steps
        self.num_steps = steps.num_steps
        say(
            f"{plan.answers_per_generation:,} answers to {plan.prompts_per_generation:,} prompts at a time, "
            f"{steps.rows_per_step:,} a step: {steps.num_steps:,} steps, {steps.num_epochs:.3g} epochs"
        )
        self.say_rates(say, steps.num_warmup_steps)
