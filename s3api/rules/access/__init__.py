"""Who may do what: policies, ACLs, ownership. Pure."""
