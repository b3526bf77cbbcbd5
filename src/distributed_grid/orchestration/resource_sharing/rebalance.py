"""How much memory the head reserves on workers while it is under pressure; each policy has its own goal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distributed_grid.core.resources import GB


def goal_of(policy: str, high: float, low: float) -> float:
    """The use that the head could come down to with what is reserved."""
    return {"conservative": high, "balanced": (high + low) / 2, "aggressive": low}[policy]


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """Pressure begins above `high` and is over below `low`; between the two everything stays as it is."""

    pressed: bool = False
    wanted_bytes: int = 0

    def seen(self, use: float, total_bytes: int, policy: str, high: float, low: float) -> MemoryWish:
        """The next wish, after the head was seen at this use; it only grows while the pressure lasts."""
        pressed = use > high or (self.pressed and use >= low)
        if not pressed:
            return MemoryWish()
        if use <= high:
            return replace(self, pressed=True)
        excess = (use - goal_of(policy, high, low)) * total_bytes
        whole = max(1, -int(-excess // GB)) * GB  # whole gigabytes, at least one
        return MemoryWish(True, max(self.wanted_bytes, whole))
