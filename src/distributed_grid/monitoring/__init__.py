"""Measuring: what a node has, what it uses, which process uses it, and how that went over time."""
