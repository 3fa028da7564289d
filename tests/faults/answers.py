"""Faults of PPO, RLOO and GRPO: a kill in each phase of an iteration, and NaN in rewards, values and gradients."""

from __future__ import annotations

import json
from functools import partial
from random import Random

import torch
from tests.faults import recipe_runs
from tests.faults.kills import KILLED
from tests.faults.laboratory import Harness, Trial, expect, load_weights, read_status
from tests.faults.moments import EventCounter, kill_self, make_nan
from tests.recipes.paused import act_at

from recipes_lib.training.checkpoints.manifest import find_damage, list_checkpoints

RUNS = ("ppo", "ppo adapter")
CALLS = {
    # Phase -> smallest number of its calls in a run.
    "sampling": 40,
    "scoring": 6,
    "reading": 12,
    "policy update": 20,
    "critic update": 20,
    "ppo saving": 5,
    "ppo samples": 8,
}
FEWER_CALLS = {("grpo", "reading"): 6, ("grpo", "ppo saving"): 4}
"""Those of GRPO, which trains twice on the answers of an iteration."""
CELLS = [(run, phase) for run in (*RUNS, "rloo", "grpo") for phase in CALLS if run in RUNS or phase != "critic update"]


def kill_in_phase(harness: Harness, trial: Trial, random: Random) -> None:
    """Kill a run in each phase of an iteration in turn, at a random call."""
    recipe, phase = CELLS[int(trial.name) % len(CELLS)]
    call = random.randint(1, FEWER_CALLS.get((recipe, phase), CALLS[phase]))
    trial.what = f"{recipe}, {phase} {call}"
    reference = harness.reference(recipe)
    with harness.trial_folder() as folder:
        events = EventCounter(1, kill_self)
        outcome = harness.run(folder, recipe, faults={0: partial(act_at, phase, call, events.count_event)})
        expect(events.has_acted and outcome.codes == (KILLED,), f"ended with {outcome.codes}", outcome)
        trial.ended = True
        harness.resume(trial, folder, recipe, reference)


NAN_OUTCOMES = {
    # What is NaN -> exit code and message.
    "reward": (2, "prefer_short returned nan for the answer"),
    "value": (3, "the values of the critic of"),
    "policy's gradient": (3, "was stopped before its update of the policy: on rank 0 the gradient of"),
    "critic's gradient": (3, "was stopped before its update of the critic: on rank 0 the gradient of"),
}


def inject_nan(what: str, harness: Harness, trial: Trial, random: Random) -> None:
    """NaN in an iteration: the run ends before the update, exports nothing and keeps its last checkpoint."""
    recipe, iteration = RUNS[int(trial.name) % 2], random.randint(3, 6)
    trial.what = f"{recipe}, iteration {iteration}"
    code, message = NAN_OUTCOMES[what]
    reference = harness.reference(recipe)
    with harness.trial_folder() as folder:
        outcome = harness.run(folder, recipe, faults={0: partial(_inject_at, what, iteration)})
        expect(outcome.codes == (code,), f"ended with {outcome.codes}", outcome)
        expect(message in outcome.output and "Traceback" not in outcome.output, "the NaN is not named", outcome)
        expect(read_status(folder) == {2: "refused", 3: "diverged"}[code], f"status {read_status(folder)}", outcome)
        expect(not load_weights(folder / "run"), "a model was exported", outcome)
        if code == 3:
            (dump,) = (folder / "run" / "diverged").glob("step-*/rank-0.json")
            expect(json.loads(dump.read_text())["row_ids"], "the dump does not name the rows")
        checkpoints = list_checkpoints(folder / "run")
        expect(checkpoints and checkpoints[0][0] <= 2 * (iteration - 1), f"checkpoints {checkpoints}", outcome)
        expect(find_damage(checkpoints[0][1]) is None, "the last checkpoint is damaged", outcome)
        trial.ended = True
        harness.resume(trial, folder, recipe, reference)


def _inject_at(what: str, iteration: int) -> None:
    """Make a value NaN in one iteration, counted from 1."""
    from recipes_lib.rl import collect
    from recipes_lib.rl.trainer import PolicyTrainer
    from recipes_lib.rl.update import Learner

    current = [0]
    learn, value = PolicyTrainer._learn, collect.compute_response_values

    def count(self, number):
        current[0] = number + 1
        return learn(self, number)

    PolicyTrainer._learn = count
    if what == "reward":
        score = recipe_runs.prefer_short
        recipe_runs.prefer_short = lambda **columns: (
            score(**columns) if current[0] != iteration else [float("nan")] * len(columns["completions"])
        )
        recipe_runs.prefer_short.__name__ = "prefer_short"
    elif what == "value":
        collect.compute_response_values = lambda *args: (
            value(*args) if current[0] != iteration else make_nan(value(*args))
        )
    else:
        learner = what.partition("'")[0]
        backward = Learner.backward

        def backward_with_nan(self, loss):
            backward(self, loss)
            if current[0] == iteration and self.name == learner:
                parameter = next(each for each in self.parameters.values() if each.grad is not None)
                with torch.no_grad():
                    parameter.grad.copy_(make_nan(parameter.grad))

        Learner.backward = backward_with_nan
