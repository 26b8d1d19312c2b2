"""The decode step and what drives it: draft, verify, accept, commit."""
