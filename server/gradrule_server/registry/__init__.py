"""Rules and programs by name, kept in SQLite."""
