from __future__ import annotations

from distributed_grid.monitoring.history import COARSE_POINTS, FINE_POINTS, HistoryPoint, NodeHistory


def point(at: float, value: float = 0.5) -> HistoryPoint:
    return HistoryPoint(at, value, value, 0.0, 1.0, 100.0)


def test_seconds_for_ten_minutes_and_tens_of_seconds_before() -> None:
    history = NodeHistory()
    for second in range(2000):
        history.add(point(1000.0 + second, value=1.0 if second < 1000 else 0.0))
    points = history.points()
    assert [p.at for p in points] == sorted(p.at for p in points)
    assert [p.at for p in points[-FINE_POINTS:]] == [2400.0 + i for i in range(600)]
    coarse = points[:-FINE_POINTS]
    assert len(coarse) == 140 and coarse[0].at == 1004.5 and coarse[0].cpu_pressure == 1.0
    assert [p.at for p in history.points(2990.0)] == [2990.0 + i for i in range(10)]


def test_memory_is_bounded_for_a_day_and_more() -> None:
    history = NodeHistory()
    for step in range(COARSE_POINTS + 100):
        history.add(point(step * 10.0))
    assert len(history.points()) <= COARSE_POINTS + FINE_POINTS
    assert history.points()[-1].at == (COARSE_POINTS + 99) * 10.0


def test_too_close_is_dropped_and_a_clock_set_back_goes_on() -> None:
    history = NodeHistory()
    for at in (100.0, 100.1, 101.0, 50.0, 51.0):
        history.add(point(at))
    assert sorted(p.at for p in history.points()) == [50.0, 51.0, 100.0, 101.0]
    assert NodeHistory().points() == []
