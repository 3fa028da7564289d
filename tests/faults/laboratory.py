"""Harness of the fault suite: reference runs, runs with faults, and the properties that must hold between them."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from tests.faults import lives, recipe_runs
from tests.faults.lives import Fault, Outcome
from tests.rows import read_events

from recipes_lib.files import find_record
from recipes_lib.training.checkpoints.manifest import find_damage, list_checkpoints
from recipes_lib.training.run import RUN_FILE

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
LEFTOVERS = ("_saving", "_dry_run", "_deleted", "run.json.partial", "rollbacks.json.partial")


class Violation(Exception):
    """A run did not behave as documented."""


@dataclass
class Trial:
    """One injected fault and its result.

    Attributes:
        kind: Kind of the fault.
        name: Number within the kind; seeds the random choices together with the suite's seed.
        what: Recipe, event, and the other random choices.
        ended: Whether the run ended as documented.
        resumed: Whether the same command finished the run; ``None`` if there is nothing to resume.
        equal: Whether final weights and losses are bit-identical to the reference run's; ``None`` if not applicable.
        problem: Violated property.
    """

    kind: str
    name: str
    what: str = ""
    ended: bool = False
    resumed: bool | None = False
    equal: bool | None = False
    problem: str = ""


@dataclass
class Harness:
    """A folder with inputs, reference runs, and one folder per trial.

    Attributes:
        folder: Empty folder.
        recipes: Recipes that are drawn.
        counts: Number of events in runs without a fault, by name.
    """

    folder: Path
    recipes: Sequence[str] = tuple(recipe_runs.RECIPE_NAMES)
    counts: dict[str, int] = field(default_factory=dict)
    _references: dict[str, Path] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def prepare(self) -> None:
        """Write the inputs of all runs, in a forked process, because forking is unsafe with the threads that remain."""
        pid = os.fork()
        if not pid:
            code = 1
            try:
                recipe_runs.write_inputs(self.folder)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError("the inputs could not be written")

    def draw(self, random: Random, *recipes: str) -> str:
        """Draw one of the recipes, or of ``recipes`` if given."""
        return random.choice([recipe for recipe in self.recipes if recipe in (recipes or self.recipes)])

    @contextmanager
    def trial_folder(self) -> Iterator[Path]:
        """Yield a folder for one trial, which is kept after a violation; the output directory is ``run``."""
        folder = self.folder / f"trial-{next(self._numbers)}"
        folder.mkdir()
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    def run(
        self,
        folder: Path,
        recipe: str,
        *,
        faults: Mapping[int, Fault] | None = None,
        num_processes: int = 1,
        **more: Any,
    ) -> Outcome:
        """Run the command of a trial, for the first time or to resume."""
        keys = self.keys(folder, recipe, num_processes, **more)
        return lives.run_processes(recipe, keys, output=folder / "output", faults=faults, num_processes=num_processes)

    def keys(self, folder: Path, recipe: str, num_processes: int = 1, **more: Any) -> dict[str, Any]:
        """Return the flags of a trial's command."""
        return recipe_runs.make_keys(self.folder, recipe, num_processes, **({"output_dir": folder / "run"} | more))

    def reference(self, recipe: str, num_processes: int = 1, watch: Callable[[Path], None] = lambda run: None) -> Path:
        """Return the output directory of a run without a fault; it is cached, and ``watch`` is called at its start."""
        name = f"reference-{recipe}-{num_processes}"
        if name not in self._references:
            folder = self.folder / name
            faults = {0: partial(watch, folder / "run")}
            outcome = self.run(folder, recipe, faults=faults, num_processes=num_processes)
            expect(not any(outcome.codes), f"the run without a fault ended with {outcome.codes}", outcome)
            self._references[name] = folder / "run"
        return self._references[name]

    def resume(self, trial: Trial, folder: Path, recipe: str, reference: Path, **options: Any) -> Outcome:
        """Run the same command to its end, and compare the result with the reference run."""
        outcome = self.run(folder, recipe, **options)
        expect(not any(outcome.codes), f"the same command ended with {outcome.codes}", outcome)
        trial.resumed = True
        verify_whole(folder / "run")
        verify_equal(reference, folder / "run")
        trial.equal = True
        return outcome


def expect(holds: object, message: str, outcome: Outcome | None = None) -> None:
    """Raise ``Violation`` with the end of the run's output unless ``holds``."""
    if not holds:
        raise Violation(message + (f"\n{outcome.output[-2500:]}" if outcome else ""))


def read_status(folder: Path) -> str:
    """Return the status in ``run.json``."""
    return str(find_record(folder / "run" / RUN_FILE).get("status"))


def verify_whole(run: Path) -> None:
    """Verify that a finished run left no temporary files, and that its checkpoints are undamaged."""
    leftovers = [name for name in LEFTOVERS if (run / name).exists()]
    expect(not leftovers, f"leftovers: {leftovers}")
    for _, checkpoint in list_checkpoints(run):
        damage = find_damage(checkpoint)
        expect(damage is None, f"{checkpoint.name}: {damage}")


def load_weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run."""
    return {key: tensor for name in WEIGHTS if (run / name).exists() for key, tensor in load_file(run / name).items()}


def read_losses(run: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by step; later lines replace earlier ones."""
    return {event["step"]: (event["loss"], event["grad_norm"]) for event in read_events(run)}


def verify_equal(reference: Path, run: Path) -> None:
    """Verify that weights and losses are bit-identical."""
    expected, got = load_weights(reference), load_weights(run)
    expect(expected and expected.keys() == got.keys(), "the tensor names differ")
    # As integers: 0.0 equals -0.0, and NaN differs from itself.
    dtypes = {4: torch.int32, 2: torch.int16, 1: torch.int8}
    differing = [
        name
        for name, tensor in expected.items()
        if not torch.equal(*(each.view(dtypes[each.element_size()]) for each in (tensor, got[name])))
    ]
    expect(not differing, f"{len(differing)} tensors differ, {differing[:3]}")
    expect(read_losses(reference) == read_losses(run), "losses in metrics.jsonl differ")


def verify_close(reference: Path, run: Path) -> None:
    """Verify that losses are equal up to rounding: two processes sum in another order than one."""
    expected, got = read_losses(reference), read_losses(run)
    expect(expected.keys() == got.keys(), "the steps differ")
    differing = {step: (expected[step], got[step]) for step in expected if abs(expected[step][0] - got[step][0]) > 1e-4}
    expect(not differing, f"losses differ: {differing}")
