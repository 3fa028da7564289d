"""Recipe-specific checks of ``recipes check``."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

from recipes_lib.inspection.sections import SHARES_OF_A_RUN, Inspection, Say


class SFTInspection(Inspection):
    """Rows, their mask and their packs, and the schedule that upstream builds."""

    corpus_kind = "chat"
    flattens = True

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether rows are packed."""
        return self.config.tokens.packing

    def look_at_data(self, say: Say) -> None:
        """The layout of the rows, their loss mask, and the audit."""
        from recipes_lib.data.packed.encoding import build_encoder
        from recipes_lib.data.packed.training_data import load_training_data
        from recipes_lib.data.sources.canonical import detect_source_format
        from recipes_lib.data.sources.mixtures import load_train_data

        for part in load_train_data(self.config.data, seed=0).parts:
            say(f"{part.source.name}: {detect_source_format(part.source, part.format)}")
        if self.tokenizer is None:
            return
        self._data = load_training_data(self.config, self.tokenizer)
        audit = self._data.audit
        say(
            f"{audit.num_rows:,} rows in {audit.num_packs:,} packs of {self._data.max_length:,} tokens, "
            f"{audit.packing_efficiency(self._data.max_length):.0%} filled"
        )
        self.say_audit(say, "tokens a row")
        for caution in build_encoder(self.config, self.tokenizer).cautions:
            say(f"warning: {caution}")

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens, length, and what answers end with."""
        longest = self._data.longest if self._data else self.config.tokens.max_length
        self.say_agreement(say, longest, self._data.audit.terminators if self._data else ())

    def look_at_steps(self, say: Say) -> None:
        """As many steps as the Trainer will count, and its rates."""
        num_rows = self.say_schedule(say, self._data.num_packs)
        targets = num_rows * self._data.audit.num_target_tokens / self._data.audit.num_packs
        say(f"a step: {num_rows} rows of up to {self._data.max_length:,} tokens, {targets:,.0f} targets")


class PretrainInspection(Inspection):
    """Documents and their mixture, the schedule in tokens, and the size of the model against that of the data."""

    corpus_kind = "text"
    flattens = True

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether a document sees only itself."""
        return not self.config.pretraining.cross_document_attention

    def look_at_data(self, say: Say) -> None:
        """The tokens of each source, how often each is read, and what is held out."""
        from recipes_lib.data.tokens.token_data import prepare_tokens
        from recipes_lib.planning.pretraining import count_run_tokens
        from recipes_lib.training.trainers.pretraining_rows import build_rows

        if self.tokenizer is None:
            return
        num_tokens = count_run_tokens(self.config, self.launch.data_size)
        tokens = prepare_tokens(self.config, lambda _: self.tokenizer, num_tokens=num_tokens)
        self._data = build_rows(self.config, tokens, self.launch.data_size)
        epochs = self._data.epochs.values()
        for source, weight, passes in zip(tokens.train, tokens.weights, epochs, strict=True):
            say(
                f"{source.name}: {source.num_documents:,} documents, {source.num_tokens:,} tokens, "
                f"{weight:.1%} of the mixture, read {passes:.2f} times"
            )
        for name, source in tokens.eval.items():
            say(f"held out of {name}: {source.num_documents:,} documents, {source.num_tokens:,} tokens")
        for warning in self._data.warnings:
            say(f"warning: {warning}")

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens and length."""
        self.say_agreement(say, self.config.tokens.max_length, ())

    def look_at_steps(self, say: Say) -> None:
        """Steps, tokens, the batch, and the learning rates of the schedule that training uses."""
        plan = self._data.plan
        self.num_steps = plan.num_steps
        first, full = (int(rows) * plan.max_length for rows in (plan.row_starts[1], plan.rows_per_step))
        batch = f"{full:,} tokens" if first == full else f"{first:,} tokens at first, {full:,} in the end"
        say(f"{plan.num_steps:,} steps of {batch}; {plan.num_tokens:,} tokens in all")
        say(f"{plan.num_tokens / max(1, self.num_parameters):,.1f} tokens per parameter (Chinchilla: 20)")
        peak = self.config.read("learning_rate")
        rates = [plan.schedule(round(share * (plan.num_steps - 1))) * peak for share in SHARES_OF_A_RUN]
        say(f"learning rate at 0, 25, 50, 75, 100 %: {', '.join(f'{rate:.2e}' for rate in rates)}")
        say(f"{plan.schedule.num_warmup_steps:,} steps of warm-up")


class DistillationInspection(SFTInspection):
    """Checks of fine-tuning, and whether student and teacher have the same tokenizer."""

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens and length of student and teacher."""
        from recipes_lib.distillation.teacher_store import map_teacher_vocabulary
        from recipes_lib.models.loading import choose_teacher, load_model_config

        self.vocabulary = vocabulary = map_teacher_vocabulary(self.config, self.tokenizer)
        super().look_at_agreement(say)
        teacher, _ = load_model_config(choose_teacher(self.config))
        sizes = [config.get_text_config().vocab_size for config in (self.model_config, teacher)]
        how = "by the same ids" if vocabulary.is_identity else "by ids of its own, which are mapped"
        say(
            f"teacher: {teacher.model_type}, knows the student's {len(vocabulary.teacher_ids):,} tokens {how}; "
            f"rows of the embeddings: student {sizes[0]:,}, teacher {sizes[1]:,}"
        )
        self._look_at_layers(teacher, say)
        if self.config.distillation.teacher_top_k is not None and self._data is not None:
            from recipes_lib.data.store import find_set
            from recipes_lib.distillation.teacher_store import identify_store

            identity = identify_store(self.config, vocabulary, self._data.record)
            size = self._data.audit.num_target_tokens * identity.format.dtype.itemsize
            is_there = find_set(identity.root, identity.key) is not None
            state = "is stored" if is_there else "is not stored yet: run `recipes distill-store` before training"
            say(f"what the teacher says, {size / 1e9:.2f} GB, {state}")

    def _look_at_layers(self, teacher: Any, say: Say) -> None:
        """Print which layers are compared, if any."""
        from recipes_lib.distillation.layer_features import choose_layers
        from recipes_lib.models.structure import map_layers

        configs = (self.model_config, teacher)
        num_student, num_teacher = (config.get_text_config().num_hidden_layers for config in configs)
        answers = map_layers(num_student, num_teacher)
        for what, numbers in zip(("states", "relations"), choose_layers(self.config.layers, num_student), strict=True):
            if numbers:
                pairs = ", ".join(f"{number} and {answers[number - 1]}" for number in numbers)
                say(f"{what} of layers: the student's and the teacher's {pairs}")


