"""Kernel interfaces to files and filesystems, beside plain reads and writes."""
