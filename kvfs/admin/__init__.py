"""Administration of a store or a cluster: check, repair, rebuild, import and export."""
