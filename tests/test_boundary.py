"""Command boundary: exit code and message of every way in which a command can end."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.forked import run_python
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer
from transformers.trainer_utils import compare_trainer_and_checkpoint_args
from transformers.utils.logging import warning_once

from recipes_lib.boundary import parse_or_exit, run_command
from recipes_lib.errors import ConfigError, DataError, DivergedError, LostPeerError, PreemptedError, Problem
from recipes_lib.files import staging_folder
from recipes_lib.processes import find_dead_process
from recipes_lib.stopping import STOP, StopRequest


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[StopRequest]:
    """Record calls of ``StopRequest.install``."""
    calls: list[StopRequest] = []
    monkeypatch.setattr(StopRequest, "install", lambda self: calls.append(self))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Restored: `parse_or_exit` replaces it.
    return calls


def raising(error: BaseException):
    def command() -> int | None:
        raise error

    return command


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (75, 75)])
def test_exit_code_is_return_value_of_command(returned: int | None, code: int) -> None:
    assert run_command(lambda: returned) == code


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_user_error_prints_every_problem_without_traceback(kind, capsys: pytest.CaptureFixture[str]) -> None:
    problems = [Problem("sft.yaml:3", "unknown key", "write learning_rate"), Problem("--seed", "not a number")]
    assert run_command(raising(kind(*problems))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "sft.yaml:3: unknown key\n    write learning_rate\n--seed: not a number\n"


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/metrics.jsonl")
LOST = LostPeerError("process 1 of this machine ended: it was killed")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DivergedError("loss is nan at step 7"), 3, "loss is nan at step 7"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (LOST, 1, f"rank 0 exits: {LOST}"),
        (FULL, 2, "out/metrics.jsonl: the disk is full"),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), 2, f"{sys.executable}: No module named 'rich'"),
    ],
)
def test_foreseen_end_prints_reason_without_traceback(error, code, message, capsys) -> None:
    assert run_command(raising(error)) == code
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert "Traceback" not in errors
    assert "bug" not in errors


def test_preemption_is_printed_by_rank_0_only(monkeypatch, capsys) -> None:
    stopped = raising(PreemptedError("SIGTERM: stopped after step 3; run the same command to resume"))
    assert run_command(stopped) == 75
    assert capsys.readouterr().err == "SIGTERM: stopped after step 3; run the same command to resume\n"
    monkeypatch.setenv("RANK", "1")
    assert run_command(stopped) == 75
    assert capsys.readouterr().err == ""


def test_error_of_all_ranks_is_printed_once_per_machine(tmp_path, monkeypatch, capsys) -> None:
    wrong = ConfigError(Problem("--seed", "not a number"))
    for machine in ("gpu-1", "gpu-2"):
        for rank in ("0", "1"):
            (tmp_path / machine / rank).mkdir(parents=True)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / machine / rank / "error.json"))
            for error in (wrong, DivergedError(f"rank {rank}"), FULL):
                run_command(raising(error))
            # The launcher's summary names the first of them.
            assert "OSError" in (tmp_path / machine / rank / "error.json").read_text()
        printed = capsys.readouterr().err
        assert [printed.count(words) for words in ("not a number", "rank 0", "rank 1", "disk is full")] == [1] * 4


@pytest.mark.parametrize(
    ("stop", "code"), [(PreemptedError("SIGTERM"), 75), (LostPeerError("lost"), 1), (KeyboardInterrupt(), 130)]
)
def test_stop_during_creation_of_class_is_no_bug(stop, code, capsys) -> None:
    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            raise stop  # As a signal handler does; Python 3.11 raises a RuntimeError from it.

    assert run_command(lambda: type("Imported", (), {"field": Field()})) == code
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("handler", "number", "code"),
    [
        (signal.SIG_DFL, signal.SIGTERM, 75),
        (signal.SIG_DFL, signal.SIGUSR1, 75),
        (signal.SIG_DFL, signal.SIGHUP, 75),
        (signal.SIG_IGN, signal.SIGHUP, 0),  # Under nohup.
        (lambda *_: None, signal.SIGTERM, 0),  # As in a run, which saves before it ends.
        (signal.default_int_handler, signal.SIGINT, 130),
    ],
)
def test_stop_signal_unwinds_command(handler, number, code, tmp_path, capsys) -> None:
    def command() -> None:
        with staging_folder(tmp_path / "model"):
            os.kill(os.getpid(), number)

    before = signal.signal(number, handler)
    try:
        assert run_command(command) == code
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
    assert list(tmp_path.iterdir()) == []
    words = {0: "", 130: "interrupted\n"}
    assert capsys.readouterr().err == words.get(code, f"{number.name}: run the same command again\n")


def test_stop_signal_keeps_default_action_in_threads_and_launches(monkeypatch) -> None:
    handlers: list[object] = []

    def command() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))

    with ThreadPoolExecutor() as pool:  # Only the main thread may set signal handlers.
        assert pool.submit(run_command, command).result() == 0
    # A launcher stops its processes because one of them has failed.
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(command) == 0
    assert handlers == [signal.SIG_DFL] * 2


@pytest.mark.parametrize(("error", "code"), [(DivergedError("nan"), 3), (PreemptedError("SIGTERM"), 75)])
def test_failed_rank_exits_without_interpreter_shutdown(error, code, monkeypatch) -> None:
    class StopPendingError(BaseException):
        pass

    def leave(code: int) -> None:
        raise StopPendingError(code)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(StopPendingError, match=str(code)):
        run_command(raising(error))
    assert run_command(lambda: None) == 0


class PanicError(BaseException):
    """As of a library in Rust, such as tokenizers."""


@pytest.mark.parametrize(
    "raised",
    [
        IndexError("list index out of range"),
        PanicError("list index out of range"),
        ModuleNotFoundError("No module named 'recipes_lib.lost'", name="recipes_lib.lost"),
    ],
)
def test_unexpected_exception_is_reported_as_bug_with_traceback(raised, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(raised)) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert f"{type(raised).__name__}: {raised}" in error
    assert "This is a bug" in error.splitlines()[-1]


@contextmanager
def opened_broken(kind: str):
    """Open a descriptor whose writes fail: a pipe without reader, a full disk, or a closed terminal."""
    if kind == "full disk":
        yield os.open("/dev/full", os.O_WRONLY)
        return
    reader, writer = os.openpty() if kind == "closed terminal" else os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


WRITE_TO_BOTH_STREAMS = """
import logging, sys, warnings
from recipes_lib.boundary import run_command
from recipes_lib.training.monitoring.progress import LiveProgress, PlainProgress
from tqdm import tqdm

