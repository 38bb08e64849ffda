"""When a chunk may leave: ops measured, spans opened and closed, and the gate that every chunk passes."""
