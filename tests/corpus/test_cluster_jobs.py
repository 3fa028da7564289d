"""Jobs of a corpus on a cluster: dependencies, scripts and options, with stubs that queue the jobs."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from tests.corpus.texts import write_rows

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.corpus import cleaning, inputs
from recipes_lib.corpus.cleaning import make_corpus
from recipes_lib.errors import ConfigError

SLURM = {"partition": "cpu", "time": "01:00:00", "comparing": {"mem_per_cpu_gb": 64}}


@pytest.fixture
def config(tmp_path):
    write_rows(tmp_path / "web.jsonl", ["a page"])
    return CorpusConfig(
        sources=[{"name": str(tmp_path / "web.jsonl")}],
        output_dir=str(tmp_path / "out"),
        executor="slurm",
        executor_options=SLURM,
        workers=3,
    )


def test_slurm_jobs_depend_on_the_previous_stage(config, tmp_path, slurm):
    assert make_corpus(config) is None
    calls = (slurm / "calls").read_text().splitlines()
    submitted = [number for number, call in enumerate(calls, 1) if "RUN_OFFSET" in call]
    assert ["dependency=afterok" in calls[number - 1] for number in submitted] == [False, True, True, True]
    scripts = [(slurm / f"script-{number}").read_text() for number in submitted]
    assert [script.partition("mem-per-cpu=")[2].partition("\n")[0] for script in scripts] == ["2G", "64G", "2G", "2G"]
    assert all("%3\n" in script and "kill-on-invalid-dep=yes" in script for script in scripts)
    finish = next((tmp_path / "out" / ".work").glob("finish-*"))
    (slurm / "state").write_text("PENDING")
    with pytest.raises(ConfigError, match=f"queued; the last is {submitted[-1]}"):
        make_corpus(config)
    assert (finish / "executor.pik").is_file()
    assert len((slurm / "calls").read_text().splitlines()) == len(calls)
    (slurm / "state").write_text("FAILED")
    assert make_corpus(config) is None
    assert len((slurm / "calls").read_text().splitlines()) == 2 * len(calls)
    with pytest.raises(ConfigError, match="executor_options"):
        make_corpus(replace(config, output_dir=str(tmp_path / "b"), executor_options={"queue": "x"}))
    (slurm / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match="sbatch failed with exit code 3"):
        make_corpus(replace(config, output_dir=str(tmp_path / "c")))
    (slurm / "sbatch").unlink()
    with pytest.raises(ConfigError, match="sbatch is not installed"):
        make_corpus(replace(config, output_dir=str(tmp_path / "d")))


def test_slurm_job_waits_for_a_new_source_before_a_finished_one(config, tmp_path, slurm):
    write_rows(tmp_path / "books.jsonl", ["a book"])
    config = replace(config, sources=[{"name": str(tmp_path / "books.jsonl")}, *config.sources])
    (_, finished, *_), _ = cleaning.build_jobs(config, inputs.open_inputs(config), tmp_path / "out" / ".work")
    (finished.folder / "completions").mkdir(parents=True)
    for rank in range(finished.num_tasks):
        (finished.folder / "completions" / f"{rank:05d}").touch()
    assert make_corpus(config) is None
    cleaned, _, compared, *_ = (slurm / "calls").read_text().splitlines()
    assert "--dependency" not in cleaned
    assert "--dependency=afterok:1 " in compared


@pytest.mark.parametrize("name", ["an out", "a$b", "it's", "50%j"])
def test_path_that_slurm_scripts_do_not_quote_is_rejected(name, config, tmp_path, slurm, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ConfigError, match=r"output_dir: .* contains .*, which datatrove's Slurm scripts do not allow"):
        make_corpus(replace(config, output_dir="out"))
    assert not (slurm / "calls").exists()


def test_label_of_any_characters_is_a_valid_job_name(config, slurm):
    make_corpus(replace(config, sources=[{**config.sources[0], "label": 'it\'s a "$(id)"\n--wrap'}]))
    script = (slurm / "script-1").read_text()
    assert "#SBATCH --job-name=cleaning-it-s-a-id---wrap\n" in script
    subprocess.run(["bash", "-n", slurm / "script-1"], check=True)


def test_options_of_one_job_keep_the_defaults(tmp_path):
    given = {"sbatch_args": {"account": "a"}, "cleaning": {"sbatch_args": {"account": "b"}, "condaenv": "env"}}
    config = CorpusConfig(executor="slurm", executor_options=given)
    options = cleaning.choose_options(cleaning.Job("cleaning web", tmp_path, [], 1), config)
    assert options == {"sbatch_args": {"account": "b", "kill-on-invalid-dep": "yes"}, "condaenv": "env"}


def test_memory_request_follows_input_size(tmp_path):
    job = cleaning.Job("comparing", tmp_path, [], 1, num_bytes=10**12)
    config = CorpusConfig(executor="ray", executor_options={"cpus_per_task": 2})
    assert cleaning.choose_options(job, config) == {"mem_per_cpu_gb": 115, "cpus_per_task": 2}
    assert cleaning.choose_options(replace(job, name="writing"), config) == {"cpus_per_task": 2}
