"""Measurements run by hand (`make bench`): every figure is a ratio of things measured in turn within one run."""
