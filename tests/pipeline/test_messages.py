"""What travels between stages arrives as it was, with nothing beside it but a block of fixed size."""

import json
from collections import OrderedDict, deque
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sheer import comm
from sheer.comm import CONTROL_BYTES, Route, build_links
from sheer.errors import CommError, DataError
from sheer.pipeline import messages
from sheer.pipeline.messages import Address, Receiver, Sender
from sheer.pipeline.structure import pack
from tests.pipeline.structures import Frozen, Output, Pair, State, bits, same

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


class Memory:
    """Both ends of a link within one process; counts as a link does."""

    def __init__(self) -> None:
        self.controls: deque[torch.Tensor] = deque()
        self.bodies: deque[torch.Tensor] = deque()
        self.control_bytes = self.tensor_bytes = 0

    def send(self, control, tensors):
        assert control[0].nbytes == CONTROL_BYTES < 1024
        self.controls += [part.clone() for part in control]
        self.bodies += [tensor.clone() for tensor in tensors]
        self.control_bytes += sum(part.nbytes for part in control)
        self.tensor_bytes += sum(tensor.nbytes for tensor in tensors)

    def control(self):
        return self.controls.popleft()

    def more_control(self, size):
        assert self.controls[0].numel() == size
        return self.controls.popleft()

    def tensors(self, sizes, device):
        came = [self.bodies.popleft() for _ in sizes]
        assert [one.nbytes for one in came] == sizes
        return came


class Wire:
    def __init__(self) -> None:
        self.link = Memory()
        self.sender, self.receiver = Sender(self.link), Receiver(self.link, CPU, name="test route")

    def carry(self, value):
        address = Address(1, 0)
        self.sender.send(pack(value, what="output"), address)
        parcel = self.receiver.receive(address)
        assert not self.link.controls
        assert not self.link.bodies
        for spec, tensor in zip(parcel.blueprint.tensors, parcel.tensors, strict=True):
            tensor.requires_grad_(spec.wants_grad)
        return parcel.blueprint.build(parcel.tensors)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**31))
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    if dtype is torch.complex64 and draw(st.booleans()):
        tensor = tensor.conj()
    return tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
keys = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4)
structures = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(State, inner, inner)
        | st.builds(Frozen, inner)
    ),
    max_leaves=8,
)


@given(st.lists(structures, min_size=1, max_size=4))
def test_everything_arrives_as_it_was(values):
    wire = Wire()
    for value in [*values, *values]:
        assert same(wire.carry(value), value)


@given(structures)
def test_a_known_structure_costs_one_block_and_its_tensors(value):
    wire = Wire()
    wire.carry(value)
    before = wire.link.control_bytes, wire.link.tensor_bytes
    wire.carry(value)
    assert wire.link.control_bytes - before[0] == CONTROL_BYTES
    assert wire.link.tensor_bytes - before[1] == sum(t.nbytes for t in pack(value, what="x").tensors)


def test_one_tensor_twice_is_sent_once_and_stays_one():
    wire = Wire()
    x = torch.randn(5)
    a, b = wire.carry((x, [x]))
    assert a is b[0]
    assert wire.link.tensor_bytes == x.nbytes


def test_a_description_longer_than_the_block_follows_it():
    wire = Wire()
    many = {f"a rather long key {i}": torch.randn(2) for i in range(100)}
    assert same(wire.carry(many), many)
    assert same(wire.carry(many), many)
    assert 2 * CONTROL_BYTES < wire.link.control_bytes < 20 * CONTROL_BYTES


def test_descriptions_are_forgotten_at_both_ends_alike(monkeypatch):
    monkeypatch.setattr(messages, "REMEMBERED", 3)
    wire = Wire()
    for length in [1, 2, 3, 1, 4, 4, 1, 2, 5, 6, 7, 1]:
        assert wire.carry(torch.ones(length)).shape == (length,)
    assert len(wire.sender._numbers) <= 3


class Colour(IntEnum):
    RED = 1