class PairInspection(Inspection):
    """Pairs, dropped pairs, and whether prompts are computed once."""

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether the kernel has to: shared prompts go by a mask."""
        return self.config.preference.shared_prompt is False

    def look_at_data(self, say: Say) -> None:
        """How many pairs there are, how long they are, and the audit."""
        from recipes_lib.data.pairs.preference_sets import load_pair_data

        if self.tokenizer is None:
            return
        self._data = load_pair_data(self.config, self.tokenizer)
        audit = self._data.audit
        say(f"{audit.num_pairs:,} pairs under {audit.num_prompts:,} prompts, {audit.num_tokens:,} tokens")
        self.say_audit(say, "tokens of a prompt with its longer answer")
        if self._data.eval is not None:
            say(f"held out: {len(self._data.eval):,} pairs")

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens, length, what answers end with, and whether padding can be told from it."""
        terminators = self._data.audit.terminators if self._data else ()
        self.say_agreement(say, self._data.longest if self._data else self.config.tokens.max_length, terminators)
        if self.config.recipe == "reward":
            from recipes_lib.models.heads.score_head import set_pad_token

            set_pad_token(SimpleNamespace(config=self.model_config), self.tokenizer, terminators)  # type: ignore[arg-type]
            say(f"the score is read at the end; {self.tokenizer.pad_token!r} pads")

    def look_at_kernels(self, say: Say) -> None:
        """Common checks, and whether a prompt is computed once for both answers."""
        from recipes_lib.models.attention.shared_prompt import supports_shared_prompt

        super().look_at_kernels(say)
        # The longest pair decides; it is not known where the data could not be read.
        if self._data is None:
            return
        reason: str | None = "`shared_prompt` is false"
        if self.config.preference.shared_prompt is not False:
            implementation = self.config.model.attn_implementation or "sdpa"
            reason = supports_shared_prompt(self.model_config, implementation, max_length=self._data.max_length)
        audit = self._data.audit
        # `num_tokens` has each prompt once; with one for each answer, they are in the sum again.
        saved = audit.num_prompt_tokens / (audit.num_tokens + audit.num_prompt_tokens)
        say(
            f"a prompt is computed once for both answers, which saves {saved:.0%} of the tokens"
            if reason is None
            else f"a prompt is computed once for each answer: {reason}"
        )

    def look_at_steps(self, say: Say) -> None:
        """As many steps as the Trainer will count, and its rates."""
        num_pairs = self.say_schedule(say, self._data.audit.num_pairs)
        tokens = num_pairs * self._data.audit.num_tokens / self._data.audit.num_pairs
        say(f"a step: {num_pairs} pairs, {tokens:,.0f} tokens with one copy of each prompt")


