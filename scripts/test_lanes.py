"""Runs the suite as two pytest processes beside each other: most tests wait for clusters, not for a core.

    python scripts/test_lanes.py [PYTEST OPTIONS…]

The second lane holds what works with hosts made of namespaces and what kills things; the first all the rest.
Each lane's report is printed whole, one after the other. A few failed tests are then tried once more, alone:
what fails only while the lanes crowd each other is printed as such, what fails again fails the run. After an error
before or after a test its whole module is tried: the check for leaks is one, and the test it names need not be the one
that leaked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECOND = (
    "tests/lab",
    "tests/chaos",
    "tests/cluster/test_ssh_cluster.py",
    "tests/cluster/test_install.py",
    "tests/cluster/test_survival.py",
    "tests/cluster/test_users.py",
    "tests/cluster/test_demo.py",
    "tests/cluster/test_offload.py",
    "tests/cluster/test_offload_pipes.py",
    "tests/cluster/test_offload_lab.py",
    "tests/cluster/test_offload_files.py",
    "tests/cluster/test_offload_features_lab.py",
    "tests/cluster/test_lending_lab.py",
    "tests/cluster/test_memory_lab.py",
    "tests/cluster/test_memory_guide_lab.py",
    "tests/cluster/test_auto.py",
)
LIMIT_S = 3600
SECOND_TRIES = 20
END_LIMIT_S = 60


def lanes() -> list[list[str]]:
    second = [name for name in SECOND if (ROOT / name).exists()]
    return [["tests", *(f"--ignore={name}" for name in second)], second]


def failed_tests(cache: Path) -> list[str]:
    try:
        return sorted(json.loads((cache / "v" / "cache" / "lastfailed").read_text()))
    except FileNotFoundError:
        return []


def errors(results: Path) -> list[str]:
    """Modules in which something went wrong outside of a test's own lines, by what pytest left (JUnit's XML)."""
    cases = xml.parse(results).getroot().iter("testcase")
    return sorted({module_of(str(case.get("classname"))) for case in cases if case.find("error") is not None})


def module_of(name: str) -> str:
    """`tests.unit.test_x.TestY` -> `tests/unit/test_x.py`."""
    words = name.split(".")
    while len(words) > 1 and not (ROOT / "/".join(words)).with_suffix(".py").exists():
        words.pop()
    return "/".join(words) + ".py"


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int:
    try:
        return process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return 124


def once_more(tests: list[str], options: list[str]) -> int:
    print(f"===== {len(tests)} failed beside the other lane; once more, alone =====", *tests, sep="\n", flush=True)
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, *options]
    code = wait(subprocess.Popen(argv, cwd=ROOT), LIMIT_S / 4)
    print("===== they fail alone too =====" if code else "===== they pass alone: a test or a wait is too tight =====")
    return code


def main(options: list[str]) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        running = []
        for number, lane in enumerate(lanes(), start=1):
            report, cache, results = (Path(directory) / f"{kind}{number}" for kind in ("lane", "cache", "results"))
            argv = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", f"--junitxml={results}"]
            with report.open("wb") as out:
                process = subprocess.Popen(
                    [*argv, "--durations=15", *lane, *options], cwd=ROOT, stdout=out, stderr=out
                )
            running.append((report, cache, results, process))
        codes, failed, around = [], [], []
        for number, (report, cache, results, process) in enumerate(running, start=1):
            codes.append(wait(process, LIMIT_S - (time.monotonic() - began)))
            took_s = time.monotonic() - began
            print(f"===== lane {number} of {len(running)}: exit code {codes[-1]}, {took_s:.0f} s =====")
            print(report.read_text(errors="replace"), flush=True)
            failed += failed_tests(cache)
            try:
                around += errors(results)
            except (OSError, xml.ParseError) as error:
                print(f"===== no results of lane {number}: {error} =====", flush=True)
                codes.append(3)
    worst = max(abs(code) for code in codes)
    again = [*around, *(test for test in failed if test.split("::")[0] not in around)]
    if worst == 1 and 0 < len(again) <= SECOND_TRIES:
        return abs(once_more(again, options))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
