"""Probes of this machine: its equipment and its abilities for loads."""
