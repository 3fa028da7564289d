"""Forked processes are told what those of torch's launcher are, and one that fails ends the others."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from tests.forked import Launch, run_forked, run_script


@pytest.mark.multiprocess
def test_each_is_told_which_it_is(tmp_path):
    run_forked("tests.test_forked", tmp_path, variables={"ACCELERATE_MIXED_PRECISION": "no"})
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION")
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in "01"]
    assert [[each[name] for name in names] for each in told] == [["2", rank, "127.0.0.1", "1", "no"] for rank in "01"]
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"]


@pytest.mark.multiprocess
def test_one_that_fails_ends_the_others_and_is_told(tmp_path):
    with pytest.raises(AssertionError, match="the last one fails"):
        run_forked("tests.test_forked", tmp_path, "fail")
    assert not Path("/proc", (tmp_path / "waiting").readlink()).exists()


def test_a_script_is_told_what_python_tells_it_and_its_end_is_returned(tmp_path):
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
    done = run_script(script, 3, "b c", paths=[tmp_path / "lib"])
    assert (done.returncode, done.stderr) == (3, "wrong")
    assert done.stdout == "beside further ['3', 'b c'] __main__\n"
    script.write_text("import time\ntime.sleep(600)\n")
    assert Launch(script).finish(timeout=1).returncode < 0


def main():
    """Write what this process, one of several, was told; or fail as the last one while the others wait."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    (folder / f"told-{rank}").write_text(json.dumps(dict(os.environ)))
    if sys.argv[2:] == ["fail"]:
        if rank == "0":
            (folder / "waiting").symlink_to(str(os.getpid()))
            time.sleep(600)
        while not (folder / "waiting").is_symlink():
            time.sleep(0.01)
        raise ValueError("the last one fails")


if __name__ == "__main__":
    main()
