"""Checks of ``recipes check`` that depend on the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from recipes_lib.config.schema import TokensConfig
from recipes_lib.errors import ConfigError, Problem, reported_at
from recipes_lib.inspection.sections import Inspection, Report, warned
from recipes_lib.quantities import format_bytes, pluralize

_MAX_REFERENCES: Final = 1000
"""First prompts whose right answers are read."""


class SFTInspection(Inspection):
    """Checks of supervised fine-tuning: packed rows with a loss mask, and the Trainer's schedule."""

    corpus_kind = "chat"
    flattens = True
    balances_experts = True

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether packing is on."""
        return self.config.tokens.packing

    def check_data(self, report: Report) -> None:
        """Prepare the packs, and report layouts and figures of the rows, and warnings about the chat template."""
        from recipes_lib.data.packed.encoding import build_encoder
        from recipes_lib.data.packed.training_data import load_training_data

        self.report_layouts(report, self.config)
        if self.tokenizer is None:
            return
        self._data = load_training_data(self.config, self.tokenizer)
        audit = self._data.audit
        report(
            f"{pluralize(audit.num_rows, 'row')} in {pluralize(audit.num_packs, 'pack')} of "
            f"{self._data.max_length:,} tokens, {audit.packing_efficiency(self._data.max_length):.0%} filled"
        )
        self.report_audit(report, "tokens a row")
        for caution in build_encoder(self.config, self.tokenizer).cautions:
            report(f"warning: {caution}")

    def check_steps(self, report: Report) -> None:
        """Report steps and learning rates of the Trainer, and the size of a step."""
        num_rows = self.report_schedule(report, self._data.rows_per_epoch)
        targets = num_rows * self._data.audit.num_target_tokens / self._data.audit.num_packs
        rows = f"{pluralize(num_rows, 'row')} of up to {self._data.max_length:,} tokens"
        report(f"a step: {rows}, {targets:,.0f} targets")


class PretrainInspection(Inspection):
    """Checks of pretraining: token sets and their mixture, the schedule in tokens, and tokens per parameter."""

    corpus_kind = "text"
    flattens = True

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether documents attend only to themselves."""
        return not self.config.pretraining.cross_document_attention

    def check_data(self, report: Report) -> None:
        """Prepare the token sets, and report tokens, weight and epochs of each source, and held-out tokens."""
        from recipes_lib.data.tokens.token_data import prepare_tokens
        from recipes_lib.planning.schedule import count_run_tokens
        from recipes_lib.training.trainers.pretraining_rows import build_rows

        if self.tokenizer is None:
            return
        num_tokens = count_run_tokens(self.config, self.launch.data_size)
        tokens = prepare_tokens(self.config, lambda: self.tokenizer, num_tokens=num_tokens)
        self._data = build_rows(self.config, tokens, self.launch.data_size)
        epochs = self._data.epochs.values()
        for source, weight, passes in zip(tokens.train, tokens.weights, epochs, strict=True):
            report(
                f"{source.name}: {source.num_documents:,} documents, {source.num_tokens:,} tokens, "
                f"{weight:.1%} of the mixture, read {passes:.2f} times"
            )
        for name, source in tokens.eval.items():
            report(f"held out of {name}: {source.num_documents:,} documents, {source.num_tokens:,} tokens")
        for warning in self._data.warnings:
            report(f"warning: {warning}")

    def read_ends(self) -> tuple[int | None, Sequence[int]]:
        """Return ``max_length``, since all rows have that length, and no ids, since there are no answers."""
        return self.config.tokens.max_length, ()

    def check_steps(self, report: Report) -> None:
        """Report steps, tokens, batch size and learning rates of the schedule that training uses."""
        from recipes_lib.planning.schedule import list_quarters

        plan = self._data.plan
        self.num_steps = plan.num_steps
        first, full = (int(rows) * plan.max_length for rows in (plan.row_starts[1], plan.rows_per_step))
        batch = f"{full:,} tokens" if first == full else f"{first:,} tokens at first, {full:,} in the end"
        report(f"{pluralize(plan.num_steps, 'step')} of {batch}; {plan.num_tokens:,} tokens in all")
        report(f"{plan.num_tokens / max(1, self.num_parameters):,.1f} tokens per parameter (Chinchilla: 20)")
        peak = self.config.read("learning_rate")
        rates = [plan.schedule(step) * peak for step in list_quarters(plan.num_steps)]
        report(f"learning rate at 0, 25, 50, 75, 100 %: {', '.join(f'{rate:.2e}' for rate in rates)}")
        report(f"{pluralize(plan.schedule.num_warmup_steps, 'step')} of warm-up")


