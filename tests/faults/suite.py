"""Injects one fault after another into real runs and says what became of each.

python -m tests.faults.suite --tier quick                       some of every kind, in less than a minute
python -m tests.faults.suite --tier full --seed 7               all, with moments drawn from the seed
python -m tests.faults.suite --kind "kill -9 in saving" --number 3 --seed 7    that one again
python -m tests.faults.suite --minutes 60                       at random until then or the first violation
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
    """Become the root of a namespace of mounts, in which a small disk can be had; return whether that went."""
    if IN_NAMESPACE in arguments:
        return True
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        can_mount = not subprocess.run([*command, "true"], check=False, capture_output=True).returncode
    except OSError:
        can_mount = False
    if can_mount:
        os.execvp(command[0], [*command, sys.executable, "-m", "tests.faults.suite", *arguments, IN_NAMESPACE])
    return False


if __name__ == "__main__":
    CAN_MOUNT = enter_namespace(sys.argv[1:])  # Before threads are there, which may not change their namespace.

from tests.faults import answers, broken, kills, lives, recipe_runs  # noqa: E402
from tests.faults.laboratory import Laboratory, Trial, Violation  # noqa: E402
from tests.forked import spare_flushes  # noqa: E402

from recipes_lib.training.evaluation import build  # noqa: E402

Fault = Callable[[Laboratory, Trial, Random], None]

FULL: dict[str, tuple[Fault, int, int]] = {
    # Kind of fault -> what does it, how many of it are tried, and how many of them in the quick tier.
    "kill -9 in training": (kills.kill_in_training, 20, 0),
    "kill -9 in saving": (kills.kill_in_saving, 20, 1),
    "kill inside a write": (kills.kill_in_a_write, 10, 1),
    "kill -9 in a rollback": (kills.kill_in_a_rollback, 10, 0),
    "SIGTERM to one of two ranks": (kills.stop_one_of_two, len(kills.CELLS), 0),
    "a rank is killed": (kills.lose_a_rank, 4, 0),
    "another number of processes": (kills.go_on_with_one, 6, 0),
    "a file of a checkpoint is damaged": (broken.harm_a_checkpoint, 48, 1),
    "the disk is full": (broken.fill_the_disk, 10, 1),
    "NaN in the loss": (partial(broken.not_a_number, "loss"), 3, 1),
    "NaN in a gradient": (partial(broken.not_a_number, "gradient"), 3, 0),
    "NaN in the data": (partial(broken.not_a_number, "data"), 3, 0),
    "a spike, rolled back": (kills.go_back, 3, 0),
    "the same command twice at once": (broken.start_twice, 3, 1),
    "kill -9 in a phase of PPO": (answers.kill_in_a_phase, len(answers.CELLS), 1),
    "kill -9 in PPO's saving": (partial(kills.kill_at, kills.watch_saving, only=answers.RUNS), 10, 0),
    "NaN in PPO's rewards": (partial(answers.no_number, "reward"), 2, 0),
    "NaN in PPO's values": (partial(answers.no_number, "value"), 2, 1),
    "NaN in PPO's policy": (partial(answers.no_number, "policy's gradient"), 2, 0),
    "NaN in PPO's critic": (partial(answers.no_number, "critic's gradient"), 2, 0),
}


def choose(kinds: Sequence[str], tier: str, number: int | None) -> Iterator[tuple[str, int]]:
    """Yield kind and number of every trial of a tier, or the one that was asked for."""
    for kind in kinds:
        _, full, quick = FULL[kind]
        yield from (
            (kind, each) for each in ([number] if number is not None else range(full if tier == "full" else quick))
        )


def choose_forever(kinds: Sequence[str], seed: int) -> Iterator[tuple[str, int]]:
    """Yield kinds at random, as often as each stands in the full tier, with ever new numbers."""
    random, number = Random(seed), 0
    while True:
        yield random.choices(kinds, [FULL[kind][1] for kind in kinds])[0], number
        number += 1


def try_one(lab: Laboratory, kind: str, number: int, seed: int) -> Trial:
    """Inject one fault, and say what became of it."""
    trial = Trial(kind, str(number))
    try:
        FULL[kind][0](lab, trial, Random(f"{seed}/{kind}/{number}"))
    except Violation as violation:
        trial.problem = str(violation)
    except Exception:
        trial.problem = traceback.format_exc()
    return trial


def tabulate(trials: Sequence[Trial]) -> str:
    """Return the table of all kinds, as Markdown; a dash where nothing could be resumed or equal."""
    lines = ["| fault | tried | ended as documented | resumed | bit-equal |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(trial.kind for trial in trials):
        some = [trial for trial in trials if trial.kind == kind]
        resumed = [trial.resumed for trial in some if trial.resumed is not None]
        equal = [trial.equal for trial in some if trial.equal is not None]
        counts = [str(sum(each)) if each else "–" for each in ([trial.ended for trial in some], resumed, equal)]
        lines.append(" | ".join([f"| {kind}", str(len(some)), *counts]) + " |")
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=["quick", "full"], default="full")
    parser.add_argument("--seed", type=int, help="by default a new one, which is printed")
    parser.add_argument("--kind", choices=FULL, action="append", help="only faults of this kind; may be repeated")
    parser.add_argument("--number", type=int, help="only the trial of this number")
    parser.add_argument("--minutes", type=float, help="go on at random for so long, up to the first violation")
    parser.add_argument("--output", type=Path, help="folder for faults.md and faults.json")
    parser.add_argument(IN_NAMESPACE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def import_recipes() -> None:
    """Import all that recipes do, so that every process forked from this one has it."""
    sys.path.insert(0, str(lives.ROOT / "recipes"))  # As of a script: one recipe is another's main.
    for recipe in {recipe.split()[0] for recipe in recipe_runs.RECIPE_NAMES}:
        runpy.run_path(str(lives.ROOT / "recipes" / f"{recipe}.py"), run_name="imported once for all")
    build.measure_matmul_flops = lambda dtype: 1e9
    spare_flushes()
    gc.freeze()


def main(arguments: Sequence[str], *, can_mount: bool) -> int:
    """Try what was asked for; return 1 if something did not end as it is documented."""
    options = parse(arguments)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}\n")
    kinds = [kind for kind in options.kind or FULL if can_mount or FULL[kind][0] is not broken.fill_the_disk]
    if not can_mount:
        sys.stdout.write("the disk is full: not tried, since no disk can be mounted here\n")
    import_recipes()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    # One run alone, so that what others are held against is made once.
    lab = Laboratory(folder, ("sft",) if options.tier == "quick" else recipe_runs.RECIPE_NAMES)
    lab.prepare()
    is_soak = options.minutes is not None
    chosen = choose_forever(kinds, seed) if is_soak else choose(kinds, options.tier, options.number)
    trials, began = [], time.monotonic()
    for kind, number in chosen:
        if is_soak and time.monotonic() - began > options.minutes * 60:
            break
        trial = try_one(lab, kind, number, seed)
        trials.append(trial)
        sys.stdout.write(f"{time.monotonic() - began:5.0f} s  {kind} {number}: {trial.what}\n")
        if trial.problem:
            sys.stdout.write(f"VIOLATION: {trial.problem}\n")
            sys.stdout.write(f'again: python -m tests.faults.suite --kind "{kind}" --number {number} --seed {seed}\n')
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
        sys.stdout.write(f"what is left of it: {folder}\n")
    else:
        shutil.rmtree(folder)
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], can_mount=CAN_MOUNT))
