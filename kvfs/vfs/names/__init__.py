"""Names beyond one transaction: changes that take more, and what other nodes have.

| module | subject |
|---|---|
| `all_names` | lists of this host's names and of those that other nodes told, as one |
| `name_search` | names that are absent here are looked for on other nodes |
| `settled_move` | a rename over a durable file waits until what replaces it is on disk |
| `visible_files` | files that have their names from the beginning: what a mount's programs make |
"""
