"""gridd: the one writer of state, and what commands, the dashboard and Python programs talk to."""
