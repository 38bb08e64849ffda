"""The one MoE trainer that drives every system, and what launches it."""