def work():
    event = {"kind": "train", "step": 1, "loss": 1.0}
    for progress in (PlainProgress(sys.stderr), LiveProgress(sys.stderr)):
        progress.start(2, 0)
        progress.show(event)
        list(progress.track(range(3), "some", 3))
        progress.say("line")
        progress.stop()
    logging.getLogger("any").warning("logged")
    warnings.warn("warned")
    list(tqdm(range(3), file=sys.stderr))
    for _ in range(3):
        print("word " * 10_000)
        print("word", file=sys.stderr, flush=True)
    sys.stdout.buffer.write(bytes(10_000))
    open(sys.argv[1], "w").write("done")

sys.exit(run_command(work))
"""


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("kind", ["closed pipe", "full disk", "closed terminal"])
def test_unwritable_output_does_not_end_command(kind: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Covers progress displays, logging, warnings, tqdm and buffered text on both streams."""
    if kind == "full disk" and not Path("/dev/full").exists():
        pytest.skip("the operating system has no /dev/full")
    command = [sys.executable, *flags, "-c", WRITE_TO_BOTH_STREAMS, str(tmp_path / "done")]
    with opened_broken(kind) as broken:
        # rich draws as on a terminal.
        environment = os.environ | {"FORCE_COLOR": "1"}
        assert subprocess.run(command, stdout=broken, stderr=broken, check=False, env=environment).returncode == 0
    assert (tmp_path / "done").read_text() == "done"


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_output_to_full_non_blocking_pipe_is_complete(flags: tuple[str, ...]) -> None:
    code = "from recipes_lib.boundary import run_command; raise SystemExit(run_command(lambda: print('x' * 999_999)))"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, *flags, "-c", code], stdout=writer, env=environment) as child:
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            assert len(file.read()) == 1_000_000
    assert child.returncode == 0


