"""One rank of the `links` benchmark: all-to-alls, beside a checkpoint stream to the next node if asked to.

python -m benchmarks.all_to_all_rank PARENT RANK NUM_RANKS FOLDER ADDRESS,... STREAM [LINKS]
STREAM is none, fifo or low.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from capricorn.emulation.route import Links, Route
from capricorn.process import die_with_parent
from capricorn.runtime.comm.wire import LOW_CLASS_TOS
from capricorn.trainer.exchange import Network
from capricorn.units import KIB

WIDTH, ROWS, COUNT, GAP_S = 512, 256, 30, 0.03
PORT, PIECE_BYTES = 7077, 64 * KIB


def _stream(address: str, route: Route | None, low: bool, done: threading.Event, sent: list[int]) -> None:
    """Sends as fast as it goes until told to end."""
    with socket.create_connection((address, PORT), 10) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 * KIB)
        if low:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_CLASS_TOS)
        payload = memoryview(bytes(PIECE_BYTES))
        while not done.is_set():
            for piece in route.pieces(payload, low=low) if route else (payload,):
                sock.sendall(piece)
            sent[0] += PIECE_BYTES


def _drain(listener: socket.socket) -> None:
    sock, _ = listener.accept()
    with sock:
        while sock.recv(1 << 20):
            continue


def main() -> None:
    """Prints the median duration of an all-to-all and the rate of the stream as JSON, on rank 0."""
    die_with_parent(int(sys.argv[1]))
    rank, num_ranks, folder, addresses, stream = int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    links = Links(Path(sys.argv[7]), has_low_class=stream == "low") if len(sys.argv) > 7 else None
    routes = links.routes(rank, range(num_ranks)) if links else {}
    network, hosts = Network(dist.group.WORLD, routes), addresses.split(",")
    listener, done, sent = socket.create_server((hosts[rank], PORT)), threading.Event(), [0]
    threads = [threading.Thread(target=_drain, args=(listener,), daemon=True)]
    threads[0].start()
    dist.barrier()
    after = (rank + 1) % num_ranks
    if stream != "none":
        arguments = (hosts[after], routes.get(after), stream == "low", done, sent)
        threads.append(threading.Thread(target=_stream, args=arguments, daemon=True))
        threads[1].start()
    rows, counts = torch.zeros(ROWS * num_ranks, WIDTH), [ROWS] * num_ranks
    received, durations = torch.empty_like(rows), []
    begin_s, before = time.perf_counter(), sent[0]
    for _ in range(COUNT):
        time.sleep(GAP_S)
        start_s = time.perf_counter()
        network.all_to_all(received, rows, counts, counts)
        durations.append(time.perf_counter() - start_s)
    rate = (sent[0] - before) / (time.perf_counter() - begin_s)
    if rank == 0:
        ideal_bytes = ROWS * (num_ranks - 1) * WIDTH * rows.element_size()
        print(json.dumps({"all_to_all_s": median(durations), "stream_bytes_per_s": rate, "bytes": ideal_bytes}))
    dist.barrier()
    done.set()


if __name__ == "__main__":
    main()
