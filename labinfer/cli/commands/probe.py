"""``launch.py probe``: measures costs of a model's steps (layers, LM head) on the machines of this launch, and the links between
the machines."""

from __future__ import annotations

import sys

import msgspec

from labinfer.base.errors import ExitStatus
from labinfer.base.standard_error import terminal_columns
from labinfer.cli.commands.measuring import measuring
from labinfer.cli.commands.session import Session
from labinfer.launch.measure.probe import probe_cluster
from labinfer.observe.output_file import STANDARD, OutputFile, tell_written
from labinfer.observe.table import format_bytes, format_table
from labinfer.planner.cluster import Machine
from labinfer.planner.costs import HostCosts
from labinfer.planner.options import ProbeOptions

ROWS = (1, 8, 64, 512)
"""Numbers of rows (tokens) for which the table shows the time of a layer."""
HOST_HEADER = ("host", "ranks", "tp", "dtype", "memory", "LM head ms", "step ms", "hardware")
"""Columns of the table of hosts: ``memory`` is free memory per rank, ``LM head ms`` the time of the LM head for one row,
``step ms`` the constant time of a step."""
COST_TITLE = "milliseconds of a layer: by rows (tokens), and per 1,000 tokens of context"
COST_HEADER = (
    *("host", "tp", "dtype", "weights"),
    *(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS),
    "1k context",
)
"""Columns of the table of costs: weight bytes of a layer, time of a layer by number of rows, and additional time per 1,000 context
tokens of decodes."""

LINK_HEADER = ("link", "latency ms", "Mbit/s")


def run(session: Session, own: ProbeOptions) -> int:
    """Probe all machines in parallel, or use costs that were measured earlier. Rank 0 prints tables, and writes ``--save``."""
    group = session.join()
    file = None
    with group.raise_on_all_ranks():
        group.refuse_spares(session.options.parallel.ranks)
        if group.rank == 0 and own.save:
            file = OutputFile(own.save, "--save")
    with measuring(group) as on_progress:
        cluster = probe_cluster(group, session.options, on_progress)
    if group.rank == 0:
        hosts = [(machine, costs) for machine in cluster.machines for costs in machine.costs]
        costs_of_layers = [row for machine, costs in hosts for row in cost_rows(machine, costs)]
        width = terminal_columns(sys.stdout)
        tables = [
            format_table(HOST_HEADER, [host_row(machine, costs) for machine, costs in hosts], width),
            f"{COST_TITLE}\n{format_table(COST_HEADER, costs_of_layers, width)}",
        ]
        if cluster.links:
            rows = [
                (f"{pair.a} - {pair.b}", round(1e3 * pair.link.latency, 3), round(pair.link.bytes_per_second / 125e3))
                for pair in cluster.links
            ]
            tables.append(format_table(LINK_HEADER, rows))
        OutputFile(STANDARD).write("\n\n".join(tables) + "\n")
        if file is not None:
            file.begin()
            file.write(msgspec.json.format(msgspec.json.encode(cluster), indent=1).decode() + "\n")
            file.close()
            tell_written(own.save)
    group.close()
    return ExitStatus.OK


def host_row(machine: Machine, host: HostCosts) -> tuple:
    """The row of a machine in the table of hosts, with the columns of ``HOST_HEADER``."""
    times = (round(1e3 * host.head.at(1), 3), round(1e3 * host.fixed, 3))
    return (machine.name, machine.ranks, host.tp_size, host.dtype, format_bytes(host.memory), *times, host.hardware)


def cost_rows(machine: Machine, host: HostCosts) -> list[tuple]:
    """Rows of a machine in the table of costs, one for each kind of layer, with the columns of ``COST_HEADER``."""
    return [
        (
            *(machine.name, host.tp_size, host.dtype),
            format_bytes(host.layer_bytes[kind]),
            *(round(1e3 * (costs.linear.at(rows) + costs.small.at(rows)), 3) for rows in ROWS),
            round(1e6 * costs.decode[2], 3),
        )
        for kind, costs in host.layer_kinds.items()
    ]
