"""Figures as pictures, drawn from raw samples."""
