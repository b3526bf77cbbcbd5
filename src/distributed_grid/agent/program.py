# ruff: noqa: PTH104, PTH113, PTH118, PTH120
"""The user's program as the shim starts it: everything between fork and exec, and what can go wrong there.

Imported by the shim, which runs without our package: standard library only, no pathlib.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing costs a third of the start
    from typing import Any, NoReturn

NOT_FOUND, NOT_RUNNABLE = 127, 126  # what shells return

PTRACE_TRACEME, PTRACE_CONT, PTRACE_SETOPTIONS = 0, 7, 0x4200
PTRACE_O_TRACEEXEC, PTRACE_EVENT_EXEC, PTRACE_O_EXITKILL = 1 << 4, 4, 1 << 20

libc = ctypes.CDLL(None, use_errno=True)


class SetupError(Exception):
    """The program could not be started; `kind` is what the user's error is called."""

    def __init__(self, kind: str, message: str, code: int = NOT_RUNNABLE) -> None:
        super().__init__(message)
        self.kind, self.message, self.code = kind, message, code


def told(error: BaseException) -> bytes:
    """A line for the process that forked us: the arguments of a SetupError."""
    if not isinstance(error, SetupError):
        error = SetupError("setup", f"{type(error).__name__}: {error}")
    return json.dumps({"kind": error.kind, "message": error.message, "code": error.code}).encode() + b"\n"


