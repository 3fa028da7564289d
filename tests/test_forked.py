"""Forked launches: environment variables of torch's launcher, failure handling, equality with ``python SCRIPT``."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.forked import Launch, limit_forked, run_forked, run_script


@pytest.mark.multiprocess
def test_forked_processes_have_launcher_environment(tmp_path):
    run_forked("tests.test_forked", tmp_path, variables={"ACCELERATE_MIXED_PRECISION": "no"})
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION")
    variables = [json.loads((tmp_path / f"environment-{rank}").read_text()) for rank in "01"]
    assert [[each[name] for name in names] for each in variables] == [
        ["2", rank, "127.0.0.1", "1", "no"] for rank in "01"
    ]
    assert variables[0]["MASTER_PORT"] == variables[1]["MASTER_PORT"]


@pytest.mark.multiprocess
def test_failed_process_ends_others_and_is_reported(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 fails"):
        run_forked("tests.test_forked", tmp_path, "fail")
    assert not Path("/proc", (tmp_path / "waiting").readlink()).exists()


@pytest.mark.multiprocess
def test_killed_process_is_reported_before_peers_that_failed_for_it(tmp_path):
    """Also if both have ended before the first is noticed."""
    launch = Launch("tests.test_forked", tmp_path, "kill", num_processes=2)
    for process in launch.processes:
        process.join()
    assert [process.exitcode for process in launch.processes] == [1, -signal.SIGKILL]
    assert launch.finish().returncode == -signal.SIGKILL


def test_forked_process_that_hangs_ends_with_its_stacks(capfd):
    if not (pid := os.fork()):
        limit_forked()
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGALRM
    assert "in test_forked_process_that_hangs" in capfd.readouterr().err


def test_run_script_matches_python_command(tmp_path):
    (tmp_path / "beside.py").write_text("word = 'beside'")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "further.py").write_text("word = 'further'")
    script = tmp_path / "a script.py"
    script.write_text(
        "import sys, beside, further\n"
        "print(beside.word, further.word, sys.argv[1:], __name__)\n"
        "sys.stderr.write('wrong')\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    done = run_script(script, 3, {"b": "c d"}, paths=[tmp_path / "lib"], code=3)
    assert done.stderr == "wrong"
    assert done.stdout == "beside further ['3', '--b=c d'] __main__\n"
    with pytest.raises(AssertionError, match="wrong"):
        run_script(script, 3, paths=[tmp_path / "lib"])
    script.write_text("import time\ntime.sleep(600)\n")
    assert Launch(script).finish(timeout=1).returncode < 0


def main():
    """Write this rank's environment. ``fail``: rank 1 raises while rank 0 sleeps. ``kill``: 0 raises, 1 is killed."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    (folder / f"environment-{rank}").write_text(json.dumps(dict(os.environ)))
    if sys.argv[2:] == ["kill"]:
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionResetError("rank 1 is gone")
    if sys.argv[2:] == ["fail"]:
        if rank == "0":
            (folder / "waiting").symlink_to(str(os.getpid()))
            time.sleep(600)
        while not (folder / "waiting").is_symlink():
            time.sleep(0.01)
        raise ValueError("rank 1 fails")


if __name__ == "__main__":
    main()
