"""Holding somebody else's process for a moment takes nothing from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from distributed_grid.agent.moving import ptrace
from distributed_grid.agent.moving.state import thread_states
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root]

LIMIT_S = 60.0
# Says of each real-time signal what it carried: its number and who sent it.
HEARS = (
    "import ctypes, os\n"
    "INFO = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(ctypes.c_int * 32), ctypes.c_void_p)\n"
    "@INFO\n"
    "def hear(number, info, _): os.write(1, f'{number} {info[0][4]}\\n'.encode())\n"
    "class Action(ctypes.Structure):\n"
    " _fields_ = [('handler', INFO), ('mask', ctypes.c_char * 128), ('flags', ctypes.c_int)]\n"
    "libc = ctypes.CDLL(None)\n"
    "assert libc.sigaction(10, ctypes.byref(Action(hear, b'', 4)), None) == 0\n"
    "os.write(1, b'ready\\n')\n"
    "while True: libc.pause()\n"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", HEARS], stdout=subprocess.PIPE) as made:
        assert made.stdout and made.stdout.readline() == b"ready\n"
        yield made
        made.kill()


@pytest.fixture
def on_its_way(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes hold of the child catches it on its way to a SIGUSR1."""
    real = ptrace.ptrace

    def seize(request: int, pid: int, address: int = 0, data: int = 0) -> None:
        real(request, pid, address, data)
        if request == ptrace.SEIZE:
            os.kill(pid, signal.SIGUSR1)
            wait_until(lambda: thread_states(pid) == {"t"}, LIMIT_S, "it to stop at the signal", every_s=0.001)

    monkeypatch.setattr(ptrace, "ptrace", seize)


def heard(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout
    return child.stdout.readline()


@pytest.mark.usefixtures("on_its_way")
def test_a_signal_on_its_way_arrives_as_it_was_sent(child: subprocess.Popen[bytes]) -> None:
    for _ in range(3):
        with ptrace.traced(child.pid) as stopped:
            assert not stopped
        assert heard(child) == f"{int(signal.SIGUSR1)} {os.getpid()}\n".encode()


@pytest.mark.usefixtures("on_its_way")
def test_a_signal_outlives_a_call_made_in_the_process(child: subprocess.Popen[bytes]) -> None:
    with ptrace.stopped(child.pid) as held:
        assert held.call(39) == child.pid  # getpid
        os.kill(child.pid, signal.SIGSTOP)
        assert held.call(39) == child.pid
    wait_until(lambda: thread_states(child.pid) == {"T"}, LIMIT_S, "the SIGSTOP to count")
    with ptrace.traced(child.pid) as stopped:
        assert stopped
    os.kill(child.pid, signal.SIGCONT)
    assert heard(child) == f"{int(signal.SIGUSR1)} {os.getpid()}\n".encode()
