"""A store as a process beside its node has it open: what clients do with its data files, and by its
control socket."""
