"""The only caller of torch.distributed: axes of ranks, lanes that carry collectives, tickets that wait for them.

A `Lane` submits collectives in one order and hands out a `Ticket` for each. Between submit and `Ticket.wait` the
buffers are leased to the lane: nobody may write what it reads, read what it writes, or free either. `wait` orders the
*current stream* behind the collective; on NCCL that is no statement about the host, on gloo it happens to be one.
A big buffer is allocated and freed by the `Arena`, on the compute stream, and only while no lane holds it.

Sums only go over the wire; whoever wants a mean multiplies once afterwards.
"""

from sheer.comm.arena import Arena, Vault
from sheer.comm.axis import Axis
from sheer.comm.beside import Beside
from sheer.comm.counters import Counters, Traffic
from sheer.comm.depots import Copy, Depot, Depots, DeviceMemory, HostMemory
from sheer.comm.files import Files
from sheer.comm.lane import Lane
from sheer.comm.links import CONTROL_BYTES, Link, Links, MessageCounters, Route, build_links
from sheer.comm.mesh import (
    Mesh,
    build_mesh,
    data_axis,
    destroy_process_group,
    init_process_group,
    is_initialized,
    rank,
    world_size,
)
from sheer.comm.tickets import Finish, Ticket
from sheer.comm.transport import GlooTransport, NativeTransport, Transport

__all__ = [
    "CONTROL_BYTES",
    "Arena",
    "Axis",
    "Beside",
    "Copy",
    "Counters",
    "Depot",
    "Depots",
    "DeviceMemory",
    "Files",
    "Finish",
    "GlooTransport",
    "HostMemory",
    "Lane",
    "Link",
    "Links",
    "Mesh",
    "MessageCounters",
    "NativeTransport",
    "Route",
    "Ticket",
    "Traffic",
    "Transport",
    "Vault",
    "build_links",
    "build_mesh",
    "data_axis",
    "destroy_process_group",
    "init_process_group",
    "is_initialized",
    "rank",
    "world_size",
]
