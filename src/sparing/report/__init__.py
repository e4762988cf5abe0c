"""Show results: terminal tables, JSON, an HTML page."""
