"""What every layer may use: errors, settings, units, and parts that know no records of KVFS."""