class DistillationInspection(SFTInspection):
    """Checks of distillation: those of fine-tuning, and agreement of student and teacher."""

    def check_agreement(self, report: Report) -> None:
        """Verify the common agreement and the mapping of vocabularies, and report the stored teacher probabilities."""
        from recipes_lib.distillation.on_policy import find_positions
        from recipes_lib.distillation.teacher_store import map_teacher_vocabulary
        from recipes_lib.models.loading import choose_teacher, load_model_config

        self.vocabulary = vocabulary = map_teacher_vocabulary(self.config, self.tokenizer)
        super().check_agreement(report)
        teacher, _ = load_model_config(choose_teacher(self.config))
        if self.config.distillation.lmbda:
            find_positions(self.config, teacher)
        sizes = [config.get_text_config().vocab_size for config in (self.model_config, teacher)]
        how = "by the same ids" if vocabulary.is_identity else "by ids of its own, which are mapped"
        report(
            f"teacher: {teacher.model_type}, knows the student's {len(vocabulary):,} tokens {how}; "
            f"rows of the embeddings: student {sizes[0]:,}, teacher {sizes[1]:,}"
        )
        self.check_weights(report, "teacher_model_name_or_path", choose_teacher(self.config))
        self._check_layers(teacher, report)
        if self.config.distillation.teacher_top_k is not None and self._data is not None:
            from recipes_lib.data.store import find_set
            from recipes_lib.distillation.teacher_store import identify_store

            identity = identify_store(self.config, vocabulary, self._data.record)
            size = self._data.audit.num_target_tokens * identity.format.dtype.itemsize
            is_there = find_set(identity.root, identity.key) is not None
            state = "stored" if is_there else "not stored yet: run `recipes distill-store` before training"
            report(f"top-k probabilities of the teacher: {format_bytes(size)}, {state}")

    def _check_layers(self, teacher: Any, report: Report) -> None:
        """Report the pairs of layers whose hidden states or relations are compared, if any."""
        from recipes_lib.distillation.layer_features import choose_layers
        from recipes_lib.models.structure import map_layers

        configs = (self.model_config, teacher)
        num_student, num_teacher = (config.get_text_config().num_hidden_layers for config in configs)
        teacher_layers = map_layers(num_student, num_teacher)
        for what, numbers in zip(("states", "relations"), choose_layers(self.config.layers, num_student), strict=True):
            if numbers:
                pairs = ", ".join(f"{number} and {teacher_layers[number - 1]}" for number in numbers)
                report(f"{what} of layers: the student's and the teacher's {pairs}")


