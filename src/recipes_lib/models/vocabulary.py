"""Vocabularies: training of byte-level BPE tokenizers, and mapping of a teacher's vocabulary to a student's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import count_bytes
from recipes_lib.models.inference import compute_probe_logits, find_logit_shift

NUM_PROVED: int = 64
"""Tokens on which a model with a changed vocabulary is compared with the original."""
NUM_BYTES: Final = 256
EOS_TOKEN: Final = "<|endoftext|>"
PAD_TOKEN: Final = "<|pad|>"
"""Differs from the end of text: a model is never trained on its padding token, and must learn to end a text."""
CHATML_TOKENS: Final = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with ``generation`` blocks around assistant messages. The line break is an expression because Jinja removes a
literal one after a block."""
_MAX_PIECE: Final = 1000
"""Characters of the longest piece that a tokenizer is trained on; longer ones, which are no words, are split."""
PIECES: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
r"""Pre-tokenisation pattern of GPT-4: no token crosses the boundaries of its matches.

Differences from the pattern of GPT-2, ``'s|'t|...| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+``:

- digits: at most three per token, so that numbers are split alike;
- contractions: also in capitals;
- white space: line breaks are separated from what follows and belong to the punctuation before them, so that
  indentation is a token by itself and ``");\n"`` may be one.

Source: ``cl100k_base`` of tiktoken, in the form of Llama 3's tokenizer.
"""
_MIN_FREQUENCY: Final = 2
"""Occurrences of a pair that make it a merge; a single one does not generalise."""
_BATCH_CHARACTERS: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TokenUsage:
    """Token statistics of a tokenizer on some texts.

    Attributes:
        num_bytes: Size of the texts in UTF-8 bytes.
        counts: Number of occurrences of each token id, ``int64 (V,)``.
    """

    num_bytes: int
    counts: npt.NDArray[np.int64]

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes per token; 0 without texts."""
        return self.num_bytes / max(int(self.counts.sum()), 1)


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    eos_token: str = EOS_TOKEN,
    pad_token: str = PAD_TOKEN,
    special_tokens: Sequence[str] = (),
    chat_template: str | None = None,
    show_progress: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that can encode every text, with end-of-text and padding tokens.

    The result depends only on the counts of pre-tokens, not on the order of texts or the number of threads. Memory
    grows with the number of distinct pre-tokens, not with the texts, which are read once.

    Args:
        texts: Training texts. Special tokens in them are removed, so that no merge contains a part of one.
        vocab_size: Requested vocabulary size: special tokens, the 256 bytes, and merges. It is smaller if fewer pairs
            occur twice.
        eos_token: End-of-text token, with id 0.
        pad_token: Padding token, with id 1.
        special_tokens: Further special tokens, whose ids follow in this order.
        chat_template: Chat template in Jinja.
        show_progress: Whether to draw progress bars on standard error.

    Source: Sennrich et al. 2016; over bytes as in Radford et al. 2019, section 2.2.
    """
    specials = list(dict.fromkeys([eos_token, pad_token, *special_tokens]))
    bpe = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    # Maps bytes to printable characters only: its own pattern is that of GPT-2, replaced by the Split above.
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # While training, whose time is quadratic in the length of a piece: hours for a megabyte of base64.
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.FixedLength(_MAX_PIECE), to_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=list(specials),
        # All 256 bytes, so that there are no unknown tokens; sorted for reproducible ids.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    bpe.train_from_iterator(_split_at(texts, specials), trainer)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=eos_token,
        pad_token=pad_token,
        extra_special_tokens=[token for token in specials if token not in (eos_token, pad_token)],
        chat_template=chat_template,
    )


