"""Figures computed from the raw samples of one run. Knows no table, no comparison and no pandas."""
