"""Checks that all recipes share; facts and problems are printed section by section."""

from __future__ import annotations

import importlib.util
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.config.paths import is_local, names_path
from recipes_lib.config.schema import DatasetFormat, ModelConfig, RecipeConfig
from recipes_lib.data.sources.canonical import detect_source_format, load_source, read_entries
from recipes_lib.data.sources.mixtures import list_entries, load_train_data
from recipes_lib.data.sources.rows import Entry, Row
from recipes_lib.errors import ConfigError, Problem, UserError, reported_at
from recipes_lib.quantities import format_bytes, pluralize
from recipes_lib.training.layouts.launch_environment import Launch

if TYPE_CHECKING:
    from recipes_lib.corpus.decontamination import Index

Report = Callable[[str], None]
"""Function that adds a line to a section."""


@contextmanager
def warned(report: Report, *, is_fatal: bool = False) -> Iterator[None]:
    """Report the problems of a ``ConfigError`` of the block as warnings, unless it ``is_fatal``."""
    try:
        yield
    except ConfigError as error:
        if is_fatal:
            raise
        for problem in error.problems:
            report(f"warning: {problem.where}: {problem.found}; {problem.remedy}")


# Sections import what they need themselves, so that the first ones are printed before torch and transformers, which are
# slow to import.
class Inspection(ABC):
    """Checks of a run, section by section; a section whose inputs are missing is skipped."""

    corpus_kind: str | None = None
    """Kind of the data for ``recipes clean``, ``text`` or ``chat``; ``None`` if cleaning is not supported."""
    flattens = False
    """Whether batches without packing are concatenated to one row if the attention kernel supports it."""
    balances_experts = False
    """``RecipeTrainer.balances_experts`` of the recipe."""
    num_learners = 1
    """Number of models, or adapters, in a checkpoint, each with its optimizer states."""

    def __init__(self, config: RecipeConfig, launch: Launch, console: Console, launch_file: Path | None = None) -> None:
        """Initialise without checking anything.

        Args:
            config: Configuration of the run.
            launch: Processes and layout of the run.
            console: Console to print to.
            launch_file: Launch file of ``launch``, for messages; ``None`` without one.
        """
        self.config = config
        self.launch_file = launch_file
        self.launch = launch
        self.console = console
        self.problems: list[Problem] = []
        self.tokenizer: Any = None
        self.model_config: Any = None
        self.vocabulary: Any = None  # Map from the student's to the teacher's token ids, in distillation.
        self._data: Any = None  # Prepared by `check_data`; None if that failed.
        self.num_parameters = 0
        self.num_trained: Any = None  # Trained parameters; None if the adapter cannot be built.
        self.num_steps = 0
        self.num_epochs: float | None = None

    def run(self) -> None:
        """Run all checks, and print them; problems are collected in ``problems``."""
        for name, check, needed in (
            ("configuration", self.check_keys, ()),
            ("launch", self.check_launch, ()),
            ("tokenizer and model", self.check_model, ()),
            ("data", self.check_data, ()),
            ("corpus", self.check_corpus, ()),
            ("adapter", self.check_adapter, ("model_config",)),
            ("model and data together", self.check_agreement, ("tokenizer", "model_config")),
            ("precision and attention", self.check_kernels, ("model_config",)),
            ("optimizer and trackers", self.check_packages, ()),
            ("benchmarks", self.check_tasks, ("tokenizer", "model_config")),
            ("steps and learning rate", self.check_steps, ("_data",)),
            ("disk", self.check_disk, ("num_trained",)),
            ("Hub", self.check_hub, ()),
        ):
            if all(getattr(self, attribute) is not None for attribute in needed):
                self.run_section(name, check)

    def run_section(self, name: str, check: Callable[[Report], None]) -> None:
        """Print the facts that a check reports, and the problems that it raises."""
        facts: list[str] = []
        found: Sequence[Problem] = ()
        try:
            check(facts.append)
        except UserError as error:
            found = error.problems
        # Printed at the end, because the mark before the facts depends on whether problems were raised.
        if not facts and not found:
            return
        self.problems += found
        mark = ("✗ ", "bold red") if found else ("✓ ", "green")
        self.console.print(Text.assemble(mark, (name, "bold")))
        for line in facts:
            self.console.print(Text(f"    {line}"), soft_wrap=True)
        for problem in found:
            self.console.print(Text("    " + str(problem).replace("\n", "\n    "), style="red"), soft_wrap=True)

    def check_keys(self, report: Report) -> None:
        """Report the number of configured keys."""
        places = self.config.provenance.values()
        given = sum(place != "default" and not place.startswith("derived: ") for place in places)
        report(f"{self.config.path or 'flags'}: {given} keys given, {len(places)} in effect")

    def check_launch(self, report: Report) -> None:
        """Verify that recipe and launch are compatible, and report processes, layout and precision."""
        from recipes_lib.training.layouts.compatibility import verify_combination

        launch, stages = self.launch, self.launch.layout.pipeline_stages
        verify_combination(self.config, launch, str(self.launch_file or "the launch"))
        if self.launch_file is None and stages == 1:
            return
        shares = f"each with 1/{stages} of the layers" if stages > 1 else "each with the whole model"
        shares = f"sharded by {launch.engine}" if launch.engine else shares
        by = f"{self.launch_file}: " if self.launch_file else ""
        report(f"{by}{pluralize(launch.world_size, 'process')}, {shares}, mixed_precision {launch.precision}")

    def check_model(self, report: Report) -> None:
        """Load the tokenizer and the model's configuration, and report architecture and size."""
        from recipes_lib.models.activation_checkpointing import enable_checkpointing
        from recipes_lib.models.adapters.lora import find_bare_layers
        from recipes_lib.models.architecture import find_model_config
        from recipes_lib.models.loading import describe_ids_beyond, load_tokenizer, verify_folder
        from recipes_lib.models.quantization import find_unquantized
        from recipes_lib.models.structure import find_dropped_modules, find_shared_rope
        from recipes_lib.planning.compute import build_on_meta
        from recipes_lib.training.layouts.memory_layout import verify_model

        if name := self.config.model.model_name_or_path:
            verify_folder(name)
        self.tokenizer = load_tokenizer(self.config.model, self.config.tokens)
        max_length = self.config.tokens.max_length
        model_config, generation_config = find_model_config(self.config.model, self.tokenizer, max_length)
        model = build_on_meta(model_config)
        self.model_config = model_config  # Later checks of one that cannot be built would report it again.
        verify_model(self.model_config, self.launch)
        if self.config.read("activation_checkpointing") is True:
            enable_checkpointing(model, self.config.read("activation_checkpointing_kwargs"))
        self.num_parameters = int(model.num_parameters())
        report(
            f"{self.model_config.model_type}, {self.num_parameters / 1e6:,.1f} M parameters, "
            f"{len(self.tokenizer):,} tokens in the vocabulary"
        )
        experts = find_unquantized(model) if self.config.quantization.is_quantized else None
        bare = find_bare_layers(model, self.config.adapter) if self.config.adapter.use_peft else None
        text_config = model_config.get_text_config()
        beyond = describe_ids_beyond(text_config.vocab_size, text_config, generation_config)
        shared = find_shared_rope(text_config, max_length)
        for caution in filter(None, (find_dropped_modules(model, model_config), experts, bare, beyond, shared)):
            report(f"warning: {caution}")
        needs_head = False if self.config.recipe == "reward" else None
        self.check_weights(report, "model_name_or_path", self.config.model, needs_head=needs_head)

    def check_weights(self, report: Report, key: str, model: ModelConfig, *, needs_head: bool | None = None) -> None:
        """Verify names and shapes of the tensors of a local model.

        Args:
            report: Receives a warning if files are damaged: no error, the machine of the run may have others.
            key: Key that names the model.
            model: The model.
            needs_head: Whether a reward model needs its head in the checkpoint; ``None`` for a causal language model.

        Raises:
            ConfigError: As ``verify_checkpoint``.
        """
        from recipes_lib.models.heads.score_head import verify_reward_checkpoint
        from recipes_lib.models.model_files import find_damage
        from recipes_lib.models.saved_weights import verify_checkpoint

        if damage := find_damage(Path(str(model.model_name_or_path))):
            report(f"warning: {model.model_name_or_path}: {damage}")
            return
        with reported_at(self.config.locate(key)):
            if needs_head is None:
                verify_checkpoint(model)
            else:
                verify_reward_checkpoint(model, needs_head=needs_head)

    @abstractmethod
    def check_data(self, report: Report) -> None:
        """Prepare the training and held-out data, and report their figures; sets ``_data``."""

    def check_corpus(self, report: Report) -> None:
        """Report duplicates, personal data, languages and boilerplate in a sample, in recipes that support cleaning."""
        if self.corpus_kind is not None:
            end = self.tokenizer.eos_token if self.tokenizer is not None and self.corpus_kind == "text" else None
            report_corpus(self.config, self.corpus_kind, report, end)

    def check_adapter(self, report: Report) -> None:
        """Add the adapter to the model, without weights, and report the parameters that it trains."""
        import torch

        from recipes_lib.models.adapters.lora import add_adapter
        from recipes_lib.planning.compute import build_on_meta

        model = build_on_meta(self.model_config)
        if self.config.adapter.use_peft:
            with torch.device("meta"):
                model = add_adapter(model, self.config.adapter, seed=0)
        # A frozen vision tower is saved with the model, and has no optimizer states.
        self.num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if self.config.adapter.use_peft:
            report(f"{self.num_trained:,} trained parameters")

    def read_ends(self) -> tuple[int | None, Sequence[int]]:
        """Return the length of the longest row in tokens, and the ids of tokens that end answers.

        If the data could not be prepared: the configured ``max_length``, and no ids.
        """
        if self._data is None:
            return self.config.tokens.max_length, ()
        return self._data.longest, self._data.audit.terminators

    def check_agreement(self, report: Report) -> None:
        """Verify that model, tokenizer and data agree in vocabulary, special tokens, and length; find EWC's reference.

        Raises:
            ConfigError: They do not agree, or there is no Fisher information.
        """
        from recipes_lib.models.loading import describe_spare_tokens
        from recipes_lib.training.forgetting.weight_penalty import find_reference
        from recipes_lib.training.trainers.trained_model import load_verified_config

        longest, terminators = self.read_ends()
        load_verified_config(self.config, self.tokenizer, longest, self.vocabulary)
        if self.config.forgetting.ewc_lambda:
            find_reference(self.config)
        ends = ", ".join(repr(self.tokenizer.convert_ids_to_tokens(end)) for end in terminators)
        spare = describe_spare_tokens(self.model_config, self.tokenizer)
        answers = "" if self._data is None else f"; answers end with {ends or 'the end of text'}"
        report(f"vocabulary, special tokens and length agree{answers}{spare}")

    @abstractmethod
    def check_steps(self, report: Report) -> None:
        """Report the number of steps and the learning rates; sets ``num_steps``."""

    @property
    @abstractmethod
    def keeps_documents_apart(self) -> bool:
        """Whether the attention kernel has to isolate documents within a row."""

    def check_kernels(self, report: Report) -> None:
        """Report the device, the precision and the attention kernel that a run on this machine would use."""
        import torch

        from recipes_lib.models.attention.kernels import ABSENT, FLASH_IS_INSTALLED, choose_kernel, find_refusals
        from recipes_lib.planning.devices import choose_compute_dtype
        from recipes_lib.training.optim.compilation import choose_compilation, verify_compiler
        from recipes_lib.training.trainers.arguments import resolve_precision

        compilation = choose_compilation(self.config, self.launch, is_cuda=False)
        # A machine without a GPU is probably not that of the run.
        with warned(report, is_fatal=torch.accelerator.is_available()):
            verify_compiler(compilation, self.launch)
        precision = resolve_precision(self.config, self.launch.precision)
        # Under fp8, the products without 8-bit operands are in bf16.
        resolved = {"bf16": precision["bf16"] or self.launch.precision == "fp8", "fp16": precision["fp16"]}
        compute_dtype = choose_compute_dtype(self.config.with_training(resolved))
        device = torch.device("cpu") if precision["use_cpu"] else torch.accelerator.current_accelerator()
        assert device is not None  # Without an accelerator, `use_cpu` is set.
        products = str(compute_dtype).removeprefix("torch.")
        report(f"here: {device.type}, {self.config.model.dtype} weights, {products} products")
        requested = self.config.model.attn_implementation
        if requested and requested in FLASH_IS_INSTALLED and device.type == "cpu" and not self.config.read("use_cpu"):
            gpu, gpu_dtype = torch.device("cuda"), choose_compute_dtype(self.config)
            refusal = find_refusals(self.model_config.get_text_config(), gpu, gpu_dtype)[requested]
            if refusal is None or refusal.startswith(ABSENT):
                report(f"warning: attn_implementation: {requested} is for GPUs, and this machine has none")
                requested = None
            else:
                # The reason of the model or the precision not to support it, rather than this machine's.
                device, compute_dtype = gpu, gpu_dtype
        attention = choose_kernel(
            self.model_config,
            requested,
            device=device,
            compute_dtype=compute_dtype,
            packing=self.keeps_documents_apart,
            flattens=self.flattens,
        )
        report(f"attention: {attention.implementation}, documents laid out in {attention.layout}")

    def check_tasks(self, report: Report) -> None:
        """Verify metrics, callbacks and ``sample_prompts``, and report the number of questions of ``eval_tasks``."""
        from recipes_lib.models.heads.scoring import read_positions
        from recipes_lib.training.evaluation.samples import build_prompts
        from recipes_lib.training.evaluation.task_scores import load_training_tasks
        from recipes_lib.training.evaluation.user_metrics import load_callbacks, load_metrics

        keys, positions = self.config.evaluation, read_positions(self.model_config)
        load_metrics(keys.metrics or [])
        load_callbacks(keys.callbacks or [])
        build_prompts(keys, (), self.tokenizer, positions, report, self.config.chat.system_prompt)
        if keys.eval_tasks:
            for name, task in load_training_tasks(keys, positions)[1]["tasks"].items():
                num_questions = len(task.eval_docs)
                report(f"{name}: {min(num_questions, keys.eval_tasks_limit):,} of {num_questions:,} questions")

    def report_layouts(self, report: Report, config: RecipeConfig) -> None:
        """Report the layout of each training source, with the columns that are read and ignored."""
        for part in load_train_data(config.data, seed=0).parts:
            report(f"{part.source.name}: {detect_source_format(part.source, part.format)}")

    def report_audit(self, report: Report, what: str) -> None:
        """Report the percentiles of lengths, and the findings of the data audit.

        Args:
            report: Receives the lines.
            what: Description of the lengths.
        """
        audit = self._data.audit
        report(
            f"{what}: 5 % up to {audit.length_p5:,}, half up to {audit.length_p50:,}, "
            f"95 % up to {audit.length_p95:,}, longest {audit.length_max:,}"
        )
        for finding in self._data.findings:
            report(("" if finding.severity == "ok" else f"{finding.severity}: ") + str(finding))

    def report_schedule(self, report: Report, num_rows: int | None) -> int:
        """Report the number of steps that the Trainer will count, and the learning rates.

        Args:
            report: Receives the lines.
            num_rows: Number of training rows; ``None`` for a stream.

        Returns:
            Number of rows per step over all processes.
        """
        from recipes_lib.planning.schedule import compute_steps

        plan = compute_steps(num_rows, self.config.training, self.launch.data_size)
        self.num_steps, self.num_epochs = plan.num_steps, plan.num_epochs or None
        steps, warmup = (pluralize(number, "step") for number in (plan.num_steps, plan.num_warmup_steps))
        report(f"{steps}, {plan.num_epochs:.2f} epochs, {warmup} of warm-up")
        self.report_rates(report, plan.num_warmup_steps)
        return plan.rows_per_step

    def report_rates(self, report: Report, num_warmup_steps: int, num_idle_steps: int = 0) -> None:
        """Report the learning rates of the Trainer's scheduler over ``num_steps`` without the idle ones before them."""
        from recipes_lib.planning.schedule import compute_learning_rates, list_quarters

        num_steps = self.num_steps - num_idle_steps
        steps, peak = list_quarters(num_steps), self.config.read("learning_rate")
        rates = compute_learning_rates(peak, self.config.training, num_steps, num_warmup_steps, steps)
        shown = "decided while training" if rates is None else ", ".join(f"{rate:.2e}" for rate in rates)
        idle = f" of the steps after the first {num_idle_steps:,}" if num_idle_steps else ""
        report(f"learning rate at 0, 25, 50, 75, 100 %{idle}: {shown}")

    def check_packages(self, report: Report) -> None:
        """Verify the options of the optimizer, report the parameter groups, and warn of missing optional packages.

        Missing packages are not errors, because the machine of the run may have them.
        """
        from recipes_lib.planning.compute import build_on_meta, find_dtype
        from recipes_lib.training.monitoring.callbacks import verify_trackers
        from recipes_lib.training.optim.optimizers import plan_groups, verify_optimizer, warn_of_rounding
        from recipes_lib.training.trainers.recipe_trainer import configure_router_loss

        verify_optimizer(self.config, is_installed=True)
        if self.model_config is not None:
            model = build_on_meta(self.model_config)
            coefficient = self.config.training.get("router_aux_loss_coef")
            configure_router_loss(model, coefficient, self.launch, by_default=self.balances_experts)
            if not self.config.adapter.use_peft:
                for row in plan_groups(model, self.config):
                    report(f"{row}: {', '.join(row.parameters)}")
                dtypes = [find_dtype(self.model_config, self.config.model.dtype)]
                optim, arguments = str(self.config.read("optim")), self.config.read("optim_args")
                for warning in warn_of_rounding(dtypes, optim, arguments):
                    report(warning)
        for verify in (verify_optimizer, verify_trackers):
            with warned(report):
                verify(self.config)

    def check_disk(self, report: Report) -> None:
        """Verify that the checkpoints fit on the disk, and report their size."""
        from recipes_lib.planning.disk import plan_disk, verify_disk
        from recipes_lib.training.checkpoints.manifest import is_complete, list_checkpoints, read_complete

        if not self.num_steps:
            return
        keep_every = self.config.checkpoints.save_keep_steps
        plan = plan_disk(
            *self.count_saved(), self.num_steps, self.config.training, keep_every=keep_every, num_epochs=self.num_epochs
        )
        # Checkpoints of a run that will be resumed are among the planned ones.
        paths = [path for _, path in list_checkpoints(Path(self.config.training["output_dir"])) if is_complete(path)]
        sizes = (file["size"] for record in map(read_complete, paths) if record for file in record["files"].values())
        plan = plan._replace(free_bytes=plan.free_bytes + sum(sizes))
        report(
            f"{pluralize(plan.num_checkpoints, 'checkpoint')} of {format_bytes(plan.checkpoint_bytes)} and the model: "
            f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.free_bytes)} free"
        )
        verify_disk(plan, self.config.training["output_dir"])

    def count_saved(self) -> tuple[int, int]:
        """Return the bytes of a checkpoint and of the final model: of the whole model, or of an adapter alone."""
        from recipes_lib.planning.compute import find_dtype
        from recipes_lib.planning.disk import count_state_bytes

        num_saved, width = self.num_parameters, find_dtype(self.model_config, self.config.model.dtype).itemsize
        if self.config.adapter.use_peft:
            num_saved, width = self.num_trained, 4
        states = round(self.num_trained * count_state_bytes(self.config.training, width))
        return self.num_learners * (num_saved * width + states), num_saved * width

    def check_hub(self, report: Report) -> None:
        """Verify that the model can be pushed, if ``push_to_hub`` is set."""
        if not self.config.training.get("push_to_hub"):
            return
        from recipes_lib.publish.access import find_target

        report(str(find_target(self.config.training)))


