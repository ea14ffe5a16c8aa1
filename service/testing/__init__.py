"""For those who write subscribers: a database in memory that behaves like the real one where handlers can tell."""
