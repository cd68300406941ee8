"""Bytes that this process has really sent over TCP, as the kernel counts them; gloo talks over nothing else."""

from __future__ import annotations

import os
import socket
import stat
import struct

_BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent` (u64) in Linux's `struct tcp_info`, since kernel 4.19."""


def bytes_sent() -> int:
    """The sum over this process's open TCP sockets; 0 where the kernel does not tell (no Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue  # the directory's own
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as one:
            total += _of(one)
    return total


def _of(one: socket.socket) -> int:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return 0
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return 0
    return struct.unpack_from("=Q", info, _BYTES_SENT)[0] if len(info) >= _BYTES_SENT + 8 else 0
