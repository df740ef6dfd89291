"""The launch environment: each launcher's variables, who wins, and what is refused."""

from __future__ import annotations

import pytest

from labinfer.base.errors import UserError
from labinfer.comm.spmd.environment import (
    TORCHRUN_VARIABLES,
    SupervisorAddress,
    detect,
    expand_task_counts,
    first_host,
    shorten_openmp_spins,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05,07]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,2",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
}


def shape(found):
    return found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size


def test_torchrun_is_read_from_its_full_set():
    found = detect(TORCHRUN)
    assert shape(found) == ("torchrun", 5, 8, 1, 4)
    assert (found.master_addr, found.master_port) == ("node-a", 29500)
    assert not found.uses_mpi


@pytest.mark.parametrize("missing", TORCHRUN_VARIABLES)
def test_torchrun_needs_every_one_of_its_variables(missing):
    found = detect({name: value for name, value in TORCHRUN.items() if name != missing})
    assert shape(found) == ("single", 0, 1, 0, 1)


def test_one_openmp_thread_forced_by_torchrun_is_not_a_choice():
    found = detect(TORCHRUN | {"OMP_NUM_THREADS": "1"})
    assert (found.omp_num_threads, found.omp_forced) == (0, True)


def test_openmp_threads_chosen_by_the_user_are_kept_under_torchrun():
    found = detect(TORCHRUN | {"OMP_NUM_THREADS": "3"})
    assert (found.omp_num_threads, found.omp_forced) == (3, False)


def test_torchrun_does_not_force_openmp_threads_on_a_lone_rank_of_a_node():
    found = detect(TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"})
    assert (found.omp_num_threads, found.omp_forced) == (1, False)


@pytest.mark.parametrize("variables", [{}, OPEN_MPI, MPICH, SLURM])
def test_elsewhere_one_openmp_thread_is_the_users_choice(variables):
    found = detect(variables | {"OMP_NUM_THREADS": "1"})
    assert (found.omp_num_threads, found.omp_forced) == (1, False)


def test_open_mpi_is_recognised():
    found = detect(OPEN_MPI)
    assert shape(found) == ("openmpi", 3, 6, 1, 2)
    assert found.uses_mpi and found.master_addr == ""


def test_mpich_and_intel_mpi_are_recognised():
    found = detect(MPICH)
    assert shape(found) == ("mpich", 2, 4, 0, 2)
    assert found.uses_mpi and found.master_addr == ""


def test_mpich_without_local_numbers_counts_one_rank_on_the_node():
    assert shape(detect({"PMI_RANK": "1", "PMI_SIZE": "2"})) == ("mpich", 1, 2, 0, 1)


def test_slurm_step_is_recognised():
    found = detect(SLURM)
    assert shape(found) == ("slurm", 4, 7, 0, 1)
    assert found.master_addr == "gpu03"
    assert not found.uses_mpi


@pytest.mark.parametrize(("node_id", "tasks"), [("0", 2), ("1", 2), ("2", 1), ("3", 2)])
def test_slurm_tasks_of_this_node_are_looked_up_by_its_number(node_id, tasks):
    assert detect(SLURM | {"SLURM_NODEID": node_id}).local_world_size == tasks


def test_slurm_ranks_agree_on_a_port_and_steps_of_a_job_differ():
    ports = {detect(SLURM | {"SLURM_PROCID": str(rank)}).master_port for rank in range(7)}
    assert len(ports) == 1
    assert detect(SLURM | {"SLURM_STEP_ID": "1"}).master_port not in ports


def test_slurm_ports_of_jobs_differ_and_are_not_ephemeral():
    ports = {detect(SLURM | {"SLURM_JOB_ID": str(job)}).master_port for job in range(5000, 17000)}
    assert len(ports) == 12000
    assert min(ports) > 1024 and max(ports) < 32768


def test_slurm_rendezvous_may_be_set_by_the_user():
    found = detect(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "4444"})
    assert (found.launcher, found.master_addr, found.master_port) == ("slurm", "head", 4444)


def test_sbatch_script_without_a_step_is_a_single_process():
    script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    assert shape(detect(script)) == ("single", 0, 1, 0, 1)


