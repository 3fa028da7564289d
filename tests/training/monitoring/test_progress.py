"""Progress display: a live bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from tests.training.clock import Clock

from recipes_lib.training.monitoring.progress import (
    LiveProgress,
    PlainProgress,
    TrainingProgress,
    build_progress,
    describe_event,
)

TRAIN = {
    "kind": "train",
    "loss": 2.31415,
    "learning_rate": 3e-4,
    "grad_norm": 0.8217,
    "target_tokens_per_second": 12345.6,
    "mfu": 0.412,
}
EVAL = {"kind": "eval", "eval_loss": 2.5, "eval_bits_per_byte": 0.91, "eval_token_accuracy": 0.5, "eval_stop_rate": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_display_is_chosen_by_stream(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(build_progress(is_main=True, stream=Terminal()), PlainProgress)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(build_progress(is_main=True, stream=Terminal()), LiveProgress)
    assert isinstance(build_progress(is_main=True, stream=io.StringIO()), PlainProgress)
    tee: Any = SimpleNamespace(write=str, flush=str)
    assert isinstance(build_progress(is_main=True, stream=tee), PlainProgress)
    assert type(build_progress(is_main=False, stream=Terminal())) is TrainingProgress


def test_closed_stream_is_ignored() -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    build_progress(is_main=True, stream=ClosedPipe()).say("step 1")


def test_describe_event() -> None:
    assert describe_event(TRAIN) == "loss 2.314  lr 3.00e-04  grad 0.822  12.3k target tok/s  mfu 41.2 %"
    assert describe_event({"mfu": 0.0031}) == "mfu 0.31 %"
    assert describe_event(EVAL) == "held-out loss 2.5  bits/byte 0.91  accuracy 50 %  stopped 100 %"
    assert describe_event({"loss": 1.0, "objective/score": 0.5, "objective/kl_seq": 2}) == "loss 1  score 0.5  kl 2"
    assert describe_event({"eval_reward": 0.25}) == "reward 0.25"
    assert describe_event({"loss": 1.0, "mfu": None}) == "loss 1"
    assert describe_event({"target_tokens_per_second": 0, "tokens_per_second": 20}) == "20 tok/s"
    assert describe_event({"loss": float("nan")}) == "loss nan"


def test_plain_progress_limits_rate_of_training_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock)
    progress.start(100, 0)
    for step in range(1, 101):
        clock.now += 1
        progress.show({**TRAIN, "step": step})
        if step in {5, 6}:
            progress.show({**EVAL, "step": step})

    lines = stream.getvalue().splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == [1, 5, 6, *range(11, 100, 10), 100]
    assert all(line.startswith("step ") and "/100" in line for line in lines)


def test_eta_uses_steps_of_this_process() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock)
    progress.start(1000, 900)
    clock.now += 20
    progress.show({**TRAIN, "step": 910})
    assert stream.getvalue().endswith("eta 3 min 0 s\n")
    # As after a rollback, whose first line is due at once; evaluations and the last step have no ETA.
    progress.start(1000, 900)
    progress.show({**TRAIN, "step": 901})
    progress.show({**EVAL, "step": 901})
    progress.show({**TRAIN, "step": 1000})
    first, evaluation, last = stream.getvalue().splitlines()[1:]
    assert "eta" in first
    assert "eta" not in evaluation + last


def test_line_before_the_start_has_the_step_alone() -> None:
    stream = io.StringIO()
    PlainProgress(stream).show({**EVAL, "step": 0})
    assert stream.getvalue().startswith("step 0/0  held-out loss 2.5")


def test_plain_progress_tracks_long_evaluation() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock)

    for _ in progress.track(range(4), "evaluate", 4):
        clock.now += 6

    assert stream.getvalue() == "evaluate  2/4\n"


def test_live_progress_shows_step_metrics_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    progress = LiveProgress(terminal)
    progress.start(50, 20)
    # A rollback starts training again, with one bar.
    progress.start(50, 10)
    assert len(progress._display.tasks) == 1
    progress.advance(11)
    progress.show({**TRAIN, "step": 11})
    # Names of data may look like markup of rich, also like an end without a beginning, which would raise.
    for name in ("evaluate wiki[en]", "evaluate [/x]"):
        for _ in progress.track([1, 2], name, 2):
            progress._display.refresh()
    progress.show({**EVAL, "step": 11})
    progress.stop()
    progress.stop()

    text = terminal.getvalue()
    assert "11/50" in text
    assert "evaluate wiki[en]" in text
    assert "evaluate [/x]" in text
    assert "loss 2.314" in text
    assert "step 11  loss" not in text, "metrics of a step are in the bar, and scroll nothing away"
    assert "step 11  held-out loss 2.5" in text


@pytest.mark.parametrize("width", [80, 60])
def test_steps_metrics_and_remaining_time_are_whole_on_narrow_terminals(width: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    terminal = Terminal()
    progress = LiveProgress(terminal)
    progress.start(20000, 11000)
    progress.show({**TRAIN, "step": 11000})
    progress.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "11000/20000" in text
    assert "eta --:--" in text
    assert "\u2026" not in text
    assert all(word in text for word in describe_event(TRAIN).split())
    assert max(map(len, text.splitlines())) <= width


def test_progress_of_other_ranks_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress()
    progress.start(3, 0)
    progress.advance(1)
    progress.show({**TRAIN, "step": 1})
    assert list(progress.track("ab", "evaluate", 2)) == ["a", "b"]
    progress.stop()

    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("build", [PlainProgress, LiveProgress])
def test_message_is_one_line_without_markup(build):
    stream = io.StringIO()
    build(stream).say("step 0: loss 0.693147 [bold] policy and reference agree")
    assert stream.getvalue() == "step 0: loss 0.693147 [bold] policy and reference agree\n"
    TrainingProgress().say("nothing")
