"""``report.html`` of a run, with its charts also as PNGs in ``report/``."""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes_lib.errors import list_first
from recipes_lib.files import flatten_numbers
from recipes_lib.quantities import format_bytes, format_count, format_duration, pluralize
from recipes_lib.report.charts import METRICS, draw_charts
from recipes_lib.report.html_pages import write_page
from recipes_lib.report.reward_report import draw_reliability, read_reward_report
from recipes_lib.report.run_files import (
    Record,
    RunFiles,
    find_end,
    find_non_finite_steps,
    list_scores,
    mark_killed,
    read_curve,
    read_number,
    read_run,
)

MAX_TEXT = 2000
"""Maximum characters of a prompt, answer or value on the page; ``samples.jsonl`` has the full text."""
MAX_PROMPTS = 12
"""Maximum prompts on the page."""
_DIGEST = re.compile(r"\b[0-9a-f]{16,}\b")
_SHOWN_ELSEWHERE = ("config", "measured", "planned", "provenance", "scores", "stage", "status")

OVERFIT_RISE = 0.02
"""Relative rise of the held-out loss above its minimum that is reported as a problem."""
MAX_DROP = 0.5
"""Decrease of the chosen answers' log-probability, in nats per token, that is reported as a problem."""
SPIKE_FACTOR = 10.0
"""A gradient norm above this many times the median is reported as a spike."""


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A metric at the top of the page: label, value, and a note such as the initial value."""

    label: str
    value: str
    note: str = ""


def build_report(run_dir: Path) -> Path:
    """Write ``report.html`` and ``report/*.png`` to a run directory and return the path of the page.

    The page works offline and without scripts, and is smaller than a megabyte. Missing parts of a run are omitted; text
    from data or configuration is escaped.

    Raises:
        DataError: ``run_dir`` has no run.
    """
    run = mark_killed(read_run(run_dir))
    charts, verdict = draw_charts(run, run_dir / "report"), read_reward_report(run_dir)
    reward_figures, verdict_rows = list[KeyFigure](), list[tuple[str, str]]()
    # Most runs have no reward_report.json; fields of an untrusted or older one may be missing or have any type.
    with suppress(ArithmeticError, LookupError, TypeError, ValueError):
        reward_figures = _choose_reward_figures(verdict)
        charts.append(draw_reliability(verdict, run_dir / "report"))
        lengths = {
            f"from {one['from']} tokens": {name: one[name] for name in ("num_pairs", "accuracy")}
            for one in verdict["by_length_difference"]
        }
        numbers = flatten_numbers({**verdict, "by_length_difference": lengths})
        verdict_rows += [(name, f"{number:.4g}") for name, number in numbers]
    failed_gates = verdict.get("failed_gates", ())
    figures = [
        *_compare_ends(run.train, METRICS["rl"]),
        *_choose_figures(run),
        *reward_figures,
        *_choose_scores(run),
    ]
    steps, facts = sorted({sample["step"] for sample in run.samples}), _list_facts(run.facts)
    return write_page(
        run_dir / "report.html",
        "page",
        run=run,
        kicker=" · ".join(filter(None, (str(run.facts.get("stage", "training")), str(run.facts.get("status", ""))))),
        lead=_describe_extent(run),
        problems=[*find_problems(run), *(f"Before it may serve PPO: {gate}." for gate in failed_gates)],
        figures=figures,
        charts=charts,
        verdict_rows=verdict_rows,
        samples=_pair_samples(run.samples, steps),
        samples_lead=_describe_samples(run.samples, steps),
        facts=[fact for fact in facts if not _is_record(*fact)],
        records=[fact for fact in facts if _is_record(*fact)],
        config=_list_config(run),
    )


def _describe_extent(run: RunFiles) -> str:
    if not run.train:
        return "No training step was logged."
    last = run.train[-1]
    parts = [pluralize(last["step"], "optimizer step")]
    if (epochs := read_number(last, "epoch")) is not None:
        parts.append(f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}")
    if (seconds := read_number(last, "seconds")) is not None:
        parts.append(f"{format_duration(seconds)} of training")
    # Unset in pretraining from random weights.
    model = run.config.get("model_name_or_path")
    return ", ".join(parts) + (f", from {model}" if model else "")


def _choose_figures(run: RunFiles) -> Iterator[KeyFigure]:
    # All other evaluation metrics, including user-defined ones.
    names = {name for record in run.held_out for name in record if name.startswith("eval_")}
    own = names.difference(METRICS["held_out"], METRICS["hidden"])
    labels = {name: (name.removeprefix("eval_").replace("_", " "), "{:.4g}") for name in sorted(own)}
    yield from _compare_ends(run.held_out, METRICS["held_out"] | labels)
    yield from _compare_ends(run.train, {"on_policy/divergence": ("Divergence on its answers", "{:.4g}")})
    # The clipped surrogate loss of RL is about 0 whatever the policy learns; that of on-policy distillation is of texts
    # in one step and of answers in another.
    if not any(read_curve(run.train, name) for name in ("objective/score", "on_policy/divergence")):
        yield from _compare_ends(run.train, {"loss": ("Training loss", "{:.4g}")})
    if (tokens := read_curve(run.train, "num_target_tokens")) and tokens[-1][1]:
        total = read_curve(run.train, "num_tokens")
        note = f"of {format_count(total[-1][1])} tokens seen" if total else ""
        yield KeyFigure("Tokens trained on", format_count(tokens[-1][1]), note)
    if any(rates := [value for _, value in read_curve(run.train, "target_tokens_per_second")]):
        mfu = statistics.median_high([value for _, value in read_curve(run.train, "mfu")] or [math.inf])
        # Above 1, the peak is wrong: that of a CPU is measured, possibly while other programs ran.
        note = f"{mfu:.0%} of the peak FLOPs" if mfu <= 1 else "median"
        yield KeyFigure("Target tokens/s", format_count(statistics.median_high(rates)), note)
    if memory := read_curve(run.train, "memory_bytes"):
        yield KeyFigure("Peak memory", format_bytes(max(value for _, value in memory)), "of one process")


def _choose_reward_figures(verdict: Mapping[str, Any]) -> list[KeyFigure]:
    interval = f"95 %: {verdict['accuracy_low']:.1%} to {verdict['accuracy_high']:.1%}, a tie is half a win"
    longer = verdict["length"]["longer_wins_accuracy"]
    return [
        KeyFigure("Accuracy of the reward", f"{verdict['accuracy']:.1%}", interval),
        KeyFigure("Calibration error", f"{verdict['ece']:.3f}", f"{verdict['ece_by_chance']:.3f} by chance"),
        KeyFigure("Length baseline", f"{longer:.1%}", "accuracy of preferring the longer answer"),
        KeyFigure(
            "Ready for RL", "yes" if verdict["may_serve_ppo"] else "no", f"{len(verdict['failed_gates'])} gates failed"
        ),
    ]


def _choose_scores(run: RunFiles) -> Iterator[KeyFigure]:
    for score in list_scores(run.facts):
        error = "" if score.stderr is None else f"± {1.96 * score.stderr:.3f}, "
        yield KeyFigure(f"{score.task}, {score.metric}", f"{score.value:.4g}", f"{error}{score.about}")


def _compare_ends(records: Sequence[Record], labels: Mapping[str, tuple[str, str]]) -> Iterator[KeyFigure]:
    """Yield the last value of each metric that has a label, with the first value as a note."""
    for name, (label, template) in labels.items():
        if (last := find_end(records, name)) is not None:
            curve = read_curve(records, name)
            note = f"{template.format(curve[0][1])} at step {curve[0][0]}" if len(curve) > 1 else ""
            yield KeyFigure(label, template.format(last), note)


def _pair_samples(samples: Sequence[Record], steps: Sequence[int]) -> list[dict[str, Any]]:
    """Return prompts with their first and last answers, the largest change first, at most ``MAX_PROMPTS``.

    With rewards, the change is that of the reward, and both the largest gains and losses are selected; without rewards,
    it is the share of words that differ.
    """
    by_prompt: dict[str, dict[int, Record]] = {}
    for sample in samples:
        by_prompt.setdefault(str(sample.get("prompt", "")), {})[sample["step"]] = sample
    if _has_rewards(samples):
        gains = {prompt: _measure_gain(answers) for prompt, answers in by_prompt.items()}
        known = {prompt: gain for prompt, gain in gains.items() if gain is not None}
        prompts = sorted(known, key=known.__getitem__, reverse=True)
        if len(prompts) > MAX_PROMPTS:
            prompts = [*prompts[: MAX_PROMPTS - MAX_PROMPTS // 2], *prompts[-(MAX_PROMPTS // 2) :]]
    else:
        prompts = sorted(by_prompt, key=lambda prompt: _measure_likeness(by_prompt[prompt]))[:MAX_PROMPTS]
    paired = []
    for prompt in prompts:
        answers = by_prompt[prompt]
        # One answer if the prompt was sampled at one step only.
        ends = [answers[step] for step in dict.fromkeys((min(answers), max(answers)))]
        paired.append(show_prompt(ends[-1], [show_answer(answer, steps, ends[0]) for answer in ends]))
    return paired


def show_prompt(sample: Record, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the variables of a prompt on a page: its text and reference in a line of ``samples.jsonl``, and answers.

    Args:
        sample: Line of ``samples.jsonl``.
        answers: Results of ``show_answer``.
    """
    reference = sample.get("reference")
    return {
        "prompt": shorten(str(sample.get("prompt", ""))),
        "reference": None if reference is None else shorten(str(reference)),
        "answers": answers,
    }


def _describe_samples(samples: Sequence[Record], steps: Sequence[int]) -> str:
    has_rewards = _has_rewards(samples)
    how = "at the same random numbers" if has_rewards else "greedily"
    when = " and ".join(_name_step(step, steps).lower() for step in dict.fromkeys([*steps[:1], *steps[-1:]]))
    order = "the largest gain of reward first" if has_rewards else "the most changed first"
    return f"The same prompts, answered {how} {when}; {order}."


def _measure_gain(answers: Mapping[int, Record]) -> float | None:
    """Return the reward of the last answer minus that of the first; ``None`` if the last has no reward."""
    first, last = _read_reward(answers[min(answers)]), _read_reward(answers[max(answers)])
    return None if last is None else last - (first if first is not None and len(answers) > 1 else 0.0)


def _measure_likeness(answers: Mapping[int, Record]) -> float:
    """Return the similarity of the words of the first and the last answer, from 0 to 1."""
    first, last = (shorten(str(answers[step].get("completion", ""))).split() for step in (min(answers), max(answers)))
    # `autojunk` would ignore frequent words of answers above 200 words.
    return difflib.SequenceMatcher(None, first, last, autojunk=False).ratio()


def show_answer(sample: Record, steps: Sequence[int], first: Record) -> dict[str, Any]:
    """Return the variables of an answer on a page.

    Args:
        sample: Line of ``samples.jsonl``.
        steps: Steps of the run's samples, ascending.
        first: Sample of the same prompt whose reward is subtracted.
    """
    stopped = bool(sample.get("stopped"))
    number, reward, before = sample.get("num_tokens", "?"), _read_reward(sample), _read_reward(first)
    gain = reward - before if reward is not None and before is not None and sample is not first else 0.0
    return {
        "when": _name_step(sample["step"], steps),
        "stopped": stopped,
        "verdict": f"stopped after {number} tokens" if stopped else f"cut off at {number} tokens",
        "reward": "" if reward is None else f"reward {reward:.4g}" + (f" ({gain:+.3g})" if gain else ""),
        "direction": "up" if gain > 0 else "down" if gain < 0 else "",
        "text": shorten(str(sample["completion"])),
    }


def _has_rewards(samples: Sequence[Record]) -> bool:
    return any(_read_reward(sample) is not None for sample in samples)


def _read_reward(sample: Record) -> float | None:
    reward = read_number(sample, "reward")
    return reward if reward is not None and math.isfinite(reward) else None


def _name_step(step: int, steps: Sequence[int]) -> str:
    if step == 0:
        return "Before training"
    return f"After training, step {step:,}" if step == steps[-1] else f"At step {step:,}"


def _list_facts(facts: Record) -> list[tuple[str, str]]:
    command = facts.get("command")
    shown = {"command": shlex.join(map(str, command))} if isinstance(command, list) else {}
    if comparison := ", ".join(_compare_with_plan(facts)):
        shown["planned / measured"] = comparison
    return list(_flatten({name: value for name, value in {**facts, **shown}.items() if name not in _SHOWN_ELSEWHERE}))


def _compare_with_plan(facts: Record) -> Iterator[str]:
    sides = [facts.get(name) for name in ("planned", "measured")]
    units = ("memory_bytes", "GB of memory", 1e9), ("step_seconds", "s a step", 1), ("eval_loss", "held-out loss", 1)
    for name, unit, size in units:
        values = [read_number(side, name) if isinstance(side, Mapping) else None for side in sides]
        if None not in values:
            yield f"{' / '.join(f'{value / size:.3g}' for value in values if value is not None)} {unit}"


def _is_record(name: str, value: str) -> bool:
    """Return whether a fact is a hash, a version or a list of files, which the page collapses."""
    return bool(_DIGEST.search(value)) or name.startswith(("versions ", "data ", "model files"))


def _list_config(run: RunFiles) -> list[tuple[str, str, str]]:
    provenance = run.facts.get("provenance")
    origins = provenance if isinstance(provenance, dict) else {}
    rows = [(name, _show_value(value), str(origins.get(name, ""))) for name, value in sorted(run.config.items())]
    # Values set by the user come first; sorting is stable.
    return sorted(rows, key=lambda row: row[2] in ("", "default"))


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested facts as ``(path, value)``."""
    for name, value in facts.items():
        words = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, dict):
            yield from _flatten(value, f"{words} · ")
        elif value not in (None, []):
            yield words, _show_value(value)


def _show_value(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return shorten(shown)


def shorten(text: str) -> str:
    """Return a text of at most ``MAX_TEXT`` characters, with the number of those that are left out."""
    rest = len(text) - MAX_TEXT
    return f"{text[:MAX_TEXT]} … and {rest:,} characters more" if rest > 0 else text


def find_problems(run: RunFiles) -> list[str]:
    """Return the problems of a run, one sentence each, the most serious first."""
    return [*_check_completion(run), *_check_held_out(run), *_check_training(run)]


def _check_completion(run: RunFiles) -> Iterator[str]:
    if (status := run.facts.get("status", "done")) != "done":
        yield f"The run has not finished: its status is “{status}”."
    if not run.train:
        yield "No training step was logged."
    # `rollbacks` of an untrusted record may have any type.
    with suppress(TypeError, KeyError, ValueError):
        for rollback in run.facts.get("rollbacks") or []:
            first, last = rollback["steps"][:2]
            yield (
                f"Step {rollback['step']} was a spike ({rollback['cause']}): the run rolled back to step "
                f"{rollback['back_to']} and skipped the rows of steps {first} to {last}."
            )
    for label, records, name in (
        ("loss", run.train, "loss"),
        ("gradient norm", run.train, "grad_norm"),
        ("held-out loss", run.evaluations, "eval_loss"),
    ):
        if steps := find_non_finite_steps(records, name):
            yield f"The {label} was not finite at {_list_steps(steps)}."


def _check_held_out(run: RunFiles) -> Iterator[str]:
    if curve := read_curve(run.held_out, "eval_loss"):
        best_step, best = min(curve, key=lambda point: point[1])
        last_step, last = curve[-1]
        # `abs`: a loss with other terms may be negative.
        has_risen = last > best + OVERFIT_RISE * abs(best)
        if has_risen and best_step == curve[0][0]:
            yield f"Training made the held-out loss worse: {best:.4g} at step {best_step}, {last:.4g} at the end."
        elif has_risen:
            yield (
                f"The held-out loss was lowest at step {best_step} ({best:.4g}) and rose to {last:.4g} by step "
                f"{last_step}: train for fewer epochs, or keep the earlier checkpoint."
            )
    if run.config.get("load_best_model_at_end") and not run.best and run.facts.get("status") == "done":
        found = "no checkpoint of a step whose evaluation is finite"
        yield f"load_best_model_at_end found {found}: the model is of the last step."


def _check_training(run: RunFiles) -> Iterator[str]:
    shifts = read_curve(run.evaluations, "eval_logps/chosen_shift") or read_curve(run.train, "logps/chosen_shift")
    # Another reference than the start model may give chosen answers a higher likelihood from the beginning.
    if shifts and shifts[-1][1] < -MAX_DROP and not run.config.get("ref_model_name_or_path"):
        yield (
            f"Chosen answers lost {-shifts[-1][1]:.2f} nats per token since the start: likelihood moved to answers "
            "outside the data. Add `sft` to loss_type, use apo_zero, lower the learning rate, or drop similar pairs."
        )
    rates = read_curve(run.evaluations, "eval_stop_rate")
    # A base model may not stop before training: judge from the second evaluation on.
    if len(rates) > 1 and rates[-1][1] <= 0:
        yield "No sample ended with a stop token: raise sample_max_new_tokens, or train on stop tokens."
    norms = read_curve(run.train, "grad_norm")
    if len(norms) >= 10:
        bound = SPIKE_FACTOR * statistics.median(value for _, value in norms)
        # Large gradients are normal in the first tenth (warm-up).
        if spikes := [step for step, value in norms[len(norms) // 10 :] if value > bound]:
            yield f"The gradient norm exceeded ten times its median at {_list_steps(spikes)}."
    if number := run.num_torn_lines:
        yield f"{number} line{'s were' if number > 1 else ' was'} truncated or invalid and ignored."


def _list_steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {list_first(map(str, steps))}"
