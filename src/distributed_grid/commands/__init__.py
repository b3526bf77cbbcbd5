"""One file per command group: parse, call the daemon, print. No decisions here."""
