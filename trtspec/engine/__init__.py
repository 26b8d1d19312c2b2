"""Engines: graphs in executable form, and the memory they share."""
