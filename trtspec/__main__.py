"""`python -m trtspec`."""

from trtspec.cli.main import main

main()
