"""From raw samples to tables and figures: the only user of matplotlib."""
