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

NUM_PROVED: int = 64
"""Tokens on which a rewritten model is compared with the original."""


NUM_BYTES: Final = 256
EOS_TOKEN: Final = "<|endoftext|>"
PAD_TOKEN: Final = "<|pad|>"
"""Not the end of text: a model that never trains on its padding token would never learn to stop."""
CHATML_TOKENS: Final = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with what the assistant writes marked as generated. A bare line end behind a block would be trimmed."""
PIECES: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
r"""GPT-4's cut of a text into the pieces that no token crosses.

Preferred to GPT-2's, ``'s|'t|...| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+``, for

- digits: at most three together, so that no number has a token of its own and all are spelt alike;
- contractions: split off in capitals too;
- white space: line ends are cut from what follows, and the punctuation before them keeps them, so that indentation is
  a token by itself and ``");\n"`` may be one.

Source: ``cl100k_base`` of tiktoken; Llama 3's tokenizer has it in this form.
"""
_MIN_FREQUENCY: Final = 2
"""A pair seen once does not generalise."""
_BATCH_CHARACTERS: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TokenUsage:
    """Token statistics of a tokenizer on some texts.

    Attributes:
        num_bytes: UTF-8 bytes of the texts.
        counts: How often each id was used, ``int64 (V,)``.
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

    The result depends only on the counts of word pieces, not on the order of texts or the number of threads. Memory
    grows with the number of different pieces, not with the texts, which are read once.

    Args:
        texts: What it is trained on. Special tokens in them are left out, so that no token spells a part of one.
        vocab_size: Tokens wanted: special ones, the 256 bytes, and merges. There are fewer when the texts run out of
            pairs that occur twice.
        eos_token: Ends a text; id 0.
        pad_token: Fills rows; id 1.
        special_tokens: Further ones; their ids follow, in this order.
        chat_template: Jinja text.
        show_progress: Draw progress bars on standard error.

    Source: Sennrich et al. 2016; over bytes as in Radford et al. 2019, section 2.2.
    """
    specials = list(dict.fromkeys([eos_token, pad_token, *special_tokens]))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    bpe.train_from_iterator(_split_at(texts, specials), trainer)
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
        ids = np.concatenate([np.asarray(encoding.ids, np.int64) for encoding in encodings])
        counts += np.bincount(ids, minlength=len(counts))
        num_bytes += sum(map(count_bytes, batch))
    return TokenUsage(num_bytes, counts)


def count_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """Positions of the student's tokens in the teacher's vocabulary.

    Attributes:
        teacher_ids: For each id of the student's tokenizer that of the same token in the teacher's; for an id without a
            token, itself.
    """

    teacher_ids: Sequence[int]

    @property
    def is_identity(self) -> bool:
        """Whether every token has the same id in both."""
        return all(own == other for own, other in enumerate(self.teacher_ids))


def map_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, where: str) -> VocabularyMap:
    """Map the student's tokens to the teacher's vocabulary, which may have additional ones.

    Args:
        student: A fast tokenizer.
        teacher: A fast tokenizer.
        where: The key that named the teacher.

    Raises:
        ConfigError: The teacher lacks some of them, or cuts text into them by other rules: it would be asked about text
            that it never saw so.

    Source: ``tests/models/test_vocabulary.py``.
    """
    own, other = student.get_vocab(), teacher.get_vocab()
    remedy = (
        "name a teacher of the student's own family, or distil by sequences: let the teacher write the answers "
        "(`recipes distill-write`) and train on them with the `sft` recipe; TRL's GOLDTrainer aligns other tokenizers"
    )
    missing = sorted(own.keys() - other.keys())
    if missing:
        found = f"the teacher has no token {', '.join(map(repr, missing[:3]))}"
        found += f" and lacks {len(missing):,} of the student's {len(own):,} in all" if len(missing) > 1 else ""
        raise ConfigError(Problem(where, found, remedy))
    differing = [name for name, rule in _read_rules(student).items() if _read_rules(teacher).get(name) != rule]
    if differing:
        found = f"the tokenizers of student and teacher share their tokens and differ in {', '.join(differing)}"
        raise ConfigError(Problem(where, found, remedy))
    teacher_ids = list(range(max(own.values()) + 1))
    # Ids without a token keep their own number as a placeholder.
    for token, token_id in own.items():
        teacher_ids[token_id] = other[token]
    return VocabularyMap(teacher_ids)


def adopt_vocabulary(model: PreTrainedModel, vocabulary: VocabularyMap, where: str) -> None:
    """Convert a model to the student's vocabulary, and verify its logits on some tokens.

    Padding rows, and tokens that only the teacher has, are removed.

    Args:
        model: The teacher.
        vocabulary: From ``map_vocabulary``.
        where: The key that named the teacher.

    Raises:
        ConfigError: The model has fewer embeddings than its tokenizer has tokens, or says something else afterwards.
    """
    ids = torch.tensor(vocabulary.teacher_ids)
    embedding: Any = model.get_input_embeddings()
    projection: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    num_rows, highest = len(projection.weight), int(ids.max())
    if num_rows <= highest:
        found = f"the teacher has {num_rows:,} embeddings, and its tokenizer gives ids up to {highest:,}"
        raise ConfigError(Problem(where, found, "name a teacher whose tokenizer is its own"))
    if vocabulary.is_identity and num_rows == len(ids):
        return
    # Evenly over the vocabulary, its first and last token among them.
    probe = torch.linspace(0, len(ids) - 1, min(NUM_PROVED, len(ids))).long()
    # Logits of the student's tokens alone, in its order: (64, V).
    expected = _compute_logits(model, ids[probe])[:, ids]
    is_tied = embedding.weight is projection.weight
    _take_rows(projection, ids)
    if is_tied:
        embedding.weight = projection.weight
    else:
        _take_rows(embedding, ids)
    projection.out_features = embedding.num_embeddings = len(ids)
    embedding.padding_idx = None  # These ids have another meaning now.
    model.config.get_text_config().vocab_size = len(ids)
    difference, scale = (_compute_logits(model, probe) - expected).abs().max(), expected.abs().max()
    if not difference <= scale * max(1e-4, 4 * torch.finfo(model.dtype).eps):
        found = f"with the student's vocabulary the teacher says something else: a logit moves by {difference:.2g}"
        raise ConfigError(Problem(where, found, "name a teacher of the student's own family"))


def _read_rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the tokenisation rules without the ids."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = dict(state["model"])
    vocabulary = model.pop("vocab", None)
    scores = dict(vocabulary) if isinstance(vocabulary, list) else None
    rules = {name: state[name] for name in ("normalizer", "pre_tokenizer")}
    return {**rules, "merges": model, "scores of tokens": scores}


def _take_rows(module: Any, ids: torch.Tensor) -> None:
    """Reduce an embedding, or an output projection, to the rows of ``ids``."""
    for name in ("weight", "bias"):
        values = getattr(module, name, None)
        if values is not None:
            rows = values.detach()[ids.to(values.device)]
            setattr(module, name, nn.Parameter(rows, requires_grad=values.requires_grad))


@torch.no_grad()
def _compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    return logits.float().cpu()


def _split_at(texts: Iterable[str], special_tokens: Sequence[str]) -> Iterator[str]:
    """Yield the text between the special tokens of each text; longer special tokens match first."""
    special = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))
    for text in texts:
        yield from filter(None, special.split(text))


def _batch(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
