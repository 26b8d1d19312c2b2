"""Device code of trtspec: nothing here imports the rest of the package."""
