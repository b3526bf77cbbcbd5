"""Real processes under real shims: started once, found again, ended, and nothing left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distributed_grid.agent import cgroup
from distributed_grid.agent.spool import TaskSpec, TaskStatus
from distributed_grid.agent.tasks import TaskKeeper
from distributed_grid.core.errors import GridError, NotFound, Refused, UsageError
from distributed_grid.core.process import ProcessId, process_id, read_stat
from tests.lab.waiting import wait_until

LIMIT_S = 60.0


@pytest.fixture
def spool(grid_home: Path) -> Path:
    return grid_home / "spool"


@pytest.fixture
async def keeper(spool: Path) -> AsyncIterator[TaskKeeper]:
    keeper = TaskKeeper(spool, "gpu1")
    yield keeper
    for status in keeper.list():
        await keeper.cancel(status.task_id, grace_s=0)
        keeper.remove(status.task_id)
    assert list(spool.iterdir()) == []


def shell(script: str, **fields: object) -> TaskSpec:
    return TaskSpec(["sh", "-c", script], **fields)  # type: ignore[arg-type]


async def run(keeper: TaskKeeper, spec: TaskSpec, task_id: str = "t") -> TaskStatus:
    keeper.start(task_id, spec)
    status = await keeper.wait(task_id, LIMIT_S)
    assert status.ended
    return status


def output(keeper: TaskKeeper, task_id: str = "t") -> str:
    return (keeper.spool / task_id / "stdout").read_text()


def wait_for_output(keeper: TaskKeeper, task_id: str, text: str) -> None:
    wait_until(lambda: text in output(keeper, task_id), LIMIT_S, f"{text!r} from {task_id}")


# ---------------------------------------------------------------- how it ends


async def test_exit_code_times_and_usage(keeper: TaskKeeper) -> None:
    status = await run(keeper, shell("exit 7"))
    assert (status.state, status.exit_code, status.signal, status.node) == ("exited", 7, None, "gpu1")
    assert 0 < status.started_at <= status.ended_at
    assert status.max_rss_bytes > 0
    assert TaskStatus.from_wire(json.loads(json.dumps(status.to_wire()))) == status


async def test_an_end_by_a_signal_is_shown_as_shells_do(keeper: TaskKeeper) -> None:
    status = await run(keeper, shell("kill -KILL $$"))
    assert (status.state, status.signal, status.exit_code) == ("exited", 9, 137)


async def test_output_of_both_streams_is_whole(keeper: TaskKeeper) -> None:
    status = await run(keeper, shell("head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2"))
    assert (status.stdout_bytes, status.stderr_bytes, status.exit_code) == (1_000_000, 1_000_000, 0)


@pytest.mark.parametrize(
    ("spec", "kind", "code"),
    [
        (TaskSpec(["no-such-command-here"]), "command-not-found", 127),
        (TaskSpec(["/etc/passwd"]), "command-denied", 126),
        (TaskSpec(["true"], cwd="/no/such/directory"), "directory-not-found", 126),
        (TaskSpec(["cat"], stdin="/no/such/file"), "stdin", 126),
        (TaskSpec(["true"], cores=[4095]), "cores", 126),
    ],
)
async def test_what_cannot_start_says_why(keeper: TaskKeeper, spec: TaskSpec, kind: str, code: int) -> None:
    status = keeper.start("t", spec)
    assert (status.state, status.exit_code) == ("failed", code)
    error = status.failure()
    assert isinstance(error, GridError) and error.code == kind and "gpu1" in error.message
    assert keeper.start("t", spec).error == status.error  # asked again, it is the same answer


async def test_scripts_that_cannot_run_say_why(keeper: TaskKeeper, tmp_path: Path) -> None:
    for name, text, kind in (
        ("a", "#!/no/such/interpreter\n", "interpreter-not-found"),
        ("b", "no first line\n", "not-a-program"),
    ):
        script = tmp_path / name
        script.write_text(text)
        script.chmod(0o755)
        assert (keeper.start(name, TaskSpec([str(script)])).error or {})["kind"] == kind


async def test_what_is_held_was_rehearsed_and_nothing_of_it_ran(keeper: TaskKeeper, tmp_path: Path) -> None:
    """After the word to go there is no way back, so whatever can make its exec fail has to show before."""
    script, binary = tmp_path / "script", tmp_path / "binary"
    script.write_text("#!/no/such/interpreter\n")
    binary.write_bytes(b"\x7fELF but not really")
    for path in (script, binary):
        path.chmod(0o755)
    for name, spec, kind in (
        ("path", TaskSpec(["sh", "-c", "true"], env={"PATH": "/nowhere"}, hold=True), "command-not-found"),
        ("denied", TaskSpec(["/etc/passwd"], hold=True), "command-denied"),
        ("script", TaskSpec([str(script)], hold=True), "interpreter-not-found"),
        ("binary", TaskSpec([str(binary)], hold=True), "not-a-program"),
        ("size", shell("true", env={"BIG": "x" * 200_000}, hold=True), "exec"),
        ("exe", TaskSpec(["sh", "-c", "true"], exe="/no/such/sh", hold=True), "command-not-found"),
    ):
        status = keeper.start(name, spec)
        assert (status.state, (status.error or {}).get("kind")) == ("failed", kind), name
    once = keeper.start("t", shell("echo ran", hold=True))
    assert once.state == "staged" and output(keeper) == "" and len(keeper.processes("t")) == 1
    keeper.go("t")
    assert (await keeper.wait("t", LIMIT_S)).exit_code == 0 and output(keeper) == "ran\n"


async def test_a_program_is_its_file_whatever_it_calls_itself(keeper: TaskKeeper) -> None:
    spec = TaskSpec(["my-own-name", "-c", "echo $0"], exe="/bin/sh", env={"PATH": "/nowhere"})
    assert (await run(keeper, spec)).exit_code == 0 and output(keeper) == "my-own-name\n"


def test_what_a_terminal_stops_a_program_with_stops_it_here_too(keeper: TaskKeeper) -> None:
    """No shell is above it, and so the kernel does not stop it for a SIGTSTP; its own handler is left to it."""
    keeper.start("t", shell("while :; do echo x; sleep 0.02; done"))
    keeper.start("own", shell("trap 'echo told' TSTP; echo x; while :; do sleep 0.02; done"))
    for task_id in ("t", "own"):
        wait_for_output(keeper, task_id, "x")
        assert keeper.signal(task_id, signal.SIGTSTP)

    def state(task_id: str) -> str:
        found = read_stat(keeper.status(task_id).pid)
        return found.state if found else ""

    wait_until(lambda: state("t") == "T", LIMIT_S, "it to be stopped")
    wait_for_output(keeper, "own", "told")
    assert state("own") != "T"
    keeper.signal("t", signal.SIGCONT)
    wait_until(lambda: state("t") != "T", LIMIT_S, "it to go on")


def test_wrong_requests_start_nothing(keeper: TaskKeeper) -> None:
    for task_id, spec, kind in (
        ("../x", TaskSpec(["true"]), UsageError),
        ("t", TaskSpec([]), UsageError),
        ("t", TaskSpec(["a\0b"]), UsageError),
        ("t", TaskSpec(["true"], user="no-such-user-here"), NotFound),
    ):
        with pytest.raises(kind):
            keeper.start(task_id, spec)
    with pytest.raises(UsageError):
        TaskSpec.from_wire({"argv": ["true"], "colour": "red"})
    with pytest.raises(NotFound):
        keeper.status("t")
    assert keeper.list() == []


# ---------------------------------------------------------------- what the program sees


async def test_the_program_gets_a_clean_world(keeper: TaskKeeper, tmp_path: Path) -> None:
    held = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(held, True)
    program = (
        "import os, signal, json; print(json.dumps(dict("
        "fds=sorted(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n)),"
        "masked=[int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],"
        "ignored=int([l for l in open('/proc/self/status') if l.startswith('SigIgn')][0].split()[1], 16),"
        "oom=open('/proc/self/oom_score_adj').read().strip(), cwd=os.getcwd(), umask=os.umask(0),"
        "leader=os.getsid(0) == os.getpid(), env=sorted(os.environ), word=os.environ['WORD'])))"
    )
    spec = TaskSpec([sys.executable, "-I", "-S", "-c", program], env={"WORD": "ünï"}, cwd=str(tmp_path), umask=0o027)
    try:
        # As from a Ray worker, which raises its score and is first to go when memory runs out.
        Path("/proc/self/oom_score_adj").write_text("500")
        status = await run(keeper, spec)
    finally:
        os.close(held)
        Path("/proc/self/oom_score_adj").write_text("0")
    assert status.exit_code == 0, (keeper.spool / "t" / "stderr").read_text()
    seen = json.loads(output(keeper))
    assert seen["fds"] == [0, 1, 2]
    assert (seen["masked"], seen["oom"], seen["cwd"]) == ([], "0", str(tmp_path))
    python_ignores = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    the_c_librarys = 1 << 31 | 1 << 32  # signals 32 and 33: nobody may set them, so they stay as they were inherited
    assert seen["ignored"] & ~python_ignores & ~the_c_librarys == 0
    assert (seen["umask"], seen["leader"], seen["word"]) == (0o027, True, "ünï")
    # None of the agent's variables; what Python itself adds does not count.
    basics = {"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER", "WORD"}
    assert set(seen["env"]) - {"LC_CTYPE"} == basics


async def test_a_broken_pipe_ends_the_writer_as_in_a_shell(keeper: TaskKeeper) -> None:
    status = await run(keeper, shell("yes | head -n 1; exit 3"))
    assert (status.exit_code, output(keeper)) == (3, "y\n")
    assert (keeper.spool / "t" / "stderr").read_text() == ""


async def test_stdin_from_a_file(keeper: TaskKeeper, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("words\n")
    await run(keeper, TaskSpec(["cat"], stdin=str(tmp_path / "in")))
    assert output(keeper) == "words\n"


async def test_stdin_from_a_fifo_until_its_writer_closes_it(keeper: TaskKeeper, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in")
    writer = os.open(tmp_path / "in", os.O_RDWR)
    try:
        assert keeper.start("t", TaskSpec(["cat"], stdin=str(tmp_path / "in"))).state == "running"
        os.write(writer, b"words\n")
        wait_for_output(keeper, "t", "words\n")
    finally:
        os.close(writer)
    assert (await keeper.wait("t", LIMIT_S)).exit_code == 0


async def test_children_are_pinned_to_the_cores(keeper: TaskKeeper) -> None:
    core = max(os.sched_getaffinity(0))
    await run(keeper, shell("sh -c 'grep Cpus_allowed_list /proc/self/status'", cores=[core]))
    assert output(keeper).split() == ["Cpus_allowed_list:", str(core)]


@pytest.mark.root
async def test_the_program_is_pid_2_of_its_own_namespace(keeper: TaskKeeper) -> None:
    status = await run(keeper, shell("echo $$ $PPID; read pid rest < /proc/self/stat; echo $pid; cat /proc/1/comm"))
    assert status.namespaced
    pid, parent, in_proc = output(keeper).split()[:3]
    assert (pid, parent, in_proc) == ("2", "1", "2")


@pytest.mark.root
async def test_as_another_user(keeper: TaskKeeper) -> None:
    status = await run(keeper, shell("id -un; id -G; echo $HOME; echo more >> /dev/stdout", user="nobody", cwd="/"))
    assert status.exit_code == 0 and status.user == "nobody"
    name, groups, home, _ = output(keeper).splitlines()
    assert (name, groups, home) == ("nobody", "65534", "/nonexistent")
    found = (keeper.spool / "t" / "stdout").stat()
    assert (found.st_uid, found.st_mode & 0o777) == (65534, 0o600)


@pytest.mark.root
async def test_a_limit_of_memory_holds(keeper: TaskKeeper) -> None:
    hog = [sys.executable, "-c", "data = b'x' * (400 << 20)"]
    status = await run(keeper, TaskSpec(hog, memory_limit_bytes=100 << 20))
    if not status.memory_limited:
        assert status.exit_code == 0
        pytest.skip("no memory control group to be had here")
    assert (status.signal, status.oom_killed) == (9, True)


@pytest.mark.root
async def test_a_group_of_version_2(keeper: TaskKeeper) -> None:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = [line.split()[4] for line in lines if " - cgroup2 " in line]
    if not mounts or any(one.controller == "" for one in cgroup.our_hierarchies()):
        pytest.skip("no version 2 beside version 1 here; alone, the other tests use it")
    base = Path(mounts[0])
    keeper._hierarchies = [cgroup.Hierarchy("", base)]
    keeper.start("t", shell("cat /proc/self/cgroup; exec sleep 600"))
    wait_for_output(keeper, "t", "0::/grid/t-")
    groups = list((base / "grid").glob("t-*"))
    assert any(keeper.status("t").pid in map(int, (one / "cgroup.procs").read_text().split()) for one in groups)
    await keeper.cancel("t", grace_s=0)
    keeper.remove("t")
    assert not any(one.exists() for one in groups)


async def test_secrets_are_gone_once_it_runs(keeper: TaskKeeper) -> None:
    keeper.start("t", shell("sleep 600", env={"TOKEN": "s3cr3t"}))
    wait_until(lambda: not (keeper.spool / "t" / "env.json").exists(), LIMIT_S, "the environment's removal")
    for path in (keeper.spool / "t").iterdir():
        assert b"s3cr3t" not in path.read_bytes() and path.stat().st_mode & 0o077 == 0, path
    assert "s3cr3t" not in repr(TaskSpec(["x"], env={"TOKEN": "s3cr3t"}))


# ---------------------------------------------------------------- once, whatever happens


def test_starting_twice_starts_once(keeper: TaskKeeper, tmp_path: Path) -> None:
    spec = shell(f"echo started >> {tmp_path}/count; sleep 600")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: TaskKeeper(keeper.spool, "gpu1").start("t", spec), range(8)))
    wait_until(lambda: keeper.status("t").state == "running", LIMIT_S, "the task")
    assert {status.pid for status in found} <= {0, keeper.status("t").pid}
    count = tmp_path / "count"
    wait_until(lambda: count.exists() and count.read_text(), LIMIT_S, "the program")
    assert count.read_text() == "started\n"


def test_a_start_cut_short_before_the_launch_is_made_good(
    keeper: TaskKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("distributed_grid.agent.tasks.launch", lambda task_dir: None)
        assert keeper.start("t", shell("sleep 600")).state == "prepared"
    assert [status.state for status in TaskKeeper(keeper.spool, "gpu1").adopt()] == ["prepared"]
    assert keeper.start("t", shell("sleep 600")).state == "running"


def test_a_task_of_an_earlier_boot_is_lost_and_never_started_again(
    keeper: TaskKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("distributed_grid.agent.tasks.launch", lambda task_dir: None)
        patch.setattr("distributed_grid.agent.tasks.boot_id", lambda: "another")
        keeper.start("t", shell("true"))
    assert keeper.start("t", shell("true")).state == "lost"
    assert not (keeper.spool / "t" / "shim.json").exists()


AGENT = """
import sys, time
from pathlib import Path
from distributed_grid.agent.tasks import TaskKeeper, TaskSpec
keeper = TaskKeeper(Path(sys.argv[1]), "gpu1")
status = keeper.start("t", TaskSpec(["sh", "-c", "echo before; while [ ! -e " + sys.argv[2] + " ]; do sleep 0.1; done; echo after; exit 5"]))
print(status.pid, flush=True)
time.sleep(600)
"""  # noqa: E501


def start_in_an_agent_that_dies(spool: Path, end: Path) -> int:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(spool), str(end)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert agent.stdout is not None
    with agent.stdout:
        pid = int(agent.stdout.readline())
    os.killpg(agent.pid, signal.SIGKILL)  # as Ray does: the whole group of a dead worker
    agent.wait()
    return pid


async def test_a_task_outlives_its_agent_and_is_found_again(keeper: TaskKeeper, tmp_path: Path) -> None:
    end = tmp_path / "end"
    pid = start_in_an_agent_that_dies(keeper.spool, end)
    [found] = keeper.adopt()
    assert (found.task_id, found.state, found.pid) == ("t", "running", pid)
    end.touch()
    status = await keeper.wait("t", LIMIT_S)
    assert (status.exit_code, output(keeper)) == (5, "before\nafter\n")


def test_adoption_sweeps_what_a_dead_agent_left(keeper: TaskKeeper) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (f".new-{dead.pid}-1", f".gone-{dead.pid}-2"):
        (keeper.spool / name).mkdir()
    assert keeper.adopt() == []
    assert list(keeper.spool.iterdir()) == []


def test_without_its_shim_a_task_is_lost(keeper: TaskKeeper) -> None:
    status = keeper.start("t", shell("sleep 600"))
    os.kill(status.shim_pid, signal.SIGKILL)
    wait_until(lambda: keeper.status("t").state == "lost", LIMIT_S, "the loss to be seen")
    assert keeper.start("t", shell("sleep 600")).state == "lost"


WITHOUT_NAMESPACE = """
import asyncio, os, signal, sys
from pathlib import Path
from distributed_grid.agent.tasks import TaskKeeper, TaskSpec
keeper = TaskKeeper(Path(sys.argv[1]), "gpu1")
async def main():
    status = keeper.start("a", TaskSpec(["sh", "-c", "echo $$; setsid sleep 600 & exit 4"]))
    assert not status.namespaced
    status = await keeper.wait("a", 60)
    assert (status.exit_code, status.lingering) == (4, True), status
    assert int((keeper.spool / "a" / "stdout").read_text()) == status.pid
    assert len(keeper.processes("a")) == 1
    await keeper.cancel("a", 0)
    keeper.remove("a")

    status = keeper.start("b", TaskSpec(["sleep", "600"]))
    os.kill(status.shim_pid, signal.SIGKILL)
    while keeper.status("b").state != "lost":
        await asyncio.sleep(0.02)
    assert keeper.processes("b") == [status.pid]
    await keeper.cancel("b", 0)
    keeper.remove("b")
