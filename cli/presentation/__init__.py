"""What commands print: exit codes, progress."""
