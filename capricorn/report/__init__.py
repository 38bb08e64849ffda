"""Tables, documents and figures of what was measured; the only user of matplotlib."""
