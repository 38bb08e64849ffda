"""Comparisons of systems: which runs are made, and what their samples come to, pair by pair."""
