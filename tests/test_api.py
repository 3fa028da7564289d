"""Python API, compared with the recipes: results, errors, and the state of the calling process."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from tests.faults import recipe_runs
from tests.forked import run_python
from transformers import IntervalStrategy, PreTrainedModel, TrainerCallback
from transformers.utils.logging import set_tqdm_hook

import recipes_lib
from recipes_lib import check, cli, load_run, train
from recipes_lib.api import _format_value, _load, _preserving_state
from recipes_lib.errors import EXIT_USER, ConfigError, PreemptedError
from recipes_lib.report.run_files import RunFiles
from recipes_lib.stopping import STOP, StopPendingError
from recipes_lib.training.trainers.next_token_trainer import SFTTrainer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    recipe_runs.write_inputs(folder)
    return folder


@pytest.fixture
def keys(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("recipes_lib.report.page.draw_charts", lambda run, folder: [])  # Half of the time of a run.
    more = {"max_steps": 2, "eval_steps": 1, "logging_steps": 1, "save_strategy": "no", "num_sample_prompts": 0}
    made = recipe_runs.make_keys(inputs, "sft", **more, save_steps=None, output_dir=tmp_path / "run")
    return {name: str(value) if isinstance(value, Path) else value for name, value in made.items()}


def test_train_returns_finished_run(keys: dict[str, Any], tmp_path: Path) -> None:
    assert check("sft", keys) == []
    run = train("sft", keys, learning_rate=1e-3)
    losses = [event["loss"] for event in run.metrics if event["kind"] == "train"]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert [event["step"] for event in run.metrics] == sorted(event["step"] for event in run.metrics)
    assert run.facts["config"]["learning_rate"] == 1e-3
    assert load_file(run.path / "model.safetensors")
    again = train("sft", keys, learning_rate=1e-3)
    assert (again.facts, again.metrics) == (run.facts, run.metrics)
    assert load_run(str(tmp_path / "run")).metrics == run.metrics


def test_run_after_a_stopped_one_is_not_stopped(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compute_loss = SFTTrainer.compute_loss

    def compute_and_stop(*arguments: Any, **options: Any) -> Any:
        STOP.request("the file STOP")
        return compute_loss(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "compute_loss", compute_and_stop)
        with pytest.raises(PreemptedError, match="the file STOP"):
            train("sft", keys)
    STOP.raise_if_pending()
    assert train("sft", keys).facts["status"] == "done"


def test_ctrl_c_saves_last_step_and_same_call_resumes(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = SFTTrainer.training_step

    def interrupt(self: Any, *arguments: Any) -> Any:
        if STOP.reason is None:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(self, *arguments)

    saving = {**keys, "save_strategy": "steps", "save_steps": 2}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(SFTTrainer, "training_step", interrupt)
            with pytest.raises(PreemptedError, match="SIGINT: stopped after step 1; checkpoint-1 is complete"):
                train("sft", saving)
    finally:
        signal.signal(signal.SIGINT, before)
    assert train("sft", saving).facts["resumed_from"] == "checkpoint-1"


def test_run_after_a_failed_command_is_not_ended(keys: dict[str, Any]) -> None:
    """As after ``%run recipes/sft.py`` with a wrong key: answers to judges and rewards would be left out."""
    assert cli.main(["check", "--config", "missing.yaml"]) == EXIT_USER
    with pytest.raises(StopPendingError):
        STOP.raise_if_pending()
    with _preserving_state():
        STOP.raise_if_pending()


def test_peak_of_gpu_memory_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [10]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", peaks.clear)
    with _preserving_state():
        assert not peaks


def test_model_of_a_finished_run_is_freed(keys: dict[str, Any]) -> None:
    """Also from reference cycles, in which a GPU would hold it beside the model of the next run."""

    def list_models() -> set[int]:
        return {id(each) for each in gc.get_objects() if issubclass(type(each), PreTrainedModel)}

    before = list_models()
    train("sft", keys)
    assert list_models() <= before


def test_train_is_independent_of_state_of_caller(keys: dict[str, Any], tmp_path: Path) -> None:
    """From a thread, with other defaults of torch; states are restored, and the output directory is unlocked."""
    expected = [event["loss"] for event in train("sft", keys).metrics if event["kind"] == "train"]

    def train_again() -> tuple[RunFiles, object]:
        # Inference mode and default device are per thread.
        with torch.inference_mode(), torch.device("meta"):
            run = train("sft", keys, output_dir=tmp_path / "again")
            return run, torch.get_default_device()

    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(1) as pool:
            run, device = pool.submit(train_again).result()
        assert (torch.get_default_dtype(), device) == (torch.float64, torch.device("meta"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert [event["loss"] for event in run.metrics if event["kind"] == "train"] == expected
    after = random.getstate(), torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    assert states[0] == after[0]
    assert torch.equal(states[1], after[1])
    assert np.array_equal(states[2], after[2])
    lock = run.path / "_lock"
    run_python(f"from recipes_lib.files import try_lock; assert try_lock(open({str(lock)!r}, 'a'), of_process=True)")


def test_runs_of_two_threads_follow_each_other(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they would draw from one random state."""
    both = threading.Barrier(2)

    def main(_: object) -> None:
        with pytest.raises(threading.BrokenBarrierError):
            both.wait(timeout=1)

    monkeypatch.setattr(recipes_lib.api, "_importing_recipe", lambda _: nullcontext(main))
    monkeypatch.setattr(recipes_lib.api, "load_run", str)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(lambda _: train("sft", keys), range(2)))) == 1


