"""One run over several machines: one of them conducts, and the others follow it over a connection each."""
