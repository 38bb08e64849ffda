"""Planners replayed over a series of expert loads, in virtual time."""