def test_train_is_independent_of_working_directory_and_restores_progress_bars(keys, tmp_path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    train_step = SFTTrainer.training_step

    def leave(self: Any, *arguments: Any) -> Any:
        os.chdir(tmp_path / "elsewhere")  # As a reward function or callback may do.
        return train_step(self, *arguments)

    monkeypatch.setattr(SFTTrainer, "training_step", leave)
    previous = set_tqdm_hook(show := lambda factory, args, kwargs: factory(*args, **kwargs))
    run = train("sft", keys, output_dir="run", save_strategy="steps", save_steps=1)
    assert set_tqdm_hook(previous) is show
    assert run.path == tmp_path / "run"
    assert run.facts["config"]["output_dir"] == "run", "a record names no folder of this machine"
    assert {"model.safetensors", "checkpoint-2", "report.html"} <= {path.name for path in run.path.iterdir()}
    assert not list((tmp_path / "elsewhere").iterdir())


def test_switches_of_a_run_do_not_stay_for_the_next() -> None:
    """As `tf32: true` and `full_determinism: true` set them."""
    before = torch.backends.fp32_precision, torch.get_deterministic_debug_mode()
    with _preserving_state():
        torch.backends.fp32_precision = "tf32"
        torch.use_deterministic_algorithms(True)
    assert (torch.backends.fp32_precision, torch.get_deterministic_debug_mode()) == before


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_program_without_standard_streams_can_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, None)
    with _preserving_state():
        getattr(sys, name).write("done\n")
    assert getattr(sys, name) is None


ROWS = Dataset.from_list([{"prompt": "a", "completion": "b"}])


@pytest.mark.parametrize("rows", [ROWS, DatasetDict(train=ROWS), ROWS.to_pandas()])
def test_rows_as_an_object_are_refused(keys: dict[str, Any], rows: Any) -> None:
    (problem,) = check("sft", keys, dataset_name=rows)
    assert "to_parquet" in problem.remedy


def test_autocast_of_caller_is_refused(keys: dict[str, Any]) -> None:
    """Its cache, which is cleared where the outermost context ends, has the weights before the first update."""
    with torch.autocast("cpu"), pytest.raises(ConfigError, match=r"torch\.autocast: is active"):
        train("sft", keys)
    with torch.autocast("cpu"):
        (problem,) = check("sft", keys)
    assert "`bf16`" in problem.remedy


def test_check_shows_nothing_in_a_notebook(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """There, rich displays what is printed to any file below the cell."""
    shown: list[Any] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *printed: shown.append(printed))
    assert check("sft", keys) == []
    assert shown == []


def test_config_file_and_overrides_match_command_line(keys: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    assert check("lora", path, lora_target_modules=["q_proj"], max_steps=3) == []
    (problem,) = check("sft", path, learnin_rate=1)
    assert problem.where == "--learnin_rate"
    with pytest.raises(ConfigError, match="learnin_rate"):
        train("sft", path, learnin_rate=1)
    with pytest.raises(ConfigError, match="there is no recipe 'sfd'"):
        train("sfd", path)


def test_python_and_numpy_values_are_converted(keys: dict[str, Any], tmp_path: Path) -> None:
    values = {**keys, "output_dir": tmp_path / "run", "learning_rate": np.float32(2e-5), "max_steps": np.int64(3)}
    assert check("sft", values) == []
    loaded = _load("sft", values, {"bf16": None, "packing": False})
    assert loaded.training["output_dir"] == str(tmp_path / "run")
    assert loaded.training["learning_rate"] == pytest.approx(2e-5)
    assert loaded.training["max_steps"] == 3
    assert (loaded.training["bf16"], loaded.tokens.packing) == (None, False)


def score(**_: Any) -> list[float]:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (IntervalStrategy.STEPS, "steps"),
        ({"v_proj", "q_proj"}, '["q_proj", "v_proj"]'),
        ([np.float32(0.5), np.int64(2)], "[0.5, 2]"),
        (np.array([1, 2]), "[1, 2]"),
        ((name for name in ["q_proj", "v_proj"]), '["q_proj", "v_proj"]'),
        (range(2), "[0, 1]"),
        (torch.bfloat16, "bfloat16"),
        (torch.tensor(0.5), "0.5"),
        (MappingProxyType({"path": Path("a b")}), '{"path": "a b"}'),
        ([score], f'["{__name__}:score"]'),
        ("1e-5", "1e-5"),
        (None, "null"),
        (True, "true"),
    ],
)
def test_python_value_is_formatted_as_flag(value: Any, text: str) -> None:
    assert _format_value(value) == text


