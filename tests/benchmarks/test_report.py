"""Tables go between their markers and nowhere else; the picture is well-formed; sockets are counted."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.__main__ import SUITES
from benchmarks.contenders import CONTENDERS, chosen
from benchmarks.report import Bar, Spread
from benchmarks.sockets import bytes_sent

from benchmarks import report


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\nkept\n<!-- end y -->\n")
    report.write("x", ["new", "lines"], page=page)
    report.write("x", ["newer"], page=page)
    assert page.read_text() == "a\n<!-- begin x -->\nnewer\n<!-- end x -->\nb\n<!-- begin y -->\nkept\n<!-- end y -->\n"
    with pytest.raises(SystemExit, match="no place for 'z'"):
        report.write("z", [], page=page)


@pytest.mark.parametrize("name", ["machine", *SUITES])
def test_every_suite_has_a_place_in_the_page(name: str) -> None:
    text = report.PAGE.read_text()
    assert text.count(f"<!-- begin {name} -->") == text.count(f"<!-- end {name} -->") == 1


def test_the_spread_is_between_the_tenths() -> None:
    assert Spread.of([float(n) for n in range(21)]) == (10.0, 2.0, 18.0)
    assert Spread.of([3.0]) == (3.0, 3.0, 3.0)


def test_the_picture_is_well_formed() -> None:
    bars = [Bar("theirs", Spread(1.5, 1.2, 2.0), False), Bar("ours", Spread(1.0, 0.9, 1.1), True)]
    root = ElementTree.fromstring(report.picture("title", bars))
    assert [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")] == [
        "title",
        "theirs",
        "1.50",
        "ours",
        "1.00",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count is Linux's")
def test_bytes_sent_are_those_that_were_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        with other:
            reader = threading.Thread(target=lambda: [other.recv(2**16) for _ in range(50)], daemon=True)
            reader.start()
            before = bytes_sent()
            client.sendall(b"x" * 100_000)
            client.shutdown(socket.SHUT_WR)
            reader.join(timeout=10)
            assert bytes_sent() - before == 100_000


def test_nobody_is_silently_absent() -> None:
    """All peers take part by default, whether or not they are installed here; the raw loop always does."""
    assert chosen([], quick=False, ranks=2) == list(CONTENDERS)
    assert chosen(["sheer stage 1"], quick=False, ranks=2) == ["raw loop, no communication", "Sheer stage 1"]
