"""The output of commands: exit codes, progress."""
