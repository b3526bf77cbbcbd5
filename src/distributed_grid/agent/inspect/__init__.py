"""Looking closely at processes: what a move would have to carry, which trees are worth one, what a target has."""
