"""What ``recipes check`` looks at in a run of distillation."""

from __future__ import annotations

from typing import Any

from recipes_lib.inspection.base import Say
from recipes_lib.inspection.sft import SFTInspection


class DistillationInspection(SFTInspection):
    """What fine-tuning is looked at for, and whether student and teacher read the same tokens."""

    def look_at_agreement(self, say: Say) -> None:
        """Vocabulary, special tokens and length of the student; and the teacher beside it."""
        if self.tokenizer is None or self.model_config is None:
            return
        from recipes_lib.models.loading import load_model_config
        from recipes_lib.training.teacher import choose_teacher, map_teacher_vocabulary

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
            from recipes_lib.training.teacher_store import identify_store

            identity = identify_store(self.config, vocabulary, self._data.record)
            size = self._data.audit.num_target_tokens * identity.format.dtype.itemsize
            is_there = find_set(identity.root, identity.key) is not None
            state = "is stored" if is_there else "is not stored yet: run `recipes distill-store` before training"
            say(f"what the teacher says, {size / 1e9:.2f} GB, {state}")

    def _look_at_layers(self, teacher: Any, say: Say) -> None:
        """Say which layers will be compared, if any."""
        from recipes_lib.models.layers import map_layers
        from recipes_lib.training.layer_knowledge import choose_layers

        configs = (self.model_config, teacher)
        num_student, num_teacher = (config.get_text_config().num_hidden_layers for config in configs)
        answers = map_layers(num_student, num_teacher)
        for what, numbers in zip(("states", "relations"), choose_layers(self.config.layers, num_student), strict=True):
            if numbers:
                pairs = ", ".join(f"{number} and {answers[number - 1]}" for number in numbers)
                say(f"{what} of layers: the student's and the teacher's {pairs}")
