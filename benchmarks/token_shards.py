"""Tokenizing a corpus into shards, compared with the tokenizer alone and with ``datasets.map`` as in run_clm.py.

python benchmarks/token_shards.py [--data FILE] [--megabytes 24] [--rounds 5] [--output build/token_shards.json]

The corpus is the source code of the Python standard library, one document per file, and grade-school maths problems.
"""

from __future__ import annotations

import itertools
import json
import resource
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import build_parser, compare, run_script, spread, write_results
from workload import add_workload, build_workload

MAX_LENGTH = 1024
Figures = dict[str, float]


class Stopwatch:
    """Wall-clock and CPU seconds since its construction; CPU seconds include finished child processes."""

    def __init__(self) -> None:
        self._clock = time.perf_counter()
        self._processors = self._count_processors()

    def stop(self, num_tokens: int) -> Figures:
        """Return the figures of a measurement."""
        seconds = time.perf_counter() - self._clock
        cpu_seconds = self._count_processors() - self._processors
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": num_tokens, "speed": num_tokens / seconds}

    def _count_processors(self) -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(used.ru_utime + used.ru_stime for used in usage)


def build_corpus(data: Path, megabytes: int, folder: Path) -> Path:
    """Write ``documents-<megabytes>.jsonl`` into ``folder``, once: source code up to that size, and all problems."""
    path = folder / f"documents-{megabytes}.jsonl"
    if not path.exists():
        texts = itertools.chain(_take(_iterate_sources(), megabytes * 10**6), _iterate_problems(data))
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def _iterate_sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield text


def _iterate_problems(data: Path) -> Iterator[str]:
    for line in data.open(encoding="utf-8"):
        row = json.loads(line)
        yield f"{row['question']}\n{row['answer']}"


def _take(texts: Iterator[str], num_characters: int) -> Iterator[str]:
    for text in texts:
        num_characters -= len(text)
        if num_characters < 0:
            return
        yield text


def measure_bare(corpus: Path, *, with_offsets: bool) -> Figures:
    """Measure one call of the tokenizer on all documents, without reading or writing its result."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus.parent / "model")
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    backend = tokenizer.backend_tokenizer
    encode = backend.encode_batch if with_offsets else backend.encode_batch_fast
    watch = Stopwatch()
    encodings = encode(texts, add_special_tokens=False)
    return watch.stop(sum(map(len, encodings)))


def measure_ours(corpus: Path) -> Figures:
    """Measure ``prepare_tokens`` from the file into an empty folder."""
    from recipes_lib.config.loader import load_config
    from recipes_lib.data.chat.encoder import RowEncoder  # noqa: F401 (imports are not timed in any variant)
    from recipes_lib.data.tokens.token_data import prepare_tokens
    from recipes_lib.models.loading import load_tokenizer

    with tempfile.TemporaryDirectory() as prepared_dir:
        keys = {
            "model_name_or_path": corpus.parent / "model",
            "dataset_name": corpus,
            "output_dir": prepared_dir,
            "max_length": MAX_LENGTH,
            "prepared_dir": prepared_dir,
        }
        config = load_config("pretrain", [f"--{name}={value}" for name, value in keys.items()])
        tokenizer = load_tokenizer(config.model, config.tokens)
        watch = Stopwatch()
        tokens = prepare_tokens(config, lambda: tokenizer)
        return watch.stop(tokens.train[0].num_tokens)


def measure_map(corpus: Path, num_proc: int | None) -> Figures:
    """Measure tokenizing and grouping as in transformers' ``examples/pytorch/language-modeling/run_clm.py``."""
    import datasets
    from transformers import AutoTokenizer

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"])

    def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(itertools.chain(*examples[name])) for name in examples}
        total = len(joined["input_ids"]) // MAX_LENGTH * MAX_LENGTH
        rows = {
            name: [values[start : start + MAX_LENGTH] for start in range(0, total, MAX_LENGTH)]
            for name, values in joined.items()
        }
        rows["labels"] = rows["input_ids"].copy()
        return rows

    with tempfile.TemporaryDirectory() as cache:
        datasets.disable_progress_bars()
        tokenizer = AutoTokenizer.from_pretrained(corpus.parent / "model")
        watch = Stopwatch()
        rows = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=cache)
        rows = rows.map(tokenize, batched=True, num_proc=num_proc, remove_columns=["text"])
        rows = rows.map(group_texts, batched=True, num_proc=num_proc)
        return watch.stop(len(rows) * MAX_LENGTH)


VARIANTS: dict[str, Callable[[Path], Figures]] = {
    "ours": measure_ours,
    "bare encode_batch": lambda corpus: measure_bare(corpus, with_offsets=True),
    "bare encode_batch_fast": lambda corpus: measure_bare(corpus, with_offsets=False),
    "datasets.map": lambda corpus: measure_map(corpus, None),
    "datasets.map, num_proc 2": lambda corpus: measure_map(corpus, 2),
}


def main() -> None:
    """Measure each variant in its own process, imports excluded; figures are min / median / max."""
    parser = build_parser(__doc__, rounds=5)
    add_workload(parser)
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--measure", choices=VARIANTS)
    options = parser.parse_args()
    build_workload(options.data, options.workload)
    corpus = build_corpus(options.data, options.megabytes, options.workload)
    if options.measure:
        figures = VARIANTS[options.measure](corpus)
        figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(figures))
        return
    results = run_script(VARIANTS, options.rounds, megabytes=options.megabytes, workload=options.workload)
    table = [["variant", "tokens/s", "seconds: this / ours", "CPU seconds: this / ours", "peak MiB"]]
    for name, measured in results.items():
        ratios = [compare(results, figure, "ours", name) for figure in ("seconds", "cpu_seconds")]
        table.append([name, spread(measured, "speed", 0), *ratios, spread(measured, "peak_mib", 0)])
    write_results(options.output, "Token shards", table, results)


if __name__ == "__main__":
    main()
