"""Reads `resource_boosts.json`, the snapshot that the daemon writes; the truth is in the daemon's journal."""

from __future__ import annotations

import json
import time
from pathlib import Path

from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError
from distributed_grid.orchestration.resource_boost.model import ResourceBoost


class ResourceBoostPersistence:
    """For scripts that look without a daemon. Nothing is lost with the file: the daemon writes it anew."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else GridPaths.default().boosts

    def load_boosts(self) -> dict[str, ResourceBoost]:
        """Active boosts by id; none where there is no file. A damaged one raises."""
        try:
            data = json.loads(self.path.read_bytes())
            boosts = {key: ResourceBoost.from_view(view) for key, view in data["boosts"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GridError(
                "Persistence file corrupted",
                cause=f"{self.path}: {type(error).__name__}: {error}"[:300],
                hint=f"rm {self.path}: the daemon writes it anew, and no boost is lost",
                code="boosts-corrupted",
            ) from None
        now = time.time()
        return {key: one for key, one in boosts.items() if one.expires_at is None or one.expires_at > now}
