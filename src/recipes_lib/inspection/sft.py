"""What ``recipes check`` looks at in a run of supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recipes_lib.inspection.base import Inspection, Say

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
        if self.tokenizer is None or self.model_config is None:
            return
        longest = self._data.longest if self._data else self.config.tokens.max_length
        self.say_agreement(say, longest, self._data.audit.terminators if self._data else ())

    def look_at_steps(self, say: Say) -> None:
        """As many steps as the Trainer will count, and its rates."""
        if self._data is None:
            return
        num_rows = self.say_schedule(say, self._data.num_packs)
        targets = num_rows * self._data.audit.num_target_tokens / self._data.audit.num_packs
        say(f"a step: {num_rows} rows of up to {self._data.max_length:,} tokens, {targets:,.0f} targets")