_SOURCE_KEYS: Final = ("config", "revision", "split", "columns")
"""Keys of a mixture's entry that ``recipes clean`` has for its sources too."""


def report_corpus(config: RecipeConfig, kind: str, report: Report, end: str | None = None) -> None:
    """Report what cleaning would find in each source of a run; unreadable sources are skipped.

    Args:
        config: Configuration of the run.
        kind: Kind of the sources for ``recipes clean``, ``text`` or ``chat``.
        report: Receives the lines.
        end: Token that training adds to each document; ``None`` for chats.
    """
    if importlib.util.find_spec("datatrove") is None:
        report("not looked at: pip install 'recipes-lib[corpus]'")
        return
    from recipes_lib.corpus.inputs import interleave_rows
    from recipes_lib.corpus.text_audit import audit_texts

    # Configurations of `recipes eval` in the folder of the run's configuration.
    evaluations = [] if config.path is None else sorted(map(str, config.path.parent.glob("eval*.yaml")))
    protected = _index_protected(config, evaluations, report)
    options: dict[str, Any] = {"text_documents": config.pretraining.text_documents}
    for entry in list_entries(config.data):
        known = {"columns": config.data.dataset_columns, **entry}
        keys = {name: known[name] for name in _SOURCE_KEYS if known.get(name)}
        try:
            # A stream is read only to the end of the sample.
            source = load_source(entry["name"], **keys, **options, streaming=config.data.dataset_streaming)
            declared = entry.get("format") or config.data.dataset_format
            audit = audit_texts(_iterate_texts(interleave_rows(source), source.name, declared), protected, end)
        except UserError:
            continue  # The section `data` has reported the problem.
        for fact in audit.facts:
            report(f"{entry['name']}: {fact}")
        for warning in audit.warnings:
            report(f"warning: {entry['name']}: {warning}")
        if audit.warnings:
            cleaned = {"name": entry["name"], "kind": kind, **keys}
            command = ["recipes", "clean", "--sources", json.dumps([cleaned], ensure_ascii=False)]
            command += ["--output_dir", f"{entry['name'].rstrip('/')}-clean"]
            command += ["--benchmarks_of", json.dumps(evaluations, ensure_ascii=False)] if evaluations else []
            report(f"    {shlex.join(command)}")


