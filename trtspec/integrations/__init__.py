"""Parts of trtspec for other runtimes: nothing here is needed to run trtspec's own engines."""
