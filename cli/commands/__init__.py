"""The commands, in the groups in which the help shows them."""
