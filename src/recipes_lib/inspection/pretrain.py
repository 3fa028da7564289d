"""What ``recipes check`` looks at in a pretraining run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recipes_lib.inspection.base import SHARES_OF_A_RUN, Inspection, Say

if TYPE_CHECKING:
    from recipes_lib.training.pretraining_rows import PretrainingRows


class PretrainInspection(Inspection):
    """Documents and their mixture, the schedule in tokens, and the size of the model against that of the data."""

    def __init__(self, *args: Any) -> None:
        """Take what ``Inspection`` takes."""
        super().__init__(*args)
        self._rows: PretrainingRows | None = None

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether a document sees only itself."""
        return not self.config.pretraining.cross_document_attention

    def look_at_data(self, say: Say) -> None:
        """The tokens of each source, how often each is read, and what is held out."""
        from recipes_lib.data.token_data import prepare_tokens
        from recipes_lib.planning.pretraining import count_run_tokens
        from recipes_lib.training.pretraining_rows import build_rows

        if self.tokenizer is None:
            return
        num_tokens = count_run_tokens(self.config, self.launch.data_size)
        tokens = prepare_tokens(self.config, lambda _: self.tokenizer, num_tokens=num_tokens)
        self._rows = build_rows(self.config, tokens, self.launch.data_size)
        epochs = self._rows.epochs.values()
        for source, weight, passes in zip(tokens.train, tokens.weights, epochs, strict=True):
            say(
                f"{source.name}: {source.num_documents:,} documents, {source.num_tokens:,} tokens, "
                f"{weight:.1%} of the mixture, read {passes:.2f} times"
            )
        for name, source in tokens.eval.items():
            say(f"held out of {name}: {source.num_documents:,} documents, {source.num_tokens:,} tokens")
        for warning in self._rows.warnings:
            say(f"warning: {warning}")

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens and length."""
        if self.tokenizer is not None and self.model_config is not None:
            self.say_agreement(say, self.config.tokens.max_length, ())

    def look_at_steps(self, say: Say) -> None:
        """Steps, tokens, the batch, and the learning rates of the very schedule that training follows."""
        if self._rows is None:
            return
        plan = self._rows.plan
        self.num_steps = plan.num_steps
        first, full = (int(rows) * plan.max_length for rows in (plan.row_starts[1], plan.rows_per_step))
        batch = f"{full:,} tokens" if first == full else f"{first:,} tokens at first, {full:,} in the end"
        say(f"{plan.num_steps:,} steps of {batch}; {plan.num_tokens:,} tokens in all")
        say(f"{plan.num_tokens / max(1, self.num_parameters):,.1f} tokens per parameter (Chinchilla: 20)")
        peak = float(self.config.training["learning_rate"])
        rates = [plan.schedule(round(share * (plan.num_steps - 1))) * peak for share in SHARES_OF_A_RUN]
        say(f"learning rate at 0, 25, 50, 75, 100 %: {', '.join(f'{rate:.2e}' for rate in rates)}")
        say(f"{plan.schedule.num_warmup_steps:,} steps of warm-up")
