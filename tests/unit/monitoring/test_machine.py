from __future__ import annotations

from pathlib import Path

from distributed_grid.core.process import CLOCK_TICKS_S
from distributed_grid.monitoring.machine import (
    MachineReader,
    ProcFile,
    parse_cpu_busy_s,
    parse_diskstats,
    parse_meminfo,
    parse_net_dev,
    real_interfaces,
    whole_disks,
)
from distributed_grid.monitoring.psi import parse_psi, read_psi

STAT = """\
cpu  300 0 100 9000 50 0 10 0 0 0
cpu0 200 10 50 4000 25 1 4 7 99 0
cpu3 100 0 50 5000 25 0 6 0 0 0
intr 1234 0 0
ctxt 99
"""
NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:    3193      29    0    0    0     0          0         0     3193      29    0    0    0     0       0      0
  eth0:337270070   18241    0    0    0     0          0         0   736076    9097    0    0    0     0       0      0
"""


def test_parsers_on_recorded_text() -> None:
    assert parse_cpu_busy_s(STAT) == {0: 265 / CLOCK_TICKS_S, 3: 156 / CLOCK_TICKS_S}
    assert parse_meminfo("MemTotal:   24105 kB\nHugePages_Total:  3\nodd\n") == {
        "MemTotal": 24105 * 1024,
        "HugePages_Total": 3,
    }
    assert parse_net_dev(NET) == {"lo": (3193, 3193), "eth0": (337270070, 736076)}
    disks = " 254  0 vda 50475 28275 1400474 58132 3943 28803 1861456 10467 0 52252 68784 3202 38 40352 184 6 0\n"
    assert parse_diskstats(disks) == {"vda": (1400474 * 512, 1861456 * 512)}
    assert parse_cpu_busy_s("") == parse_meminfo("") == parse_net_dev("") == parse_diskstats("") == {}


def test_what_is_stacked_counts_once(tmp_path: Path) -> None:
    (tmp_path / "class/net/eth0/device").mkdir(parents=True)
    (tmp_path / "class/net/br0").mkdir(parents=True)
    (tmp_path / "block/sda/device").mkdir(parents=True)
    (tmp_path / "block/dm-0").mkdir(parents=True)
    assert real_interfaces({"lo", "eth0", "br0"}, tmp_path) == {"eth0"}
    assert real_interfaces({"lo", "veth1"}, tmp_path) == {"veth1"}
    assert whole_disks({"sda", "sda1", "dm-0"}, tmp_path) == {"sda"}


def test_psi() -> None:
    text = "some avg10=5.31 avg60=2.54 avg300=0.10 total=34740656\nfull avg10=1.00 avg60=0.50 avg300=0.00 total=7\n"
    psi = parse_psi(text)
    assert psi is not None
    assert (psi.some_avg10, psi.some_avg60, psi.full_avg10, psi.some_total_us, psi.full_total_us) == (
        5.31, 2.54, 1.0, 34740656, 7,
    )  # fmt: skip
    only_some = parse_psi("some avg10=1.00 avg60=0.00 avg300=0.00 total=3\n")
    assert only_some is not None and only_some.full_total_us == 0
    assert parse_psi("") is None
    assert parse_psi("some avg10=what") is None


def test_psi_of_a_cgroup_and_of_a_kernel_without(tmp_path: Path) -> None:
    (tmp_path / "memory.pressure").write_text("some avg10=1.00 avg60=2.00 avg300=0.00 total=3\n")
    psi = read_psi("memory", tmp_path)
    assert psi is not None and psi.some_avg60 == 2.0
    assert read_psi("memory", proc=tmp_path) is None


def test_this_machine() -> None:
    reader = MachineReader()
    try:
        for _ in range(2):  # the second time from the open files
            assert reader.cpu_busy_s()
            assert reader.memory()["MemTotal"] > 0
            assert reader.load_1m() >= 0
            assert reader.counters().network_send_bytes >= 0
    finally:
        reader.close()


def test_a_file_that_is_not_there_reads_as_empty(tmp_path: Path) -> None:
    file = ProcFile(tmp_path / "later")
    assert file.read() == ""
    (tmp_path / "later").write_text("now")
    assert file.read() == "now"
    file.close()
