"""Fault injection into real runs: each trial injects one fault, resumes the run and compares it with a reference run.

python -m tests.faults.suite --tier quick                       one trial of some kinds, as in `make test`
python -m tests.faults.suite --tier full --seed 7               all trials, with random choices from the seed
python -m tests.faults.suite --kind "kill -9 in saving" --number 3 --seed 7    one trial
python -m tests.faults.suite --minutes 60                       random trials until the first violation
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
IN_NAMESPACE = "--in-namespace"


def enter_namespace(arguments: Sequence[str]) -> bool:
    """Enter a user and mount namespace, in which a small disk can be mounted; return whether that is possible."""
    if IN_NAMESPACE in arguments:
        return True
    if "quick" in arguments:  # Mounts no disk, and is run in a forked process, which cannot enter a namespace.
        return False
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        can_mount = not subprocess.run([*command, "true"], check=False, capture_output=True).returncode
    except OSError:
        can_mount = False
    if can_mount:
        os.execvp(command[0], [*command, sys.executable, "-m", "tests.faults.suite", *arguments, IN_NAMESPACE])
    return False


if __name__ == "__main__":
    # Before threads exist: a process with threads cannot change its namespace.
    CAN_MOUNT = enter_namespace(sys.argv[1:])

from tests.faults import answers, broken, kills, lives, recipe_runs  # noqa: E402
from tests.faults.laboratory import Harness, Trial, Violation  # noqa: E402
from tests.forked import shorten_measurements, spare_flushes  # noqa: E402

from recipes_lib.report import page  # noqa: E402

Fault = Callable[[Harness, Trial, Random], None]

FULL: dict[str, tuple[Fault, int, int]] = {
    # Kind of fault -> its function, number of trials in the full tier, and in the quick tier.
    "kill -9 in training": (kills.kill_in_training, 20, 0),
    "kill -9 in saving": (kills.kill_in_saving, 20, 0),
    "kill -9 in a write": (kills.kill_in_write, 10, 1),
    "kill -9 in a rollback": (kills.kill_in_rollback, 10, 0),
    "SIGTERM to one of two ranks": (kills.stop_one_of_two_ranks, len(kills.CELLS), 0),
    "kill -9 of one of two ranks": (kills.kill_one_of_two_ranks, 4, 0),
    "other world size": (kills.change_world_size, 6, 0),
    "damaged checkpoint file": (broken.damage_checkpoint, 48, 1),
    "full disk": (broken.fill_disk, 10, 0),
    "NaN in the loss": (partial(broken.inject_nan, "loss"), 3, 1),
    "NaN in a gradient": (partial(broken.inject_nan, "gradient"), 3, 0),
    "NaN in the data": (partial(broken.inject_nan, "data"), 3, 0),
    "spike with rollback": (kills.roll_back, 3, 0),
    "same command twice at once": (broken.start_twice, 3, 1),
    "kill -9 in a phase of PPO": (answers.kill_in_phase, len(answers.CELLS), 1),
    "kill -9 in PPO's saving": (partial(kills.kill_at, kills.count_saving_events, only=answers.RUNS), 10, 0),
    "NaN in PPO's rewards": (partial(answers.inject_nan, "reward"), 2, 0),
    "NaN in PPO's values": (partial(answers.inject_nan, "value"), 2, 0),
    "NaN in PPO's policy": (partial(answers.inject_nan, "policy's gradient"), 2, 0),
    "NaN in PPO's critic": (partial(answers.inject_nan, "critic's gradient"), 2, 0),
}


def list_trials(kinds: Sequence[str], tier: str, number: int | None) -> Iterator[tuple[str, int]]:
    """Yield kind and number of every trial of a tier, or of trial ``number`` only."""
    for kind in kinds:
        _, full, quick = FULL[kind]
        yield from (
            (kind, each) for each in ([number] if number is not None else range(full if tier == "full" else quick))
        )


def draw_trials(kinds: Sequence[str], seed: int) -> Iterator[tuple[str, int]]:
    """Yield random kinds, weighted by their number in the full tier, with increasing numbers."""
    random, number = Random(seed), 0
    while True:
        yield random.choices(kinds, [FULL[kind][1] for kind in kinds])[0], number
        number += 1


def run_trial(harness: Harness, kind: str, number: int, seed: int) -> Trial:
    """Run one trial and return its result."""
    trial = Trial(kind, str(number))
    try:
        FULL[kind][0](harness, trial, Random(f"{seed}/{kind}/{number}"))
    except Violation as violation:
        trial.problem = str(violation)
    except Exception:
        trial.problem = traceback.format_exc()
    return trial


def tabulate(trials: Sequence[Trial]) -> str:
    """Return a Markdown table of all kinds; a dash where a property does not apply."""
    lines = ["| fault | tried | ended as documented | resumed | bit-equal |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(trial.kind for trial in trials):
        of_kind = [trial for trial in trials if trial.kind == kind]
        resumed = [trial.resumed for trial in of_kind if trial.resumed is not None]
        equal = [trial.equal for trial in of_kind if trial.equal is not None]
        counts = [str(sum(each)) if each else "–" for each in ([trial.ended for trial in of_kind], resumed, equal)]
        lines.append(" | ".join([f"| {kind}", str(len(of_kind)), *counts]) + " |")
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=["quick", "full"], default="full")
    parser.add_argument("--seed", type=int, help="default: random, and printed")
    parser.add_argument("--kind", choices=FULL, action="append", help="only this kind; may be repeated")
    parser.add_argument("--number", type=int, help="only the trial of this number")
    parser.add_argument("--minutes", type=float, help="run random trials for this time, or until the first violation")
    parser.add_argument("--output", type=Path, help="folder for faults.md and faults.json")
    parser.add_argument(IN_NAMESPACE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def import_recipes() -> None:
    """Import the packages of all recipes before processes are forked."""
    sys.path.insert(0, str(lives.ROOT / "recipes"))  # As for a script: recipes import each other.
    for recipe in {recipe.split()[0] for recipe in recipe_runs.RECIPE_NAMES}:
        runpy.run_path(str(lives.ROOT / "recipes" / f"{recipe}.py"), run_name="imported")
    page.draw_charts = lambda run, folder: []  # Half of the time of such a short run.
    spare_flushes()
    shorten_measurements()
    gc.freeze()


def main(arguments: Sequence[str], *, can_mount: bool) -> int:
    """Run the requested trials; return 1 after a violation."""
    options = parse(arguments)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}\n")
    kinds = [kind for kind in options.kind or FULL if can_mount or FULL[kind][0] is not broken.fill_disk]
    if not can_mount:
        sys.stdout.write("full disk: skipped, because no disk can be mounted here\n")
    import_recipes()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    # The quick tier draws one recipe only, so that one reference run suffices.
    harness = Harness(folder, ("sft",) if options.tier == "quick" else recipe_runs.RECIPE_NAMES)
    harness.prepare()
    is_soak = options.minutes is not None
    chosen = draw_trials(kinds, seed) if is_soak else list_trials(kinds, options.tier, options.number)
    trials, began = [], time.monotonic()
    for kind, number in chosen:
        if is_soak and time.monotonic() - began > options.minutes * 60:
            break
        trial = run_trial(harness, kind, number, seed)
        trials.append(trial)
        sys.stdout.write(f"{time.monotonic() - began:5.0f} s  {kind} {number}: {trial.what}\n")
        if trial.problem:
            sys.stdout.write(f"VIOLATION: {trial.problem}\n")
            sys.stdout.write(
                f'repeat with: python -m tests.faults.suite --kind "{kind}" --number {number} --seed {seed}\n'
            )
            if is_soak:
                break
        sys.stdout.flush()
    table = tabulate(trials)
    sys.stdout.write(f"\nseed {seed}, {time.monotonic() - began:.0f} seconds\n\n{table}")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "faults.md").write_text(table, encoding="utf-8")
        record = {"seed": seed, "trials": [asdict(trial) for trial in trials]}
        (options.output / "faults.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    is_broken = any(trial.problem for trial in trials)
    if is_broken:
        sys.stdout.write(f"files of the trials: {folder}\n")
    else:
        shutil.rmtree(folder)
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], can_mount=CAN_MOUNT))
