"""`grid demo`: a guided tour on this machine that leaves nothing behind."""

from __future__ import annotations

import signal
import time
from types import FrameType

import click


@click.command()
def command() -> None:
    """A guided tour on this machine: real commands, real figures, and nothing left behind.

    It has a state directory and a cluster of its own, so that it does not touch yours.
    """
    from distributed_grid.demo.stops import STOPS
    from distributed_grid.demo.tour import Tour

    before = signal.signal(signal.SIGTERM, _stop)
    tour = Tour()
    try:
        tour.say(f"Distributed Grid: a tour in {len(STOPS)} stops. Every command below is run as it is shown.")
        for number, stop in enumerate(STOPS, 1):
            tour.title(number, stop.title)
            stop.run(tour)
        tour.say(f"\nThe tour took {time.monotonic() - tour.began:.0f} s. Its figures, on this machine, now:")
        width = max(len(what) for what, _value in tour.figures)
        for what, value in tour.figures:
            tour.say(f"  {what.ljust(width)}  {value}")
    finally:
        tour.close()
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM as Ctrl-C, so that the clean-up runs."""
    raise KeyboardInterrupt
