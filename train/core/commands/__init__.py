"""The commands of tasks: their flags, and runs that begin, go on and go further."""
