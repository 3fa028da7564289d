"""Checks of runs on preference pairs: reward models and DPO."""

from __future__ import annotations

from types import SimpleNamespace

from recipes_lib.inspection.sections import Inspection, Say


class PairInspection(Inspection):
    """Pairs, what is left out of them, and whether their prompts are computed once."""

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
        self.say_audit(say, "tokens of a prompt with its longer answer")
        if self._data.eval is not None:
            say(f"held out: {len(self._data.eval):,} pairs")

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
