"""Checks that every recipe shares; facts and problems are printed section by section."""

from __future__ import annotations

import importlib.util
import json
import shlex
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.config.paths import names_path
from recipes_lib.config.schema import DatasetFormat, RecipeConfig
from recipes_lib.config.settings import is_local
from recipes_lib.data.sources.canonical import load_source, read_entries
from recipes_lib.data.sources.mixtures import list_entries
from recipes_lib.data.sources.rows import Row, Source
from recipes_lib.errors import ConfigError, DataError, Problem, UserError
from recipes_lib.training.layouts.launch_environment import Launch

if TYPE_CHECKING:
    from recipes_lib.corpus.decontamination import Index

SHARES_OF_A_RUN: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
Say = Callable[[str], None]


# Imports of a section are in it, so that the first sections are printed before torch and transformers are imported.
class Inspection(ABC):
    """Facts about a run, collected section by section; a section whose inputs are missing prints nothing."""

    corpus_kind: str | None = None
    """Kind of the data for `recipes clean`, ``text`` or ``chat``; ``None``: not supported."""
    flattens = False
    """Whether batches of one document a row are laid out as packed ones, where the kernel takes those."""
    num_learners = 1
    """Models, or adapters, in a checkpoint, each with its optimizer states."""

    def __init__(self, config: RecipeConfig, launch: Launch, console: Console, launch_file: Path | None = None) -> None:
        """Check ``config`` for a run with ``launch``, started by ``launch_file``."""
        self.config = config
        self.launch_file = launch_file
        self.launch = launch
        self.console = console
        self.problems: list[Problem] = []
        self.tokenizer: Any = None
        self.model_config: Any = None
        self.vocabulary: Any = None  # Of a run with a teacher: how its tokens are mapped to the student's.
        self._data: Any = None  # What ``look_at_data`` has prepared; ``None`` where it could not.
        self.num_parameters = 0
        self.num_steps = 0
        self.launched_precision = "no"

    def look_at_everything(self) -> None:
        """Print every section."""
        for name, look, needed in (
            ("configuration", self.look_at_keys, ()),
            ("launch", self.look_at_launch, ()),
            ("tokenizer and model", self.look_at_model, ()),
            ("data", self.look_at_data, ()),
            ("corpus", self.look_at_corpus, ()),
            ("model and data together", self.look_at_agreement, ("tokenizer", "model_config")),
            ("precision and attention", self.look_at_kernels, ("model_config",)),
            ("optimizer and trackers", self.look_at_packages, ()),
            ("benchmarks", self.look_at_tasks, ("tokenizer", "model_config")),
            ("steps and learning rate", self.look_at_steps, ("_data",)),
            ("disk", self.look_at_disk, ("model_config",)),
            ("Hub", self.look_at_hub, ()),
        ):
            if all(getattr(self, attribute) is not None for attribute in needed):
                with self.section(name) as say:
                    look(say)

    @contextmanager
    def section(self, name: str) -> Iterator[Say]:
        """Print a section: its facts, and the problems that it raises."""
        facts: list[str] = []
        found: Sequence[Problem] = ()
        try:
            yield facts.append
        except UserError as error:
            found = error.problems
        # Printed in the end, because the mark before the facts tells how the section has ended.
        if not facts and not found:
            return
        self.problems += found
        mark = ("✗ ", "bold red") if found else ("✓ ", "green")
        self.console.print(Text.assemble(mark, (name, "bold")))
        for line in facts:
            self.console.print(Text(f"    {line}"), soft_wrap=True)
        for problem in found:
            self.console.print(Text("    " + str(problem).replace("\n", "\n    "), style="red"), soft_wrap=True)

    def look_at_keys(self, say: Say) -> None:
        """Number of keys given."""
        given = sum(
            place != "default" and not place.startswith("derived: ") for place in self.config.provenance.values()
        )
        say(f"{self.config.path or 'flags'}: {given} keys given, {len(self.config.provenance)} in effect")

    def look_at_launch(self, say: Say) -> None:
        """Whether recipe and launch file are compatible."""
        from recipes_lib.training.layouts.compatibility import verify_combination

        launch, stages = self.launch, self.launch.layout.pipeline_stages
        verify_combination(self.config, launch, str(self.launch_file or "the launch"))
        self.launched_precision = launch.precision
        if self.launch_file is None and stages == 1:
            return
        shares = f"each with 1/{stages} of the layers" if stages > 1 else "each with the whole model"
        shares = f"sharded by {launch.engine}" if launch.engine else shares
        by = f"{self.launch_file}: " if self.launch_file else ""
        say(f"{by}{launch.world_size:,} processes, {shares}, mixed_precision {launch.precision}")

    def look_at_model(self, say: Say) -> None:
        """The tokenizer and the architecture."""
        from recipes_lib.models.architecture import find_model_config
        from recipes_lib.models.loading import load_tokenizer
        from recipes_lib.training.layouts.memory_layout import verify_model

        self.tokenizer = load_tokenizer(self.config.model, self.config.tokens)
        max_length = self.config.tokens.max_length
        self.model_config, _ = find_model_config(self.config.model, self.tokenizer, max_length)
        verify_model(self.model_config, self.launch)
        self.num_parameters = int(_build_on_meta(self.model_config).num_parameters())
        say(
            f"{self.model_config.model_type}, {self.num_parameters / 1e6:,.1f} M parameters, "
            f"{len(self.tokenizer):,} tokens in the vocabulary"
        )

    @abstractmethod
    def look_at_data(self, say: Say) -> None:
        """Training and held-out data."""

    def look_at_corpus(self, say: Say) -> None:
        """Duplicates, personal data, languages and boilerplate of a sample, in recipes that train on texts."""
        if self.corpus_kind is not None:
            say_corpus(self.config, self.corpus_kind, say)

    def read_ends(self) -> tuple[int | None, Sequence[int]]:
        """Return the tokens of the longest row, and those that end answers; as configured where data were not read."""
        if self._data is None:
            return self.config.tokens.max_length, ()
        return self._data.longest, self._data.audit.terminators

    def look_at_agreement(self, say: Say) -> None:
        """Whether model, tokenizer and data agree: vocabulary, special tokens, length, and what answers end with.

        Raises:
            ConfigError: They do not.
        """
        from recipes_lib.models.loading import describe_spare_tokens
        from recipes_lib.training.trainers.trained_model import load_verified_config

        longest, terminators = self.read_ends()
        load_verified_config(self.config, self.tokenizer, longest, self.vocabulary)
        ends = ", ".join(repr(self.tokenizer.convert_ids_to_tokens(end)) for end in terminators)
        spare = describe_spare_tokens(self.model_config, self.tokenizer)
        say(f"vocabulary, special tokens and length agree; answers end with {ends or 'the end of text'}{spare}")

    @abstractmethod
    def look_at_steps(self, say: Say) -> None:
        """How many steps there are and at which rates; sets ``num_steps``."""

    @property
    @abstractmethod
    def keeps_documents_apart(self) -> bool:
        """Whether documents that share a row must not see each other."""

    def look_at_kernels(self, say: Say) -> None:
        """The device, the precision and the attention kernel that this machine would choose."""
        import torch

        from recipes_lib.models.attention.kernels import choose_kernel
        from recipes_lib.training.trainers.arguments import resolve_precision

        precision = resolve_precision(self.config, self.launched_precision)
        compute_dtype = torch.bfloat16 if precision["bf16"] else torch.float16 if precision["fp16"] else torch.float32
        device = torch.device("cpu") if precision["use_cpu"] else torch.accelerator.current_accelerator()
        assert device is not None  # `use_cpu` is set where there is no accelerator.
        products = str(compute_dtype).removeprefix("torch.")
        say(f"here: {device.type}, {self.config.model.dtype} weights, {products} products")
        attention = choose_kernel(
            self.model_config,
            self.config.model.attn_implementation,
            device=device,
            compute_dtype=compute_dtype,
            packing=self.keeps_documents_apart,
            flattens=self.flattens,
        )
        say(f"attention: {attention.implementation}, documents laid out in {attention.layout}")

    def look_at_tasks(self, say: Say) -> None:
        """The tasks of ``eval_tasks``, and one question of each."""
        from recipes_lib.models.heads.scoring import read_positions
        from recipes_lib.training.evaluation.task_scores import load_training_tasks

        if keys := self.config.evaluation.eval_tasks and self.config.evaluation:
            for name, task in load_training_tasks(keys, read_positions(self.model_config))[1]["tasks"].items():
                say(f"{name}: {min(len(task.eval_docs), keys.eval_tasks_limit):,} of {len(task.eval_docs):,} questions")

    def say_audit(self, say: Say, what: str) -> None:
        """Print example lengths, and the findings of the data audit."""
        audit = self._data.audit
        say(
            f"{what}: 5 % up to {audit.length_p5:,}, half up to {audit.length_p50:,}, "
            f"95 % up to {audit.length_p95:,}, longest {audit.length_max:,}"
        )
        for finding in self._data.findings:
            say(("" if finding.severity == "ok" else f"{finding.severity}: ") + finding.found)

    def say_schedule(self, say: Say, num_rows: int | None) -> int:
        """Print the steps of upstream's trainer over ``num_rows`` rows (a stream: ``None``), and learning rates.

        Returns:
            Rows of a step over all processes.
        """
        from recipes_lib.planning.schedule import compute_steps

        plan = compute_steps(num_rows, self.config.training, self.launch.data_size)
        self.num_steps = plan.num_steps
        say(f"{plan.num_steps:,} steps, {plan.num_epochs:.2f} epochs, {plan.num_warmup_steps:,} steps of warm-up")
        self.say_rates(say, plan.num_warmup_steps)
        return plan.rows_per_step

    def say_rates(self, say: Say, num_warmup_steps: int) -> None:
        """Print the learning rates of upstream's schedule over ``num_steps``."""
        from recipes_lib.planning.schedule import compute_learning_rates

        steps = [round(share * (self.num_steps - 1)) for share in SHARES_OF_A_RUN]
        peak = self.config.read("learning_rate")
        rates = compute_learning_rates(peak, self.config.training, self.num_steps, num_warmup_steps, steps)
        shown = "decided while training" if rates is None else ", ".join(f"{rate:.2e}" for rate in rates)
        say(f"learning rate at 0, 25, 50, 75, 100 %: {shown}")

    def look_at_packages(self, say: Say) -> None:
        """Parameter groups, and optional packages, which may be there where it will run: none is refused here."""
        from recipes_lib.training.monitoring.callbacks import verify_trackers
        from recipes_lib.training.optim.optimizers import format_group, plan_groups, verify_optimizer

        if self.model_config is not None and not self.config.adapter.use_peft:
            for row in plan_groups(_build_on_meta(self.model_config), self.config):
                say(format_group(row))

        for verify in (verify_optimizer, verify_trackers):
            try:
                verify(self.config)
            except ConfigError as error:
                for problem in error.problems:
                    say(f"warning: {problem.where}: {problem.found}; {problem.remedy}")

    def look_at_disk(self, say: Say) -> None:
        """Whether the checkpoints fit."""
        from recipes_lib.planning.disk import compute_disk, verify_disk

        if not self.num_steps:
            return
        num_trained, weight_bytes = self.count_trained()
        keep_every = self.config.checkpoints.save_keep_steps
        plan = compute_disk(
            num_trained,
            weight_bytes,
            self.num_steps,
            self.config.training,
            keep_every=keep_every,
            num_learners=self.num_learners,
        )
        say(
            f"{plan.num_checkpoints} checkpoints of {plan.checkpoint_bytes / 1e9:.2f} GB and the model: "
            f"{plan.total_bytes / 1e9:.2f} GB of {plan.free_bytes / 1e9:.1f} GB free"
        )
        verify_disk(plan, self.config.training["output_dir"])

    def count_trained(self) -> tuple[int, int]:
        """Return the number of trained parameters (of an adapter only its own), and bytes per parameter."""
        import torch

        from recipes_lib.models.adapters.lora import add_adapter

        if self.config.adapter.use_peft:
            # How the factors begin changes none of their shapes, and may need the weights, which are not there.
            adapter = replace(self.config.adapter, init_lora_weights="default")
            with torch.device("meta"), warnings.catch_warnings():
                # Of a saved adapter, that its values are not kept.
                warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
                adapted = add_adapter(_build_on_meta(self.model_config), adapter, seed=0)
            trained = (parameter for parameter in adapted.parameters() if parameter.requires_grad)
            return sum(parameter.numel() for parameter in trained), 4
        named = self.config.model.dtype
        dtype = (self.model_config.dtype or torch.float32) if named == "auto" else getattr(torch, named)
        return self.num_parameters, dtype.itemsize

    def look_at_hub(self, say: Say) -> None:
        """Whether the model could be pushed."""
        if not self.config.training.get("push_to_hub"):
            return
        from recipes_lib.publish.access import find_target

        say(str(find_target(self.config.training)))


