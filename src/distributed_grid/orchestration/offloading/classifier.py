"""Which of the seven types a process is, by what it does: terminal, parents, libraries, load, command line."""

from __future__ import annotations

import os
import re

from distributed_grid.agent.inspect.candidates import TreeSample
from distributed_grid.agent.inspect.origin import SHELLS
from distributed_grid.orchestration.offloading.model import Classification, ProcessType

#: A terminal read within this time is being used.
READ_RECENTLY_S = 300.0
_EDITORS = frozenset({"vi", "vim", "nvim", "nano", "emacs", "micro", "helix", "hx", "pico", "joe", "less", "more",
                      "man"})  # fmt: skip
_REPLS = frozenset({"ipython", "ipython3", "bpython", "ptpython", "irb", "psql", "mysql", "sqlite3", "gdb", "pdb",
                    "redis-cli", "htop", "top", "btop", "nvtop"})  # fmt: skip
_INTERPRETERS = re.compile(r"(python|pypy|node|R|ruby|julia|perl|lua|scala|ghci)[\d.]*$")
_LOGINS = frozenset({"ssh", "sshd", "sshd-session", "mosh-client", "mosh-server", "telnet", "login", "tmux", "screen",
                     "zellij", "su", "sudo"})  # fmt: skip
#: Services of a system: never moved, however busy.
CRITICAL = frozenset(
    {"systemd", "init", "systemd-journal", "systemd-udevd", "systemd-logind", "systemd-network", "systemd-resolve",
     "systemd-timesyn", "dbus-daemon", "dbus-broker", "NetworkManager", "sshd", "cron", "crond", "atd", "rsyslogd",
     "syslog-ng", "auditd", "polkitd", "udisksd", "chronyd", "ntpd", "dockerd", "containerd", "containerd-shim",
     "kubelet", "crio", "podman", "libvirtd", "multipathd", "lvmetad", "rpcbind", "rpc.statd", "nfsd", "automount",
     "gssproxy", "sssd", "nscd", "slapd", "nvidia-persiste", "nv-hostengine", "agetty", "getty", "Xorg", "Xwayland",
     "gdm", "sddm", "lightdm", "gnome-shell", "slurmd", "slurmctld", "munged", "ceph-osd", "ceph-mon", "glusterd",
     "nvidia-cuda-mps", "fabricmanager", "nv-fabricmanage", "pipewire", "wireplumber"}
)  # fmt: skip
_SERVERS = frozenset({"nginx", "apache2", "httpd", "postgres", "mysqld", "mariadbd", "mongod", "redis-server", "etcd",
                      "memcached", "prometheus", "grafana", "grafana-server", "node_exporter", "gunicorn", "uwsgi",
                      "haproxy", "caddy", "jupyter-lab", "jupyter-noteboo", "jupyterhub"})  # fmt: skip
_FRAMEWORKS = frozenset({"torch", "tensorflow", "jax"})
_BOOSTERS = frozenset({"xgboost", "lightgbm", "catboost", "sklearn"})
_SERVING = frozenset({"vllm", "tensorrt", "onnxruntime", "llama", "ctranslate2"})
_TABLES = frozenset({"pandas", "polars", "pyarrow", "duckdb", "cudf"})
_TRAIN = re.compile(r"train|fine.?tun|\bfit\b|epoch|torchrun|torch\.distributed|accelerate|deepspeed|horovod|lightning",
                    re.I)  # fmt: skip
_INFER = re.compile(r"infer|predict|\bserv(e|er|ing)\b|generat|vllm|triton|text-generation|ollama|llama|evaluate",
                    re.I)  # fmt: skip
_DATA = re.compile(r"\betl\b|pre.?process|prepare.?data|transform|convert|ingest|extract|clean|spark|hadoop|dask|"
                   r"\bdata|ffmpeg|imagemagick|\bsort\b|pigz|\bxz\b|zstd|rsync|parquet|tokeni[sz]", re.I)  # fmt: skip
_SCHEDULERS = frozenset({"cron", "crond", "atd", "anacron", "slurmstepd", "pbs_mom", "sge_execd", "jenkins", "airflow"})
#: Cores, meanwhile, above which a process is working and not waiting.
_BUSY_CORES = 0.5
_STREAMING_BYTES_S = 20e6


def classify(tree: TreeSample) -> Classification:
    """Pure; the reasons are in words for the user."""
    return _interactive(tree) or _daemon(tree) or _work(tree)


def is_critical(tree: TreeSample) -> bool:
    """A part of the system itself."""
    return tree.pid == 1 or tree.comm in CRITICAL


def _program(tree: TreeSample) -> str:
    return os.path.basename(tree.argv[0]).lstrip("-") if tree.argv and tree.argv[0] else tree.comm  # noqa: PTH119


