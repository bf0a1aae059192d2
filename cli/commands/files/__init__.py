"""Files by their paths: ls, stat, put, get, rm, import, export, copies."""
