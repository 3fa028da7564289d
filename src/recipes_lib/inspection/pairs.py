"""What ``recipes check`` looks at in a run that compares answers: reward models and DPO."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from recipes_lib.inspection.sections import Inspection, Say

if TYPE_CHECKING:
    from recipes_lib.data.pairs.pair_data import PairData


class PairInspection(Inspection):
    """Pairs, what is left out of them, and whether their prompts are computed once."""

    def __init__(self, *args: Any) -> None:
        """Take what ``Inspection`` takes."""
        super().__init__(*args)
        self._data: PairData | None = None

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether the kernel has to: shared prompts go by a mask."""
        return self.config.preference.shared_prompt is False

    def look_at_data(self, say: Say) -> None:
        """How many pairs there are, how long they are, and the audit."""
        from recipes_lib.data.pairs.pair_data import load_pair_data

        if self.tokenizer is None:
            return
        self._data = load_pair_data(self.config, lambda _: self.tokenizer)
        audit = self._data.audit
        say(f"{audit.num_pairs:,} pairs under {audit.num_prompts:,} prompts, {audit.num_tokens:,} tokens")
        say(
            f"tokens of a prompt with its longer answer: 5 % up to {audit.length_p5:,}, half up to "
            f"{audit.length_p50:,}, 95 % up to {audit.length_p95:,}, longest {audit.length_max:,}"
        )
        if self._data.eval is not None:
            say(f"held out: {len(self._data.eval):,} pairs")
        for finding in self._data.findings:
            say(("" if finding.severity == "ok" else f"{finding.severity}: ") + finding.found)

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens, length, what answers end with, and whether padding can be told from it."""
        if self.tokenizer is None or self.model_config is None:
            return
        terminators = self._data.audit.terminators if self._data else ()
        self.say_agreement(say, self._data.longest if self._data else self.config.tokens.max_length, terminators)
        if self.config.stage == "reward":
            from recipes_lib.models.heads.score_head import set_pad_token

            set_pad_token(SimpleNamespace(config=self.model_config), self.tokenizer, terminators)  # type: ignore[arg-type]
            say(f"the score is read at the end; {self.tokenizer.pad_token!r} pads")

    def look_at_kernels(self, say: Say) -> None:
        """As for every stage, and whether a prompt is computed once for both answers."""
        from recipes_lib.models.attention.shared_prompt import supports_shared_prompt

        super().look_at_kernels(say)
        if self.model_config is None or self._data is None:
            return
        reason: str | None = "`shared_prompt` is false"
        if self.config.preference.shared_prompt is not False:
            implementation = self.config.model.attn_implementation or "sdpa"
            reason = supports_shared_prompt(self.model_config, implementation, max_length=self._data.max_length)
        audit = self._data.audit
        saved = audit.num_prompt_tokens / (audit.num_tokens + audit.num_prompt_tokens)
        say(
            f"a prompt is computed once for both answers, which saves {saved:.0%} of the tokens"
            if reason is None
            else f"a prompt is computed once for each answer: {reason}"
        )

    def look_at_steps(self, say: Say) -> None:
        """As many steps as the Trainer will count, and its rates."""
        if self._data is None:
            return
        num_pairs = self.say_schedule(say, self._data.audit.num_pairs)
        tokens = num_pairs * self._data.audit.num_tokens / self._data.audit.num_pairs
        say(f"a step: {num_pairs} pairs, {tokens:,.0f} tokens with one copy of each prompt")
