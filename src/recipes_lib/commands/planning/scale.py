"""``recipes scale``: fit scaling laws of loss by parameters and tokens, and predict larger runs."""

from __future__ import annotations

import argparse
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from recipes_lib.commands.planning.planned_hardware import Row, format_rows
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import read_record, replace_record
from recipes_lib.models.loading import explained
from recipes_lib.planning.compute import TOKENS_PER_PARAMETER, compute_model_size
from recipes_lib.planning.scaling import (
    FLOPS_PER_TOKEN,
    NUM_RESAMPLES,
    PUBLISHED,
    Fit,
    Law,
    Run,
    fit_isoflops,
    fit_law,
)
from recipes_lib.report.run_files import read_run


def run(options: argparse.Namespace) -> None:
    """Run the command, by options from ``flags.scale``.

    Raises:
        ConfigError: A flag is wrong, or a law without an interval is asked about runs far beyond its own.
        DataError: The runs cannot be read, or determine no law.
    """
    for name in ("flops", "parameters", "tokens"):
        if not 0 < getattr(options, name, 1.0) < float("inf"):
            raise ConfigError(Problem(f"--{name}", f"is {getattr(options, name):g}", "write a finite number above 0"))
    tell = {"fit": _tell_fit, "plan": _tell_plan, "predict": _tell_prediction}[options.command]
    sys.stdout.write("".join([f"{line}\n" for line in format_rows(tell(options))]))


def read_scaling_run(folder: Path, *, counts_embeddings: bool = True) -> Run:
    """Return parameters, tokens and held-out loss of a run; without evaluations, the loss of its last twentieth.

    Args:
        folder: Output directory of a pretraining run.
        counts_embeddings: Whether parameters are all of them.

    Raises:
        ConfigError: The model cannot be read.
        DataError: It is not a finished run.
    """
    run = read_run(folder)
    if not run.train or run.facts.get("status") != "done":
        raise DataError(
            Problem(str(folder), "is not a finished run", "train it to the end: its learning rate must have decayed")
        )
    with explained("runs", str(folder)):
        config = AutoConfig.from_pretrained(folder)
    size = compute_model_size(config)
    losses = [event["eval_loss"] for event in run.evaluations if isinstance(event.get("eval_loss"), float)][-1:]
    if not losses:
        losses = [event["loss"] for event in run.train[-max(len(run.train) // 20, 1) :]]
    num_tokens = float(run.train[-1].get("num_tokens") or 0)
    if not num_tokens:
        raise DataError(Problem(str(folder), "does not say how many tokens it was trained on", "train it again"))
    number = size.total if counts_embeddings else size.non_embedding
    return Run(float(number), num_tokens, sum(losses) / len(losses))


def _tell_fit(options: argparse.Namespace) -> Iterator[Row]:
    runs = [read_scaling_run(folder, counts_embeddings=not options.no_count_embeddings) for folder in options.runs]
    fit = fit_law(runs, NUM_RESAMPLES if options.resamples is None else options.resamples)
    replace_record(options.output, dataclasses.asdict(fit) | {"runs": [run._asdict() for run in runs]})
    yield "runs", f"{len(runs)}, up to {fit.max_flops:.3g} operations, parameters {_say_count(options)}"
    for field in dataclasses.fields(Law):
        yield field.name.replace("_", " "), _say(fit, operator.attrgetter(field.name))
    worst = max(abs(fit.law.compute_loss(*run[:2]) / run.loss - 1) for run in runs)
    yield "fit", f"at most {worst:.2%} off the loss of a run"
    try:
        exponent, minima = fit_isoflops(runs)
        yield "IsoFLOP", f"N ~ C^{exponent:.3f} by the minima of {len(minima)} budgets"
    except DataError:
        yield "IsoFLOP", "needs three sizes at each of two budgets"
    yield "kept in", str(options.output)


def _say_count(options: argparse.Namespace) -> str:
    return "without embeddings" if options.no_count_embeddings else "with embeddings"


def _tell_plan(options: argparse.Namespace) -> Iterator[Row]:
    yield "operations", f"{options.flops:.3g}"
    for name, fit in _list_fits(options.fit, options.flops):
        best = fit.law.find_optimum(options.flops)
        yield name, ""
        yield "  parameters", _say(fit, lambda law: law.find_optimum(options.flops).num_parameters)
        yield "  tokens", _say(fit, lambda law: law.find_optimum(options.flops).num_tokens)
        yield "", f"{best.num_tokens / best.num_parameters:.1f} a parameter"
        yield "  loss", _say(fit, lambda law: law.find_optimum(options.flops).loss)
        half = best.num_parameters / 2
        tokens = fit.law.find_overtrained(best.loss, half)
        yield "  half the size", f"{half:.4g} parameters reach it with {tokens:.4g} tokens"
    size = (options.flops / FLOPS_PER_TOKEN / TOKENS_PER_PARAMETER) ** 0.5
    yield "20 a parameter", f"{size:.4g} parameters, {TOKENS_PER_PARAMETER * size:.4g} tokens"


def _tell_prediction(options: argparse.Namespace) -> Iterator[Row]:
    for name, fit in _list_fits(options.fit, FLOPS_PER_TOKEN * options.parameters * options.tokens):
        yield name, ""
        yield "  loss", _say(fit, lambda law: law.compute_loss(options.parameters, options.tokens))


def _list_fits(path: Path | None, num_flops: float) -> Iterator[tuple[str, Fit]]:
    """Yield the law of the file, or the published laws, which disagree.

    Raises:
        ConfigError: As ``Fit.verify_reach``, or the file is none of ``recipes scale fit``.
    """
    if path is None:
        yield from ((name, Fit(law, [], num_flops)) for name, law in PUBLISHED.items())
        return
    record = read_record(path, {"law": dict, "resampled": list, "max_flops": float})
    try:
        fit = Fit(Law(**record["law"]), [Law(**law) for law in record["resampled"]], record["max_flops"])
    except TypeError as error:
        raise ConfigError(
            Problem("--fit", f"{path} is not a scaling law: {error}", "write it by `recipes scale fit`")
        ) from error
    fit.verify_reach(num_flops)
    yield str(path), fit


def _say(fit: Fit, read: Callable[[Law], Any]) -> str:
    interval = fit.compute_interval(read)
    told = f" (90 %: {interval[0]:.4g} to {interval[1]:.4g})" if interval else ""
    return f"{read(fit.law):.4g}{told}"
