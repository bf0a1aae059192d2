"""Object stores of others: where cold data go, and where trees come from and go to."""
