"""Token sets of all sources of a pretraining run, and detection of overlap with held-out documents."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from rich.table import Table

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.encoding import TokenizerLoader, build_encoder
from recipes_lib.data.sources.mixtures import compute_weights
from recipes_lib.data.sources.replay_dataset import find_replayed
from recipes_lib.data.sources.splits import compute_row_digest, refuse_overlap
from recipes_lib.data.store import PreparedSet, compute_key, find_root, wait_for_set
from recipes_lib.data.tokens.shards import TokenSource
from recipes_lib.data.tokens.token_sets import (
    Corpus,
    halve_digests,
    load_corpora,
    load_eval_corpora,
    load_held_out,
    make_token_set,
    select_options,
)
from recipes_lib.errors import DataError, Problem, collect_problems, raise_problems

if TYPE_CHECKING:
    from recipes_lib.data.chat.encoder import RowEncoder

Side = Literal["train", "eval"]

_SPLIT_REMEDY: Final = "write another size, or name held-out text in `eval_datasets`; a text file is one document"


def find_places(corpus: Corpus, tokens: TokenSource, positions: Collection[int]) -> dict[int, str]:
    """Return the locations of the first rows with the content of documents, by their positions; reads the source again.

    Token sets do not store the rows of documents, so they are found by digest.
    """
    digests = {position: int(tokens.digests[position]) for position in positions}
    places: dict[int, str] = {}
    for row in corpus.rows():
        with suppress(DataError):  # Broken rows have no document.
            digest = int(halve_digests([compute_row_digest(row)])[0])
            if digest in digests.values():
                places.setdefault(digest, row.where)
        if len(places) == len(set(digests.values())):
            break
    return {position: places[digest] for position, digest in digests.items()}


@dataclass(frozen=True, slots=True)
class TokenData:
    """The tokens of a run.

    Attributes:
        train: Training sources in the order of ``dataset_mixture``, then replayed ones; each has at least
            ``max_length`` tokens.
        eval: Held-out sources by name: those with documents held out by ``test_split_size``, or that of
            ``dataset_test_split``.
        eval_sets: Sources of ``eval_datasets``, by name.
        weights: Share of each training source in the training tokens; they sum to 1.
        num_replayed: Number of replayed sources, the last ones of ``train``.
        record: JSON values for ``run.json``: the origin of the tokens, and their counts.
        is_new: Whether this process has built any of the token sets.
    """

    train: Sequence[TokenSource]
    eval: Mapping[str, TokenSource]
    eval_sets: Mapping[str, TokenSource]
    weights: Sequence[float]
    num_replayed: int
    record: Mapping[str, Any]
    is_new: bool


class _Part(NamedTuple):
    corpus: Corpus
    prepared: PreparedSet

    def open(self, side: Side = "train") -> TokenSource:
        """Return the training documents of a token set, or its held-out ones."""
        return TokenSource(self.corpus.name, self.prepared.path / side, **self.prepared.manifest[side])


def prepare_tokens(
    config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0, num_tokens: int | None = None
) -> TokenData:
    """Find the token sets of a run, or build them.

    Every source is a separate prepared set: a changed mixture tokenises only new sources; a changed weight, curriculum
    or ``max_length`` tokenises nothing. Call it before the process group is created: local rank 0 can take longer than
    the timeout of a collective.

    Args:
        config: Configuration of the run.
        load_tokenizer: Function that loads the tokenizer; called only if a set is built.
        local_rank: Local rank of this process; rank 0 builds the sets, the others wait for them.
        num_tokens: Number of tokens that the run trains on, which limits how far streams are read.

    Raises:
        ConfigError: Options are incompatible, or the tokenizer does not exist.
        DataError: Documents are broken, or both trained on and held out; a source has too few tokens; a set cannot be
            written; on other ranks, local rank 0 has not built a set.
    """
    assert config.tokens.max_length is not None, "the configuration of pretraining requires it"
    corpora, held_out, named = load_corpora(config, num_tokens), load_held_out(config), load_eval_corpora(config)
    replayed, num_own = find_replayed(config), len(corpora)
    if replayed is not None:
        corpora += load_corpora(replayed)
    parts = _prepare([*corpora, *([held_out] if held_out else []), *named], config, load_tokenizer, local_rank)
    is_new = any(part.prepared.is_new for part in parts)
    # Parts are in the order of the corpora: training, held-out, named. Take the last ones first.
    named_parts = [parts.pop() for _ in named][::-1]
    held_out_part = parts.pop() if held_out else None
    train = _open_train(parts, config.tokens.max_length)
    if local_rank == 0 and not config.data.allow_eval_overlap:
        for part in filter(None, (held_out_part, *named_parts)):
            _refuse_repeats(parts, train, part)
        for part in parts:
            _refuse_repeats(parts, train, part, "eval")
    # The weights of the run's own sources and of the replayed ones each sum to 1 before they are scaled.
    sizes = [source.num_tokens for source in train]
    weights = compute_weights(config, sizes[:num_own])
    if replayed is not None:
        share = config.forgetting.replay_share
        weights = [weight * (1 - share) for weight in weights]
        weights += [weight * share for weight in compute_weights(replayed, sizes[num_own:])]
    sources = [{**_describe(part), "weight": weight} for part, weight in zip(parts, weights, strict=True)]
    named_sets = {"eval_datasets": {part.corpus.name: _describe(part) for part in named_parts}} if named_parts else {}
    return TokenData(
        train=train,
        eval=_open_eval(parts, held_out_part),
        eval_sets={part.corpus.name: part.open() for part in named_parts},
        weights=weights,
        num_replayed=len(train) - num_own,
        record={"sources": sources, "held_out": _describe(held_out_part) if held_out_part else None, **named_sets},
        is_new=is_new,
    )


def _prepare(
    corpora: Sequence[Corpus], config: RecipeConfig, load_tokenizer: TokenizerLoader, local_rank: int
) -> list[_Part]:
    """Return the token set of each corpus; all are tried before problems are raised."""
    root = find_root(config)

    @functools.cache
    def load_encoder() -> RowEncoder:
        return build_encoder(select_options(config), load_tokenizer())

    parts: list[_Part] = []
    problems: list[Problem] = []
    for corpus in corpora:
        inputs = corpus.collect_inputs(config)
        key = compute_key(inputs)
        if local_rank != 0:
            parts.append(_Part(corpus, wait_for_set(root, key)))
            continue
        try:
            parts.append(_Part(corpus, make_token_set(root, key, inputs, corpus, load_encoder)))
        except DataError as error:
            if isinstance(error.__cause__, OSError):  # A full disk also fails the next set.
                raise
            problems += error.problems
    raise_problems(problems, "dataset_mixture")
    return parts


def _open_train(parts: Sequence[_Part], max_length: int) -> list[TokenSource]:
    """Return the training tokens of each source.

    Raises:
        DataError: Sources have fewer tokens than one row.
    """
    sources = [part.open() for part in parts]
    problems: list[Problem] = []
    for part, source in zip(parts, sources, strict=True):
        found = f"{source.num_tokens:,} tokens to train on, and a row has max_length: {max_length:,}"
        remedy = "add text, remove the source from the mixture, or lower max_length"
        if not source.num_documents and (num_held_out := part.open("eval").num_documents):
            found, remedy = f"`test_split_size` holds out all {num_held_out:,} documents", _SPLIT_REMEDY
        if source.num_tokens < max_length:
            problems.append(Problem(source.name, found, remedy))
    raise_problems(problems, "dataset_mixture")
    return sources


def _open_eval(parts: Sequence[_Part], held_out: _Part | None) -> dict[str, TokenSource]:
    """Return the held-out tokens by name, of sources that have any.

    Raises:
        DataError: ``test_split_size`` holds out no document of any source.
    """
    sources = [held_out.open()] if held_out else [part.open("eval") for part in parts]
    found = {source.name: source for source in sources if source.num_documents}
    size = parts[0].corpus.test_size
    if size is not None and not found:
        num_documents = sum(part.open().num_documents for part in parts)
        fault = f"no document of {num_documents:,} is held out"
        raise DataError(Problem(f"test_split_size: {size}", fault, _SPLIT_REMEDY))
    return found


def _refuse_repeats(
    parts: Sequence[_Part], train: Sequence[TokenSource], held_out: _Part, side: Side = "train"
) -> None:
    problems: list[Problem] = []
    for part, source in zip(parts, train, strict=True):
        rules = {(corpus.test_size, corpus.seed) for corpus in (part.corpus, held_out.corpus)}
        # By one seed, a document has one draw: the same share holds it out of every source, the same number does not.
        if side == "eval" and len(rules) == 1 and (held_out.corpus.test_size or 0) < 1:
            continue
        other = held_out.open(side)
        find_train = functools.partial(find_places, part.corpus, source)
        find_held_out = functools.partial(find_places, held_out.corpus, other)
        with collect_problems(problems):
            refuse_overlap(source.digests, other.digests, find_train, find_held_out)
    raise_problems(problems, "dataset_test_split")


def _describe(part: _Part) -> dict[str, Any]:
    prepared = part.prepared
    sides = {side: prepared.manifest[side] for side in ("train", "eval", "broken_rows")}
    # Unlike the key, it depends on the documents only, and not on the tokenizer and this code.
    sides["fingerprint"] = prepared.manifest["inputs"]["sources"]["documents"]
    return {"name": part.corpus.name, "path": str(prepared.path), "key": prepared.key, **sides}


def render_summary(tokens: TokenData) -> Table:
    """Return a table of the tokens of a run, with a row for each source and split."""
    table = Table("source", "share", "documents", "tokens", title="tokens to train on")
    for source, weight in zip(tokens.train, tokens.weights, strict=True):
        table.add_row(source.name, f"{weight:.1%}", f"{source.num_documents:,}", f"{source.num_tokens:,}")
    for name, source in (*tokens.eval.items(), *tokens.eval_sets.items()):
        label = f"held out of {name}" if name in tokens.eval else f"held out, {name}"
        table.add_row(label, "", f"{source.num_documents:,}", f"{source.num_tokens:,}")
    return table
