"""`python -m bench [NAME…]`: runs the benches, prints each figure with its limit, exits 1 if one is not kept."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import bench
from bench._measure import Report


def names() -> list[str]:
    return sorted(found.name for found in pkgutil.iter_modules(bench.__path__) if not found.name.startswith("_"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the figures of docs/figures.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches to run (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the table goes to standard error")
    parser.add_argument("--list", action="store_true", help="print the names of the benches")
    options = parser.parse_args(argv)
    known = names()
    if options.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no bench named {', '.join(unknown)}; there are: {', '.join(known) or 'none'}")
    report = Report(out=sys.stderr if options.json else sys.stdout)
    report.head()
    for name in options.names or known:
        importlib.import_module(f"bench.{name}").run(report)
    if options.json:
        print(report.to_json())
    return 0 if report.kept else 1


if __name__ == "__main__":
    sys.exit(main())
