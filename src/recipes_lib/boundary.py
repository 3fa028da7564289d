"""Command boundary: turns exceptions into messages and exit codes, for every command and recipe."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import select
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from recipes_lib import errors, processes
from recipes_lib.errors import ConfigError, DivergedError, LostPeerError, PreemptedError, Problem, UserError
from recipes_lib.stopping import STOP, raising_stop_signals

if TYPE_CHECKING:
    from recipes_lib.config.schema import RecipeConfig

_EXPECTED_WARNINGS: Final[dict[str, str | tuple[str, ...]]] = {
    # transformers and accelerate import DeepSpeed if it is installed, and DeepSpeed warns if there is no GPU.
    # ``verify_accelerator`` raises for a launch file that uses DeepSpeed on a CPU.
    "DeepSpeed": "Setting accelerator to CPU",
    # bitsandbytes warns on import and falls back to plain torch for 4-bit matrix products on a CPU.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # Liger looks for kernels of other devices at the first use of an operation.
    "liger_kernel.backends.registry": "Backend impl ",
    # `recipes launch` on a CPU: the number of threads, which no launch file can set.
    "accelerate.commands.launch": "The following values were not passed to `accelerate launch`",
    "transformers.modeling_utils": (
        # Expected of GPT-2: positions separate documents, without a mask, and the loss head computes the loss.
        "We strongly recommend passing in an `attention_mask`",
        "`loss_type=None`",
        # Expected of float32 weights: ``choose_kernel`` has verified that autocast computes in half precision.
        *(f"Flash Attention {version} only supports torch.float16" for version in (2, 3, 4)),
    ),
    "transformers.trainer": (
        # Expected in a run whose output_dir was moved; ``_finalize_training`` finds the checkpoint by its step.
        "The best checkpoint",
        # Expected in a resumed run with tied embeddings, which are stored once; the other weights have been verified.
        "There were missing keys in the checkpoint model loaded: ['lm_head.weight'].",
    ),
    "transformers.trainer_utils": (
        # Expected: ``load_tokenizer`` has already set the special tokens that the trainer copies to the model.
        "The tokenizer has new PAD/BOS/EOS tokens",
        # Expected in a resumed run with fractions (`logging_steps: 0.1`) or other numbers of GPUs.
        "Warning: The following arguments do not match",
    ),
}
"""Logger -> prefix, or prefixes, of a warning that is expected in every run."""
_OUTPUT_FAILURES: Final[dict[str, OSError]] = {}
"""Stream name (``stdout``, ``stderr``) -> error of its last failed write."""


class _Output(io.FileIO):
    """Raw layer of a standard stream that discards output when a write fails, instead of raising."""

    def __init__(self, stream: str, descriptor: int) -> None:
        # The descriptor belongs to the original stream, which Python keeps as ``sys.__stdout__`` and closes at exit.
        super().__init__(descriptor, "wb", closefd=False)
        self._stream = stream

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        try:
            # Another program that shares a pipe or terminal may have made it non-blocking: a full one takes a part, or
            # nothing.
            while rest := rest[super().write(rest) or 0 :]:
                select.select([], [self], [])
        except OSError as error:
            _OUTPUT_FAILURES[self._stream] = error
        return memoryview(data).nbytes


def ignore_closed_output() -> None:
    """Make writes to standard output and standard error never raise.

    A closed pipe, a full disk, or a character that the locale's encoding lacks must not end a run. The raw layer below
    ``sys.stdout`` and ``sys.stderr`` is replaced, so that every writer is covered: ``print``, logging, warnings, rich,
    tqdm, and the interpreter's flush at exit. Redirected streams, such as those of pytest, are not changed.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # The descriptor was closed when this process started (`>&-`).
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (for the whole process)
        elif stream is getattr(sys, f"__{name}__"):
            raw = _Output(name, stream.fileno())
            # ``write_through`` is set by ``python -u``, for which text is not buffered.
            buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
            options = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
            # In the locales C and POSIX, which encode in ASCII, it is "surrogateescape", which fails for accents too.
            replacing = "backslashreplace" if stream.errors in ("strict", "surrogateescape") else stream.errors
            setattr(sys, name, io.TextIOWrapper(buffer, errors=replacing, **options))


