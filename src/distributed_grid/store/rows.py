"""What the tables with an id share: rows are frozen dataclasses, their fields the columns."""

from __future__ import annotations

import builtins
import dataclasses
import json
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from distributed_grid.core.errors import InternalError, NotFound, Refused, UsageError
from distributed_grid.store.database import Database

_CANDIDATES_SHOWN = 8
_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # json.dumps makes one for each call


class IdRow(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=IdRow)


class Table(Generic[R]):
    """One table whose primary key is `id` and which has a `created` column."""

    #: What a row is called in messages.
    noun: ClassVar[str]
    table: ClassVar[str]
    row_type: type[R]
    json_columns: ClassVar[frozenset[str]]

    def __init__(self, database: Database) -> None:
        self._database = database
        self._columns = tuple(field.name for field in dataclasses.fields(self.row_type))
        marks = ", ".join("?" for _ in self._columns)
        changes = ", ".join(f"{column}=excluded.{column}" for column in self._columns if column != "id")
        self._put = (
            f"INSERT INTO {self.table} ({', '.join(self._columns)}) VALUES ({marks}) "
            f"ON CONFLICT (id) DO UPDATE SET {changes}"
        )

    def put(self, row: R, *, durable: bool = True) -> R:
        """Write the whole row, new or not."""
        values = [self._encode(column, getattr(row, column)) for column in self._columns]
        self._database.write(self._put, values, durable=durable)
        return row

    def get(self, row_id: str) -> R:
        """The row of exactly that id, else NotFound."""
        row = self.find(row_id)
        if row is None:
            raise self._not_found(row_id)
        return row

    def find(self, row_id: str) -> R | None:
        rows = self._select("WHERE id = ?", [encode_text(row_id)])
        return rows[0] if rows else None

    def get_by_prefix(self, prefix: str, **equals: Any) -> R:
        """The row of that id, or the only one whose id begins so (and that matches `equals`)."""
        if not prefix:
            raise UsageError(f"the id of the {self.noun} is empty", code="usage")
        exact = self.list(id=prefix, **equals)
        if exact:
            return exact[0]
        where, values = self._where(equals)
        start = encode_text(prefix)
        rows = self._select(
            f"{where} {'AND' if where else 'WHERE'} substr(id, 1, length(?)) = ? ORDER BY id LIMIT ?",
            [*values, start, start, _CANDIDATES_SHOWN + 1],
        )
        if not rows:
            raise self._not_found(prefix)
        if len(rows) > 1:
            names = [row.id for row in rows[:_CANDIDATES_SHOWN]]
            more = ", …" if len(rows) > _CANDIDATES_SHOWN else ""
            raise Refused(
                f"more than one {self.noun} begins with {prefix}",
                cause=", ".join(names) + more,
                hint="give more of the id",
                code="ambiguous-id",
                candidates=names,
            )
        return rows[0]

    def list(self, *, limit: int | None = None, oldest_first: bool = False, **equals: Any) -> builtins.list[R]:
        """Rows whose columns equal the values given (None: not set; a list, tuple or set: one of), newest first."""
        where, values = self._where(equals)
        way = "ASC" if oldest_first else "DESC"
        return self._select(
            f"{where} ORDER BY created {way}, rowid {way} LIMIT ?", [*values, -1 if limit is None else limit]
        )

    def update(self, row_id: str, **changes: Any) -> R:
        """Change some columns of one row; the new row, or NotFound."""
        if not changes:
            return self.get(row_id)
        self._check(changes)
        sets = ", ".join(f"{column}=?" for column in changes)
        values = [self._encode(column, value) for column, value in changes.items()]
        with self._database.transaction():
            self.get(row_id)
            self._database.write(f"UPDATE {self.table} SET {sets} WHERE id = ?", [*values, row_id])
            return self.get(row_id)

    def delete(self, row_id: str) -> None:
        """Take the row away; fine if it is not there."""
        self._database.write(f"DELETE FROM {self.table} WHERE id = ?", [encode_text(row_id)])

    def _select(self, rest: str, values: builtins.list[Any]) -> builtins.list[R]:
        found = self._database.query(f"SELECT {', '.join(self._columns)} FROM {self.table} {rest}", values)
        return [self._decode(row) for row in found]

    def _where(self, equals: dict[str, Any]) -> tuple[str, builtins.list[Any]]:
        self._check(equals)
        terms: builtins.list[str] = []
        values: builtins.list[Any] = []
        for column, value in equals.items():
            if isinstance(value, list | tuple | set | frozenset):
                terms.append(f"{column} IN ({', '.join('?' for _ in value)})")
                values.extend(self._encode(column, item) for item in value)
            else:
                terms.append(f"{column} IS ?")
                values.append(self._encode(column, value))
        return ("WHERE " + " AND ".join(terms) if terms else ""), values

    def _check(self, columns: dict[str, Any]) -> None:
        unknown = set(columns) - set(self._columns)
        if unknown:
            raise InternalError(f"{self.table} has no column {', '.join(sorted(unknown))}")

    def _encode(self, column: str, value: Any) -> Any:
        if column in self.json_columns:
            return encode_json(value)
        return encode_text(value) if isinstance(value, str) else value

    def _decode(self, row: tuple[Any, ...]) -> R:
        pairs = zip(self._columns, row, strict=True)
        return self.row_type(
            **{name: json.loads(value) if name in self.json_columns else value for name, value in pairs}
        )

    def _not_found(self, row_id: str) -> NotFound:
        return NotFound(f"no {self.noun} {row_id}" if row_id else f"no {self.noun} named")


def encode_json(value: Any) -> str:
    try:
        return _to_json(value)
    except (TypeError, ValueError) as error:
        raise InternalError("the journal was given something that is not JSON", cause=str(error)) from error


def encode_text(value: str) -> str:
    """SQLite holds UTF-8 only; undecodable bytes of a path or command line become "?"."""
    return value.encode("utf-8", "replace").decode("utf-8")
