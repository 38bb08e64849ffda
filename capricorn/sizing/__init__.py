"""How large a run is, by formula, before anything starts: memory, one iteration's work, and scale models."""
