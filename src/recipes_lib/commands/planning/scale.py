"""``recipes scale``: write small runs, fit scaling laws of loss in parameters and tokens, and predict larger runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import operator
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from transformers import AutoConfig

from recipes_lib.commands.planning.planned_hardware import Row, print_rows
from recipes_lib.commands.reproduce import restore_keys
from recipes_lib.config.loader import check_text, load_config
from recipes_lib.config.schema import RecipeConfig, flatten_config
from recipes_lib.errors import ConfigError, DataError, Problem, UserError, raise_problems, reported_at
from recipes_lib.files import explain_write_errors, read_record, replace_record, replace_text
from recipes_lib.models.loading import explained
from recipes_lib.planning import compute, scaling
from recipes_lib.planning.devices import TORCHTITAN, Kind, choose_device
from recipes_lib.planning.scaling import FEWEST, Fit, Law, Run
from recipes_lib.planning.schedule import count_run_tokens, plan_pretraining
from recipes_lib.report.run_files import MAX_FINITE, read_curve, read_number, read_run

PIPELINE_FILE: Final = "pipeline.yaml"
_WARMUP: Final = 0.05
"""Default warm-up, as a share of the steps."""
_POOR_FIT: Final = 0.02
"""Relative error of a loss above which a fit is reported as poor; seeds differ by less."""
_DECAYED: Final = 0.5
"""Largest learning rate at the end of a run, as a share of its peak, with which its loss is one of a completed run."""
_LEAST_EXPONENT: Final = 0.01
"""Exponent below which a law does not depend on its variable."""
_DECAY: Final = "write an lr_scheduler_type that decays to the end, such as cosine"
_SHOWN_SHARES: Final = (0.1, 0.25, 0.5, 0.75)
"""Shares of the steps of an expected curve that are shown."""
_REFIT: Final = "write it by `recipes scale fit`"
_TARGET: Final = "target"
"""Name of the stage and of the file of the run that is predicted."""


def run(options: argparse.Namespace) -> None:
    """Run the command.

    Args:
        options: Flags, from ``flags.scale``.

    Raises:
        ConfigError: A flag is wrong, a file is no law, or a law without an interval would be extrapolated too far.
        DataError: Runs cannot be read, or do not determine a law.
    """
    commands = {"sweep": _write_sweep, "fit": _fit_runs, "plan": _plan_budget, "predict": _predict_run}
    print_rows(commands[options.command](options))


def read_scaling_run(folder: Path, *, counts_embeddings: bool = True) -> Run:
    """Return parameters, tokens and held-out loss of a run; without evaluations, the mean of its last 5 % of losses.

    Args:
        folder: Output directory of a pretraining run.
        counts_embeddings: Whether embeddings count as parameters.

    Raises:
        ConfigError: The configuration of the model cannot be read.
        DataError: The folder is not a finished pretraining run, its learning rate has not decayed, or it has no finite
            loss at its end.
    """
    run = read_run(folder)
    if (stage := run.facts.get("stage", "pretrain")) != "pretrain":
        raise DataError(Problem(str(folder), f"is a run of {stage}", "name runs of pretraining"))
    if not run.train or run.facts.get("status") != "done":
        remedy = "train it to the end: its learning rate must have decayed"
        raise DataError(Problem(str(folder), "is not a finished run", remedy))
    rates = [rate for _, rate in read_curve(run.train, "learning_rate")]
    if rates and rates[-1] > _DECAYED * max(rates):
        found = f"its learning rate ends at {rates[-1]:.3g} of {max(rates):.3g}: a decay would lower the loss further"
        raise DataError(Problem(str(folder), found, _DECAY))
    with reported_at(str(folder)), explained("runs", str(folder)):
        size = compute.compute_model_size(AutoConfig.from_pretrained(folder))
    if run.evaluations and (step := run.evaluations[-1]["step"]) < (last := run.train[-1]["step"]):
        found = f"its last held-out loss is that of step {step:,} of {last:,}"
        raise DataError(Problem(str(folder), found, "train it again, without `load_best_model_at_end`"))
    # Not an earlier evaluation if the last one is NaN.
    loss = read_number(run.evaluations[-1], "eval_loss") if run.evaluations else None
    if loss is None:
        last = read_curve(run.train[-max(len(run.train) // 20, 1) :], "loss")
        loss = statistics.fmean([value for _, value in last] or [math.nan])
    if not 0 < loss < MAX_FINITE:
        found = "metrics.jsonl has no finite loss at the end of the run"
        raise DataError(Problem(str(folder), found, "train it again"))
    num_tokens = read_number(run.train[-1], "num_tokens") or 0.0
    if not 0 < num_tokens < math.inf:
        raise DataError(Problem(str(folder), "has no `num_tokens` in metrics.jsonl", "train it again"))
    number = size.total if counts_embeddings else size.non_embedding
    return Run(float(number), num_tokens, loss)


def _read_tokenizer(folder: Path) -> object:
    """Return what determines the tokens of a text; of a run without ``tokenizer.json``, the size of its vocabulary.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return read_record(folder / "config.json").get("vocab_size")
    record = read_record(path)
    return [record.get(name) for name in ("normalizer", "pre_tokenizer", "model")]


