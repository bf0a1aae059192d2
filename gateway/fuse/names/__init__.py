"""The names of a mount: its listings, and the directories that the kernel knows."""
