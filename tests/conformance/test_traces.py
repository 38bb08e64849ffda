"""What a process is said to have left: what nobody will end, and nothing that ends by itself."""

from __future__ import annotations

import socket
import threading

from capricorn.conformance.traces import Traces


def test_an_open_socket_is_left_until_it_is_closed() -> None:
    traces = Traces()
    with socket.socket():
        (found,) = traces.left(0.05)
        assert found.startswith("an open socket")
    assert traces.left(1.0) == []


def test_what_waits_for_the_garbage_collector_is_not_left() -> None:
    traces = Traces()
    cycle: list[object] = [socket.socket()]
    cycle.append(cycle)
    del cycle
    assert traces.left(1.0) == []


def test_a_thread_is_left_by_its_name_and_may_take_a_while_to_end() -> None:
    traces, end = Traces(), threading.Event()
    thread = threading.Thread(target=end.wait, name="writer")
    thread.start()
    (found,) = traces.left(0.05)
    assert "writer" in found
    threading.Timer(0.1, end.set).start()
    assert traces.left(10.0) == []
    thread.join()