def test_closed_descriptors_do_not_end_command(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_TO_BOTH_STREAMS, str(tmp_path / "done")]
    assert subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], check=False).returncode == 0
    assert (tmp_path / "done").read_text() == "done"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "ascii:surrogateescape"])
def test_characters_outside_locale_encoding_are_escaped(encoding: str) -> None:
    code = (
        "from recipes_lib.boundary import run_command; raise SystemExit(run_command(lambda: print('\\u2265 \\udcff')))"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    shown = "\u2265".encode() if encoding == "utf-8" else b"\\u2265"
    assert done.stdout == shown + b" \\udcff\n"


def test_interpreter_without_docstrings_is_refused() -> None:
    code = "from recipes_lib.boundary import run_command; raise SystemExit(run_command(lambda: 0))"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("PYTHONOPTIMIZE=2 ")


def test_plots_need_no_backend_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's shell has its variables: without its packages, as in another environment, matplotlib cannot start."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    code = "from recipes_lib.boundary import run_command; run_command(lambda: None); import matplotlib"
    run_python(code)


def use_gpt2() -> None:
    """Without a mask and a loss: positions separate documents, and the loss head computes the loss."""
    config = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2, pad_token_id=1, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    model(torch.ones(1, 2, dtype=torch.int64))
    assert model.loss_function


def select_flash_attention() -> None:
    """For weights in float32, which autocast reads in half precision."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **small, dtype=torch.float32))
    model._flash_attn_import_error = lambda *_, **__: None
    for version in (2, 3, 4):
        model._flash_attn_can_dispatch(version, is_init_check=True)


def resume_with_fractions_of_steps() -> None:
    given = SimpleNamespace(logging_steps=0.1, per_device_train_batch_size=2, n_gpu=1)
    compare_trainer_and_checkpoint_args(given, SimpleNamespace(logging_steps=3, train_batch_size=4))


def resume_without_weights() -> None:
    """Those of tied embeddings are stored once; others are missing."""
    trainer = SimpleNamespace(model=SimpleNamespace(_keys_to_ignore_on_save=None))
    for names in (["lm_head.weight"], ["model.norm.weight"], ["lm_head.weight", "model.norm.weight"]):
        Trainer._issue_warnings_after_load(trainer, SimpleNamespace(missing_keys=names, unexpected_keys=[]))


def log_other_lines() -> None:
    for name, line in (
        ("DeepSpeed", "Setting accelerator to CPU. If you have GPU"),
        ("transformers.trainer_utils", "The tokenizer has new PAD/BOS/EOS tokens that"),
    ):
        logging.getLogger(name).warning(line)
        logging.getLogger(name).warning("another line")


@pytest.mark.parametrize(
    ("work", "num_lines", "num_shown"),
    [
        (use_gpt2, 2, 0),
        (select_flash_attention, 3, 0),
        (resume_with_fractions_of_steps, 1, 0),
        (resume_without_weights, 3, 2),
        (log_other_lines, 4, 2),
    ],
)
def test_expected_warnings_of_libraries_are_suppressed(work, num_lines, num_shown, monkeypatch) -> None:
    shown: list[str] = []
    for name in ("DeepSpeed", *(f"transformers.{module}" for module in ("modeling_utils", "trainer", "trainer_utils"))):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "filters", [])
        monkeypatch.setattr(
            logger, "handle", lambda line, logger=logger: logger.filter(line) and shown.append(line.getMessage())
        )
    for run, number in ((lambda work: work(), num_lines), (run_command, num_shown)):
        warning_once.cache_clear()
        run(work)
        assert len(shown) == number, shown
        shown.clear()


def test_system_exit_propagates() -> None:
    with pytest.raises(SystemExit) as exit_:
        run_command(raising(SystemExit(0)))
    assert exit_.value.code == 0


@pytest.fixture
def recipe(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """Arguments of a valid SFT run."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    keys = {"model_name_or_path": tiny_model_dir, "dataset_name": tmp_path / "rows.jsonl", "output_dir": tmp_path / "o"}
    return [f"--{key}={value}" for key, value in keys.items()]


def test_parse_or_exit_returns_config_and_installs_signal_handlers(recipe, installed) -> None:
    config = parse_or_exit("sft", [*recipe, "--learning_rate", "1e-3"])
    assert installed == [STOP]
    assert config.recipe == "sft"
    assert config.training["learning_rate"] == 1e-3


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        ("ImportError('libtorch.so: failed to map segment from shared object')", 2, "host memory: a library cannot"),
        ("MemoryError", 2, "host memory: an allocation failed"),
        ("KeyboardInterrupt", 130, "interrupted"),
        ("IndexError", 1, "Traceback"),
    ],
)
def test_error_in_the_imports_of_a_recipe_is_reported_with_its_exit_code(recipe, raised, code, message) -> None:
    parse = "from recipes_lib.boundary import parse_or_exit; parse_or_exit('sft', sys.argv[1:])"
    command = [sys.executable, "-c", f"import sys; {parse}; raise {raised}", *recipe]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == code
    assert done.stderr.startswith(message)


