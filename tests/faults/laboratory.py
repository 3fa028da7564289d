"""Where faults are tried: runs that nothing happened to, runs that something does, and what must hold between them."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from tests.faults import lives, recipe_runs
from tests.faults.lives import Fault, Life
from tests.rows import read_events

from recipes_lib.training.checkpoints.manifest import find_damage, list_checkpoints
from recipes_lib.training.run import read_run_record

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
LEFTOVERS = ("_saving", "_dry_run", "_deleted", "run.json.partial", "rollbacks.json.partial")


class Violation(Exception):
    """Something did not end as it is documented."""


@dataclass
class Trial:
    """One fault, and what became of it.

    Attributes:
        kind: Of the fault.
        name: Number within the kind; with the seed it says which moment is drawn.
        what: Recipe, moment, and whatever else was drawn.
        ended: Whether it ended as documented.
        resumed: Whether the same command then went on to the end; ``None`` where there is nothing to go on with.
        equal: Whether all final weights and losses are, bit by bit, those of the run that nothing happened to; ``None``
            where they cannot be.
        problem: What did not hold.
    """

    kind: str
    name: str
    what: str = ""
    ended: bool = False
    resumed: bool | None = False
    equal: bool | None = False
    problem: str = ""


@dataclass
class Laboratory:
    """A folder with inputs, runs that nothing happens to, and one folder for each trial.

    Attributes:
        folder: Empty at first.
        recipes: Of which runs are drawn.
        counts: What has been counted in runs without a fault, by name.
    """

    folder: Path
    recipes: Sequence[str] = tuple(recipe_runs.RECIPE_NAMES)
    counts: dict[str, int] = field(default_factory=dict)
    _straight: dict[str, Path] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def prepare(self) -> None:
        """Write what all runs read; in a process of its own, since the threads it leaves could not be forked."""
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
        """Draw one of the runs, if need be only of some."""
        return random.choice([recipe for recipe in self.recipes if recipe in (recipes or self.recipes)])

    @contextmanager
    def bench(self) -> Iterator[Path]:
        """A folder for one trial: its output goes to ``run`` in it. It stays if something did not hold."""
        folder = self.folder / f"trial-{next(self._numbers)}"
        folder.mkdir()
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    def live(
        self,
        folder: Path,
        recipe: str,
        *,
        faults: Mapping[int, Fault] | None = None,
        num_processes: int = 1,
        **more: Any,
    ) -> Life:
        """Start the run of a trial, or start it again."""
        keys = self.keys(folder, recipe, num_processes, **more)
        return lives.live(recipe, keys, told=folder / "told", faults=faults, num_processes=num_processes)

    def keys(self, folder: Path, recipe: str, num_processes: int = 1, **more: Any) -> dict[str, Any]:
        """Return the flags of the run of a trial."""
        return recipe_runs.make_keys(self.folder, recipe, num_processes, **({"output_dir": folder / "run"} | more))

    def straight(self, recipe: str, num_processes: int = 1, **more: Any) -> Path:
        """Return the output of a run that nothing happened to; it is made once."""
        name = "-".join(["straight", recipe, str(num_processes), *(f"{key}={value}" for key, value in more.items())])
        if name not in self._straight:
            folder = self.folder / name
            life = self.live(folder, recipe, num_processes=num_processes, **more)
            expect(not any(life.codes), f"the run without a fault ended with {life.codes}", life)
            self._straight[name] = folder / "run"
        return self._straight[name]

    def go_on(self, trial: Trial, folder: Path, recipe: str, straight: Path, **options: Any) -> Life:
        """Run the same command to its end, and hold what comes out against the run that nothing happened to."""
        life = self.live(folder, recipe, **options)
        expect(not any(life.codes), f"the same command ended with {life.codes}", life)
        trial.resumed = True
        verify_whole(folder / "run")
        verify_equal(straight, folder / "run")
        trial.equal = True
        return life


def expect(holds: object, words: str, life: Life | None = None) -> None:
    """Raise ``Violation`` unless something holds, with the last words of the run."""
    if not holds:
        raise Violation(words + (f"\n{life.told[-2500:]}" if life else ""))


def read_status(folder: Path) -> str:
    """Return the status in ``run.json``."""
    return str(read_run_record(folder / "run").get("status"))


def verify_whole(run: Path) -> None:
    """A run that is done leaves no half-written thing, and checkpoints every byte of which is right."""
    left = [name for name in LEFTOVERS if (run / name).exists()]
    expect(not left, f"left behind: {left}")
    for _, checkpoint in list_checkpoints(run):
        damage = find_damage(checkpoint)
        expect(damage is None, f"{checkpoint.name}: {damage}")


def load_weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run."""
    return {key: tensor for name in WEIGHTS if (run / name).exists() for key, tensor in load_file(run / name).items()}


def read_losses(run: Path) -> dict[int, tuple[float, float]]:
    """Return loss and norm of the gradient by step; a later line replaces an earlier one."""
    return {event["step"]: (event["loss"], event["grad_norm"]) for event in read_events(run)}


def verify_equal(straight: Path, run: Path) -> None:
    """Weights and losses are the same to the last bit."""
    expected, got = load_weights(straight), load_weights(run)
    expect(expected and expected.keys() == got.keys(), "there are other tensors")
    # As whole numbers: two zeros of different signs are equal, and one NaN is not even itself.
    words = {4: torch.int32, 2: torch.int16, 1: torch.int8}
    differing = [
        name
        for name, tensor in expected.items()
        if not torch.equal(*(each.view(words[each.element_size()]) for each in (tensor, got[name])))
    ]
    expect(not differing, f"{len(differing)} tensors differ, {differing[:3]}")
    expect(read_losses(straight) == read_losses(run), "losses in metrics.jsonl differ")


def verify_close(straight: Path, run: Path) -> None:
    """The losses are the same but for their last digits: two processes add in another order than one."""
    expected, got = read_losses(straight), read_losses(run)
    expect(expected.keys() == got.keys(), "there are other steps")
    far = {step: (expected[step], got[step]) for step in expected if abs(expected[step][0] - got[step][0]) > 1e-4}
    expect(not far, f"losses differ: {far}")
