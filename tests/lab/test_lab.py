"""The test bed itself: its hosts are hosts, and closing a lab leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import leaks
from tests.lab.hosts import CHECKOUT, Host, HostSpec, Lab, sweep_leftovers
from tests.lab.init import cgroup_mounts
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.root

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=2"]


def ssh(source: Host, target: str, *command: str) -> subprocess.CompletedProcess[str]:
    return source.run([*SSH, target, *command], check=False)


def test_each_host_is_its_own(lab: Lab) -> None:
    assert [host.run(["hostname"]).stdout.strip() for host in lab.hosts.values()] == ["gpu-master", "gpu1", "gpu2"]
    boots = {host.read("/proc/sys/kernel/random/boot_id") for host in lab.hosts.values()}
    assert len(boots) == 3
    for path in ("/root/own", "/tmp/own", "/home/own", "/var/lib/own", "/dev/shm/own", "/run/own", "/etc/own"):
        lab["gpu1"].write(path, "gpu1's\n")
        assert lab["gpu1"].read(path) == "gpu1's\n"
        assert not lab["gpu2"].exists(path)
        assert not Path(path).exists()
    head = lab.head.run(["env"]).stdout.splitlines()
    assert "HOME=/root" in head and not any(line.startswith("PYTEST") for line in head)


def test_the_checkout_is_shared_and_read_only(lab: Lab) -> None:
    python = Path(sys.prefix) / "bin" / "python"
    said = lab["gpu1"].run([python, "-c", "import distributed_grid, click; print(distributed_grid.__file__)"]).stdout
    assert said.startswith(str(CHECKOUT))
    assert lab["gpu1"].run(["touch", CHECKOUT / "written"], check=False).returncode != 0
    assert not (CHECKOUT / "written").exists()


def test_ssh_reaches_every_host_with_strict_host_keys(lab: Lab) -> None:
    for name, host in lab.hosts.items():
        for target in (name, host.address):
            done = ssh(lab.head, target, "hostname")
            assert (done.returncode, done.stdout.strip()) == (0, name), done.stderr


def test_programs_have_pids_signals_and_codes_of_their_host(lab: Lab) -> None:
    host = lab["gpu2"]
    with host.popen(["sleep", "345.25"]) as sleeper:
        [pid] = wait_until(lambda: host.pids("sleep", "345.25"), 30, "the program on gpu2")
        assert lab["gpu1"].pids("345.25") == []
        host.kill(pid, signal.SIGTERM)
        assert sleeper.wait(30) == -signal.SIGTERM
    assert host.run(["sh", "-c", "exit 7"], check=False).returncode == 7
    with pytest.raises(AssertionError, match="did not end within"):
        host.run(["sh", "-c", "sleep 345.5; :"], timeout=0.5)
    wait_until(lambda: not host.pids("345.5"), 30, "the overdue program to be gone")


def test_a_user_has_a_home_and_a_login(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("gpu-master", "gpu1")
    lab["gpu1"].add_user("ada")
    assert lab["gpu1"].run(["id", "-un"], user="ada").stdout.strip() == "ada"
    done = ssh(lab.head, "ada@gpu1", "pwd")
    assert (done.returncode, done.stdout.strip()) == (0, "/home/ada"), done.stderr
    assert lab["gpu1"].run([sys.executable, "-c", "print(1)"], user="ada").stdout == "1\n"


def test_a_cut_link_heals(lab: Lab) -> None:
    lab.cut("gpu1")
    try:
        assert ssh(lab.head, "gpu1", "true").returncode == 255
        assert ssh(lab.head, "gpu2", "true").returncode == 0
        assert lab["gpu1"].run(["true"]).returncode == 0
    finally:
        lab.heal("gpu1")
    wait_until(lambda: ssh(lab.head, "gpu1", "true").returncode == 0, 60, "gpu1 to be reached again")


def test_power_off_ends_everything_but_the_disk(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("gpu-master", "gpu1")
    host = lab["gpu1"]
    host.write("/root/kept", "here")
    boot = host.read("/proc/sys/kernel/random/boot_id")
    with host.popen(["sleep", "346"]) as sleeper:
        wait_until(lambda: host.pids("sleep", "346"), 30, "the program on gpu1")
        host.power_off()
        assert sleeper.wait(30) != 0
    assert not host.is_on and host.processes() == {}
    with pytest.raises(RuntimeError, match="off"):
        host.run(["true"])
    assert ssh(lab.head, "gpu1", "true").returncode == 255
    host.power_on()
    assert host.read("/root/kept") == "here"
    assert host.read("/proc/sys/kernel/random/boot_id") != boot
    wait_until(lambda: ssh(lab.head, "gpu1", "true").returncode == 0, 60, "gpu1 to be reached again")


def test_a_shaped_link_is_slow(lab: Lab) -> None:
    """4 MiB over 16 Mbit/s take two seconds by arithmetic; a slow machine only makes it longer."""
    lab.shape("gpu1", 16)
    try:
        begun = time.monotonic()
        done = ssh(lab.head, "gpu1", "head -c 4194304 /dev/zero")
        assert len(done.stdout) == 4 << 20 and time.monotonic() - begun > 1.5
    finally:
        lab.shape("gpu1", None)
    queues = lab.head.run(["tc", "qdisc"]).stdout + lab["gpu1"].run(["tc", "qdisc"]).stdout
    assert "tbf" not in queues


def test_limits_are_seen_and_kept(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(HostSpec("gpu-master", cpus=0.5, memory_mb=100), HostSpec("gpu1"))
    host = lab.head
    hog = [sys.executable, str(CHECKOUT / "tests/programs/hog.py")]
    assert host.run([*hog, "300", "0"], check=False).returncode == -signal.SIGKILL
    assert lab["gpu1"].run([*hog, "20", "0"]).stdout == "10\n20\n"
    seen = host.run(["sh", "-c", "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us || cat /sys/fs/cgroup/cpu.max"]).stdout
    assert seen.split()[0] == "50000"


def test_a_host_without_the_shared_environment(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("gpu-master", HostSpec("gpu1", shared_venv=False))
    assert lab.head.exists(CHECKOUT / "pyproject.toml") and not lab["gpu1"].exists(CHECKOUT / "pyproject.toml")
    assert not lab["gpu1"].exists(Path(sys.prefix) / "bin" / "python")


def test_labs_coexist_and_closing_leaves_nothing(lab: Lab) -> None:
    before = leaks.snapshot(with_kept=True)
    with Lab() as other:
        other.head.write("/root/whose", "the other's")
        assert not lab.head.exists("/root/whose")
        assert ssh(other.head, "gpu1", "hostname").stdout.strip() == "gpu1"
        with other["gpu1"].popen(["sh", "-c", "setsid sleep 347 & sleep 347"]) as program:
            wait_until(lambda: len(other["gpu1"].pids("sleep")) > 1, 30, "its programs")
            other.close()
            assert program.wait(30) != 0
    assert leaks.left_since(before, with_kept=True) == []
    assert ssh(lab.head, "gpu1", "hostname").stdout.strip() == "gpu1"


def test_a_lab_ends_with_the_tests_that_made_it() -> None:
    program = (
        "import os, sys; from tests.lab.hosts import Lab; lab = Lab(names=('a', 'b')); "
        "print(lab.directory, flush=True); os.kill(os.getpid(), 9)"
    )
    mark = f"{leaks.MARK}-crash"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "GRID_TEST_RUN": mark}, cwd=CHECKOUT, text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    directory = Path(done.stdout.strip())
    wait_until(lambda: not _marked(mark), 30, "the crashed lab's processes to be gone")
    assert str(directory) not in Path("/proc/self/mountinfo").read_text()
    sweep_leftovers(directory.parent)  # as the next lab does
    assert not directory.exists()
    lab_id = "-".join(directory.name.split("-")[:3])
    assert not [found for point, _, _ in cgroup_mounts() for found in Path(point).rglob(lab_id)]


def _marked(mark: str) -> list[int]:
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and f"GRID_TEST_RUN={mark}".encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue
    return found

