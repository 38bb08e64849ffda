"""The memory store: one folder of slots per node on tmpfs, which outlives every worker."""
