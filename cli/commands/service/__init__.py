"""A node as a service: up, down, status, doctor, mount."""
