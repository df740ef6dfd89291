"""LaunchEnvironment: rank, world size and other facts of a launch, read from the launcher's environment variables.

This is the only file of the package that reads or sets environment variables.

Sources: torchrun's environment variables (PyTorch docs, "torchrun"), Open MPI's ``OMPI_COMM_WORLD_*``, the PMI
variables of MPICH and Intel MPI (``PMI_RANK``, ``PMI_SIZE``, ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS``), and the
output environment of ``srun`` (Slurm manual).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labinfer.base.config import DEFAULT_HUB
from labinfer.base.errors import UserError

VISIBLE_DEVICES = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""Variables that make accelerators visible to a process, by device type. For other types they are named as ``CUDA_VISIBLE_DEVICES`` is."""
GOMP_SPINCOUNT = "1000"
"""Spin iterations of GNU OpenMP threads at a barrier before they sleep."""
PORTABLE_TORCH = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
"""Variables with which torch, and MKL inside of it, compute with the same instructions on every x86 processor with AVX2."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
STATUS_FILE, NODES_FILE, IDENTITY_FILE = "status", "nodes", "identity"
SUPERVISOR = "LABINFER_SUPERVISOR"
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class SupervisorAddress:
    """Directory and gateway address that ``launch.py supervise`` gives to rank 0."""

    directory: str
    """Private directory for the gateway's local socket and for rank 0's files: nodes of the ranks once they have met, identity of the
    served models, and exit status of an orderly shutdown."""
    token: str = field(repr=False)
    """Secret by which the gateway recognizes rank 0."""
    port: int
    """Port of the gateway; 0 for a job, which has no gateway."""

    @classmethod
    def read(cls, text: str) -> SupervisorAddress:
        """Parse the value of $LABINFER_SUPERVISOR, as ``supervised`` writes it."""
        token, port, directory = text.split(":", 2)
        return cls(directory, token, int(port))

    def write_status(self, status: int) -> None:
        """Store the exit status of an orderly shutdown, which launchers hide."""
        self._write(STATUS_FILE, str(int(status)))

    def write_nodes(self, nodes: Sequence[str]) -> None:
        """Store that the ranks have met, and the node of each rank."""
        self._write(NODES_FILE, "\n".join(nodes))

    def read_nodes(self) -> list[str]:
        """Node of each rank of the last group whose ranks have met; empty before."""
        try:
            return (Path(self.directory) / NODES_FILE).read_text().splitlines()
        except OSError:
            return []

    def write_identity(self, data: bytes) -> None:
        """Store the identity of the served models for the next group of ranks.

        An unchanged identity is not written again, so that a restart does not fail on a full disk.

        Raises:
            UserError: the file cannot be written.
        """
        if self.read_identity() == data:
            return
        new = Path(self.directory) / f"{IDENTITY_FILE}.new"
        try:
            new.write_bytes(data)
            os.replace(new, new.with_suffix(""))
        except OSError as error:
            raise UserError(f"{new} cannot be written: {error.strerror}; free some space there") from None

    def read_identity(self) -> bytes:
        """Identity of the models that the last group of ranks stored; empty before."""
        try:
            return (Path(self.directory) / IDENTITY_FILE).read_bytes()
        except FileNotFoundError:
            return b""

    def _write(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):
            (Path(self.directory) / name).write_text(text)


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Facts of a launch from environment variables: launcher, position of this process, and user settings."""

    launcher: str
    """``torchrun``, ``openmpi``, ``mpich`` (Intel MPI too), ``slurm`` or ``single``."""
    decided_by: str
    """Variable that identified the launcher, with its value."""
    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this node."""
    local_world_size: int
    """Number of ranks on this node."""
    node_name: str
    master_addr: str = ""
    """Host of rank 0, if the launcher names it; empty under MPI, which has its own rendezvous."""
    master_port: int = 0
    omp_num_threads: int = 0
    """Value of the user's OMP_NUM_THREADS; 0 if unset, or if torchrun has set it to 1."""
    omp_forced: bool = False
    """Whether torchrun, not the user, has set OMP_NUM_THREADS=1."""
    model_dir: str = ""
    """$LABINFER_MODEL_DIR: directory of models given by name."""
    hub: str = DEFAULT_HUB
    """$LABINFER_HUB: hub of models given by id, unless ``--hub`` names one."""
    api_key: str = field(default="", repr=False)
    """$LABINFER_API_KEY: API key of ``chat --url``."""
    supervisor: SupervisorAddress | None = None
    """$LABINFER_SUPERVISOR, set by ``launch.py supervise``."""
    notes: tuple[str, ...] = ()
    """Ignored variables with the reason, for the start-up banner."""

    @property
    def uses_mpi(self) -> bool:
        return self.launcher in ("openmpi", "mpich")

    @property
    def is_one_node(self) -> bool:
        return self.world_size == self.local_world_size

    def describe(self) -> str:
        """Launcher, ranks and node in one line."""
        if self.launcher == "single":
            return f"single process on {self.node_name} ({self.decided_by})"
        return (
            f"launcher {self.launcher} (by {self.decided_by}): rank {self.rank} of {self.world_size}, "
            f"local rank {self.local_rank} of {self.local_world_size} on {self.node_name}"
        )


