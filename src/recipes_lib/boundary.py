"""Command boundary: turns exceptions into messages and exit codes, for every command and recipe."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib import processes
from recipes_lib.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_USER,
    DivergedError,
    LostPeerError,
    PreemptedError,
    UserError,
    explain_refusal,
)
from recipes_lib.stopping import STOP

if TYPE_CHECKING:
    from recipes_lib.config.schema import RecipeConfig

EXIT_INTERRUPTED = 130
"""What a shell reports for a command ended by Ctrl-C (128 + SIGINT)."""

_OPENS_EVERY_RUN: Final = {
    # transformers and accelerate import DeepSpeed wherever it is installed, and without a GPU it warns each time. A
    # launch file that asks for DeepSpeed there is refused with a reason (``verify_accelerator``).
    "DeepSpeed": "Setting accelerator to CPU",
    # So does bitsandbytes, which computes 4-bit products on a CPU by plain torch then.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # The trainer takes padding and end of text from the tokenizer, as ``load_tokenizer`` has settled them.
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
}
"""Logger -> prefix of a warning that is expected in every run and is suppressed."""
_OUTPUT_FAILURES: Final[dict[str, OSError]] = {}
"""Error of the last failed write to ``stdout`` or ``stderr``."""


class _Output(io.FileIO):
    """File descriptor under a standard stream that drops output when a write fails, instead of raising."""

    def __init__(self, stream: str, descriptor: int) -> None:
        # Python keeps the original stream as ``sys.__stdout__``, which closes the descriptor.
        super().__init__(descriptor, "wb", closefd=False)
        self._stream = stream

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _OUTPUT_FAILURES[self._stream] = error
            return memoryview(data).nbytes


def keep_output_from_failing() -> None:
    """Make writes to standard output and standard error never raise: a closed pipe or a full disk must not end a run.

    Underneath ``sys.stdout`` and ``sys.stderr``, so that it applies to every writer: ``print``, logging,
    warnings, rich, tqdm, and the interpreter's last flush. Streams that somebody else has put there are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # It was closed before this process began.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (for the whole process)
        elif stream is getattr(sys, f"__{name}__"):
            raw = _Output(name, stream.fileno())
            # Unbuffered (``python -u``), Python writes text straight to the descriptor.
            buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
            options = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(buffer, **options))


def find_output_failure() -> OSError | None:
    """Return why a write to standard output failed; ``None`` if none did."""
    sys.stdout.flush()
    return _OUTPUT_FAILURES.get("stdout")


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; an exception becomes a message on standard error.

    User errors are printed without a traceback, each with its remedy; any other exception is a bug and keeps its
    traceback. ``SystemExit`` passes through. One process of several leaves from here if it has not done its work:
    at the interpreter's end, collective operations would wait for processes that are gone.

    Args:
        command: Takes nothing; returns an exit code, or ``None`` when there is nothing to report.

    Returns:
        One of the ``EXIT_`` codes of :mod:`recipes_lib.errors`, or ``EXIT_INTERRUPTED``.
    """
    keep_output_from_failing()
    for name in _OPENS_EVERY_RUN:
        logging.getLogger(name).addFilter(_is_worth_telling)
    try:
        code = command() or EXIT_DONE
    except BaseException as error:
        STOP.close()
        code = _tell(error)
        # A rank that only follows another leaves no reason of its own: the launcher shows the earliest.
        if code not in (EXIT_DONE, EXIT_PREEMPTED) and not isinstance(error, LostPeerError):
            processes.record_failure(error, is_unforeseen=code == EXIT_BUG)
    if code in (EXIT_DONE, EXIT_PREEMPTED):
        processes.leave()
    if code != EXIT_DONE and processes.read_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_OPENS_EVERY_RUN[record.name])


def _tell(error: BaseException) -> int:
    """Print why a command ended, and return its exit code.

    Raises:
        SystemExit: That is what the command ended with.
    """
    if isinstance(error, PreemptedError):
        # All processes stop for the same reason.
        if processes.read_rank() == 0:
            sys.stderr.write(f"{error}\n")
        return EXIT_PREEMPTED
    if isinstance(error, LostPeerError):
        sys.stderr.write(f"rank {processes.read_rank()} ends too: {error}\n")
        return EXIT_BUG
    if isinstance(error, UserError | DivergedError):
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    if not isinstance(error, Exception):
        raise error
    if refusal := explain_refusal(error):
        sys.stderr.write(f"{refusal}\n")
        return EXIT_USER
    traceback.print_exception(error)
    sys.stderr.write("This is a bug in recipes-lib, not your mistake: please report it with the lines above.\n")
    return EXIT_BUG


def parse_or_exit(recipe: str, arguments: Sequence[str]) -> RecipeConfig:
    """Parse the arguments of a recipe into its configuration; imports nothing slow.

    From then on a request to stop is one of preemption: what has to be saved is saved, and the exit code is 75.

    Args:
        recipe: Name of the recipe, ``sft``.
        arguments: What follows the script's name.

    Raises:
        SystemExit: The configuration is wrong, or only ``--help`` or ``--print-config`` was asked for.
    """
    from recipes_lib.config.loader import parse_command  # `recipes --help` comes here too, and needs no YAML.

    parsed: list[RecipeConfig] = []

    def parse() -> None:
        outcome = parse_command(recipe, arguments)
        if isinstance(outcome, str):
            sys.stdout.write(f"{outcome}\n")
        else:
            parsed.append(outcome)

    code = run_command(parse)
    if not parsed:
        sys.exit(code)
    STOP.install()
    processes.enter()
    return parsed[0]
