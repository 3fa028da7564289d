"""Automatic remarks on the curves of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from recipes_lib.report.run_files import RunFiles, find_non_finite_steps, read_curve

OVERFIT_RISE = 0.02
"""Relative rise of the held-out loss over its best that is worth a word."""
MAX_DROP = 0.5
"""Nats a token that the chosen answers may lose before it is worth a word."""
SPIKE_FACTOR = 10.0
"""A gradient norm of this many times the median is a spike."""


def find_problems(run: RunFiles) -> list[str]:
    """Return what is wrong or doubtful about a run, one sentence each, the gravest first; empty when nothing is."""
    return [
        *_judge_end(run),
        *_judge_rollbacks(run),
        *_judge_non_finite(run),
        *_judge_held_out_loss(run),
        *_judge_displacement(run),
        *_judge_stopping(run),
        *_judge_gradients(run),
        *_judge_files(run),
    ]


def _judge_end(run: RunFiles) -> list[str]:
    status = run.facts.get("status", "done")
    problems = [] if status == "done" else [f"The run did not finish: its status is “{status}”."]
    return problems if run.train else [*problems, "No training step was logged."]


def _judge_rollbacks(run: RunFiles) -> list[str]:
    return [
        f"Step {rollback['step']} was a spike ({rollback['cause']}): the run went back to step {rollback['back_to']} "
        f"and on without the rows of steps {rollback['steps'][0]} to {rollback['steps'][1]}."
        for rollback in run.facts.get("rollbacks", [])
    ]


def _judge_non_finite(run: RunFiles) -> list[str]:
    found = [
        (label, find_non_finite_steps(records, name))
        for label, records, name in (
            ("loss", run.train, "loss"),
            ("gradient norm", run.train, "grad_norm"),
            ("held-out loss", run.evaluations, "eval_loss"),
        )
    ]
    return [f"The {label} was not finite at {_list_steps(steps)}." for label, steps in found if steps]


def _judge_held_out_loss(run: RunFiles) -> list[str]:
    curve = read_curve(run.evaluations, "eval_loss")
    if len(curve) < 2:
        return []
    best_step, best = min(curve, key=lambda point: point[1])
    last_step, last = curve[-1]
    if last <= best + OVERFIT_RISE * abs(best):
        return []
    if best_step == curve[0][0]:
        return [f"Training made the held-out loss worse: {best:.4g} at step {best_step}, {last:.4g} at the end."]
    return [
        f"The held-out loss was lowest at step {best_step} ({best:.4g}) and rose to {last:.4g} by step {last_step}: "
        "train for fewer epochs, or keep the earlier checkpoint."
    ]


def _judge_displacement(run: RunFiles) -> list[str]:
    curve = read_curve(run.evaluations, "eval_logps/chosen_shift") or read_curve(run.train, "logps/chosen_shift")
    if not curve or curve[-1][1] >= -MAX_DROP:
        return []
    return [
        f"Chosen answers lost {-curve[-1][1]:.2f} nats a token since the start: likelihood moved to answers that "
        "nobody wrote. Add `sft` to loss_type, use apo_zero, lower the learning rate, or drop nearly equal pairs."
    ]


def _judge_stopping(run: RunFiles) -> list[str]:
    rates = read_curve(run.evaluations, "eval_stop_rate")
    if len(rates) < 2 or rates[-1][1] > 0:
        return []
    return ["No sample ended by itself: raise sample_max_new_tokens, or see that terminators are trained on."]


def _judge_gradients(run: RunFiles) -> list[str]:
    curve = read_curve(run.train, "grad_norm")
    if len(curve) < 10:
        return []
    bound = SPIKE_FACTOR * statistics.median(value for _, value in curve)
    # The first tenth is warm-up, where large gradients are in order.
    spikes = [step for step, value in curve[len(curve) // 10 :] if value > bound]
    return [f"The gradient norm exceeded ten times its median at {_list_steps(spikes)}."] if spikes else []


def _judge_files(run: RunFiles) -> list[str]:
    number = run.num_torn_lines
    return [f"{number} line{'s were' if number > 1 else ' was'} cut short and left out."] if number else []


def _list_steps(steps: Sequence[int]) -> str:
    listed = ", ".join(str(step) for step in steps[:5])
    rest = len(steps) - 5
    return f"step{'s' if len(steps) > 1 else ''} {listed}" + (f" and {rest} more" if rest > 0 else "")
