"""Tables, pages and traces as files."""
