"""``recipes check``: every problem of a run at once, on a laptop, found by the very functions that training calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from recipes_lib.config.loader import parse_command
from recipes_lib.config.migrate import migrate
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import EXIT_DONE, EXIT_USER, ConfigError, Problem, UserError

if TYPE_CHECKING:
    from recipes_lib.data.training_data import TrainingData

_SHARES_OF_A_RUN = (0.0, 0.25, 0.5, 0.75, 1.0)
Say = Callable[[str], None]


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when nothing was found and 2 otherwise.

    Raises:
        ConfigError: The configuration does not load, so that nothing else can be looked at.
    """
    parser = argparse.ArgumentParser(prog="recipes check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stage", default="sft", help="recipe to check for (default: sft)")
    parser.add_argument("--num_processes", type=int, default=1, help="processes that the run will have (default: 1)")
    parser.add_argument("--migrate", type=Path, metavar="OLD", help="print OLD rewritten to a file that loads")
    parser.add_argument("--config", metavar="F", help="the recipe; further --key value flags override it")
    options, overrides = parser.parse_known_args(argv)
    if options.migrate:
        return _print_migration(options.migrate, options.stage)
    config = parse_command(options.stage, [*(["--config", options.config] if options.config else []), *overrides])
    if isinstance(config, str):
        sys.stdout.write(f"{config}\n")
        return EXIT_DONE
    return EXIT_USER if check(config, options.num_processes, Console(highlight=False)) else EXIT_DONE


def check(config: RecipeConfig, num_processes: int, console: Console) -> list[Problem]:
    """Look at a run from end to end and return everything that would stop it; facts and problems are printed.

    Args:
        config: The run; it has loaded, so its keys are right.
        num_processes: Data-parallel processes that it will have.
        console: Where the findings go.
    """
    inspection = _Inspection(config, num_processes, console)
    for name, look in (
        ("configuration", inspection.look_at_keys),
        ("tokenizer and model", inspection.look_at_model),
        ("data", inspection.look_at_data),
        ("model and data together", inspection.look_at_agreement),
        ("precision and attention", inspection.look_at_kernels),
        ("steps and learning rate", inspection.look_at_steps),
        ("disk", inspection.look_at_disk),
        ("Hub", inspection.look_at_hub),
    ):
        with inspection.section(name) as say:
            look(say)
    count = len(inspection.problems)
    console.print(f"\n{count} problem{'s' * (count != 1)}" if count else "\nready to train")
    return inspection.problems