def _write_sweep(options: argparse.Namespace) -> Iterator[Row]:
    """Write a configuration for each depth and ratio, and a pipeline that trains them and fits the law.

    With a target, the pipeline then predicts its loss, trains it, and compares both.

    Raises:
        ConfigError: The configuration is invalid, its architecture has other keys than a Llama, there are too few runs
            for a law, or a schedule does not decay, or is longer than the shortest run.
    """
    base = load_config("pretrain", ["--config", str(options.config)])
    depths, ratios = sorted(set(options.depths)), sorted(set(options.ratios))
    raise_problems(_find_sweep_problems(base, options), "recipes scale sweep", ConfigError)
    folder: Path = options.output
    with explain_write_errors(folder, "name another --output"):
        folder.mkdir(parents=True, exist_ok=True)
    sizes = {f"depth{depth}-x{ratio}": (depth, ratio) for depth in depths for ratio in ratios}
    if options.target:
        sizes[_TARGET] = tuple(options.target)
    stages, flops = dict[str, Any](), dict[str, float]()
    for name, (depth, ratio) in sizes.items():
        path = folder / f"{name}.yaml"
        keys, size = _size_run(base, depth, ratio, options.head_dim, folder / "runs" / name)
        text = yaml.safe_dump(keys, sort_keys=False)
        schedule = plan_pretraining(check_text("pretrain", text, path), 1).schedule
        if schedule(schedule.num_steps - 1) > _DECAYED:
            raise ConfigError(Problem(str(options.config), "the learning rate does not decay", _DECAY))
        replace_text(path, text)
        stages[name] = {"recipe": "pretrain", "config": f"${{here}}/{path.name}"}
        flops[name] = compute.compute_training_flops(size, keys["max_tokens"])
        yield name, f"{size:,} parameters, {keys['max_tokens']:,} tokens, learning rate {keys['learning_rate']:g}"
    largest = max(value for name, value in flops.items() if name != _TARGET)
    law = "${output_dir}/scaling.json"
    runs = " ".join(f"${{{name}.output}}" for name in stages if name != _TARGET)
    target = stages.pop(_TARGET, None)
    stages["law"] = {"command": f"scale fit {runs} --output {law}", "output": law}
    if target:
        yield "", f"{flops[_TARGET] / largest:.1f} times the operations of the largest run of the fit"
        before, after = (f"${{output_dir}}/{name}.json" for name in ("predicted", "compared"))
        fitted = "--fit ${law.output}"
        command = f"scale predict --config ${{here}}/{_TARGET}.yaml {fitted} --output {before}"
        stages["predicted"] = {"command": command, "output": before}
        stages[_TARGET] = target | {"set": {"expected_curve": "${predicted.output}"}}
        run = f"${{{_TARGET}.output}}"
        stages["compared"] = {"command": f"scale predict --run {run} {fitted} --output {after}", "output": after}
    pipeline = {"output_dir": str(folder / "runs"), "stages": stages}
    replace_text(folder / PIPELINE_FILE, yaml.safe_dump(pipeline, sort_keys=False))
    yield "operations", f"{sum(flops.values()):.3g} in all"
    yield "next", f"recipes run {shlex.quote(str(folder / PIPELINE_FILE))}"


def _find_sweep_problems(base: RecipeConfig, options: argparse.Namespace) -> Iterator[Problem]:
    for flag, values in (("--depths", options.depths), ("--ratios", options.ratios)):
        if len(set(values)) < FEWEST or min(values) < 1:
            yield Problem(flag, f"a law needs {FEWEST} different numbers, each 1 or more", f"write {FEWEST} or more")
    if options.head_dim < 2 or options.head_dim % 2:
        yield Problem("--head_dim", f"is {options.head_dim}; rotary embeddings need an even number", "write 64")
    if min(options.target or [1]) < 1:
        yield Problem("--target", "depth and ratio must be 1 or more", "write --target 12 20")
    if "hidden_size" not in (base.model.model_config or {}):
        yield Problem("model_config", "has no `hidden_size`", "write the architecture of a Llama")


