"""The documents keep up with the code: links, contract rows, error codes, decisions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from distributed_grid.cli import COMMANDS
from distributed_grid.core.errors import ExitCode
from distributed_grid.orchestration.offloading.model import TRANSITIONS
from distributed_grid.orchestration.resource_sharing.model import LeaseState

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
CONTRACT_ROWS = {"G": 6, "O": 29, "A": 34, "S": 25, "M": 21, "B": 24}


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            to = (page.parent / name).resolve() if name else page
            if not to.exists() or (anchor and anchor not in _anchors(to)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def _contract() -> dict[str, str]:
    """Each id of docs/contract.md and its test column."""
    rows = re.findall(r"^\| ([A-Z]\d+) \|.*\| ([^|]*) \|$", (DOCS / "contract.md").read_text(), flags=re.M)
    assert len(rows) == len(dict(rows)), "an id is there twice"
    return dict(rows)


def test_every_promise_has_its_row() -> None:
    wanted = {f"{letter}{number}" for letter, count in CONTRACT_ROWS.items() for number in range(1, count + 1)}
    assert set(_contract()) == wanted


def test_every_test_named_in_the_contract_exists() -> None:
    missing = []
    for row, column in _contract().items():
        named = re.findall(r"(tests/[\w/]+\.py)((?:::\w+)*)", column)
        if not named and column.strip() != "-":
            missing.append(f"{row}: {column!r} names no test")
        for path, parts in named:
            file = ROOT / path
            text = file.read_text() if file.is_file() else ""
            defined = set(re.findall(r"^\s*(?:async def|def|class) (\w+)", text, flags=re.M))
            if not text or set(parts.split("::")[1:]) - defined:
                missing.append(f"{row}: {path}{parts} is not there")
    assert not missing, "\n".join(missing)


def _texts(value: ast.expr) -> Iterator[str]:
    """The strings that an expression may be; `*…` for one whose beginning is known only at run time."""
    if isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)
    elif isinstance(value, ast.JoinedStr):
        if isinstance(last := value.values[-1], ast.Constant):
            yield f"*{last.value!s}"
    elif isinstance(value, ast.Constant):
        if isinstance(value.value, str):
            yield value.value
    elif isinstance(value, ast.Dict | ast.Tuple | ast.Call | ast.Attribute):
        for part in ast.iter_child_nodes(value):
            if isinstance(part, ast.expr):
                yield from _texts(part)


def _given(node: ast.AST, name: str) -> Iterator[ast.expr]:
    """What is given to arguments and variables of that name."""
    if isinstance(node, ast.keyword) and node.arg == name:
        yield node.value
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for one, value in zip(names, values if len(values) == len(names) else [node.value], strict=False):
                if isinstance(one, ast.Name) and one.id == name:
                    yield value


def _sources(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for folder in folders:
        for file in sorted((ROOT / "src" / "distributed_grid" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                yield str(file.relative_to(ROOT)), node


def test_every_error_code_is_explained() -> None:
    heads = re.findall(r"^### ([a-z0-9-]+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.M)
    assert heads == sorted(set(heads))
    missing: dict[str, str] = {}
    for where, node in _sources(""):
        if "/preflight" in where:
            continue  # what a plan finds is told in words, and is no error
        for value in _given(node, "code"):
            for code in _texts(value) if isinstance(value, ast.Constant | ast.IfExp) else ():
                if re.fullmatch(r"[a-z][a-z0-9-]*", code) and code not in heads:
                    missing.setdefault(code, where)
    listed = "\n".join(f"{code} ({where})" for code, where in sorted(missing.items()))
    assert not missing, f"docs/troubleshooting.md has no section for:\n{listed}"


def test_every_event_kind_is_documented() -> None:
    page = (DOCS / "scripting.md").read_text()
    kinds: set[str] = set()
    for _where, node in _sources("daemon"):
        called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if isinstance(node, ast.Call) and called in ("publish", "_publish", "tell", "_tell"):
            kinds.update(text for value in node.args[:2] for text in _texts(value))
        kinds.update(text for value in _given(node, "kind") for text in _texts(value))
    kinds = {kind for kind in kinds if re.fullmatch(r"\*?\.[a-z_]+|[a-z]+\.[a-z_]+", kind)}
    assert len(kinds) > 40
    rows = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", page, flags=re.M)
    assert rows == sorted(set(rows))
    assert not [kind for kind in sorted(kinds) if not any(row.endswith(kind.lstrip("*")) for row in rows)]
    suffixes = tuple(kind[1:] for kind in kinds if kind.startswith("*"))
    assert not [row for row in rows if row not in kinds and not row.endswith(suffixes)]


def test_every_state_is_documented() -> None:
    page = (DOCS / "states.md").read_text()
    states = {*(state.value for state in TRANSITIONS), *(state.value for state in LeaseState)}
    assert not [state for state in sorted(states) if f"| `{state}` |" not in page]


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert not [name for name in COMMANDS if f"`grid {name}" not in text]


def test_every_exit_code_is_documented() -> None:
    page = (DOCS / "scripting.md").read_text()
    assert not [code for code in ExitCode if f"| {code.value} | {code.name} |" not in page]


def test_index_of_decisions_is_complete() -> None:
    index = (DOCS / "adr" / "README.md").read_text()
    decisions = sorted(file.name for file in (DOCS / "adr").glob("[0-9]*.md"))
    assert decisions
    assert re.findall(r"\((\d{4}-[\w-]+\.md)\)", index) == decisions
