"""The machines of a run, read from what SLURM, torchrun and nobody leave in the environment."""

from __future__ import annotations

import pytest

from recipes_lib.commands.launch import Machines, find_first_host, find_machines
from recipes_lib.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "gpu-[017-019,031]",
    "SLURM_NODEID": "2",
}


def test_nobody_says_anything_of_one_machine():
    assert find_machines({"PATH": "/bin"}) == Machines()


def test_slurm_says_which_node_this_is_and_where_the_first_one_is():
    assert find_machines(STEP) == Machines(4, 2, "gpu-017", 24567, "SLURM, 4 nodes")


def test_a_batch_script_on_one_node_needs_no_step():
    assert find_machines({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}).num_machines == 1


def test_a_batch_script_on_several_nodes_would_start_one_of_them():
    script = {name: value for name, value in STEP.items() if "STEP" not in name}
    with pytest.raises(ConfigError, match=r"gave 4 nodes[\s\S]*srun --ntasks-per-node=1"):
        find_machines(script)


@pytest.mark.parametrize("tasks", ["8(x4)", "2", "1(x3),8"])
def test_several_tasks_on_a_node_would_start_as_many_launchers(tasks):
    with pytest.raises(ConfigError, match="tasks on a node"):
        find_machines(STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks})


def test_torchruns_variables_say_it_too():
    told = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "head", "PET_MASTER_PORT": "1234"}
    found = find_machines(told)
    assert (found.num_machines, found.machine_rank) == (2, 1)
    assert (found.main_process_ip, found.main_process_port) == ("head", 1234)


@pytest.mark.parametrize("name", ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["1:4", "", "two"])
def test_a_variable_that_is_no_number_is_named(name, text):
    with pytest.raises(ConfigError, match=f"{name}: '{text}' is not a whole number"):
        find_machines({"PET_NNODES": "2", name: text})


def test_a_started_process_starts_no_others():
    with pytest.raises(ConfigError, match="process 5 of an existing launch"):
        find_machines({"LOCAL_RANK": "1", "RANK": "5"} | STEP)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("login,gpu-[1-2]", "login"),
        ("gpu-[017-020,031],login", "gpu-017"),
        ("gpu-[5]", "gpu-5"),
        ("a[1,3]b,c", "a1b"),
        ("a[08-09]-ib", "a08-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert find_first_host(nodes) == first
