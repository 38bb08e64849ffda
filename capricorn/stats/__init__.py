"""Figures computed from the raw samples of one run. Knows no table and no comparison."""
