"""Faults: how each kind is injected into a run, and how it is reverted."""