def find_output_failure() -> OSError | None:
    """Return the error of the last failed write to standard output; ``None`` if every write succeeded."""
    sys.stdout.flush()
    return _OUTPUT_FAILURES.get("stdout")


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; an exception becomes a message on standard error.

    User errors are printed without a traceback, each with its remedy; any other exception is a bug and is printed with
    its traceback. ``SystemExit`` propagates. With several processes, a failed one exits immediately by ``os._exit``:
    regular interpreter shutdown would block in collective operations, waiting for ranks that have exited.

    Args:
        command: Function without arguments that returns an exit code; ``None`` means ``EXIT_DONE``.

    Returns:
        One of the ``EXIT_`` codes of :mod:`recipes_lib.errors`.
    """
    # Python collects garbage when it exits: seconds for the objects of torch and transformers, also after Ctrl-C.
    atexit.register(gc.freeze)
    ignore_closed_output()
    processes.limit_threads()
    processes.ignore_missing_plot_backend()
    hide_expected_warnings()
    STOP.is_reported = True
    error = None
    try:
        with raising_stop_signals():
            _verify_docstrings()
            code = command() or errors.EXIT_DONE
    except BaseException as raised:
        STOP.close()
        error = _find_stop(raised)
        code = _report(error)
    # A rank that ends because of another one writes no reason: launcher and other ranks name the first cause only.
    if error is not None and not isinstance(error, LostPeerError):
        processes.record_failure(error, code)
        processes.tell_other_machines(error, code)
    if code in (errors.EXIT_DONE, errors.EXIT_PREEMPTED) or isinstance(error, LostPeerError):
        processes.unregister_process()
    if code != errors.EXIT_DONE and processes.read_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _verify_docstrings() -> None:
    if sys.flags.optimize > 1:
        found = "it removes docstrings, without which transformers cannot be imported"
        raise ConfigError(Problem("PYTHONOPTIMIZE=2 (python -OO)", found, "unset it, or write 1"))


def hide_expected_warnings() -> None:
    """Suppress the warnings of other libraries that are expected in every run."""
    for name in _EXPECTED_WARNINGS:
        logging.getLogger(name).addFilter(_is_unexpected)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_EXPECTED_WARNINGS[record.name])


def _find_stop(error: BaseException) -> BaseException:
    """Return the stop that a signal raised and other code made the cause of ``error``; otherwise ``error``.

    Until version 3.11, Python raises a ``RuntimeError`` from any error in ``__set_name__``, such as that of a signal
    during the import of a dataclass. A ``__context__`` does not count: an error while stopping is an error of its own.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PreemptedError | LostPeerError | KeyboardInterrupt):
        cause = cause.__cause__
    return cause or error


def _report(error: BaseException) -> int:
    """Print the error that ended a command, and return its exit code.

    Raises:
        SystemExit: ``error`` is a ``SystemExit``.
    """
    if isinstance(error, PreemptedError):
        # Every rank has the same reason: print it once.
        if processes.read_rank() == 0:
            sys.stderr.write(f"{error}\n")
        return errors.EXIT_PREEMPTED
    if isinstance(error, LostPeerError):
        sys.stderr.write(f"rank {processes.read_rank()} exits: {error}\n")
        return errors.EXIT_BUG
    if isinstance(error, UserError | DivergedError):
        _print_once(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        return errors.EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        raise error
    refusal = errors.explain_refusal(error)
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("recipes_lib"):
        remedy = "activate the environment of `make install`, or install the package into this one"
        refusal = Problem(sys.executable, str(error), remedy)
    if refusal is not None:
        _print_once(refusal)
        return errors.EXIT_USER
    traceback.print_exception(error)
    sys.stderr.write("This is a bug in recipes-lib, not your mistake: please report it with the lines above.\n")
    return errors.EXIT_BUG


def _print_once(problem: object) -> None:
    # All ranks find a wrong key, for example, and any may be first. What one rank finds may be of its machine alone.
    if processes.is_first_to_report(str(problem)):
        rank, host = processes.read_rank(), socket.gethostname()
        sys.stderr.write(f"{problem}\n" + (f"    (first found by rank {rank} on {host})\n" if rank else ""))


def _report_outside(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    """Report an error outside of ``run_command``, as in the imports of a recipe, in the same way.

    Raises:
        SystemExit: Always, with the exit code; Python ends with it.
    """

    def fail() -> None:
        raise error

    sys.exit(run_command(fail))


def refuse_access_tokens(arguments: Sequence[str]) -> None:
    """Raise if an argument looks like an access token: argparse would print one that it does not know.

    Raises:
        ConfigError: There is such an argument; the message does not repeat it.
    """
    # Not at module level, as in ``parse_or_exit``.
    from recipes_lib.config.values import SECRET_REMEDY, has_secret_shape

    if any(map(has_secret_shape, arguments)):
        raise ConfigError(Problem("recipes", "an argument looks like an access token", SECRET_REMEDY))


def parse_or_exit(recipe: str, arguments: Sequence[str]) -> RecipeConfig:
    """Parse the arguments of a recipe into its configuration, and install the stop-signal handlers.

    Imports neither torch nor transformers. After it returns, a stop signal preempts the run: the run saves a checkpoint
    and exits with code 75.

    Args:
        recipe: Name of the recipe, such as ``sft``.
        arguments: Command-line arguments after the script's name.

    Raises:
        SystemExit: The configuration is invalid, or ``--help`` or ``--print-config`` was given.
    """
    parsed: list[RecipeConfig] = []

    def parse() -> None:
        # Not at module level: `recipes --help` imports this module and does not need PyYAML.
        from recipes_lib.config.loader import load_for_command

        # Before an error: otherwise other ranks would take the launcher's SIGTERM for a preemption.
        processes.register_process()
        parsed.append(load_for_command(recipe, arguments))

    code = run_command(parse)
    if not parsed:
        sys.exit(code)
    sys.excepthook = _report_outside
    STOP.install()
    processes.register_process()
    return parsed[0]