class PPOInspection(Inspection):
    """Prompts, import of every reward, and initialisation of the critic."""

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
        terminators = self._data.terminators if self._data else ()
        max_length = self._data.max_length if self._data else self.config.tokens.max_length
        self.say_agreement(say, max_length, terminators)
        self._look_at_rewards(say)
        self._look_at_engine(say)

    def _look_at_engine(self, say: Say) -> None:
        engine = self.config.engine
        if engine.use_vllm:
            from recipes_lib.rl.engines.link import check_vllm

            check_vllm()
            where = f"at {engine.vllm_server_base_url}" if engine.vllm_mode == "server" else "in each process"
            say(f"answers are sampled by vLLM {where}, not from the seed")
        elif engine.use_transformers_continuous_batching:
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
        """Common checks, and whether the models fit into this machine's accelerator, if it has one."""
        from recipes_lib.hardware import read_device_memory
        from recipes_lib.planning.memory import list_layouts, plan_memory
        from recipes_lib.training.layouts.memory_layout import build_layout
        from recipes_lib.training.trainers.arguments import resolve_precision

        super().look_at_kernels(say)
        config = self.config.with_training({"bf16": bool(resolve_precision(self.config)["bf16"])})  # PPO refuses fp16.
        launched = build_layout(self.launch, self.launch.engine, self.config.read("gradient_accumulation_steps"))
        others = (one for one in list_layouts(self.launch.world_size) if one.shards != launched.shards)
        asked, *rest = (plan_memory(config, self.model_config, layout) for layout in (launched, *others))
        size = read_device_memory()
        say(f"{asked.about or 'one model trained'}: {asked.peak / 1e9:.1f} GB at most; `recipes plan` lists it")
        if size is not None and not asked.fits(size):
            remedy = "adapters (`use_peft: true`), fewer rows at once"
            for plan in rest:
                name, count = plan.layout.launch_file, plan.layout.num_processes
                remedy += f", or accelerate_configs/{name}.yaml: {plan.peak / 1e9:.1f} GB on each of {count}"
            say(f"warning: this is more than the {size / 1e9:.1f} GB of the device at hand can hold; {remedy}")

    def look_at_steps(self, say: Say) -> None:
        """Iterations, answers and optimizer steps, and the policy's rates.

        Raises:
            ConfigError: The critic warms up for the whole run.
        """
        from recipes_lib.rl.rollout_schedule import compute_schedule, verify_warmup

        training = self.config.training
        plan = compute_schedule(len(self._data.train), self.config.ppo, training, self.launch.world_size)
        verify_warmup(plan, self.config.critic.critic_warmup_iterations)
        self.num_steps = plan.num_steps
        say(
            f"{plan.num_iterations:,} iterations of {plan.answers_per_iteration:,} answers and "
            f"{plan.steps_per_iteration:,} steps of {plan.answers_per_step:,} answers: {plan.num_steps:,} steps, every "
            f"prompt answered {plan.num_epochs:.3g} times"
        )
        self.say_rates(say, plan.num_warmup_steps)


class GroupInspection(PPOInspection):
    """Prompts, import of every reward, and groups of answers."""

    num_learners = 1  # There is no critic.

    def look_at_steps(self, say: Say) -> None:
        """Answers at a time, optimizer steps, and the rates.

        Raises:
            ConfigError: As ``plan_groups``.
        """
        from recipes_lib.planning.schedule import plan_groups

        plan = plan_groups(len(self._data.train), self.config, self.launch.world_size)
        steps = plan.steps
        self.num_steps = steps.num_steps
        say(
            f"{plan.answers_per_generation:,} answers to {plan.prompts_per_generation:,} prompts at a time, "
            f"{steps.rows_per_step:,} a step: {steps.num_steps:,} steps, {steps.num_epochs:.3g} epochs"
        )
        self.say_rates(say, steps.num_warmup_steps)


INSPECTIONS: Final[Mapping[str, type[Inspection]]] = {
    "pretrain": PretrainInspection,
    **dict.fromkeys(("sft", "lora"), SFTInspection),
    **dict.fromkeys(("reward", "dpo"), PairInspection),
    "ppo": PPOInspection,
    "distill": DistillationInspection,
    **dict.fromkeys(("rloo", "grpo"), GroupInspection),
}
"""Recipe -> its checks."""
