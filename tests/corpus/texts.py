"""Generated texts with known words, languages and similarities."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datatrove.data import Document

WORDS = [
    f"{start}{middle}{end}" for start in "bdfgklmnprst" for middle in "aeiou" for end in ("", "n", "r", "st", "lo")
]

ENGLISH = (
    "The library opens at nine in the morning and closes late in the evening. Readers who forget to bring their cards "
    "have to ask at the desk. It was a quiet place until the school next door was built, and then the children came. "
    "They read about whales, castles and the weather. Nobody minded that they were loud, because they were so happy. "
    "In the winter the heating breaks down with some regularity, and the staff wear their coats at work."
)
GERMAN = (
    "Die Bibliothek öffnet um neun Uhr morgens und schließt spät am Abend. Wer seine Karte vergisst, muss am Schalter "
    "fragen. Es war ein ruhiger Ort, bis nebenan die Schule gebaut wurde und die Kinder kamen. Sie lesen über Wale, "
    "Burgen und das Wetter. Niemand störte sich daran, dass sie laut waren, denn sie waren so glücklich dabei."
)


def make_text(random_: random.Random, num_words: int) -> str:
    """Return ``num_words`` generated words."""
    words = [random_.choice(WORDS) + random_.choice(WORDS) for _ in range(num_words)]
    return " ".join(words)


def apply(step: Any, text: str, **metadata: Any) -> tuple[str | None, Document, Counter[str]]:
    """Apply a step to a document; return the removal reason, the document and the counts."""
    document, found = Document(text=text, id="1", metadata=metadata), Counter[str]()
    return step.apply(document, found), document, found


def write_rows(path: Path, texts: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def vary(random_: random.Random, text: str, num_changed: int) -> str:
    """Replace ``num_changed`` words by words that occur in no other text."""
    words = text.split()
    for at in random_.sample(range(len(words)), num_changed):
        words[at] = f"zz{random_.randrange(10**9)}"
    return " ".join(words)


@functools.lru_cache(maxsize=1024)
def word_ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    """Return the n-grams as tuples: the reference for hashed n-grams."""
    words = text.split()
    return {tuple(words[at : at + size]) for at in range(len(words) - size + 1)}


def jaccard(first: str, second: str, size: int = 5) -> float:
    ours, theirs = word_ngrams(first, size), word_ngrams(second, size)
    return len(ours & theirs) / len(ours | theirs) if ours | theirs else 0.0


def keep_first(texts: Sequence[str], threshold: float, size: int = 5) -> list[int]:
    """Brute-force reference: compare each text with every earlier kept one."""
    kept: list[int] = []
    for at, text in enumerate(texts):
        if not any(jaccard(texts[earlier], text, size) >= threshold for earlier in kept):
            kept.append(at)
    return kept


def read_corpus(output_dir: Path) -> list[dict[str, Any]]:
    """Read every document of a corpus, in order."""
    import pyarrow.parquet as pq

    manifest = json.loads((output_dir / "corpus.json").read_text())
    rows: list[dict[str, Any]] = []
    for shard in manifest["shards"]:
        path = output_dir / shard["path"]
        if path.suffix == ".jsonl":
            rows += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        else:
            rows += pq.read_table(path).to_pylist()
    return rows