def local_class():
    from dataclasses import make_dataclass

    return make_dataclass("Local", ["x"])(1)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ((1, {"a": np.float32(1)}), r"output\[1\]\['a'\] is a numpy.float32"),
        ([np.zeros(2)], r"output\[0\] is a numpy.ndarray"),
        (Colour.RED, "Colour"),
        ({1, 2}, "builtins.set"),
        (Output(a=1), "structures.Output"),
        (State(lambda x: x), r"output.hidden is a builtins.function"),
        (local_class(), "cannot import"),
        ({(1, 2): 3}, r"the key \(1, 2\)"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "only plain dense"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_travel_is_refused_where_it_is_sent(value, says):
    with pytest.raises(DataError, match=says):
        pack(value, what="output")


def test_a_message_that_is_not_the_expected_one_is_named():
    wire = Wire()
    wire.sender.send(pack(1, what="x"), Address(2, 3))
    with pytest.raises(CommError, match=r"micro-batch 3 for virtual stage 2 arrived where micro-batch 4"):
        wire.receiver.receive(Address(2, 4))


def test_a_failure_is_a_message_of_its_own():
    wire = Wire()
    wire.sender.fail()
    assert wire.receiver.receive(Address(0, 0)) is None


def test_descriptions_are_plain_json():
    packed = pack(Pair(torch.ones(2, requires_grad=True), {"n": 3}), what="x")
    assert json.loads(packed.blueprint.to_bytes())[1] == [["float32", [2], True]]


VALUES = [
    torch.arange(6.0).reshape(2, 3).t(),
    (torch.tensor(3), None, torch.zeros(0, 4), {"mask": torch.tensor([True, False]), "n": float("inf")}),
    State(torch.ones(3, dtype=torch.bfloat16), Frozen(Pair(1, "é"))),
    {str(i): torch.full((i,), i) for i in range(80)},
]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("own_groups", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_two_processes_in_both_directions(own_groups, late):
    from contextlib import nullcontext

    from tests.harness.late_work import late_collectives

    axis = comm.data_axis()
    there, back = Route(0, 1, "activation"), Route(1, 0, "gradient")
    links = build_links(axis, [there, back], own_groups=own_groups)
    out, into = (there, back) if axis.rank == 0 else (back, there)
    sender, receiver = Sender(links[out]), Receiver(links[into], CPU, name=str(into))
    with late_collectives() if late else nullcontext():
        for number, value in enumerate([*VALUES, *VALUES]):
            links[into].expect()
            sender.send(pack(value, what="x"), Address(1, number))
            parcel = receiver.receive(Address(1, number))
            assert same(parcel.blueprint.build(parcel.tensors), value)
        links[out].settle()
    assert links[out].unsettled == 0
    assert links.counters.messages == 8
    assert links.counters.tensor_bytes == 2 * sum(t.nbytes for v in VALUES for t in pack(v, what="x").tensors)
    assert bits(torch.ones(1)) == b"\x00\x00\x80?"


@pytest.mark.world_size(4)
def test_ranks_that_are_in_unequally_many_groups_make_them_all():
    """Stages 1 and 2 of four are in two pairs, 0 and 3 in one."""
    axis = comm.data_axis()
    routes = [Route(stage, stage + 1, "activation") for stage in range(3)]
    links = build_links(axis, routes, own_groups=True)
    carried = torch.tensor([1.0])
    if axis.rank > 0:
        receiver = Receiver(links[routes[axis.rank - 1]], CPU, name="in")
        links[routes[axis.rank - 1]].expect()
        parcel = receiver.receive(Address(axis.rank, 0))
        carried = parcel.blueprint.build(parcel.tensors) + 1
    if axis.rank < 3:
        Sender(links[routes[axis.rank]]).send(pack(carried, what="x"), Address(axis.rank + 1, 0))
        links[routes[axis.rank]].settle()
    assert carried.item() == axis.rank + 1


@pytest.mark.world_size(3)
def test_failures_are_told_to_everyone():
    axis = comm.data_axis()
    links = build_links(axis, [])
    assert links.failures(None) == []
    assert links.failures(f"rank {axis.rank}" if axis.rank else None) == ["rank 1", "rank 2"]
