"""Compare the logged metrics of every recipe between two checkouts.

    python -m tests.same_numbers ../before . build/same            # ../before is a worktree of an older commit
    python -m tests.same_numbers ../before . build/same --recipes sft dpo

For every recipe, two runs of the second checkout are compared exactly with one of the first: a whole run, and one that
resumes the first checkout's run from its second checkpoint. Relies on commands, keys and file formats only: modules may
move between the two commits. Both checkouts use this interpreter.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults import recipe_runs

NUM_STEPS = 6
MEASURED = ("seconds", "per_second", "per_s", "memory", "mfu", "time", "_ms")
"""Parts of the names of metrics that depend on the clock or the machine."""


def write_inputs(folder: Path) -> None:
    """Write models, tokenizer and data of all recipes, and a module with the reward function."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe_runs.write_inputs(folder)
    # A copy, because modules of tests may move between two commits.
    source = "\n\n".join(map(inspect.getsource, (recipe_runs.prefer_short, recipe_runs.measure_shortness)))
    (folder / "rewards.py").write_text(f"import random\nfrom typing import Any\n\n\n{source}", encoding="utf-8")


def make_keys(inputs: Path, recipe: str) -> dict[str, Any]:
    """Return the keys of a run without ``output_dir``."""
    short = {"max_steps": NUM_STEPS, "save_steps": 2, "save_total_limit": 9, "prepared_dir": inputs / "prepared"}
    keys = recipe_runs.make_keys(inputs, recipe) | short
    if recipe.split()[0] in ("ppo", "grpo", "rloo"):
        del keys["prepared_dir"]  # Earlier commits refuse it.
        keys["reward_funcs"] = "[rewards:prefer_short]"
    return keys


def run(checkout: Path, recipe: str, keys: Mapping[str, Any], output: Path) -> None:
    """Run a recipe of a checkout.

    Raises:
        SystemExit: The run failed.
    """
    flags = [f"--{name}={value}" for name, value in {**keys, "output_dir": output}.items()]
    paths = os.pathsep.join(str(path) for path in (checkout / "src", output.parents[1] / "inputs"))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(checkout / "recipes" / f"{recipe.split()[0]}.py"), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=checkout)
    if done.returncode:
        sys.exit(f"{recipe} at {checkout} ended with {done.returncode}\n{done.stderr}")


def copy_as_killed(whole: Path, output: Path) -> None:
    """Copy a finished run as if it had been killed after its second checkpoint."""
    shutil.copytree(whole, output)
    middle = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))[1]
    step = int(middle.name.rpartition("-")[2])
    for path in output.glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    for path in (*output.glob("*.safetensors"), output / "report.html"):
        path.unlink(missing_ok=True)
    record = json.loads((output / "run.json").read_text(encoding="utf-8"))
    running = {"status": "running", "config": record["config"] | {"output_dir": str(output)}}
    (output / "run.json").write_text(json.dumps(record | running), encoding="utf-8")


def read_figures(output: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the last event of each kind and step, without measured metrics such as throughput."""
    events = {}
    for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if "step" in event:
            kept = {name: value for name, value in event.items() if not any(word in name for word in MEASURED)}
            events[str(event.get("kind")), int(event["step"])] = kept
    return events


def compare(before: Path, after: Path) -> Iterator[str]:
    """Yield a line for each metric that differs between two runs."""
    ours, theirs = read_figures(before), read_figures(after)
    yield from (f"{kind} of step {step} is in one run only" for kind, step in sorted(ours.keys() ^ theirs.keys()))
    for at in sorted(ours.keys() & theirs.keys()):
        for name in sorted(ours[at].keys() | theirs[at].keys()):
            if ours[at].get(name) != theirs[at].get(name):
                yield f"{at[0]} of step {at[1]}: {name} was {ours[at].get(name)} and is {theirs[at].get(name)}"


def main(argv: Sequence[str]) -> int:
    """Run the comparison and print one line per recipe and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--recipes", nargs="+", choices=recipe_runs.RECIPE_NAMES, default=recipe_runs.RECIPE_NAMES)
    options = parser.parse_args(argv)
    before, after, output = (path.resolve() for path in (options.before, options.after, options.output))
    write_inputs(output / "inputs")
    num_different = 0
    for recipe in options.recipes:
        keys, place = make_keys(output / "inputs", recipe), output / recipe.replace(" ", "_")
        shutil.rmtree(place, ignore_errors=True)
        run(before, recipe, keys, place / "before")
        run(after, recipe, keys, place / "after")
        copy_as_killed(place / "before", place / "resumed")
        run(after, recipe, keys, place / "resumed")
        num_figures = sum(map(len, read_figures(place / "before").values()))
        for name in ("after", "resumed"):
            differences = list(compare(place / "before", place / name))
            num_different += bool(differences)
            lines = [f"{recipe}, {name}: {num_figures} figures, {len(differences)} differ", *differences[:5]]
            sys.stdout.write("\n    ".join(lines) + "\n")
            sys.stdout.flush()
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
