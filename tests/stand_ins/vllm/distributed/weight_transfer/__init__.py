"""Of the names that TRL imports for a server."""
