"""The ``recipes`` command: its subcommands, imported on demand."""

from __future__ import annotations

import sys

# Ctrl-C before ``run_command`` can report it: most of the time of `recipes --help` is spent here.
try:
    import importlib
    from collections.abc import Sequence
    from pathlib import Path
    from typing import NamedTuple

    from recipes_lib import __version__
    from recipes_lib.boundary import find_output_failure, refuse_access_tokens, run_command
    from recipes_lib.errors import EXIT_DONE, EXIT_USER, ConfigError, Problem, suggest
except KeyboardInterrupt:
    sys.exit(130)

EXIT_PIPE_CLOSED = 141
"""Exit code when the reader of a pipe has closed it (128 + SIGPIPE), as in ``recipes preview ... | head``."""


class Command(NamedTuple):
    """A subcommand: its function as ``.module:function``, relative to ``commands``, and its help text.

    The function takes the remaining arguments.
    """

    target: str
    summary: str


COMMANDS = {
    "check": Command(".check:main", "find every problem of a run on a CPU, before it starts"),
    "clean": Command(".clean:main", "make a clean corpus from raw text, like recipes/corpus.py"),
    "classifier": Command(".clean:main_classifier", "train or evaluate a text classifier, for recipes clean"),
    "eval": Command(".evaluate:main", "benchmark a model; `eval compare` models, `eval watch` a run's checkpoints"),
    "score": Command(".score:main", "loss and bits per byte of every row of a dataset under a model"),
    "demo": Command(".run_pipeline:demo", "train a small assistant on Python docstrings, on a CPU, in minutes"),
    "launch": Command(".launch:main", "run a recipe on one CPU, one GPU, one machine or many"),
    "run": Command(".run_pipeline:main", "run a pipeline of stages from one YAML file"),
    "job": Command(".job:main", "write the job file of a run for a cluster or a cloud"),
    "preview": Command(".prepare:preview", "show what the model will be trained on, token by token"),
    "prepare": Command(".prepare:prepare", "tokenise, mask and pack once; training then tokenises nothing"),
    "distill-store": Command(".generated.distill_store:main", "store a teacher's top-k log-probabilities for all rows"),
    "student": Command(".weights:main_student", "initialise a student from layers of its teacher"),
    "synthesize": Command(".generated.synthesize:main", "generate training rows with a model, filter and grade them"),
    "tokenizer": Command(".tokenizer:main", "train a tokenizer on any data, and measure its compression"),
    "plan": Command(".planning.flags:plan", "estimate parameters, memory, time and cost of a run"),
    "scale": Command(".planning.flags:scale", "fit scaling laws to runs, and plan or predict larger ones"),
    "sample-pairs": Command(
        ".sampling:main_pairs", "make preference pairs from a policy's own answers, ranked by rewards"
    ),
    "fisher": Command(
        "..training.forgetting.fisher_command:main", "diagonal Fisher information of a run's model on its data"
    ),
    "merge": Command(".weights:main_merge", "merge an adapter into its base model"),
    "export": Command(".weights:main_export", "convert a checkpoint to a model folder that any tool loads"),
    "publish": Command("..publish.publishing:main", "push a model or checkpoints to the Hub; skips what is there"),
    "reproduce": Command(".reproduce:main", "restore a published run, and report the differences"),
    "report": Command(".prepare:report", "write report.html of a run, or compare several"),
    "runs": Command("..report.overview:main", "list the runs below a folder: status, step, loss, age"),
    "prove": Command(".prove:main", "compare results, speed and memory of this machine with reference values"),
    "doctor": Command(".doctor:main", "show what this machine supports, and how to install the rest"),
    "completion": Command(".completion:main", "print the completion script of a shell"),
}
GROUPS = {
    "before a run": ("doctor", "check", "preview", "plan", "scale", "prove"),
    "data": ("clean", "classifier", "tokenizer", "prepare", "score", "sample-pairs", "synthesize"),
    "run": ("demo", "launch", "run", "job"),
    "results": ("runs", "report", "eval", "publish", "reproduce"),
    "models": ("merge", "export", "fisher"),
    "distillation": ("student", "distill-store"),
    "shell": ("completion",),
}
"""Heading in ``recipes --help`` -> its commands."""
RECIPES = ("pretrain", "sft", "lora", "reward", "dpo", "ppo", "rloo", "grpo", "distill")
TAKE_RECIPE = ("check", "launch", "prepare", "preview", "plan", "fisher", "job")
"""Commands with ``--recipe`` and ``--config``, both of which may be written without the flag's name."""
SERVING = ("chat", "serve", "generate", "infer", "inference", "deploy")
"""Commands of other programs for what engines do."""
EXAMPLES = (
    "recipes check --config recipes/configs/qwen3-0.6b/sft.yaml",
    "recipes launch --config recipes/configs/qwen3-0.6b/sft.yaml --learning_rate 1e-5",
    "recipes run recipes/pipelines/zephyr.yaml --check",
)