class _Inspection:
    """What is known of a run so far; a section whose ground is missing has nothing to say."""

    def __init__(self, config: RecipeConfig, num_processes: int, console: Console) -> None:
        self.config = config
        self.num_processes = num_processes
        self.console = console
        self.problems: list[Problem] = []
        self._tokenizer: Any = None
        self._model_config: Any = None
        self._generation_config: Any = None
        self._num_parameters = 0
        self._data: TrainingData | None = None
        self._num_steps = 0

    @contextmanager
    def section(self, name: str) -> Iterator[Say]:
        """Print a section: its facts, and as its problems what it raised."""
        facts: list[str] = []
        found: Sequence[Problem] = ()
        try:
            yield facts.append
        except UserError as error:
            found = error.problems
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
        given = sum(place not in ("default",) and "derived" not in place for place in self.config.provenance.values())
        say(f"{self.config.path or 'flags'}: {given} keys given, {len(self.config.provenance)} in effect")

    def look_at_model(self, say: Say) -> None:
        from recipes_lib.models.loading import load_model_config, load_tokenizer

        self._tokenizer = load_tokenizer(self.config.model, self.config.tokens)
        self._model_config, self._generation_config = load_model_config(self.config.model)
        self._num_parameters = _count_parameters(self._model_config)
        say(
            f"{self._model_config.model_type}, {self._num_parameters / 1e6:,.1f} M parameters, "
            f"{len(self._tokenizer):,} tokens in the vocabulary"
        )

    def look_at_data(self, say: Say) -> None:
        from recipes_lib.data.encoding import build_encoder
        from recipes_lib.data.source_mixtures import load_train_data
        from recipes_lib.data.sources import detect_source_format
        from recipes_lib.data.training_data import load_training_data

        for part in load_train_data(self.config.data, seed=0).parts:
            say(f"{part.source.name}: {detect_source_format(part.source, part.format)}")
        if self._tokenizer is None:
            return
        self._data = load_training_data(self.config, lambda _: self._tokenizer)
        audit = self._data.audit
        say(
            f"{audit.num_rows:,} rows in {audit.num_packs:,} packs of {self._data.max_length:,} tokens, "
            f"{audit.packing_efficiency(self._data.max_length):.0%} filled"
        )
        say(
            f"tokens a row: 5 % up to {audit.length_p5:,}, half up to {audit.length_p50:,}, "
            f"95 % up to {audit.length_p95:,}, longest {audit.length_max:,}"
        )
        for finding in self._data.findings:
            say(("" if finding.severity == "ok" else f"{finding.severity}: ") + finding.found)
        for caution in build_encoder(self.config, self._tokenizer).cautions:
            say(f"warning: {caution}")

    def look_at_agreement(self, say: Say) -> None:
        from recipes_lib.models.loading import check_agreement

        if self._tokenizer is None or self._model_config is None:
            return
        max_length = self._data.max_length if self._data else self.config.tokens.max_length
        problems = check_agreement(self._model_config, self._generation_config, self._tokenizer, max_length=max_length)
        if problems:
            raise ConfigError(*problems)
        ends = (
            ", ".join(repr(self._tokenizer.convert_ids_to_tokens(end)) for end in self._data.audit.terminators)
            if self._data
            else ""
        )
        say(f"vocabulary, special tokens and length agree; answers end with {ends or 'the end of text'}")

    def look_at_kernels(self, say: Say) -> None:
        import torch

        from recipes_lib.models.attention import choose_kernel
        from recipes_lib.training.arguments import resolve_precision

        if self._model_config is None:
            return
        precision = resolve_precision(self.config)
        compute_dtype = torch.bfloat16 if precision["bf16"] else torch.float16 if precision["fp16"] else torch.float32
        device = torch.device("cpu") if precision["use_cpu"] else torch.accelerator.current_accelerator()
        assert device is not None
        products = str(compute_dtype).removeprefix("torch.")
        say(f"here: {device.type}, {self.config.model.dtype} weights, {products} products")
        attention = choose_kernel(
            self._model_config,
            self.config.model.attn_implementation,
            device=device,
            compute_dtype=compute_dtype,
            packing=self.config.tokens.packing,
        )
        say(f"attention: {attention.implementation}, documents laid out in {attention.layout}")

    def look_at_steps(self, say: Say) -> None:
        from recipes_lib.planning.schedule import compute_learning_rates
        from recipes_lib.planning.steps import compute_steps

        if self._data is None:
            return
        training = self.config.training
        plan = compute_steps(self._data.num_packs, training, self.num_processes)
        self._num_steps = plan.num_steps
        targets = plan.rows_per_step * self._data.audit.num_target_tokens / self._data.audit.num_packs
        say(f"{plan.num_steps:,} steps, {plan.num_epochs:.2f} epochs, {plan.num_warmup_steps:,} steps of warm-up")
        say(f"a step: {plan.rows_per_step} rows of up to {self._data.max_length:,} tokens, {targets:,.0f} targets")
        steps = [round(share * (plan.num_steps - 1)) for share in _SHARES_OF_A_RUN]
        rates = compute_learning_rates(training, plan.num_steps, plan.num_warmup_steps, steps)
        shown = "decided while training" if rates is None else ", ".join(f"{rate:.2e}" for rate in rates)
        say(f"learning rate at 0, 25, 50, 75, 100 %: {shown}")

    def look_at_disk(self, say: Say) -> None:
        from recipes_lib.planning.disk import compute_disk, verify_disk

        if self._model_config is None or not self._num_steps:
            return
        weight_bytes = 4 if self.config.model.dtype in ("float32", "auto") else 2
        plan = compute_disk(self._num_parameters, weight_bytes, self._num_steps, self.config.training)
        say(
            f"{plan.num_checkpoints} checkpoints of {plan.checkpoint_bytes / 1e9:.2f} GB and the model: "
            f"{plan.total_bytes / 1e9:.2f} GB of {plan.free_bytes / 1e9:.1f} GB free"
        )
        verify_disk(plan, self.config.training["output_dir"])

    def look_at_hub(self, say: Say) -> None:
        if not self.config.training.get("push_to_hub"):
            return
        from recipes_lib.publish.access import verify_write_access

        say(verify_write_access(self.config.training))


def _count_parameters(model_config: Any) -> int:
    """Count a model's parameters without giving them memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)  # type: ignore[no-untyped-call]
    return int(model.num_parameters())


def _print_migration(path: Path, stage: str) -> int:
    """Print the rewritten file on standard output and what changed on standard error."""
    migration = migrate(path, stage)
    sys.stdout.write(migration.text)
    for change in migration.changes:
        place = f"{path}:{change.line}" if change.line else str(path)
        sys.stderr.write(f"{'you decide' if change.by_hand else 'changed'}  {place}: {change.what}\n")
    return EXIT_DONE
