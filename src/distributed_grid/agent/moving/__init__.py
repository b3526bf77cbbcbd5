"""Moving a running process tree live: `out` on the node it leaves, `into` on the node it comes to."""
