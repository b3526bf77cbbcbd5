"""Which bytes of an array an index means: a pure calculation, in elements, in C order."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distributed_grid.core.errors import UsageError


class BadIndex(UsageError, IndexError):
    """Past the end, or of a kind that only a local array knows."""

    code = "bad-index"


@dataclass(frozen=True, slots=True)
class Selection:
    """A regular part of an array, as runs of neighbouring elements with their beginnings in rising order."""

    counts: tuple[int, ...]  # elements along each axis of the array
    local: tuple[Any, ...]  # the index that makes the result out of an array of that shape
    length: int  # of each run
    _base: int
    _outer: tuple[tuple[int, int], ...]  # (how many, how far apart), of the axes outside of a run

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result: an axis of which one was taken is not there."""
        return tuple(count for count, one in zip(self.counts, self.local, strict=True) if isinstance(one, slice))

    @property
    def size(self) -> int:
        return math.prod(self.counts)

    @property
    def runs(self) -> int:
        return math.prod(count for count, _ in self._outer)

    def starts(self, first: int, last: int) -> NDArray[np.int64]:
        """Where the runs from `first` up to `last` begin."""
        left = np.arange(first, last, dtype=np.int64)
        found = np.full(last - first, self._base, dtype=np.int64)
        for count, apart in reversed(self._outer):
            left, here = np.divmod(left, count)
            found += here * apart
        return found


def select(key: Any, shape: tuple[int, ...]) -> Selection:
    """Of numpy's basic indexing: whole numbers, slices, `...`; also negative ones, and steps."""
    axes = [_axis(one, size) for one, size in zip(_one_per_axis(key, shape), shape, strict=True)]
    length, far, outer = 1, 1, len(axes)  # grow the run from the last axis on, as long as all lies in one piece
    whole = True
    strides: list[int] = []
    for size in reversed(shape):
        strides.insert(0, far)
        far *= size
    for number in reversed(range(len(axes))):
        _, step, count, _ = axes[number]
        if not whole or (step != 1 and count != 1):
            break
        length, outer, whole = length * count, number, count == shape[number]
    return Selection(
        counts=tuple(count for _, _, count, _ in axes),
        local=tuple(local for _, _, _, local in axes),
        length=length,
        _base=sum(start * stride for (start, _, _, _), stride in zip(axes, strides, strict=True)),
        _outer=tuple((axes[n][2], axes[n][1] * strides[n]) for n in range(outer)),
    )


def _one_per_axis(key: Any, shape: tuple[int, ...]) -> list[Any]:
    keys = list(key) if isinstance(key, tuple) else [key]
    places = [place for place, one in enumerate(keys) if one is Ellipsis]
    if len(places) > 1:
        raise BadIndex("an index has at most one '...'")
    if len(keys) - len(places) > len(shape):
        raise BadIndex(f"{len(keys) - len(places)} indices for an array with {len(shape)} axes")
    at = places[0] if places else len(keys)
    missing = len(shape) - (len(keys) - len(places))
    return [*keys[:at], *[slice(None)] * missing, *keys[at + len(places) :]]


def _axis(key: Any, size: int) -> tuple[int, int, int, Any]:
    """First, step (upwards), how many; and what is then to be done locally: take the one, or turn round."""
    if isinstance(key, slice):
        try:
            found = range(size)[key]
        except (TypeError, ValueError) as error:
            raise BadIndex(f"not a slice of an axis: {error}") from None
        if found.step < 0:
            return (found[-1] if found else 0), -found.step, len(found), slice(None, None, -1)
        return (found.start if found else 0), found.step, len(found), slice(None)
    if isinstance(key, bool | np.bool_ | np.ndarray) or not hasattr(key, "__index__"):
        raise BadIndex(
            f"a remote array can't be indexed by {_said(key)}",
            cause="it knows whole numbers, slices and '...'",
            hint="read a part of it first: numpy.asarray(array[…])[…]",
        )
    number = operator.index(key)
    if not -size <= number < size:
        raise BadIndex(f"index {number} is past the end of an axis with {size}")
    return number % size, 1, 1, 0


def _said(key: Any) -> str:
    return "None" if key is None else f"a {type(key).__name__}"
