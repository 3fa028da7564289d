"""Stub Slurm commands."""

from __future__ import annotations

import pytest
from tests.forked import ROOT

SBATCH = """#!/bin/bash
echo "$@" >> $STUB/calls
number=$(wc -l < $STUB/calls)
script="${@: -1}"
cp "$script" $STUB/script-$number
echo "Submitted batch job $number"
[ -e $STUB/runs ] && grep -q launch_pickled_pipeline "$script" || exit 0
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 "$last"); do
    SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=$number SLURM_NODELIST=n RUN_OFFSET=0 bash "$script" >> $STUB/log 2>&1
done
"""
SRUN = """#!/bin/bash
while [ "$1" != launch_pickled_pipeline ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
case "$2" in hostnames) echo n;; *) echo "JobId=$3 JobState=$(cat $STUB/state)";; esac
"""


@pytest.fixture
def slurm(install, monkeypatch):
    """Stub Slurm commands that queue jobs, or run them immediately if the file ``runs`` exists."""
    stub = install({"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL})
    monkeypatch.setenv("STUB", str(stub))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return stub
