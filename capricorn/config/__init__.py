"""What a run is: frozen, checked models of the scenario and its parts, and the names and files they come from."""
