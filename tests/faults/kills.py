"""Kills and stop requests in training, saving, a write and a rollback, of one process or of one of two ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

from tests.faults.laboratory import Harness, Trial, expect, read_status, verify_close, verify_equal
from tests.faults.moments import (
    EventCounter,
    count_disk_events,
    count_training_events,
    kill_in_next_write_beyond,
    kill_self,
    send_sigterm,
)
from tests.recipes.paused import act_at

from recipes_lib.quantities import pluralize
from recipes_lib.training.guards.step_guard import Rollback, find_skips, read_rollbacks

Watch = Callable[[EventCounter, Path], None]
KILLED = -signal.SIGKILL
PREEMPTED = 75


def _count_training_events(events: EventCounter, run: Path) -> None:
    count_training_events(events)


def count_saving_events(events: EventCounter, run: Path) -> None:
    count_disk_events(events, run, since="_dry_run")


def kill_at(watch: Watch, harness: Harness, trial: Trial, random: Random, only: Sequence[str] = ()) -> None:
    """Kill a run at one of the events of a run without a fault."""
    recipe = harness.draw(random, *only)
    total, reference = count_events(harness, recipe, watch), harness.reference(recipe)
    number = random.randint(1, total)
    trial.what = f"{recipe}, event {number} of {total}"
    with harness.trial_folder() as folder:
        events = EventCounter(number, kill_self)
        outcome = harness.run(folder, recipe, faults={0: partial(watch, events, folder / "run")})
        # Checkpoints are written in a thread, so that the number of events varies a little.
        expect(
            outcome.codes == (KILLED,) or (not events.has_acted and outcome.codes == (0,)),
            f"ended with {outcome.codes}",
            outcome,
        )
        trial.ended = True
        harness.resume(trial, folder, recipe, reference)


kill_in_training = partial(kill_at, _count_training_events)
kill_in_saving = partial(kill_at, count_saving_events)


def count_events(harness: Harness, recipe: str, watch: Watch) -> int:
    """Count the events of a run without a fault: of the reference run, if there is none yet."""
    name = f"{recipe} {watch.__name__}"
    if name not in harness.counts:
        events = EventCounter()
        run = harness.reference(recipe, watch=partial(watch, events))
        if not events.count:
            with harness.trial_folder() as folder:
                outcome = harness.run(folder, recipe, faults={0: partial(watch, events, folder / "run")})
                expect(not any(outcome.codes), f"the counted run ended with {outcome.codes}", outcome)
                verify_equal(run, folder / "run")
        harness.counts[name] = events.count
    return harness.counts[name]


def kill_in_write(harness: Harness, trial: Trial, random: Random) -> None:
    """Kill a run within the first write beyond a random file size, from a random event on."""
    recipe = harness.draw(random)
    total, reference = count_events(harness, recipe, count_saving_events), harness.reference(recipe)
    largest = max(path.stat().st_size for path in reference.glob("checkpoint-*/*") if path.is_file())
    event, num_bytes = random.randint(1, int(total * 0.7)), random.randint(1, largest - 1)
    trial.what = f"{recipe}, after byte {num_bytes} of a file, from event {event} of {total}"
    with harness.trial_folder() as folder:
        events = EventCounter(event, kill_in_next_write_beyond(num_bytes))
        outcome = harness.run(folder, recipe, faults={0: partial(count_saving_events, events, folder / "run")})
        expect(outcome.codes == (-signal.SIGXFSZ,), f"ended with {outcome.codes}", outcome)
        trial.ended = True
        harness.resume(trial, folder, recipe, reference)


SPIKING = {"max_steps": 30, "save_steps": 5, "eval_steps": 15, "max_rollbacks": 1}
SPIKE_STEP = 26


def inject_spike(run: Path) -> None:
    """Add 50 to the loss of one step, until the run has rolled back."""
    from recipes_lib.training.trainers.next_token_trainer import NextTokenTrainer

    compute = NextTokenTrainer.compute_loss

    def jump(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        is_due = self.model.training and self.state.global_step == SPIKE_STEP - 1
        if not is_due or (run / "rollbacks.json").exists():
            return loss
        return (loss[0] + 50.0, *loss[1:]) if isinstance(loss, tuple) else loss + 50.0

    NextTokenTrainer.compute_loss = jump


def _leave_out_rows(rollbacks: Sequence[Rollback]) -> None:
    """Leave out, from the start of a run, the rows that another run skips after its rollbacks."""
    from recipes_lib.training.trainers import next_token_trainer, recipe_trainer

    skips = find_skips(rollbacks)
    recipe_trainer.find_skips = next_token_trainer.find_skips = lambda _: skips


def run_without_spike_rows(harness: Harness, recipe: str) -> Path:
    """Return a reference run without a spike, and without the rows that a run with a rollback skips."""
    name = f"without spike {recipe}"
    target = harness.folder / f"without-spike-{recipe}"
    if name not in harness.counts:
        with harness.trial_folder() as folder:
            outcome = harness.run(folder, recipe, faults={0: partial(inject_spike, folder / "run")}, **SPIKING)
            expect(not any(outcome.codes), f"a run with a spike ended with {outcome.codes}", outcome)
            made = read_rollbacks(folder / "run")
            expect([rollback.step for rollback in made] == [SPIKE_STEP], f"rollbacks: {made}", outcome)
        outcome = harness.run(target, recipe, faults={0: partial(_leave_out_rows, made)}, **SPIKING)
        expect(not any(outcome.codes), f"the run without the rows ended with {outcome.codes}", outcome)
        expect(not read_rollbacks(target / "run"), "the run without the rows has rolled back", outcome)
        harness.counts[name] = 1
    return target / "run"


def roll_back(harness: Harness, trial: Trial, random: Random) -> None:
    """A run that rolls back after a spike equals the run without the skipped rows."""
    recipe = harness.draw(random, "sft", "pretrain", "lora")
    trial.what = f"{recipe}, spike in step {SPIKE_STEP}"
    expected = run_without_spike_rows(harness, recipe)
    with harness.trial_folder() as folder:
        outcome = harness.run(folder, recipe, faults={0: partial(inject_spike, folder / "run")}, **SPIKING)
        expect(outcome.codes == (0,), f"ended with {outcome.codes}", outcome)
        expect((folder / "run" / "rollbacks.json").exists(), "no rollback", outcome)
        trial.ended, trial.resumed = True, None
        verify_equal(expected, folder / "run")
        trial.equal = True


def kill_in_rollback(harness: Harness, trial: Trial, random: Random) -> None:
    """Kill a run while it records a rollback, renames checkpoints, and loads the older one."""
    recipe = harness.draw(random, "sft", "pretrain", "lora")
    number = random.randint(1, 40)
    trial.what = f"{recipe}, event {number} of a rollback"
    expected = run_without_spike_rows(harness, recipe)
    with harness.trial_folder() as folder:

        def fault(events: EventCounter | None) -> None:
            inject_spike(folder / "run")
            if events is not None:
                # The temporary file, because a run also looks for rollbacks.json at its start.
                count_disk_events(events, folder / "run", since="rollbacks.json.partial")

        outcome = harness.run(folder, recipe, faults={0: partial(fault, EventCounter(number, kill_self))}, **SPIKING)
        expect(outcome.codes == (KILLED,), f"ended with {outcome.codes}", outcome)
        trial.ended = True
        harness.resume(trial, folder, recipe, expected, faults={0: partial(fault, None)}, **SPIKING)


STOPPED_IN = {
    # Phase -> range of its calls from which one is drawn, and the ranks that call it.
    "sft": {
        "loading": ((1, 1), (0, 1)),
        "preparation": ((1, 1), (0,)),
        "step": ((2, 12), (0, 1)),
        "evaluation": ((1, 4), (0, 1)),
        "generation": ((1, 8), (0, 1)),
        "saving": ((1, 4), (0, 1)),
        "export": ((1, 1), (0,)),
    },
    "dpo": {"reference": ((1, 2), (0, 1)), "pairs": ((2, 12), (0, 1)), "saving": ((1, 4), (0, 1))},
    "pretrain": {"step": ((2, 12), (0, 1)), "saving": ((1, 4), (0, 1))},
    "reward": {"saving": ((1, 4), (0, 1))},
    "lora": {"step": ((2, 12), (0, 1)), "adapter export": ((1, 1), (0,))},
    "distill on policy with layers": {"step": ((2, 12), (0, 1)), "sampling": ((2, 40), (0, 1))},
    "ppo": {
        "loading": ((1, 1), (0, 1)),
        "sampling": ((2, 40), (0, 1)),
        "scoring": ((2, 5), (0, 1)),
        "reading": ((2, 16), (0, 1)),
        "policy update": ((2, 10), (0, 1)),
        "critic update": ((2, 10), (0, 1)),
        "ppo saving": ((1, 5), (0, 1)),
        "ppo samples": ((1, 8), (0,)),
        "export": ((1, 1), (0,)),
    },
    "ppo adapter": {"sampling": ((2, 40), (0, 1)), "policy update": ((2, 10), (0, 1))},
}
CELLS = [
    (recipe, phase, rank) for recipe, phases in STOPPED_IN.items() for phase in phases for rank in phases[phase][1]
]


def stop_one_of_two_ranks(harness: Harness, trial: Trial, random: Random) -> None:
    """Send SIGTERM to one of two ranks, in each phase in turn: both save, exit with 75 and resume bit-identically."""
    recipe, phase, rank = CELLS[int(trial.name) % len(CELLS)]
    call = random.randint(*STOPPED_IN[recipe][phase][0])
    trial.what = f"{recipe}, {phase} {call} of rank {rank}"
    reference = harness.reference(recipe, 2)
    with harness.trial_folder() as folder:
        # Prepared data are cached, so that these phases need a new folder.
        more = {"prepared_dir": folder / "prepared"} if phase in ("preparation", "reference") else {}
        events = EventCounter(1, send_sigterm)
        faults = {rank: partial(act_at, phase, call, events.count_event)}
        outcome = harness.run(folder, recipe, faults=faults, num_processes=2, **more)
        expect(events.has_acted, "the phase was not reached", outcome)
        # While rank 0 writes the model, rank 1 may already have finished.
        ends = {PREEMPTED, 0} if "export" in phase else {PREEMPTED}
        expect(outcome.codes[rank] == PREEMPTED and set(outcome.codes) <= ends, f"ended with {outcome.codes}", outcome)
        # During loading run.json may not exist yet, and a rank that waits for the other one exits by a timer without
        # writing it.
        statuses = ("preempted", "running", "None") if phase == "loading" else ("preempted",)
        expect(read_status(folder) in statuses, f"status {read_status(folder)}", outcome)
        trial.ended = True
        harness.resume(trial, folder, recipe, reference, num_processes=2, **more)


def kill_one_of_two_ranks(harness: Harness, trial: Trial, random: Random) -> None:
    """Kill one of two ranks in training: the other one exits and names it, and the run resumes."""
    recipe, rank = harness.draw(random), random.randint(0, 1)
    number = random.randint(40, 400)
    trial.what = f"{recipe}, rank {rank}, event {number} of training"
    reference = harness.reference(recipe, 2)
    with harness.trial_folder() as folder:
        events = EventCounter(number, kill_self)
        outcome = harness.run(folder, recipe, faults={rank: partial(count_training_events, events)}, num_processes=2)
        expect(outcome.codes[rank] == KILLED, f"ended with {outcome.codes}", outcome)
        expect(outcome.codes[1 - rank] == 1, f"ended with {outcome.codes}", outcome)
        words = f"rank {1 - rank} exits: process {rank} of this machine ended: no error was recorded, so it was killed"
        expect(words in outcome.output, "the killed rank is not named", outcome)
        trial.what += f", both ended after {outcome.seconds:.1f} s"
        trial.ended = True
        harness.resume(trial, folder, recipe, reference, num_processes=2)


def change_world_size(harness: Harness, trial: Trial, random: Random) -> None:
    """Resume a run of two processes with one, and the reverse: the same rows and losses."""
    recipe, before = harness.draw(random, "lora", "pretrain", "dpo"), random.choice([1, 2])
    after = 3 - before
    trial.what, trial.equal = f"{recipe}, {before} processes, then {after}", None
    reference = harness.reference(recipe, before)
    with harness.trial_folder() as folder:
        events = EventCounter(1, send_sigterm)
        call = random.randint(8, 20) if before == 1 else random.randint(5, 10)
        phase = "pairs" if recipe == "dpo" else "step"
        faults = {0: partial(act_at, phase, call, events.count_event)}
        outcome = harness.run(folder, recipe, faults=faults, num_processes=before)
        expect(outcome.codes == (PREEMPTED,) * before, f"ended with {outcome.codes}", outcome)
        trial.ended = True
        # The command of the first start, so that gradient accumulation is adapted.
        accumulation = harness.keys(folder, recipe, before)["gradient_accumulation_steps"]
        outcome = harness.run(folder, recipe, num_processes=after, gradient_accumulation_steps=accumulation)
        expect(not any(outcome.codes), f"the same command ended with {outcome.codes}", outcome)
        line = f"{pluralize(after, 'process')} instead of {before}"
        expect(line in outcome.output, "the adaptation is not logged", outcome)
        verify_close(reference, folder / "run")
        trial.resumed = True
