"""The stops at which a worker's cores and memory are borrowed."""

from __future__ import annotations

import os
import time

from distributed_grid.demo.tour import Tour
from distributed_grid.monitoring.capacity import parse_cpu_list


def borrow(tour: Tour) -> None:
    tour.say("Two cores of a worker for the time of one command: it is pinned to the very cores that were lent.")
    began = time.monotonic()
    said = tour.grid("run-shared", "-r", "cpu", "-a", "2", "-n", "gpu1", "sh", "-c", "taskset -cp $$")
    tour.figure("grid run-shared, whole command", f"{(time.monotonic() - began) * 1000:.0f} ms")
    cores = parse_cpu_list(said.rpartition(": ")[2].strip())
    tour.check(0 < len(cores) <= 2, "it runs on its own cores only", said)
    tour.grid("boost", "request", "gpu-master", "memory", "1.0", "--source", "gpu2", "--duration", "600")
    boosts = tour.json("boost", "status")["boosts"]
    tour.check(len(boosts) == 1, "one GB of gpu2 is held for gpu-master", str(boosts))
    tour.grid("shared-status")
    tour.grid("boost", "release", str(boosts[0]["boost_id"])[:8])
    left = tour.json("boost", "status")["boosts"]
    tour.check(not left, "and given back", str(left))


def remember(tour: Tour) -> None:
    tour.say("A worker's memory as a place for bytes: they stay there until they are freed, whoever ends meanwhile.")
    data = os.urandom(8 << 20)
    (tour.work / "data.bin").write_bytes(data)
    tour.grid("memory", "store", "demo", "data.bin")
    tour.grid("memory", "list-objects")
    tour.grid("memory", "retrieve", "demo", "-o", "copy.bin")
    tour.check((tour.work / "copy.bin").read_bytes() == data, "8 MiB came back byte for byte")