def libc_call(name: str, *args: Any) -> None:
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def write_json(path: str, data: dict[str, Any], durable: bool = False) -> None:
    """Whole or not at all; `durable` also survives a power cut."""
    temporary = f"{path}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(data).encode())
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
    if durable:
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read_json(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        return dict(json.load(file))


def put(path: str, text: str) -> bool:
    """Write to a kernel file; False where we may not."""
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(fd, text.encode())
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def set_nice(value: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, value)
    except PermissionError:
        pass  # only root may go back down


class Program:
    """A command to start: `prepare` does all but the exec, `release` does that."""

    def __init__(self, spec: dict[str, Any], env: dict[str, str]) -> None:
        self.spec = spec
        self.env = env

    def prepare(self) -> int:
        self.status, child_status = os.pipe()
        child_go, self.go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(self.status)
            os.close(self.go)
            self._become_program(child_status, child_go)
        os.close(child_status)
        os.close(child_go)
        if self._read_status() != "ready":
            raise SetupError("start", "the program was ended before it could start")
        return pid

    def release(self) -> None:
        try:
            os.write(self.go, b"g")
        except BrokenPipeError:
            pass  # it was killed meanwhile, which is its exit
        os.close(self.go)
        self._read_status()  # the end of file is the exec
        os.close(self.status)

    def _read_status(self) -> str:
        line = b""
        while not line.endswith(b"\n") and (more := os.read(self.status, 4096)):
            line += more
        if line.startswith(b"{"):
            raise SetupError(**json.loads(line))
        return line.decode().strip()

    def _become_program(self, status: int, go: int) -> NoReturn:
        try:
            self._set_up()
            program = (self.spec["argv"], self.env, self.spec.get("exe", ""))
            if self.spec["hold"]:
                rehearse(*program)
            os.write(status, b"ready\n")
            if os.read(go, 1) != b"g":
                os._exit(1)
            run_command(*program)
        except BaseException as error:  # noqa: BLE001 - nothing may escape from a forked child
            os.write(status, told(error))
        os._exit(NOT_RUNNABLE)

    def _set_up(self) -> None:
        spec = self.spec
        os.setsid()
        for directory in spec["cgroups"]:
            put(f"{directory}/cgroup.procs", "0")
        put("/proc/self/oom_score_adj", "0")
        for name, limits in spec["rlimits"].items():
            try:
                resource.setrlimit(getattr(resource, name), tuple(limits))
            except (AttributeError, ValueError, OSError) as error:
                raise SetupError("rlimit", f"cannot set the limit {name} to {limits}: {error}") from None
        if spec["nice"]:
            set_nice(spec["nice"])
        if spec["cores"]:
            try:
                os.sched_setaffinity(0, spec["cores"])
            except OSError as error:
                raise SetupError("cores", f"cannot use the cores {spec['cores']}: {error.strerror}") from None
        # The task directory is ours alone: what lies in it is opened before we become the user.
        streams = [open_output(spec["stdout"]), open_output(spec["stderr"])]
        ours = os.path.dirname(spec["stdin"]) == os.path.dirname(spec["stdout"])
        stdin = open_input(spec["stdin"]) if ours else -1
        become_user(spec["uid"], spec["gid"], spec["groups"])
        os.umask(spec["umask"])
        enter_directory(spec["cwd"])
        for number, fd in enumerate([stdin if ours else open_input(spec["stdin"]), *streams]):
            os.dup2(fd, number)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become_user(uid: int, gid: int, groups: list[int]) -> None:
    if os.geteuid() == 0:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    elif uid != os.geteuid():
        raise SetupError("user", f"only root can start a process of uid {uid}")


def enter_directory(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:
        kind = "directory-denied" if error.errno == errno.EACCES else "directory-not-found"
        raise SetupError(kind, f"cannot enter the directory {path}: {error.strerror}") from None


def open_output(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)


def open_input(path: str) -> int:
    """Never waits: the writer of a FIFO opens it before the start (O_RDWR does not wait either)."""
    try:
        fd = os.open(path or "/dev/null", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise SetupError("stdin", f"cannot read {path}: {error.strerror}") from None
    os.set_blocking(fd, True)
    return fd


def rehearse(argv: list[str], env: dict[str, str], exe: str) -> None:
    """SetupError if the exec would fail: a child does it, and is killed before its first instruction.

    So nothing is left to go wrong after the word to go, when there is no way back. The kernel kills the child also if
    we die first (EXITKILL): a rehearsal never runs. Where tracing is forbidden there is none.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if libc.ptrace(PTRACE_TRACEME, 0, None, None) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                run_command(argv, env, exe)
        except BaseException as error:  # noqa: BLE001 - as above
            os.write(writing, told(error))
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    if os.WIFSTOPPED(status):
        libc.ptrace(PTRACE_SETOPTIONS, child, None, ctypes.c_void_p(PTRACE_O_EXITKILL | PTRACE_O_TRACEEXEC))
        passed_on = 0  # not its own SIGSTOP, but whatever comes after
        while os.WIFSTOPPED(status) and status >> 8 != signal.SIGTRAP | PTRACE_EVENT_EXEC << 8:
            libc.ptrace(PTRACE_CONT, child, None, ctypes.c_void_p(passed_on))
            _, status = os.waitpid(child, 0)
            passed_on = os.WSTOPSIG(status)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with open(reading, "rb") as file:
        line = file.read()
    if line:
        raise SetupError(**json.loads(line))
    if os.WIFSIGNALED(status):
        raise SetupError("start", "the program was ended before it could start")


def run_command(argv: list[str], env: dict[str, str], exe: str = "") -> NoReturn:
    """Like a shell: search PATH, and say what is wrong with what was found. `exe`: this file, whatever argv says."""
    name = exe or argv[0]
    folders = [""] if "/" in name else env.get("PATH", os.defpath).split(":")
    denied = ""
    for folder in folders:
        path = os.path.join(folder or ".", name) if "/" not in name else name
        try:
            os.execve(path, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.isfile(path):
                raise SetupError(
                    "interpreter-not-found", f"{path} is there, but the interpreter it names is not", NOT_FOUND
                ) from None
        except PermissionError:
            denied = denied or path
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                raise SetupError("not-a-program", f"{path} is neither a binary nor starts with #!") from None
            raise SetupError("exec", f"cannot run {path}: {error.strerror}") from None
    if denied:
        raise SetupError("command-denied", f"no permission to run {denied}")
    raise SetupError("command-not-found", f"there is no command {name!r}", NOT_FOUND)