def test_no_launcher_is_a_single_process():
    found = detect({})
    assert shape(found) == ("single", 0, 1, 0, 1)
    assert found.decided_by == "no launcher detected"
    assert found.notes == ()


def test_precedence_is_torchrun_then_open_mpi_then_mpich_then_slurm():
    env, order = TORCHRUN | OPEN_MPI | MPICH | SLURM, []
    for variables in (TORCHRUN, OPEN_MPI, MPICH, SLURM):
        order.append(detect(env).launcher)
        env = {name: value for name, value in env.items() if name not in variables}
    assert [*order, detect(env).launcher] == ["torchrun", "openmpi", "mpich", "slurm", "single"]


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (TORCHRUN, "LOCAL_RANK=1"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK=3"),
        (MPICH, "PMI_RANK=2"),
        (SLURM, "SLURM_PROCID=4"),
    ],
)
def test_deciding_variable_is_named(variables, name):
    found = detect(variables)
    assert name in found.decided_by
    assert name in found.describe() and f"rank {found.rank} of {found.world_size}" in found.describe()


def test_rank_and_world_size_without_local_rank_are_passed_over_with_a_note():
    found = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert shape(found) == ("single", 0, 1, 0, 1)
    assert len(found.notes) == 1
    assert "RANK=1 WORLD_SIZE=2 ignored" in found.notes[0] and "LOCAL_RANK" in found.notes[0]


def test_note_survives_where_another_launcher_decides():
    found = detect(OPEN_MPI | {"RANK": "1", "WORLD_SIZE": "2"})
    assert found.launcher == "openmpi" and len(found.notes) == 1


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        (TORCHRUN, {"RANK": "five"}),
        (TORCHRUN, {"RANK": "-1"}),
        (TORCHRUN, {"RANK": "8"}),
        (TORCHRUN, {"LOCAL_RANK": "4"}),
        (TORCHRUN, {"MASTER_PORT": ""}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "6"}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
        (MPICH, {"PMI_SIZE": "0"}),
        (MPICH, {"MPI_LOCALRANKID": "2"}),
        (SLURM, {"SLURM_STEP_NUM_TASKS": "4"}),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "many"}),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(variables, wrong):
    with pytest.raises(UserError) as caught:
        detect(variables | wrong)
    (name, value), text = next(iter(wrong.items())), str(caught.value)
    assert name in text or "are inconsistent" in text
    assert value in text


def test_half_a_launchers_variables_are_refused():
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE"):
        detect({"OMPI_COMM_WORLD_RANK": "0"})


def test_node_name_and_model_directory_come_from_the_environment():
    found = detect({"LABINFER_NODE_NAME": "rack-1", "LABINFER_MODEL_DIR": "/models"})
    assert (found.node_name, found.model_dir) == ("rack-1", "/models")
    assert detect({}).node_name


def test_hub_comes_from_the_environment():
    assert (detect({}).hub, detect({"LABINFER_HUB": "modelscope"}).hub) == ("huggingface", "modelscope")


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu04", "gpu03"),
        ("gpu[03-05,07],login", "gpu03"),
        ("gpu[7,9-12]", "gpu7"),
        ("rack1-gpu[03-05]-ib,x", "rack1-gpu03-ib"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1, 3(x2)", [1, 3, 3])])
def test_slurm_task_counts_are_expanded(text, counts):
    assert expand_task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "2x3", "2(x)", "-1", "2(x3"])
def test_broken_slurm_task_counts_are_refused(text):
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_task_counts(text)


def test_openmp_spins_briefly_unless_the_user_chose():
    for given, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)):
        env = dict(given)
        shorten_openmp_spins(env)
        assert env.get("GOMP_SPINCOUNT") == expected


def test_identity_is_written_again_only_if_it_differs(tmp_path):
    supervisor = SupervisorAddress(str(tmp_path), "", 0)
    assert supervisor.read_identity() == b""
    supervisor.write_identity(b"first")
    (tmp_path / "identity.new").mkdir()  # nothing can be written there
    supervisor.write_identity(b"first")
    with pytest.raises(UserError, match=r"identity\.new cannot be written: Is a directory; free some space"):
        supervisor.write_identity(b"second")
    assert supervisor.read_identity() == b"first"
