"""The one place where an exception becomes an exit code; every command and every recipe runs inside it."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from recipes_lib import peers
from recipes_lib.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_USER,
    DivergedError,
    LostPeerError,
    PreemptedError,
    Problem,
    UserError,
)
from recipes_lib.stopping import STOP

if TYPE_CHECKING:
    from recipes_lib.config.schema import RecipeConfig

EXIT_INTERRUPTED = 130
"""What a shell reports for a command ended by Ctrl-C (128 + SIGINT)."""

# torch and safetensors write in C++ and Rust, whose errors carry no errno.
_DISK_IS_FULL: Final = (
    "No space left on device",
    "Disk quota exceeded",
    "PytorchStreamWriter failed writing file",
    "basic_ios::clear: iostream error",
)


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; what it raises is told on standard error.

    The user's mistakes are told without a traceback, each with its remedy; anything unforeseen is a bug and keeps its
    traceback. ``SystemExit`` passes through. One process of several leaves from here if it has not done its work:
    at the interpreter's end, collective operations would wait for processes that are gone.

    Args:
        command: Takes nothing; returns an exit code, or ``None`` when there is nothing to report.

    Returns:
        One of the ``EXIT_`` codes of :mod:`recipes_lib.errors`, or ``EXIT_INTERRUPTED``.
    """
    try:
        code = command() or EXIT_DONE
    except BaseException as error:
        STOP.close()
        code = _tell(error)
        if code not in (EXIT_DONE, EXIT_PREEMPTED) and not isinstance(error, LostPeerError):
            peers.record_failure(error, is_unforeseen=code == EXIT_BUG)
    if code in (EXIT_DONE, EXIT_PREEMPTED):
        peers.leave()
    if code != EXIT_DONE and peers.read_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _tell(error: BaseException) -> int:
    """Say why a command ended, and return its exit code.

    Raises:
        SystemExit: That is what the command ended with.
    """
    if isinstance(error, PreemptedError):
        # All processes stop for the same reason.
        if peers.read_rank() == 0:
            sys.stderr.write(f"{error}\n")
        return EXIT_PREEMPTED
    if isinstance(error, LostPeerError):
        sys.stderr.write(f"rank {peers.read_rank()} ends too: {error}\n")
        return EXIT_BUG
    if isinstance(error, UserError | DivergedError):
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    if not isinstance(error, Exception):
        raise error
    if shortage := explain_shortage(error):
        sys.stderr.write(f"{shortage}\n")
        return EXIT_USER
    traceback.print_exception(error)
    sys.stderr.write("This is a bug in recipes-lib, not a mistake of yours: please report it with the lines above.\n")
    return EXIT_BUG


def explain_shortage(error: BaseException) -> Problem | None:
    """Return what the machine ran out of, disk or device memory, if that is why ``error`` was raised; else ``None``."""
    chain: BaseException | None = error
    while chain is not None:
        words = str(chain).splitlines()[0] if str(chain) else ""
        is_full = isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or any(phrase in words for phrase in _DISK_IS_FULL):
            remedy = (
                "free some space and run the same command: it goes on from the newest complete checkpoint; "
                "`recipes check` shows what a run will write"
            )
            return Problem(str(getattr(chain, "filename", None) or "output_dir"), f"the disk is full: {words}", remedy)
        # By name, because torch is not imported to tell a wrong key.
        if type(chain).__name__ == "OutOfMemoryError":
            remedy = (
                "lower per_device_train_batch_size and raise gradient_accumulation_steps by as much (the result is "
                "the same), set activation_checkpointing: true, or lower max_length"
            )
            return Problem("device memory", words, remedy)
        chain = chain.__cause__ or chain.__context__
    return None


def parse_or_exit(stage: str, arguments: Sequence[str]) -> RecipeConfig:
    """Return the configuration that a recipe's arguments ask for; imports nothing slow.

    From then on a request to stop is one of preemption: what has to be saved is saved, and the exit code is 75.

    Args:
        stage: Name of the recipe, ``sft``.
        arguments: What follows the script's name.

    Raises:
        SystemExit: The configuration is wrong, or only ``--help`` or ``--print-config`` was asked for.
    """
    from recipes_lib.config.loader import parse_command  # `recipes --help` comes here too, and needs no YAML.

    parsed: list[RecipeConfig] = []

    def parse() -> None:
        outcome = parse_command(stage, arguments)
        if isinstance(outcome, str):
            sys.stdout.write(f"{outcome}\n")
        else:
            parsed.append(outcome)

    code = run_command(parse)
    if not parsed:
        sys.exit(code)
    STOP.install()
    peers.enter()
    return parsed[0]
