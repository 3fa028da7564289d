"""Flags of ``recipes plan`` and ``recipes scale``, parsed before torch is imported, for a fast ``--help``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from recipes_lib.commands.clean import plan as plan_corpus
from recipes_lib.config.loader import add_recipe_flags, split_recipe
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.planning.failures import GPU_HOURS_BETWEEN_FAILURES
from recipes_lib.training.layouts.launch_environment import add_pipeline_flags

SCALING_FILE: Final = "scaling.json"
_PLAN: Final = (
    "GPU memory, time and schedule of a run, from its YAML alone; no data, weights or network. Pretraining: tokens, "
    "hours and learning-rate schedule. Fine-tuning: time of an optimizer step. RL: time of an iteration. All: memory."
)
_SCALE: Final = "Write small runs, fit scaling laws of loss in parameters and tokens, and predict larger runs."


def plan(argv: Sequence[str]) -> None:
    """Run ``recipes plan``.

    Raises:
        ConfigError: As ``recipes_lib.commands.planning.plan.run``.
    """
    recipe, rest = split_recipe(argv, (*RECIPE_NAMES, "corpus"))
    if recipe == "corpus":
        plan_corpus(rest)
        return
    options, overrides = _build_plan_parser().parse_known_args(argv)
    from recipes_lib.commands.planning.plan import run

    run(recipe, options, overrides)


def scale(argv: Sequence[str]) -> None:
    """Run ``recipes scale``.

    Raises:
        ConfigError: As ``recipes_lib.commands.planning.scale.run``.
        DataError: As there.
    """
    options = _build_scale_parser().parse_args(argv)
    from recipes_lib.commands.planning.scale import run

    run(options)


_COUNTS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SHARES: Final = {"": 1.0, "%": 0.01}
_HOURS: Final = {
    "": 1.0,
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 1 / 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 1.0),
    **dict.fromkeys(("d", "day", "days"), 24.0),
}
_CURRENCIES: Final = re.compile(r"[$€£]|usd|eur|gbp", re.IGNORECASE)
_QUANTITY: Final = re.compile(r"([+-]?(?=\.?\d)(?:\d{1,3}(?:,\d{3})+|\d*)\.?\d*(?:e[+-]?\d+)?)\s*([a-z%]*)")


def _read_quantity(text: str, units: Mapping[str, float]) -> float:
    """Return a number with an optional unit, such as ``1,000``, ``40%``, ``1.4T`` or ``2 days``, in the base unit."""
    found = _QUANTITY.fullmatch(text.strip().lower().replace("_", ""))
    if found is None or found[2] not in units:
        known = ", ".join(filter(None, units))
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, optionally with a unit: {known}")
    return float(found[1].replace(",", "")) * units[found[2]]


def _read_amount(text: str) -> float:
    """Return an amount of money, such as ``$500``, ``500 EUR`` or ``0.5k``; currencies are not converted."""
    return _read_quantity(_CURRENCIES.sub("", text), _COUNTS)


def _build_plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recipes plan", description=_PLAN, allow_abbrev=False)
    add_recipe_flags(parser)
    parser.add_argument("--num_processes", type=int, help="data-parallel processes (default: one per GPU)")
    parser.add_argument("--gpu", help="GPU for memory and time estimates, such as H100")
    parser.add_argument("--num_gpus", type=int, help="pretraining: number of GPUs (default: one per process)")
    count, share = partial(_read_quantity, units=_COUNTS), partial(_read_quantity, units=_SHARES)
    text = "packed rows of the training set, for the hours of fine-tuning"
    parser.add_argument("--num_rows", type=count, help=text)
    parser.add_argument("--mfu", type=share, help="model FLOPs utilisation, such as 40%% (default: published)")
    parser.add_argument("--proof", type=Path, help="folder of `recipes prove`, for the MFU measured on this GPU")
    text = "output directories of finished runs on this GPU, for their MFU"
    parser.add_argument("--calibrate", type=Path, nargs="+", metavar="RUN", help=text)
    parser.add_argument("--price_per_gpu_hour", type=_read_amount, help="default: `device_hour_price`")
    parser.add_argument("--pue", type=float, default=1.0, help="power usage effectiveness of the data centre (1)")
    parser.add_argument("--grid_gco2", type=float, help="grams of CO2 per kWh, for the emissions of the run")
    parser.add_argument("--schedule", type=Path, metavar="PNG", help="pretraining: plot learning rate and batch size")
    parser.add_argument("--hardware", help="launch file: name in accelerate_configs/, or path (default: several)")
    parser.add_argument("--explain", action="store_true", help="explain how each memory component is counted")
    parser.add_argument("--gpus", metavar="8xH100", help="search layout, micro-batch, checkpointing and compilation")
    parser.add_argument("--budget", type=_read_amount, help="search: maximum cost of the run, such as $500 or 0.5k")
    text = "search: maximum duration of the run, such as 12 (hours), 90min or 2days"
    parser.add_argument("--deadline", type=partial(_read_quantity, units=_HOURS), metavar="HOURS", help=text)
    text = "search: write launch file and keys of the best plan"
    parser.add_argument("--write", type=Path, metavar="FOLDER", help=text)
    text = "pretraining: seconds that a checkpoint blocks training; plans the save interval, and hours with failures"
    parser.add_argument("--save_seconds", type=float, help=text)
    text = "seconds from a failure to the next step (default: %(default)g)"
    parser.add_argument("--restart_seconds", type=float, default=300.0, help=text)
    text = "mean hours between failures of one GPU (default: %(default).0f, as for Llama 3); far fewer on spot machines"
    parser.add_argument("--failure_hours", type=float, default=GPU_HOURS_BETWEEN_FAILURES, help=text)
    add_pipeline_flags(parser)
    return parser


def _build_scale_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recipes scale", description=_SCALE, allow_abbrev=False)
    commands, count = parser.add_subparsers(dest="command", required=True), partial(_read_quantity, units=_COUNTS)
    text = "write small runs, and a pipeline that fits a law to them"
    sweep = commands.add_parser("sweep", help=text, allow_abbrev=False)
    text = "pretraining configuration: data, batch, schedule, vocabulary"
    sweep.add_argument("--config", type=Path, required=True, help=text)
    sweep.add_argument("--output", type=Path, required=True, help="folder of the configurations and the pipeline")
    text = "numbers of layers, which are also numbers of heads (default: 2 3 4 6)"
    sweep.add_argument("--depths", type=int, nargs="+", default=[2, 3, 4, 6], help=text)
    text = "tokens per parameter (default: 5 10 20 40)"
    sweep.add_argument("--ratios", type=int, nargs="+", default=[5, 10, 20, 40], help=text)
    sweep.add_argument("--head_dim", type=int, default=64, help="width of a head (default: %(default)s)")
    text = "a larger run, whose loss the pipeline predicts before training and compares after it"
    sweep.add_argument("--target", type=int, nargs=2, metavar=("DEPTH", "RATIO"), help=text)
    fit = commands.add_parser("fit", help="fit a law to finished runs", allow_abbrev=False)
    text = "output directories of finished pretraining runs with a decayed learning rate"
    fit.add_argument("runs", nargs="+", type=Path, help=text)
    text = "count parameters without embeddings, as Kaplan et al. (default: with them, as Hoffmann et al.)"
    fit.add_argument("--no_count_embeddings", action="store_true", help=text)
    fit.add_argument("--resamples", type=int, default=200, help="fits for the intervals (default: %(default)s)")
    fit.add_argument("--output", type=Path, default=Path(SCALING_FILE), help="file of the law (default: %(default)s)")
    best = commands.add_parser("plan", help="optimal parameters and tokens for a compute budget", allow_abbrev=False)
    best.add_argument("--flops", type=count, required=True, help="compute budget in FLOPs, such as 1e21")
    predict = commands.add_parser("predict", help="predict the loss of a run", allow_abbrev=False)
    predict.add_argument(
        "--parameters", type=count, help="parameters, such as 7B, as the law counts them; with --tokens"
    )
    predict.add_argument("--tokens", type=count, help="training tokens, such as 1.4T")
    text = "pretraining configuration, instead of both"
    predict.add_argument("--config", type=Path, help=text)
    predict.add_argument("--run", type=Path, help="output directory of a finished run, whose loss is compared")
    predict.add_argument("--output", type=Path, help="file of the prediction, as JSON")
    for command in (best, predict):
        command.add_argument("--fit", type=Path, help="law of `recipes scale fit` (default: published ones)")
    return parser
