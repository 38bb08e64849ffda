"""Processes: the launcher, its nodes and their ranks, and what is checked before anything starts."""