class PairInspection(Inspection):
    """Checks of reward modelling and DPO: pairs, dropped pairs, and shared prompts."""

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether the kernel has to isolate documents; with shared prompts, an attention mask does."""
        return self.config.preference.shared_prompt is False

    def check_data(self, report: Report) -> None:
        """Prepare the pairs, and report layouts and figures."""
        from recipes_lib.data.pairs.preference_sets import load_pair_data, read_as_pairs

        self.report_layouts(report, read_as_pairs(self.config))
        if self.tokenizer is None:
            return
        self._data = load_pair_data(self.config, self.tokenizer)
        audit = self._data.audit
        report(
            f"{pluralize(audit.num_pairs, 'pair')} under {pluralize(audit.num_prompts, 'prompt')}, "
            f"{audit.num_tokens:,} tokens"
        )
        self.report_audit(report, "tokens of a prompt with its longer answer")
        if self._data.eval is not None:
            report(f"held out: {pluralize(len(self._data.eval), 'pair')}")

    def check_agreement(self, report: Report) -> None:
        """Verify the common agreement, the reference's vocabulary, and that padding of a score head ends no answer."""
        super().check_agreement(report)
        if self.config.preference.ref_model_name_or_path is not None:
            from recipes_lib.training.trainers.dpo_trainer import verify_reference

            with reported_at(self.config.locate("ref_model_name_or_path")):
                reference = verify_reference(self.config, self.model_config)
            self.check_weights(report, "ref_model_name_or_path", reference)
        if self.config.recipe == "reward":
            from recipes_lib.models.heads.score_head import set_pad_token

            model: Any = SimpleNamespace(config=self.model_config)
            set_pad_token(model, self.tokenizer, self.read_ends()[1])
            report(f"the score is read at the end; {self.tokenizer.pad_token!r} pads")

    def check_kernels(self, report: Report) -> None:
        """Report the common choices, and whether both answers share one computation of the prompt.

        Raises:
            ConfigError: As ``find_sharing_obstacle``.
        """
        from recipes_lib.training.trainers.pair_trainer import find_sharing_obstacle

        super().check_kernels(report)
        # Support depends on the longest pair, which is unknown if the data could not be prepared.
        if self._data is None:
            return
        audit, implementation = self._data.audit, self.config.model.attn_implementation or "sdpa"
        max_length = self._data.max_length
        reason = find_sharing_obstacle(self.config, self.model_config, implementation, max_length=max_length)
        # `num_tokens` counts each prompt once; without sharing, prompts count twice.
        saved = audit.num_prompt_tokens / (audit.num_tokens + audit.num_prompt_tokens)
        report(
            f"a prompt is computed once for both answers, which saves {saved:.0%} of the tokens"
            if reason is None
            else f"a prompt is computed once for each answer: {reason or '`shared_prompt` is false'}"
        )

    def check_steps(self, report: Report) -> None:
        """Report steps and learning rates of the Trainer, and the size of a step."""
        num_pairs = self.report_schedule(report, self._data.rows_per_epoch)
        tokens = num_pairs * self._data.audit.num_tokens / self._data.audit.num_pairs
        report(f"a step: {pluralize(num_pairs, 'pair')}, {tokens:,.0f} tokens with one copy of each prompt")


