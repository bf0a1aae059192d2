"""The holder of a mount: it keeps a mount alive while no daemon serves it."""
