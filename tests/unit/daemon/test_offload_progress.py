"""How far a move under way is: bytes, their rate, what is left."""

from __future__ import annotations

from distributed_grid.daemon.offload import how_far


def test_bytes_rate_and_time_left() -> None:
    first = how_far({"state": "PLANNED", "step": "preparing gpu1"}, {}, 0.1)
    assert first == {"step": "preparing gpu1", "bytes": 0, "bytes_total": None, "rate_bytes_s": None, "eta_s": None}
    going = how_far({"state": "PLANNED", "step": "precopy", "bytes": 300, "bytes_total": 900}, first, 3.0)
    assert (going["bytes"], going["bytes_total"], going["rate_bytes_s"], going["eta_s"]) == (300, 900, 100.0, 6.0)
    last = how_far({"state": "COPIED", "step": "restoring"}, {**going, "bytes": 950}, 5.0)
    assert (last["bytes"], last["bytes_total"], last["eta_s"]) == (950, 950, 0.0)
