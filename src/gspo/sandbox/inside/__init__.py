"""Code of the fork server and its children, on the other side of the judge. Imports the standard library only."""
