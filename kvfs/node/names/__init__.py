"""Names of namespaces that are kept by their nodes (coherence `peer`): told, asked, confirmed."""