def _index_protected(config: RecipeConfig, evaluations: list[str], report: Callable[[str], None]) -> Index:
    """Return an index of texts that training data must not contain: the held-out file, and local benchmarks."""
    from recipes_lib.corpus.decontamination import Index, read_items

    index, held_out = Index(CorpusConfig().decontamination_ngram), config.data.dataset_test_split
    benchmarks: list[Mapping[str, Any]] = []
    for path in evaluations if importlib.util.find_spec("lm_eval") else ():
        from recipes_lib.config.evaluation import read_evaluated_tasks
        from recipes_lib.evaluation.suites import list_datasets

        try:
            evaluated = read_evaluated_tasks(path)
            # Without `include_path`, all tasks are lm-eval's own: their data are on the Hub, and listing them is slow.
            benchmarks += list_datasets(evaluated) if evaluated.include_path else []
        except ConfigError as error:
            report(f"{path}: not looked at: {error.problems[0].found}")
    try:
        for benchmark in benchmarks:
            for text in read_items(benchmark) if is_local(benchmark["name"]) else ():
                index.add(benchmark["label"], text)
        if held_out is not None and names_path(held_out):
            columns, documents = config.data.dataset_columns, config.pretraining.text_documents
            source = load_source(held_out, columns=columns, text_documents=documents)
            for text in _iterate_texts(source.rows(), source.name, config.data.dataset_format):
                index.add(held_out, text)
    except UserError as error:
        report(f"benchmarks: not looked at: {error.problems[0].found}")
    return index


def _iterate_texts(entries: Iterable[Entry], name: str, declared: DatasetFormat) -> Iterator[str]:
    for row in read_entries(entries, name, declared, as_documents=True):
        if not isinstance(row, Row):
            yield ""  # Broken rows are counted as empty texts.
            continue
        contents = [message.get("content") for message in row.messages or ()]
        texts = [*contents, row.text, row.prompt, row.completion]
        yield "\n".join(text for text in texts if isinstance(text, str))