def detect(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Find the launcher: torchrun, then Open MPI, MPICH / Intel MPI, Slurm, and otherwise a single process.

    ``RANK`` and ``WORLD_SIZE`` without ``LOCAL_RANK`` are ignored: some platforms put the node's index there.

    Raises:
        UserError: variables of a launcher are set but inconsistent.
    """
    env = os.environ if environ is None else environ
    common = {
        "node_name": env.get("LABINFER_NODE_NAME") or socket.gethostname(),
        "model_dir": env.get("LABINFER_MODEL_DIR", ""),
        "hub": env.get("LABINFER_HUB") or DEFAULT_HUB,
        "api_key": env.get("LABINFER_API_KEY", ""),
    }
    if supervisor := env.get(SUPERVISOR):
        common["supervisor"] = SupervisorAddress.read(supervisor)
    omp = env.get("OMP_NUM_THREADS", "")
    outermost = omp.split(",")[0]  # a list sets nested levels
    if outermost.isascii() and outermost.isdigit():
        common["omp_num_threads"] = int(outermost)

    if all(name in env for name in TORCHRUN_VARIABLES):
        ranks = _ranks(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if omp == "1" and ranks["local_world_size"] > 1:  # torchrun sets 1 unless the user has set a value
            common |= {"omp_num_threads": 0, "omp_forced": True}
        common |= {"master_addr": env["MASTER_ADDR"], "master_port": _number(env, "MASTER_PORT")}
        decided_by = f"LOCAL_RANK={env['LOCAL_RANK']} with RANK, WORLD_SIZE and MASTER_ADDR"
        return _checked(LaunchEnvironment(launcher="torchrun", decided_by=decided_by, **ranks, **common))

    if "RANK" in env and "WORLD_SIZE" in env:
        seen = f"RANK={env['RANK']} WORLD_SIZE={env['WORLD_SIZE']}"
        missing = ", ".join(name for name in TORCHRUN_VARIABLES if name not in env)
        common["notes"] = (f"{seen} ignored: without {missing} they may count nodes instead of processes",)

    if "OMPI_COMM_WORLD_RANK" in env:
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        decided_by = f"{names[0]}={env[names[0]]}"
        return _checked(LaunchEnvironment(launcher="openmpi", decided_by=decided_by, **_ranks(env, *names), **common))
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        local_rank, local_world_size = _number(env, "MPI_LOCALRANKID", "0"), _number(env, "MPI_LOCALNRANKS", "1")
        if "MPI_LOCALRANKID" not in env and "SLURM_LOCALID" in env:  # srun --mpi=pmi2
            local_rank, local_world_size = _slurm_local(env)
        return _checked(
            LaunchEnvironment(
                launcher="mpich",
                decided_by=f"PMI_RANK={env['PMI_RANK']}",
                rank=_number(env, "PMI_RANK"),
                world_size=_number(env, "PMI_SIZE"),
                local_rank=local_rank,
                local_world_size=local_world_size,
                **common,
            )
        )
    # A batch script has SLURM_PROCID too; only a step started by srun has SLURM_STEP_NUM_TASKS and a real step id.
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return _checked(_from_slurm(env, common))
    return LaunchEnvironment(
        launcher="single",
        decided_by="no launcher detected",
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        **common,
    )


def shorten_openmp_spins(environ: MutableMapping[str, str] | None = None) -> None:
    """Let OpenMP threads spin only briefly at a barrier before they sleep. Call it before torch is imported.

    GNU OpenMP's default stalls ranks that share cores (``docs/decisions/0006``). A user's setting is kept.
    """
    env = os.environ if environ is None else environ
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", GOMP_SPINCOUNT)


def make_portable() -> None:
    """Set the environment variables ``PORTABLE_TORCH``. Call it before torch's first computation, when torch and MKL read the variables."""
    os.environ.update(PORTABLE_TORCH)


def visible_devices(device_type: str) -> list[str]:
    """Accelerators that the environment makes visible to this process, as named there; empty if it does not restrict them."""
    name = VISIBLE_DEVICES.get(device_type, f"{device_type.upper()}_VISIBLE_DEVICES")
    return [entry.strip() for entry in os.environ.get(name, "").split(",") if entry.strip()]


def choose_gloo_interface(name: str) -> None:
    """Bind gloo to an interface. A user's setting is kept."""
    os.environ.setdefault(GLOO_INTERFACE, name)


def choose_mpi_ports(ports: Sequence[int]) -> None:
    """Restrict MPICH to ``ports``, for both of its network libraries. User settings are kept. Call it before MPI is initialized."""
    if ports:
        os.environ.setdefault("UCX_TCP_PORT_RANGE", f"{ports[0]}-{ports[-1]}")
        os.environ.setdefault("FI_TCP_PORT_LOW_RANGE", str(ports[0]))
        os.environ.setdefault("FI_TCP_PORT_HIGH_RANGE", str(ports[-1]))


def supervised(address: SupervisorAddress) -> dict[str, str]:
    """Environment variables for a group that this process supervises."""
    return os.environ | {SUPERVISOR: f"{address.token}:{address.port}:{address.directory}"}


def _from_slurm(env: Mapping[str, str], common: dict) -> LaunchEnvironment:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    local_rank, local_world_size = _slurm_local(env)
    job_id, step_id = _number(env, "SLURM_JOB_ID", "0"), _number(env, "SLURM_STEP_ID", "0")
    return LaunchEnvironment(
        launcher="slurm",
        decided_by=f"SLURM_PROCID={env['SLURM_PROCID']}",
        rank=_number(env, "SLURM_PROCID"),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=env.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
        # Every rank must choose the same port without communication. Two steps of a job must choose different ports.
        # The range ends below the ephemeral ports (from 32768 on), of which connections of other programs use any.
        master_port=_number(env, "MASTER_PORT", default=str(20000 + (job_id * 7 + step_id) % 12000)),
        **common,
    )


def _slurm_local(env: Mapping[str, str]) -> tuple[int, int]:
    """Local rank and number of ranks on this node, of a Slurm step."""
    tasks_per_node = expand_task_counts(env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node_id = _number(env, "SLURM_NODEID", "0")
    return _number(env, "SLURM_LOCALID", "0"), tasks_per_node[node_id] if node_id < len(tasks_per_node) else 1


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: ``gpu[03-05,07],login`` → ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", nodelist)
    if not match:
        return ""
    prefix, ranges, suffix = match.groups()
    return prefix + (re.split(r"[,-]", ranges)[0] if ranges else "") + suffix


def expand_task_counts(text: str) -> list[int]:
    """Expand Slurm's tasks per node: ``2(x3),1`` → ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of task counts such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _ranks(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> dict[str, int]:
    """The four rank fields of ``LaunchEnvironment``, from the named variables."""
    return {
        "rank": _number(env, rank),
        "world_size": _number(env, size),
        "local_rank": _number(env, local_rank),
        "local_world_size": _number(env, local_size),
    }


def _number(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    if text is None:
        raise UserError(
            f"the launcher set some of its variables but not {name}; start the ranks with torchrun, mpirun or srun"
        )
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text!r} is not a number; start the ranks with torchrun, mpirun or srun")
    return int(text)


def _checked(launch: LaunchEnvironment) -> LaunchEnvironment:
    if not 0 <= launch.rank < launch.world_size or not 0 <= launch.local_rank < launch.local_world_size:
        raise UserError(f"the launcher's variables are inconsistent: {launch.describe()}")
    return launch
