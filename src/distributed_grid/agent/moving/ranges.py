"""Sets of addresses as sorted lists of `(start, end)`, end not included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Range = tuple[int, int]
PAGE_BYTES = 4096


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, joined, without overlap."""
    out: list[Range] = []
    last_start, last_end = -1, -1
    for start, end in sorted(ranges):
        if start <= last_end:
            last_end = max(last_end, end)
            continue
        if last_end > last_start:
            out.append((last_start, last_end))
        last_start, last_end = start, end
    if last_end > last_start:
        out.append((last_start, last_end))
    return out


def subtract(wanted: Iterable[Range], had: list[Range]) -> list[Range]:
    """What of `wanted` (sorted) is not in `had` (merged)."""
    out: list[Range] = []
    at = 0
    for start, end in wanted:
        while at < len(had) and had[at][1] <= start:
            at += 1
        k = at
        while start < end:
            if k >= len(had) or had[k][0] >= end:
                out.append((start, end))
                break
            if had[k][0] > start:
                out.append((start, had[k][0]))
            start = had[k][1]
            k += 1
    return out


def total_bytes(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def batches(ranges: Iterable[Range], limit_bytes: int, limit_pieces: int = 1024) -> Iterator[list[Range]]:
    """Cut and group so that each group holds at most that many bytes and pieces."""
    group: list[Range] = []
    held = 0
    for start, end in ranges:
        while start < end:
            size = min(end - start, limit_bytes - held)
            group.append((start, start + size))
            held += size
            start += size
            if held == limit_bytes or len(group) == limit_pieces:
                yield group
                group, held = [], 0
    if group:
        yield group
