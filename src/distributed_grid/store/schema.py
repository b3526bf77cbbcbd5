"""The journal's tables, as a list of migrations that is only ever added to."""

from __future__ import annotations

# "GRID": tells our files from any other SQLite file.
APPLICATION_ID = 0x47524944

# Every table keeps its rowid: recovery of a damaged file walks them by it.
_FIRST = (
    "CREATE TABLE kv (key TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL CHECK (json_valid(value))) STRICT",
    """CREATE TABLE tasks (
        id TEXT PRIMARY KEY NOT NULL, node TEXT NOT NULL, uid INTEGER NOT NULL,
        argv TEXT NOT NULL CHECK (json_valid(argv)), state TEXT NOT NULL,
        created REAL NOT NULL, started REAL, ended REAL, exit_code INTEGER,
        detail TEXT NOT NULL CHECK (json_valid(detail))) STRICT""",
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL, node TEXT NOT NULL,
        text TEXT NOT NULL, data TEXT NOT NULL CHECK (json_valid(data))) STRICT""",
    """CREATE TABLE moves (
        id TEXT PRIMARY KEY NOT NULL, state TEXT NOT NULL, node TEXT NOT NULL, pid INTEGER NOT NULL,
        start_ticks INTEGER NOT NULL, target TEXT NOT NULL, uid INTEGER NOT NULL,
        created REAL NOT NULL, updated REAL NOT NULL,
        data TEXT NOT NULL CHECK (json_valid(data))) STRICT""",
    """CREATE TABLE move_steps (
        move TEXT NOT NULL REFERENCES moves (id) ON DELETE CASCADE, seq INTEGER NOT NULL,
        state TEXT NOT NULL, at REAL NOT NULL, story TEXT NOT NULL, UNIQUE (move, seq)) STRICT""",
    """CREATE TABLE leases (
        id TEXT PRIMARY KEY NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL, node TEXT NOT NULL,
        holder TEXT NOT NULL, uid INTEGER NOT NULL, fence INTEGER NOT NULL,
        created REAL NOT NULL, expires REAL,
        data TEXT NOT NULL CHECK (json_valid(data))) STRICT""",
    """CREATE TABLE bandwidth (
        source TEXT NOT NULL, target TEXT NOT NULL, bytes_per_s REAL NOT NULL, at REAL NOT NULL,
        UNIQUE (source, target)) STRICT""",
    """CREATE TABLE blocks (
        id TEXT PRIMARY KEY NOT NULL, node TEXT NOT NULL, uid INTEGER NOT NULL, state TEXT NOT NULL,
        size_bytes INTEGER NOT NULL, created REAL NOT NULL,
        data TEXT NOT NULL CHECK (json_valid(data))) STRICT""",
)

# (version, statements). Each version is applied in one transaction and recorded in PRAGMA user_version and in kv.
MIGRATIONS: tuple[tuple[int, tuple[str, ...]], ...] = ((1, _FIRST),)

# Parents before children, so that salvaged rows can be put back in this order.
TABLES = ("kv", "tasks", "events", "moves", "move_steps", "leases", "bandwidth", "blocks")

# The kv keys that belong to the journal itself.
SCHEMA_KEY = "journal.schema"
RECOVERY_KEY = "journal.recovery"
