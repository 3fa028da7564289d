"""Faults without a kill: damaged checkpoint files, a full disk, NaN, and two runs in one directory."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from random import Random

import torch
from tests.faults import lives
from tests.faults.kills import count_events, count_saving_events
from tests.faults.laboratory import Harness, Trial, expect, load_weights, read_status, verify_equal, verify_whole
from tests.faults.moments import EventCounter, make_nan, send_sigterm
from tests.recipes.paused import act_at

from recipes_lib.training.checkpoints.manifest import find_damage, list_checkpoints

DISK_BYTES = 32 * 2**20
DAMAGES = ("truncated", "emptied", "bit flipped", "missing")


def damage_file(path: Path, how: str, random: Random) -> None:
    """Damage a file as a faulty disk or an interrupted copy does."""
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "bit flipped":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content if how == "bit flipped" else content[: len(content) // 2 if how == "truncated" else 0])


def _stop_around_step_8(harness: Harness, recipe: str) -> Path:
    """Return the output directory of a run that was stopped around step 8, with two checkpoints."""
    folder = harness.folder / f"stopped-{recipe}"
    if not folder.exists():
        phase = {"dpo": "pairs", "ppo": "policy update"}.get(recipe, "step")
        events = EventCounter(1, send_sigterm)
        outcome = harness.run(folder, recipe, faults={0: partial(act_at, phase, 16, events.count_event)})
        expect(outcome.codes == (75,), f"ended with {outcome.codes}", outcome)
        expect(len(list_checkpoints(folder / "run")) == 2, "expected two checkpoints", outcome)
    return folder / "run"


def damage_checkpoint(harness: Harness, trial: Trial, random: Random) -> None:
    """Damage each file of the newest checkpoint in turn: the run names it and resumes from the previous checkpoint."""
    recipe = ("sft", "lora", "dpo", "ppo")[int(trial.name) % 4]
    stopped = _stop_around_step_8(harness, recipe)
    newest = list_checkpoints(stopped)[0][1].name
    files = sorted(path.name for path in (stopped / newest).iterdir())
    cells = [(file, how) for file in files for how in DAMAGES]
    file, how = cells[int(trial.name) % len(cells)]
    trial.what = f"{recipe}, {file} {how}"
    reference = harness.reference(recipe)
    with harness.trial_folder() as folder:
        # The folder keeps its name: upstream stores the path of the best checkpoint.
        shutil.copytree(stopped, folder / "run")
        damage_file(folder / "run" / newest / file, how, random)
        damage = find_damage(folder / "run" / newest)
        # A flipped bit in other fields of COMPLETE.json, such as a version, is not damage.
        expect(damage or (file == "COMPLETE.json" and how == "bit flipped"), "the damage is not detected")
        outcome = harness.resume(trial, folder, recipe, reference)
        # With a flipped digest, the error names the file of that digest.
        if damage and file != "COMPLETE.json":
            expect(file in damage, f"{damage} does not name {file}")
            is_named = f"{newest} is damaged: {damage}" in outcome.output
            expect(is_named and (folder / "run" / f"damaged-{newest}").is_dir(), "the file is not named", outcome)
        trial.ended = True


def fill_disk(harness: Harness, trial: Trial, random: Random) -> None:
    """Another process fills the disk at a random event; after it is freed the same command resumes."""
    recipe = harness.draw(random)
    total, reference = count_events(harness, recipe, count_saving_events), harness.reference(recipe)
    event, left = random.randint(1, total), random.randint(0, 64) * 1024
    trial.what = f"{recipe}, {left:,} bytes left from event {event} of {total}"
    with harness.trial_folder() as folder:
        run = folder / "run"
        run.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(run)], check=True)
        try:
            events = EventCounter(event, partial(_fill, run / "ballast", left))
            outcome = harness.run(folder, recipe, faults={0: partial(count_saving_events, events, run)})
            if outcome.codes == (0,):
                # Deleting an older checkpoint freed enough space, or nothing was written afterwards.
                trial.what += ", which was enough"
            else:
                expect(outcome.codes == (2,), f"ended with {outcome.codes}", outcome)
                expect("Traceback" not in outcome.output, "a traceback", outcome)
                messages = ("the disk is full", "and the disk has")
                expect(
                    any(message in outcome.output for message in messages),
                    "does not say that the disk is full",
                    outcome,
                )
                # The report is written after the status is done.
                is_done = read_status(folder) == "done" and load_weights(run)
                expect(is_done or read_status(folder) == "refused", f"status {read_status(folder)}", outcome)
            trial.ended = True
            (run / "ballast").unlink(missing_ok=True)
            harness.resume(trial, folder, recipe, reference)
        finally:
            subprocess.run(["umount", "-l", str(run)], check=True)


def _fill(ballast: Path, left: int) -> None:
    free = shutil.disk_usage(ballast.parent).free
    ballast.write_bytes(bytes(max(0, free - left)))


def inject_nan(where: str, harness: Harness, trial: Trial, random: Random) -> None:
    """NaN in a loss, a gradient or an embedding: exit 3, no exported model, and an intact last checkpoint."""
    recipe, step = harness.draw(random, "sft", "pretrain", "lora"), random.randint(4, 12)
    trial.what = f"{recipe}, {where}, step {step}"
    reference = harness.reference(recipe)
    with harness.trial_folder() as folder:
        outcome = harness.run(folder, recipe, faults={0: partial(_inject_at, where, step)})
        expect(outcome.codes == (3,), f"ended with {outcome.codes}", outcome)
        expect(read_status(folder) == "diverged", f"status {read_status(folder)}", outcome)
        expect(f"step {step} was stopped before its update" in outcome.output, "does not name the step", outcome)
        expect(not load_weights(folder / "run"), "a model was exported", outcome)
        facts = json.loads((folder / "run" / "diverged" / f"step-{step}" / "rank-0.json").read_text())
        expect(facts["row_ids"] and facts["step"] == step, "the dump does not name the rows")
        checkpoints = list_checkpoints(folder / "run")
        expect(checkpoints and checkpoints[0][0] == (step - 1) // 3 * 3, f"checkpoints {checkpoints}", outcome)
        expect(find_damage(checkpoints[0][1]) is None, "the last checkpoint is damaged", outcome)
        trial.ended = True
        harness.resume(trial, folder, recipe, reference)


def _inject_at(where: str, step: int) -> None:
    from recipes_lib.training.trainers.next_token_trainer import NextTokenTrainer

    compute = NextTokenTrainer.compute_loss

    def compute_with_nan(self, model, *args, **kwargs):
        if not (model.training and self.state.global_step == step - 1):
            return compute(self, model, *args, **kwargs)
        # Hooks are not removed: the run ends in this step.
        if where == "gradient":
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            trained[len(trained) // 2].register_hook(make_nan)
        if where == "data":
            # Token ids are integers, so their embedding becomes NaN.
            model.get_input_embeddings().register_forward_hook(lambda _, __, embeddings: _set_first_to_nan(embeddings))
        loss = compute(self, model, *args, **kwargs)
        if where == "loss":
            return (make_nan(loss[0]), *loss[1:]) if isinstance(loss, tuple) else loss + float("nan")
        return loss

    NextTokenTrainer.compute_loss = compute_with_nan


def _set_first_to_nan(embeddings: torch.Tensor) -> torch.Tensor:
    changed = embeddings.clone()
    changed[0, 0] = float("nan")
    return changed


def start_twice(harness: Harness, trial: Trial, random: Random) -> None:
    """Start the same command twice at once: one is rejected, and the other equals a run alone."""
    recipe = harness.draw(random)
    trial.what, trial.resumed = f"{recipe}, at once", None
    reference = harness.reference(recipe)
    with harness.trial_folder() as folder:
        keys = harness.keys(folder, recipe)
        folders = [folder / "first", folder / "second"]
        pids = [lives.start_processes(recipe, keys, output=output) for output in folders]
        outcomes = [lives.wait_for_processes(each, output) for each, output in zip(pids, folders, strict=True)]
        codes = sorted(code for end in outcomes for code in end.codes)
        expect(codes == [0, 2], f"ended with {codes}", outcomes[0])
        refused = next(end for end in outcomes if end.codes == (2,))
        expect(
            "another process" in refused.output and "Traceback" not in refused.output,
            "not rejected with a clear message",
            refused,
        )
        trial.ended = True
        verify_whole(folder / "run")
        verify_equal(reference, folder / "run")
        trial.equal = True