class PPOInspection(Inspection):
    """Checks of PPO: prompts, reward functions, the engine, and memory of policy and critic."""

    keeps_documents_apart = False
    num_learners = 2  # Policy and critic.

    def check_data(self, report: Report) -> None:
        """Prepare the prompts, and report their number and lengths."""
        from recipes_lib.data.prompts import load_prompt_data

        if self.tokenizer is None:
            return
        self._data = load_prompt_data(self.config, self.tokenizer)
        record = self._data.record
        report(
            f"{pluralize(record['num_prompts'], 'prompt')} of {record['prompt_tokens_mean']:,.0f} tokens on average, "
            f"{record['prompt_tokens_max']:,} at most; answers of up to {self.config.rewards.response_length:,}"
        )
        if record["num_overlong"]:
            report(f"left out, too long: {record['num_overlong']:,}")
        if self._data.eval:
            report(f"held out: {pluralize(len(self._data.eval), 'prompt')}")

    def read_ends(self) -> tuple[int | None, Sequence[int]]:
        """Return the length of the longest prompt with its longest answer, and the ids of tokens that end answers."""
        return (self._data.max_length, self._data.terminators) if self._data else super().read_ends()

    def check_agreement(self, report: Report) -> None:
        """Verify the common agreement, the critic, the rewards and the engine."""
        from recipes_lib.models.heads.scoring import find_saved
        from recipes_lib.planning.memory import find_critic_start
        from recipes_lib.rl.models import verify_critic

        super().check_agreement(report)
        if self.config.recipe == "ppo":
            verify_critic(self.config, self.model_config)
            if self.config.critic.critic_model_name_or_path is not None:
                weights = find_saved(*find_critic_start(self.config))[1]
                self.check_weights(report, "critic_model_name_or_path", weights, needs_head=False)
        self._check_rewards(report)
        self._check_engine(report)

    def _check_engine(self, report: Report) -> None:
        import torch

        engine = self.config.engine
        if engine.use_vllm:
            from recipes_lib.rl.engines.vllm import check_vllm

            with warned(report, is_fatal=torch.accelerator.is_available()):
                check_vllm()
            where = f"at {engine.vllm_server_base_url}" if engine.vllm_mode == "server" else "in each process"
            report(f"answers are sampled by vLLM {where}, not from the seed")
        elif engine.use_transformers_continuous_batching:
            from recipes_lib.rl.engines.engine import build_batching_options

            build_batching_options(engine.transformers_continuous_batching_config or {}, 0, torch.float32)
            report("answers are sampled by transformers' continuous batching, not from the seed")

    def _check_rewards(self, report: Report) -> None:
        from recipes_lib.rl.rewards import MODEL, load_reward_functions, verify_arguments

        rewards = self.config.rewards
        names = list(functions := load_reward_functions(rewards.reward_funcs or []))
        if self._data:
            verify_arguments(functions, self._data.train[0].columns)
            self._check_references(functions, report)
        if rewards.reward_model_name_or_path is not None:
            with reported_at(self.config.locate("reward_model_name_or_path")):
                self._check_reward_model(rewards.reward_model_name_or_path, report)
            names.append(MODEL)
        weights = rewards.reward_weights or [1.0] * len(names)
        terms = " + ".join(f"{weight:g} {name}" for weight, name in zip(weights, names, strict=True))
        report(f"reward: {terms}")

    def _check_references(self, functions: Mapping[str, Any], report: Report) -> None:
        """Report the prompts whose right answer a verifier cannot read: answers to them have no reward.

        Raises:
            ConfigError: These are all prompts that were read, or a verifier fails on one of them.
        """
        from recipes_lib.rl.rewards import Rewards
        from recipes_lib.rl.verifiers import exact_match, final_number, python_tests

        prompts = [self._data.train[number] for number in range(min(len(self._data.train), _MAX_REFERENCES))]
        count = len(prompts)
        for name, function in functions.items():
            is_of_trl = str(getattr(function, "__module__", "")).startswith("trl.rewards")
            if function not in (exact_match, final_number, python_tests) and not is_of_trl:
                continue  # It may call a server.
            one = Rewards({name: function}, None, [1.0])
            num_unread = one.score(prompts, [""] * count, [[]] * count, [True] * count).total.count(None)
            found = f"{name} reads no right answer in {num_unread:,} of the first {count:,} prompts"
            if num_unread == count:
                remedy = "name the column (`dataset_columns`) or another function"
                raise ConfigError(Problem("reward_funcs", found, remedy))
            if num_unread:
                report(f"warning: {found}, and answers to them have no reward")

    def _check_reward_model(self, name: str, report: Report) -> None:
        """Verify that the reward model is whole, and report if it has too few positions for the longest answer."""
        from recipes_lib.models.heads.scoring import find_saved
        from recipes_lib.models.loading import load_model_config, load_tokenizer
        from recipes_lib.rl.rewards import verify_positions

        named, weights, adapter = find_saved(name, self.config.rewards.reward_model_revision)
        # An adapter has a head, so that its base needs none.
        self.check_weights(report, "reward_model_name_or_path", weights, needs_head=adapter is None)
        model_config, own = load_model_config(weights)[0], load_tokenizer(named, TokensConfig())
        if self._data and (warning := verify_positions(model_config, own, self.tokenizer, self._data.max_length)):
            report(warning)

    def check_kernels(self, report: Report) -> None:
        """Report the common choices and peak memory, with a warning if this machine's accelerator has less."""
        from recipes_lib.hardware import read_device_memory
        from recipes_lib.planning.memory import plan_memory
        from recipes_lib.training.layouts.memory_layout import build_layout
        from recipes_lib.training.trainers.arguments import resolve_precision

        super().check_kernels(report)
        precision = resolve_precision(self.config, self.launch.precision)
        config = self.config.with_training({"bf16": bool(precision["bf16"])})  # PPO refuses fp16.
        layout = build_layout(self.launch, self.launch.engine, self.config.read("gradient_accumulation_steps"))
        try:
            plan = plan_memory(config, self.model_config, layout)
        except ConfigError as error:  # The architecture is unknown to planning, and may train.
            report(f"warning: memory is not planned: {error.problems[0].found}")
            return
        report(f"{plan.about or 'one model trained'}: {format_bytes(plan.peak)} at most; `recipes plan` lists it")
        if (size := read_device_memory()) is not None and not plan.fits(size):
            remedy = "adapters (`use_peft: true`), fewer rows at once, or another layout need less"
            report(f"warning: this is more than the {format_bytes(size)} of the device at hand can hold; {remedy}")

    def check_steps(self, report: Report) -> None:
        """Report iterations, answers, optimizer steps, and the policy's learning rates.

        Raises:
            ConfigError: The warm-up of the critic lasts for the whole run.
        """
        from recipes_lib.rl.rollout_schedule import compute_schedule

        plan = compute_schedule(len(self._data.train), self.config, self.launch.world_size)
        self.num_steps, self.num_epochs = plan.num_steps, plan.num_epochs
        report(
            f"{pluralize(plan.num_iterations, 'iteration')} of {plan.answers_per_iteration:,} answers and "
            f"{pluralize(plan.steps_per_iteration, 'step')} of {pluralize(plan.answers_per_step, 'answer')}: "
            f"{pluralize(plan.num_steps, 'step')}, every prompt answered {plan.num_epochs:.3g} times"
        )
        self.report_rates(report, plan.num_warmup_steps, plan.num_idle_steps)


