"""Planners in virtual time: replayed over a series of expert loads."""
