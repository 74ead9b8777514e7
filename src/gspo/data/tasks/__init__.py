"""The built-in tasks: each module makes the rows of one."""
