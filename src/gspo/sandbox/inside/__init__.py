"""What runs on the far side of the judge: the fork-server and the child. Imports the standard library only."""
