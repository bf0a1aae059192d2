"""Which nodes and tiers have copies of a file: functions of a transaction."""
