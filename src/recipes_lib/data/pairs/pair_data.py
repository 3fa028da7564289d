"""Training data of preference and reward recipes: prepared pairs, and what is derived from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from rich.table import Table

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.token_ids import count_before_end, find_end_tokens
from recipes_lib.data.packed.audit import Finding
from recipes_lib.data.packed.encoding import TokenizerLoader
from recipes_lib.data.pairs.audit import PairAudit
from recipes_lib.data.pairs.sets import prepare_pairs
from recipes_lib.data.sources.mixtures import derive_eval_configs
from recipes_lib.data.store import PreparedSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PairRows(Protocol):
    """Pairs that are read by their number: a ``datasets.Dataset`` with the columns that ``prepare_pairs`` names."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class PairData:
    """Pairs and what is known of them.

    Attributes:
        train: Pairs to train on, in the order of the data.
        eval: Held-out pairs, or ``None``.
        max_length: Tokens that a prompt and either of its answers have room for.
        audit: Figures of the training pairs.
        findings: What the audit of all pairs makes of them.
        record: JSON values for ``run.json``: where the pairs came from, their counts, and what was left out.
        eval_sets: The pairs of each of ``eval_datasets``.
    """

    train: PairRows
    eval: PairRows | None
    max_length: int
    audit: PairAudit
    findings: Sequence[Finding]
    record: dict[str, Any]
    eval_sets: Mapping[str, PairRows] = field(default_factory=dict)

    @property
    def held_out(self) -> Mapping[str, PairRows]:
        """The held-out pairs by name; empty when nothing is held out."""
        return {**({} if self.eval is None else {"held-out set": self.eval}), **self.eval_sets}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with one answer, held-out pairs included."""
        audits = [self.record[side] for side in ("train", "eval") if self.record.get(side)]
        return max(int(audit["length_max"]) for audit in (*audits, *self.record.get("eval_datasets", {}).values()))

    @property
    def warnings(self) -> list[str]:
        """What the audit warns of."""
        return [finding.found for finding in self.findings if finding.severity == "warning"]

    @property
    def typical_length(self) -> int:
        """Tokens that attend to each other: the median pair's prompt and longer answer."""
        return self.audit.length_p50

    def iterate_examples(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Yield ids of the held-out prompts with their chosen answers, and True where it is the answer; each ``(T,)``.

        A prompt that several pairs share comes once, with the answer of the first.
        """
        seen: set[bytes] = set()
        for number in range(0 if self.eval is None else len(self.eval)):
            assert self.eval is not None
            pair = self.eval[number]
            prompt, chosen = pair["prompt_ids"], pair["chosen_ids"]
            if prompt.tobytes() not in seen:
                seen.add(prompt.tobytes())
                ids = np.concatenate([prompt, chosen]).astype(np.uint32)
                yield ids, np.arange(len(ids)) >= len(prompt)


def load_pair_data(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> PairData:
    """Find or make the prepared pairs of a run; call it before any process group exists.

    Args:
        config: The run.
        load_tokenizer: Called only when something has to be tokenised.
        local_rank: Number of this process on its node; the first one prepares, the others wait for it.

    Raises:
        ConfigError: The options do not fit together.
        DataError: Rows are broken, too long, or held out as well as trained on; no pair is left; or, on the other
            processes, that the first one gave up.
    """
    prepared = prepare_pairs(config, load_tokenizer, local_rank=local_rank)
    sets = {
        name: prepare_pairs(derived, load_tokenizer, local_rank=local_rank)
        for name, derived in derive_eval_configs(config, prepared.manifest["max_length"]).items()
    }
    told = {name: {"key": found.key, **found.manifest["train"]} for name, found in sets.items()}
    return PairData(
        train=prepared.train,
        eval=prepared.eval,
        max_length=prepared.manifest["max_length"],
        audit=PairAudit(**prepared.manifest["train"]),
        findings=[Finding(**finding) for finding in prepared.manifest["findings"]],
        record={"prepared_set": str(prepared.path), **prepared.manifest, **({"eval_datasets": told} if told else {})},
        eval_sets={name: found.train for name, found in sets.items()},
    )


def render_summary(prepared: PreparedSet) -> Table:
    """What is in a set of pairs, one column for each split."""
    manifest = prepared.manifest
    splits = [name for name in ("train", "eval") if name in manifest]
    audits = [PairAudit(**manifest[split]) for split in splits]
    table = Table("", *splits, title=f"pairs of up to {manifest['max_length']:,} tokens")
    for label, values in (
        ("pairs", [audit.num_pairs for audit in audits]),
        ("prompts", [audit.num_prompts for audit in audits]),
        ("tokens of the prompts", [audit.num_prompt_tokens for audit in audits]),
        ("tokens of the answers", [audit.num_chosen_tokens + audit.num_rejected_tokens for audit in audits]),
        ("longest pair", [audit.length_max for audit in audits]),
        ("left out, too long", [manifest["dropped"].get(split, {}).get("num_overlong", 0) for split in splits]),
    ):
        table.add_row(label, *(f"{value:,}" for value in values))
    for finding in manifest["findings"]:
        if finding["severity"] != "ok":
            table.add_section()
            table.add_row(finding["severity"], "; ".join(filter(None, (finding["found"], finding["remedy"]))))
    return table


class UnfinishedAnswers:
    """Prepared pairs, a share of which teach that an answer without its end is worth less than the same with it.

    All answers of a data set are whole, so that a reward model never reads a score anywhere but at an end token; and a
    policy that runs out of tokens is then paid by chance. In a pair that is drawn here the rejected answer is the
    chosen one without what ends it, in half of them without more than that, in the others cut at any token. Which
    pairs are drawn, and where they are cut, follows from ``seed`` and the number of the pair, in every epoch alike.
    """

    def __init__(self, pairs: PairRows, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> None:
        """Wrap pairs, which are read when they are asked for.

        Args:
            pairs: With ``chosen_ids`` and ``rejected_ids``; a ``margin`` of a pair that is drawn becomes 0.
            tokenizer: Of the model.
            share: Of the pairs, in ``[0, 1]``; answers of a single token stay as they are.
            seed: Of the run.
        """
        self._pairs, self._share, self._seed = pairs, share, seed
        self._end_tokens = find_end_tokens(tokenizer)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        pair: Mapping[str, Any] = self._pairs[index]
        random = np.random.default_rng([self._seed, index])
        unfinished = pair["chosen_ids"][: count_before_end(pair["chosen_ids"], self._end_tokens)]
        if random.random() >= self._share or not len(unfinished):
            return pair
        if random.random() < 0.5:
            unfinished = unfinished[: random.integers(1, len(unfinished), endpoint=True)]
        margin = {"margin": 0.0} if "margin" in pair else {}
        return {**pair, "rejected_ids": unfinished, **margin}
