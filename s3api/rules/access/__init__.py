"""Access rules: policies, ACLs, ownership. Pure."""