def _size_run(base: RecipeConfig, depth: int, ratio: int, head: int, output: Path) -> tuple[dict[str, Any], int]:
    """Return the keys of a run of a sweep, and its number of parameters.

    The depth determines all sizes: as many heads as layers, and an MLP of 8/3 of the width. The learning rate is
    that of ``suggest_rate``.
    """
    assert base.model.model_config is not None
    record = {"stage": "pretrain", "config": flatten_config(base), "provenance": base.provenance}
    keys, _ = restore_keys(json.loads(json.dumps(record, default=str)))
    sizes = {
        "hidden_size": head * depth,
        "intermediate_size": head * math.ceil(depth * 8 / 3),
        "num_hidden_layers": depth,
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), depth),
        "head_dim": head,
    }
    architecture = {**base.model.model_config, **sizes}
    sized = dataclasses.replace(base, model=dataclasses.replace(base.model, model_config=architecture))
    size = compute.compute_model_size(compute.find_planned_model(sized)).total
    keys = {key: value for key, value in keys.items() if key not in ("max_steps", "num_train_epochs")}
    rate = scaling.suggest_rate(compute.compute_training_flops(size, ratio * size))
    return keys | {
        "model_config": architecture,
        "max_tokens": ratio * size,
        "learning_rate": float(f"{rate:.3g}"),
        # A share is kept; an absolute number of steps is for the length of the given run.
        "warmup_steps": keys["warmup_steps"] if 0 < keys.get("warmup_steps", 1) < 1 else _WARMUP,
        "output_dir": str(output),
        # Shared: all runs read the same tokens.
        "prepared_dir": base.tokens.prepared_dir or str(output.parent.parent / "prepared"),
    }, size


def _fit_runs(options: argparse.Namespace) -> Iterator[Row]:
    runs, problems, read = list[Run](), list[Problem](), dict[Path, object]()
    # A run counts once, also if it is named twice, as by a pattern and by its name.
    folders = list({folder.resolve(): folder for folder in options.runs}.values())
    for folder in folders:
        try:
            runs.append(read_scaling_run(folder, counts_embeddings=not options.no_count_embeddings))
            read[folder] = _read_tokenizer(folder)
        except UserError as error:
            problems += error.problems
            continue
        first, tokenizer = next(iter(read.items()))
        if read[folder] != tokenizer:
            found = f"has another tokenizer than {first}: their losses per token cannot be compared"
            problems.append(Problem(str(folder), found, "name runs with the same tokenizer"))
    if problems:
        raise DataError(*problems)
    curves, metric = _read_curves(folders)
    fit = scaling.fit_law(runs)
    fit = dataclasses.replace(fit, curve=scaling.fit_curve(fit.law, runs, curves, metric))
    record = {"counts_embeddings": not options.no_count_embeddings, "runs": [run._asdict() for run in runs]}
    _write_record(options.output, dataclasses.asdict(fit) | record)
    embeddings = "without embeddings" if options.no_count_embeddings else "with embeddings"
    yield "runs", f"{len(runs)}, up to {fit.max_flops:.3g} operations, parameters {embeddings}"
    for field in dataclasses.fields(Law):
        yield field.name.replace("_", " "), _format(fit, operator.attrgetter(field.name))
    worst = max(abs(fit.law.compute_loss(*run[:2]) / run.loss - 1) for run in runs)
    yield "fit", f"losses of the runs within {worst:.2%}"
    if worst > _POOR_FIT or min(fit.law.size_exponent, fit.law.token_exponent) < _LEAST_EXPONENT:
        yield "warning", "poor fit: try lower learning rates, longer runs, and several seeds of each"
    try:
        exponent, minima = scaling.fit_isoflops(runs)
        yield "IsoFLOP", f"N ~ C^{exponent:.3f} by the minima of {len(minima)} budgets"
    except DataError as error:
        yield "IsoFLOP", error.problems[0].found
    scale, exponent = scaling.fit_power(runs)
    yield "power law", f"L = ({scale:.3g} / N)^{exponent:.3f} by the longest run of each size"
    yield "written to", str(options.output)


