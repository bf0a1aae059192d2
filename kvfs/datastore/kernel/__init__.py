"""What the kernel is asked about files and filesystems beside plain reads and writes."""