class GroupInspection(PPOInspection):
    """Checks of RLOO and GRPO: those of PPO without a critic, and groups of answers."""

    num_learners = 1  # There is no critic.

    def check_steps(self, report: Report) -> None:
        """Report answers per iteration, optimizer steps, and learning rates.

        Raises:
            ConfigError: As ``compute_group_schedule``.
        """
        from recipes_lib.rl.rollout_schedule import compute_group_schedule

        plan = compute_group_schedule(len(self._data.train), self.config, self.launch.world_size)
        self.num_steps, self.num_epochs, answers = plan.num_steps, plan.num_epochs, plan.answers_per_iteration
        report(
            f"{pluralize(answers, 'answer')} to {pluralize(answers // plan.group, 'prompt')} at a time, "
            f"{plan.answers_per_step:,} a step: {plan.num_steps:,} steps, {plan.num_epochs:.3g} epochs"
        )
        self.report_rates(report, plan.num_warmup_steps)


INSPECTIONS: Final[Mapping[str, type[Inspection]]] = {
    "pretrain": PretrainInspection,
    **dict.fromkeys(("sft", "lora"), SFTInspection),
    **dict.fromkeys(("reward", "dpo"), PairInspection),
    "ppo": PPOInspection,
    "distill": DistillationInspection,
    **dict.fromkeys(("rloo", "grpo"), GroupInspection),
}
"""Recipe -> class of its checks."""