def measure_usage(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> TokenUsage:
    """Measure a fast tokenizer on ``texts``, read once in batches; special tokens in them count as one token."""
    num_bytes, counts = 0, np.zeros(len(tokenizer), np.int64)
    for batch in _batch(texts):
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        # One bincount per batch rather than per text: V counts are added each time.
        ids = np.concatenate([np.asarray(encoding.ids, np.int64) for encoding in encodings])
        counts += np.bincount(ids, minlength=len(counts))
        num_bytes += sum(map(count_bytes, batch))
    return TokenUsage(num_bytes, counts)


class VocabularyMap(tuple[int, ...]):
    """Token id in the teacher's tokenizer for each token id of the student's; ids without a token map to themselves."""

    @property
    def is_identity(self) -> bool:
        """Whether every token has the same id in both."""
        return all(own == other for own, other in enumerate(self))


def map_vocabulary(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, where: str, num_rows: int | None = None
) -> VocabularyMap:
    """Map the student's tokens to the teacher's vocabulary, which may have additional tokens.

    Args:
        student: Fast tokenizer of the student.
        teacher: Fast tokenizer of the teacher.
        where: Configuration key that names the teacher.
        num_rows: Number of the student's embeddings; tokens beyond them, such as Gemma's of images, are left out.

    Raises:
        ConfigError: The teacher lacks tokens of the student, or its tokenizer splits text by other rules, so that
            it would be evaluated on token sequences unlike those of its training.

    Source: ``tests/models/test_vocabulary.py``.
    """
    own, other = student.get_vocab(), teacher.get_vocab()
    remedy = (
        "name a teacher of the student's model family, or use sequence-level distillation: generate answers with the "
        "teacher (`recipes synthesize`) and train on them with the `sft` recipe; TRL's GOLDTrainer aligns tokenizers"
    )
    if missing := sorted(own.keys() - other.keys()):
        found = f"the teacher has no token {', '.join(map(repr, missing[:3]))}"
        found += f" and lacks {len(missing):,} of the student's {len(own):,} in all" if len(missing) > 1 else ""
        raise ConfigError(Problem(where, found, remedy))
    rules, others = _read_rules(student), _read_rules(teacher)
    if differing := [name for name in rules if rules[name] != others[name]]:
        found = f"the tokenizers of student and teacher share their tokens and differ in {', '.join(differing)}"
        raise ConfigError(Problem(where, found, remedy))
    if num_rows is not None:
        own = {token: token_id for token, token_id in own.items() if token_id < num_rows}
    teacher_ids = list(range(max(own.values()) + 1))
    # Ids without a token, such as padding rows, keep their number: no text contains them.
    for token, token_id in own.items():
        teacher_ids[token_id] = other[token]
    return VocabularyMap(teacher_ids)


def adopt_vocabulary(model: PreTrainedModel, vocabulary: VocabularyMap, where: str) -> None:
    """Convert the embeddings of a model to the student's vocabulary, and verify its logits on some tokens.

    Padding rows and tokens that only the teacher has are removed.

    Args:
        model: Teacher, changed in place.
        vocabulary: Result of ``map_vocabulary``.
        where: Configuration key that names the teacher.

    Raises:
        ConfigError: The model has fewer embedding rows than its tokenizer has token ids, or its logits change.
    """
    ids = torch.tensor(vocabulary)
    embedding: Any = model.get_input_embeddings()
    projection: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    num_rows, highest = len(projection.weight), int(ids.max())
    if num_rows <= highest:
        found = f"the teacher has {num_rows:,} embeddings, and its tokenizer gives ids up to {highest:,}"
        raise ConfigError(Problem(where, found, "name a teacher whose tokenizer is its own"))
    if vocabulary.is_identity and num_rows == len(ids):
        return
    # Evenly spaced over the vocabulary, including its first and last token.
    probe = torch.linspace(0, len(ids) - 1, min(NUM_PROVED, len(ids))).long()
    # (1, NUM_PROVED, V): logits of the student's tokens in its order.
    expected = compute_probe_logits(model, ids[probe])[..., ids]
    # Checked before the projection gets a new parameter.
    is_tied = embedding.weight is projection.weight
    _take_rows(projection, ids)
    if is_tied:
        embedding.weight = projection.weight
    else:
        _take_rows(embedding, ids)
    embedding.padding_idx = None  # An id of the teacher's vocabulary, whose row may be removed.
    # Gemma's loss reads the attribute of the model.
    model.config.get_text_config().vocab_size = model.vocab_size = len(ids)
    if (shift := find_logit_shift(model, expected, probe)) is not None:
        found = f"the logits of the teacher change by {shift:.2g} of the largest with the student's vocabulary"
        raise ConfigError(Problem(where, found, "name a teacher of the student's model family"))


def _read_rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the tokenisation rules of a fast tokenizer by name, without token ids."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = dict(state["model"])
    # BPE and WordPiece have a mapping to ids, Unigram a list of tokens with their scores, which are rules.
    vocabulary = model.pop("vocab", None)
    scores = dict(vocabulary) if isinstance(vocabulary, list) else None
    rules = {name: state[name] for name in ("normalizer", "pre_tokenizer")}
    return {**rules, "merges": model, "scores of tokens": scores}


def _take_rows(module: Any, ids: torch.Tensor) -> None:
    """Replace weight and bias of an embedding or output projection by their rows ``ids``, ``int64 (V,)``."""
    for name in ("weight", "bias"):
        if (values := getattr(module, name, None)) is not None:
            rows = values.detach()[ids.to(values.device)]
            setattr(module, name, nn.Parameter(rows, requires_grad=values.requires_grad))


def _split_at(texts: Iterable[str], special_tokens: Sequence[str]) -> Iterator[str]:
    """Yield the non-empty parts of each text between special tokens; longer special tokens match first."""
    special = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))
    for text in texts:
        yield from filter(None, special.split(text))


def _batch(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
