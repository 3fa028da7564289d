"""What breaks without killing: files of a checkpoint, the disk, numbers, and two commands at once."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from random import Random

import torch
from tests.faults import lives
from tests.faults.kills import count_events, watch_saving
from tests.faults.laboratory import (
    Laboratory,
    Trial,
    expect,
    load_weights,
    read_status,
    verify_equal,
    verify_whole,
)
from tests.faults.moments import Moments, ask_to_stop, spoil
from tests.recipes.paused import act_at

from recipes_lib.training.checkpoints.manifest import find_damage, list_checkpoints

DISK_BYTES = 32 * 2**20
HARMS = ("truncated", "emptied", "bit flipped", "missing")


def harm(path: Path, how: str, random: Random) -> None:
    """Do to a file what disks and copies do."""
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "bit flipped":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content if how == "bit flipped" else content[: len(content) // 2 if how == "truncated" else 0])


def _stopped(lab: Laboratory, recipe: str) -> Path:
    """Return the output of a run that was stopped around step 8: two checkpoints are there."""
    folder = lab.folder / f"stopped-{recipe}"
    if not folder.exists():
        phase = {"dpo": "pairs", "ppo": "policy update"}.get(recipe, "step")
        met = Moments(1, ask_to_stop)
        life = lab.live(folder, recipe, faults={0: partial(act_at, phase, 16, met.meet)})
        expect(life.codes == (75,), f"ended with {life.codes}", life)
        expect(len(list_checkpoints(folder / "run")) == 2, "there are not two checkpoints", life)
    return folder / "run"


def harm_a_checkpoint(lab: Laboratory, trial: Trial, random: Random) -> None:
    """Each file of the newest checkpoint by turns: it is named, and the run goes on from the one before."""
    recipe = ("sft", "lora", "dpo", "ppo")[int(trial.name) % 4]
    stopped = _stopped(lab, recipe)
    newest = list_checkpoints(stopped)[0][1].name
    files = sorted(path.name for path in (stopped / newest).iterdir())
    cells = [(file, how) for file in files for how in HARMS]
    file, how = cells[int(trial.name) % len(cells)]
    trial.what = f"{recipe}, {file} {how}"
    straight = lab.straight(recipe)
    with lab.bench() as folder:
        # As it was: upstream names the best checkpoint by its path.
        shutil.copytree(stopped, folder / "run")
        harm(folder / "run" / newest / file, how, random)
        damage = find_damage(folder / "run" / newest)
        # One bit of what COMPLETE.json tells besides, such as a version, harms nothing.
        expect(damage or (file == "COMPLETE.json" and how == "bit flipped"), "the harm is not seen")
        life = lab.go_on(trial, folder, recipe, straight)
        # A digest that was flipped is told of the file that it is of.
        if damage and file != "COMPLETE.json":
            expect(file in damage, f"{damage} does not name {file}")
            is_named = f"{newest} is damaged: {damage}" in life.told
            expect(is_named and (folder / "run" / f"damaged-{newest}").is_dir(), "the file is not named", life)
        trial.ended = True


def fill_the_disk(lab: Laboratory, trial: Trial, random: Random) -> None:
    """Something else fills the disk at some moment; when that is gone the same command goes on."""
    recipe = lab.draw(random)
    straight, total = lab.straight(recipe), count_events(lab, recipe, watch_saving)
    event, left = random.randint(1, total), random.randint(0, 64) * 1024
    trial.what = f"{recipe}, {left:,} bytes left from event {event} of {total}"
    with lab.bench() as folder:
        run = folder / "run"
        run.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(run)], check=True)
        try:
            moments = Moments(event, partial(_fill, run / "ballast", left))
            life = lab.live(folder, recipe, faults={0: partial(watch_saving, moments, run)})
            if life.codes == (0,):
                # There is room again when an older checkpoint goes, and behind the last file none is needed.
                trial.what += ", which was enough"
            else:
                expect(life.codes == (2,), f"ended with {life.codes}", life)
                expect("Traceback" not in life.told, "a traceback", life)
                says = ("the disk is full", "and the disk has")
                expect(any(words in life.told for words in says), "does not say that the disk is full", life)
                # The report comes after all that makes a run one that is done.
                is_done = read_status(folder) == "done" and load_weights(run)
                expect(is_done or read_status(folder) == "refused", f"status {read_status(folder)}", life)
            trial.ended = True
            (run / "ballast").unlink(missing_ok=True)
            lab.go_on(trial, folder, recipe, straight)
        finally:
            subprocess.run(["umount", "-l", str(run)], check=True)


def _fill(ballast: Path, left: int) -> None:
    free = shutil.disk_usage(ballast.parent).free
    ballast.write_bytes(bytes(max(0, free - left)))


def not_a_number(where: str, lab: Laboratory, trial: Trial, random: Random) -> None:
    """A loss, a gradient or what is computed from a row is NaN: exit 3, nothing exported, the last checkpoint whole."""
    recipe, step = lab.draw(random, "sft", "pretrain", "lora"), random.randint(4, 12)
    trial.what = f"{recipe}, {where}, step {step}"
    straight = lab.straight(recipe)
    with lab.bench() as folder:
        life = lab.live(folder, recipe, faults={0: partial(_spoil_at, where, step)})
        expect(life.codes == (3,), f"ended with {life.codes}", life)
        expect(read_status(folder) == "diverged", f"status {read_status(folder)}", life)
        expect(f"step {step} was stopped before its update" in life.told, "does not name the step", life)
        expect(not load_weights(folder / "run"), "something was exported", life)
        facts = json.loads((folder / "run" / "diverged" / f"step-{step}" / "rank-0.json").read_text())
        expect(facts["row_ids"] and facts["step"] == step, "the dump does not name the rows")
        checkpoints = list_checkpoints(folder / "run")
        expect(checkpoints and checkpoints[0][0] == (step - 1) // 3 * 3, f"checkpoints {checkpoints}", life)
        expect(find_damage(checkpoints[0][1]) is None, "the last checkpoint is not whole", life)
        trial.ended = True
        lab.go_on(trial, folder, recipe, straight)


def _spoil_at(where: str, step: int) -> None:
    from recipes_lib.training.trainers.next_token_trainer import NextTokenTrainer

    compute = NextTokenTrainer.compute_loss

    def spoilt(self, model, *args, **kwargs):
        if not (model.training and self.state.global_step == step - 1):
            return compute(self, model, *args, **kwargs)
        # The step is never finished, so that nothing has to be undone.
        if where == "gradient":
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            trained[len(trained) // 2].register_hook(spoil)
        if where == "data":
            # Tokens are whole numbers: the first of a row becomes none where it becomes a vector.
            model.get_input_embeddings().register_forward_hook(lambda _, __, vectors: _spoil_first(vectors))
        loss = compute(self, model, *args, **kwargs)
        if where == "loss":
            return (spoil(loss[0]), *loss[1:]) if isinstance(loss, tuple) else loss + float("nan")
        return loss

    NextTokenTrainer.compute_loss = spoilt


def _spoil_first(vectors: torch.Tensor) -> torch.Tensor:
    changed = vectors.clone()
    changed[0, 0] = float("nan")
    return changed


def start_twice(lab: Laboratory, trial: Trial, random: Random) -> None:
    """The same command twice at once: one is refused by name, and the other is as if it had been alone."""
    recipe = lab.draw(random)
    trial.what, trial.resumed = f"{recipe}, at once", None
    straight = lab.straight(recipe)
    with lab.bench() as folder:
        keys = lab.keys(folder, recipe)
        tolds = [folder / "first", folder / "second"]
        pids = [lives.begin(recipe, keys, told=told) for told in tolds]
        ends = [lives.wait(each, told) for each, told in zip(pids, tolds, strict=True)]
        codes = sorted(code for end in ends for code in end.codes)
        expect(codes == [0, 2], f"ended with {codes}", ends[0])
        refused = next(end for end in ends if end.codes == (2,))
        expect("another process" in refused.told and "Traceback" not in refused.told, "not refused clearly", refused)
        trial.ended = True
        verify_whole(folder / "run")
        verify_equal(straight, folder / "run")
        trial.equal = True