asyncio.run(main())
"""


@pytest.mark.root
def test_without_the_right_to_a_namespace(spool: Path) -> None:
    """As for a plain user: root without CAP_SYS_ADMIN, so that this Python can be read wherever it is installed."""
    drop = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    subprocess.run([*drop, sys.executable, "-c", WITHOUT_NAMESPACE, str(spool)], check=True, timeout=120)


# ---------------------------------------------------------------- signals and the end


async def test_signals_reach_the_program(keeper: TaskKeeper) -> None:
    trap = "trap 'echo got usr1' USR1; trap 'echo got term; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    status = keeper.start("t", shell(trap))
    wait_for_output(keeper, "t", "ready")
    assert keeper.signal("t", signal.SIGUSR1)
    wait_for_output(keeper, "t", "got usr1")
    os.kill(status.shim_pid, signal.SIGTERM)  # handed on, and the shim lives
    status = await keeper.wait("t", LIMIT_S)
    assert (status.exit_code, output(keeper)) == (9, "ready\ngot usr1\ngot term\n")
    assert not keeper.signal("t", signal.SIGTERM)
    with pytest.raises(UsageError):
        keeper.signal("t", 4000)


async def test_what_the_program_leaves_behind_stays_and_is_the_tasks(keeper: TaskKeeper) -> None:
    status = await run(keeper, shell("sleep 600 & echo $!; exit 2"))
    assert (status.exit_code, status.lingering) == (2, True)
    [left] = keeper.processes("t")
    assert read_stat(left) is not None
    with pytest.raises(Refused):
        keeper.remove("t")
    await keeper.cancel("t", grace_s=LIMIT_S)
    assert keeper.processes("t") == [] and keeper.status("t").exit_code == 2


async def test_cancel_ends_the_whole_tree_even_if_it_will_not(keeper: TaskKeeper) -> None:
    stubborn = "trap '' TERM; (trap '' TERM; sleep 600) & echo ready; while :; do sleep 0.05; done"
    status = keeper.start("t", shell(stubborn))
    wait_for_output(keeper, "t", "ready")
    tree = [found for pid in keeper.processes("t") if (found := process_id(pid))]
    assert status.pid in {one.pid for one in tree} and len(tree) >= 2
    status = await keeper.cancel("t", grace_s=0.1)
    assert (status.state, status.exit_code) == ("exited", 137)
    assert not any(one.is_alive() for one in tree)


async def test_held_until_go(keeper: TaskKeeper) -> None:
    for task_id in ("a", "b"):
        status = keeper.start(task_id, shell("echo ran; exit 6", hold=True))
        assert status.state == "staged" and ProcessId(status.pid, status.start_ticks).is_alive()
    TaskKeeper(keeper.spool, "gpu1").go("a")
    ended = await keeper.wait("a", LIMIT_S)
    assert (ended.exit_code, output(keeper, "a")) == (6, "ran\n")
    ended = await keeper.cancel("b", grace_s=LIMIT_S)  # called off: it never ran
    assert (ended.signal, output(keeper, "b")) == (signal.SIGTERM, "")


async def test_nothing_is_left_after_remove(keeper: TaskKeeper) -> None:
    status = await run(keeper, shell("true", memory_limit_bytes=1 << 30))
    spec = json.loads((keeper.spool / "t" / "spec.json").read_text())
    groups = [Path(one) for one in spec["cgroups"]]
    if os.geteuid() == 0 and cgroup.our_hierarchies():
        assert groups
    keeper.remove("t")
    assert not (keeper.spool / "t").exists() and not any(group.exists() for group in groups)
    stat = read_stat(status.shim_pid)
    assert stat is None or stat.state == "Z"  # whether pid 1 has collected it by now is not ours
    with pytest.raises(NotFound):
        keeper.remove("t")
