"""Programs for those who work on the service; nothing of it is installed with it."""
