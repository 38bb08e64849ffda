"""From raw samples to tables and figures; the only user of pandas and matplotlib."""
