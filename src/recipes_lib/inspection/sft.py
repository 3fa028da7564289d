"""What ``recipes check`` looks at in a run of supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recipes_lib.errors import ConfigError
from recipes_lib.inspection.base import SHARES_OF_A_RUN, Inspection, Say

if TYPE_CHECKING:
    from recipes_lib.data.training_data import TrainingData


class SFTInspection(Inspection):
    """Rows, their mask and their packs, and the schedule that upstream builds."""

    def __init__(self, *args: Any) -> None:
        """Take what ``Inspection`` takes."""
        super().__init__(*args)
        self._data: TrainingData | None = None

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether rows are packed."""
        return self.config.tokens.packing

    def look_at_data(self, say: Say) -> None:
        """The layout of the rows, what is trained on of them, and the audit."""
        from recipes_lib.data.encoding import build_encoder
        from recipes_lib.data.source_mixtures import load_train_data
        from recipes_lib.data.sources import detect_source_format
        from recipes_lib.data.training_data import load_training_data

        for part in load_train_data(self.config.data, seed=0).parts:
            say(f"{part.source.name}: {detect_source_format(part.source, part.format)}")
        if self.tokenizer is None:
            return
        self._data = load_training_data(self.config, lambda _: self.tokenizer)
        audit = self._data.audit
        say(
            f"{audit.num_rows:,} rows in {audit.num_packs:,} packs of {self._data.max_length:,} tokens, "
            f"{audit.packing_efficiency(self._data.max_length):.0%} filled"
        )
        say(
            f"tokens a row: 5 % up to {audit.length_p5:,}, half up to {audit.length_p50:,}, "
            f"95 % up to {audit.length_p95:,}, longest {audit.length_max:,}"
        )
        for finding in self._data.findings:
            say(("" if finding.severity == "ok" else f"{finding.severity}: ") + finding.found)
        for caution in build_encoder(self.config, self.tokenizer).cautions:
            say(f"warning: {caution}")

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens, length, and what answers end with."""
        from recipes_lib.models.loading import check_agreement

        if self.tokenizer is None or self.model_config is None:
            return
        max_length = self._data.max_length if self._data else self.config.tokens.max_length
        problems = check_agreement(self.model_config, self.generation_config, self.tokenizer, max_length=max_length)
        if problems:
            raise ConfigError(*problems)
        ends = (
            ", ".join(repr(self.tokenizer.convert_ids_to_tokens(end)) for end in self._data.audit.terminators)
            if self._data
            else ""
        )
        say(f"vocabulary, special tokens and length agree; answers end with {ends or 'the end of text'}")

    def look_at_steps(self, say: Say) -> None:
        """As many steps as the Trainer will count, and its rates."""
        from recipes_lib.planning.schedule import compute_learning_rates
        from recipes_lib.planning.steps import compute_steps

        if self._data is None:
            return
        training = self.config.training
        plan = compute_steps(self._data.num_packs, training, self.num_processes)
        self.num_steps = plan.num_steps
        targets = plan.rows_per_step * self._data.audit.num_target_tokens / self._data.audit.num_packs
        say(f"{plan.num_steps:,} steps, {plan.num_epochs:.2f} epochs, {plan.num_warmup_steps:,} steps of warm-up")
        say(f"a step: {plan.rows_per_step} rows of up to {self._data.max_length:,} tokens, {targets:,.0f} targets")
        steps = [round(share * (plan.num_steps - 1)) for share in SHARES_OF_A_RUN]
        rates = compute_learning_rates(training, plan.num_steps, plan.num_warmup_steps, steps)
        shown = "decided while training" if rates is None else ", ".join(f"{rate:.2e}" for rate in rates)
        say(f"learning rate at 0, 25, 50, 75, 100 %: {shown}")
