"""The base of every layer: errors, settings, units, and parts that know no records of KVFS."""