def test_process_with_an_invalid_config_is_a_lost_peer_of_other_ranks(recipe, tmp_path, monkeypatch) -> None:
    """They would otherwise take the launcher's SIGTERM for a preemption, after which a job is queued again."""
    for number in "01":
        (tmp_path / number).mkdir()
    error_file = str(tmp_path / "1" / "error.json")
    code = "import sys; from recipes_lib.boundary import parse_or_exit; parse_or_exit('sft', sys.argv[1:])"
    failing = [sys.executable, "-c", code, *recipe, "--seed=many"]
    variables = os.environ | {"TORCHELASTIC_ERROR_FILE": error_file, "RANK": "1"}
    done = subprocess.run(failing, env=variables, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"    (first found by rank 1 on {socket.gethostname()})"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    assert (find_dead_process() or "").startswith("process 1 of this machine ended: ConfigError: --seed")
    parse_or_exit("sft", recipe)
    assert (tmp_path / "0" / "pid").is_file()
    run_command(raising(LOST))
    assert not (tmp_path / "0" / "pid").exists(), "a third process would take this one for the cause"


def test_no_garbage_is_collected_at_exit() -> None:
    """As by Python itself, which takes seconds for the objects of torch."""
    code = "import gc; from recipes_lib.boundary import run_command; gc.set_threshold(0)\n"  # None by chance.
    code += "class Cycle:\n    def __del__(self): print('collected')\n"
    assert run_python(f"{code}one = Cycle(); one.own = one; del one; run_command(lambda: None)") == ""


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
def test_help_and_print_config_exit_with_code_0(flag, recipe, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_or_exit("sft", [*recipe, flag])
    assert exit_.value.code == 0
    assert "learning_rate" in capsys.readouterr().out


def test_parse_or_exit_does_not_import_torch(recipe: list[str]) -> None:
    code = (
        "import contextlib, io, sys; from recipes_lib.boundary import parse_or_exit\n"
        "for more in (['--help'], ['--print-config'], ['--config', '/gone'], ['--learning_rte', '1'], []):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        assert parse_or_exit('sft', [*sys.argv[1:], *more]).recipe == 'sft'\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'numpy', 'accelerate', 'huggingface_hub'}\n"
        "assert not heavy & sys.modules.keys()"
    )
    run_python(code, *recipe)
