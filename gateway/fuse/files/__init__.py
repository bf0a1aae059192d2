"""The files that programs have open through a mount, and their inodes in the kernel."""
