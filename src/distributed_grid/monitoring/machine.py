"""The machine as a whole: cores, memory, swap, load, network and disks, from files kept open."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from distributed_grid.core.process import CLOCK_TICKS_S

_SECTOR_BYTES = 512  # /proc/diskstats counts in these, whatever the disk's own are


@dataclass(frozen=True, slots=True)
class Counters:
    """What only ever grows; rates are differences of two."""

    network_receive_bytes: int = 0
    network_send_bytes: int = 0
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0


class ProcFile:
    """A file of /proc read again and again; one that is not there reads as empty."""

    def __init__(self, path: Path, size_bytes: int = 65536) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._fd = -1

    def read(self) -> str:
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._fd, self._size_bytes, 0).decode(errors="replace")
        except OSError:
            self.close()
            return ""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse_cpu_busy_s(text: str) -> dict[int, float]:
    """Core -> seconds it was busy since boot, from /proc/stat; guests are within user and nice already."""
    found: dict[int, float] = {}
    for line in text.splitlines():
        if not line.startswith("cpu"):
            break
        words = line.split()
        if words[0] != "cpu" and len(words) >= 8:
            user, nice, system, _idle, _iowait, irq, softirq = (int(word) for word in words[1:8])
            found[int(words[0][3:])] = (user + nice + system + irq + softirq) / CLOCK_TICKS_S
    return found


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def parse_net_dev(text: str) -> dict[str, tuple[int, int]]:
    """Interface -> bytes received and sent."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        name, colon, rest = line.rpartition(":")
        words = rest.split()
        if colon and len(words) >= 9 and words[0].isdigit():
            found[name.strip()] = (int(words[0]), int(words[8]))
    return found


def parse_diskstats(text: str) -> dict[str, tuple[int, int]]:
    """Device -> bytes read and written."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 10:
            found[words[2]] = (int(words[5]) * _SECTOR_BYTES, int(words[9]) * _SECTOR_BYTES)
    return found


def real_interfaces(names: set[str], sys: Path = Path("/sys")) -> set[str]:
    """Those with hardware behind them, so that bridged bytes count once; in a namespace without any, all but lo."""
    hardware = {name for name in names if (sys / "class/net" / name / "device").exists()}
    return hardware or names - {"lo"}


def whole_disks(names: set[str], sys: Path = Path("/sys")) -> set[str]:
    """Disks with hardware behind them, not their partitions nor what is stacked on them."""
    return {name for name in names if (sys / "block" / name / "device").exists()}


class MachineReader:
    """Reads all of it; which interfaces and disks count is looked up again when their names change."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._stat = ProcFile(proc / "stat")
        self._meminfo = ProcFile(proc / "meminfo")
        self._loadavg = ProcFile(proc / "loadavg")
        self._net = ProcFile(proc / "self/net/dev")
        self._disks = ProcFile(proc / "diskstats")
        self._names: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._counted: tuple[set[str], set[str]] = (set(), set())

    def cpu_busy_s(self) -> dict[int, float]:
        return parse_cpu_busy_s(self._stat.read())

    def memory(self) -> dict[str, int]:
        return parse_meminfo(self._meminfo.read())

    def load_1m(self) -> float:
        words = self._loadavg.read().split()
        return float(words[0]) if words else 0.0

    def counters(self) -> Counters:
        net, disks = parse_net_dev(self._net.read()), parse_diskstats(self._disks.read())
        names = (frozenset(net), frozenset(disks))
        if names != self._names:
            self._names = names
            self._counted = (real_interfaces(set(net)), whole_disks(set(disks)))
        interfaces, devices = self._counted
        return Counters(
            network_receive_bytes=sum(net[name][0] for name in interfaces),
            network_send_bytes=sum(net[name][1] for name in interfaces),
            disk_read_bytes=sum(disks[name][0] for name in devices),
            disk_write_bytes=sum(disks[name][1] for name in devices),
        )

    def close(self) -> None:
        for file in (self._stat, self._meminfo, self._loadavg, self._net, self._disks):
            file.close()
