"""Near-duplicate removal compared with datatrove's MinHash, datasketch and rensa; the whole pipeline with datatrove's.

python benchmarks/corpus.py [--documents 3000] [--rounds 3] [--output build/bench/corpus.json]

Documents are the sources and documentation of this Python installation and its packages, without exact duplicates. Each
variant has one core. datasketch, rensa and datatrove's own steps (which need xxhash below 4) are measured if installed.
The reference is the Jaccard similarity of word 5-gram sets over all pairs: a removal is right if a kept document has a
similarity of 0.8 or more; a kept document with an earlier such document is left over. Memory is the peak of the
process, including texts and imports.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import build_parser, run_interleaved, spread, write_results
from loss_head import resident_gb

from recipes_lib.config.corpus_keys import CorpusConfig

THRESHOLD, BANDS, ROWS, NGRAM = 0.8, 14, 8, 5
_WORD = re.compile(r"\w+")


def main() -> None:
    """Run all variants, interleaved, or one of them in this process."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        texts = [json.loads(line)["text"] for line in options.data.open(encoding="utf-8")]
        print(json.dumps(measure(VARIANTS[options.variant], texts, options.data)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "documents.jsonl"
        texts = list(dict.fromkeys(collect_texts(options.documents)))
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        names = [name for name in VARIANTS if is_installed(name)]
        command = [sys.executable, __file__, "--data", str(data), "--variant"]
        results = run_interleaved({name: [*command, name] for name in names}, options.rounds)
    similar = find_similar(texts)
    size = sum(len(text.encode()) for text in texts) / 1e6
    table = [("variant", "documents/s", "MB/s", "peak MB", "removed", "rightly", "left over")]
    for name, measured in results.items():
        removed = measured[0].pop("removed")
        for other in measured[1:]:
            other.pop("removed")
        right, left = score_removals(removed, similar, len(texts)) if "pipeline" not in name else ("", "")
        for one in measured:
            one["documents_per_second"] = len(texts) / one["cpu_seconds"]
            one["megabytes_per_second"] = size / one["cpu_seconds"]
        speed, rate = spread(measured, "documents_per_second", 0), spread(measured, "megabytes_per_second", 1)
        table.append((name, speed, rate, spread(measured, "megabytes", 0), str(len(removed)), right, left))
    title = f"{len(texts):,} documents, {size:.1f} MB, one core; min / median / max of {options.rounds} rounds"
    write_results(options.output, title, table, results)


def is_installed(variant: str) -> bool:
    """Return whether this environment can run a variant."""
    if "datatrove" in variant:
        # datatrove hashes str without encoding it, which xxhash 4 rejects.
        return int(importlib.metadata.version("xxhash").partition(".")[0]) < 4
    return variant not in ("datasketch", "rensa") or importlib.util.find_spec(variant) is not None


def collect_texts(limit: int) -> Iterator[str]:
    """Yield up to ``limit`` texts of 500 to 100,000 bytes, sampled evenly over the installed files."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")), Path("/usr/share/doc")]
    paths = [
        path
        for root in roots
        for path in sorted(root.rglob("*"))
        if path.suffix in (".py", ".pyi", ".h", ".txt", ".md", "")
    ]
    for path in paths[:: max(1, len(paths) // (3 * limit))]:
        if limit and path.is_file() and 500 <= path.stat().st_size <= 100_000:
            try:
                yield path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            limit -= 1


def measure(variant: Callable[[Sequence[str], Path], list[int]], texts: Sequence[str], data: Path) -> dict[str, Any]:
    """Return CPU seconds, peak memory in MB, and the indices of removed documents."""
    variant(texts[:20], data)  # Warm-up: imports and tables.
    started = time.process_time()
    removed = variant(texts, data)
    seconds = time.process_time() - started
    # Not `ru_maxrss`, which starts at the peak of the parent process.
    return {"cpu_seconds": seconds, "megabytes": 1e6 / 1024 * resident_gb("VmHWM"), "removed": removed}


def _run_ours(texts: Sequence[str], data: Path, verify: bool = True) -> list[int]:
    from recipes_lib.corpus.duplicates import Hashes, HashFolder, HashTable, find_duplicates

    config = CorpusConfig(near_duplicates_threshold=THRESHOLD, near_duplicates_verify=verify, exact_duplicates="off")
    with tempfile.TemporaryDirectory() as folder:
        hashes = Hashes(config)
        for text in texts:
            hashes.add(text)
        hashes.write(Path(folder), 0)
        status = find_duplicates(HashTable([HashFolder(Path(folder), 1, "a")]), config).status
    return [int(at) for at in np.flatnonzero(status)]


def _run_datatrove(texts: Sequence[str], data: Path) -> list[int]:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from loguru import logger

    from recipes_lib.corpus.quality import RegexTokenizer

    logger.disable("datatrove")
    documents = [Document(text=text, id=str(at)) for at, text in enumerate(texts)]
    config = MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS)
    kept: list[int] = []

    def keep(stream: Any, rank: int, world_size: int) -> Iterator[Any]:
        for document in stream:
            kept.append(int(document.id))
            yield document

    with tempfile.TemporaryDirectory() as folder:
        signatures, buckets, removed, logs = (f"{folder}/{name}" for name in ("s", "b", "r", "l"))
        steps: list[tuple[list[Any], int]] = [
            ([documents, MinhashDedupSignature(signatures, config=config, language=RegexTokenizer())], 1),
            ([MinhashDedupBuckets(signatures, buckets, config=config)], BANDS),
            ([MinhashDedupCluster(buckets, removed, config=config)], 1),
            ([documents, MinhashDedupFilter(removed), keep], 1),
        ]
        for number, (pipeline, tasks) in enumerate(steps):
            executor = LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{logs}{number}")
            for rank in range(tasks):
                executor._run_for_rank(rank, 1)
    return sorted(set(range(len(texts))) - set(kept))


def _run_datasketch(texts: Sequence[str], data: Path) -> list[int]:
    library = importlib.import_module("datasketch")
    index, removed = library.MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS)), []
    for at, text in enumerate(texts):
        signature = library.MinHash(num_perm=BANDS * ROWS)
        signature.update_batch([ngram.encode() for ngram in list_ngrams(text)])
        if index.query(signature):
            removed.append(at)
        index.insert(at, signature)
    return removed


def _run_rensa(texts: Sequence[str], data: Path) -> list[int]:
    library = importlib.import_module("rensa")
    index, removed = library.RMinHashLSH(threshold=THRESHOLD, num_perm=BANDS * ROWS, num_bands=BANDS), []
    for at, text in enumerate(texts):
        signature = library.RMinHash(num_perm=BANDS * ROWS, seed=1)
        signature.update(list(list_ngrams(text)))
        if index.query(signature):
            removed.append(at)
        index.insert(at, signature)
    return removed


def list_ngrams(text: str) -> set[str]:
    """Return the word n-grams of a text, as in the examples of these libraries."""
    words = _WORD.findall(text.lower())
    return {" ".join(words[at : at + NGRAM]) for at in range(max(0, len(words) - NGRAM + 1))}


def _run_pipeline(texts: Sequence[str], data: Path) -> list[int]:
    from recipes_lib.corpus.cleaning import make_corpus

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        keys: dict[str, Any] = {"workers": 1, "language": "apply", "languages": ["en"], "pii_kinds": ["email", "ip"]}
        config = CorpusConfig(sources=[{"name": str(path), "kind": "web"}], output_dir=f"{folder}/out", **keys)
        try:
            make_corpus(config)
        except Exception as error:
            if "no document is left" not in str(error):  # Possible in the warm-up with 20 documents.
                raise
    return []


def _run_datatrove_pipeline(texts: Sequence[str], data: Path) -> list[int]:
    """Run datatrove's FineWeb example without the steps that need downloads, with our tokenizer and language model."""
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline import filters
    from datatrove.pipeline.formatters import FTFYFormatter, PIIFormatter
    from datatrove.pipeline.writers import ParquetWriter
    from loguru import logger

    from recipes_lib.corpus.quality import RegexTokenizer
    from recipes_lib.corpus.text_steps import Language

    logger.disable("datatrove")
    tokenizer, language = RegexTokenizer(), Language(["en"], 0.65, {}, None)
    with tempfile.TemporaryDirectory() as folder:
        pipeline = [
            [Document(text=text, id=str(at)) for at, text in enumerate(texts)],
            FTFYFormatter(),
            filters.LambdaFilter(lambda document: language.apply(document, Counter()) is None),
            filters.GopherRepetitionFilter(language=tokenizer),
            filters.GopherQualityFilter(language=tokenizer),
            filters.C4QualityFilter(filter_no_terminal_punct=False, language=tokenizer),
            filters.FineWebQualityFilter(language=tokenizer),
            PIIFormatter(),
            ParquetWriter(f"{folder}/kept"),
        ]
        LocalPipelineExecutor(pipeline, tasks=1, workers=1, logging_dir=f"{folder}/logs")._run_for_rank(0, 1)
        import pyarrow.parquet as pq

        files = list(Path(folder).rglob("kept/*.parquet"))
        kept = [row for file in files for row in pq.read_table(file, columns=["text"]).to_pylist()]
    _run_datatrove([row["text"] for row in kept], data)
    return []


def find_similar(texts: Sequence[str]) -> dict[int, set[int]]:
    """Map each document to the documents with a Jaccard similarity of at least ``THRESHOLD``, over all pairs."""
    csr_matrix = importlib.import_module("scipy.sparse").csr_matrix  # Imported here: only this benchmark needs it.
    numbers: dict[str, int] = {}
    sets = [{numbers.setdefault(ngram, len(numbers)) for ngram in list_ngrams(text)} for text in texts]
    columns = np.concatenate([np.fromiter(found, np.int64, len(found)) for found in sets])
    sizes = np.array([len(found) for found in sets])
    rows = np.repeat(np.arange(len(sets)), sizes)
    matrix = csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(len(sets), len(numbers)))
    shared = (matrix @ matrix.T).tocoo()
    jaccard = shared.data / (sizes[shared.row] + sizes[shared.col] - shared.data)
    similar: dict[int, set[int]] = {}
    for first, second in zip(shared.row[jaccard >= THRESHOLD], shared.col[jaccard >= THRESHOLD], strict=True):
        if first != second:
            similar.setdefault(int(first), set()).add(int(second))
    return similar


def score_removals(removed: Sequence[int], similar: dict[int, set[int]], num_documents: int) -> tuple[str, str]:
    """Return the share of right removals, and the number of left-over documents, as the module defines them."""
    kept = set(range(num_documents)) - set(removed)
    right = sum(bool(similar.get(at, set()) & kept) for at in removed)
    left = sum(any(other < at for other in similar.get(at, set()) & kept) for at in kept)
    return f"{right / len(removed):.1%}" if removed else "", str(left)


VARIANTS: dict[str, Callable[[Sequence[str], Path], list[int]]] = {
    "ours": _run_ours,
    "ours, unverified": lambda texts, data: _run_ours(texts, data, verify=False),
    "datatrove": _run_datatrove,
    "datasketch": _run_datasketch,
    "rensa": _run_rensa,
    "our pipeline": _run_pipeline,
    "datatrove pipeline": _run_datatrove_pipeline,
}

if __name__ == "__main__":
    main()
