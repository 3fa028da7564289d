"""Faults of PPO, RLOO and GRPO: each phase of an iteration is killed, or gives something that is no number."""

from __future__ import annotations

import json
from functools import partial
from random import Random

import torch
from tests.faults import recipe_runs
from tests.faults.kills import KILLED
from tests.faults.laboratory import Laboratory, Trial, expect, load_weights, read_status
from tests.faults.moments import Moments, die, spoil
from tests.recipes.paused import act_at

from recipes_lib.training.checkpoints.manifest import find_damage, list_checkpoints

RUNS = ("ppo", "ppo adapter")
CALLS = {
    # Phase -> how often a run comes there, at least.
    "sampling": 40,
    "scoring": 6,
    "reading": 12,
    "policy update": 20,
    "critic update": 20,
    "ppo saving": 5,
    "ppo samples": 8,
}
CELLS = [(run, phase) for run in (*RUNS, "rloo", "grpo") for phase in CALLS if run in RUNS or phase != "critic update"]


def kill_in_a_phase(lab: Laboratory, trial: Trial, random: Random) -> None:
    """Kill a run in each phase of an iteration by turns, at any call of it."""
    recipe, phase = CELLS[int(trial.name) % len(CELLS)]
    call = random.randint(1, CALLS[phase])
    trial.what = f"{recipe}, {phase} {call}"
    straight = lab.straight(recipe)
    with lab.bench() as folder:
        met = Moments(1, die)
        life = lab.live(folder, recipe, faults={0: partial(act_at, phase, call, met.meet)})
        expect(met.was_met and life.codes == (KILLED,), f"ended with {life.codes}", life)
        trial.ended = True
        lab.go_on(trial, folder, recipe, straight)


NO_NUMBERS = {
    # What is none -> exit code, and words that say so.
    "reward": (2, "prefer_short returned nan for the answer"),
    "value": (3, "the values of the critic of"),
    "policy's gradient": (3, "was stopped before its update of the policy: on rank 0 the gradient of"),
    "critic's gradient": (3, "was stopped before its update of the critic: on rank 0 the gradient of"),
}


def no_number(what: str, lab: Laboratory, trial: Trial, random: Random) -> None:
    """Something of an iteration is NaN: the run ends before the update, nothing is exported, the last save is whole."""
    recipe, iteration = RUNS[int(trial.name) % 2], random.randint(3, 6)
    trial.what = f"{recipe}, iteration {iteration}"
    code, words = NO_NUMBERS[what]
    straight = lab.straight(recipe)
    with lab.bench() as folder:
        life = lab.live(folder, recipe, faults={0: partial(_spoil_at, what, iteration)})
        expect(life.codes == (code,), f"ended with {life.codes}", life)
        expect(words in life.told and "Traceback" not in life.told, "does not say what is none", life)
        expect(read_status(folder) == {2: "refused", 3: "diverged"}[code], f"status {read_status(folder)}", life)
        expect(not load_weights(folder / "run"), "something was exported", life)
        if code == 3:
            (dump,) = (folder / "run" / "diverged").glob("step-*/rank-0.json")
            expect(json.loads(dump.read_text())["row_ids"], "the dump does not name the rows")
        checkpoints = list_checkpoints(folder / "run")
        expect(checkpoints and checkpoints[0][0] <= 2 * (iteration - 1), f"checkpoints {checkpoints}", life)
        expect(find_damage(checkpoints[0][1]) is None, "the last checkpoint is not whole", life)
        trial.ended = True
        lab.go_on(trial, folder, recipe, straight)


def _spoil_at(what: str, iteration: int) -> None:
    """In one iteration, from 1, something becomes NaN."""
    from recipes_lib.rl import collect
    from recipes_lib.rl.trainer import PolicyTrainer
    from recipes_lib.rl.update import Learner

    now = [0]
    learn, value = PolicyTrainer._learn, collect.compute_response_values

    def count(self, number):
        now[0] = number + 1
        return learn(self, number)

    PolicyTrainer._learn = count
    if what == "reward":
        score = recipe_runs.prefer_short
        recipe_runs.prefer_short = lambda **given: (
            score(**given) if now[0] != iteration else [float("nan")] * len(given["completions"])
        )
        recipe_runs.prefer_short.__name__ = "prefer_short"
    elif what == "value":
        collect.compute_response_values = lambda *given: value(*given) if now[0] != iteration else spoil(value(*given))
    else:
        learner = what.partition("'")[0]
        backward = Learner.backward

        def spoilt(self, loss):
            backward(self, loss)
            if now[0] == iteration and self.name == learner:
                some = next(p for p in self.parameters.values() if p.grad is not None)
                with torch.no_grad():
                    some.grad.copy_(spoil(some.grad))

        Learner.backward = spoilt
