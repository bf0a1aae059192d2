"""The nodes and tiers that have copies of a file: functions of a transaction."""
