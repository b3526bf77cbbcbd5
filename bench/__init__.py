"""The figures of docs/figures.md: one module per claim, each measured beside its peer in the same run."""