def format_help() -> str:
    """Return the text of ``recipes --help``."""
    lines = ["usage: recipes COMMAND [OPTION ...]"]
    for heading, names in GROUPS.items():
        lines += ["", heading, *(f"  {name:15}{COMMANDS[name].summary}" for name in names)]
    lines += ["", "examples", *(f"  {example}" for example in EXAMPLES)]
    lines += ["", "`recipes COMMAND --help` lists the options of a command; `recipes --version` names the version."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``recipes`` with ``arguments`` (default: ``sys.argv[1:]``) and return the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        return run_command(lambda: _print(format_help()))
    if name in ("-V", "--version"):
        return run_command(lambda: _print(f"recipes {__version__}\n"))
    if name in RECIPES or name == "train":  # The commands of TRL and axolotl.
        name, rest = "launch", [*([name] if name in RECIPES else []), *rest]
    if name not in COMMANDS:
        sys.stderr.write(_describe_unknown(name))
        return EXIT_USER
    return run_command(lambda: _run(COMMANDS[name], spell_flags(_name_leading(rest) if name in TAKE_RECIPE else rest)))


def _describe_unknown(name: str) -> str:
    if not name:
        return format_help()
    remedy = suggest(name, COMMANDS, f"the commands are: {', '.join(COMMANDS)}", "`recipes {}`")
    if name in SERVING:
        remedy = "vLLM, TGI, llama.cpp and transformers load the model of a run: docs/serving.md"
    return f"recipes: there is no command {name!r}\n    {remedy}\n"


def _name_leading(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which a leading recipe and a leading YAML file have the names of their flags."""
    # Any plain word, so that a misspelt recipe is reported as one.
    recipe = [f"--recipe={word}" for word in arguments[:1] if word.isalpha()]
    rest = arguments[len(recipe) :]
    file = [f"--config={word}" for word in rest[:1] if word.endswith((".yaml", ".yml")) and word[0] != "-"]
    return [*recipe, *file, *rest[len(file) :]]


def spell_flags(arguments: Sequence[str]) -> list[str]:
    """Return arguments with flags in one spelling: ``--dry-run`` is ``--dry_run``, as for keys of recipes.

    Raises:
        ConfigError: ``--config`` is repeated: argparse would silently use the last one.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parts = [word.partition("=") for word in arguments[:end]]
    flags = [f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name for name, _, _ in parts]
    if flags.count("--config") > 1:
        raise ConfigError(Problem("--config", "is repeated", "keep one of the two"))
    return [*(flag + equals + text for flag, (_, equals, text) in zip(flags, parts, strict=True)), *arguments[end:]]


def _print(text: str) -> int | None:
    sys.stdout.write(text)
    return _verify_output(EXIT_DONE)


def _run(command: Command, arguments: list[str]) -> int | None:
    refuse_access_tokens(arguments)
    try:
        Path.cwd()
    except FileNotFoundError as error:  # Relative paths, and libraries such as MKL, need it.
        raise ConfigError(Problem("working directory", "was deleted", "change to another one")) from error
    module, _, function = command.target.partition(":")
    return _verify_output(getattr(importlib.import_module(module, f"{__package__}.commands"), function)(arguments))


def _verify_output(code: int | None) -> int | None:
    """Return the exit code of a command: ``code`` if its standard output was written.

    Raises:
        ConfigError: The output cannot be written.
    """
    failure = find_output_failure()
    if isinstance(failure, BrokenPipeError):
        return EXIT_PIPE_CLOSED
    # The output of a recipe is progress and may be lost; that of a command is its result.
    if failure is not None:
        found = f"cannot be written: {failure.strerror}"
        raise ConfigError(Problem("standard output", found, "redirect it elsewhere"))
    return code


if __name__ == "__main__":  # `python -m recipes_lib.cli`: a pipeline starts its stages with its own interpreter.
    sys.exit(main())
