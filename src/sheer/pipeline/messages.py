"""Messages between stages: a control block, and the tensors of a structure as raw bytes, nothing else.

The block says which message it is and how its structure is described. A description travels once on a link and has a
number from then on, so that a steady step sends blocks and tensors only. One that does not fit into the block follows
it. Both ends count alike, since a link keeps the order.

    block   tag, kind, virtual stage, micro-batch, number of the description, its length, then itself if it fits
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from sheer.comm import CONTROL_BYTES
from sheer.errors import CommError
from sheer.pipeline.structure import Blueprint, Packed

_BLOCK = struct.Struct("<4sBxxxiiII")
_TAG = b"shr1"
_ROOM = CONTROL_BYTES - _BLOCK.size
REMEMBERED = 4096
"""Descriptions a link remembers; with more, both ends forget all and begin anew."""


class Content(Enum):
    """What a control block announces."""

    STRUCTURE = 0
    """A structure of tensors."""
    FAILURE = 1
    """The sender's step has failed: nothing more comes on this link in this step."""


class Address(NamedTuple):
    """Which message: the virtual stage that consumes it, and the micro-batch."""

    virtual: int
    micro_batch: int

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch} for virtual stage {self.virtual}"


class Parcel(NamedTuple):
    """A structure that has arrived, its tensors beside it. `blueprint.build(tensors)` puts it together."""

    blueprint: Blueprint
    tensors: tuple[torch.Tensor, ...]


class SendingLink(Protocol):
    """What a `Sender` needs of `sheer.comm.Link`."""

    def send(self, control: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Start a message."""


class ReceivingLink(Protocol):
    """What a `Receiver` needs of `sheer.comm.Link`."""

    def control(self) -> torch.Tensor:
        """The announced block."""

    def more_control(self, size: int) -> torch.Tensor:
        """The control bytes that follow it."""

    def tensors(self, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Receive tensors of so many bytes each."""


class Sender:
    """The sending end of one link."""

    def __init__(self, link: SendingLink) -> None:
        self._link = link
        self._numbers: dict[bytes, int] = {}

    def send(self, packed: Packed, to: Address) -> None:
        """Start sending; the contents are read until the link has settled."""
        description = packed.blueprint.to_bytes()
        number = self._numbers.get(description)
        fresh = number is None
        if number is None:
            if len(self._numbers) == REMEMBERED:
                self._numbers.clear()
            number = self._numbers[description] = len(self._numbers)
        control = _control(Content.STRUCTURE, to, number, description if fresh else b"")
        self._link.send(control, [wire for tensor in packed.tensors if (wire := _wire(tensor)).numel()])

    def fail(self) -> None:
        """Tell the receiver that nothing more comes in this step."""
        self._link.send(_control(Content.FAILURE, Address(-1, -1), 0, b""), [])


class Receiver:
    """The receiving end of one link."""

    def __init__(self, link: ReceivingLink, device: torch.device, *, name: str) -> None:
        self._link = link
        self._device = device
        self._name = name
        self._blueprints: list[Blueprint] = []

    def receive(self, expected: Address | None) -> Parcel | None:
        """The next message, which must be the expected one (None: whichever); None if the sender has failed."""
        block = self._link.control().numpy().tobytes()
        tag, content, virtual, micro_batch, number, length = _BLOCK.unpack_from(block)
        if tag != _TAG:
            raise CommError(f"the {self._name}: what arrived is no message of this version of sheer on all ranks")
        if Content(content) is Content.FAILURE:
            return None
        blueprint = self._blueprint(block, number, length)
        parcel = self._contents(blueprint)
        if expected is not None and Address(virtual, micro_batch) != expected:
            raise CommError(
                f"the {self._name}: {Address(virtual, micro_batch)} arrived where {expected} was due; all stages must "
                "run the same schedule"
            )
        return parcel

    def _blueprint(self, block: bytes, number: int, length: int) -> Blueprint:
        if not length:
            return self._blueprints[number]
        if length <= _ROOM:
            description = block[_BLOCK.size : _BLOCK.size + length]
        else:
            description = self._link.more_control(length).numpy().tobytes()
        if number == 0:  # the first, or the sender has begun anew
            self._blueprints.clear()
        self._blueprints.append(Blueprint.from_bytes(description))
        return self._blueprints[number]

    def _contents(self, blueprint: Blueprint) -> Parcel:
        sizes = [spec.nbytes for spec in blueprint.tensors]
        sent = [size for size in sizes if size]
        came = iter(self._link.tensors(sent, self._device) if sent else ())
        tensors = (
            next(came).view(spec.dtype).view(spec.shape)
            if size
            else torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            for spec, size in zip(blueprint.tensors, sizes, strict=True)
        )
        return Parcel(blueprint, tuple(tensors))


def _control(content: Content, address: Address, number: int, description: bytes) -> list[torch.Tensor]:
    """The block, and what of it did not fit."""
    head = _BLOCK.pack(_TAG, content.value, address.virtual, address.micro_batch, number, len(description))
    fits = len(description) <= _ROOM
    block = bytearray(head + (description if fits else b"")).ljust(CONTROL_BYTES, b"\0")
    parts = [torch.frombuffer(block, dtype=torch.uint8)]
    return parts if fits else [*parts, torch.frombuffer(bytearray(description), dtype=torch.uint8)]


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, flat: a view of it where it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
