"""The processes and the inputs of a bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.proving.bench import WrongResultError, launch


def test_a_process_is_started_and_its_words_are_kept(tmp_path: Path) -> None:
    code = "import os; print(os.environ['TOLD']); raise SystemExit(3)"
    assert launch(["-c", code], {"TOLD": "so"}, tmp_path / "x") == 3
    assert (tmp_path / "x").read_text() == "so\n"


def test_a_launcher_that_hangs_can_end_its_workers(tmp_path: Path) -> None:
    """It has a signal handler for that; a kill would leave them running."""
    clean_up = (
        "import pathlib, signal, sys, threading\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit()))\n"
        "threading.Event().wait()"
    )
    with pytest.raises(WrongResultError, match="did not end within"):
        launch(["-c", clean_up, str(tmp_path / "ended")], {}, tmp_path / "x", limit=3)
    assert (tmp_path / "ended").exists()
