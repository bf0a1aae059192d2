"""Requests, responses and their names, from the service model that ships with botocore."""