def _build_on_meta(model_config: Any) -> Any:
    """Build a model on the meta device, as it would be loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    from recipes_lib.models.structure import freeze_outside_text

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)  # type: ignore[no-untyped-call]
    freeze_outside_text(model)
    return model


_HUB_KEYS: Final = ("config", "revision", "split", "columns")


def say_corpus(config: RecipeConfig, kind: str, say: Callable[[str], None]) -> None:
    """Print what cleaning would find in each source of a run; unreadable sources are skipped.

    Args:
        config: The run.
        kind: Kind of source that ``recipes clean`` is to be told: ``text`` or ``chat``.
        say: Gets a line.
    """
    if importlib.util.find_spec("datatrove") is None:
        say("not looked at: pip install 'recipes-lib[corpus]'")
        return
    from recipes_lib.corpus.inputs import SpreadSource
    from recipes_lib.corpus.text_audit import audit_texts

    # The configurations of `recipes eval` that lie beside that of the run.
    evaluations = [] if config.path is None else sorted(map(str, config.path.parent.glob("eval*.yaml")))
    protected = _index_protected(config, evaluations, say)
    for entry in list_entries(config.data):
        # A stream is read to the end of the sample, and no further.
        keys = {name: entry[name] for name in _HUB_KEYS if entry.get(name)}
        try:
            source = load_source(
                entry["name"],
                **keys,
                streaming=config.data.dataset_streaming,
                text_documents=config.pretraining.text_documents,
            )
            texts = _iterate_texts(SpreadSource(source), entry.get("format") or config.data.dataset_format)
            audit = audit_texts(texts, protected)
        except DataError:
            continue  # The section above has said so.
        for fact in audit.facts:
            say(f"{entry['name']}: {fact}")
        for warning in audit.warnings:
            say(f"warning: {entry['name']}: {warning}")
        if audit.warnings:
            told = {"name": entry["name"], "kind": kind, **keys}
            command = ["recipes", "clean", "--sources", json.dumps([told], ensure_ascii=False)]
            command += ["--output_dir", f"{entry['name'].rstrip('/')}-clean"]
            command += ["--benchmarks_of", json.dumps(evaluations, ensure_ascii=False)] if evaluations else []
            say(f"    {shlex.join(command)}")


def _index_protected(config: RecipeConfig, evaluations: list[str], say: Callable[[str], None]) -> Index:
    """The items of the held-out file and of the evaluations' tasks whose data are local files."""
    from recipes_lib.corpus.decontamination import Index, read_items

    index, held_out = Index(CorpusConfig().decontamination_ngram), config.data.dataset_test_split
    benchmarks: list[Mapping[str, Any]] = []
    for path in evaluations if importlib.util.find_spec("lm_eval") else ():
        from recipes_lib.config.evaluation import read_evaluated_tasks
        from recipes_lib.evaluation.suites import list_datasets

        try:
            evaluated = read_evaluated_tasks(path)
            # lm-eval's own tasks have their data on the Hub, and take long to list.
            benchmarks += list_datasets(evaluated) if evaluated.include_path else []
        except ConfigError as error:
            say(f"{path}: not looked at: {error.problems[0].found}")
    try:
        for benchmark in benchmarks:
            for text in read_items(benchmark) if is_local(benchmark["name"]) else ():
                index.add(benchmark["label"], text)
        if held_out is not None and names_path(held_out):
            for text in _iterate_texts(load_source(held_out), config.data.dataset_format):
                index.add(held_out, text)
    except DataError as error:
        say(f"benchmarks: not looked at: {error.problems[0].found}")
    return index


def _iterate_texts(source: Source, declared: DatasetFormat) -> Iterator[str]:
    for row in read_entries(source, declared):
        if not isinstance(row, Row):
            yield ""  # Counted with those that are empty.
            continue
        if row.messages is not None:
            texts = [message.get("content") for message in row.messages]
        else:
            texts = [row.text, row.prompt, row.completion]
        yield "\n".join(text for text in texts if isinstance(text, str))
