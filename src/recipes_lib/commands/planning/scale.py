"""``recipes scale``: write small runs, fit scaling laws of loss by parameters and tokens, and predict larger runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from transformers import AutoConfig

from recipes_lib.commands.planning.planned_hardware import Row, format_rows
from recipes_lib.commands.reproduce import restore_keys
from recipes_lib.config.loader import check_text, load_config
from recipes_lib.config.schema import RecipeConfig, flatten_config
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import read_record, replace_record, replace_text
from recipes_lib.models.loading import explained
from recipes_lib.planning.compute import TOKENS_PER_PARAMETER, compute_model_size, find_planned_model
from recipes_lib.planning.pretraining import plan_pretraining
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

PIPELINE_FILE: Final = "pipeline.yaml"
FEWEST: Final = 3
"""Sizes, and lengths of each, that determine a law."""
_HEAD: Final = 64
_WARMUP: Final = 0.05


def run(options: argparse.Namespace) -> None:
    """Run the command, by options from ``flags.scale``.

    Raises:
        ConfigError: A flag is wrong, or a law without an interval is asked about runs far beyond its own.
        DataError: The runs cannot be read, or determine no law.
    """
    for name in ("flops", "parameters", "tokens"):
        if not 0 < getattr(options, name, 1.0) < float("inf"):
            raise ConfigError(Problem(f"--{name}", f"is {getattr(options, name):g}", "write a finite number above 0"))
    tellers = {"sweep": _tell_sweep, "fit": _tell_fit, "plan": _tell_plan, "predict": _tell_prediction}
    tell = tellers[options.command]
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


def _tell_sweep(options: argparse.Namespace) -> Iterator[Row]:
    """Write a configuration for each depth and ratio, and a pipeline that trains them and fits the law.

    Raises:
        ConfigError: The recipe is wrong, its architecture has other names than Llama's, the runs determine no law, or a
            schedule does not fit the shortest of them.
    """
    base = load_config("pretrain", ["--config", str(options.config)])
    depths, ratios = sorted(set(options.depths)), sorted(set(options.ratios))
    problems = list(_find_sweep_problems(base, depths, ratios))
    if problems:
        raise ConfigError(*problems)
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    stages, total = dict[str, Any](), 0.0
    for depth in depths:
        for ratio in ratios:
            name = f"depth{depth}-x{ratio}"
            path = folder / f"{name}.yaml"
            keys, size = _size_run(base, depth, ratio, folder / "runs" / name)
            text = yaml.safe_dump(keys, sort_keys=False)
            plan_pretraining(check_text("pretrain", text, path), 1)
            replace_text(path, text)
            stages[name] = {"recipe": "pretrain", "config": f"${{here}}/{path.name}"}
            total += FLOPS_PER_TOKEN * size * keys["max_tokens"]
            yield name, f"{size:,} parameters, {keys['max_tokens']:,} tokens, learning rate {keys['learning_rate']:g}"
    law = "${output_dir}/scaling.json"
    runs = " ".join(f"${{{name}.output}}" for name in stages)
    stages["law"] = {"command": f"scale fit {runs} --output {law}", "output": law}
    pipeline = {"output_dir": str(folder / "runs"), "stages": stages}
    replace_text(folder / PIPELINE_FILE, yaml.safe_dump(pipeline, sort_keys=False))
    yield "operations", f"{total:.3g} in all"
    yield "next", f"recipes run {folder / PIPELINE_FILE}"


def _find_sweep_problems(base: RecipeConfig, depths: Sequence[int], ratios: Sequence[int]) -> Iterator[Problem]:
    for flag, values in (("--depths", depths), ("--ratios", ratios)):
        if len(values) < FEWEST or min(values) < 1:
            yield Problem(flag, f"a law needs {FEWEST} or more, each 1 or more", f"write {FEWEST} different numbers")
    if "hidden_size" not in (base.model.model_config or {}):
        yield Problem(
            "model_config", "has no `hidden_size`", "write the architecture of a Llama, whose sizes are swept"
        )


def _size_run(base: RecipeConfig, depth: int, ratio: int, output: Path) -> tuple[dict[str, Any], int]:
    """Return the keys of a run of a sweep, and its parameters.

    The width is 64 a layer, in heads of 64, with an MLP of 8/3 of it, so that one number sizes a model. The rate is
    ``0.3118 C^-0.125``, of AdamW. Source: Bi et al. 2024 (DeepSeek LLM), equation 1, fitted from 1e17 operations on.
    """
    assert base.model.model_config is not None
    record = {"stage": "pretrain", "config": flatten_config(base), "provenance": base.provenance}
    keys, _ = restore_keys(json.loads(json.dumps(record, default=str)))
    sizes = {
        "hidden_size": _HEAD * depth,
        "intermediate_size": _HEAD * math.ceil(depth * 8 / 3),
        "num_hidden_layers": depth,
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), depth),
        "head_dim": _HEAD,
    }
    architecture = {**base.model.model_config, **sizes}
    size = compute_model_size(
        find_planned_model(dataclasses.replace(base, model=dataclasses.replace(base.model, model_config=architecture)))
    ).total
    keys = {key: value for key, value in keys.items() if key not in ("max_steps", "num_train_epochs")}
    rate = 0.3118 * (FLOPS_PER_TOKEN * size * ratio * size) ** -0.125
    return keys | {
        "model_config": architecture,
        "max_tokens": ratio * size,
        "learning_rate": float(f"{rate:.3g}"),
        # A number of steps is that of another length.
        "warmup_steps": keys["warmup_steps"] if 0 < keys.get("warmup_steps", 1) < 1 else _WARMUP,
        "output_dir": str(output),
        # The tokens are the same ones.
        "prepared_dir": base.tokens.prepared_dir or str(output.parent.parent / "prepared"),
    }, size


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
