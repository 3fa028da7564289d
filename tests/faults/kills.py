"""Processes that are killed or asked to stop: in training, saving, a write and a rollback, alone and one of two."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

from tests.faults.laboratory import Laboratory, Trial, expect, read_status, verify_close, verify_equal
from tests.faults.moments import (
    Moments,
    ask_to_stop,
    die,
    die_in_the_next_write_beyond,
    watch_disk,
    watch_training,
)
from tests.recipes.paused import act_at

Watch = Callable[[Moments, Path], None]
KILLED = -signal.SIGKILL
PREEMPTED = 75


def _train(moments: Moments, run: Path) -> None:
    watch_training(moments)


def watch_saving(moments: Moments, run: Path) -> None:
    watch_disk(moments, run, since="_dry_run")


def kill_at(watch: Watch, lab: Laboratory, trial: Trial, random: Random, only: Sequence[str] = ()) -> None:
    """Kill a run at one of all the events that a run without a fault has; then once more where it goes on."""
    recipe = lab.draw(random, *only)
    straight, total = lab.straight(recipe), count_events(lab, recipe, watch)
    number = random.randint(1, total)
    trial.what = f"{recipe}, event {number} of {total}"
    with lab.bench() as folder:
        moments = Moments(number, die)
        life = lab.live(folder, recipe, faults={0: partial(watch, moments, folder / "run")})
        # A thread writes checkpoints, so that a few events more or less come before the end.
        expect(
            life.codes == (KILLED,) or (not moments.was_met and life.codes == (0,)), f"ended with {life.codes}", life
        )
        trial.ended = True
        lab.go_on(trial, folder, recipe, straight)


kill_in_training = partial(kill_at, _train)
kill_in_saving = partial(kill_at, watch_saving)


def count_events(lab: Laboratory, recipe: str, watch: Watch) -> int:
    """Count the events of a run that nothing happens to."""
    name = f"{recipe} {watch.__name__}"
    if name not in lab.counts:
        moments = Moments()
        with lab.bench() as folder:
            life = lab.live(folder, recipe, faults={0: partial(watch, moments, folder / "run")})
            expect(not any(life.codes), f"the counted run ended with {life.codes}", life)
            verify_equal(lab.straight(recipe), folder / "run")
        lab.counts[name] = moments.count
    return lab.counts[name]


def kill_in_a_write(lab: Laboratory, trial: Trial, random: Random) -> None:
    """Kill a run inside the first write that makes a file longer than some number of bytes, from some save on."""
    recipe = lab.draw(random)
    straight, total = lab.straight(recipe), count_events(lab, recipe, watch_saving)
    largest = max(path.stat().st_size for path in straight.glob("checkpoint-*/*") if path.is_file())
    event, num_bytes = random.randint(1, int(total * 0.7)), random.randint(1, largest - 1)
    trial.what = f"{recipe}, behind byte {num_bytes} of a file, from event {event} of {total}"
    with lab.bench() as folder:
        moments = Moments(event, die_in_the_next_write_beyond(num_bytes))
        life = lab.live(folder, recipe, faults={0: partial(watch_saving, moments, folder / "run")})
        expect(life.codes == (-signal.SIGXFSZ,), f"ended with {life.codes}", life)
        trial.ended = True
        lab.go_on(trial, folder, recipe, straight)


SPIKING = {"max_steps": 30, "save_steps": 5, "eval_steps": 15, "max_rollbacks": 1}
SPIKE_STEP = 26


def spike(run: Path) -> None:
    """Let the loss jump at one step, for as long as the run has not gone back from it."""
    from recipes_lib.training.trainers.next_token_trainer import NextTokenTrainer

    compute = NextTokenTrainer.compute_loss

    def jump(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        is_due = self.model.training and self.state.global_step == SPIKE_STEP - 1
        if not is_due or (run / "rollbacks.json").exists():
            return loss
        return (loss[0] + 50.0, *loss[1:]) if isinstance(loss, tuple) else loss + 50.0

    NextTokenTrainer.compute_loss = jump


def make_without_spike(lab: Laboratory, recipe: str) -> Path:
    """Return a run that never saw the rows: from its beginning it knows which ones one that went back has left out."""
    name = f"never saw {recipe}"
    if name not in lab.counts:
        with lab.bench() as folder:
            life = lab.live(folder, recipe, faults={0: partial(spike, folder / "run")}, **SPIKING)
            expect(not any(life.codes), f"a run with a spike ended with {life.codes}", life)
            made = json.loads((folder / "run" / "rollbacks.json").read_text())
            expect([rollback["step"] for rollback in made] == [SPIKE_STEP], f"went back: {made}", life)
            target = lab.folder / f"never-saw-{recipe}"
            (target / "run").mkdir(parents=True)
            shutil.copy(folder / "run" / "rollbacks.json", target / "run")
        life = lab.live(target, recipe, faults={0: partial(spike, target / "run")}, **SPIKING)
        expect(not any(life.codes), f"the run that never saw the rows ended with {life.codes}", life)
        lab.counts[name] = 1
    return lab.folder / f"never-saw-{recipe}" / "run"


def go_back(lab: Laboratory, trial: Trial, random: Random) -> None:
    """A spike sends the run back; what comes out is the run that never saw the rows."""
    recipe = lab.draw(random, "sft", "pretrain", "lora")
    trial.what = f"{recipe}, spike in step {SPIKE_STEP}"
    never_saw = make_without_spike(lab, recipe)
    with lab.bench() as folder:
        life = lab.live(folder, recipe, faults={0: partial(spike, folder / "run")}, **SPIKING)
        expect(life.codes == (0,), f"ended with {life.codes}", life)
        expect((folder / "run" / "rollbacks.json").exists(), "did not go back", life)
        trial.ended, trial.resumed = True, None
        verify_equal(never_saw, folder / "run")
        trial.equal = True


def kill_in_a_rollback(lab: Laboratory, trial: Trial, random: Random) -> None:
    """Kill a run while it puts down that it goes back, puts checkpoints aside, and takes the older one up."""
    recipe = lab.draw(random, "sft", "pretrain", "lora")
    number = random.randint(1, 40)
    trial.what = f"{recipe}, event {number} of going back"
    never_saw = make_without_spike(lab, recipe)
    with lab.bench() as folder:

        def fault(moments: Moments | None) -> None:
            spike(folder / "run")
            if moments is not None:
                # Where a run looks for the file at its start is no rollback.
                watch_disk(moments, folder / "run", since="rollbacks.json.partial")

        life = lab.live(folder, recipe, faults={0: partial(fault, Moments(number, die))}, **SPIKING)
        expect(life.codes == (KILLED,), f"ended with {life.codes}", life)
        trial.ended = True
        lab.go_on(trial, folder, recipe, never_saw, faults={0: partial(fault, None)}, **SPIKING)


STOPPED_IN = {
    # Phase -> calls of it among which one is drawn, and the ranks that come there.
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


def stop_one_of_two(lab: Laboratory, trial: Trial, random: Random) -> None:
    """SIGTERM to one of two ranks, in each phase by turns: both save and end with 75, and go on to the same bits."""
    recipe, phase, rank = CELLS[int(trial.name) % len(CELLS)]
    call = random.randint(*STOPPED_IN[recipe][phase][0])
    trial.what = f"{recipe}, {phase} {call} of rank {rank}"
    straight = lab.straight(recipe, 2)
    with lab.bench() as folder:
        # What is prepared once is not prepared again.
        more = {"prepared_dir": folder / "prepared"} if phase in ("preparation", "reference") else {}
        met = Moments(1, ask_to_stop)
        faults = {rank: partial(act_at, phase, call, met.meet)}
        life = lab.live(folder, recipe, faults=faults, num_processes=2, **more)
        expect(met.was_met, "the phase never came", life)
        # While the main process writes the model the other one may have done all its work.
        ends = {PREEMPTED, 0} if "export" in phase else {PREEMPTED}
        expect(life.codes[rank] == PREEMPTED and set(life.codes) <= ends, f"ended with {life.codes}", life)
        # Told while it loads, a run may not have begun its record; and who waits for the one that has left cannot hear:
        # it leaves by its timer, and writes nothing.
        statuses = ("preempted", "running", "None") if phase == "loading" else ("preempted",)
        expect(read_status(folder) in statuses, f"status {read_status(folder)}", life)
        trial.ended = True
        lab.go_on(trial, folder, recipe, straight, num_processes=2, **more)


def lose_a_rank(lab: Laboratory, trial: Trial, random: Random) -> None:
    """One of two ranks is killed in training: the other ends by itself, says whose end it follows, and both go on."""
    recipe, rank = lab.draw(random, "sft", "pretrain", "lora", "dpo", "ppo"), random.randint(0, 1)
    number = random.randint(40, 400)
    trial.what = f"{recipe}, rank {rank}, event {number} of training"
    straight = lab.straight(recipe, 2)
    with lab.bench() as folder:
        moments = Moments(number, die)
        life = lab.live(folder, recipe, faults={rank: partial(watch_training, moments)}, num_processes=2)
        expect(life.codes[rank] == KILLED, f"ended with {life.codes}", life)
        expect(life.codes[1 - rank] == 1, f"ended with {life.codes}", life)
        words = f"rank {1 - rank} exits: process {rank} of this machine ended: no error was recorded, so it was killed"
        expect(words in life.told, "does not say who is gone", life)
        trial.what += f", both gone after {life.seconds:.1f} s"
        trial.ended = True
        lab.go_on(trial, folder, recipe, straight, num_processes=2)


def go_on_with_one(lab: Laboratory, trial: Trial, random: Random) -> None:
    """Stopped on two processes, a run goes on with one, and the other way round: the same rows, the same losses.

    But for packed rows in the smaller step that ends an epoch (``docs/checkpoints.md``).
    """
    recipe, before = lab.draw(random, "lora", "pretrain", "dpo"), random.choice([1, 2])
    after = 3 - before
    trial.what, trial.equal = f"{recipe}, {before} processes, then {after}", None
    straight = lab.straight(recipe, before)
    with lab.bench() as folder:
        met = Moments(1, ask_to_stop)
        call = random.randint(8, 20) if before == 1 else random.randint(5, 10)
        phase = "pairs" if recipe == "dpo" else "step"
        faults = {0: partial(act_at, phase, call, met.meet)}
        life = lab.live(folder, recipe, faults=faults, num_processes=before)
        expect(life.codes == (PREEMPTED,) * before, f"ended with {life.codes}", life)
        trial.ended = True
        # The very command, so that the accumulation is planned anew.
        accumulation = lab.keys(folder, recipe, before)["gradient_accumulation_steps"]
        life = lab.live(folder, recipe, num_processes=after, gradient_accumulation_steps=accumulation)
        expect(not any(life.codes), f"the same command ended with {life.codes}", life)
        expect(f"{after} processes instead of {before}" in life.told, "does not say so", life)
        verify_close(straight, folder / "run")
        trial.resumed = True
