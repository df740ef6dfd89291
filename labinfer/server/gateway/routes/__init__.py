"""Handlers of the endpoints, grouped by API."""
