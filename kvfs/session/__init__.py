"""A store as a process beside its node has it open: transactions, threads, paths, bytes moved."""