@functools.wraps(score)
def score_scaled(**given: Any) -> list[float]:
    return [2 * one for one in score(**given)]


@pytest.mark.parametrize("function", [score_scaled, lambda **_: [0.0], Path("a").exists])
def test_function_that_its_name_does_not_find_is_refused(function: Any) -> None:
    """By its name, another function would be called: the one that ``functools.wraps`` has wrapped."""
    with pytest.raises(ConfigError, match="this name is not that of the given function or class"):
        _format_value([function])


class Doubling(TrainerCallback):
    """Logs a multiple of the loss."""

    def __init__(self, factor: float = 2.0) -> None:
        """Set the factor."""
        self.factor = factor

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add it to the figures of the step."""
        if "loss" in kwargs["logs"]:
            kwargs["logs"]["multiple"] = self.factor * kwargs["logs"]["loss"]


def test_callbacks_take_part_in_training(keys: dict[str, Any], tmp_path: Path) -> None:
    run = train("sft", keys, callbacks=[Doubling, f"{__name__}:Doubling(factor=2)"], output_dir=str(tmp_path / "own"))
    steps = [event for event in run.metrics if event["kind"] == "train"]
    assert [event["multiple"] for event in steps] == [2 * event["loss"] for event in steps]
    assert run.facts["config"]["callbacks"][0] == f"{__name__}:Doubling"


class Failing(TrainerCallback):
    """Fails after the first step."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Divide by zero."""
        _ = 1 / 0


class Returning(TrainerCallback):
    """Returns what the trainer does not take for its control."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
        """Return a text."""
        return "done"


class Tensors(TrainerCallback):
    """Logs what JSON does not have."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a tensor to the figures of the step."""
        kwargs["logs"]["norm"] = torch.ones(1)


@pytest.mark.parametrize(
    ("callback", "found"),
    [
        (Failing, r"Failing.on_step_end failed: ZeroDivisionError: .*test_api.py:\d+"),
        (Returning, "Returning.on_step_end failed: TypeError: it returned 'done'"),
        (Tensors, "Tensors.on_log failed: TypeError: Object of type Tensor is not JSON"),
    ],
)
def test_error_of_a_callback_is_explained(keys: dict[str, Any], callback: type, found: str) -> None:
    with pytest.raises(ConfigError, match=found) as caught:
        train("sft", keys, callbacks=[callback])
    assert caught.value.problems[0].where == "callbacks"


@pytest.mark.parametrize(
    ("callback", "found"),
    [
        (Doubling(), "a callback is not an import path: '<"),
        (f"{__name__}:SFTTrainer", "'SFTTrainer' in 'tests.test_api' is no transformers.TrainerCallback"),
        (f"{__name__}:Doubling(factor=2, other=1)", "unexpected keyword argument 'other'"),
    ],
)
def test_check_finds_wrong_callbacks(keys: dict[str, Any], callback: Any, found: str) -> None:
    (problem,) = check("sft", keys, callbacks=[callback])
    assert problem.where.endswith("callbacks")
    assert found in problem.found


def test_config_of_other_type_is_rejected() -> None:
    (problem,) = check("sft", ["--learning_rate", "1e-5"])  # type: ignore[arg-type]
    assert (problem.where, problem.found) == ("config", "is of type list")


def test_first_check_and_training_print_no_warning_of_another_library_and_draw_no_random_number(keys, tmp_path) -> None:
    """Of the caller's, although the imports of some packages draw them, here those of every one."""
    values = {**keys, "output_dir": str(tmp_path / "run"), "max_steps": 1}
    code = (
        "import random, sys; from recipes_lib import check, train\n"
        "assert check('sft', {}); before = random.getstate()\n"
        "class Draw:\n    def find_spec(self, *_): random.random()\n"
        "sys.meta_path.insert(0, Draw())\n"
        f"assert not check('sft', {values!r}); assert random.getstate() == before\n"
        f"train('sft', {values!r}); assert random.getstate() == before"
    )
    printed = run_python(code)
    assert printed.startswith("done: "), printed


def test_import_of_package_does_not_import_torch() -> None:
    run_python("import sys, recipes_lib; recipes_lib.train; assert not {'torch', 'transformers'} & sys.modules.keys()")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        recipes_lib.trian  # noqa: B018