def _read_curves(folders: Sequence[Path]) -> tuple[list[list[tuple[float, float]]], str]:
    """Return share of the steps and loss of each run, and the metric: held-out losses if the runs have them.

    Raises:
        DataError: Some runs have held-out losses, and others none.
    """
    read = [read_run(folder) for folder in folders]
    without = [str(folder) for folder, run in zip(folders, read, strict=True) if not run.evaluations]
    if 0 < len(without) < len(read):
        found = "has no held-out losses, and other runs have: they are not comparable with training losses"
        raise DataError(*(Problem(folder, found, "name runs that are all evaluated, or none") for folder in without))
    metric = "loss" if without else "eval_loss"
    curves = []
    for run in read:
        points = read_curve(run.evaluations if metric == "eval_loss" else run.train, metric)
        # Without the one of step 0: no line from there to the next evaluation is near the curve.
        curves.append([(step / run.train[-1]["step"], loss) for step, loss in points if step])
    return curves, metric


def _plan_budget(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the optimum for FLOPs or a budget of money, also for repeated data, with learning rate and batch.

    Raises:
        ConfigError: Both or neither are given, the GPU is unknown or the price missing; or as ``_list_fits`` and
            ``_describe_reach``.
    """
    flops = options.flops
    if flops is None:
        flops, source = _buy_flops(options)
        yield "budget", source
    yield "operations", f"{flops:.3g}"
    for name, fit in _list_fits(options.fit):
        best = fit.law.find_optimum(flops)
        yield name, ""
        yield from _describe_reach(fit, flops)
        if math.isnan(best.loss):
            yield "", "no optimum: its loss depends on only one of parameters and tokens"
            continue
        yield "  parameters", _format(fit, lambda law: law.find_optimum(flops).num_parameters)
        yield "  tokens", _format(fit, lambda law: law.find_optimum(flops).num_tokens)
        yield "", f"{best.num_tokens / best.num_parameters:.1f} per parameter"
        yield "  loss", _format(fit, lambda law: law.find_optimum(flops).loss)
        half = best.num_parameters / 2
        tokens = fit.law.find_overtrained(best.loss, half)
        yield "  half the size", f"{half:.4g} parameters reach it with {tokens:.4g} tokens"
        if options.unique_tokens:
            best, worth = fit.law.find_repeated_optimum(flops, options.unique_tokens)
            epochs = max(best.num_tokens / options.unique_tokens, 1.0)
            yield "  repeated data", f"{best.num_parameters:.4g} parameters, {best.num_tokens:.4g} tokens"
            yield "", f"{epochs:.3g} epochs, worth {worth:.4g} tokens of new data; loss {best.loss:.4g}"
    size = (flops / compute.FLOPS_PER_TOKEN / compute.TOKENS_PER_PARAMETER) ** 0.5
    yield "20 per param.", f"{size:.4g} parameters, {compute.TOKENS_PER_PARAMETER * size:.4g} tokens"
    rate, batch = scaling.suggest_rate(flops), scaling.suggest_batch(flops)
    yield "AdamW", f"learning rate {rate:.2g}, batch of {batch:.2g} tokens, by the laws of DeepSeek LLM (1e17 FLOPs on)"


def _buy_flops(options: argparse.Namespace) -> tuple[float, str]:
    """Return the FLOPs of ``--budget`` on ``--gpu``, and how they are counted.

    Raises:
        ConfigError: A flag is missing, or the GPU or its peak is unknown.
    """
    if options.budget is None or options.gpu is None or not options.price_per_gpu_hour:
        remedy = "write --flops 1e21, or --budget 500 --gpu H100 --price_per_gpu_hour 2.5"
        raise ConfigError(Problem("recipes scale plan", "neither FLOPs nor budget, GPU and price are given", remedy))
    device = choose_device(options.gpu)
    if not device.flops:
        raise ConfigError(Problem("--gpu", f"the peak of {device.name!r} is not known", "write a name such as H100"))
    mfu = options.mfu or Kind(compiles=True, uses_adapter=False).published
    hours = options.budget / options.price_per_gpu_hour
    text = f"{hours:,.1f} GPU hours of {device.name}, {device.flops:.3g} FLOP/s at {mfu:.0%} MFU"
    return hours * 3600 * device.flops * mfu, text + ("" if options.mfu else f" (compiled, {TORCHTITAN})")


def _predict_run(options: argparse.Namespace) -> Iterator[Row]:
    """Predict the loss of a run; with ``--run``, compare it with the measured one.

    Raises:
        ConfigError: No flag describes the run, or as ``_list_fits`` and ``_describe_reach``.
    """
    counts = True if options.fit is None else read_record(options.fit, remedy=_REFIT).get("counts_embeddings", True)
    if options.run:
        run = read_scaling_run(options.run, counts_embeddings=counts)
    elif options.config:
        run = _size_config(options.config, counts_embeddings=counts)
    elif options.parameters:
        run = Run(options.parameters, options.tokens, math.nan)
    else:
        remedy = "write --parameters and --tokens, --config or --run"
        raise ConfigError(Problem("recipes scale predict", "no flag describes the run", remedy))
    yield "run", f"{run.num_parameters:,.0f} parameters, {run.num_tokens:,.0f} tokens, {run.num_flops:.3g} operations"
    for name, fit in _list_fits(options.fit):
        loss = fit.law.compute_loss(*run[:2])
        interval = fit.compute_interval(lambda law: law.compute_loss(*run[:2]))
        record: dict[str, Any] = {"num_parameters": run.num_parameters, "num_tokens": run.num_tokens}
        record |= {"predicted": loss, "interval": interval}
        yield name, ""
        yield "  loss", _format(fit, lambda law: law.compute_loss(*run[:2]))
        yield from _describe_reach(fit, run.num_flops)
        if curve := fit.predict_curve(run):
            record["curve"] = dataclasses.asdict(curve)
            for share, *values in zip(curve.shares, curve.losses, curve.low, curve.high, strict=True):
                if share in _SHOWN_SHARES:
                    yield f"  at {share:.0%}", "{:.4g} (band: {:.4g} to {:.4g})".format(*values)
        if options.run:
            record |= {"error": (error := loss / run.loss - 1), "measured": run.loss}
            place = "in" if interval and interval[0] <= run.loss <= interval[1] else "outside of"
            position = f", {place} the interval" if interval else ""
            yield "  measured", f"{run.loss:.4g}: error of the prediction {error:+.2%}{position}"
        if options.output:
            _write_record(options.output, record)
            yield "written to", str(options.output)


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    with explain_write_errors(path, "name another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_record(path, record)


def _size_config(path: Path, *, counts_embeddings: bool) -> Run:
    """Return parameters and tokens of a run that is not trained yet, with NaN as its loss.

    Raises:
        ConfigError: The configuration is invalid, or the length of the run is in epochs.
    """
    config = load_config("pretrain", ["--config", str(path)])
    # Not by steps where the tokens are given: in steps of one process, a long run has too many to be planned.
    num_tokens = config.pretraining.max_tokens or count_run_tokens(config, 1)
    if num_tokens is None:
        remedy = "write `max_tokens: ...` or `max_steps: ...`"
        raise ConfigError(Problem(str(path), "the length of the run is in epochs", remedy))
    size = compute.compute_model_size(compute.find_planned_model(config))
    return Run(float(size.total if counts_embeddings else size.non_embedding), float(num_tokens), math.nan)


def _list_fits(path: Path | None) -> Iterator[tuple[str, Fit]]:
    """Yield the law in a file, or the published laws, which disagree, with their names.

    Raises:
        ConfigError: The law in the file is invalid.
        DataError: The file is not one of ``recipes scale fit``.
    """
    if path is None:
        yield from ((name, Fit(law, [], math.inf)) for name, law in scaling.PUBLISHED.items())
        return
    record = read_record(path, {"law": dict, "resampled": list, "max_flops": float}, remedy=_REFIT)

    def build(values: Mapping[str, Any]) -> Law:
        # Non-finite values are stored as strings.
        return Law(**{name: float(value) for name, value in values.items()})

    try:
        laws = [build(law) for law in record["resampled"]]
        fit = Fit(build(record["law"]), laws, record["max_flops"], record.get("curve"))
        fit.predict_curve(Run(*[fit.max_flops] * 3))  # Verifies curve and FLOPs: logarithms of 0 and below are errors.
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"{path} is not a scaling law: {error}"
        raise ConfigError(Problem("--fit", found, _REFIT)) from error
    yield str(path), fit


def _describe_reach(fit: Fit, num_flops: float) -> Iterator[Row]:
    """Yield a row for operations beyond those of the runs of a fit.

    Raises:
        ConfigError: They are more than ``MAX_EXTRAPOLATION`` times those of the largest run, and there is no interval.
    """
    if (times := num_flops / fit.max_flops) <= 1:
        return
    if times > scaling.MAX_EXTRAPOLATION and not fit.resampled:
        found = f"{num_flops:.3g} operations are {times:,.0f} times those of the largest run"
        raise ConfigError(Problem("fit", found, "fit it again by `recipes scale fit`, for an interval"))
    yield "  extrapolated", f"to {times:,.1f} times the operations of the largest run"


def _format(fit: Fit, read: Callable[[Law], Any]) -> str:
    """Return a quantity of a law with its interval, if the fit has one."""
    interval = fit.compute_interval(read)
    return f"{read(fit.law):.4g}" + (f" (90 %: {interval[0]:.4g} to {interval[1]:.4g})" if interval else "")
