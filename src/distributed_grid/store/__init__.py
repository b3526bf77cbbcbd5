"""What the daemon remembers: the SQLite journal, snapshots for people and scripts, the audit log."""
