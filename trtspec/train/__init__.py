"""Training material for draft heads."""