def _interactive(tree: TreeSample) -> Classification | None:
    program = _program(tree)
    found: tuple[str, float] | None = None
    if program in SHELLS and not _has_script(tree.argv):
        found = ("it is a shell", 0.95)
    elif program in _EDITORS or tree.comm in _EDITORS:
        found = ("it is an editor or a viewer", 0.95)
    elif (program in _REPLS and tree.stdin_tty) or (
        _INTERPRETERS.fullmatch(program) and not _has_script(tree.argv) and tree.tty
    ):
        found = ("it is a prompt that waits for a person", 0.95)
    elif program in _LOGINS or tree.comm in _LOGINS:
        found = ("it is a login or a terminal multiplexer", 0.95)
    elif (
        tree.tty_read_age_s is not None
        and tree.foreground
        and tree.stdin_tty
        and tree.tty_read_age_s < READ_RECENTLY_S
    ):
        found = (f"it read its terminal {tree.tty_read_age_s:.0f} s ago", 0.8)
    return Classification(ProcessType.INTERACTIVE, found[1], (found[0],)) if found else None


def _has_script(argv: tuple[str, ...]) -> bool:
    """Whether an interpreter was given something to run, rather than a person to talk to."""
    for word in argv[1:]:
        if word in ("-i", "--login", "-l"):
            continue
        if word in ("-c", "-m", "-e", "-f") or not word.startswith("-"):
            return True
    return False


def _daemon(tree: TreeSample) -> Classification | None:
    if tree.comm in CRITICAL or tree.pid == 1:
        return Classification(ProcessType.DAEMON, 0.99, ("it is a part of the system",))
    if tree.service:
        return Classification(ProcessType.DAEMON, 0.95, (f"it is the system's service {tree.service}",))
    if _program(tree) in _SERVERS or tree.comm in _SERVERS:
        return Classification(ProcessType.DAEMON, 0.9, (f"{_program(tree)} is a server",))
    serves_models = bool(_SERVING & set(tree.libraries)) or _INFER.search(_words(tree))
    if tree.listens and not tree.tty and not serves_models and tree.cpu_cores_1m < 0.05 and tree.age_s > 60:
        return Classification(ProcessType.DAEMON, 0.6, ("it waits for connections and does little else",))
    return None


def _words(tree: TreeSample) -> str:
    """The command line without directories: a program below /data or training/ need not do either."""
    return " ".join(word.rstrip("/").rpartition("/")[2] for word in tree.argv)


def _work(tree: TreeSample) -> Classification:
    command = _words(tree)
    libraries = set(tree.libraries)
    votes: dict[ProcessType, list[tuple[float, str]]] = {}

    def vote(kind: ProcessType, weight: float, reason: str) -> None:
        votes.setdefault(kind, []).append((weight, reason))

    frameworks = libraries & _FRAMEWORKS
    busy = max(tree.cpu_cores, tree.cpu_cores_1m) >= _BUSY_CORES or tree.gpu_utilization > 0.2
    if match := _TRAIN.search(command):
        vote(ProcessType.TRAINING, 0.5, f"its command line says {match.group(0)!r}")
    if match := _INFER.search(command):
        vote(ProcessType.INFERENCE, 0.45, f"its command line says {match.group(0)!r}")
    if match := _DATA.search(command):
        vote(ProcessType.DATA_PROCESSING, 0.4, f"its command line says {match.group(0)!r}")
    if frameworks:
        kind = ProcessType.INFERENCE if tree.listens else ProcessType.TRAINING
        vote(kind, 0.35 if busy or tree.gpu_memory_bytes else 0.25, f"it uses {', '.join(sorted(frameworks))}")
        if len(tree.pids) > 1 and busy and not tree.listens:
            vote(ProcessType.TRAINING, 0.05, "it has workers")
    if found := libraries & _BOOSTERS:
        vote(ProcessType.TRAINING, 0.25, f"it uses {', '.join(sorted(found))}")
    if found := libraries & _SERVING:
        vote(ProcessType.INFERENCE, 0.5, f"it uses {', '.join(sorted(found))}")
    if tree.listens and (frameworks or libraries & _SERVING):
        vote(ProcessType.INFERENCE, 0.2, "it answers connections")
    if found := libraries & _TABLES:
        vote(ProcessType.DATA_PROCESSING, 0.35, f"it uses {', '.join(sorted(found))}")
    moved = (tree.read_bytes + tree.write_bytes) / max(1.0, tree.age_s)
    if moved > _STREAMING_BYTES_S:
        vote(ProcessType.DATA_PROCESSING, 0.3, f"it reads and writes {moved / 1e6:.0f} MB a second")
    if busy:
        cores = max(tree.cpu_cores, tree.cpu_cores_1m)
        vote(ProcessType.COMPUTE_INTENSIVE, 0.3, f"it keeps {cores:.1f} cores busy")
    scheduler = next((name for name in tree.parents if name in _SCHEDULERS), "")
    if scheduler:
        vote(ProcessType.BATCH, 0.6, f"{scheduler} started it")
    if not votes:
        vote(ProcessType.BATCH, 0.3, "it runs without anybody at a terminal" if not tree.tty else "it just runs")
    kind = max(votes, key=lambda one: sum(weight for weight, _ in votes[one]))
    own = sum(weight for weight, _ in votes[kind])
    # Other signs make it less sure; they never turn it round.
    others = sum(weight for one, cast in votes.items() if one is not kind for weight, _ in cast)
    confidence = min(0.99, own + 0.2) * own / (own + 0.3 * others)
    return Classification(kind, round(confidence, 2), tuple(reason for _, reason in sorted(votes[kind], reverse=True)))
